"""Whether a run folder or an export is still what was measured: the chain of digests, computed again.

The chain: the requests of each trace give its digest; identity.json and results.json name those digests; the export names
the digest of results.json, of its settings, and of every other file in it; manifest.json has the digest of every file.
With a key, each export must also be signed by it, as it is and for this run; see `autotune.signing`.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from autotune.export.common import KIND, SIGNATURE_FILE
from autotune.export.read import load_export
from autotune.runfolder import MANIFEST, NOT_IN_MANIFEST
from autotune.runversion import require_readable_run
from autotune.signing.statement import NotSigned, Signed, files_of, manifest_digest, read_signed
from ppas_core.errors import InvalidInput, PpasError
from ppas_core.plain_json import load_json
from ppas_core.sim.profile import load_profile
from traces.format import read_trace

if TYPE_CHECKING:
    from securesystemslib.signer import SSlibKey

_SETTINGS: Final = "settings.json"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that differs. what: changed, missing, added (nobody recorded it) or broken (a link of the chain)."""

    what: Literal["changed", "missing", "added", "broken"]
    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Verification:
    """kind: `run` or `export`. checked: digests computed again. findings: what differs; empty is good. signed: what the
    key signed, one for each export; empty without a key.
    """

    path: str
    kind: Literal["run", "export"]
    checked: int
    findings: tuple[Finding, ...]
    signed: tuple[Signed, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "ok": not self.findings}


def verify(path: Path, key: SSlibKey | None = None) -> Verification:
    """Computes the digests of the run folder or export at `path` again. Raises InvalidInput when it is neither.

    key: whose signature each export must have too, from `signing.keys.load_public_key`; None checks none.
    """
    if (path / "identity.json").is_file():
        return _run(path, key)
    if (path / _SETTINGS).is_file() and _is_export(path / _SETTINGS):
        return _export(path, key)
    raise InvalidInput(f"{path}: is neither a run folder nor an export; name runs/NAME, or its export/")


class _Check:
    """Collects what differs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checked = 0
        self.findings: list[Finding] = []
        self.signed: list[Signed] = []

    def add(self, what: Literal["changed", "missing", "added", "broken"], path: Path, reason: str) -> None:
        name = str(path.relative_to(self.root))
        if not any((found.what, found.path) == (what, name) for found in self.findings):
            self.findings.append(Finding(what, name, reason))

    def result(self, kind: Literal["run", "export"]) -> Verification:
        return Verification(str(self.root), kind, self.checked, tuple(self.findings), tuple(self.signed))

    def same(self, path: Path, what: str, found: object, recorded: object) -> None:
        """A link of the chain: `found`, computed from the file, must be what was `recorded`."""
        self.checked += 1
        if found != recorded:
            self.add("broken", path, f"{what} is {found}, recorded was {recorded}")

    def file(self, path: Path, recorded: object) -> None:
        """The file must be there, with the recorded digest."""
        self.checked += 1
        try:
            found = _digest(path)
        except OSError:
            self.add("missing", path, "it was recorded, and cannot be read")
            return
        if found != recorded:
            self.add("changed", path, f"its digest is {found}, recorded was {recorded}")

    def json(self, path: Path) -> dict[str, Any]:
        """The object in the file; empty, with a finding, when there is none."""
        try:
            data = load_json(path.read_bytes())
        except (OSError, ValueError) as error:
            self.add("broken", path, f"it cannot be read: {error}")
            return {}
        if not isinstance(data, dict):
            self.add("broken", path, "it holds no JSON object")
            return {}
        return data


def _run(path: Path, key: SSlibKey | None) -> Verification:
    require_readable_run(path)
    check = _Check(path)
    _manifest(check)
    identity = check.json(path / "identity.json")
    traces = _traces(check)
    check.same(path / "identity.json", "what the files in traces/ hold", traces, identity.get("traces"))
    if (path / "profile.json").is_file():
        _profile(check, identity)
    if (path / "results.json").is_file():
        results = check.json(path / "results.json")
        named = [entry.get("digest") for entry in results.get("traces", [])]
        check.same(path / "results.json", "what the files in traces/ hold", traces, named)
        for folder in sorted(path.glob("export*/")):
            if (folder / _SETTINGS).is_file():
                _check_export(check, folder, results_digest=_digest(path / "results.json"), traces=traces)
    if key is not None:
        exports = sorted(path.glob("export*/"))
        if not exports:
            check.add("missing", path / "export", "there is no export, so nothing is signed; `ppas export` writes one")
        for folder in exports:
            _check_signature(check, folder, key, path / MANIFEST)
    return check.result("run")


def _export(path: Path, key: SSlibKey | None) -> Verification:
    check = _Check(path)
    beside = path.parent / "results.json"
    digest = _digest(beside) if (path.parent / "identity.json").is_file() and beside.is_file() else None
    _check_export(check, path, results_digest=digest, traces=None)
    if key is not None:
        _check_signature(check, path, key, None if digest is None else path.parent / MANIFEST)
    return check.result("export")


def _manifest(check: _Check) -> None:
    file = check.root / MANIFEST
    recorded = check.json(file).get("files", {})
    if not isinstance(recorded, dict):
        check.add("broken", file, "it lists no files")
        return
    for name, digest in recorded.items():
        check.file(check.root / name, digest)
    for path in sorted(check.root.rglob("*")):
        if not path.is_file() or path.suffix == ".tmp" or path.name in NOT_IN_MANIFEST:
            continue
        if str(path.relative_to(check.root)) not in recorded:
            check.add("added", path, "it came after the manifest, which `ppas report` and `ppas export` write anew")


def _traces(check: _Check) -> list[str]:
    """Digests of the traces' requests, in the order of the files."""
    found = []
    for file in sorted((check.root / "traces").glob("*.jsonl")):
        try:
            found.append(read_trace(file).digest)
        except (PpasError, OSError) as error:
            check.add("broken", file, str(error))
            found.append("unreadable")
    return found


def _profile(check: _Check, identity: dict[str, Any]) -> None:
    file = check.root / "profile.json"
    measured_on = identity.get("measured_on", {})
    if "profile_digest" not in measured_on:
        return
    try:
        check.same(file, "the profile's digest", load_profile(str(file)).digest, measured_on["profile_digest"])
    except PpasError as error:
        check.add("broken", file, str(error))


def _check_export(check: _Check, folder: Path, *, results_digest: str | None, traces: list[str] | None) -> None:
    file = folder / _SETTINGS
    settings = check.json(file)
    check.checked += 1
    try:
        load_export(file)
    except PpasError as error:
        check.add("broken", file, str(error))
    for name, digest in dict(settings.get("files") or {}).items():
        check.file(folder / name, digest)
    study = settings.get("study") or {}
    if results_digest is not None:
        check.same(file, "the digest of results.json", results_digest, study.get("digest"))
    if traces is not None:
        named = [entry.get("digest") for entry in settings.get("traces") or []]
        check.same(file, "what the files in traces/ hold", traces, named)


def _check_signature(check: _Check, folder: Path, key: SSlibKey, manifest: Path | None) -> None:
    """manifest: the file of the run beside; None where the export was taken away from its run."""
    check.checked += 1
    try:
        signed = read_signed(folder, key)
    except NotSigned as error:
        check.add("missing" if error.missing else "broken", folder / SIGNATURE_FILE, str(error))
        return
    check.signed.append(signed)
    for name, digest in signed.files.items():
        check.file(folder / name, digest)
    for name in sorted(set(files_of(folder)) - set(signed.files)):
        check.add("added", folder / name, "it was not there when the export was signed")
    if manifest is not None:
        listed = check.json(manifest).get("files")
        found = manifest_digest(listed) if isinstance(listed, dict) else None
        check.same(manifest, "the digest of what it lists, as signed with the export,", found, signed.run_digest)


def _is_export(file: Path) -> bool:
    try:
        data = load_json(file.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and data.get("kind") == KIND


def _digest(path: Path) -> str:
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
