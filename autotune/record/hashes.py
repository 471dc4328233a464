"""How a prompt becomes hashes that tell which prompts begin alike, and nothing else. Standard library alone.

Every hash is keyed with 32 random bytes, so that nobody without them can try out texts, and covers everything before
it, so that equal hashes mean equal beginnings. 63 bits: in ten million blocks the chance of one false match is 1 in 100,000.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ppas_core.errors import InvalidInput

SALT_BYTES: Final = 32
CHUNK_BYTES: Final = 64
"""Text is compared in pieces of this many bytes of UTF-8, about a block of 16 tokens of English."""
_LINK_BYTES: Final = 16
_ODD: Final = 0x9E3779B97F4A7C15
_MASK: Final = 2**63 - 1


def new_salt() -> bytes:
    """A salt that no other recording has."""
    return secrets.token_bytes(SALT_BYTES)


def kept_salt(path: Path) -> bytes:
    """The salt in the file `path`, which is made, readable by its owner alone, when it is not there.

    Recordings with the same salt can be joined; whoever has the salt can test whether a known text is in them. Raises
    InvalidInput for a file that others may read or that holds no salt.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _read_salt(path)
    salt = new_salt()
    with os.fdopen(descriptor, "w") as file:
        file.write(salt.hex() + "\n")
    return salt


def _read_salt(path: Path) -> bytes:
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise InvalidInput(f"{path}: a salt is for its owner alone; take it from others: chmod 600 {path}")
        salt = bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: is no salt file: {error}; name a new file") from None
    if len(salt) != SALT_BYTES:
        raise InvalidInput(f"{path}: holds a salt of {len(salt)} bytes; allowed: {SALT_BYTES}. Name a new file")
    return salt


def block_hashes(ids: Sequence[int], size: int, salt: bytes, scope: bytes) -> list[int]:
    """One hash per block of `size` token ids, the last block partial.

    scope: what else must be equal for a prefix to be shared, such as the model. Raises ValueError for ids that are none.
    """
    try:
        packed = array("I", ids)
    except (TypeError, OverflowError):
        raise ValueError("not a list of token ids") from None
    return _chain(packed.tobytes(), size * packed.itemsize, salt, b"ids\0" + scope)


def chunk_hashes(text: bytes, salt: bytes, scope: bytes) -> list[int]:
    """One hash per CHUNK_BYTES of `text`, the last chunk partial."""
    return _chain(text, CHUNK_BYTES, salt, b"text\0" + scope)


def mixed(number: int, place: int) -> int:
    """A hash of a hash and a place in 63 bits; as `number` is random already, turning its bits by place is enough."""
    return number ^ (place * _ODD & _MASK)


def _chain(data: bytes, step: int, salt: bytes, start: bytes) -> list[int]:
    link = hashlib.blake2b(start, key=salt, digest_size=_LINK_BYTES).digest()
    hashes = []
    for place in range(0, len(data), step):
        link = hashlib.blake2b(link + data[place : place + step], key=salt, digest_size=_LINK_BYTES).digest()
        hashes.append(int.from_bytes(link[:8], "big") >> 1)
    return hashes
