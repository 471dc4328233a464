"""How busy this machine is: told beside a measurement that varies too much."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_STAT: Final = Path("/proc/stat")
_STEAL: Final = 7
"""Place of the time that the hypervisor gave to other guests among the figures of `cpu`."""
_TOTALS: Final = 8
"""Figures that add up to all time; the ones after them are parts of these."""


class LoadWatch:
    """Watches from now on."""

    def __init__(self, stat: Path = _STAT) -> None:
        self._stat = stat
        self._before = _cpu_times(stat)

    def words(self) -> str:
        """The load beside the cores, and the share of the time since that other guests of the host took, where they did."""
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        said = f"this machine's load is {load:.1f} on {cores} core{'' if cores == 1 else 's'}"
        before, now = self._before, _cpu_times(self._stat)
        if before is None or now is None or now[0] <= before[0]:
            return said
        stolen_pct = 100 * (now[1] - before[1]) / (now[0] - before[0])
        return f"{said}, and its host gave {stolen_pct:.0f} % of their time to others" if stolen_pct >= 0.5 else said


def _cpu_times(stat: Path) -> tuple[int, int] | None:
    """All time and stolen time so far, in ticks; None where this system does not say."""
    try:
        name, *figures = stat.read_text(encoding="ascii").splitlines()[0].split()
        ticks = [int(figure) for figure in figures]
        return (sum(ticks[:_TOTALS]), ticks[_STEAL]) if name == "cpu" else None
    except (OSError, ValueError, IndexError):
        return None
