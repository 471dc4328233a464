"""Which replays make a machine show its step time: few, short, and of shapes that tell the coefficients apart.

Every coefficient must move while others stand still (`docs/decisions/calibration.md` says why each replay is there):
lone requests of three lengths under a small, a middle and a large budget, so that chunk, context and fixed cost part
and a request's own delay shows; decode-only stretches with many short contexts and with few long ones; and prefills
beside running decodes under each budget. Only static budgets: the policy itself is never fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ppas_core.errors import InvalidInput
from ppas_core.policy import PolicyParams
from traces.format import Trace, TraceRequest

DEFAULT_TARGET_S: Final = 90.0
"""Seconds of load that a calibration aims at; what starts a server comes on top."""
_LONE, _DECODE, _MIXED, _CHECK = 0.25, 0.15, 0.35, 0.25
"""Shares of the target."""
_TINY_TOKENS: Final = 32
_MOST_DECODES: Final = 64
_BESIDE: Final = 4
"""Requests that decode while prefills are measured beside them."""
_MOST_REPEATS: Final = 6
_REST, _REST_S = 1.5, 0.1
"""A lone request is followed by the next after so many of its own durations and so many seconds."""
_POOL_SHARE: Final = 0.8
"""Of the KV pool, for requests that run at once: nobody is preempted on purpose."""


@dataclass(frozen=True, slots=True)
class Aim:
    """What a calibration covers.

    prompt_tokens: short, middle and long. output_tokens: of the measured requests. budgets: ascending, one or more.
    max_num_seqs: of every setting.
    """

    prompt_tokens: tuple[int, int, int]
    output_tokens: int
    budgets: tuple[int, ...]
    max_num_seqs: int

    @classmethod
    def of(cls, traces: Sequence[Trace], budgets: Sequence[int], max_num_seqs: int) -> Aim:
        """The lengths of the workload in `traces`, and of `budgets` the least, the greatest and one between.

        Raises InvalidInput when there is no trace, or no budget that can hold max_num_seqs decodes.
        """
        usable = sorted({budget for budget in budgets if budget >= max_num_seqs})
        if not traces or not usable:
            raise InvalidInput(
                f"{len(traces)} traces and {len(usable)} budgets of at least max_num_seqs = {max_num_seqs} to calibrate "
                "with; give one or more of each"
            )
        prompts = np.array([request.prompt_tokens for trace in traces for request in trace.requests])
        outputs = np.array([request.output_tokens for trace in traces for request in trace.requests])
        longest = int(prompts.max())
        short = max(1, min(int(prompts.min()), longest // 8))
        middle = int(np.median(prompts))
        if not 1.5 * short <= middle <= longest / 1.5:
            middle = max(1, round((short * longest) ** 0.5))
        chosen = {usable[0], usable[-1]}
        if usable[-1] >= 4 * usable[0]:
            chosen.add(round((usable[0] * usable[-1]) ** 0.5))
        return cls(
            (short, middle, longest), int(np.clip(np.median(outputs), 8, 32)), tuple(sorted(chosen)), max_num_seqs
        )

    @property
    def first(self) -> tuple[PolicyParams, Trace]:
        """The first replay: one request of the longest prompt under the largest budget. It tells how fast the server is."""
        return self.static(self.budgets[-1]), _trace("first", [(0.0, self.prompt_tokens[-1], self.output_tokens)])

    def static(self, budget: int) -> PolicyParams:
        """The static setting of that budget."""
        return PolicyParams.static(budget, max_num_seqs=self.max_num_seqs)


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the server is, from the first replay: seconds of the longest prefill, and of one decode step."""

    prefill_s: float
    decode_s: float

    def seconds(self, aim: Aim, prompt_tokens: int, budget: int) -> float:
        """Roughly how long a lone request takes: the prefill, a decode step's time for each further chunk, and the outputs."""
        chunks = max(0, prompt_tokens // budget - prompt_tokens // aim.budgets[-1])
        share = prompt_tokens / aim.prompt_tokens[-1]
        return share * self.prefill_s + (chunks + aim.output_tokens) * self.decode_s


def plan(
    aim: Aim, pace: Pace, *, pool_tokens: int, longest_tokens: int, target_s: float
) -> list[tuple[PolicyParams, Trace]]:
    """The replays to fit, in order, about `target_s` seconds of load less the check's share.

    pool_tokens: what the KV pool holds. longest_tokens: most tokens of one request, prompt and output together.
    """
    return [
        *_lone(aim, pace, _LONE * target_s),
        *_decode_only(aim, pace, pool_tokens, longest_tokens, _DECODE * target_s),
        *_mixed(aim, pace, longest_tokens, _MIXED * target_s),
    ]


def _lone(aim: Aim, pace: Pace, seconds: float) -> list[tuple[PolicyParams, Trace]]:
    """Requests one after another, each alone on the server, the long ones first and last."""
    lengths = [*reversed(aim.prompt_tokens)]

    def lasts_s(tokens: int, budget: int) -> float:
        return _REST * pace.seconds(aim, tokens, budget) + _REST_S

    spent_s = sum(lasts_s(tokens, budget) for tokens in lengths for budget in aim.budgets)
    found = []
    for budget in aim.budgets:
        now_s, shapes = 0.0, []
        for tokens in lengths * _repeats(seconds, spent_s):
            shapes.append((now_s, tokens, aim.output_tokens))
            now_s += lasts_s(tokens, budget)
        found.append((aim.static(budget), _trace(f"lone-{budget}", shapes)))
    return found


def _decode_only(
    aim: Aim, pace: Pace, pool_tokens: int, longest_tokens: int, seconds: float
) -> list[tuple[PolicyParams, Trace]]:
    """Many decodes with hardly any context, and a few with the longest; both thin out, since outputs differ."""
    long_tokens = aim.prompt_tokens[-1]
    affordable = seconds / (pace.prefill_s + aim.output_tokens * pace.decode_s)
    room = _POOL_SHARE * pool_tokens / (long_tokens + 2 * aim.output_tokens)
    num_long = int(np.clip(min(affordable, room), 1, min(8, aim.max_num_seqs)))
    num_tiny = min(_MOST_DECODES, aim.max_num_seqs)
    tiny = min(_TINY_TOKENS, aim.prompt_tokens[0])
    found = []
    for label, tokens, number, most in (
        ("many", tiny, num_tiny, min(3 * aim.output_tokens, longest_tokens - tiny)),
        ("long", long_tokens, num_long, min(2 * aim.output_tokens, longest_tokens - long_tokens)),
    ):
        outputs = np.linspace(max(1, most // 3), max(1, most), number).astype(int).tolist()
        found.append((aim.static(aim.budgets[-1]), _trace(f"decode-{label}", [(0.0, tokens, n) for n in outputs])))
    return found


def _mixed(aim: Aim, pace: Pace, longest_tokens: int, seconds: float) -> list[tuple[PolicyParams, Trace]]:
    """Prefills of all lengths, close behind each other, beside a few requests that decode all the while."""
    lengths = [aim.prompt_tokens[1], aim.prompt_tokens[2], aim.prompt_tokens[0], aim.prompt_tokens[2]]
    spent_s = sum(pace.seconds(aim, tokens, budget) for tokens in lengths for budget in aim.budgets)
    tiny = min(_TINY_TOKENS, aim.prompt_tokens[0])
    beside = max(1, min(_BESIDE, aim.max_num_seqs // 2))
    found = []
    for budget in aim.budgets:
        now_s, queue, steps = 2 * pace.decode_s, [], 0
        for tokens in lengths * _repeats(seconds, spent_s):
            queue.append((now_s, tokens, aim.output_tokens))
            now_s += 0.8 * pace.seconds(aim, tokens, budget)
            steps += -(-tokens // max(1, budget - beside)) + aim.output_tokens // 2
        outputs = max(1, min(steps, longest_tokens - tiny))
        shapes = [(0.0, tiny, max(1, outputs * (beside - place) // beside)) for place in range(beside)]
        found.append((aim.static(budget), _trace(f"mixed-{budget}", [*shapes, *queue])))
    return found


def check_trace(traces: Sequence[Trace], seconds: float) -> Trace:
    """The busiest stretch of the workload's busiest trace, of at most that many seconds, as a trace of its own."""
    best: list[TraceRequest] = []
    for trace in traces:
        arrivals = np.array([request.arrival_s for request in trace.requests])
        counts = np.searchsorted(arrivals, arrivals + seconds, side="right") - np.arange(len(arrivals))
        start = int(counts.argmax())
        if counts[start] > len(best):
            best = list(trace.requests[start : start + int(counts[start])])
    return _trace("check", [(one.arrival_s - best[0].arrival_s, one.prompt_tokens, one.output_tokens) for one in best])


def check_seconds(target_s: float) -> float:
    """The share of the target that the check gets."""
    return _CHECK * target_s


def _repeats(seconds: float, once_s: float) -> int:
    return int(np.clip(seconds / once_s, 1, _MOST_REPEATS)) if once_s > 0 else 1


def _trace(name: str, shapes: Sequence[tuple[float, int, int]]) -> Trace:
    return Trace(
        name=f"calibration {name}",
        regime="calibration",
        requests=tuple(TraceRequest(round(at_s, 6), prompt, output) for at_s, prompt, output in shapes),
    )
