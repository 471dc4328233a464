"""How a trace becomes another one of the same traffic: a window, another speed, two parts, a resample.

Only arrivals and the choice of requests change. Lengths, block ids and sessions stay as they are, and each operation is
added to the provenance (`shape`, in the order applied), with its numbers, its seed and the source's digest. Where turns
wait for answers, think times stay as well, also when time is scaled: they are a person's. The first turn that a part
has of a session is sent at its recorded arrival.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ppas_core.errors import InvalidInput
from traces.format import MAX_ARRIVAL_S, SESSIONS, Trace, TraceRequest
from traces.session import beginning_anew, noted


def window(trace: Trace, from_s: float = 0.0, to_s: float | None = None, name: str | None = None) -> Trace:
    """The requests that arrive from from_s (included) to to_s (excluded; None: the end), with from_s as the new 0.

    Raises InvalidInput for bounds out of order and for a window without requests.
    """
    end_s = math.inf if to_s is None else to_s
    if not (math.isfinite(from_s) and 0 <= from_s < end_s):
        raise InvalidInput(f"window is {from_s:g} to {end_s:g} s; allowed: 0 <= from < to")
    kept = [request for request in trace.requests if from_s <= request.arrival_s < end_s]
    if not kept:
        raise InvalidInput(
            f"window {from_s:g} to {end_s:g} s of trace {trace.name!r} holds no request; "
            f"its arrivals run from {trace.requests[0].arrival_s:g} to {trace.requests[-1].arrival_s:g} s"
        )
    moved = (replace(request, arrival_s=request.arrival_s - from_s) for request in kept)
    return _shaped(trace, name or trace.name, moved, {"op": "window", "from_s": from_s, "to_s": to_s})


def scale_time(trace: Trace, factor: float, name: str | None = None) -> Trace:
    """The trace with every arrival time multiplied by `factor`: 2 is half the speed, 0.5 double. Bursts stay bursts."""
    if not (math.isfinite(factor) and factor > 0):
        raise InvalidInput(f"time factor is {factor:g}; allowed: a finite number above 0")
    return _scaled(trace, factor, name, {"op": "scale_time", "factor": factor})


def scale_rate(trace: Trace, requests_per_s: float, name: str | None = None) -> Trace:
    """The trace at a mean rate of `requests_per_s`, by scaling time: (requests - 1) / duration is the rate before.

    Raises InvalidInput for a rate out of range, and for a trace whose arrivals are all at one time: it has no rate.
    """
    if not (math.isfinite(requests_per_s) and requests_per_s > 0):
        raise InvalidInput(f"rate is {requests_per_s:g} requests a second; allowed: a finite number above 0")
    if trace.duration_s <= 0:
        raise InvalidInput(f"trace {trace.name!r} has all its requests at one time, so no rate; scale another trace")
    before = (len(trace.requests) - 1) / trace.duration_s
    step = {"op": "scale_rate", "requests_per_s": requests_per_s, "requests_per_s_before": before}
    return _scaled(trace, before / requests_per_s, name, step)


def split(trace: Trace, tuning_share: float = 0.5, gap_s: float = 0.0) -> tuple[Trace, Trace]:
    """Two parts that do not overlap in time: the first `tuning_share` of the duration to tune on, the rest held out.

    gap_s: seconds after the cut that neither part has, so that conversations across the cut can end. A request is in
    one part or, inside the gap, in none; how many were left out, and how many sessions both parts have, is recorded.
    Raises InvalidInput when a part would be empty.
    """
    if not 0 < tuning_share < 1:
        raise InvalidInput(f"tuning share is {tuning_share:g}; allowed: above 0 and below 1")
    if not (math.isfinite(gap_s) and gap_s >= 0):
        raise InvalidInput(f"gap is {gap_s:g} s; allowed: a finite number, at least 0")
    first_s = trace.requests[0].arrival_s
    cut_s = first_s + tuning_share * trace.duration_s
    early = [request for request in trace.requests if request.arrival_s < cut_s]
    late = [request for request in trace.requests if request.arrival_s >= cut_s + gap_s]
    for part, requests in (("tuning", early), ("held-out", late)):
        if not requests:
            raise InvalidInput(
                f"the {part} part of trace {trace.name!r} would be empty: cut at {cut_s:g} s, gap {gap_s:g} s, "
                f"last arrival {trace.requests[-1].arrival_s:g} s; choose another share or a longer trace"
            )
    step = {
        "op": "split",
        "tuning_share": tuning_share,
        "cut_s": cut_s,
        "gap_s": gap_s,
        "left_out_in_gap": len(trace.requests) - len(early) - len(late),
        "sessions_in_both": len(_sessions(early) & _sessions(late)),
    }
    tuning = _shaped(trace, f"{trace.name} tuning", _moved(early, first_s), {**step, "part": "tuning"})
    held_out = _shaped(trace, f"{trace.name} held out", _moved(late, cut_s + gap_s), {**step, "part": "held out"})
    return tuning, held_out


def resample(trace: Trace, seed: int, window_s: float, duration_s: float | None = None) -> Trace:
    """Another day of the same traffic: a block bootstrap of windows of `window_s` seconds, drawn with replacement.

    Each window begins at a random time, the trace taken as a circle, and keeps the times within it: bursts, lulls and
    neighbours up to its length survive, slower swings are shuffled. duration_s: of the result, the trace's own by
    default; the expected number of requests is in proportion. A session drawn again is another session; block ids stay,
    so that a request drawn twice shares its prompt with itself: `repeated_requests` in the provenance counts these.
    Raises InvalidInput for windows out of range or a draw without requests.
    """
    circle_s = trace.duration_s * len(trace.requests) / max(1, len(trace.requests) - 1)
    if circle_s <= 0:
        raise InvalidInput(f"trace {trace.name!r} has all its requests at one time; there are no windows to draw")
    if not 0 < window_s <= circle_s:
        raise InvalidInput(f"window is {window_s:g} s; allowed: above 0, at most the trace's {circle_s:g} s")
    total_s = circle_s if duration_s is None else duration_s
    if not (0 < total_s < math.inf and total_s / window_s <= 1e6):
        raise InvalidInput(f"duration is {total_s:g} s; allowed: above 0, at most a million windows")
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    first_s = trace.requests[0].arrival_s
    times = [request.arrival_s - first_s for request in trace.requests]
    drawn: list[TraceRequest] = []
    used: set[int] = set()
    for number in range(math.ceil(total_s / window_s)):
        begin_s = number * window_s
        source_s = rng.random() * circle_s
        for place, turn_s in _circular(times, source_s, min(window_s, total_s - begin_s), circle_s):
            request = trace.requests[place]
            session = None if request.session is None else f"{request.session}~{number}"
            if session is not None and turn_s and trace.mode == SESSIONS:
                session += "~"  # past the trace's end: what it has there comes before what it had here
            arrival_s = max(begin_s, begin_s + (times[place] + turn_s - source_s))
            drawn.append(replace(request, arrival_s=arrival_s, session=session))
            used.add(place)
    if not drawn:
        raise InvalidInput(
            f"seed {seed} draws no request from trace {trace.name!r}; take longer windows or another seed"
        )
    step = {
        "op": "resample",
        "seed": seed,
        "window_s": window_s,
        "duration_s": total_s,
        "repeated_requests": len(drawn) - len(used),
    }
    drawn.sort(key=lambda request: request.arrival_s)
    return replace(_shaped(trace, f"{trace.name} resampled {seed}", drawn, step), seed=seed)


def _circular(times: list[float], from_s: float, length_s: float, circle_s: float) -> Iterable[tuple[int, float]]:
    """Places of the requests within length_s from from_s on the circle, each with the seconds to add for the turn."""
    for turn_s in (0.0, circle_s):
        low = bisect_left(times, from_s - turn_s)
        high = bisect_left(times, from_s + length_s - turn_s)
        for place in range(low, high):
            yield place, turn_s


def _scaled(trace: Trace, factor: float, name: str | None, step: dict[str, Any]) -> Trace:
    last_s = trace.requests[-1].arrival_s * factor
    if last_s > MAX_ARRIVAL_S:
        raise InvalidInput(
            f"time factor {factor:g} moves the last arrival to {last_s:g} s, past {MAX_ARRIVAL_S}; choose a smaller one"
        )
    moved = (replace(request, arrival_s=request.arrival_s * factor) for request in trace.requests)
    return _shaped(trace, name or trace.name, moved, step)


def _moved(requests: Iterable[TraceRequest], zero_s: float) -> Iterable[TraceRequest]:
    return (replace(request, arrival_s=request.arrival_s - zero_s) for request in requests)


def _sessions(requests: Iterable[TraceRequest]) -> set[str]:
    return {request.session for request in requests if request.session is not None}


def _shaped(trace: Trace, name: str, requests: Iterable[TraceRequest], step: dict[str, Any]) -> Trace:
    kept = tuple(requests)
    if trace.mode == SESSIONS:
        kept = tuple(beginning_anew(kept))
    return replace(trace, name=name, requests=kept, provenance=noted(trace, step))
