"""Studies that are sound but odd: what a report must survive."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import sample_study

from autotune.records import Origin
from autotune.results import (
    ClientLateness,
    ColdCheck,
    DriftPoint,
    Effect,
    NoiseInfo,
    Prediction,
    RobustnessPoint,
    ServerMemory,
    Setting,
    StudyResults,
)
from ppas_core.policy import PolicyParams

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


def live(**update: object) -> StudyResults:
    """A live study with all that it measures of itself."""
    noise = NoiseInfo(
        metric="mean_latency_s", replay_pct=4.2, objective_pct=1.7, visible_pct=6.9, visible_held_out_pct=5.1,
        alike_pct=5.2, repeats=4, num_traces=6,
    )  # fmt: skip
    drift = [
        DriftPoint(after_trial=n, change_pct=c, reason=r)
        for n, c, r in ((8, 1.2, None), (16, None, "2 of 40 requests failed: timeout"), (24, -8.4, None))
    ]
    cold = ColdCheck(metric="mean_latency_s", num_traces=4, change_pct=2.34, reason="2.3 % above hot", noise_pct=8.5)
    client = ClientLateness(p50_s=0.0004, p99_s=0.0031, max_s=0.006, repeated=0)
    trials = [t.model_copy(update={"client": client}) for t in _small().trials]
    trials[3] = trials[3].model_copy(update={"client": client.model_copy(update={"p99_s": 0.0042, "repeated": 1})})
    memory = ServerMemory(
        replays=140, used_bytes=3 * 2**30, left_bytes=2 * 2**30, growth_bytes=12 * 2**20, is_near=True, restarts=1,
        sentence="the server grew by 12 MiB a trial, 1.9 GiB left: about 160 trials",
    )  # fmt: skip
    known = {
        "origin": Origin.LIVE, "noise": [noise], "drift": drift, "cold": cold, "trials": trials, "server_memory": memory,
    }  # fmt: skip
    return _changed(**{**known, **update})


def foretold() -> StudyResults:
    """A live study with a simulator beside it: predictions, a trial that was raced off, maps, and other rates."""
    small = live()
    trials = [
        t.model_copy(
            update={"predicted": {m: ratio * (1 + 0.02 * math.sin(t.number)) for m, ratio in t.objectives.items()}}
        )
        for t in small.trials
    ]
    trials[10] = trials[10].model_copy(update={"state": "stopped", "reason": "behind by 9 % after 2 of 6 traces"})
    trials[11] = trials[11].model_copy(update={"arm": "predicted"})
    beside = {
        "trials": trials,
        "prediction": Prediction(
            profile="calibrated-on-this-server", source="calibrated", settings=1200, sweep_s=14.2, num_trials=9,
            error_pct=1.4, bias_pct=1.3, concordance=0.94, rank_correlation=0.91, verdict="trusted",
            sentence="The simulator ranks 94 % of the pairs of trials rightly, so its proposals were tried first.",
        ),
        "maps": [
            small.landscape.model_copy(update={"fixed": {"n_th": n_th, "t_large": t_large, "scope": "prefill"}})
            for n_th in (2, 3)
            for t_large in (None, 49152)
        ],
        "robustness": [
            RobustnessPoint(
                rate_factor=factor, origin=Origin.SIMULATED, overall={"mean_latency_s": gain, "p95_latency_s": gain / 2},
                regimes={"λ=0.4": {"mean_latency_s": gain - 1}, "λ=1.2": {"mean_latency_s": gain + 1}},
                saturated=["λ=1.2"] if factor > 1 else [],
            )
            for factor, gain in ((0.7, 3.1), (1.0, 7.9), (1.3, 5.5))
        ],
        "saturated": ["λ=1.2"],
    }  # fmt: skip
    return small.model_copy(update=beside)


def static_pick(*, exported_role: str = "tuned") -> StudyResults:
    """The pick is a static budget of 4096 with knobs that do nothing; the same as the best static budget."""
    study = _small()
    static = Setting.of(PolicyParams(b_max=4096, b_cap=4096, n_th=3, t_large=49152))
    held = [h.model_copy(update={"setting": static}) if h.role == "tuned" else h for h in study.held_out]
    trials = [t.model_copy(update={"setting": static}) if t.number == study.pick_trial else t for t in study.trials]
    return study.model_copy(
        update={"held_out": held, "trials": trials, "exported": static, "exported_role": exported_role}
    )


def static_exported() -> StudyResults:
    """The best static budget beats the paper default; the tuned setting does not beat it."""
    study = _small()
    tuned, static = study.comparisons
    turned = static.model_copy(update={"candidate": "paper default", "reference": "best static", "verdict": "worse"})
    loss = {m: Effect(improvement_pct=-25.0, low_pct=-30.0, high_pct=-20.0) for m in turned.overall}
    even = {m: Effect(improvement_pct=-0.8, low_pct=-2.0, high_pct=0.4) for m in turned.overall}
    comparisons = [
        tuned,
        static.model_copy(update={"verdict": "no clear winner", "overall": even, "regimes": {}}),
        turned.model_copy(update={"overall": loss, "regimes": {}}),
    ]
    return study.model_copy(
        update={"comparisons": comparisons, "exported": study.best_static, "exported_role": "best static"}
    )


def kept() -> StudyResults:
    """No clear winner, so the paper default is exported."""
    study = _small()
    even = {m: Effect(improvement_pct=-0.01, low_pct=-0.04, high_pct=0.04) for m in study.comparisons[0].overall}
    first = study.comparisons[0].model_copy(update={"verdict": "no clear winner", "overall": even, "num_traces": 1})
    reference = study.held_out[1].setting
    return study.model_copy(
        update={
            "comparisons": [first, study.comparisons[1]],
            "exported": reference,
            "exported_role": "paper default",
        }
    )


def unchanged() -> StudyResults:
    """The pick is the paper default itself."""
    study = kept()
    reference = study.held_out[1]
    held = [h.model_copy(update={"setting": reference.setting}) if h.role == "tuned" else h for h in study.held_out]
    return study.model_copy(update={"held_out": held, "pick_trial": study.reference_trial})


def hostile() -> StudyResults:
    """Markup in every place where a user's own words can stand."""
    study = _small()
    evil = Setting(label=HOSTILE, params={**study.exported.params, HOSTILE: HOSTILE})
    regime = {"λ=0.4": HOSTILE, "λ=1.2": "λ=1.2"}
    held = [
        h.model_copy(
            update={
                "setting": Setting(label=HOSTILE, params={**h.setting.params, HOSTILE: HOSTILE}),
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
            "timeline": study.timeline.model_copy(
                update={
                    "trace": HOSTILE,
                    "why": HOSTILE,
                    "branches": [HOSTILE, "pressure", HOSTILE],
                    "lanes": [
                        lane.model_copy(update={"role": lane.role if i == 0 else HOSTILE, "setting": evil})
                        for i, lane in enumerate(study.timeline.lanes)
                    ],
                }
            ),
            "maps": [study.landscape.model_copy(update={"fixed": {HOSTILE: HOSTILE}})],
            "robustness": [
                RobustnessPoint(
                    rate_factor=f,
                    origin=study.origin,
                    overall={HOSTILE: f, "mean_latency_s": f},
                    regimes={HOSTILE: {"mean_latency_s": f}, "λ=1.2": {"mean_latency_s": f}},
                    saturated=[HOSTILE],
                )
                for f in (0.7, 1.3)
            ],
            "saturated": [HOSTILE],
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


def _thinned() -> StudyResults:
    study = _small()
    lanes = [lane.model_copy(update={"thinned": True}) for lane in study.timeline.lanes]
    return study.model_copy(update={"timeline": study.timeline.model_copy(update={"lanes": lanes[:1]})})


def _unlike_traces() -> StudyResults:
    """One trace in each regime: nothing to draw from; and trials that know no trace at all."""
    study = _small()
    kept = [t for t in study.traces if t.purpose == "held-out" or t.seed == 0]
    trials = [t.model_copy(update={"by_trace": {} if t.number % 2 else t.by_trace}) for t in study.trials]
    return study.model_copy(update={"traces": kept, "trials": trials})


ODD: dict[str, Callable[[], StudyResults]] = {
    "no random arm": lambda: sample_study.build(num_search=12, num_random=0, loads=(0.4, 1.2), requests=6),
    "no search at all": lambda: sample_study.build(num_search=0, num_random=0, loads=(0.4,), requests=6),
    "one trial of the search": lambda: sample_study.build(num_search=1, num_random=1, loads=(0.4,), requests=6),
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
    "measured live": live,
    "a simulator beside a live study": foretold,
    "live, nothing measured again": lambda: live(noise=[], drift=[], cold=None),
    "live, measured in vain": lambda: live(
        drift=[DriftPoint(after_trial=8, change_pct=None, reason="timeout")],
        cold=ColdCheck(metric="mean_latency_s", num_traces=0, change_pct=None, reason="the server did not start"),
    ),
    "the pick is a static budget": static_pick,
    "a static budget is exported": static_exported,
    "no clear winner": kept,
    "the pick is the reference": unchanged,
    "no steps were recorded": lambda: _changed(timeline=None),
    "a lane alone, thinned": _thinned,
    "one trace in each regime": _unlike_traces,
    "markup everywhere": hostile,
}
