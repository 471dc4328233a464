"""A search that several workers share: who takes which trial, exactly as many as asked for, none measured twice.

A trial is claimed atomically by the storage; `slots` says from the trials' numbers whether it counts. The worker that
measures a trial raises its beat; one whose beat stands still is given up by whoever sees that first, and its setting is
queued again as the next attempt. A worker that was only slow finds its trial finished then, and drops its measurement.

Beside the study `NAME` there is a study `NAME.workers`: one finished trial per worker, numbered by the storage, with its
plan, its machine and its own measurement of the reference. The first of them is what all others must agree with.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import optuna
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from autotune import interrupt
from autotune.distributed import agreement
from autotune.distributed.beats import HEARTBEAT_S, Beat, Watch
from autotune.distributed.slots import Attempt, Slot, State, make_slots, retry_key
from autotune.distributed.url import StorageUrl
from autotune.plan import Plan
from autotune.results import Arm
from autotune.study import MEASURED, Evaluate, Outcome, Search, SearchTrial, make_sampler
from ppas_core.errors import InvalidInput
from ppas_core.policy import PolicyParams
from search_spaces.space import Space

MAX_DEATHS: Final = 3
"""Workers that may die while they measure one setting; then it counts as failed."""
_SEED_STRIDE: Final = 7_919
"""Between the seeds of two workers: their samplers draw different points."""
_STATES: Final[dict[TrialState, State]] = {
    TrialState.WAITING: "waiting", TrialState.RUNNING: "running", TrialState.COMPLETE: "done",
    TrialState.FAIL: "dead", TrialState.PRUNED: "dead",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Worker:
    """A registered worker. name: its token, kept in its run folder. ordinal: from 0. base: its own reference."""

    name: str
    ordinal: int
    plan: dict[str, Any]
    machine: dict[str, Any]
    base: Outcome
    trials: int
    heartbeat_s: float


def register(
    storage: BaseStorage, plan: Plan, name: str, base: Outcome, *, where: StorageUrl, heartbeat_s: float = HEARTBEAT_S
) -> tuple[Worker, Worker]:
    """Registers this worker, once, and returns the first worker of the study and this one.

    Raises InvalidInput when this worker's plan or machine is another than the first one's.
    """
    said = f"the study {plan.spec.name!r} in {where}"
    study = _open_study(storage, f"{plan.spec.name}.workers", 1, said)
    ours = {"plan": agreement.agreed_plan(plan), "machine": agreement.fingerprint(plan)}
    mine = {
        "name": name,
        **ours,
        "base": base.to_dict(),
        "trials": len(plan.in_space) + plan.spec.trials,
        "heartbeat_s": heartbeat_s,
    }
    known = _workers(study, said)
    if not known and _is_used(storage, plan.spec.name):
        known = _workers(study, said)  # another one may have registered, and begun, in between
        if not known:
            raise _of_others(said)
    if known:
        _require_alike(next(iter(known.values())), ours, base, plan.spec.objectives, said)
    if name not in known:
        study.add_trial(optuna.create_trial(state=TrialState.FAIL, user_attrs=mine))
        known = _workers(study, said)
    first = next(iter(known.values()))
    _require_alike(first, ours, base, plan.spec.objectives, said)  # another one may have been first by a moment
    return first, known[name]


def _is_used(storage: BaseStorage, name: str) -> bool:
    """Whether the study has trials."""
    try:
        return bool(optuna.load_study(study_name=name, storage=storage).get_trials(deepcopy=False))
    except KeyError:
        return False


def _of_others(where: str) -> InvalidInput:
    return InvalidInput(
        f"{where} holds what another program put there; give the study another name, or name another database"
    )


def _require_alike(
    first: Worker, ours: dict[str, dict[str, Any]], base: Outcome, objectives: Sequence[str], where: str
) -> None:
    agreement.require_same("plan", first.plan, ours["plan"], where)
    agreement.require_same("machine", first.machine, ours["machine"], where)
    agreement.require_alike(agreement.apart(first.base, base, objectives), where)


class SharedSearch(Search):
    """The study's search in a storage that other workers use at the same time."""

    def __init__(
        self,
        storage: BaseStorage,
        name: str,
        *,
        first_worker: Worker,
        worker: Worker,
        space: Space,
        objectives: Sequence[str],
        sampler: str,
        seed: int,
        deterministic: bool,
        known: Sequence[tuple[Arm, PolicyParams]],
        where: StorageUrl,
        say: Callable[[str], None],
    ) -> None:
        self._space = space
        self._objectives = tuple(objectives)
        self._arm = "search"
        self._database = Path(name)
        self._say = say
        self._storage = storage
        self._worker = worker
        self._total = first_worker.trials
        self._watch = Watch(first_worker.heartbeat_s)
        self._heartbeat_s = first_worker.heartbeat_s
        self._stale: frozenset[int] = frozenset()
        said = f"the study {name!r} in {where}"
        self._workers = _open_study(storage, f"{name}.workers", 1, said)
        self._bases = {entry.name: entry.base for entry in _workers(self._workers).values()}
        self._study = _open_study(storage, name, len(self._objectives), said)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study.set_metric_names(list(self._objectives))
        begun = self._study.get_trials(deepcopy=False)
        # One stream for all that draw from one sequence; streams of their own for the others.
        own = 0 if sampler == "qmc" else len(begun) + _SEED_STRIDE * worker.ordinal
        self._study.sampler = make_sampler(sampler, seed + own, deterministic)
        self._queue_known(begun, known)

    # --- the study as it stands ---

    @property
    def total(self) -> int:
        """Trials asked for: those of the first worker, or of whoever changed that since."""
        return int(self._study.user_attrs.get("total", self._total))

    def ask_for(self, total: int) -> None:
        """Has the study end after `total` trials instead."""
        self._study.set_user_attr("total", total)

    def close(self) -> int:
        """Has no new trial begin; returns how many there will be."""
        total = min(self.total, len(make_slots(map(_attempt, self._study.get_trials(deepcopy=False)))))
        self.ask_for(total)
        return total

    def trials(self) -> list[SearchTrial]:
        """The finished trials, in order, each once, numbered by slot; all on the scale of this worker's reference."""
        found = {trial.number: trial for trial in self._study.get_trials(deepcopy=False)}
        slots = self._slots(found.values())
        return [self._of_slot(slot, found[slot.done.number]) for slot in slots if slot.done is not None]

    def mine(self) -> set[int]:
        """Numbers of the finished trials that this worker measured."""
        found = {trial.number: trial for trial in self._study.get_trials(deepcopy=False)}
        return {
            slot.index
            for slot in self._slots(found.values())
            if slot.done is not None and found[slot.done.number].user_attrs.get("owner") == self._worker.name
        }

    def attempts(self) -> dict[int, int]:
        """Number of each finished trial to the attempts that it took."""
        return {
            slot.index: slot.done.attempt
            for slot in self._slots(self._study.get_trials(deepcopy=False))
            if slot.done is not None
        }

    def has_next(self) -> bool:
        """Whether a trial waits to be taken."""
        return any(slot.last.state == "waiting" for slot in self._slots(self._study.get_trials(deepcopy=False)))

    def propose(self, arm: Arm, params: PolicyParams) -> None:
        """Queues `params`, which must lie in the space, for whoever takes the next trial."""
        self._study.enqueue_trial(self._space.encode(params), user_attrs={"arm": arm})

    # --- one trial ---

    def step(self, evaluate: Evaluate) -> SearchTrial:
        """Not for a shared search, which may have no trial to give; see `take`."""
        raise AssertionError("a shared search gives its trials by take")

    def take(self, evaluate: Evaluate) -> SearchTrial | None:
        """Measures one more trial; None when there is none to take at present, or its measurement came too late.

        An interrupt ends the measuring at once, and waits wherever a trial would be left behind half taken or half told.
        """
        with interrupt.held():
            return self._take(evaluate)

    def _take(self, evaluate: Evaluate) -> SearchTrial | None:
        self.tend()
        slots = self._slots(self._study.get_trials(deepcopy=False))
        if len(slots) >= self.total and not any(slot.last.state == "waiting" for slot in slots):
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            trial = self._study.ask()
        try:
            trial.set_user_attr("owner", self._worker.name)
            slots = self._slots(self._study.get_trials(deepcopy=False))
            slot = next((slot for slot in slots if slot.last.number == trial.number), None)
            if slot is None:
                self._cancel(trial)
                return None
            return self._measure(trial, slot, evaluate)
        except UpdateFinishedTrialError:
            self._overtaken(trial.number)
            return None
        except BaseException:
            self._release(trial)
            raise

    def _measure(self, trial: Trial, slot: Slot, evaluate: Evaluate) -> SearchTrial | None:
        with Beat(lambda count: self._beat(trial, count), self._heartbeat_s):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                params = self._space.suggest(trial)
            trial.set_user_attr("settings", params.to_dict())
            with interrupt.allowed():
                measured = evaluate(slot.index, params)
            self._write(trial, params, measured)
        outcome = Outcome.from_dict(trial.user_attrs[MEASURED])
        if not self._finish(trial.number, outcome):
            self._overtaken(trial.number)
            return None
        return SearchTrial(slot.index, self._arm_of(trial.user_attrs), params, outcome)

    def _overtaken(self, number: int) -> None:
        self._say(
            f"trial {number} was given to another worker, since nothing was heard from this one; its measurement here does "
            "not count"
        )

    def _finish(self, number: int, outcome: Outcome) -> bool:
        """Whether the trial now has a result: false where it was given up and queued again meanwhile."""
        good = outcome.reason is None
        values = [outcome.objectives[name] for name in self._objectives] if good else self._penalty()
        try:
            self._study.tell(number, values)
        except (ValueError, UpdateFinishedTrialError):
            # Finished already: by an earlier try of ours whose answer got lost, or by one that gave us up for dead.
            state = self._study.get_trials(deepcopy=False)[number].state
            if not state.is_finished():
                raise
            return state == TrialState.COMPLETE
        return True

    def _cancel(self, trial: Trial) -> None:
        """Takes back a trial beyond those asked for."""
        trial.set_user_attr("void", True)
        self._study.tell(trial, state=TrialState.FAIL)

    def _release(self, trial: Trial) -> None:
        """Gives a trial back: somebody else tries it, and nobody counts as dead. A whole measurement is told instead."""
        try:
            if (measured := self._storage.get_trial(trial._trial_id).user_attrs.get(MEASURED)) is not None:
                self._finish(trial.number, Outcome.from_dict(measured))
                return
            trial.set_user_attr("released", True)
            self._study.tell(trial, state=TrialState.FAIL)
        except Exception:  # noqa: BLE001 - what ended the measurement is told; the trial goes stale and is found then
            return

    # --- the others ---

    def _beat(self, trial: Trial, count: int) -> None:
        self._storage.set_trial_user_attr(trial._trial_id, "beat", count)
        self._look(self._study.get_trials(deepcopy=False))

    def _look(self, trials: Sequence[FrozenTrial]) -> None:
        self._stale = self._watch.look(
            {
                trial.number: (trial.user_attrs.get("owner"), trial.user_attrs.get("beat"))
                for trial in trials
                if trial.state == TrialState.RUNNING
            }
        )

    def tend(self) -> None:
        """Finishes, gives up or queues again what dead workers left behind."""
        trials = self._study.get_trials(deepcopy=False)
        self._look(trials)
        for slot in self._slots(trials):
            last, trial = slot.last, trials[slot.last.number]
            if last.state == "running" and (last.number in self._stale or self._is_mine(trial)):
                self._give_up(slot, trial)
            elif last.state == "dead":
                self._again(slot, trial)

    def _is_mine(self, trial: FrozenTrial) -> bool:
        """Whether an earlier process of this run folder left the trial: this one measures nothing while it tends."""
        return bool(trial.user_attrs.get("owner") == self._worker.name)

    def _give_up(self, slot: Slot, trial: FrozenTrial) -> None:
        try:
            if MEASURED not in trial.user_attrs and slot.last.deaths + 1 >= MAX_DEATHS and trial.params:
                handle = Trial(self._study, trial._trial_id)
                reason = f"{MAX_DEATHS} workers died while they measured it"
                self._write(handle, self._params(trial), Outcome({}, {}, {}, 0.0, reason=reason))
                trial = self._storage.get_trial(trial._trial_id)
            if MEASURED in trial.user_attrs:  # it died between the measurement and its end
                self._finish(trial.number, Outcome.from_dict(trial.user_attrs[MEASURED]))
            else:
                self._study.tell(trial.number, state=TrialState.FAIL)
        except (ValueError, UpdateFinishedTrialError):
            return  # another one was quicker

    def _again(self, slot: Slot, trial: FrozenTrial) -> None:
        attrs = trial.user_attrs
        self._study.enqueue_trial(
            trial.params or trial.system_attrs.get("fixed_params", {}),
            user_attrs={
                "key": retry_key(slot),
                "root": slot.attempts[0].number,
                "attempt": slot.last.attempt + 1,
                "deaths": slot.last.deaths + (0 if attrs.get("released") else 1),
                **({"arm": attrs["arm"]} if "arm" in attrs else {}),
            },
        )

    def _queue_known(self, begun: Sequence[FrozenTrial], known: Sequence[tuple[Arm, PolicyParams]]) -> None:
        """Queues the known settings that nobody queued yet; two that do so at once are told apart by the key."""
        there = {trial.user_attrs.get("key") for trial in begun}
        for number, (arm, params) in enumerate(known):
            if (key := f"known:{number}") not in there:
                self._study.enqueue_trial(self._space.encode(params), user_attrs={"arm": arm, "key": key})

    # --- reading ---

    def _slots(self, trials: Iterable[FrozenTrial]) -> list[Slot]:
        """The slots asked for; what lies beyond them does not count."""
        return make_slots(map(_attempt, trials))[: self.total]

    def _params(self, trial: FrozenTrial) -> PolicyParams:
        return PolicyParams.from_dict(trial.user_attrs["settings"])

    def _of_slot(self, slot: Slot, trial: FrozenTrial) -> SearchTrial:
        found = replace(self._read(trial), number=slot.index)
        theirs, ours = self._base_of(trial.user_attrs.get("owner")), self._worker.base
        return found if theirs is None else replace(found, outcome=rebased(found.outcome, theirs, ours))

    def _base_of(self, name: object) -> Outcome | None:
        if name not in self._bases:
            self._bases = {entry.name: entry.base for entry in _workers(self._workers).values()}
        return self._bases.get(str(name))


def rebased(outcome: Outcome, theirs: Outcome, ours: Outcome) -> Outcome:
    """`outcome`, measured where the reference was `theirs`, on the scale of a machine where it is `ours`.

    Objectives are ratios to the reference and stay; means per regime and per trace are multiplied by ours over theirs.
    """
    if theirs.regimes == ours.regimes and theirs.by_trace == ours.by_trace:
        return outcome
    return replace(
        outcome,
        regimes=_scaled(outcome.regimes, theirs.regimes, ours.regimes),
        by_trace=_scaled(outcome.by_trace, theirs.by_trace, ours.by_trace),
    )


def _scaled(
    table: dict[str, dict[str, float]], theirs: dict[str, dict[str, float]], ours: dict[str, dict[str, float]]
) -> dict[str, dict[str, float]]:
    return {
        row: {
            name: value * ours[row][name] / theirs[row][name] if theirs.get(row, {}).get(name) else value
            for name, value in values.items()
        }
        for row, values in table.items()
    }


def _attempt(trial: FrozenTrial) -> Attempt:
    attrs = trial.user_attrs
    return Attempt(
        number=trial.number,
        state=_STATES[trial.state],
        root=int(attrs.get("root", trial.number)),
        attempt=int(attrs.get("attempt", 1)),
        deaths=int(attrs.get("deaths", 0)),
        key=attrs.get("key"),
        void=bool(attrs.get("void")),
    )


def _workers(study: optuna.Study, where: str = "") -> dict[str, Worker]:
    """Name to worker, in the order in which they registered. Raises InvalidInput when others wrote there."""
    found: dict[str, Worker] = {}
    for trial in study.get_trials(deepcopy=False):
        try:
            found.setdefault(trial.user_attrs["name"], _worker(trial.number, trial.user_attrs))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise _of_others(where) from None
    return found


def _worker(number: int, attrs: dict[str, Any]) -> Worker:
    return Worker(
        name=attrs["name"],
        ordinal=number,
        plan=attrs["plan"],
        machine=attrs["machine"],
        base=Outcome.from_dict(attrs["base"]),
        trials=int(attrs["trials"]),
        heartbeat_s=float(attrs["heartbeat_s"]),
    )


def _open_study(storage: BaseStorage, name: str, objectives: int, where: str) -> optuna.Study:
    """The study, made where it is missing. Raises InvalidInput when it is one of another program."""
    found: optuna.Study | None = None
    for _ in range(3):  # an answer may have got lost, or another one was quicker
        with contextlib.suppress(DuplicatedStudyError):
            found = optuna.create_study(
                study_name=name, storage=storage, directions=["minimize"] * objectives, load_if_exists=True
            )
            break
    found = found or optuna.load_study(study_name=name, storage=storage)
    if found.directions != [StudyDirection.MINIMIZE] * objectives:
        raise _of_others(where)
    return found
