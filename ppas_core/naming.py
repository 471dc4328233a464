"""Which known name a mistyped one probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The name in `known` that is most like `word`, case aside; None when none is like it."""
    names = {name.casefold(): name for name in known}
    close = get_close_matches(word.casefold(), names, n=1, cutoff=0.5)
    return names[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest name as a question, then all names. Starts with a semicolon."""
    names = list(known)
    guess = nearest(word, names)
    question = f"; did you mean {guess!r}?" if guess is not None else ";"
    return f"{question} allowed: {', '.join(names)}"
