"""What a trace is, and how it stands in a file.

A trace file is UTF-8 JSON Lines, gzip-compressed when its name ends in `.gz`. The first line is the header, each
further line one request in arrival order:

    {"format": "ppas-trace", "version": 1, "name": …, "regime": …, "seed": …, "block_size": …, "provenance": {…},
     "num_requests": …, "digest": "sha256:…"}
    {"arrival_s": 0.25, "prompt_tokens": 25000, "output_tokens": 32}
    {"arrival_s": 1.75, "prompt_tokens": 8192, "output_tokens": 64, "block_hashes": [7, 8], "session": "a", "phase": 1}

A request's id is its place in the trace, from 0. The digest covers the request lines byte for byte, so two files with
the same requests have the same digest whatever their names, and a cut or edited file is noticed.

A trace of sessions, in which a turn waits for the answer to the turn before, is version 2: its header also says
`"mode": "sessions"`, and every later turn of a session has a `think_time_s`. Without one a file stays version 1, byte
for byte.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Final, overload

from ppas_core.errors import InvalidInput
from ppas_core.files import write_atomically
from ppas_core.plain_json import load_json, require_notes, require_text
from ppas_core.versions import require_version
from traces.lines import numbered_lines

FORMAT: Final = "ppas-trace"
VERSION: Final = 1
"""Of an open-loop trace."""
SESSIONS_VERSION: Final = 2
OPEN_LOOP: Final = "open loop"
SESSIONS: Final = "sessions"
MAX_TOKENS: Final = 10_000_000
"""Longest prompt or output in tokens."""
MAX_ARRIVAL_S: Final = 10_000_000_000
"""Latest arrival: the clock still tells microseconds apart there."""

_HEADER_KEYS: Final = {
    "format", "version", "name", "regime", "seed", "block_size", "provenance", "num_requests", "digest",
}  # fmt: skip
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_REQUEST_KEYS: Final = (
    "arrival_s", "prompt_tokens", "output_tokens", "block_hashes", "session", "phase", "think_time_s",
)  # fmt: skip


class BlockHashes(Sequence[int]):
    """Block ids at 8 bytes each, equal to the tuple of the same numbers; a tuple takes five times as much.

    A trace of a million long prompts has some twenty-five million ids. Immutable. Raises TypeError for something other
    than whole numbers and OverflowError for one outside 64 bits; `pack_blocks` keeps those as a tuple.
    """

    __slots__ = ("_ids",)

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids = array("q", ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[int, ...]: ...
    def __getitem__(self, place: int | slice) -> int | tuple[int, ...]:
        return tuple(self._ids[place]) if isinstance(place, slice) else self._ids[place]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BlockHashes):
            return self._ids == other._ids
        return tuple(self._ids) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._ids))

    def __repr__(self) -> str:
        return f"BlockHashes({tuple(self._ids)})"


def pack_blocks(ids: Sequence[object]) -> Sequence[int]:
    """`ids` packed where they fit into 64 bits, else as a tuple; () for none. Raises InvalidInput for other values."""
    if not ids:
        return ()
    if set(map(type, ids)) != {int}:
        raise InvalidInput("block_hashes holds something other than whole numbers")
    numbers: Sequence[int] = ids  # type: ignore[assignment]  # checked on the line above
    try:
        return BlockHashes(numbers)
    except OverflowError:
        return tuple(numbers)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    arrival_s: seconds from the trace's start, 0 to MAX_ARRIVAL_S.
    prompt_tokens, output_tokens: lengths in tokens, 1 to MAX_TOKENS.
    block_hashes: one id per `Trace.block_size` prompt tokens (the last block may be partial); requests that begin with
        the same ids share that prefix. Empty: a prompt of its own. A tuple, or `BlockHashes` from a file.
    session: the conversation that the request belongs to, if any.
    phase: index of the load phase that generated it, if any.
    think_time_s: seconds from the end of the answer to the session's turn before until this one is sent; arrival_s is
        then the recorded time and says the order only. None: sent at arrival_s.

    Raises InvalidInput for a value outside these ranges.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_hashes: Sequence[int] = ()
    session: str | None = None
    phase: int | None = None
    think_time_s: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.arrival_s, bool) or not isinstance(self.arrival_s, int | float):
            raise InvalidInput(f"arrival_s is {self.arrival_s!r}; allowed: a number of seconds")
        if not 0 <= self.arrival_s <= MAX_ARRIVAL_S:  # false for NaN as well
            raise InvalidInput(
                f"arrival_s is {self.arrival_s!r}; allowed: a finite number of seconds, at least 0, at most {MAX_ARRIVAL_S}"
            )
        for name in ("prompt_tokens", "output_tokens"):
            value = getattr(self, name)
            if not _is_int(value) or not 1 <= value <= MAX_TOKENS:
                raise InvalidInput(f"{name} is {value!r}; allowed: a whole number of at least 1, at most {MAX_TOKENS}")
        packed = isinstance(self.block_hashes, BlockHashes)
        if not packed and not all(_is_int(block) for block in self.block_hashes):
            raise InvalidInput("block_hashes holds something other than whole numbers")
        if self.session is not None:
            if not isinstance(self.session, str):
                raise InvalidInput(f"session is {self.session!r}; allowed: text")
            if not self.session.isascii():
                require_text(self.session, "session")
        if self.phase is not None and (not _is_int(self.phase) or not 0 <= self.phase < 2**31):
            raise InvalidInput(f"phase is {self.phase!r}; allowed: a whole number of at least 0, below 2**31")
        if self.think_time_s is not None:
            self._check_think_time(self.think_time_s)

    def _check_think_time(self, think_time_s: float) -> None:
        if not isinstance(think_time_s, int | float) or isinstance(think_time_s, bool):
            raise InvalidInput(f"think_time_s is {think_time_s!r}; allowed: a number of seconds")
        if not 0 <= think_time_s <= MAX_ARRIVAL_S:  # false for NaN as well
            raise InvalidInput(f"think_time_s is {think_time_s!r}; allowed: 0 to {MAX_ARRIVAL_S} seconds")
        if self.session is None:
            raise InvalidInput(f"think_time_s is {think_time_s!r}, but the request has no session; give it one")


@dataclass(frozen=True)
class Trace:
    """A fixed sequence of requests, in arrival order.

    name: names the trace in tables; the traces of one study have different names.
    regime: the load regime that the trace is a sample of; results are averaged over a regime's traces first.
    seed: the generator's seed, if generated.
    block_size: prompt tokens per block hash; None when no request has any.
    provenance: where it came from, as plain JSON values, see `require_notes`.

    Raises InvalidInput when it is empty, out of order, or has block hashes that do not fit the prompts.
    """

    name: str
    requests: tuple[TraceRequest, ...]
    regime: str = "all"
    seed: int | None = None
    block_size: int | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_text(self.name, "a trace's name")
        require_text(self.regime, f"trace {self.name!r}: regime")
        require_notes(self.provenance, f"trace {self.name!r}: provenance")
        for name in ("seed", "block_size"):
            if abs(number := getattr(self, name) or 0) >= 2**63:
                raise InvalidInput(f"trace {self.name!r}: {name} is {number}; allowed: a whole number below 2**63")
        if not self.requests:
            raise InvalidInput(f"trace {self.name!r} has no requests; it needs at least one")
        previous_s = 0.0
        for index, request in enumerate(self.requests):
            if request.arrival_s < previous_s:
                raise InvalidInput(
                    f"trace {self.name!r}, request {index}: arrival_s {request.arrival_s} is before the previous "
                    f"{previous_s}; sort the requests by arrival"
                )
            previous_s = request.arrival_s
            self._check_blocks(index, request)
        if self.mode == SESSIONS:
            self._check_turns()

    def _check_turns(self) -> None:
        begun: set[str] = set()
        for index, request in enumerate(self.requests):
            if request.session is None:
                continue
            if (request.think_time_s is None) == (request.session in begun):
                what = "a later turn and has no" if request.session in begun else "the first turn and has a"
                raise InvalidInput(
                    f"trace {self.name!r}, request {index}: is {what} think_time_s in session {request.session!r}; in a "
                    "trace of sessions the first turn comes at its arrival_s, and every later one after a think_time_s"
                )
            begun.add(request.session)

    def _check_blocks(self, index: int, request: TraceRequest) -> None:
        if not request.block_hashes:
            return
        if self.block_size is None or self.block_size < 1:
            raise InvalidInput(
                f"trace {self.name!r}, request {index} has block_hashes, but block_size is {self.block_size}"
            )
        expected = math.ceil(request.prompt_tokens / self.block_size)
        if len(request.block_hashes) != expected:
            raise InvalidInput(
                f"trace {self.name!r}, request {index}: {len(request.block_hashes)} block_hashes for "
                f"{request.prompt_tokens} prompt tokens; blocks of {self.block_size} need {expected}"
            )

    @cached_property
    def digest(self) -> str:
        """`sha256:` and the hash of the request lines as written: equal for equal requests, on every machine."""
        sha = hashlib.sha256()
        for line in _request_lines(self.requests):
            sha.update(line)
        return f"sha256:{sha.hexdigest()}"

    @cached_property
    def mode(self) -> str:
        """OPEN_LOOP when every request is sent at its arrival_s, SESSIONS when later turns wait for an answer."""
        return SESSIONS if any(request.think_time_s is not None for request in self.requests) else OPEN_LOOP

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    def header(self) -> dict[str, Any]:
        """The file's first line as plain JSON values."""
        sessions = self.mode == SESSIONS
        return {
            "format": FORMAT,
            "version": SESSIONS_VERSION if sessions else VERSION,
            **({"mode": SESSIONS} if sessions else {}),
            "name": self.name,
            "regime": self.regime,
            "seed": self.seed,
            "block_size": self.block_size,
            "provenance": dict(self.provenance),
            "num_requests": len(self.requests),
            "digest": self.digest,
        }


def write_trace(trace: Trace, path: Path) -> None:
    """Writes `trace` to `path`, whole or not at all; the same trace gives the same bytes."""
    lines = chain([_json_line(trace.header())], _request_lines(trace.requests))
    write_atomically(path, _compressed(lines) if path.suffix == ".gz" else lines)


def read_trace(path: Path) -> Trace:
    """The trace in the file `path`.

    Raises InvalidInput, with the path, the line and what is wrong, for a file that cannot be read, is not a trace, has
    another version, lacks requests or was changed after it was written.
    """
    lines = numbered_lines(path)
    _, first = next(lines, (0, None))
    if first is None:
        raise InvalidInput(f"{path}: the file is empty; a trace begins with a header line")
    header = _read_header(path, first)
    requests = tuple(_read_request(path, number, line) for number, line in lines)
    if header["num_requests"] != len(requests):
        raise InvalidInput(
            f"{path}: the header promises {header['num_requests']} requests, the file has {len(requests)}; is it cut?"
        )
    try:
        trace = Trace(
            name=header["name"],
            requests=requests,
            regime=header["regime"],
            seed=header["seed"],
            block_size=header["block_size"],
            provenance=header["provenance"],
        )
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from None
    if (trace.mode == SESSIONS) != (header["version"] == SESSIONS_VERSION):
        raise InvalidInput(
            f"{path}: the header says version {header['version']}, but the requests are in {trace.mode}; version "
            f"{SESSIONS_VERSION} is for sessions alone, in which a later turn has a think_time_s"
        )
    if trace.digest != header["digest"]:
        raise InvalidInput(f"{path}: the requests do not match the header's digest; the file was changed")
    return trace


def _read_header(path: Path, line: str) -> dict[str, Any]:
    header = _parse_object(path, 1, line)
    if header.get("format") != FORMAT:
        raise InvalidInput(f'{path}: line 1 is not a trace header ("format": "{FORMAT}")')
    version = header.get("version")
    require_version(f"{path}: trace", version, SESSIONS_VERSION, again="import, record or generate the trace again")
    keys = _HEADER_KEYS if version == VERSION else _HEADER_KEYS | {"mode"}
    if missing := sorted(keys - set(header)):
        raise InvalidInput(f"{path}: the header lacks {missing[0]!r}")
    if header.get("mode", SESSIONS) != SESSIONS:
        raise InvalidInput(f"{path}: the header's mode is {header['mode']!r}; version 2 has {SESSIONS!r} only")
    if unknown := sorted(set(header) - keys):
        raise InvalidInput(f"{path}: the header has an unknown key {unknown[0]!r}")
    expected: dict[str, tuple[type, ...]] = {
        "name": (str,), "regime": (str,), "seed": (int, type(None)), "block_size": (int, type(None)),
        "provenance": (dict,), "num_requests": (int,), "digest": (str,),
    }  # fmt: skip
    for key, types in expected.items():
        if not isinstance(header[key], types) or isinstance(header[key], bool):
            raise InvalidInput(f"{path}: the header's {key} is {header[key]!r}")
    return header


def _read_request(path: Path, number: int, line: str) -> TraceRequest:
    data = _parse_object(path, number, line)
    if unknown := sorted(set(data) - set(_REQUEST_KEYS)):
        raise InvalidInput(f"{path}, line {number}: unknown key {unknown[0]!r}; allowed: {', '.join(_REQUEST_KEYS)}")
    if missing := [key for key in _REQUEST_KEYS[:3] if key not in data]:
        raise InvalidInput(f"{path}, line {number}: {missing[0]!r} is missing")
    blocks = data.get("block_hashes", [])
    if not isinstance(blocks, list):
        raise InvalidInput(f"{path}, line {number}: block_hashes is not a list")
    try:
        return TraceRequest(**{**data, "block_hashes": pack_blocks(blocks)})
    except InvalidInput as error:
        raise InvalidInput(f"{path}, line {number}: {error}") from None


def _parse_object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        data = load_json(line)
    except ValueError:
        raise InvalidInput(f"{path}, line {number}: is not JSON: {line[:60]!r}") from None
    if not isinstance(data, dict):
        raise InvalidInput(f"{path}, line {number}: is not a JSON object: {line[:60]!r}")
    return data


def _request_lines(requests: Iterable[TraceRequest]) -> Iterable[bytes]:
    for request in requests:
        data: dict[str, Any] = {
            "arrival_s": float(request.arrival_s),
            "prompt_tokens": request.prompt_tokens,
            "output_tokens": request.output_tokens,
        }
        if request.block_hashes:
            data["block_hashes"] = list(request.block_hashes)
        if request.session is not None:
            data["session"] = request.session
        if request.phase is not None:
            data["phase"] = request.phase
        if request.think_time_s is not None:
            data["think_time_s"] = float(request.think_time_s)
        yield _json_line(data)


def _compressed(lines: Iterable[bytes]) -> Iterable[bytes]:
    """`lines` as one gzip member without a time stamp, so that the same lines give the same bytes."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    for line in lines:
        yield packer.compress(line)
    yield packer.flush()


def _json_line(data: Mapping[str, Any]) -> bytes:
    return _ENCODER.encode(data).encode() + b"\n"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
