"""The settings that look best are measured again before one is picked: the luckiest of many is flattered by its luck."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotune import choose, interrupt, stages
from autotune.measure import Measurement
from autotune.plan import CONFIRMATIONS, CONFIRMED
from autotune.runfolder import folder_name
from autotune.study import SearchTrial


def confirm(study: Measurement, trials: Sequence[SearchTrial]) -> list[SearchTrial]:
    """`trials`, with those near the best measured again as often as the noise asks for, and averaged.

    `autotune.choose` picks from these alone: averaged they fall back to what they are worth, and would else lose to the
    luckiest of those measured once. Near is what the noise does not tell from the best one. The reference is the mean of its
    own repeats already. Nothing is repeated where measurements do not vary. A repeat that fails is left out.
    """
    found = list(trials)
    if not study.noise:
        return found
    reach = max(entry.visible_pct for entry in study.noise) / 100
    repeats = min(CONFIRMATIONS, max(entry.repeats for entry in study.noise) - 1)
    scores = {
        place: choose.score(trial.outcome.objectives, study.preferred)
        for place, trial in enumerate(found)
        if trial.outcome.is_complete and trial.arm not in ("reference", "random")
    }
    if not scores or repeats < 1:
        return found
    best = min(scores.values())
    near = sorted((place for place in scores if scores[place] <= best * (1 + reach)), key=scores.__getitem__)
    study.progress.begin(stages.CONFIRMATION, min(CONFIRMED, len(near)) * repeats)
    for place in near[:CONFIRMED]:
        trial = found[place]
        name = trial.number if trial.number >= 0 else folder_name(trial.params.label())  # outside the space
        outcomes = [trial.outcome]
        for repeat in range(1, repeats + 1):
            interrupt.check()
            again = study.again(f"confirmed/{name}-{repeat}", trial.params, repeat)
            outcomes += [again] if again.is_complete else []
            study.progress.advance(trial.params.label())
        found[place] = replace(trial, outcome=study.averaged(outcomes))
    study.progress.end()
    return found
