"""What `ppas export --sign` does beside the export: look first, sign last."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ppas_core.errors import InvalidInput
from ppas_core.plain_json import load_json

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner


def prepare(key: Path, run: Path) -> CryptoSigner:
    """The key to sign with, once the run folder was found to be as recorded. Raises InvalidInput.

    An export writes the manifest anew, which would take in whatever was changed before, and the signature would vouch
    for it.
    """
    from autotune.signing.keys import load_signer
    from autotune.verify import verify

    signer = load_signer(key)
    if findings := verify(run).findings:
        first = findings[0]
        raise InvalidInput(
            f"{run}: is not as recorded ({first.what}: {first.path}), so nothing was written or signed; see "
            f"`ppas verify {run}`, and export without --sign first if what differs is meant"
        )
    return signer


def write(signer: CryptoSigner, export: Path, run: Path) -> Path:
    """Signs the export just made from this run, and returns the signature's file."""
    from autotune.runfolder import MANIFEST
    from autotune.signing.statement import sign_export

    return sign_export(export, load_json((run / MANIFEST).read_bytes())["files"], signer)
