"""How a person writes a span of time in a study file or on the command line. Standard library alone."""

from __future__ import annotations

import re
from typing import Final

from ppas_core.errors import InvalidInput

_UNITS_S: Final = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_LONGEST_S: Final = 30 * 86_400.0


def parse_duration_s(text: str, what: str = "duration") -> float:
    """Seconds of a duration such as 90s, 45m, 2h, 1h30m or 2d. Raises InvalidInput, which names `what` was given."""
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)([dhms])", text)
    seconds = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != text or not 0.001 <= seconds <= _LONGEST_S:
        raise InvalidInput(
            f"{what} is {text[:40]!r}; allowed: 0.001s to 30d, written as 0.5s, 90s, 45m, 2h, 1h30m or 2d"
        )
    return seconds
