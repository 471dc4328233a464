"""Studies that are sound but odd: what a report must survive."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import sample_study

from autotune.results import Effect, Setting, StudyResults

HOSTILE = "</script><script>window.pwned=1</script><img src=x onerror='window.pwned=1'>%{x}<b>&lt;"


@cache
def _small() -> StudyResults:
    return sample_study.build(num_search=12, num_random=8, loads=(0.4, 1.2), requests=6)


def _changed(**update: object) -> StudyResults:
    return _small().model_copy(update=update)


def _all_failed() -> StudyResults:
    failed = [
        t.model_copy(
            update={"state": "failed", "reason": "out of memory", "objectives": {}, "regimes": {}, "on_front": False}
        )
        for t in _small().trials
    ]
    return _changed(trials=failed, importance={}, hypervolume={}, landscape=None)


def _not_finite() -> StudyResults:
    study = _small()
    trials = [
        t.model_copy(
            update={"objectives": {"mean_latency_s": math.nan, "p95_latency_s": math.inf}, "duration_s": math.nan}
        )
        for t in study.trials
    ]
    bad = Effect(improvement_pct=math.nan, low_pct=-math.inf, high_pct=math.inf)
    comparisons = [
        c.model_copy(
            update={
                "overall": {"mean_latency_s": bad},
                "regimes": {"λ=0.4": {"mean_latency_s": bad}},
                "share_faster": math.nan,
                "share_faster_interval": (math.nan, math.nan),
                "share_slower": math.nan,
            }
        )
        for c in study.comparisons
    ]
    held = [
        h.model_copy(
            update={
                "regimes": {r: dict.fromkeys(v, math.nan) for r, v in h.regimes.items()},
                "regime_spread": {r: dict.fromkeys(v, (math.nan, math.inf)) for r, v in h.regimes.items()},
                "requests": h.requests.model_copy(update={"latency_s": [math.inf] * len(h.requests.trace)}),
            }
        )
        for h in study.held_out
    ]
    landscape = study.landscape.model_copy(update={"ratio": [[math.nan] * 6] * 7})
    return study.model_copy(
        update={
            "trials": trials,
            "comparisons": comparisons,
            "held_out": held,
            "landscape": landscape,
            "hypervolume": {"search": [math.nan]},
            "importance": {"mean_latency_s": {"b_cap": math.nan}},
        }
    )


def hostile() -> StudyResults:
    """Markup in every place where a user's own words can stand."""
    study = _small()
    evil = Setting(label=HOSTILE, params={**study.exported.params, HOSTILE: HOSTILE})
    regime = {"λ=0.4": HOSTILE, "λ=1.2": "λ=1.2"}
    held = [
        h.model_copy(
            update={
                "setting": evil,
                "regimes": {regime[r]: v for r, v in h.regimes.items()},
                "regime_spread": {},
                "branch_steps": {HOSTILE: 3, "max": 4},
                "requests": h.requests.model_copy(
                    update={
                        "trace": [HOSTILE] * len(h.requests.trace),
                        "regime": [regime[r] for r in h.requests.regime],
                    }
                ),
            }
        )
        for h in study.held_out
    ]
    trials = [
        t.model_copy(
            update={"setting": evil, "reason": HOSTILE if t.state == "failed" else None, "branch_steps": {HOSTILE: 2}}
        )
        for t in study.trials
    ]
    comparisons = [
        c.model_copy(
            update={
                "candidate": HOSTILE,
                "sentence": f"{HOSTILE}: {HOSTILE}",
                "regimes": {regime[r]: v for r, v in c.regimes.items()},
            }
        )
        for c in study.comparisons
    ]
    return study.model_copy(
        update={
            "name": HOSTILE,
            "created_at": HOSTILE,
            "choice": HOSTILE,
            "exported": evil,
            "exported_role": HOSTILE,
            "held_out": held,
            "trials": trials,
            "comparisons": comparisons,
            "importance_method": HOSTILE,
            "importance": {HOSTILE: {HOSTILE: 1.0}},
            "warnings": [HOSTILE],
            "not_identified": {HOSTILE: HOSTILE},
            "provenance": {HOSTILE: HOSTILE, "command": HOSTILE, "deep": {HOSTILE: [HOSTILE]}},
            "space": {HOSTILE: HOSTILE},
            "traces": [t.model_copy(update={"name": HOSTILE, "digest": HOSTILE}) for t in study.traces],
            "landscape": study.landscape.model_copy(update={"fixed": {HOSTILE: HOSTILE}}),
        }
    )


def _one_objective() -> StudyResults:
    study = _small()
    return study.model_copy(update={"objectives": study.objectives[:1]})


def _three_objectives() -> StudyResults:
    study = _small()
    third = study.objectives[0].model_copy(update={"metric": "goodput_per_s", "label": "goodput", "better": "higher"})
    trials = [
        t.model_copy(
            update={"objectives": {**t.objectives, "goodput_per_s": 1.0 - 0.001 * t.number} if t.objectives else {}}
        )
        for t in study.trials
    ]
    return study.model_copy(update={"objectives": [*study.objectives, third], "trials": trials})


ODD: dict[str, Callable[[], StudyResults]] = {
    "no random arm": lambda: sample_study.build(num_search=12, num_random=0, loads=(0.4, 1.2), requests=6),
    "no search at all": lambda: sample_study.build(num_search=0, num_random=0, loads=(0.4,), requests=6),
    "one regime": lambda: sample_study.build(num_search=12, num_random=8, loads=(0.8,), requests=6),
    "no landscape": lambda: _changed(landscape=None),
    "no importance": lambda: _changed(importance={}),
    "no hypervolume": lambda: _changed(hypervolume={}),
    "no comparison": lambda: _changed(comparisons=[]),
    "nothing held out": lambda: _changed(held_out=[], comparisons=[]),
    "an empty front": lambda: _changed(trials=[t.model_copy(update={"on_front": False}) for t in _small().trials]),
    "no trial": lambda: _changed(trials=[], hypervolume={}),
    "all trials failed": _all_failed,
    "nothing is finite": _not_finite,
    "one objective": _one_objective,
    "three objectives": _three_objectives,
    "the pick is missing": lambda: _changed(pick_trial=10_000, reference_trial=10_001),
    "no words": lambda: _changed(
        name="", choice="", warnings=[], not_identified={}, provenance={}, space={}, traces=[]
    ),
    "a reference of its own": lambda: _changed(
        held_out=[
            h.model_copy(update={"role": h.role.replace("paper default", "reference")}) for h in _small().held_out
        ],
        comparisons=[
            c.model_copy(update={"reference": c.reference.replace("paper default", "reference")})
            for c in _small().comparisons
        ],
    ),
    "measured live": lambda: _changed(origin="live"),
    "no clear winner": lambda: _changed(
        comparisons=[
            c.model_copy(
                update={"verdict": "no clear winner", "sentence": "No clear winner between tuned and paper default"}
            )
            for c in _small().comparisons
        ],
        exported_role="paper default",
    ),
    "markup everywhere": hostile,
}
