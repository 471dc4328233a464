"""What a recording writes while it lasts, line by line, and how a trace is made of it, also of one that was killed.

A journal is JSON Lines. The first line says how it was recorded; each further line is one request as it ended:

    {"format": "ppas-recording", "version": 1, "block_size": 16, "started_ns": …}
    {"at_ns": 250000, "prompt_tokens": 40, "output_tokens": 8, "model": "m", "by": "ids", "blocks": [7, 8, 9]}
    {"at_ns": 750000, "prompt_tokens": 30, "output_tokens": 5, "model": "m", "by": "text", "bytes": 118, "chunks": [4, 5]}
    {"left_out": "HTTP status 503"}
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import numpy as np

from autotune.record.hashes import CHUNK_BYTES, mixed
from ppas_core.errors import InvalidInput, NoResult
from ppas_core.plain_json import load_json
from ppas_core.versions import require_version
from traces.format import BlockHashes, Trace, TraceRequest
from traces.ledger import Ledger
from traces.lines import numbered_lines

FORMAT: Final = "ppas-recording"
VERSION: Final = 1
NAME: Final = "recorded"
CUT_LINE: Final = "cut off while it was written"
BY_IDS: Final = "ids"
BY_TOKENIZE: Final = "tokenize"
BY_TEXT: Final = "text"
BY_NOTHING: Final = "nothing"
BY: Final = {
    BY_IDS: "the request's token ids",
    BY_TOKENIZE: "token ids from the server's /tokenize",
    BY_TEXT: f"its text in pieces of {CHUNK_BYTES} bytes",
    BY_NOTHING: "nothing",
}
"""How a prompt's block hashes came about."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """A trace and the account of the recording; both stand in the trace's header."""

    trace: Trace
    ledger: Ledger


def assemble(journal: Path, *, name: str, regime: str = "all", facts: Mapping[str, Any] | None = None) -> Assembled:
    """The trace of a journal, whether or not its recording ended well.

    facts: more about the recording, for the provenance. Raises InvalidInput when `journal` is none, and NoResult when it
    holds no request that can be replayed.
    """
    lines = numbered_lines(journal)
    header = _header(journal, next(lines, (0, ""))[1])
    size: int = header["block_size"]
    rows: list[dict[str, Any]] = []
    dropped: Counter[str] = Counter()
    for number, row in _rows(journal, lines):
        if row is None:
            dropped[CUT_LINE] += 1
        elif isinstance(row.get("left_out"), str):
            dropped[row["left_out"]] += 1
        elif all(type(row.get(key)) is int for key in ("at_ns", "prompt_tokens", "output_tokens")):
            rows.append(_packed(journal, number, row))
        else:
            raise InvalidInput(f"{journal}, line {number}: is not a line of a recording; was it edited?")
    if not rows:
        reasons = "; ".join(f"{count} {reason}" for reason, count in dropped.items()) or "no request came"
        raise NoResult(f"the recording holds no request that can be replayed ({reasons})")
    rows.sort(key=lambda row: row["at_ns"])
    first_ns = rows[0]["at_ns"]
    positions = _Positions(size, _repeated([row["chunks"] for row in rows if "chunks" in row]))
    requests, without = [], 0
    for row in rows:
        blocks = row.get("blocks")
        if blocks is None:
            blocks = BlockHashes(positions.blocks(row.get("chunks", ()), row.get("bytes", 0), row["prompt_tokens"]))
        if len(blocks) != math.ceil(row["prompt_tokens"] / size):
            blocks, without = (), without + 1
        requests.append(
            TraceRequest((row["at_ns"] - first_ns) / 1e9, row["prompt_tokens"], row["output_tokens"], blocks)
        )
    start = datetime.fromtimestamp((header["started_ns"] + first_ns) / 1e9, UTC).isoformat(timespec="milliseconds")
    ledger = Ledger(
        format=NAME,
        time_unit="s",
        rows_read=len(rows) + sum(dropped.values()),
        kept=len(rows),
        dropped=dict(dropped),
        without_block_hashes=without,
        offset=start,
    )
    about = {
        "prompts_known_by": dict(Counter(BY.get(str(row.get("by")), BY[BY_NOTHING]) for row in rows)),
        "models": dict(Counter(str(row.get("model", "")) for row in rows)),
        **(facts or {}),
    }
    trace = Trace(
        name=name,
        requests=tuple(requests),
        regime=regime,
        block_size=size if without < len(rows) else None,
        provenance={"source": NAME, "import": ledger.provenance(), "recording": about},
    )
    return Assembled(trace, ledger)


def _packed(journal: Path, number: int, row: dict[str, Any]) -> dict[str, Any]:
    """The row with its hashes at 8 bytes each: a long recording has very many."""
    for key in ("blocks", "chunks"):
        if key in row:
            try:
                row[key] = BlockHashes(row[key])
            except (TypeError, OverflowError):
                raise InvalidInput(f"{journal}, line {number}: {key} are no hashes; was it edited?") from None
    return row


def _repeated(prompts: list[BlockHashes]) -> frozenset[int]:
    """The pieces of text that are in more than one prompt; the others, by far the most, need no memory."""
    if not prompts:
        return frozenset()
    found, counts = np.unique(np.concatenate([np.fromiter(prompt, np.int64) for prompt in prompts]), return_counts=True)
    return frozenset(found[counts > 1].tolist())


def _header(journal: Path, line: str) -> dict[str, Any]:
    try:
        header = load_json(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise InvalidInput(f"{journal}: is not the journal of a recording; its name ends in .part")
    require_version(
        f"{journal}: recording", header.get("version"), VERSION, again="recover it with the release that recorded it"
    )
    for key in ("block_size", "started_ns"):
        if type(header.get(key)) is not int or header[key] < 1:
            raise InvalidInput(f"{journal}: the header's {key} is {header.get(key)!r}; was it edited?")
    return header


def _rows(journal: Path, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The lines as objects; None for a last one that a kill cut. A broken one in the middle is refused."""
    broken = 0
    for number, line in lines:
        if broken:
            raise InvalidInput(f"{journal}, line {broken}: is not JSON; was it edited?")
        try:
            row = load_json(line)
        except ValueError:
            broken = number
            continue
        if not isinstance(row, dict):
            raise InvalidInput(f"{journal}, line {number}: is not a JSON object; was it edited?")
        yield number, row
    if broken:
        yield broken, None


class _Positions:
    """Puts blocks of tokens over pieces of text whose tokens nobody counted one by one.

    A prompt's length in tokens is known as a whole. The first prompt that has a piece says at which token the piece
    ends, as if its tokens were spread evenly over the text that it does not share with an earlier one; every later
    prompt with that beginning takes the same number. So prompts share as many tokens as their common text had in the
    first of them, and equal texts share all.
    """

    def __init__(self, size: int, repeated: frozenset[int]) -> None:
        self._size = size
        self._repeated = repeated
        self._ends: dict[int, float] = {}

    def blocks(self, chunks: Sequence[int], text_bytes: int, tokens: int) -> list[int]:
        """One id for each block of a prompt of `tokens` tokens; none when there is no text."""
        if not chunks:
            return []
        ends = [self._ends[chunk] for chunk in takewhile(self._ends.__contains__, chunks)]
        start_tokens = ends[-1] if ends else 0.0
        start_bytes = min(len(ends) * CHUNK_BYTES, text_bytes)
        rate = max(0.0, tokens - start_tokens) / max(1, text_bytes - start_bytes)
        for place in range(len(ends), len(chunks)):
            end_bytes = min((place + 1) * CHUNK_BYTES, text_bytes)
            ends.append(start_tokens + rate * (end_bytes - start_bytes))
            if chunks[place] in self._repeated:
                self._ends[chunks[place]] = ends[-1]
        found = []
        for block in range(math.ceil(tokens / self._size)):
            end = (block + 1) * self._size
            # A block is shared when the piece that its last token lies in is; the tolerance is for sums of floats.
            piece = bisect.bisect_left(ends, end - 1e-6) if end <= tokens else len(chunks)
            found.append(mixed(chunks[min(piece, len(chunks) - 1)], block if end <= tokens else -1 - block))
        return found
