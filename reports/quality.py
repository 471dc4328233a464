"""How far the measurements of a live study can be trusted: noise, drift, cold start, failures. Plain data.

A simulated study without noise has nothing to say here: measuring it again gives the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.records import Origin
from autotune.results import NoiseInfo, StudyResults
from reports.numbers import capitalised, change, cleaned, counted, duration, finite, metric_label, percent
from reports.views import Missing


@dataclass(frozen=True, slots=True)
class DriftView:
    """The reference measured again: change in per cent over the number of trials before, positive is slower.

    failed: trials after which it could not be measured, with the reason. band_pct: what noise alone explains, 0 when
    it was not measured.
    """

    after_trial: tuple[int, ...]
    change_pct: tuple[float, ...]
    failed: tuple[tuple[int, str], ...]
    band_pct: float

    @property
    def largest_pct(self) -> float:
        """The greatest change in either direction."""
        return max(map(abs, self.change_pct), default=0.0)


@dataclass(frozen=True, slots=True)
class Failures:
    """Failed trials that share a reason."""

    reason: str
    trials: tuple[int, ...]


def applies(results: StudyResults) -> bool:
    """Whether measurements of this study vary at all."""
    live = results.origin == Origin.LIVE
    return bool(live or results.noise or results.drift or results.cold)


def drift(results: StudyResults) -> DriftView | Missing:
    """The course of the reference over the search."""
    known = [(p.after_trial, v) for p in results.drift if (v := finite(p.change_pct)) is not None]
    failed = tuple(
        (p.after_trial, cleaned(p.reason or "no reason recorded", 300))
        for p in results.drift
        if finite(p.change_pct) is None
    )
    if not known:
        return Missing(
            "The search was too short to measure the reference again."
            if not failed
            else f"The reference could not be measured again: {failed[0][1]}"
        )
    alone = [noise.visible_pct if noise.alike_pct is None else noise.alike_pct for noise in results.noise]
    band = max(alone, default=0.0) * math.sqrt((1 + 1 / results.reference_measurements) / 2)
    return DriftView(tuple(n for n, _ in known), tuple(v for _, v in known), failed, finite(band) or 0.0)


def failures(results: StudyResults) -> tuple[Failures, ...]:
    """The failed trials by reason, the most frequent first."""
    by_reason: dict[str, list[int]] = {}
    for trial in results.trials:
        if trial.state == "failed":
            by_reason.setdefault(cleaned(trial.reason or "no reason recorded", 300), []).append(trial.number)
    return tuple(Failures(r, tuple(n)) for r, n in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[1])))


def lead(results: StudyResults) -> str:
    """The section's first sentence: what size of difference this study can see, and what it found."""
    if not results.noise:
        return "How well the numbers above can be measured again. The noise of this study was not measured."
    widest = max(results.noise, key=lambda noise: noise.visible_held_out_pct)
    said = (
        f"Measured again, the same setting gives other numbers. From {percent(widest.visible_held_out_pct, signed=False)}"
        f" on, a difference in {metric_label(widest.metric)} on the held-out traces is more than that noise."
    )
    said += _two_bounds(results, widest)
    if widest.further:
        said += (
            f" It is wider than the reference measured against itself showed before the search: "
            f"{counted(widest.further, 'further measurement')} of settings measured again, or that did the very same as "
            "another, varied more."
        )
    return said


def _two_bounds(results: StudyResults, noise: NoiseInfo) -> str:
    """Why two differences stand beside each other: what noise alone makes, and what is found in spite of it."""
    held_out = sum(trace.purpose == "held-out" for trace in results.traces)
    said = ""
    if noise.alike_pct is not None:
        confidence = f" ({results.comparisons[0].confidence:.0%})" if results.comparisons else ""
        said = (
            f" Between two trials noise alone stays below {percent(noise.alike_pct, signed=False)}{confidence}, so closer ones "
            "cannot be told apart."
        )
    return (
        f"{said} A difference that is found is larger: noise hides it in one of five measurements only. It shrinks with "
        f"the number of traces, of which a trial has {noise.num_traces:,} and the held-out comparison {held_out:,}."
    )


def lag_words(results: StudyResults) -> str:
    """How late the client was, in a sentence: a late client would make a server look slow."""
    known = [trial.client for trial in results.trials if trial.client is not None]
    worst = max((p99 for client in known if (p99 := finite(client.p99_s)) is not None), default=None)
    if worst is None:
        return "The trials did not record how late the client sent."
    repeated = sum(client.repeated for client in known)
    again = (
        f"{counted(repeated, 'replay was', 'replays were')} made again because it was too late"
        if repeated
        else "none of the trials' replays had to be made again"
    )
    return (
        f"In the worst of {counted(len(known), 'trial')} 99 % of the requests were sent within {duration(worst)} of their "
        f"time; {again}."
    )


def memory_words(results: StudyResults) -> str | None:
    """Whether the server leaked, in a sentence; None where its memory is not known."""
    memory = results.server_memory
    if memory is None:
        return None
    again = f" It was started anew between trials {counted(memory.restarts, 'time')}." if memory.restarts else ""
    calibrated = ", those of the calibration among them" if results.prediction is not None else ""
    return f"Over {counted(memory.replays, 'replay')}{calibrated}: {cleaned(memory.sentence, 300)}.{again}"


def cold_words(results: StudyResults) -> str:
    """Hot against cold, in a sentence."""
    cold = results.cold
    if cold is None:
        return "The exported setting was not measured on a server started cold with it."
    if finite(cold.change_pct) is None:
        return (
            f"The exported setting could not be measured on a server started cold with it: {cleaned(cold.reason, 500)}"
        )
    words = change(-(cold.change_pct or 0.0), cold.metric)
    judged = ""
    if (visible := finite(cold.noise_pct)) is not None:
        size = "more" if abs(cold.change_pct or 0.0) > visible else "no more"
        judged = (
            f" That is {size} than noise explains, which alone stays below {percent(visible, signed=False)} over so many "
            "traces."
        )
    return (
        f"{capitalised(metric_label(cold.metric))} on a server started cold with the exported file: {words}"
        f"{' than on the warm one' if words[0].isdigit() else ''}, over {counted(cold.num_traces, 'held-out trace')}.{judged}"
    )
