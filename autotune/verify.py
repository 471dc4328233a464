"""Whether a run folder or an export is still what was measured: the chain of digests, computed again.

The chain: the requests of each trace give its digest; identity.json and results.json name those digests; the export names
the digest of results.json, of its settings, and of every other file in it; manifest.json has the digest of every file.
With a key, each export must also be signed by it, as it is and for this run; see `autotune.signing`.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from autotune.export.common import KIND, SIGNATURE_FILE, file_digest, open_regular
from autotune.export.read import load_export
from autotune.runfolder import MANIFEST, NOT_IN_MANIFEST
from autotune.runversion import require_readable_run
from autotune.signing.statement import NotSigned, Signed, files_of, is_inside, manifest_digest, read_signed
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
        name = os.path.relpath(path, self.root)  # an export's run lies above it
        if not any((found.what, found.path) == (what, name) for found in self.findings):
            self.findings.append(Finding(what, name, reason))

    def result(self, kind: Literal["run", "export"]) -> Verification:
        return Verification(str(self.root), kind, self.checked, tuple(self.findings), tuple(self.signed))

    def same(self, path: Path, what: str, found: object, recorded: object) -> None:
        """A link of the chain: `found`, computed from the file, must be what was `recorded`."""
        self.checked += 1
        if found != recorded:
            self.add("broken", path, f"{what} is {found}, recorded was {recorded}")

    def listed(self, folder: Path, files: object, lister: Path) -> None:
        """Every file that `lister` lists, digests by names in `folder`, must be there with its digest."""
        if not isinstance(files, dict):
            self.add("broken", lister, "it lists no files")
            return
        for name, digest in files.items():
            if is_inside(name):
                self.file(folder / name, digest)
            else:
                self.add("broken", lister, f"it lists {name!r}, which is no file in its folder")

    def file(self, path: Path, recorded: object) -> None:
        """The file must be there, with the recorded digest."""
        self.checked += 1
        try:
            found = file_digest(path)
        except OSError:
            self.add("missing", path, "it was recorded, and cannot be read")
            return
        if found != recorded:
            self.add("changed", path, f"its digest is {found}, recorded was {recorded}")

    def json(self, path: Path) -> dict[str, Any]:
        """The object in the file; empty, with a finding, when there is none."""
        try:
            with open_regular(path) as file:
                data = load_json(file.read())
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
        check.same(path / "results.json", "what the files in traces/ hold", traces, _digests(results.get("traces")))
        for folder in sorted(path.glob("export*/")):
            if (folder / _SETTINGS).is_file():
                _check_export(check, folder, results_digest=file_digest(path / "results.json"), traces=traces)
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
    digest = file_digest(beside) if (path.parent / "identity.json").is_file() and beside.is_file() else None
    _check_export(check, path, results_digest=digest, traces=None)
    if key is not None:
        _check_signature(check, path, key, None if digest is None else path.parent / MANIFEST)
    return check.result("export")


def _manifest(check: _Check) -> None:
    file = check.root / MANIFEST
    recorded = check.json(file).get("files", {})
    check.listed(check.root, recorded, file)
    if not isinstance(recorded, dict):
        return
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
            with open_regular(file):  # a pipe would make us wait
                found.append(read_trace(file).digest)
        except (PpasError, OSError) as error:
            check.add("broken", file, str(error))
            found.append("unreadable")
    return found


def _profile(check: _Check, identity: dict[str, Any]) -> None:
    file = check.root / "profile.json"
    measured_on = identity.get("measured_on")
    if not isinstance(measured_on, dict) or "profile_digest" not in measured_on:
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
    check.listed(folder, settings.get("files") or {}, file)
    study = settings.get("study")
    if results_digest is not None:
        recorded = study.get("digest") if isinstance(study, dict) else None
        check.same(file, "the digest of results.json", results_digest, recorded)
    if traces is not None:
        check.same(file, "what the files in traces/ hold", traces, _digests(settings.get("traces")))


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


def _digests(traces: object) -> list[object]:
    """What a list of traces says of each one's digest."""
    listed = traces if isinstance(traces, list) else []
    return [entry.get("digest") if isinstance(entry, dict) else None for entry in listed]
