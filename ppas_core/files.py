"""How files are written so that a reader never meets half of one."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

_NAME_KEPT = 40
"""Characters of a file's name in its temporary name, which must stay within what a file system allows."""


def write_atomically(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Writes `data`, at once or part by part, to `path`, whole or not at all, and makes its folder when missing.

    A link is written through: it stays, and what it points to is replaced. Raises OSError: IsADirectoryError for a
    folder and FileExistsError for a device, pipe or socket, none of which is touched.
    """
    target = _regular(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:_NAME_KEPT]}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _regular(path: Path) -> Path:
    """Where `path` leads, links followed; raises OSError where something other than a regular file is there."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return Path(os.path.realpath(path))
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder; name a file in it", str(path))
    if not stat.S_ISREG(mode):
        raise FileExistsError(errno.EEXIST, "is a device, pipe or socket; name a regular file", str(path))
    return Path(os.path.realpath(path))
