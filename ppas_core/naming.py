"""Which known name a mistyped one probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

_FEW: Final = 6
"""Names that are listed even where one of them was probably meant."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The name in `known` that is most like `word`, case aside; None when none is like it."""
    names = {name.casefold(): name for name in known}
    close = get_close_matches(word.casefold(), names, n=1, cutoff=0.5)
    return names[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest name as a question, or all names; both where these are few.

    Starts with a semicolon.
    """
    names = list(known)
    guess = nearest(word, names)
    allowed = f"allowed: {', '.join(names)}"
    if guess is None:
        return f"; {allowed}"
    return f"; did you mean {guess!r}?{f' {allowed}' if len(names) <= _FEW else ''}"
