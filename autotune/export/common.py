"""What the files of an export share: names, digests, and comments that no text of a user can break out of."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from typing import Final

from ppas_core.policy import PolicyParams

SCHEDULER_CLASS: Final = "ppas_core.vllm.scheduler.PpasScheduler"
KIND: Final = "ppas-autotune settings"
VERSION: Final = 1
SIGNATURE_FILE: Final = "provenance.intoto.jsonl"
"""The signature beside an export's files; see `autotune.signing`."""
SAFE_VALUE: Final = re.compile(r"[A-Za-z0-9_./=-]*")
"""What a value in an environment file may hold: it needs no quoting in any shell."""


def settings_digest(params: PolicyParams) -> str:
    """The digest that exported files carry: SHA-256 over the settings as compact JSON with sorted keys."""
    return sha256(json.dumps(params.to_dict(), sort_keys=True, separators=(",", ":")).encode())


def sha256(data: bytes) -> str:
    """The digest of `data` as it is written in files."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def open_regular(path: Path) -> BufferedReader:
    """`path` opened to read. Raises OSError, also for a pipe, which would make us wait, and a device, which may never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def file_digest(path: Path) -> str:
    """The digest of what `path` holds, however large. Raises OSError."""
    with open_regular(path) as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def header(lines: Iterable[str], params: PolicyParams) -> str:
    """`lines` as comments, and the digest of the settings."""
    return "".join(f"# {line}\n" for line in [*lines, f"settings {settings_digest(params)}"])


def one_line(text: str) -> str:
    """`text` without what could end a comment or hide in a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)
