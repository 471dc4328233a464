"""How the tuner and its client process talk: frames of a JSON header and raw bytes. Standard library alone.

tuner -> client   JOB, then STOP or nothing; end of file means that the tuner is gone
client -> tuner   PREPARED, STARTED, one ANSWER per request as it ends, FINISHED
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, Final

JOB: Final = "job"
STOP: Final = "stop"
PREPARED: Final = "prepared"
STARTED: Final = "started"
ANSWER: Final = "answer"
FINISHED: Final = "finished"

_SIZES: Final = struct.Struct("<II")

Frame = tuple[str, dict[str, Any], bytes]
"""Kind, header, payload."""


def encode(kind: str, header: dict[str, Any] | None = None, payload: bytes = b"") -> bytes:
    """One frame."""
    head = json.dumps([kind, header or {}], separators=(",", ":")).encode()
    return b"".join((_SIZES.pack(len(head), len(payload)), head, payload))


class Decoder:
    """Frames out of bytes that arrive in any pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes."""
        self._buffer += data
        while len(self._buffer) >= _SIZES.size:
            head_size, payload_size = _SIZES.unpack_from(self._buffer)
            end = _SIZES.size + head_size + payload_size
            if len(self._buffer) < end:
                return
            head = bytes(self._buffer[_SIZES.size : _SIZES.size + head_size])
            payload = bytes(self._buffer[_SIZES.size + head_size : end])
            del self._buffer[:end]
            kind, header = json.loads(head)
            yield kind, header, payload
