"""What do the numbers of settings count that a study tells of? In one line, for its plan and for its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from autotune.plan import Plan
from autotune.results import Arm, StudyResults


def planned_settings(plan: Plan) -> str:
    """The settings that a study will measure, where nothing ends its search early."""
    searched: list[Arm] = ["search"] * plan.spec.trials
    random: list[Arm] = ["random"] * (plan.spec.trials if plan.spec.random_arm else 0)
    return _in_words([*searched, *(arm for arm, _ in plan.known), *random], len(plan.outside))


def measured_settings(results: StudyResults) -> str:
    """The settings that a finished study measured, the failed and the stopped ones among them."""
    outside = sum(not trial.dimensions for trial in results.trials)
    return _in_words([trial.arm for trial in results.trials], outside)


def _in_words(arms: Iterable[Arm], outside: int) -> str:
    """`12 searched + the reference + 3 static budgets = 16 settings (1 outside the space, measured beside the search)`."""
    number = Counter[str]("search" if arm == "predicted" else arm for arm in arms)
    named = (
        ("search", f"{number['search']} searched"),
        ("reference", "the reference"),
        ("published", f"{number['published']} published"),
        ("static", f"{number['static']} static budget{'' if number['static'] == 1 else 's'}"),
        ("random", f"{number['random']} at random"),
    )
    parts = " + ".join(words for arm, words in named if number[arm])
    beside = f" ({outside} outside the space, measured beside the search)" if outside else ""
    return f"{parts} = {number.total()} settings{beside}"
