"""What a signed export says, and whether it still holds: an in-toto statement in a DSSE envelope beside its files.

The statement names every file of the export by digest and, as one digest, what the run folder's manifest lists. Digests
alone are computed again by whoever rewrites a folder; the signature is not. Formats: in-toto Statement 1, DSSE 1.0.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from autotune.export.common import SIGNATURE_FILE, file_digest, open_regular
from autotune.provenance import now
from ppas_core import __version__
from ppas_core.errors import InvalidInput, PpasError
from ppas_core.files import write_atomically
from ppas_core.plain_json import load_json

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner, SSlibKey

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "urn:ppas-autotune:export-provenance:1"
_MAX_BYTES: Final = 4 * 1024 * 1024


class NotSigned(PpasError):
    """The export has no signature by the key. missing: whether it has none at all."""

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


@dataclass(frozen=True, slots=True)
class Signed:
    """What a key vouches for.

    export: the folder's name. key: the fingerprint. signed_at: when, as the signer said; UTC, ISO 8601. study, label: the
    study's name and the setting. files: digest (`sha256:…`) by file name. run_digest: what `manifest_digest` gave.
    """

    export: str
    key: str
    signed_at: str
    study: str
    label: str
    files: Mapping[str, str]
    run_digest: str


def manifest_digest(files: Mapping[str, str]) -> str:
    """One digest for what a run's manifest lists, without its exports, each of which has a signature of its own.

    SHA-256 over the list as compact JSON with sorted keys.
    """
    kept = {name: digest for name, digest in files.items() if not in_export(name)}
    return _sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode())


def in_export(name: str) -> bool:
    """Whether a file of a run folder, by its path in there, belongs to an export."""
    parts = PurePosixPath(name).parts
    return len(parts) > 1 and parts[0].startswith("export")


def is_inside(name: object) -> bool:
    """Whether `name` can be the path of a file in a folder, as a list of its files has it; lists come from anybody."""
    if not isinstance(name, str) or "\0" in name or PurePosixPath(name).is_absolute():
        return False
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return ".." not in PurePosixPath(name).parts


def sign_export(folder: Path, manifest: Mapping[str, str], signer: CryptoSigner) -> Path:
    """Signs the export in `folder`, made from the run with this manifest; returns the signature's file.

    Raises InvalidInput when there is no export, OSError.
    """
    from securesystemslib.dsse import Envelope

    settings_file = folder / "settings.json"
    try:
        settings = load_json(settings_file.read_bytes())
        study, label = settings["study"], settings["label"]
        made_from = {"name": study["name"], "createdAt": study["created_at"]}
    except (OSError, ValueError, TypeError, KeyError):
        raise InvalidInput(f"{folder}: holds no export to sign; `ppas export RUN` writes one") from None
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": _bare(file_digest(folder / name))} for name in sorted(files_of(folder))],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "signedAt": now(),
            "madeBy": {"ppas-autotune": __version__},
            "study": made_from,
            "label": label,
            "run": {"name": "manifest.json without exports", "digest": _bare(manifest_digest(manifest))},
        },
    }
    envelope = Envelope(json.dumps(statement, separators=(",", ":")).encode(), PAYLOAD_TYPE, {})
    envelope.sign(signer)
    file = folder / SIGNATURE_FILE
    write_atomically(file, json.dumps(envelope.to_dict(), separators=(",", ":")).encode() + b"\n")
    return file


def read_signed(folder: Path, key: SSlibKey) -> Signed:
    """What `key` signed in `folder`. Raises NotSigned: nothing in the file counts before the signature was checked."""
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import VerificationError

    file = folder / SIGNATURE_FILE
    try:
        with open_regular(file) as opened:
            data = opened.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise NotSigned("it is not signed; `ppas export RUN --sign KEY` signs", missing=True) from None
    except OSError as error:
        raise NotSigned(f"it cannot be read: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise NotSigned(f"it is larger than {_MAX_BYTES} bytes; sign again")
    try:
        envelope = Envelope.from_dict(load_json(data))
        payload_type, named = envelope.payload_type, ", ".join(envelope.signatures)
    except Exception:  # noqa: BLE001 - the library promises no kind of error for a file that is no envelope
        raise NotSigned("it is no signature of ours (a DSSE envelope); sign again") from None
    if not isinstance(payload_type, str):
        raise NotSigned("it is no signature of ours (a DSSE envelope); sign again")
    try:
        envelope.verify([key], 1)
    except UnicodeEncodeError:
        raise NotSigned("it is no signature of ours (a DSSE envelope); sign again") from None
    except VerificationError:
        if key.keyid not in envelope.signatures:
            raise NotSigned(f"it is signed by {named or 'nobody'}, not by {key.keyid}") from None
        raise NotSigned(f"the signature by {key.keyid} is false: what was signed has been changed") from None
    if payload_type != PAYLOAD_TYPE:
        raise NotSigned("the key signed something else than an export")
    try:
        return _parsed(load_json(envelope.payload), folder.name, key.keyid)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise NotSigned("the key signed something else than an export") from None


def files_of(folder: Path) -> Iterator[str]:
    """Every file in an export, by its path in there, but the signature and what a killed process left unfinished."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if (path.is_symlink() or not path.is_dir()) and path.suffix != ".tmp" and name != SIGNATURE_FILE:
            yield name


def _parsed(statement: dict[str, Any], export: str, key: str) -> Signed:
    predicate = statement["predicate"]
    if statement["_type"] != STATEMENT_TYPE or statement["predicateType"] != PREDICATE_TYPE:
        raise ValueError("another statement")
    files = {one["name"]: f"sha256:{one['digest']['sha256']}" for one in statement["subject"]}
    if not files or not all(is_inside(name) for name in files):
        raise ValueError("it names no files of an export")
    texts = (
        predicate["signedAt"],
        predicate["study"]["name"],
        predicate["label"],
        predicate["run"]["digest"]["sha256"],
    )
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("not text")
    signed_at, study, label, run = texts
    return Signed(export, key, signed_at, study, label, files, f"sha256:{run}")


def _bare(digest: str) -> dict[str, str]:
    return {"sha256": digest.removeprefix("sha256:")}


def _sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
