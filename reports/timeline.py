"""One trace step by step under two settings, as plain data. Knows no Plotly and no HTML."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from autotune.results import Lane, StudyResults
from reports import roles
from reports.roles import BEST_STATIC, TUNED
from reports.views import Missing

_CLOSE = 5
"""The close-up shows one part in so many of the trace."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Like steps in a row. tokens: scheduled per step; step_s: how long each took."""

    start_s: float
    end_s: float
    steps: int
    step_s: float
    budget: int
    branch: str
    running: int
    waiting: int
    tokens: float


@dataclass(frozen=True, slots=True)
class LaneView:
    """One setting on the trace: its stretches in order of time."""

    role: str
    label: str
    is_static: bool
    stretches: tuple[Stretch, ...]
    thinned: bool

    @property
    def end_s(self) -> float:
        """When the last step ended."""
        return self.stretches[-1].end_s

    @property
    def most_waiting(self) -> int:
        """The longest queue."""
        return max(s.waiting for s in self.stretches)

    @property
    def capped_share(self) -> float:
        """Share of the steps whose budget a rule of the policy cut."""
        capped = sum(s.steps for s in self.stretches if s.branch != "max")
        return capped / max(1, sum(s.steps for s in self.stretches))


@dataclass(frozen=True, slots=True)
class TimelineView:
    """The tuned setting and another on one trace.

    arrivals: (second, prompt tokens) of each request. close_up: the seconds in which the policy changes most, None where
    it hardly changes. whole: from the first arrival to the last step. most_requests, most_tokens: what the axes hold.
    """

    trace: str
    regime: str
    why: str
    arrivals: tuple[tuple[float, int], ...]
    lanes: tuple[LaneView, ...]
    whole: tuple[float, float]
    close_up: tuple[float, float] | None
    most_requests: int
    most_tokens: int


def others(results: StudyResults) -> list[str]:
    """The roles that the tuned setting can be held against."""
    lanes = results.timeline.lanes if results.timeline is not None else []
    known = [lane.role for lane in lanes if lane.start_s]
    wanted = (roles.reference_role(results), BEST_STATIC)
    return [role for role in dict.fromkeys([*wanted, *known]) if role in known and role != TUNED]


def timeline(results: StudyResults, other: str | None) -> TimelineView | Missing:
    """The tuned setting, and that in the role called `other` below it."""
    found = results.timeline
    if found is None:
        return Missing(
            "The scheduler steps of the held-out traces were not recorded, so there is no time line to draw."
        )
    shown = tuple(_lane(lane, found.branches) for lane in found.lanes if lane.role in (TUNED, other) and lane.start_s)
    if not shown:
        return Missing("No step was recorded on the held-out trace that was to be shown.")
    end_s = max(lane.end_s for lane in shown)
    start_s = min([*found.arrival_s, *(lane.stretches[0].start_s for lane in shown)])
    margin = 0.015 * max(end_s - start_s, 1e-3)
    return TimelineView(
        trace=found.trace,
        regime=found.regime,
        why=found.why,
        arrivals=tuple(zip(found.arrival_s, found.prompt_tokens, strict=False)),
        lanes=shown,
        whole=(max(0.0, start_s - margin), end_s + margin),
        close_up=_close_up(shown, start_s, end_s),
        most_requests=max(max(s.running, s.waiting) for lane in shown for s in lane.stretches),
        most_tokens=max(s.budget for lane in shown for s in lane.stretches),
    )


def _lane(lane: Lane, branches: list[str]) -> LaneView:
    columns = zip(
        lane.start_s, lane.end_s, lane.steps, lane.budget, lane.branch, lane.running, lane.waiting, lane.tokens,
        strict=False,
    )  # fmt: skip
    stretches = tuple(
        Stretch(
            start_s=start_s,
            end_s=end_s,
            steps=steps,
            step_s=(end_s - start_s) / max(1, steps),
            budget=budget,
            branch=branches[branch] if 0 <= branch < len(branches) else "unknown",
            running=running,
            waiting=waiting,
            tokens=tokens,
        )
        for start_s, end_s, steps, budget, branch, running, waiting, tokens in columns
    )
    return LaneView(lane.role, lane.setting.label, roles.is_static(lane.setting), stretches, lane.thinned)


def _close_up(lanes: tuple[LaneView, ...], start_s: float, end_s: float) -> tuple[float, float] | None:
    """The window in which the first adaptive setting changes its branch most often."""
    lane = next((lane for lane in lanes if not lane.is_static), None)
    if lane is None:
        return None
    pairs = zip(lane.stretches, lane.stretches[1:], strict=False)
    changes = [after.start_s for before, after in pairs if after.branch != before.branch]
    width = (end_s - start_s) / _CLOSE
    if len(changes) < 3 or width <= 0:
        return None
    start = max(changes, key=lambda at: bisect_right(changes, at + 0.9 * width) - bisect_left(changes, at))
    begin = min(max(0.0, start - 0.05 * width), end_s - width)
    return begin, begin + width
