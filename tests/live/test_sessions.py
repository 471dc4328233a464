"""Sessions replayed live: a turn is sent when the answer before it has ended and its person has thought."""

import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from autotune import metrics
from autotune.progress import Silent
from autotune.replay.answer import broken
from autotune.replay.outcome import ReplayOutcome
from autotune.replay.run import replay, waiting_turns
from traces.format import Trace, TraceRequest
from traces.prompts import Vocabulary
from traces.session import Thinking, to_sessions

Serve = Callable[..., str]

# Session a: three turns; session b: two; one request of nobody. Recorded far too close together for a slow server.
ROWS = [(0.0, 20, 2, "a"), (0.01, 30, 2, "b"), (0.02, 40, 2, None), (0.03, 50, 2, "a"), (0.04, 60, 2, "b"),
        (0.05, 80, 2, "a")]  # fmt: skip


def chat(think_s: float = 0.05) -> Trace:
    recorded = Trace("chat", tuple(TraceRequest(time_s, prompt, out, session=who) for time_s, prompt, out, who in ROWS))
    return to_sessions(recorded, Thinking(think_s=think_s))


def run(url: str, over: Trace, **options: Any) -> ReplayOutcome:
    given = {"cache_salt": "salt", "timeout_s": 10.0, "vocabulary": Vocabulary(1000), "max_lag_s": 5.0, **options}
    return replay(url, over, model="tiny", **given)


def seen(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/seen") as reply:  # noqa: S310
        found: list[dict[str, Any]] = json.load(reply)
    return found


def test_a_turn_is_planned_a_think_time_after_the_answer_before_it_and_sent_then(serve: Serve) -> None:
    url = serve(first_s=0.2, gap_s=0.02)
    outcome = run(url, chat(0.1))
    records = outcome.records
    assert outcome.accounting() == {"planned": 6, "unsent": 0, "sent": 6, "ok": 6, "failed": 0}
    assert records.planned_s[:3].tolist() == [0.0, 0.01, 0.02]
    for index, before, think_s in waiting_turns(chat(0.1)):
        assert records.planned_s[index] == records.done_s[before] + think_s
        assert records.planned_s[index] > 0.3 > ROWS[index][0]
    assert outcome.lag.max_s < 0.1
    assert (metrics.ttft_s(records) >= 0.2).all()
    assert (metrics.latency_s(records) < 0.6).all()
    assert outcome.about["mode"] == "sessions"
    by_length = {request["prompt"]: request for request in seen(url)}
    assert by_length[50]["head"][:20] == by_length[20]["head"][:20]
    assert by_length[80]["head"] == by_length[50]["head"]
    assert by_length[60]["head"][:20] != by_length[50]["head"][:20]


def test_without_a_think_time_the_next_turn_leaves_at_once(serve: Serve) -> None:
    outcome = run(serve(first_s=0.1), chat(0.0))
    lag_s = outcome.records.sent_s - outcome.records.planned_s
    assert outcome.accounting()["ok"] == 6
    assert (lag_s >= 0).all()
    assert np.median(lag_s[[3, 4, 5]]) < 0.05


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("refuse", "http_status"),
        ("cut", "cut_stream"),
        ("error event", "stream_error"),
        ("no end mark", "cut_stream"),
        ("drop", "connection"),
    ],
)
def test_a_failed_turn_ends_its_session_and_the_rest_is_unsent_with_the_reason(
    serve: Serve, fault: str, status: str
) -> None:
    url = serve(faults={"20": fault})
    outcome = run(url, chat())
    assert outcome.records.status == (status, "ok", "ok", "unsent", "ok", "unsent")
    assert outcome.details[3] == outcome.details[5] == "its session ended with request 0"
    assert outcome.accounting() == {"planned": 6, "unsent": 2, "sent": 4, "ok": 3, "failed": 1, status: 1}
    assert np.isnan(outcome.records.planned_s[[3, 5]]).all()
    assert outcome.valid
    assert metrics.makespan_s(outcome.records) > 0
    assert {request["prompt"] for request in seen(url)} <= {20, 30, 40, 60}


def test_a_turn_of_the_wrong_length_is_found_after_the_run_and_does_not_end_its_session(serve: Serve) -> None:
    outcome = run(serve(faults={"20": "short"}), chat())
    assert outcome.records.status == ("wrong_length", "ok", "ok", "ok", "ok", "ok")


class _Finished(Silent):
    """Counts the requests that ended."""

    def __init__(self) -> None:
        self.requests = 0

    def advance(self, note: str = "") -> None:
        self.requests += 1


def test_a_run_that_is_stopped_leaves_the_waiting_turns_unsent(serve: Serve) -> None:
    started, finished = time.monotonic(), _Finished()
    outcome = run(serve(), chat(60.0), progress=finished, stop=lambda: "enough" if finished.requests >= 3 else None)
    assert time.monotonic() - started < 60, "the time that a person thinks here"
    assert outcome.records.status == ("ok", "ok", "ok", "unsent", "unsent", "unsent")
    assert outcome.reason == "stopped: enough"


def test_a_turn_that_hangs_times_out_from_its_own_planned_time(serve: Serve) -> None:
    outcome = run(serve(faults={"50": "hang"}), chat(0.3), timeout_s=1.0)
    assert outcome.records.status == ("ok", "ok", "ok", "timeout", "ok", "unsent")
    assert outcome.records.done_s[3] - outcome.records.planned_s[3] == pytest.approx(1.0, abs=0.3)


@pytest.mark.parametrize(
    ("status", "body", "is_broken"),
    [
        (200, b'data: {"text": "an \\"error\\": no"}\n\ndata: [DONE]\n\n', False),
        (200, b'data: {"error": null}\n\ndata: [DONE]\n\n', False),
        (200, b'data: {"error":{"code": 500}}\n\ndata: [DONE]\n\n', True),
        (200, b'data: {"object": "error", "message": "x"}\n\ndata: [DONE]\n\n', True),
        (200, b'data: {"text": "[DONE]"}' + b" " * 100, True),
        (503, b"data: [DONE]\n\n", True),
    ],
)
def test_what_breaks_a_session_is_told_from_the_bytes(status: int, body: bytes, is_broken: bool) -> None:
    assert broken(status, [body[:30], body[30:]]) is is_broken
