"""What one run of a sweep is, wherever it was read from: a setting on a trace, its figures, maybe its requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from autotune.records import FloatArray, IntArray, Origin
from ppas_core.policy import PolicyParams
from ppas_core.sim.requests import RequestArrays
from traces.generate import parse_phases

METRICS: Final = (
    "mean_latency_s", "p95_latency_s", "mean_ttft_s", "p95_ttft_s", "mean_tpot_s", "p95_tpot_s", "makespan_s",
)  # fmt: skip
"""The figures that a run may have, by their names in `autotune.metrics`."""

_RAG_SHAPE: Final = ((25_000,), (32,))


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """The trace that a run replayed, as far as its log tells.

    phases: load phases in the paper's notation; "" where the log does not say. seed: of the generated arrivals.
    prompt_tokens, output_tokens: the lengths requests were drawn from; one each means that all are alike, none that
        the log does not say. facts: figures of the trace in the log (prompt_mean, output_max, …), to check one against.
    arrays: the requests themselves, where they are known. label: the name of a trace that was not generated.
    number: the log's `trace_id`, which tells traces of one sweep apart.
    """

    phases: str = ""
    seed: int | None = None
    prompt_tokens: tuple[int, ...] = ()
    output_tokens: tuple[int, ...] = ()
    facts: Mapping[str, float] = field(default_factory=dict)
    arrays: RequestArrays | None = None
    label: str = ""
    given_regime: str = ""
    number: str = ""

    @property
    def shape(self) -> str:
        """The lengths, as in `p25000 o32`; "" where unknown."""
        if self.prompt_tokens and self.output_tokens:
            return f"p{_range(self.prompt_tokens)} o{_range(self.output_tokens)}"
        if "prompt_mean" in self.facts and not self.phases:
            return f"prompts of {self.facts['prompt_mean']:.0f} on average"
        return ""

    @property
    def regime(self) -> str:
        """The load regime: traces of one regime differ in their seed only."""
        if self.given_regime:
            return self.given_regime
        parts = [self._load()]
        if (self.prompt_tokens, self.output_tokens) != _RAG_SHAPE:
            parts.append(self.shape)
        return " ".join(part for part in parts if part) or "all"

    @property
    def key(self) -> str:
        """Equal for runs of the same trace, so that two settings can be paired."""
        return "|".join((self.label, self.phases, str(self.seed), self.shape, self.number, self.given_regime))

    def _load(self) -> str:
        if not self.phases:
            return self.label
        phases = parse_phases(self.phases)
        rates = [phase.rate_per_s for phase in phases]
        if len(phases) == 5 and rates[0::2] == [0.2] * 3 and rates[1] == rates[3]:
            seconds = {phase.duration_s for phase in phases}
            return f"λ={rates[1]:g}" if seconds == {10.0} else f"λ={rates[1]:g} phases {self.phases}"
        return f"phases {self.phases}"


@dataclass(frozen=True, slots=True, eq=False)
class RequestResults:
    """The requests of one run, one row each, in the log's order. NaN, or 0 for a length, is what the log does not say.

    ids: what pairs requests of two runs; () where the log names none.
    latency_s, ttft_s, tpot_s, arrival_s: float64[N]. prompt_tokens, output_tokens: int64[N]. ok: bool[N].
    """

    ids: tuple[str, ...]
    ok: np.ndarray[tuple[int], np.dtype[np.bool_]]
    latency_s: FloatArray
    ttft_s: FloatArray
    tpot_s: FloatArray
    arrival_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray

    def __len__(self) -> int:
        return len(self.ok)

    def pairing(self) -> list[str]:
        """One key a request, the same for the same request in another run of the trace: its id, else its turn to arrive.

        Without ids every request must be listed, failed ones too, and without arrivals in the trace's order.
        """
        if self.ids and len(set(self.ids)) == len(self):
            return list(self.ids)
        order = np.argsort(self.arrival_s, kind="stable") if np.isfinite(self.arrival_s).all() else np.arange(len(self))
        turns = np.empty(len(self), np.int64)
        turns[order] = np.arange(len(self))
        return [str(turn) for turn in turns]

    @property
    def has_ids(self) -> bool:
        """Whether the log names every request."""
        return len(self.ids) > 0 and len(set(self.ids)) == len(self)


@dataclass(frozen=True, slots=True, eq=False)
class RunResult:
    """One setting on one trace.

    source: file and line, or folder, for messages. file: the file's or folder's name.
    model, gpu, vllm: what served, as far as the log says; "" where it does not. flags: the server's flags and `PPAS_*`
        variables, as printed.
    config: the setting's name in the log. params: the setting itself, where the log holds it in full.
    hints: numbers that the log gives about the setting: b_max, max_num_seqs, b_cap, t_large, n_th.
    metrics: figures by name of METRICS; absent ones are not in the log. num_requests: of the trace, failed ones too.
    held_out: whether it is a finalist's run on a trace that its study's search never saw.
    error: the log's own word on what went wrong; "" where nothing did.
    """

    source: str
    file: str
    config: str
    workload: Workload
    metrics: Mapping[str, float]
    num_requests: int
    failed: int = 0
    error: str = ""
    model: str = ""
    gpu: str = ""
    vllm: str = ""
    flags: Mapping[str, str] = field(default_factory=dict)
    hints: Mapping[str, int] = field(default_factory=dict)
    params: PolicyParams | None = None
    requests: RequestResults | None = None
    origin: Origin = Origin.LIVE
    held_out: bool = False

    @property
    def whole(self) -> bool:
        """Whether every request completed: the figures of a run that lost some speak of the survivors alone."""
        return self.failed == 0 and not self.error

    @property
    def served(self) -> str:
        """Model and GPU, what one simulator profile describes."""
        return " on ".join(part for part in (self.model, self.gpu) if part) or self.file


@dataclass(frozen=True, slots=True)
class RunLog:
    """What one or more files hold. notes: what a reader has to know about the reading (lines left out and why)."""

    runs: tuple[RunResult, ...]
    notes: tuple[str, ...] = ()


def _range(lengths: tuple[int, ...]) -> str:
    return str(lengths[0]) if len(lengths) == 1 else f"{min(lengths)}–{max(lengths)}"
