"""What a long job tells whoever watches it. Knows neither terminals nor files."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the stages of a job. Every call is cheap, and none may raise."""

    def begin(self, stage: str, total: int, done: int = 0) -> None:
        """A stage of `total` steps starts, `done` of which an earlier process finished."""
        ...

    def advance(self, note: str = "") -> None:
        """One more step is done; `note` says what is worth knowing now, such as the best so far."""
        ...

    def end(self) -> None:
        """The stage is over."""
        ...


class Silent:
    """Watches nothing."""

    def begin(self, stage: str, total: int, done: int = 0) -> None:
        """Does nothing."""

    def advance(self, note: str = "") -> None:
        """Does nothing."""

    def end(self) -> None:
        """Does nothing."""
