"""A worker's loop: trials of a shared study until there are as many as were asked for."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Final

from optuna.storages import BaseStorage

from autotune import interrupt, stages
from autotune.distributed import agreement
from autotune.distributed.beats import HEARTBEAT_S
from autotune.distributed.shared import SharedSearch, register
from autotune.distributed.storage import OUTAGE_S, Patience, open_storage
from autotune.distributed.url import StorageUrl
from autotune.foresight.stage import Foresight
from autotune.measure import Measurement
from autotune.plan import REFERENCE_EVERY, Plan
from autotune.progress import Progress
from autotune.runfolder import RunFolder, open_run
from autotune.searching import Searching, note
from autotune.study import Search, SearchTrial
from ppas_core.errors import NoResult
from ppas_core.files import write_atomically

_NAME_FILE: Final = "worker.txt"
_LOOK_EVERY_S: Final = 0.5
"""How often a worker without a trial looks whether the last ones are done, or free again."""


class Shared:
    """The part of a study that several processes do together: the search, through the storage at `where`.

    say: told of outages and of trials that went to others. heartbeat_s: of a study that begins with this process; the
    others take over what it began with.
    """

    def __init__(
        self,
        where: StorageUrl,
        *,
        say: Callable[[str], None],
        heartbeat_s: float = HEARTBEAT_S,
        outage_s: float = OUTAGE_S,
    ) -> None:
        self.where = where
        self._say = say
        self._heartbeat_s = heartbeat_s
        self._patience = Patience(where, say, outage_s)

    @cached_property
    def storage(self) -> BaseStorage:
        """The storage, opened. Raises InvalidInput or NoResult: best before a server is started or a folder made."""
        return open_storage(self.where, self._patience)

    def search(self, study: Measurement) -> SharedSearch:
        """This process's part in the search; its reference has been measured. Raises InvalidInput for a stranger."""
        plan = study.plan
        storage = self.storage
        first, worker = register(
            storage, plan, _name(study.run), study.base, where=self.where, heartbeat_s=self._heartbeat_s
        )
        self._say_apart(agreement.apart(first.base, study.base, study.objectives), study)
        return SharedSearch(
            storage,
            plan.spec.name,
            first_worker=first,
            worker=worker,
            space=plan.space,
            objectives=study.objectives,
            sampler=plan.sampler,
            seed=plan.spec.seed,
            deterministic=not plan.evaluator.is_noisy,
            known=plan.in_space,
            where=self.where,
            say=self._say,
        )

    def _say_apart(self, ratio: float, study: Measurement) -> None:
        """Says how far the reference is from the first worker's, where the noise does not explain it."""
        visible_pct = max((entry.visible_pct for entry in study.noise), default=0.0)
        apart_pct = 100 * (ratio - 1)
        if abs(apart_pct) > visible_pct:
            self._say(
                f"the reference measures {apart_pct:+.1f} % here against the machine that began, more than its noise explains "
                f"({visible_pct:.1f} %); trials are compared as ratios to the reference of their own machine"
            )

    def searching(self, study: Measurement, foresight: Foresight | None) -> Searching:
        """What runs the coordinator's search: it may end it early, and has every trial in its own run folder."""
        return SharedSearching(study, foresight, coordinates=True)


class SharedSearching(Searching):
    """As `Searching`, on trials that others measure too.

    coordinates: whether this process may change how many trials there will be. A worker that does not ends when its time
    is up, and leaves the rest to the others.
    """

    def __init__(self, study: Measurement, foresight: Foresight | None, *, coordinates: bool) -> None:
        super().__init__(study, foresight)
        self._coordinates = coordinates

    def search(self, search: Search, total: int) -> list[SearchTrial]:
        """Takes trials until all are done, or this worker's time is up; returns every trial of the study so far."""
        if not isinstance(search, SharedSearch):
            raise AssertionError("the shared loop runs a shared search")
        study, plan, progress = self._study, self._study.plan, self._study.progress
        if self._coordinates:
            search.ask_for(total)
        done, mine = search.trials(), search.mine()
        race = self._race([trial for trial in done if trial.number in mine])
        budget_s, started = self._spec.time_budget_s(), time.perf_counter()
        progress.begin(stages.SEARCH, search.total, len(done))
        for number in range(REFERENCE_EVERY, len(mine) + 1, REFERENCE_EVERY):
            self._watch_drift(number)
        while len(done) < search.total:
            try:
                interrupt.check()
                if len(done) >= len(plan.in_space) and self.cut is None:
                    self.cut = self._ends(done, budget_s, time.perf_counter() - started, total)
                    if self.cut is not None and self._coordinates:
                        search.close()  # what others measure at present still counts
                    elif self.cut is not None:
                        break
                    elif self._coordinates:
                        self._propose(search, done)
                # Known settings are measured whole: they are what a race is run against.
                measure = partial(self._measure, race if len(done) >= len(plan.in_space) else None)
                trial = None if self.cut is not None and not search.has_next() else search.take(measure)
                if trial is not None:
                    mine.add(trial.number)
                    if race is not None:
                        note(race, trial, study.preferred)
                    if len(mine) % REFERENCE_EVERY == 0:
                        self._watch_drift(len(mine))
                else:
                    time.sleep(_LOOK_EVERY_S)
                    search.tend()
                before, done = len(done), search.trials()
                for _ in range(len(done) - before):
                    progress.advance(self._best_note(self._best(done)))
            except KeyboardInterrupt:
                done = self._concluded(search, total)
                break
        progress.end()
        self._keep(done)
        return done

    def _concluded(self, search: SharedSearch, total: int) -> list[SearchTrial]:
        """The trials with which the study ends on Ctrl-C: those done by now, for the coordinator alone.

        No new trial begins anywhere; others measure theirs to the end, which count for a later process. Raises
        KeyboardInterrupt where there is nothing to finish with: for a worker, at SIGTERM, while the storage is away, and
        before every known setting was measured.
        """
        if not self._coordinates or interrupt.is_for_good():
            raise KeyboardInterrupt
        try:
            done = search.trials()
            known = sum(trial.arm in ("reference", "published", "static") for trial in done)
            if known < len(self._study.plan.in_space):
                raise KeyboardInterrupt
            search.close()
        except NoResult:  # the storage is away
            raise KeyboardInterrupt from None
        self._hurry(
            f"Ctrl-C ended the search after {len(done)} of {total} settings, and workers end after the trial that they "
            "measure; the same commands go on"
        )
        return done

    def _settled(self, done: list[SearchTrial]) -> str | None:
        """As there; a worker that does not coordinate leaves the question to the one that does."""
        return super()._settled(done) if self._coordinates else None

    def _keep(self, done: Sequence[SearchTrial]) -> None:
        """Has the run folder hold the settings and metrics of the trials that others measured.

        A measurement of ours that came too late goes, with its requests: the other one counts.
        """
        run = self._study.run
        for trial in done:
            folder = f"trials/{trial.number}"
            kept = run.load_trial(folder, trial.params)
            if kept is None or kept.to_dict() != trial.outcome.to_dict():
                run.forget_trial(folder)
                run.save_trial(folder, trial.params, trial.outcome, ())


def work(plan: Plan, path: Path, progress: Progress, shared: Shared) -> tuple[list[SearchTrial], SharedSearch]:
    """Takes part in the study with the run folder `path` of its own; returns the study's trials and this one's search.

    Raises NoResult when the reference cannot be measured here: then no trial is taken.
    """
    _ = shared.storage
    with open_run(path, plan) as run, plan.evaluator.session(path / "servers"):
        study = Measurement(plan, run, progress)
        search = shared.search(study)
        done = SharedSearching(study, None, coordinates=False).search(search, search.total)
        run.write_manifest()
        return done, search


def _name(run: RunFolder) -> str:
    """This worker's name: a token in its run folder, so that it knows what an earlier process of that folder left."""
    file = run.path / _NAME_FILE
    try:
        return file.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        name = secrets.token_hex(8)
        write_atomically(file, f"{name}\n".encode())
        return name
