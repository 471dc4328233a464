"""Which token ids a request of a trace sends: the same in every process and on every machine.

A prompt is a function of the trace's digest, the request's place (or its block hashes) and its length, and of nothing
else. SHA-256 of those names the prompt; SHAKE-256 of that name gives as many ids as are needed. Requests that begin
with the same block hashes begin with the same ids; a request without hashes has a prompt of its own.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from ppas_core.errors import InvalidInput

MEASURED = "measured"
WARM_UP = "warm-up"

_MARGIN = 32
_MIN_IDS = 16


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token ids that prompts are made of.

    size: ids that the model knows, from 0 to size - 1.
    special_ids: ids never sent, such as end-of-text. Ids in the first and the last 1/32 of the vocabulary, where models
        keep control tokens, bytes and padding, are never sent either.

    Raises InvalidInput when fewer than 16 ids are left.
    """

    size: int
    special_ids: frozenset[int] = frozenset()
    _allowed: Sequence[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        edge = max(1, self.size // _MARGIN)
        allowed: Sequence[int] = range(edge, self.size - edge)
        if any(special in allowed for special in self.special_ids):
            allowed = tuple(token for token in allowed if token not in self.special_ids)
        if len(allowed) < _MIN_IDS:
            raise InvalidInput(
                f"a vocabulary of {self.size} ids with {len(self.special_ids)} special ones leaves {len(allowed)} for "
                f"prompts; at least {_MIN_IDS} are needed: give the model's own vocabulary size"
            )
        object.__setattr__(self, "_allowed", allowed)

    def ids(self, name: bytes, count: int) -> list[int]:
        """`count` ids drawn by `name`; a longer draw by the same name begins with the shorter one."""
        allowed = self._allowed
        span = len(allowed)
        draws = struct.unpack(f"<{count}I", hashlib.shake_256(name).digest(4 * count))
        if isinstance(allowed, range):
            first = allowed.start
            return [first + draw % span for draw in draws]
        return [allowed[draw % span] for draw in draws]


def prompt_ids(
    trace_digest: str,
    index: int,
    prompt_tokens: int,
    vocabulary: Vocabulary,
    *,
    block_hashes: Sequence[int] = (),
    block_size: int | None = None,
    purpose: str = MEASURED,
) -> list[int]:
    """The ids of the prompt of request `index`: exactly `prompt_tokens` of them.

    block_hashes, block_size: as in the trace; a block is drawn by its hash alone, a partial last block is the beginning
        of the whole one. purpose: prompts of different purposes have nothing in common, so that a warm-up does not fill
        a prefix cache for what is measured.
    """
    if not block_hashes:
        return vocabulary.ids(_name(trace_digest, purpose, "request", index), prompt_tokens)
    if block_size is None:
        raise InvalidInput(f"request {index} has block hashes, but the trace has no block size")
    ids: list[int] = []
    for block in block_hashes:
        ids += vocabulary.ids(_name(trace_digest, purpose, "block", block), min(block_size, prompt_tokens - len(ids)))
    return ids


def _name(trace_digest: str, purpose: str, kind: str, number: int) -> bytes:
    return hashlib.sha256(f"ppas-prompt/1 {trace_digest} {purpose} {kind} {number}".encode()).digest()
