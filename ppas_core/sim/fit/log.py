"""What a step log says of the step time: how long each step took and what it computed; and a simulated server's log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ppas_core.errors import InvalidInput
from ppas_core.policy import PolicyParams, Scope
from ppas_core.sim.result import BRANCHES, SimResult
from ppas_core.vllm.steplog import StepRow

if TYPE_CHECKING:
    import pandas as pd

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_FEATURES: Final = ("prefill_tokens", "prefill_pairs", "decode_tokens", "decode_context_tokens")
_NEEDED: Final = ("step", "start_s", "done_s", "running_prefills", "running_decodes", *_FEATURES)


@dataclass(frozen=True, slots=True, eq=False)
class StepFeatures:
    """The usable steps of one or more logs; arrays of length S, in order.

    duration_s: float64, what the step added to the time of those that waited for it.
    prefill_tokens, prefill_pairs, decode_tokens, decode_context_tokens: float64, see `StepCost`.
    run: int64, stretches of consecutive steps; neighbours in one stretch are alike, so they are held out together.
    left_out: rows that were no use, by reason.
    """

    duration_s: Floats
    prefill_tokens: Floats
    prefill_pairs: Floats
    decode_tokens: Floats
    decode_context_tokens: Floats
    run: Ints
    left_out: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.duration_s)

    @property
    def is_prefill(self) -> Bools:
        """bool[S]: steps with prefill tokens, with or without decodes."""
        return np.asarray(self.prefill_tokens > 0)

    @property
    def is_decode(self) -> Bools:
        """bool[S]: steps with decode tokens, with or without prefills."""
        return np.asarray(self.decode_tokens > 0)

    @classmethod
    def of(cls, steps: pd.DataFrame) -> StepFeatures:
        """The steps of one log, a table with the columns of `StepRow`.

        Steps overlap under async scheduling: step k+1 is planned, and its row begins, while step k runs. So a step's
        duration is not done_s - start_s. Where requests were running when it was planned, the engine never rested, and
        the step took from the moment the step before was done: done_s - previous done_s, which holds the scheduler's
        own work and the engine's overhead between steps too. Where none was running the engine may have waited for a
        request, and the step took done_s - max(start_s, previous done_s). The rule is the same for both pipeline depths.

        Left out are steps that computed nothing, those whose output never came back, and those whose predecessor is
        not in the log. Raises InvalidInput when a column is missing.
        """
        if missing := [name for name in _NEEDED if name not in steps]:
            raise InvalidInput(f"the step log has no column {missing[0]!r}; allowed: a log of ppas_core.vllm.steplog")
        column = {name: np.asarray(steps[name], dtype=np.float64) for name in _NEEDED}
        if not len(column["step"]):
            return cls.join(())
        done_s, start_s = column["done_s"], column["start_s"]
        previous_s = np.concatenate(([np.nan], done_s[:-1]))
        follows = np.concatenate(([False], np.diff(column["step"]) == 1)) & np.isfinite(previous_s)
        is_first = np.concatenate(([True], np.diff(column["step"]) != 1))
        was_busy = column["running_prefills"] + column["running_decodes"] > 0
        started_s = np.where(was_busy, previous_s, np.fmax(start_s, np.where(follows, previous_s, -np.inf)))
        tokens = column["prefill_tokens"] + column["decode_tokens"]
        reasons = {
            "computed nothing": tokens <= 0,
            "output never came back": ~np.isfinite(done_s),
            "step before not in the log": was_busy & ~follows,
            "clock ran backwards": ~(done_s > started_s),
        }
        usable = np.ones(len(tokens), np.bool_)
        left_out = {}
        for reason, found in reasons.items():
            if count := int(np.sum(found & usable)):
                left_out[reason] = count
            usable &= ~found
        column["duration_s"] = done_s - started_s
        features = {name: column[name][usable] for name in ("duration_s", *_FEATURES)}
        return cls(**features, run=np.cumsum(is_first)[usable], left_out=left_out)

    @classmethod
    def join(cls, parts: Iterable[StepFeatures]) -> StepFeatures:
        """Several logs as one; a stretch never reaches from one into the next."""
        found = list(parts)
        runs, offset = [np.empty(0, np.int64)], 0
        left_out: dict[str, int] = {}
        for part in found:
            runs.append(part.run + offset)
            offset += int(part.run.max(initial=0)) + 1
            for reason, count in part.left_out.items():
                left_out[reason] = left_out.get(reason, 0) + count

        def joined(name: str) -> Floats:
            return np.concatenate([np.empty(0), *(getattr(part, name) for part in found)])

        features = {name: joined(name) for name in ("duration_s", *_FEATURES)}
        return cls(**features, run=np.concatenate(runs), left_out=left_out)

    def take(self, chosen: Bools) -> StepFeatures:
        """The chosen steps alone."""
        features = {name: getattr(self, name)[chosen] for name in ("duration_s", *_FEATURES)}
        return StepFeatures(**features, run=self.run[chosen], left_out=self.left_out)


def lone_requests(
    steps: pd.DataFrame, sent_s: Floats, first_token_s: Floats, last_token_s: Floats, prompt_tokens: Ints
) -> Floats:
    """Seconds that each request, where it had the server to itself, waited for its first token beyond its own steps.

    sent_s, first_token_s, last_token_s: float64[N], of the client's clock. steps: the log of the same replay, of
    another clock. Requests that overlapped others are NaN, and so is everything when the two do not tell the same story.
    The two clocks are never compared: stretches of work are matched in order, from the last, by their prompt tokens.
    """
    delays = np.full(len(sent_s), np.nan)
    periods = _busy_periods(steps)
    groups = _groups(sent_s, last_token_s)
    while groups and periods:
        group, wanted = groups.pop(), 0
        wanted = int(np.sum(prompt_tokens[group]))
        taken: list[_Period] = []
        while periods and sum(period.prefill for period in taken) < wanted:
            taken.append(periods.pop())
        if sum(period.prefill for period in taken) != wanted:
            return np.full(len(sent_s), np.nan)
        if len(group) == 1 and len(taken) == 1:
            delays[group[0]] = first_token_s[group[0]] - sent_s[group[0]] - taken[0].first_token_s
    return delays


@dataclass(frozen=True, slots=True)
class _Period:
    """From an idle server until it was idle again: its prefill tokens, and seconds until the last of them were done."""

    prefill: int
    first_token_s: float


def _busy_periods(steps: pd.DataFrame) -> list[_Period]:
    running = np.asarray(steps["running_prefills"]) + np.asarray(steps["running_decodes"])
    prefill = np.asarray(steps["prefill_tokens"], dtype=np.int64)
    works = prefill + np.asarray(steps["decode_tokens"]) > 0
    start_s, done_s = np.asarray(steps["start_s"], np.float64), np.asarray(steps["done_s"], np.float64)
    begins = np.flatnonzero((running == 0) & works)
    periods = []
    for first, after in zip(begins, [*begins[1:], len(works)], strict=True):
        rows = slice(first, after)
        last = first + int(np.flatnonzero(prefill[rows] > 0).max(initial=0))
        periods.append(_Period(int(prefill[rows].sum()), float(done_s[last] - start_s[first])))
    return periods


def _groups(sent_s: Floats, last_token_s: Floats) -> list[list[int]]:
    """Requests whose times in flight overlap, in order of sending."""
    groups: list[list[int]] = []
    until_s = -np.inf
    for index in np.argsort(sent_s, kind="stable").tolist():
        if sent_s[index] > until_s:
            groups.append([])
        groups[-1].append(index)
        until_s = max(until_s, last_token_s[index]) if np.isfinite(last_token_s[index]) else np.inf
    return groups


def steps_table(
    result: SimResult, params: PolicyParams, *, origin_s: float = 1000.0, delay_s: float = 0.0, seed: int = 0
) -> pd.DataFrame:
    """The step log that a live server would have written of this replay: the columns of `StepRow`. Needs pandas.

    result: of `simulate(..., record_steps=True)`; noise of the step time itself comes from there. origin_s: the server's
    monotonic clock at the replay's start. delay_s: mean of an exponential delay after which the engine notices that a
    step is done, drawn with `seed`; it never reorders. prefill_chunks and decodes are exact unless a request was preempted.
    Raises InvalidInput when the result has no step log.
    """
    import pandas as pd

    log = result.step_log
    if log is None:
        raise InvalidInput("the result has no step log; simulate with record_steps=True")
    size = len(log)
    end_s = log.end_s
    if delay_s > 0:
        late_s = np.random.default_rng([seed, size]).exponential(delay_s, size)
        end_s = np.maximum.accumulate(log.end_s + late_s)
    decodes = np.minimum(log.decode_tokens, log.num_scheduled - (log.prefill_tokens > 0))
    step_budget = log.budget
    if params.scope is Scope.PREFILL:
        step_budget = np.minimum(log.budget + log.decode_tokens, params.b_max)
    columns = {
        "step": np.arange(1, size + 1),
        "start_s": np.round(origin_s + log.plan_s, 6),
        "scheduled_s": np.round(origin_s + log.plan_s, 6),
        "done_s": np.round(origin_s + end_s, 6),
        "settings_version": np.ones(size, np.int64),
        "scope": np.full(size, str(params.scope)),
        "branch": np.array([str(branch) for branch in BRANCHES])[log.branch],
        "budget": log.budget,
        "step_budget": step_budget,
        "running_prefills": log.running_prefills,
        "running_decodes": log.running_decodes,
        "waiting_prefills": log.waiting_prefills,
        "remaining_running_prefill_tokens": log.remaining_running_prefill_tokens,
        "prefill_tokens": log.prefill_tokens,
        "decode_tokens": log.decode_tokens,
        "prefill_chunks": log.num_scheduled - decodes,
        "decodes": decodes,
        "prefill_pairs": log.prefill_pairs,
        "decode_context_tokens": log.decode_context_tokens,
        "free_kv_blocks": log.free_kv_blocks,
        "preemptions": log.preemptions,
        "dropped_rows": np.zeros(size, np.int64),
    }
    return pd.DataFrame(columns, columns=list(StepRow._fields))
