"""The search: an Optuna study on SQLite that survives a kill, and what it knows afterwards.

One trial is one setting on all tuning traces. A setting that fails is told to the sampler as a point that violates a
constraint, with values a little worse than the worst seen, so that the search moves away from it: Optuna's own FAIL
state is invisible to its samplers. Only this module (and the search space's `suggest`) knows Optuna.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import sqlite3
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import optuna
from optuna.exceptions import DuplicatedStudyError
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError  # Optuna's storage is built on it and lets its errors through

from autotune import interrupt
from autotune.aggregate import RegimeMeans
from autotune.results import Arm, ClientLateness
from ppas_core.errors import InvalidInput, NoResult
from ppas_core.plain_json import finite
from ppas_core.policy import PolicyParams
from search_spaces.space import Space

_FAILED: Final = "failed"
MEASURED: Final = "measured"
"""The attribute of a trial that holds its outcome."""
_FAILING: Final = ("full", "readonly", "disk I/O", "locked")
"""Words of SQLite about the machine rather than the file."""
_NO_MEASUREMENT_YET: Final = 10.0
"""What a failed trial is told when nothing has succeeded before it: ten times the reference."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What trying one setting gave: ratios to the reference by objective, or the reason of the failure.

    client: how late the client of live replays was; see `autotune.aggregate.client_lag`. cached_share: see there.
    by_trace: trace name to objective to value. stopped: why the last traces were left out; objectives and regimes then
    rest on the traces seen. server_memory_bytes: what the server's processes held at the trial's end, where it is known.
    duration_s: of the measuring; starting_s: what starts of servers took beside it. measurements: how often it was
    measured; the figures are means over them.
    """

    objectives: dict[str, float]
    regimes: RegimeMeans
    branch_steps: dict[str, int]
    duration_s: float
    reason: str | None = None
    client: dict[str, float] | None = None
    cached_share: float | None = None
    by_trace: dict[str, dict[str, float]] = field(default_factory=dict)
    stopped: str | None = None
    server_memory_bytes: int | None = None
    starting_s: float = 0.0
    measurements: int = 1

    @property
    def is_complete(self) -> bool:
        """Whether every trace was measured."""
        return self.reason is None and self.stopped is None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, null for a metric that is undefined (NaN); `from_dict` gives the outcome back."""
        plain: dict[str, Any] = finite(asdict(self))
        return plain

    @classmethod
    def from_dict(cls, data: Any) -> Outcome:
        """What `to_dict` gave. Raises ValueError when it is something else."""
        try:
            tables = {name: _numbers(data.get(name, {})) for name in ("regimes", "by_trace")}
            objectives = {name: float(value) for name, value in data["objectives"].items()}
            steps = {branch: int(count) for branch, count in data["branch_steps"].items()}
            found = cls(**{**data, **tables, "objectives": objectives, "branch_steps": steps})
            if found.reason is None and not found.objectives:
                raise ValueError("is no outcome of a trial: it has neither figures nor the reason of a failure")
            _require_sane(found)
            return found
        except (TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"is no outcome of a trial: {error!r}") from None


def _require_sane(found: Outcome) -> None:
    """Raises TypeError or ValueError where a value is of another kind than a trial's."""
    shares = [share for share in (found.cached_share, found.server_memory_bytes) if share is not None]
    fine = (
        all(word is None or isinstance(word, str) for word in (found.reason, found.stopped))
        and all(math.isfinite(value) and value > 0 for value in found.objectives.values())
        and all(math.isfinite(number) for number in (found.duration_s, found.starting_s, *shares))
        and isinstance(found.measurements, int)
        and found.measurements >= 1
    )
    if not fine:
        raise ValueError("is no outcome of a trial: a figure of it is none")
    if found.client is not None:
        ClientLateness.model_validate(found.client)


def _numbers(table: Any) -> dict[str, dict[str, float]]:
    return {
        row: {name: math.nan if value is None else float(value) for name, value in values.items()}
        for row, values in table.items()
    }


@dataclass(frozen=True, slots=True)
class SearchTrial:
    """A finished trial: its place in the study, why it was tried, the realised setting, and what it gave."""

    number: int
    arm: Arm
    params: PolicyParams
    outcome: Outcome


Evaluate = Callable[[int, PolicyParams], Outcome]
"""Tries a setting as the trial of that number."""


def resolve_sampler(name: str) -> str:
    """`auto` becomes gp where torch is installed, else tpe. Raises InvalidInput when a sampler's package is missing."""
    needs = {"gp": "torch", "cmaes": "cmaes"}
    if name == "auto":
        return "gp" if importlib.util.find_spec("torch") else "tpe"
    if (package := needs.get(name)) and not importlib.util.find_spec(package):
        raise InvalidInput(
            f"sampler {name!r} needs the package {package!r}, which is not installed; install it or use tpe"
        )
    return name


class Search:
    """One arm of a study, stored under `name` in the SQLite file `database`; opening it again continues it.

    first: settings to try before the sampler's own, with their arm; they must lie in `space`.
    deterministic: whether the same setting always measures the same (the simulator without noise).
    """

    def __init__(
        self,
        database: Path,
        name: str,
        *,
        space: Space,
        objectives: Sequence[str],
        sampler: str,
        seed: int,
        deterministic: bool,
        arm: Arm = "search",
        first: Sequence[tuple[Arm, PolicyParams]] = (),
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space = space
        self._objectives = tuple(objectives)
        self._arm: Arm = arm
        self._database = database
        self._left_unfinished = True  # perhaps, by an earlier process
        with _stored(database):
            self._open(name, sampler, seed, deterministic, first)

    def _open(
        self, name: str, sampler: str, seed: int, deterministic: bool, first: Sequence[tuple[Arm, PolicyParams]]
    ) -> None:
        database = self._database
        try:
            storage = optuna.storages.RDBStorage(
                f"sqlite:///{database}", engine_kwargs={"creator": lambda: _connect(database)}
            )
        except RuntimeError as error:  # Optuna's word for a schema of another release of its own
            raise InvalidInput(f"{database}: {str(error).strip()}") from None
        self._study = optuna.create_study(
            study_name=name,
            storage=storage,
            directions=["minimize"] * len(self._objectives),
            load_if_exists=True,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study.set_metric_names(list(self._objectives))
        begun = self._study.get_trials(deepcopy=False)
        # A seeded sampler that is started again would repeat its first points: move its stream on.
        self._study.sampler = make_sampler(sampler, seed + len(begun), deterministic)
        for first_arm, params in first[len(begun) :]:
            self._study.enqueue_trial(self._space.encode(params), user_attrs={"arm": first_arm})

    def trials(self) -> list[SearchTrial]:
        """The finished trials, in order."""
        with _stored(self._database):
            return [
                self._read(trial) for trial in self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            ]

    def has_next(self) -> bool:
        """Whether the next trial is settled already: proposed, or left unfinished by a killed process."""
        with _stored(self._database):
            return bool(self._study.get_trials(deepcopy=False, states=(TrialState.WAITING, TrialState.RUNNING)))

    def propose(self, arm: Arm, params: PolicyParams) -> None:
        """Makes `params`, which must lie in the space, the next trial."""
        with _stored(self._database):
            self._study.enqueue_trial(self._space.encode(params), user_attrs={"arm": arm})

    def step(self, evaluate: Evaluate) -> SearchTrial:
        """Runs one more trial: first the one that a killed process left unfinished, else the sampler's next.

        An interrupt ends the measuring at once, and waits while the sampler draws and the storage writes.
        """
        with _stored(self._database), interrupt.held():
            return self._step(evaluate)

    def _step(self, evaluate: Evaluate) -> SearchTrial:
        interrupted: list[FrozenTrial] = []
        if self._left_unfinished:  # else no look at every trial for each further one
            interrupted = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        self._left_unfinished = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            trial = Trial(self._study, interrupted[0]._trial_id) if interrupted else self._study.ask()
            params = self._space.suggest(trial)
        if MEASURED not in trial.user_attrs:
            with interrupt.allowed():
                measured = evaluate(trial.number, params)
            self._write(trial, params, measured)
        outcome = _read_outcome(trial.user_attrs)
        good = outcome.reason is None
        self._study.tell(trial, [outcome.objectives[name] for name in self._objectives] if good else self._penalty())
        self._left_unfinished = False
        return SearchTrial(trial.number, self._arm_of(trial.user_attrs), params, outcome)

    def importance(self) -> dict[str, dict[str, float]]:
        """Objective to knob to its share of the variance among good trials (PED-ANOVA); empty with too few trials."""
        shares: dict[str, dict[str, float]] = {}
        for index, name in enumerate(self._objectives):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # PED-ANOVA is marked experimental, and says so at each call
                    found = optuna.importance.get_param_importances(
                        self._study,
                        evaluator=optuna.importance.PedAnovaImportanceEvaluator(),
                        target=_ValueOf(index),
                    )
            except (ValueError, RuntimeError):
                return {}
            shares[name] = {knob: float(share) for knob, share in found.items()}
        return shares

    def _arm_of(self, user_attrs: dict[str, Any]) -> Arm:
        arm: Arm = user_attrs.get("arm", self._arm)
        return arm

    def _write(self, trial: Trial, params: PolicyParams, outcome: Outcome) -> None:
        # Every trial sets the constraint: the GP sampler raises when one lacks it.
        trial.set_constraint(_FAILED, 0.0 if outcome.reason is None else 1.0)
        trial.set_user_attr("settings", params.to_dict())
        trial.set_user_attr(MEASURED, outcome.to_dict())

    def _read(self, trial: FrozenTrial) -> SearchTrial:
        attrs = trial.user_attrs
        try:
            params = PolicyParams.from_dict(attrs["settings"])
            return SearchTrial(trial.number, self._arm_of(attrs), params, _read_outcome(attrs))
        except (KeyError, TypeError, ValueError, InvalidInput) as error:
            raise _damaged(self._database, f"trial {trial.number}: {error!r}") from None

    def _penalty(self) -> list[float]:
        good = [trial.outcome.objectives for trial in self.trials() if trial.outcome.reason is None]
        return [1.05 * max((o[name] for o in good), default=_NO_MEASUREMENT_YET) for name in self._objectives]


@contextlib.contextmanager
def _stored(database: Path) -> Iterator[None]:
    """Errors of the storage within the context become ours: InvalidInput where it is damaged, NoResult where it fails."""
    try:
        yield
    except (sqlite3.Error, SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        found = str(getattr(error, "orig", None) or error.__cause__ or error).splitlines()[0]
        if any(word in found for word in _FAILING):
            raise NoResult(
                f"{database}: {found}; make room, or make it writable, and give the same command again: every finished "
                "trial is kept"
            ) from None
        raise _damaged(database, found) from None
    except (DuplicatedStudyError, json.JSONDecodeError) as error:
        raise _damaged(database, str(error)) from None


def _damaged(database: Path, reason: str) -> InvalidInput:
    return InvalidInput(
        f"{database}: is damaged ({reason}); put back a copy of the run folder, or name another one with --run"
    )


def _connect(database: Path) -> sqlite3.Connection:
    """A connection in write-ahead mode: a killed process loses nothing, and no trial waits for a disk flush."""
    connection = sqlite3.connect(database, timeout=60, check_same_thread=False)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    return connection


@dataclass(frozen=True, slots=True)
class _ValueOf:
    """Takes objective number `index` of a trial; PED-ANOVA wants a function of the trial."""

    index: int

    def __call__(self, trial: FrozenTrial) -> float:
        return float(trial.values[self.index])


def _read_outcome(user_attrs: dict[str, Any]) -> Outcome:
    return Outcome.from_dict(user_attrs[MEASURED])


def make_sampler(name: str, seed: int, deterministic: bool) -> BaseSampler:
    """The sampler of that name, with its own stream of random numbers. Raises InvalidInput for another name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        match name:
            case "gp":
                return optuna.samplers.GPSampler(seed=seed, deterministic_objective=deterministic)
            case "tpe":
                return optuna.samplers.TPESampler(seed=seed, multivariate=True)
            case "cmaes":
                return optuna.samplers.CmaEsSampler(seed=seed)
            case "nsga2":
                return optuna.samplers.NSGAIISampler(seed=seed, population_size=20)
            case "qmc":
                return optuna.samplers.QMCSampler(seed=seed, scramble=True)
            case "random":
                return optuna.samplers.RandomSampler(seed=seed)
    raise InvalidInput(f"no sampler {name!r}; allowed: gp, tpe, cmaes, nsga2, qmc, random")
