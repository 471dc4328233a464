"""Replay requests under a setting on a profile: the simulator's front door, over the compiled kernel."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ppas_core.errors import InvalidInput
from ppas_core.policy import PolicyParams, Scope
from ppas_core.sim import kernel
from ppas_core.sim.kernel_blocks import new_pool
from ppas_core.sim.profile import Profile
from ppas_core.sim.requests import RequestArrays, RequestBatch, starts
from ppas_core.sim.result import BRANCHES, BatchResult, SimResult, StepLog, StepSummary

__all__ = [
    "BatchResult",
    "RequestArrays",
    "RequestBatch",
    "SimResult",
    "StepLog",
    "StepSummary",
    "noise_factors",
    "simulate",
    "simulate_many",
]

NOISE_PERIOD_STEPS = 16384
"""After so many steps the noise factors repeat."""

_Outputs = tuple[
    npt.NDArray[np.float64],
    npt.NDArray[np.int64],
    npt.NDArray[np.int64],
    npt.NDArray[np.float64],
    npt.NDArray[np.int64],
]
_Log = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.int64], npt.NDArray[np.int64]]


def simulate(
    params: PolicyParams,
    requests: RequestArrays,
    profile: Profile,
    *,
    noise_sigma: float = 0.0,
    noise_seed: int = 0,
    record_steps: bool = False,
) -> SimResult:
    """Replay one trace under `params` on `profile`.

    noise_sigma: standard deviation of the log of a step's duration; 0 for none. noise_seed: seeds it.
    record_steps: keep every step in the result's step_log.
    Raises InvalidInput when a request can never be served, or noise_sigma is out of range.
    """
    requests.require_fit(profile)
    noise = noise_factors(noise_sigma, noise_seed)
    # Enough for most traces; doubled and replayed, with the same result, until the log fits.
    rows = 4 * (len(requests) + int(requests.token_start[-1])) if record_steps else 0
    while True:
        log = _new_log(rows)
        status, outputs = _replay(
            params, profile, noise, _one_trace(len(requests)), requests, requests.token_start, log
        )
        if status != kernel.LOG_FULL:
            break
        rows *= 2
    token_time_s, preemptions, counters, busy_s, cached_tokens = outputs
    counts = counters[0].tolist()
    steps = StepSummary(
        num_steps=sum(counts[: len(BRANCHES)]),
        branch_steps=dict(zip(BRANCHES, counts, strict=False)),
        busy_s=float(busy_s[0]),
        peak_kv_blocks=counts[kernel.PEAK_BLOCKS],
        peak_waiting=counts[kernel.PEAK_WAITING],
        peak_running=counts[kernel.PEAK_RUNNING],
        preemptions=counts[kernel.NUM_PREEMPTIONS],
        evicted_blocks=counts[kernel.NUM_EVICTED],
    )
    return SimResult(
        token_time_s[requests.token_start[:-1]],
        token_time_s[requests.token_start[1:] - 1],
        token_time_s,
        preemptions,
        cached_tokens,
        steps,
        _step_log(log) if record_steps else None,
    )


def simulate_many(
    params: PolicyParams,
    batch: RequestBatch,
    profile: Profile,
    *,
    noise_sigma: float = 0.0,
    noise_seed: int = 0,
) -> BatchResult:
    """Replay every trace of `batch` under `params` in one compiled call: the entry point of searches.

    Each trace gives exactly what `simulate` gives for it alone. Raises as `simulate` does.
    """
    for trace in batch.traces:
        trace.require_fit(profile)
    noise = noise_factors(noise_sigma, noise_seed)
    _, outputs = _replay(params, profile, noise, batch.trace_start, batch, batch.token_start, _NO_LOG)
    token_time_s, preemptions, counters, busy_s, cached_tokens = outputs
    return BatchResult(
        token_time_s[batch.token_start[:-1]],
        token_time_s[batch.token_start[1:] - 1],
        token_time_s,
        preemptions,
        cached_tokens,
        batch.trace_start,
        counters[:, : len(BRANCHES)],
        busy_s,
        counters[:, kernel.NUM_PREEMPTIONS],
    )


@lru_cache(maxsize=64)
def noise_factors(sigma: float, seed: int) -> npt.NDArray[np.float64]:
    """Log-normal factors of mean 1 for the durations of successive steps, read-only; one factor of 1 when sigma is 0.

    Raises InvalidInput when sigma is not within 0 to 1.
    """
    if not 0.0 <= sigma <= 1.0:
        raise InvalidInput(f"noise_sigma is {sigma!r}; allowed: 0 to 1")
    if seed < 0:
        raise InvalidInput(f"noise_seed is {seed!r}; allowed: a whole number of at least 0")
    if sigma == 0.0:
        factors = np.ones(1)
    else:
        normal = np.random.default_rng([seed, NOISE_PERIOD_STEPS]).standard_normal(NOISE_PERIOD_STEPS)
        factors = np.exp(sigma * normal - sigma * sigma / 2)
    factors.setflags(write=False)
    return factors


def _replay(
    params: PolicyParams,
    profile: Profile,
    noise: npt.NDArray[np.float64],
    trace_start: npt.NDArray[np.int64],
    columns: RequestArrays | RequestBatch,
    token_start: npt.NDArray[np.int64],
    log: _Log,
) -> tuple[int, _Outputs]:
    cached_tokens = np.zeros(len(columns.arrival_s), np.int64)
    cache = None
    if profile.prefix_caching:
        num_requests = int(np.max(np.diff(trace_start)))
        longest_tokens = int(np.max(columns.prompt_tokens + columns.output_tokens))
        pool = new_pool(
            profile.num_kv_blocks - 1,
            num_requests,
            min(num_requests, params.max_num_seqs),
            longest_tokens // profile.block_size + 1,
        )
        cache = (*columns.cache_columns(), cached_tokens, pool)
    outputs = (
        np.empty(token_start[-1], np.float64),
        np.empty(len(columns.arrival_s), np.int64),
        np.zeros((len(trace_start) - 1, kernel.NUM_COUNTERS), np.int64),
        np.empty(len(trace_start) - 1, np.float64),
    )
    status = kernel.replay_batch(
        _settings(params, profile),
        profile.cost.as_array(),
        profile.frontend_delay_s,
        noise,
        trace_start,
        columns.arrival_s,
        columns.prompt_tokens,
        columns.output_tokens,
        token_start,
        outputs,
        log,
        cache,
    )
    if status == kernel.STALLED:
        raise AssertionError(f"the step loop stopped advancing under {params!r} on {profile.name}: a bug")
    return status, (*outputs, cached_tokens)


def _settings(params: PolicyParams, profile: Profile) -> npt.NDArray[np.int64]:
    """The kernel's settings, in the order of its place constants."""
    return np.array(
        (
            params.b_max,
            params.b_cap,
            params.n_th,
            -1 if params.t_large is None else params.t_large,
            params.scope is Scope.PREFILL,
            params.max_num_seqs,
            params.decode_guard,
            profile.num_kv_blocks - 1,
            profile.block_size,
            profile.max_model_len,
            profile.pipeline_depth,
        ),
        np.int64,
    )


@lru_cache(maxsize=1024)
def _one_trace(num_requests: int) -> npt.NDArray[np.int64]:
    return starts([num_requests])


def _new_log(rows: int) -> _Log:
    return (
        np.empty((rows, kernel.NUM_LOG_COLUMNS), np.int64),
        np.empty((rows, 3), np.float64),
        np.empty((4 * rows, 3), np.int64),
        np.zeros(2, np.int64),
    )


_NO_LOG = _new_log(0)


def _step_log(log: _Log) -> StepLog:
    num_steps, num_entries = log[3].tolist()
    times = [column.copy() for column in log[1][:num_steps].T]
    counts = [column.copy() for column in log[0][:num_steps].T]
    entries = [column.copy() for column in log[2][:num_entries].T]
    return StepLog(times[0], times[1], times[2], *counts, *entries)
