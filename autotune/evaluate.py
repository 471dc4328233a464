"""How one setting is tried on one trace: the protocol, and its simulated form."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from autotune.records import OK, FloatArray, Origin, Replay, RequestRecords
from autotune.simulated import simulate_trace
from ppas_core.errors import InvalidInput
from ppas_core.policy import PolicyParams
from ppas_core.sim.fit.log import steps_table
from ppas_core.sim.prefixes import SharedPrefixes
from ppas_core.sim.profile import Profile
from ppas_core.sim.result import StepLog
from ppas_core.sim.simulate import RequestArrays, SimResult
from traces.format import Trace

_SHARED_ENOUGH: Final = 0.01
"""From this share of the prompt tokens on, a prefix cache would show."""


class Evaluator(Protocol):
    """Replays a trace under a setting. Raises PpasError with the reason when the replay gave nothing usable."""

    @property
    def origin(self) -> Origin:
        """Whether its replays are simulated or live."""
        ...

    def check(self, trace: Trace) -> None:
        """Raises InvalidInput when a request of `trace` could never be served, whatever the setting."""
        ...

    @property
    def is_noisy(self) -> bool:
        """Whether the same setting measures differently each time."""
        ...

    def replay(self, params: PolicyParams, trace: Trace, repeat: int = 0) -> Replay:
        """One replay of `trace` under `params`, from an empty server; repeats see noise of their own."""
        ...

    def doubts(self, params: PolicyParams, traces: Sequence[Trace]) -> list[str]:
        """What this evaluator cannot vouch for when it tries `params` on `traces`, a sentence each; empty is best."""
        ...

    @property
    def error_pct(self) -> float | None:
        """How far its mean latency was off where that could be checked, in per cent; None when it measures itself."""
        ...

    def session(self, folder: Path) -> AbstractContextManager[None]:
        """Replays happen within it; what it starts ends with it. Logs and the like go to `folder`."""
        ...

    def identity(self) -> dict[str, Any]:
        """What must not change while a study grows, as plain JSON values."""
        ...

    def describe(self) -> dict[str, Any]:
        """What was measured on, as plain JSON values, for the provenance of a result."""
        ...


@dataclass(frozen=True)
class SimulatedEvaluator:
    """Replays on the embedded simulator.

    noise_sigma: standard deviation of the log-normal noise per step; 0 is the deterministic simulator.
    seed: names the noise stream; each repeat of a setting on a trace has its own noise, the same in every process.
    record_steps: keep the step log of every replay, in the form of a live server's.
    """

    profile: Profile
    noise_sigma: float = 0.0
    seed: int = 0
    origin: Origin = Origin.SIMULATED
    record_steps: bool = False
    _arrays: dict[str, RequestArrays] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_noisy(self) -> bool:
        """Whether noise is switched on."""
        return self.noise_sigma > 0

    def check(self, trace: Trace) -> None:
        """Raises InvalidInput when a request exceeds the profile's model length or KV blocks."""
        try:
            self._requests(trace).require_fit(self.profile)
        except InvalidInput as error:
            raise InvalidInput(f"trace {trace.name!r} on profile {self.profile.name}: {error}") from None

    def replay(self, params: PolicyParams, trace: Trace, repeat: int = 0) -> Replay:
        """One simulated replay. Raises InvalidInput when a request can never fit the profile's server."""
        result, planned_s = self._simulate(params, trace, repeat, record_steps=self.record_steps)
        return Replay(
            params=params,
            trace_name=trace.name,
            trace_digest=trace.digest,
            regime=trace.regime,
            origin=self.origin,
            requests=_records(self._requests(trace), result, planned_s, self.profile.prefix_caching),
            branch_steps={str(branch): steps for branch, steps in result.steps.branch_steps.items()},
            steps=steps_table(result, params) if self.record_steps else None,
        )

    def doubts(self, params: PolicyParams, traces: Sequence[Trace]) -> list[str]:
        """A profile that nobody measured; budgets and lengths outside the range that it was fitted on, where it
        extrapolates; prefixes that the traces share and a server would cache.
        """
        asked = {
            "budget_tokens": [params.b_max, params.b_cap],
            "prompt_tokens": [request.prompt_tokens for trace in traces for request in trace.requests],
            "output_tokens": [request.output_tokens for trace in traces for request in trace.requests],
        }
        measured = self.profile.fit.get("measured_range", {})
        said = [self.profile.doubt] if self.profile.doubt is not None else []
        share = 0.0 if self.profile.prefix_caching else max(map(_shared_share, traces), default=0.0)
        if share >= _SHARED_ENOUGH:
            said.append(
                f"up to {share:.0%} of a trace's prompt tokens lie in prefixes that came before, but profile "
                f"{self.profile.name} computes each prompt whole: set prefix_caching for a server that caches them"
            )
        return said + [
            f"{name.replace('_', ' ')} {_span(min(values), max(values))} simulated, but profile {self.profile.name} was "
            f"fitted on {_span(*measured[name])} only: confirm on a live server"
            for name, values in asked.items()
            if name in measured and (min(values) < measured[name][0] or max(values) > measured[name][1])
        ]

    @property
    def error_pct(self) -> float | None:
        """The profile's error on P-PAS runs that it was not fitted on: mean latency, mean over load regimes."""
        held_out = self.profile.fit.get("held_out_ppas_error_per_regime", {})
        error = held_out.get("mean_absolute", {}).get("avg_latency")
        return None if error is None else 100 * float(error)

    def session(self, folder: Path) -> AbstractContextManager[None]:
        """Nothing to start."""
        return nullcontext()

    def identity(self) -> dict[str, Any]:
        """As `describe`."""
        return self.describe()

    def describe(self) -> dict[str, Any]:
        """The profile with its provenance, and the noise."""
        return {
            "backend": "simulator",
            "profile": self.profile.name,
            "profile_digest": self.profile.digest,
            "model": self.profile.model,
            "gpu": self.profile.gpu,
            "vllm_version": self.profile.vllm_version,
            "profile_provenance": dict(self.profile.provenance),
            **({"prefix_caching": True} if self.profile.prefix_caching else {}),
            "noise_sigma": self.noise_sigma,
            "noise_seed": self.seed,
        }

    def step_log(self, params: PolicyParams, trace: Trace) -> StepLog:
        """Every step of the first replay of `trace` under `params`. Raises as `replay` does."""
        log = self._simulate(params, trace, 0, record_steps=True)[0].step_log
        if log is None:
            raise AssertionError("a replay that records its steps has a step log")
        return log

    def _simulate(
        self, params: PolicyParams, trace: Trace, repeat: int, *, record_steps: bool = False
    ) -> tuple[SimResult, FloatArray]:
        return simulate_trace(
            params,
            trace,
            self._requests(trace),
            self.profile,
            noise_sigma=self.noise_sigma,
            noise_seed=self._noise_seed(params, trace, repeat),
            record_steps=record_steps,
        )

    def _requests(self, trace: Trace) -> RequestArrays:
        if trace.digest not in self._arrays:
            self._arrays[trace.digest] = request_arrays(trace, prefixes=self.profile.prefix_caching)
        return self._arrays[trace.digest]

    def _noise_seed(self, params: PolicyParams, trace: Trace, repeat: int) -> int:
        if self.noise_sigma == 0:
            return 0
        stream = f"{self.seed} {repeat} {trace.digest} {sorted(params.to_dict().items())}"
        return int.from_bytes(hashlib.sha256(stream.encode()).digest()[:4])


def request_arrays(trace: Trace, *, prefixes: bool = False) -> RequestArrays:
    """The simulator's form of `trace`: arrivals and lengths as arrays; with `prefixes`, who shares which of them."""
    shared = None
    if prefixes and trace.block_size is not None:
        shared = SharedPrefixes.of(trace.block_size, [request.block_hashes for request in trace.requests])
    return RequestArrays(
        arrival_s=np.array([request.arrival_s for request in trace.requests], dtype=np.float64),
        prompt_tokens=np.array([request.prompt_tokens for request in trace.requests], dtype=np.int64),
        output_tokens=np.array([request.output_tokens for request in trace.requests], dtype=np.int64),
        prefixes=shared,
    )


def _records(requests: RequestArrays, result: SimResult, planned_s: FloatArray, caching: bool) -> RequestRecords:
    # The simulated client is never late, and a token arrives alone.
    return RequestRecords(
        planned_s=planned_s,
        sent_s=planned_s,
        first_token_s=result.first_token_s,
        last_token_s=result.last_token_s,
        done_s=result.last_token_s,
        prompt_tokens=requests.prompt_tokens,
        output_tokens=requests.output_tokens,
        status=(OK,) * len(requests),
        chunk_time_s=result.token_time_s,
        chunk_tokens=np.ones(len(result.token_time_s), dtype=np.int64),
        chunk_offsets=np.concatenate(([0], np.cumsum(requests.output_tokens))),
        cached_tokens=result.cached_tokens if caching else None,
    )


def _shared_share(trace: Trace) -> float:
    """Share of the prompt tokens in blocks whose prefix an earlier request had, about."""
    if trace.block_size is None:
        return 0.0
    shared = SharedPrefixes.of(trace.block_size, [request.block_hashes for request in trace.requests])
    again = len(shared.nodes) - len(np.unique(shared.nodes))
    return again * trace.block_size / sum(request.prompt_tokens for request in trace.requests)


def _span(low: int, high: int) -> str:
    return f"{low}" if low == high else f"{low} to {high}"
