"""How numbers and names are written for people. Results stay in seconds; milliseconds exist only here."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable
from datetime import datetime

from autotune.metrics import METRICS

MINUS = "\N{MINUS SIGN}"
NONE = "\N{EN DASH}"
"""Stands where a value is missing, undefined or not finite."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")


def finite(value: float | None) -> float | None:
    """`value` when it is a finite number, else None."""
    return float(value) if value is not None and math.isfinite(value) else None


def significant(value: float | None, digits: int = 3) -> str:
    """`value` with about `digits` significant digits, never in exponent form between 1e-4 and 1e9."""
    number = finite(value)
    if number is None:
        return NONE
    if number == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(number))))
    if abs(number) < 1e-4 or abs(number) >= 1e9:
        return f"{number:.{digits - 1}e}".replace("-", MINUS)
    return f"{number:,.{decimals}f}".replace("-", MINUS)


def percent(value: float | None, *, signed: bool = True, digits: int = 1) -> str:
    """A value that is already in per cent: `+8.5 %`."""
    number = finite(value)
    if number is None:
        return NONE
    text = f"{number:+.{digits}f}" if signed else f"{number:.{digits}f}"
    if float(text) == 0:
        text = text.lstrip("+-")
    return text.replace("-", MINUS) + " %"


def interval(low: float | None, high: float | None, *, signed: bool = True) -> str:
    """An interval in per cent: `+6.1 to +10.9 %`."""
    return f"{percent(low, signed=signed).removesuffix(' %')} to {percent(high, signed=signed)}"


def metric_name(metric: str) -> str:
    """A metric where room is short: `mean latency` is the end-to-end one."""
    return metric_label(metric).replace("end-to-end ", "")


def metric_head(metric: str) -> str:
    """The same at the head of a column or on a switch: `Mean latency`."""
    return capitalised(metric_name(metric))


def change(improvement_pct: float | None, metric: str) -> str:
    """An improvement of a metric as what a reader sees happen: `1.7 % lower`, or `no difference`."""
    number = finite(improvement_pct)
    if number is None:
        return NONE
    return f"{percent(abs(number), signed=False)} {_direction(number, metric)}" if _shows(number) else "no difference"


def better_or_worse(improvement_pct: float | None) -> str:
    """An improvement in words that need no sign: `20.1 % better`, `3.0 % worse`, `no difference`."""
    number = finite(improvement_pct)
    if number is None:
        return NONE
    return (
        f"{percent(abs(number), signed=False)} {'better' if number > 0 else 'worse'}"
        if _shows(number)
        else "no difference"
    )


def change_between(low: float | None, high: float | None, metric: str) -> str:
    """An interval of an improvement in the words of `change`: `1.0 to 2.4 % lower`, `0.3 % higher to 2.4 % lower`.

    An end above 100 % is written as 100 %: nothing gets lower than 0, though an interval from few traces may say so.
    """
    high = None if finite(high) is None else min(finite(high) or 0.0, 100.0)
    if low == -math.inf and high is not None:
        return f"any amount {_direction(-1, metric)} to {change(high, metric)}"
    low = None if finite(low) is None else min(finite(low) or 0.0, 100.0)
    if low is None or high is None:
        return f"{NONE} to {NONE}"
    if not _shows(low) and not _shows(high):
        return "less than 0.1 % either way"
    if _shows(low) and _shows(high) and (low < 0) != (high < 0):
        return f"{change(low, metric)} to {change(high, metric)}"
    least, most = sorted((low, high), key=abs)
    return f"{percent(abs(least), signed=False).removesuffix(' %')} to {change(most, metric)}"


def counted(number: int, one: str, many: str | None = None) -> str:
    """`1 trace`, `2,000 traces`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def duration(seconds: float | None) -> str:
    """Seconds as `12.3 s` from one second up, as `845 ms` below it."""
    number = finite(seconds)
    if number is None:
        return NONE
    if abs(number) < 1 and number != 0:
        return f"{significant(number * 1000)} ms"
    return f"{significant(number)} s"


def tokens(value: object) -> str:
    """A knob's value: whole numbers with separators, None as `off`, anything else as it is."""
    if value is None:
        return "off"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return significant(value, 4)
    return str(value)


def is_time(metric: str) -> bool:
    """Whether the metric called `metric` is measured in seconds, by its unit suffix."""
    return metric.endswith("_s") and not metric.endswith("_per_s")


def metric_value(metric: str, value: float | None, scale: tuple[float, str] | None = None) -> str:
    """A value of the metric called `metric` with its unit. scale: as `time_scale`, where others stand beside it."""
    if is_time(metric):
        number = finite(value)
        return duration(value) if scale is None or number is None else f"{significant(number * scale[0])} {scale[1]}"
    return significant(value) + (" /s" if metric.endswith("_per_s") and finite(value) is not None else "")


def metric_label(metric: str) -> str:
    """The metric's label for people; an unknown metric keeps its own name."""
    return METRICS[metric].label if metric in METRICS else metric


def lower_is_better(metric: str) -> bool:
    """Whether less of the metric is an improvement; true for an unknown one."""
    return METRICS[metric].better == "lower" if metric in METRICS else True


def capitalised(text: str) -> str:
    """`text` with a capital first letter, the rest as it is."""
    return text[:1].upper() + text[1:]


def time_scale(values: Iterable[float | None]) -> tuple[float, str]:
    """The factor and the unit in which a time axis over `values` (seconds) reads best."""
    known = [abs(v) for v in map(finite, values) if v is not None]
    return (1000.0, "ms") if known and max(known) < 1 else (1.0, "s")


def moment(text: str) -> str:
    """An ISO 8601 time as `30 Nov 2026, 09:12 UTC`; anything else as it is."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return cleaned(text, 60)
    return f"{when.day} {when:%b %Y, %H:%M} {when.tzname() or ''}".rstrip()


def _shows(improvement_pct: float) -> bool:
    """Whether it is more than zero once rounded to the digit that is written."""
    return round(improvement_pct, 1) != 0


def _direction(improvement_pct: float, metric: str) -> str:
    # An improvement is 1 - ratio. Where higher is better the ratio is inverted, so `20 % higher` would be wrong there.
    if not lower_is_better(metric):
        return "better" if improvement_pct > 0 else "worse"
    return "lower" if improvement_pct > 0 else "higher"


def cleaned(text: object, limit: int = 200) -> str:
    """`text` on one line, without control characters, cut at `limit` characters."""
    line = _CONTROL.sub(" ", str(text)).strip()
    return line if len(line) <= limit else line[: limit - 1] + "…"


def plotly_text(text: object, limit: int = 120) -> str:
    """`text` for a Plotly label: Plotly reads a subset of HTML in every label and hover box, so markup is escaped."""
    return html.escape(cleaned(text, limit), quote=False)
