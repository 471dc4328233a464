"""The simulator's part in one live study: its profile, its forecast, its proposals, and the verdict on it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import pandas as pd

from autotune.calibration.calibrate import calibrate_plan
from autotune.durations import parse_duration_s
from autotune.foresight.forecast import Forecast, forecast
from autotune.foresight.guide import Guide, Judgement, Measured
from autotune.live import LiveEvaluator
from autotune.measure import Measurement
from autotune.results import Prediction
from autotune.study import SearchTrial
from ppas_core.errors import InvalidInput, NoResult
from ppas_core.files import write_atomically
from ppas_core.policy import PolicyParams
from ppas_core.sim.fit import StepFeatures, fit_steps
from ppas_core.sim.profile import Profile, load_profile

_LEAST_NOISE: Final = 1e-4
_JUDGED_FROM: Final = 4
"""Trials, beside the reference, before the simulator can be found wanting."""

Source = Literal["calibrated", "given"]


class Foresight:
    """A guide, with where its profile came from and what became of it.

    Once the trials contradict it, the profile is refitted to their own step logs; where that does not help, or there
    are none, it is dropped for good.
    """

    def __init__(self, study: Measurement, profile: Profile, source: Source) -> None:
        self._study = study
        self.source: Source = source
        self.refitted = False
        self.dropped: str | None = None
        self._contradicted: Judgement | None = None
        self.guide = self._sweep(profile)

    @property
    def forecast(self) -> Forecast:
        """What the simulator says now."""
        return self.guide.forecast

    def suggestion(self, trials: Sequence[SearchTrial]) -> PolicyParams | None:
        """What to measure next, or None where it is the sampler's turn, or the simulator is not trusted any more."""
        measured = _measured(trials)
        if len(measured) > _JUDGED_FROM:
            self._judge(measured)
        if self.dropped is not None:
            return None
        return self.guide.suggestion({trial.params for trial in trials}, measured)

    def expected_gain_pct(self, trials: Sequence[SearchTrial]) -> float | None:
        """The most that one more trial is expected to gain, in per cent; None while that is not known."""
        if self.dropped is not None:
            return None
        found = self.guide.next(_measured(trials))
        return 0.0 if found is None else found[1]

    def conclude(self, trials: Sequence[SearchTrial]) -> None:
        """Judges the simulator by all trials of the search: what it says of the pick afterwards rests on this verdict."""
        self._judge(_measured(trials))

    def prediction(self, trials: Sequence[SearchTrial]) -> Prediction:
        """The verdict on the simulator, for the results; of a dropped one by the trials that it was dropped for."""
        judgement = self._contradicted or self.guide.judge(_measured(trials))
        verdict: Literal["trusted", "refitted", "dropped"] = "refitted" if self.refitted else "trusted"
        if self.dropped is not None:
            verdict = "dropped"
        return Prediction(
            profile=self.forecast.profile.name,
            source=self.source,
            settings=len(self.forecast.settings),
            sweep_s=self.forecast.sweep_s,
            num_trials=judgement.num_trials,
            error_pct=judgement.error_pct,
            bias_pct=judgement.bias_pct,
            concordance=judgement.concordance,
            rank_correlation=judgement.rank_correlation,
            verdict=verdict,
            sentence=_sentence(verdict, judgement, self.dropped),
        )

    def _judge(self, measured: Sequence[Measured]) -> None:
        """Once the trials contradict the profile, refits it to their steps, and drops it where that does not help."""
        before = self.guide.judge(measured)
        if self.dropped is not None or before.trusted:
            return
        if self.refitted:
            self._drop(before, f"even refitted to the trials' step logs, {before.sentence}")
            return
        steps = _steps_so_far(self._study.run.path)
        if steps is None:
            self._drop(before, f"{before.sentence}; there are no step logs to refit it to")
            return
        try:
            self.guide = self._sweep(refit(self.forecast.profile, steps))
        except (InvalidInput, NoResult) as error:
            self._drop(before, f"{before.sentence}; no other profile fits the trials' step logs: {error}")
            return
        self.refitted = True
        after = self.guide.judge(measured)
        if not after.trusted:
            self._drop(after, f"even refitted to the trials' step logs, {after.sentence}")

    def _drop(self, judgement: Judgement, why: str) -> None:
        self._contradicted, self.dropped = judgement, why

    def _sweep(self, profile: Profile) -> Guide:
        study, plan = self._study, self._study.plan
        known = [params for _, params in plan.known]
        study.progress.begin(f"Sweeping the space in the simulator ({profile.name})", plan.space.size())
        found = forecast(
            profile, plan.space, plan.tuning, plan.reference, study.objectives, also=known, limits=study.limits
        )
        study.progress.end()
        noise = max([_LEAST_NOISE, *(entry.objective_pct / 100 for entry in study.noise)])
        visible = max([plan.spec.tie_pct / 100, *(entry.visible_pct / 100 for entry in study.noise)])
        return Guide(found, plan.space, study.preferred, known=known, noise=noise, visible=visible)


def foresee(study: Measurement) -> tuple[Foresight | None, str | None]:
    """The simulator for this study, calibrated on its server where no profile is given; else None, and why in words.

    A simulated study needs none, and one may be forbidden (`simulate: false`): then there is nothing to say.
    """
    plan, spec = study.plan, study.plan.spec
    if not isinstance(plan.evaluator, LiveEvaluator) or not spec.simulate:
        return None, None
    source: Source = "calibrated" if spec.profile is None else "given"
    failed = study.run.path / "calibration-failed.txt"
    try:
        if plan.profile is not None:
            return Foresight(study, plan.profile, source), None
        if failed.exists():  # by an earlier process of this study: a finished one given again starts no server
            return None, failed.read_text(encoding="utf-8")
        if spec.server is not None and spec.server.url is not None:
            return None, "no profile is given, and a joined server's steps are not known, so nothing was simulated"
        return Foresight(study, _calibrated(study), source), None
    except NoResult as error:
        if error.stops_study:
            raise
        reason = f"the simulator could not be calibrated, so nothing was simulated: {error}"
        write_atomically(failed, reason.encode())
        return None, reason
    except InvalidInput as error:
        return None, f"the simulator cannot replay this study, so nothing was simulated: {error}"


def refit(profile: Profile, steps: Sequence[pd.DataFrame]) -> Profile:
    """`profile` with a step cost fitted to these step logs, one a replay; delay and KV blocks stay.

    Raises InvalidInput or NoResult when they do not suffice.
    """
    fit = fit_steps(StepFeatures.join([StepFeatures.of(table) for table in steps]))
    notes = {"refitted_from": profile.name, "replays": len(steps), "steps": sum(map(len, steps))}
    return Profile.from_dict(
        {
            **profile.to_dict(),
            "name": f"{profile.name}-refitted",
            "cost": fit.cost.to_dict(),
            "provenance": {**profile.provenance, "refit": notes},
            "fit": {"measured_range": dict(profile.fit.get("measured_range", {}))},
        }
    )


def _calibrated(study: Measurement) -> Profile:
    """The profile that an earlier process of this study measured, or a new one; kept in the run folder."""
    plan, file = study.plan, study.run.path / "calibrated.json"
    if file.exists():
        with contextlib.suppress(InvalidInput):  # damaged: it is measured again
            return load_profile(str(file))
    profile = calibrate_plan(
        plan,
        name=f"{plan.spec.name}-calibrated",
        target_s=parse_duration_s(plan.spec.calibration),
        progress=study.progress,
    )
    profile.save(file)
    return profile


def _measured(trials: Sequence[SearchTrial]) -> list[Measured]:
    return [Measured(trial.params, trial.outcome.objectives) for trial in trials if trial.outcome.is_complete]


def _steps_so_far(run: Path) -> list[pd.DataFrame] | None:
    """The step logs of the trials' replays, each by itself; None where there is none."""
    replays = []
    for file in sorted(run.glob("trials/*/steps.parquet")):
        try:
            replays += [table for _, table in pd.read_parquet(file).groupby("trace", sort=False)]
        except (OSError, ValueError, KeyError):
            continue  # damaged: the other trials' logs serve as well
    return replays or None


def _sentence(verdict: str, judgement: Judgement, dropped: str | None) -> str:
    if verdict == "dropped":
        return f"The simulator was dropped: {dropped or judgement.sentence}."
    head = "The profile was refitted to the trials' step logs and trusted then" if verdict == "refitted" else "Trusted"
    return f"{head}: {judgement.sentence}."
