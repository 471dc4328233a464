"""Progress: measured paces, one telling several, and a file that a reader in another process finds whole."""

import contextlib
import json
import threading
import time
from pathlib import Path

import pytest

from autotune.cli import console
from autotune.heartbeat import FILE, Heartbeat
from autotune.progress import Pace, Together


class Clock:
    """Seconds that a test moves on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_eta_comes_from_the_steps_of_this_process_and_counts_down_within_a_step() -> None:
    clock = Clock()
    pace = Pace(total=10, done=4, clock=clock)
    assert (pace.step_s, pace.eta_s) == (None, None), "nothing was measured yet"
    clock.now += 6
    pace.step()
    clock.now += 2
    pace.step()
    assert pace.step_s == pytest.approx(4.0)
    assert pace.eta_s == pytest.approx(4 * 4.0)
    clock.now += 3
    assert pace.eta_s == pytest.approx(13.0)
    clock.now += 100
    assert pace.eta_s == pytest.approx(12.0), "a step that takes long is one step late, no more"
    for _ in range(4):
        pace.step()
    assert pace.eta_s == 0.0


def test_without_a_terminal_a_stage_ends_with_the_time_that_it_took_and_never_with_no_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(console, "Pace", lambda total, done=0: Pace(total, done, clock))
    bar = console.Bar()
    for stage, seconds in (("Calibrating", 126.0), ("Mapping", 4.0), ("Writing", 0.1)):
        bar.begin(stage, 2)
        for _ in range(2):
            clock.now += seconds
            bar.advance("a check" if stage == "Calibrating" else "")
        bar.end()
    bar.begin("Nothing to do", 0)
    bar.end()
    bar.begin("Searching", 307, 50)
    clock.now += 3
    bar.advance("best so far")
    bar.end()
    assert [line for line in capsys.readouterr().err.splitlines() if "steps" not in line] == [
        "Calibrating: 1 of 2, about 2 min 06 s left, a check",
        "Calibrating: done in 4 min 12 s (a check)",
        "Mapping: done in 8 s",
        "Searching: stopped at 51 of 307 after 3 s (best so far)",
    ]


class Told:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def begin(self, stage: str, total: int, done: int = 0) -> None:
        self.calls.append(("begin", stage, total, done))

    def advance(self, note: str = "") -> None:
        self.calls.append(("advance", note))

    def end(self) -> None:
        self.calls.append(("end",))


def test_several_watchers_are_told_the_same() -> None:
    one, other = Told(), Told()
    both = Together(one, other)
    both.begin("a", 2, 1)
    both.advance("n")
    both.end()
    assert one.calls == other.calls == [("begin", "a", 2, 1), ("advance", "n"), ("end",)]


def read(run: Path) -> dict[str, object]:
    data: dict[str, object] = json.loads((run / FILE).read_text())
    return data


def test_a_heartbeat_writes_at_most_once_in_its_interval_and_the_last_word_is_never_lost(tmp_path: Path) -> None:
    seen: set[int] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            with contextlib.suppress(FileNotFoundError):
                seen.add((tmp_path / FILE).stat().st_ino)  # each writing is a new file
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.monotonic()
    with Heartbeat(tmp_path, "tune", every_s=0.2) as heartbeat:
        heartbeat.begin("Searching", 2000)
        for number in range(2000):
            heartbeat.advance(f"note {number}")
            if number % 40 == 0:
                time.sleep(0.01)
        elapsed = time.monotonic() - started
    whole = time.monotonic() - started  # its last word may wait for the disk
    over.set()
    watcher.join()
    assert 1 <= len(seen) <= whole / 0.2 + 3
    last = read(tmp_path)
    assert (last["state"], last["note"]) == ("finished", "note 1999")
    (stage,) = last["stages"]
    assert elapsed - 1 <= stage.pop("seconds") <= whole
    assert stage == {"stage": "Searching", "total": 2000, "done": 2000}
    assert [file.name for file in tmp_path.iterdir()] == [FILE], "no unfinished file is left"


@pytest.mark.parametrize(
    ("error", "state", "message"),
    [(KeyboardInterrupt(), "interrupted", None), (OSError("disk full"), "failed", "disk full")],
)
def test_how_a_run_ended_is_its_last_word(tmp_path: Path, error: BaseException, state: str, message: str) -> None:
    heartbeat = Heartbeat(tmp_path, "tune")
    with contextlib.suppress(type(error)), heartbeat:
        heartbeat.begin("Searching", 3)
        raise error
    assert (read(tmp_path)["state"], read(tmp_path)["message"]) == (state, message)


def test_nothing_is_written_before_a_stage_begins_since_the_folder_may_be_another_runs(tmp_path: Path) -> None:
    with contextlib.suppress(OSError), Heartbeat(tmp_path, "tune"):
        raise OSError("the run folder is another study's")
    assert list(tmp_path.iterdir()) == []


def test_progress_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with Heartbeat(tmp_path, "tune", every_s=0.01) as heartbeat:
        heartbeat.begin("Searching", 3)
        heartbeat.advance()
        time.sleep(0.05)
        heartbeat.end()
    assert (tmp_path / FILE).is_dir()
