"""Whether a path leads to a file that can be read more than once, and to its end."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Final

from ppas_core.errors import InvalidInput

_KINDS: Final = {
    stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}  # fmt: skip


def require_file(path: Path) -> None:
    """Raises InvalidInput for a pipe, device, socket or folder; what is not there at all is left to the reader."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except (OSError, ValueError):
        return
    if kind != stat.S_IFREG:
        found = _KINDS.get(kind, "no file")
        raise InvalidInput(
            f"{path}: is {found}; allowed: a file, since runs are read more than once: save it as one first"
        )
