"""Which trials of a shared study count: each asked-for trial is a slot, and a slot has attempts.

The storage numbers its trials atomically; everything here follows from those numbers alone, so all workers come to the
same answer without a lock:

- A trial that is no retry opens a slot; the slots are ranked by number, and those beyond the number asked for are void.
- Whoever finds an attempt dead adds the next one under a key. Two that do so at once add two trials with one key, and
  the lower number counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

State = Literal["waiting", "running", "done", "dead"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One trial of the storage.

    key: names what only one trial may be (a known setting, the next attempt of a slot); None for the sampler's own.
    root: number of the trial that opened the slot. attempt: from 1. deaths: attempts before it whose worker died.
    void: marked as not counting.
    """

    number: int
    state: State
    root: int
    attempt: int = 1
    deaths: int = 0
    key: str | None = None
    void: bool = False


@dataclass(frozen=True, slots=True)
class Slot:
    """One of the trials asked for. index: its rank from 0. attempts: in order, at least one."""

    index: int
    attempts: tuple[Attempt, ...]

    @property
    def last(self) -> Attempt:
        """The attempt that the slot depends on."""
        return self.attempts[-1]

    @property
    def done(self) -> Attempt | None:
        """The attempt that gave a result, if there is one yet."""
        return next((attempt for attempt in self.attempts if attempt.state == "done"), None)


def make_slots(trials: Iterable[Attempt]) -> list[Slot]:
    """The slots in the order of their numbers, also those beyond the number asked for."""
    taken: set[str] = set()
    chains: dict[int, list[Attempt]] = {}
    for trial in sorted(trials, key=lambda found: found.number):
        if trial.void or trial.key in taken:
            continue
        if trial.key is not None:
            taken.add(trial.key)
        if trial.root == trial.number:
            chains[trial.root] = [trial]
        elif trial.root in chains:
            chains[trial.root].append(trial)
    return [
        Slot(index, tuple(sorted(chain, key=lambda found: found.attempt)))
        for index, chain in enumerate(chains.values())
    ]


def retry_key(slot: Slot) -> str:
    """The key of the attempt after the last one."""
    return f"retry:{slot.attempts[0].number}:{slot.last.attempt + 1}"
