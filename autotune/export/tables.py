"""A study's results as flat tables, for whatever reads Parquet or CSV.

trials        one row per tried setting: arm, knobs, state, ratio and gain per objective, mean per regime and metric
requests      one row per finalist and held-out request: latency, TTFT, TPOT, lengths
comparisons   one row per comparison, regime (or `overall`) and metric: the effect with its interval, and the verdict
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import pandas as pd

from autotune.results import Comparison, StudyResults
from ppas_core.files import write_atomically

Format = Literal["parquet", "csv"]
FORMATS: Final[tuple[Format, ...]] = ("parquet", "csv")
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


def trials_table(results: StudyResults) -> pd.DataFrame:
    """One row per trial. `gain_pct.METRIC` is above 0 where the setting is better than the reference."""
    rows = []
    for trial in results.trials:
        row: dict[str, Any] = {
            "number": trial.number,
            "arm": trial.arm,
            "setting": trial.setting.label,
            "state": trial.state,
            "reason": trial.reason,
            "on_front": trial.on_front,
            "is_pick": trial.number == results.trials[results.pick_trial].number,
            "duration_s": trial.duration_s,
            "origin": str(results.origin),
            **{f"setting.{knob}": value for knob, value in trial.setting.params.items()},
        }
        for name, ratio in trial.objectives.items():
            row[f"ratio.{name}"] = ratio
            row[f"gain_pct.{name}"] = (1 - ratio) * 100
        row |= {f"{metric}[{regime}]": v for regime, means in trial.regimes.items() for metric, v in means.items()}
        row |= {f"steps.{branch}": steps for branch, steps in trial.branch_steps.items()}
        rows.append(row)
    return pd.DataFrame(rows)


def requests_table(results: StudyResults) -> pd.DataFrame:
    """One row per finalist and held-out request; rows of different roles pair up by `request`."""
    parts = []
    for held in results.held_out:
        part = pd.DataFrame(held.requests.model_dump())
        part.insert(0, "request", range(len(part)))
        part.insert(0, "setting", held.setting.label)
        part.insert(0, "role", held.role)
        parts.append(part)
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    return table.assign(origin=str(results.origin))


def comparisons_table(results: StudyResults) -> pd.DataFrame:
    """One row per comparison, regime and metric."""
    rows = [row for comparison in results.comparisons for row in _effects(comparison)]
    return pd.DataFrame(rows).assign(origin=str(results.origin))


def _effects(comparison: Comparison) -> list[dict[str, Any]]:
    return [
        {
            "candidate": comparison.candidate,
            "reference": comparison.reference,
            "regime": regime,
            "metric": metric,
            "improvement_pct": effect.improvement_pct,
            "low_pct": effect.low_pct,
            "high_pct": effect.high_pct,
            "confidence": comparison.confidence,
            "preferred": metric == comparison.preferred_metric,
            "verdict": comparison.verdict,
        }
        for regime, effects in {**comparison.regimes, "overall": comparison.overall}.items()
        for metric, effect in effects.items()
    ]


TABLES: Final[dict[str, Callable[[StudyResults], pd.DataFrame]]] = {
    "trials": trials_table,
    "requests": requests_table,
    "comparisons": comparisons_table,
}


def write_tables(results: StudyResults, folder: Path, formats: Sequence[Format] = FORMATS) -> tuple[Path, ...]:
    """Writes every table in every format into `folder` and returns the files. Each is written whole or not at all.

    In CSV a text that a spreadsheet would run as a formula gets an apostrophe in front. Raises OSError.
    """
    written = []
    for name, make in TABLES.items():
        table = make(results)
        for kind in formats:
            path = folder / f"{name}.{kind}"
            data = table.to_parquet(index=False) if kind == "parquet" else _harmless(table).to_csv(index=False).encode()
            write_atomically(path, data)
            written.append(path)
    return tuple(written)


def _harmless(table: pd.DataFrame) -> pd.DataFrame:
    def quoted(value: Any) -> Any:
        return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value

    return pd.DataFrame(
        {
            name: column.map(quoted) if column.dtype.kind == "O" or str(column.dtype).startswith("str") else column
            for name, column in table.items()
        }
    )
