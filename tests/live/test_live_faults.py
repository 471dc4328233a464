"""Studies in which a server or the client fails: recorded with the reason, never scored, and the study goes on."""

import os
import shutil
import signal
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from live_study import REFERENCE, live, logs, own_server, plan_of, settings_seen, static, url_of, write_study
from traffic import children, clients, has_ended, wait_until

from autotune import stages
from autotune.finalists import replay_held_out
from autotune.measure import Measurement
from autotune.progress import Silent
from autotune.results import StudyResults
from autotune.runfolder import folder_name, open_run
from autotune.sweep import Swept, sweep
from autotune.tune import tune
from ppas_core.errors import NoResult, PpasError
from ppas_core.policy import PolicyParams

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed, and its command is what is stood in for"
)


def reasons(swept: list[Swept]) -> dict[str, str | None]:
    return {one.params.label(): one.outcome.reason for one in swept}


def test_whatever_a_server_does_to_requests_is_recorded_with_its_reason_and_never_scored(tmp_path: Path) -> None:
    faults = {
        256: ("refuse half", "of 5 requests: HTTP 503: too busy today"),
        384: ("cut", "cut_stream"),
        512: ("error event", "stream_error"),
        640: ("no usage", "wrong_length"),
        768: ("short", "wrong_length"),
        896: ("hang", "5 timeout of 5"),
        1024: ("stuck", "the server hangs: it still has 5 requests"),
        1152: ("die", "the server died: the server was ended by signal 9"),
    }
    server = own_server(tmp_path, by_setting={static(budget): fault for budget, (fault, _) in faults.items()})
    path = write_study(tmp_path, {**server, "request_timeout": "2s"}, static_budgets=[*faults, 2048])
    results = tune(plan_of(path), tmp_path / "run")
    assert isinstance(results, StudyResults)
    found = {trial.setting.label: trial for trial in results.trials}
    for budget, (_, reason) in faults.items():
        trial = found[static(budget)]
        assert trial.state == "failed"
        assert reason in (trial.reason or ""), trial.reason
        assert not trial.objectives
        assert not trial.on_front
    others = [trial for trial in results.trials if trial.setting.label not in {static(b) for b in faults}]
    assert len(others) >= 2
    assert {trial.state for trial in others} == {"ok"}
    assert logs(tmp_path / "run") == ["server-1.log", "server-2.log", "server-3.log"]  # stuck and die cost one each
    assert results.exported.label not in {static(budget) for budget in faults}


def test_a_finalist_that_ends_the_server_on_a_held_out_trace_is_out_and_the_study_goes_on(tmp_path: Path) -> None:
    faults = {static(256): "slow", f"{static(1024)}@301": "die"}  # 301 tokens: the first held-out trace alone
    path = write_study(tmp_path, own_server(tmp_path, by_setting=faults), static_budgets=[256, 1024])
    results = tune(plan_of(path), tmp_path / "run")
    found = {trial.setting.label: trial for trial in results.trials}
    assert found[static(1024)].state == "failed"
    assert "on held-out traces: the server died" in (found[static(1024)].reason or "")
    assert not found[static(1024)].on_front
    assert results.best_static.label == static(256)
    assert static(1024) not in {entry.setting.label for entry in results.held_out}


def test_a_setting_that_ended_the_server_is_not_tried_again_by_a_later_process_either(tmp_path: Path) -> None:
    path = write_study(tmp_path, own_server(tmp_path, by_setting={static(256): "die"}), static_budgets=[256, 1024])
    run = tmp_path / "run"
    first = reasons(sweep(plan_of(path), run))
    assert "the server died" in (first[static(256)] or "")
    assert first[static(1024)] is None
    assert logs(run) == ["server-1.log", "server-2.log"]
    shutil.rmtree(
        run / "sweep" / folder_name(static(256))
    )  # as if the tuner had been killed before it could store the failure
    second = reasons(sweep(plan_of(path), run))
    assert "so it is not tried again (the server died" in (second[static(256)] or "")
    assert str(run / "servers/deadly.json") in (second[static(256)] or "")
    assert logs(run) == ["server-1.log", "server-2.log"]  # refused without starting a server for it
    (run / "servers/deadly.json").unlink()
    shutil.rmtree(run / "sweep" / folder_name(static(256)))
    assert "the server died" in (reasons(sweep(plan_of(path), run))[static(256)] or "")


def test_when_the_server_dies_under_every_setting_the_study_stops_and_can_go_on_once_the_machine_is_sound(
    tmp_path: Path,
) -> None:
    broken, run = tmp_path / "broken", tmp_path / "run"
    server = own_server(tmp_path, die_while=str(broken))
    path = write_study(tmp_path, server, static_budgets=[256, 384, 512, 640, 768, 896])
    with pytest.raises(NoResult) as stopped:
        tune(plan_of(path), run, _BreaksAfterTheReference(broken))
    said = str(stopped.value)
    assert "4 settings in a row could not be measured (the last: the server " in said
    assert f"now the reference {REFERENCE.label()} cannot be either" in said
    assert said.endswith("then give the same command again")
    assert len(logs(run)) == 5  # it died under the first, in the next three's warm-up, and in the reference's
    assert len(list((run / "trials").iterdir())) == 5  # of ten: the reference and four that failed
    assert not _stand_ins(tmp_path)

    broken.unlink()
    results = tune(plan_of(path), run)
    states = [trial.state for trial in results.trials]
    assert states.count("failed") == 3, "what had been told stays; the fourth and later ones are measured"
    assert states.count("ok") == len(states) - 3


def test_a_server_that_does_not_start_again_after_a_death_stops_the_study_at_once(tmp_path: Path) -> None:
    once = tmp_path / "started"
    script = f'[ -e {once} ] && {{ echo "no more today"; exit 3; }}; touch {once}; exec "$@"'
    server = own_server(tmp_path, "sh", "-c", script, "sh", by_setting={static(256): "die"})
    path = write_study(tmp_path, server, static_budgets=[256, 512, 1024])
    with pytest.raises(PpasError, match="no more today"):
        sweep(plan_of(path), tmp_path / "run")
    assert logs(tmp_path / "run") == ["server-1.log", "server-2.log"]
    assert not (tmp_path / "run/sweep" / folder_name(static(512))).exists()


def test_a_reference_that_the_server_refuses_stops_the_study_before_any_trial(tmp_path: Path) -> None:
    path = write_study(tmp_path, own_server(tmp_path, by_setting={REFERENCE.label(): "refuse"}))
    with pytest.raises(
        NoResult, match=r"the reference .* cannot be measured: .*5 of 5 requests: HTTP 503: too busy today"
    ):
        tune(plan_of(path), tmp_path / "run")
    assert not (tmp_path / "run/trials").exists()


class _BreaksAfterTheReference(Silent):
    """Makes a file as soon as the search's first trial, which is the reference, is done."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.searching = False

    def begin(self, stage: str, total: int, done: int = 0) -> None:
        self.searching = stage == stages.SEARCH

    def advance(self, note: str = "") -> None:
        if self.searching:
            self.file.touch()


def test_a_server_that_ends_between_trials_is_replaced_at_nobodys_expense(tmp_path: Path) -> None:
    path = write_study(tmp_path, own_server(tmp_path), static_budgets=[256])
    plan = plan_of(path)
    evaluator = live(plan.evaluator)
    said: list[str] = []
    evaluator.say = said.append
    with evaluator.session(tmp_path / "servers"):
        evaluator.replay(REFERENCE, plan.tuning[0])
        stand_in = next(pid for pid in _stand_ins(tmp_path))
        os.kill(stand_in, signal.SIGKILL)
        wait_until(lambda: all(map(has_ended, children(os.getpid(), "autotune.server_guard"))))
        replay = evaluator.replay(PolicyParams.static(256, max_num_seqs=16), plan.tuning[0])
        assert not replay.requests.failures()
    assert any("replacing the server between trials" in text for text in said)
    assert not (tmp_path / "servers/deadly.json").exists()
    assert not _stand_ins(tmp_path)


def test_a_killed_guard_leaves_no_server_even_behind_a_wrapper_that_is_no_exec(tmp_path: Path) -> None:
    plan = plan_of(write_study(tmp_path, own_server(tmp_path, "sh", "-c", '"$@" & wait', "sh")))
    evaluator = live(plan.evaluator)
    with evaluator.session(tmp_path / "servers"):
        evaluator.replay(REFERENCE, plan.tuning[0])
        assert len(_stand_ins(tmp_path)) >= 2
        (guard,) = children(os.getpid(), "autotune.server_guard")
        os.kill(guard, signal.SIGKILL)
        wait_until(lambda: has_ended(guard))
        assert not evaluator.replay(REFERENCE, plan.tuning[0]).requests.failures()
        wait_until(lambda: len(_stand_ins(tmp_path)) == 2)  # the first server is gone, the second serves
    wait_until(lambda: not _stand_ins(tmp_path))


def test_a_stalled_client_has_the_replay_repeated_and_then_called_not_measurable(tmp_path: Path) -> None:
    once, always = static(256), static(512)
    server = own_server(tmp_path)
    path = write_study(tmp_path, server, gap_s=0.2, static_budgets=[256, 512, 1024])
    run = tmp_path / "run"
    stalls = _Stalls(run, {once: 1, always: 3})
    with stalls:
        found = {one.params.label(): one.outcome for one in sweep(plan_of(path), run)}
    assert stalls.done == {once: 1, always: 3}
    assert "could not be measured in 3 attempts: the client sent late" in (found[always].reason or "")
    assert not found[always].objectives
    assert found[once].reason is None
    assert found[once].client is not None
    assert found[once].client["repeated"] == 1
    assert found[once].client["p99_s"] < 0.2
    untouched = found[static(1024)]
    assert untouched.reason is None
    assert (untouched.client or {})["repeated"] == 0


class _Stalls:
    """Stops the client process for a while as soon as a replay under one of these settings is on its way."""

    def __init__(self, run: Path, wanted: dict[str, int]) -> None:
        self.run = run
        self.wanted = wanted
        self.done = dict.fromkeys(wanted, 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        stalled: set[int] = set()
        while not self._stop.wait(0.02):
            try:
                setting = settings_seen(url_of(self.run / "servers/server-1.log"))[-1]
            except (OSError, IndexError, AssertionError):
                continue
            fresh = [pid for pid in clients() if pid not in stalled]
            if fresh and self.done.get(setting, 9) < self.wanted.get(setting, 0) and self._under_way(setting):
                stalled.add(fresh[0])
                self.done[setting] += 1
                os.kill(fresh[0], signal.SIGSTOP)
                time.sleep(0.7)
                os.kill(fresh[0], signal.SIGCONT)

    def _under_way(self, setting: str) -> bool:
        """Whether a replay of five requests has begun and not ended."""
        seen = [label for label in settings_seen(url_of(self.run / "servers/server-1.log")) if label == setting]
        return len(seen) % 5 != 0


def _stand_ins(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(folder / "behaviour.json").encode() in words and b"autotune.server_guard" not in words:
                found.append(int(entry.name))
    return found


def test_a_refused_setting_is_one_failed_trial(tmp_path: Path) -> None:
    path = write_study(tmp_path, own_server(tmp_path))
    evaluator = live(plan_of(path).evaluator)
    evaluator.budget = 1024  # smaller than what the reference asks for
    with evaluator.session(tmp_path / "servers"):
        trace = plan_of(path).tuning[0]
        with pytest.raises(NoResult, match=r"the engine refused the settings: .*started with 1024 tokens"):
            evaluator.replay(REFERENCE, trace)
        assert not evaluator.replay(PolicyParams.static(512, max_num_seqs=16), trace).requests.failures()


def test_a_server_that_is_killed_under_the_reference_costs_that_measurement_and_no_more(tmp_path: Path) -> None:
    broken, run = tmp_path / "broken", tmp_path / "run"
    plan = plan_of(write_study(tmp_path, own_server(tmp_path, die_while=str(broken))))
    with open_run(run, plan) as folder, plan.evaluator.session(run / "servers"):
        study = Measurement(plan, folder, Silent())
        broken.touch()
        assert "the server died" in (study.drift(8).reason or "")
        broken.unlink()
        (found,) = replay_held_out(study, {"reference": REFERENCE}).values()
    assert [replay.trace_name for replay in found] == ["held-a", "held-b"]
    assert logs(run) == ["server-1.log", "server-2.log"]
