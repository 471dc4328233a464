"""What the simulator replays: the arrays of one trace, and several traces packed for one compiled call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ppas_core.errors import InvalidInput
from ppas_core.sim.prefixes import SharedPrefixes
from ppas_core.sim.profile import Profile

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RequestArrays:
    """The requests of one trace in arrival order; validated once, at construction, and read-only from then on.

    arrival_s: float64[N], seconds from the trace's start, ascending. prompt_tokens, output_tokens: int64[N], >= 1.
    prefixes: which prompts begin alike; None: each has a prompt of its own. Read only where the profile caches prefixes.
    Raises InvalidInput that names the first request in error, counted from 0.
    """

    arrival_s: _Floats
    prompt_tokens: _Ints
    output_tokens: _Ints
    prefixes: SharedPrefixes | None = field(default=None, repr=False, kw_only=True)
    token_start: _Ints = field(init=False, repr=False)
    """int64[N + 1]: where each request's tokens lie in a flat array of all output tokens."""
    longest_tokens: int = field(init=False, repr=False)
    """Most tokens, prompt and output together, of one request."""

    def __post_init__(self) -> None:
        arrival_s = _column("arrival_s", self.arrival_s, np.float64)
        prompt_tokens = _column("prompt_tokens", self.prompt_tokens, np.int64)
        output_tokens = _column("output_tokens", self.output_tokens, np.int64)
        if not len(arrival_s) == len(prompt_tokens) == len(output_tokens):
            raise InvalidInput(
                f"arrival_s, prompt_tokens and output_tokens have {len(arrival_s)}, {len(prompt_tokens)} and "
                f"{len(output_tokens)} entries; they must have one a request"
            )
        if len(arrival_s) == 0:
            raise InvalidInput("there are 0 requests to replay; at least 1 is needed")
        _refuse("arrival_s", arrival_s, ~np.isfinite(arrival_s) | (arrival_s < 0), "a finite time of at least 0 s")
        _refuse("arrival_s", arrival_s, np.diff(arrival_s, prepend=0.0) < 0, "no earlier than the request before")
        _refuse("prompt_tokens", prompt_tokens, prompt_tokens < 1, "a whole number of at least 1")
        _refuse("output_tokens", output_tokens, output_tokens < 1, "a whole number of at least 1")
        if self.prefixes is not None:
            self.prefixes.require_cover(prompt_tokens)
        token_start = starts(output_tokens)
        for name, column in (
            ("arrival_s", arrival_s),
            ("prompt_tokens", prompt_tokens),
            ("output_tokens", output_tokens),
            ("token_start", token_start),
        ):
            column.setflags(write=False)
            object.__setattr__(self, name, column)
        object.__setattr__(self, "longest_tokens", int(np.max(prompt_tokens + output_tokens)))

    def __len__(self) -> int:
        return len(self.arrival_s)

    def cache_columns(self) -> tuple[_Ints, _Ints, _Ints]:
        """As in a batch of this trace alone."""
        return _cache_columns((self,))

    def require_fit(self, profile: Profile) -> None:
        """Raise InvalidInput, naming the first such request, where one can never be served with this profile."""
        if self.longest_tokens <= profile.longest_servable_tokens:
            return
        index = int(np.argmax(self.prompt_tokens + self.output_tokens > profile.longest_servable_tokens))
        raise InvalidInput(
            f"request {index} has {self.prompt_tokens[index]} prompt and {self.output_tokens[index]} output tokens; "
            f"profile {profile.name} serves at most {profile.longest_servable_tokens} tokens a request (max_model_len "
            f"{profile.max_model_len}, {profile.num_kv_blocks} KV blocks of {profile.block_size} tokens): shorten it, "
            f"drop it, or use a profile with more room"
        )


@dataclass(frozen=True, slots=True, eq=False)
class RequestBatch:
    """Several traces laid end to end, so that one compiled call replays them all. Build it with `pack`, once a search.

    trace_start: int64[T + 1], the traces' places in the request arrays. token_start: int64[N + 1], the requests'
    places in the flat array of output tokens, over all traces.
    """

    arrival_s: _Floats
    prompt_tokens: _Ints
    output_tokens: _Ints
    trace_start: _Ints
    token_start: _Ints
    traces: tuple[RequestArrays, ...]

    def cache_columns(self) -> tuple[_Ints, _Ints, _Ints]:
        """The prefixes of all traces: node_start int64[N + 1], nodes, and each trace's block size, int64[T]."""
        return _cache_columns(self.traces)

    @classmethod
    def pack(cls, traces: Sequence[RequestArrays]) -> RequestBatch:
        """The batch of these traces, in this order. Raises InvalidInput when there is none."""
        if not traces:
            raise InvalidInput("a batch of 0 traces; at least 1 is needed")
        outputs = np.concatenate([trace.output_tokens for trace in traces])
        columns = (
            np.concatenate([trace.arrival_s for trace in traces]),
            np.concatenate([trace.prompt_tokens for trace in traces]),
            outputs,
            starts([len(trace) for trace in traces]),
            starts(outputs),
        )
        for column in columns:
            column.setflags(write=False)
        return cls(*columns, traces=tuple(traces))


def _cache_columns(traces: Sequence[RequestArrays]) -> tuple[_Ints, _Ints, _Ints]:
    counts = [
        np.zeros(len(trace), np.int64) if trace.prefixes is None else np.diff(trace.prefixes.node_start)
        for trace in traces
    ]
    nodes = [trace.prefixes.nodes for trace in traces if trace.prefixes is not None]
    sizes = [1 if trace.prefixes is None else trace.prefixes.block_size for trace in traces]
    return (
        starts(np.concatenate(counts)),
        np.concatenate([*nodes, np.empty(0, np.int64)]),
        np.array(sizes, np.int64),
    )


def starts(lengths: Sequence[int] | _Ints) -> _Ints:
    """Where runs of these lengths lie when laid end to end: int64[L + 1], read-only."""
    places = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=places[1:])
    places.setflags(write=False)
    return places


def _column(name: str, values: Any, dtype: type[np.float64] | type[np.int64]) -> npt.NDArray[Any]:
    array = np.asarray(values)
    if array.ndim != 1:
        raise InvalidInput(f"{name} has {array.ndim} dimensions; allowed: one entry a request in one dimension")
    if array.dtype.kind not in ("iu" if dtype is np.int64 else "iuf"):
        raise InvalidInput(f"{name} has type {array.dtype}; allowed: {'whole ' if dtype is np.int64 else ''}numbers")
    return np.array(array, dtype=dtype, order="C", copy=True)


def _refuse(name: str, values: npt.NDArray[Any], wrong: npt.NDArray[np.bool_], allowed: str) -> None:
    if np.any(wrong):
        index = int(np.argmax(wrong))
        raise InvalidInput(f"{name} of request {index} is {values[index]}; allowed: {allowed}")
