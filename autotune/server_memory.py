"""Whether a server's memory grows from trial to trial, and how long what is left will last.

Looked at after each replay, when nothing runs: the memory of the server's whole session that no file backs, with what
was swapped out. GPU memory is not looked at: vLLM takes all of it at its start. Linux; elsewhere nothing is known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from scipy.stats import theilslopes

from ppas_core.plain_json import dump_json, load_json

_SETTLING: Final = 4
"""Replays of a new server that do not count: caches fill, pools grow to their size."""
_LEAST: Final = 8
"""Replays after these before anything is said."""
_SURE: Final = 40
"""Replays after these before growth is said that leaves time: pools still grow with the first settings and traces."""
_CLOSE_TRIALS: Final = 100
"""So few trials left leave no time to wait for that."""
_MOST: Final = 64
"""Replays that a trend is judged by: the latest, so that growth which has ended counts for nothing."""
_LEAST_GROWTH: Final = 2**20
"""Bytes a trial below which growth is no leak worth a word."""
_NEAR_TRIALS: Final = 1000
"""A study is warned when memory will not last for so many trials."""
_AHEAD_TRIALS: Final = 3
"""So many trials early is a server started anew."""


@dataclass(frozen=True, slots=True)
class Sample:
    """server: its log's name. used_bytes: of all its processes. left_bytes: that they could still get; None if unknown."""

    server: str
    used_bytes: int
    left_bytes: int | None


@dataclass(frozen=True, slots=True)
class Growth:
    """A server's memory that grows, by a robust trend: bytes a trial, and what was left at the last look."""

    per_trial_bytes: float
    left_bytes: int | None

    @property
    def trials_left(self) -> float | None:
        """How many trials what is left will last for."""
        return None if self.left_bytes is None else self.left_bytes / self.per_trial_bytes

    @property
    def is_near(self) -> bool:
        """Whether its end is near enough to be told."""
        return self.trials_left is not None and self.trials_left < _NEAR_TRIALS

    @property
    def sentence(self) -> str:
        """The same in words."""
        grew = f"the server grew by {size(self.per_trial_bytes)} a trial"
        if self.trials_left is None:
            return f"{grew}; how much memory is left is not known"
        return f"{grew}, {size(self.left_bytes or 0)} left: about {_rounded(self.trials_left)} trials"


class MemoryWatch:
    """The memory of the servers of a study, kept in `file`, one line a replay; an earlier process's lines count.

    reserve_bytes: what should stay free. replays_per_trial: of a whole trial. Growth is told once for each server.
    """

    def __init__(self, file: Path, *, reserve_bytes: float, replays_per_trial: int) -> None:
        self.file = file
        self._reserve_bytes = reserve_bytes
        self._replays_per_trial = replays_per_trial
        self._samples: dict[str, list[Sample]] = {}
        self._growths: dict[str, Growth] = {}
        self._told: set[str] = set()
        self._server = ""
        self.restarts = 0
        for entry in _read(file):
            self._take(entry)
        for server in self._samples:
            self._judge(server)
        self._told |= self._growths.keys()

    def note(self, server: str, leader: int | None) -> tuple[int | None, str | None]:
        """Looks at the server whose session `leader` leads: its memory in bytes, and growth that is news, in words."""
        used = None if leader is None else used_bytes(leader)
        if used is None or leader is None:
            return None, None
        self._server = server
        self._add({"server": server, "used_bytes": used, "left_bytes": left_bytes(leader)})
        growth = self._judge(server)
        if growth is None or not growth.is_near or server in self._told:
            return used, None
        self._told.add(server)
        return used, f"{growth.sentence}; a new server takes its place between trials before memory runs out"

    def too_little(self) -> str | None:
        """Why the running server should be started anew before the next trial, in words; None where it need not.

        Nor where that would not help, since a new one would leave less than the reserve too.
        """
        growth = self._growths.get(self._server)
        if growth is None or growth.left_bytes is None:
            return None
        wanted_bytes = self._reserve_bytes + _AHEAD_TRIALS * growth.per_trial_bytes
        settled, *_, now = self._samples[self._server][_SETTLING - 1 :]
        if growth.left_bytes >= wanted_bytes or growth.left_bytes + now.used_bytes - settled.used_bytes < wanted_bytes:
            return None
        return growth.sentence

    def restarted(self, reason: str) -> None:
        """Notes that the server was started anew for that."""
        self._add({"server": self._server, "restart": reason})
        self._server = ""

    def summary(self) -> dict[str, Any] | None:
        """What `autotune.results.ServerMemory` holds; None where nothing was seen."""
        if not self._samples:
            return None
        worst = max(self._growths.values(), key=lambda growth: growth.per_trial_bytes, default=None)
        last = list(self._samples.values())[-1][-1]
        looks = [len(samples) for samples in self._samples.values()]
        if worst is not None:
            said = worst.sentence
        elif max(looks) < _SETTLING + _LEAST:
            said = f"no server ran for the {_SETTLING + _LEAST} replays that a trend takes"
        elif max(looks) < _SETTLING + _SURE:
            said = f"no memory grew fast; a slow growth takes {_SETTLING + _SURE} replays of one server to be told from warm-up"
        else:
            said = "no server's memory grew from trial to trial"
        return {
            "replays": sum(looks),
            "used_bytes": last.used_bytes,
            "left_bytes": last.left_bytes,
            "growth_bytes": None if worst is None else worst.per_trial_bytes,
            "is_near": worst is not None and worst.is_near,
            "restarts": self.restarts,
            "sentence": said,
        }

    def _add(self, entry: dict[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(dump_json(entry) + "\n")
        self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        if "restart" in entry:
            self.restarts += 1
            return
        sample = Sample(str(entry["server"]), int(entry["used_bytes"]), entry.get("left_bytes"))
        self._samples.setdefault(sample.server, []).append(sample)

    def _judge(self, server: str) -> Growth | None:
        growth = trend(self._samples[server], self._replays_per_trial)
        if growth is not None:
            self._growths[server] = growth
        else:
            self._growths.pop(server, None)  # it has come to rest
        return growth


def trend(samples: Sequence[Sample], replays_per_trial: int) -> Growth | None:
    """How one server's memory grows; None where it does not, or not so that one could tell.

    The median of all slopes (Theil and Sen) of the latest replays: its 95 % interval must lie above 0, and their second
    half must still grow at half the pace or more, which what settles does not. Of few replays it counts only where
    memory will not last for long.
    """
    counted = samples[_SETTLING:][-_MOST:]
    if len(counted) < _LEAST:
        return None
    used = [float(sample.used_bytes) for sample in counted]
    slope, _, low, _ = theilslopes(used, alpha=0.95)
    later = theilslopes(used[len(used) // 2 :])[0]
    per_trial = float(slope) * replays_per_trial
    if low <= 0 or later < slope / 2 or per_trial < _LEAST_GROWTH:
        return None
    found = Growth(per_trial, counted[-1].left_bytes)
    is_close = found.trials_left is not None and found.trials_left < _CLOSE_TRIALS
    return found if is_close or len(counted) >= _SURE else None


# --- what the system tells ---


def used_bytes(leader: int, proc: Path = Path("/proc")) -> int | None:
    """Memory without a file behind it, resident or swapped out, of the session that `leader` leads; None if unknown."""
    found = [
        size_
        for entry in _listed(proc)
        if entry.name.isdigit() and _session(entry) == leader and (size_ := _of_process(entry)) is not None
    ]
    return sum(found) if found else None


def machine_bytes(proc: Path = Path("/proc")) -> int | None:
    """Memory of the whole machine; None if unknown."""
    return _fields(proc / "meminfo").get("MemTotal")


def left_bytes(process: int, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that `process` could still get: what the machine has free, or its control group if that allows less."""
    machine = _fields(proc / "meminfo").get("MemAvailable")
    bounds = [machine] if machine is not None else []
    with contextlib.suppress(OSError):
        for line in (proc / str(process) / "cgroup").read_text().splitlines():
            _, controllers, inside = line.split(":", 2)
            if controllers in ("", "memory") or "memory" in controllers.split(","):
                bounds += _group_left(groups / "memory" if controllers else groups, inside)
    return max(0, min(bounds)) if bounds else None


def _group_left(mount: Path, inside: str) -> Iterable[int]:
    """What each control group from `inside` up to the mount leaves, where it has a bound."""
    place = mount / inside.strip("/")
    for group in [place, *place.parents]:
        for most, now, idle in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                limit, used = (int((group / name).read_text()) for name in (most, now))
                yield limit - used + _words(group / "memory.stat").get(idle, 0)
        if group == mount:
            return


def _of_process(folder: Path) -> int | None:
    found = _fields(folder / "status")
    if "VmRSS" not in found:
        return None  # it has just ended
    return found["VmRSS"] - found.get("RssFile", 0) + found.get("VmSwap", 0)


def _session(folder: Path) -> int | None:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int((folder / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[3])
    return None


def _fields(file: Path) -> dict[str, int]:
    """The `Name: 12 kB` lines of a file under /proc, in bytes."""
    found = {}
    for line in _lines(file):
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            found[name] = int(words[0]) * 1024
    return found


def _words(file: Path) -> dict[str, int]:
    rows = (line.split() for line in _lines(file))
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _read(file: Path) -> Iterable[dict[str, Any]]:
    """The whole lines that an earlier process wrote; one that was cut short is left out."""
    for line in _lines(file):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            entry = load_json(line)
            yield (
                {"server": str(entry["server"]), "restart": str(entry["restart"])}
                if "restart" in entry
                else asdict(Sample(str(entry["server"]), int(entry["used_bytes"]), _whole(entry["left_bytes"])))
            )


def _whole(value: object) -> int | None:
    return None if value is None else int(str(value))


def size(count: float) -> str:
    """Bytes for people: 12 MiB, 1.9 GiB."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if count >= unit:
            amount = count / unit
            return f"{amount:.1f} {name}" if amount < 10 else f"{amount:.0f} {name}"
    return f"{count / 1024:.0f} KiB"


def _rounded(count: float) -> str:
    """A count to two figures."""
    step = 10 ** max(0, len(str(int(count))) - 2)
    return str(int(count) // step * step)
