"""Where a run stands, read from its folder alone: nothing is written there, and no lock is kept.

Works on a running, stopped, killed or finished run, also while another process works in it.
"""

from __future__ import annotations

import datetime
import fcntl
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from autotune import aggregate, choose
from autotune.heartbeat import FILE, boot_id, process_start
from autotune.results import StudyResults
from autotune.runversion import require_readable_run
from autotune.spec import StudySpec, load_spec
from autotune.stages import SEARCH
from autotune.workloads import TraceFiles
from ppas_core.errors import InvalidInput, PpasError
from ppas_core.plain_json import finite, load_json
from ppas_core.policy import PolicyParams

RunState = Literal["starting", "running", "interrupted", "failed", "killed", "stopped", "damaged", "finished"]
"""stopped: nobody works there, and nothing is known of how the last process ended. damaged: its results cannot be read."""

_FINALISTS: Final = 3
"""Settings that are replayed on the held-out traces, at least: pick, reference, best static budget."""
_NO_RESULT_YET: Final = "nothing measured yet"


@dataclass(frozen=True, slots=True)
class TrialLine:
    """One measured setting.

    gain_pct: over the reference on the preferred objectives, positive is better; None for a failed or stopped trial.
    reason: of a failure. stopped: why the last traces were left out. traces: how many it was measured on, 0 where its
    record does not say. duration_s, starting_s: what measuring took, and starts of servers beside it.
    """

    folder: str
    label: str
    gain_pct: float | None
    objectives_pct: dict[str, float]
    duration_s: float | None
    reason: str | None
    stopped: str | None = None
    traces: int = 0
    starting_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What a finished study came to: the pick as it was compared, what was exported, and in which role.

    costs: of what is exported against the reference, as `ppas tune` tells them. serve: the command that serves it, then
    what is to be known of that. by_load: under which loads the gain is not clear, None where it is clear under all of them or
    nothing is gained. noise: what it leaves unseen, a line for each preferred metric; empty where measurements do not vary.
    notes: the doubts about the study, also where the cold check is beyond the noise; cold: what that check said, None
    without one.
    """

    pick: str
    exported: str
    exported_role: str
    costs: tuple[str, ...] = ()
    serve: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    cold: str | None = None
    by_load: str | None = None


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Where a run stands.

    stage, stage_done, stage_total, note: what the process that works there last said; empty where none ever did.
    trials_total: settings of the search, None where that is not known yet.
    best: of the trials so far; the best of many is flattered. best_is_reference: whether it is the reference.
    outcome: of a finished study, else None.
    failures: reason to number of trials. trials_stopped: given up before their last trace.
    eta_s: seconds to the end of the run, stage_eta_s: of the stage; from measured durations, and of stages to come from the
    plan; None where that is not known.
    verdict: what can be said by now, in a sentence.
    """

    path: str
    name: str
    backend: str
    state: RunState
    message: str | None
    stage: str
    stage_done: int
    stage_total: int
    note: str
    trials_done: int
    trials_total: int | None
    best: TrialLine | None
    best_is_reference: bool
    outcome: Conclusion | None
    failures: dict[str, int]
    trials_stopped: int
    stage_eta_s: float | None
    eta_s: float | None
    started_at: str | None
    updated_s_ago: float | None
    verdict: str
    trials: list[TrialLine] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether nobody works on the run any more."""
        return self.state not in ("starting", "running")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        plain: dict[str, Any] = finite(asdict(self))
        return plain


class Watch:
    """Reads one run folder again and again; a finished trial is read once.

    Raises InvalidInput when `path` is no run folder, or one of a newer release.
    """

    def __init__(self, path: Path) -> None:
        # Not by `runfolder`: that brings Optuna and the simulator, and a look at a folder should take no second.
        if not (path / "identity.json").is_file():
            raise InvalidInput(f"{path}: is not a run folder; `ppas tune STUDY.yaml` makes one under runs/")
        require_readable_run(path)
        self.path = path
        self.spec: StudySpec = load_spec(path / "study.yaml")
        self._results_file = path / "results.json"
        self._preferred = choose.preferred_metrics(self.spec.prefer, self.spec.objectives)
        self._lines: dict[str, TrialLine] = {}
        self._results: tuple[int, StudyResults | str] | None = None

    def status(self) -> RunStatus:
        """Where the run stands now."""
        beat = _read_beat(self.path / FILE)
        stages = _stages(beat)
        state = self._state(beat)
        current: dict[str, Any] = {"stage": "", "total": 0, "done": 0}
        if stages and state != "starting":
            current = stages[-1]
        trials = self._measured("trials")
        known = [line for line in self._measured("references") if _is_setting(line)]
        best = min(
            (line for line in [*trials, *known] if line.gain_pct is not None),
            key=lambda line: -(line.gain_pct or 0.0),
            default=None,
        )
        total = next((stage["total"] for stage in reversed(stages) if stage["stage"] == SEARCH), None)
        stage_eta_s = _number(beat.get("eta_s")) if state == "running" else None
        return RunStatus(
            path=str(self.path),
            name=self.spec.name,
            backend=self.spec.backend,
            state=state,
            message=self._message(state, beat),
            stage=str(current["stage"]),
            stage_done=int(current["done"]),
            stage_total=int(current["total"]),
            note=str(beat.get("note") or ""),
            trials_done=len(trials),
            trials_total=total,
            best=best,
            best_is_reference=self._is_reference(best),
            outcome=self._outcome(state),
            failures=dict(Counter(line.reason for line in trials if line.reason is not None).most_common()),
            trials_stopped=sum(line.stopped is not None for line in trials),
            stage_eta_s=stage_eta_s,
            eta_s=self._eta_s(beat, stages, stage_eta_s, trials) if state == "running" else None,
            started_at=beat.get("started_at"),
            updated_s_ago=_seconds_since(beat),
            verdict=self._verdict(state, best, len([*trials, *known])),
            trials=trials,
        )

    def _state(self, beat: Mapping[str, Any]) -> RunState:
        said = beat.get("state")
        alive = said == "running" and _is_alive(beat)
        if alive:
            return "running"
        if _is_locked(self.path / ".lock"):
            # Somebody works there: one whom this machine's process table does not show, or one who has said nothing yet.
            return "running" if said == "running" and process_start(int(beat["pid"])) is None else "starting"
        if said == "running":
            return "killed"
        if said in ("interrupted", "failed"):
            return "interrupted" if said == "interrupted" else "failed"
        if self._results_file.is_file():
            return "damaged" if isinstance(self._read_results(), str) else "finished"
        return "finished" if said == "finished" and beat.get("command") in ("sweep", "worker") else "stopped"

    def _message(self, state: RunState, beat: Mapping[str, Any]) -> str | None:
        if state == "damaged" and isinstance(found := self._read_results(), str):
            return found
        return beat.get("message") if state in ("failed", "interrupted") else None

    def _measured(self, kind: str) -> list[TrialLine]:
        """The measured settings under `kind`, in the order of their numbers or names."""
        try:
            folders = [entry.name for entry in (self.path / kind).iterdir()]
        except OSError:
            return []
        ordered = sorted(folders, key=lambda name: (int(name) if name.isdigit() else math.inf, name))
        lines = (self._line(f"{kind}/{name}") for name in ordered)
        return [line for line in lines if line is not None]

    def _line(self, folder: str) -> TrialLine | None:
        if folder not in self._lines:
            target = self.path / folder
            try:
                measured = load_json((target / "metrics.json").read_bytes())
                params = PolicyParams.from_dict(load_json((target / "settings.json").read_bytes()))
                line = self._parsed(folder, params, measured)
            except (OSError, ValueError, TypeError, KeyError, AttributeError, PpasError):
                return None  # not written yet
            self._lines[folder] = line
        return self._lines[folder]

    def _parsed(self, folder: str, params: PolicyParams, measured: Mapping[str, Any]) -> TrialLine:
        ratios = {str(name): float(ratio) for name, ratio in measured["objectives"].items() if ratio is not None}
        whole = measured.get("reason") is None and measured.get("stopped") is None
        complete = whole and all(name in ratios for name in self._preferred)
        return TrialLine(
            folder=folder,
            label=params.label(),
            gain_pct=aggregate.improvement_pct(choose.score(ratios, self._preferred)) if complete else None,
            objectives_pct={name: aggregate.improvement_pct(ratio) for name, ratio in ratios.items()},
            duration_s=_number(measured.get("duration_s")),
            reason=measured.get("reason"),
            stopped=measured.get("stopped"),
            traces=len(measured.get("by_trace") or ()),
            starting_s=_number(measured.get("starting_s")) or 0.0,
        )

    def _eta_s(
        self,
        beat: Mapping[str, Any],
        stages: Sequence[Mapping[str, Any]],
        stage_eta_s: float | None,
        trials: list[TrialLine],
    ) -> float | None:
        """The stage's own and those of the stages to come, as planned; for a simulated study, which plans none, the
        finalists' replays at the trials' pace. None in a stage after which more comes that nobody knows the length of.
        """
        stage = str(stages[-1]["stage"]) if stages else ""
        if planned := _planned(beat):
            left_s = stage_eta_s
            if left_s is None and stage in planned:
                left_s = planned[stage] * (1 - stages[-1]["done"] / max(1, stages[-1]["total"]))
            if left_s is not None and stage == SEARCH:
                left_s = self._in_budget(left_s, trials)
            return (left_s or 0.0) + _planned_after_s(planned, stages)
        if stage_eta_s is None or stage != SEARCH:
            return stage_eta_s if beat.get("command") != "tune" else None
        took = [line.duration_s for line in trials if line.duration_s is not None and line.reason is None]
        if not took:
            return stage_eta_s
        stage_eta_s = self._in_budget(stage_eta_s, trials)
        random_s = stage_eta_s + sum(took) if self.spec.random_arm else 0.0
        tuning, held_out = self._trace_counts(max(line.traces for line in trials))
        return stage_eta_s + random_s + sum(took) / len(took) / tuning * held_out * _FINALISTS

    def _in_budget(self, search_s: float, trials: list[TrialLine]) -> float:
        """`search_s`, or what is left of the search's time budget, which failures and starts of servers use up too."""
        if (budget_s := self.spec.time_budget_s()) is None:
            return search_s
        took_s = sum((line.duration_s or 0.0) + line.starting_s for line in trials)
        return min(search_s, max(0.0, budget_s - took_s))

    def _trace_counts(self, tuning: int) -> tuple[int, int]:
        """Tuning and held-out traces; the run folder has a file for each. tuning: as the trials say, 0 if they do not."""
        spec = self.spec
        files = len(list((self.path / "traces").glob("*.jsonl")))
        if not tuning and isinstance(spec.workload, TraceFiles):
            tuning = len(spec.workload.tuning)
        tuning = tuning or files * len(spec.tuning_seeds) // (len(spec.tuning_seeds) + len(spec.held_out_seeds)) or 1
        return tuning, max(1, files - tuning)

    def _is_reference(self, line: TrialLine | None) -> bool:
        reference = self._line("references/reference")
        return line is not None and reference is not None and line.label == reference.label

    def _verdict(self, state: RunState, best: TrialLine | None, measured: int) -> str:
        if state == "finished" and isinstance(results := self._read_results(), StudyResults) and results.comparisons:
            return results.comparisons[0].sentence
        if best is None or best.gain_pct is None:
            return _NO_RESULT_YET
        if self._is_reference(best):
            if measured == 1:
                return "nothing but the reference measured yet"
            return "nothing ahead of the reference so far; on tuning traces, held-out traces decide"
        bound, what = self.spec.min_gain_pct, "min_gain_pct"
        if (visible := self._visible_pct()) is not None and visible > bound:
            bound, what = visible, "what the noise lets one see"
        if best.gain_pct >= bound:
            found = f"ahead of the reference by {best.gain_pct:.1f} % so far, above {what} ({bound:.1f} %)"
        else:
            found = (
                f"nothing ahead of the reference by {what} ({bound:.1f} %) so far: the best is {best.gain_pct:+.1f} %"
            )
        return f"{found}; on tuning traces, held-out traces decide"

    def _outcome(self, state: RunState) -> Conclusion | None:
        results = self._read_results() if state == "finished" and self._results_file.is_file() else None
        if not isinstance(results, StudyResults):
            return None
        from autotune.by_load import by_load
        from autotune.export import serve_lines  # brings what a look at a running study does not need

        tuned = results.comparisons[0] if results.comparisons else None
        costs = tuned.costs if tuned is not None and results.exported_role == tuned.candidate else ()
        serve = serve_lines(results, self.path / "export/vllm.yaml")
        return Conclusion(
            results.pick.label,
            results.exported.label,
            results.exported_role,
            tuple(costs),
            tuple(serve),
            noise=tuple(choose.noise_words(noise) for noise in results.noise),
            notes=tuple(results.warnings),
            cold=None if results.cold is None else results.cold.reason,
            by_load=by_load(results),
        )

    def _visible_pct(self) -> float | None:
        try:
            entries = load_json((self.path / "references" / "noise.json").read_bytes())
            return max(float(entry["visible_pct"]) for entry in entries)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def _read_results(self) -> StudyResults | str:
        """The results, read again only when their file changed; the reason where they cannot be read."""
        try:
            changed = self._results_file.stat().st_mtime_ns
        except OSError as error:
            return f"{self._results_file}: cannot be read: {error.strerror}"
        if self._results is None or self._results[0] != changed:
            try:
                self._results = (changed, StudyResults.load(self._results_file))
            except PpasError as error:
                self._results = (changed, str(error))
        return self._results[1]


def _is_setting(line: TrialLine) -> bool:
    """Whether a reference folder holds a setting of its own, not the reference measured once more."""
    return not line.folder.startswith("references/again-")


def _read_beat(file: Path) -> dict[str, Any]:
    try:
        data = load_json(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _stages(beat: Mapping[str, Any]) -> list[dict[str, Any]]:
    stages = beat.get("stages")
    if not isinstance(stages, list):
        return []
    return [stage for stage in stages if isinstance(stage, dict) and {"stage", "total", "done"} <= stage.keys()]


def _is_alive(beat: Mapping[str, Any]) -> bool:
    """Whether the process that wrote `beat` still runs, as far as this machine's process table shows."""
    pid, start = beat.get("pid"), beat.get("process_start")
    if not isinstance(pid, int) or start is None:
        return False
    return process_start(pid) == str(start)


def _is_locked(file: Path) -> bool:
    """Whether a process works in the run folder. A shared lock is asked for and given back at once."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _planned(beat: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by stage, as planned, in the stages' order."""
    planned = beat.get("planned_s")
    found = {str(stage): _number(seconds) for stage, seconds in planned.items()} if isinstance(planned, dict) else {}
    return {stage: seconds for stage, seconds in found.items() if seconds is not None}


def _planned_after_s(planned: Mapping[str, float], stages: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of the planned stages after the one that began last; of all where none has begun."""
    names = list(planned)
    begun = [names.index(stage["stage"]) for stage in stages if stage["stage"] in planned]
    return sum(planned[name] for name in names[begun[-1] + 1 if begun else 0 :])


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _seconds_since(beat: Mapping[str, Any]) -> float | None:
    """How long ago `beat` was written: by the monotonic clock where it was on this machine, whatever its clock was set to
    meanwhile; else by the date, and never in the future.
    """
    here, then_s = boot_id(), _number(beat.get("updated_monotonic_s"))
    if here is not None and beat.get("boot_id") == here and then_s is not None:
        return max(0.0, time.monotonic() - then_s)
    try:
        then = datetime.datetime.fromisoformat(str(beat.get("updated_at")))
        return max(0.0, (datetime.datetime.now(datetime.UTC) - then).total_seconds())
    except (ValueError, TypeError):
        return None
