"""Which static budget serves which load best on the held-out traces, as plain data and in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.results import StudyResults
from reports import roles
from reports.numbers import cleaned, counted, finite, lower_is_better, metric_label, tokens
from reports.views import ordered_regimes

_TIE = 1.001
"""Budgets within this factor of the best are as good as the best."""


@dataclass(frozen=True, slots=True)
class StaticView:
    """regimes: regime to the budgets that are best there, ties together. tuned_ahead: regimes in which the tuned
    setting, when it is adaptive, is better than all of them; None when it is static or was not replayed."""

    metric: str
    budgets: tuple[int, ...]
    regimes: dict[str, tuple[int, ...]]
    tuned_ahead: int | None


def best_by_load(results: StudyResults, metric: str) -> StaticView | None:
    """The static budgets by regime; None when fewer than two were replayed in every one of two or more regimes."""
    by_budget = {
        int(held.setting.params["b_max"]): held.regimes for held in results.held_out if roles.is_static(held.setting)
    }
    regimes = ordered_regimes(regime for held in results.held_out for regime in held.regimes)
    costs = {
        regime: {
            b: cost for b, means in by_budget.items() if (cost := _cost(means.get(regime, {}), metric)) is not None
        }
        for regime in regimes
    }
    if len(by_budget) < 2 or len(regimes) < 2 or any(len(known) < len(by_budget) for known in costs.values()):
        return None
    best = {regime: min(known.values()) for regime, known in costs.items()}
    tuned = roles.role(results, roles.TUNED)
    ahead = None
    if tuned is not None and not roles.is_static(tuned.setting):
        own = {regime: _cost(tuned.regimes.get(regime, {}), metric) for regime in regimes}
        ahead = sum(cost is not None and cost < best[regime] for regime, cost in own.items())
    winners = {r: tuple(sorted(b for b, cost in known.items() if cost <= best[r] * _TIE)) for r, known in costs.items()}
    return StaticView(metric, tuple(sorted(by_budget)), winners, ahead)


def sentence(results: StudyResults) -> str:
    """What the held-out traces say of static budgets across load, or what the section shows when they say nothing."""
    view = best_by_load(results, results.objectives[0].metric) if results.objectives else None
    if view is None:
        return "Each setting under each load, on the held-out traces."
    best = "lowest" if lower_is_better(view.metric) else "highest"
    label = f"the {best} {metric_label(view.metric)}"
    everywhere = set(view.budgets).intersection(*map(set, view.regimes.values()))
    if everywhere:
        budget = tokens(min(everywhere))
        text = f"Of {counted(len(view.budgets), 'static budget')} here, {budget} has {label} at every load, or ties."
    else:
        where: dict[str, list[str]] = {}
        for regime, budgets in view.regimes.items():
            where.setdefault(" and ".join(map(tokens, budgets)), []).append(cleaned(regime, 40))
        parts = "; ".join(f"{budgets} at {_listed(names)}" for budgets, names in where.items())
        text = f"No static budget here has {label} at every load: it is {parts}."
    if view.tuned_ahead is not None:
        text += f" The tuned setting is ahead of all of them in {view.tuned_ahead} of {len(view.regimes)} load regimes."
    return text


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _cost(means: dict[str, float], metric: str) -> float | None:
    value = finite(means.get(metric))
    if value is None or value <= 0:
        return None
    return value if lower_is_better(metric) else 1 / value
