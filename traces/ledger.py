"""What became of every row of an imported file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Ledger:
    """The account of one import; it always adds up: rows_read = kept + the sum of dropped.

    format, time_unit: how the file was read; time_unit is "date" for calendar times.
    rows_read: rows of the file that hold a request; blank lines and a header are none.
    dropped: rows left out, by reason.
    without_block_hashes: rows kept without their block hashes, as these do not cover the prompt.
    late_rows: rows that arrived before a row above them; the trace is sorted, equal times in the file's order.
    offset: the file's time that became 0, as text without loss.
    tick_s: the file's clock tick in seconds where arrivals are quantised, else None.
    requests_per_tick: requests that share an arrival time in the file, on average.
    spread_seed: the seed with which quantised arrivals were spread within their tick, if they were.

    Raises ValueError when it does not add up: that would be a silent drop.
    """

    format: str
    time_unit: str
    rows_read: int
    kept: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    without_block_hashes: int = 0
    late_rows: int = 0
    offset: str = "0"
    tick_s: float | None = None
    requests_per_tick: float = 1.0
    spread_seed: int | None = None

    def __post_init__(self) -> None:
        if self.rows_read != self.kept + sum(self.dropped.values()):
            raise ValueError(f"{self.rows_read} rows read, {self.kept} kept, dropped {dict(self.dropped)}")

    def provenance(self) -> dict[str, Any]:
        """The account as plain JSON values, for a trace's header."""
        return {**asdict(self), "dropped": dict(self.dropped)}

    def lines(self) -> list[str]:
        """The account in words, for a person."""
        dropped = "; ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        lines = [
            f"format {self.format}, "
            + ("times are dates" if self.time_unit == "date" else f"times in {self.time_unit}"),
            f"rows read {self.rows_read} = kept {self.kept} + dropped {sum(self.dropped.values())}"
            + (f" ({dropped})" if dropped else ""),
            f"rows out of order {self.late_rows}" + (" (sorted)" if self.late_rows else ""),
            f"time 0 is {self.offset} in the file",
        ]
        if self.without_block_hashes:
            lines.append(
                f"{self.without_block_hashes} requests are kept without block hashes: theirs do not cover the prompt"
            )
        if self.tick_s is not None:
            lines.append(
                f"arrivals tick every {self.tick_s:g} s, {self.requests_per_tick:.1f} requests at a time; "
                + (
                    f"spread within the tick with seed {self.spread_seed}"
                    if self.spread_seed is not None
                    else "left as they are (--spread SEED spreads them within the tick)"
                )
            )
        return lines
