"""The replay client against a real HTTP server that misbehaves on demand: what is sent, kept and scored."""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traffic import children, clients, is_gone, trace, wait_until

from autotune import metrics
from autotune.replay.outcome import ReplayOutcome
from autotune.replay.run import base_url, replay
from ppas_core.errors import InvalidInput
from traces.format import Trace, TraceRequest, read_trace, write_trace
from traces.prompts import WARM_UP, Vocabulary, prompt_ids

ROOT = Path(__file__).parents[2]
Serve = Callable[..., str]
VOCABULARY = Vocabulary(1000)


def run(url: str, over: Trace, **options: Any) -> ReplayOutcome:
    given = {"cache_salt": "salt", "timeout_s": 10.0, "vocabulary": VOCABULARY, **options}
    return replay(url, over, model="tiny", **given)


def seen(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/seen") as reply:  # noqa: S310
        found: list[dict[str, Any]] = json.load(reply)
    return found


def assert_adds_up(outcome: ReplayOutcome, planned: int) -> dict[str, int]:
    count = outcome.accounting()
    assert count["planned"] == planned == len(outcome.records) == len(outcome.details)
    assert count["planned"] == count["sent"] + count["unsent"]
    assert count["sent"] == count["ok"] + count["failed"]
    reasons = set(count) - {"planned", "sent", "unsent", "ok", "failed"}
    assert sum(count[reason] for reason in reasons) == count["failed"]
    return count


def test_every_request_asks_for_exactly_the_planned_tokens(serve: Serve) -> None:
    url = serve(cached=3)
    over = trace([(100, 4), (50, 1), (7, 9)])
    outcome = run(url, over, api_key="abc")
    assert assert_adds_up(outcome, 3)["ok"] == 3
    asked = {request["prompt"]: request for request in seen(url)}
    assert len(asked) == 3
    for index, planned in enumerate(over.requests):
        sent = asked[planned.prompt_tokens]
        ids = prompt_ids(over.digest, index, planned.prompt_tokens, VOCABULARY)
        assert sent["head"] == ids[:32]
        assert sent["max_tokens"] == sent["min_tokens"] == planned.output_tokens
        assert sent["ignore_eos"] is True
        assert sent["stream"] is True
        assert sent["return_token_ids"] is True
        assert sent["temperature"] == 0
        assert sent["stream_options"] == {"include_usage": True}
        assert sent["cache_salt"] == "salt"
        assert sent["model"] == "tiny"
        assert sent["key"] is True
    assert outcome.cached_tokens.tolist() == [3, 3, 3]
    assert outcome.about["trace_digest"] == over.digest


def test_requests_leave_at_their_planned_times_however_slow_the_answers_are(serve: Serve) -> None:
    over = trace([(20, 2)] * 20, gap_s=0.03)
    outcome = run(serve(first_s=1.0), over)
    lag_s = outcome.records.sent_s - outcome.records.planned_s
    assert assert_adds_up(outcome, 20)["ok"] == 20
    assert (lag_s >= 0).all()
    assert outcome.lag.p99_s < 0.25
    assert outcome.lag.max_s == pytest.approx(lag_s.max())
    assert (metrics.ttft_s(outcome.records) >= 1.0).all()


def test_a_trace_that_begins_late_is_not_waited_for_and_keeps_its_times(serve: Serve) -> None:
    over = Trace("late", (TraceRequest(500.0, 10, 2), TraceRequest(500.1, 10, 2)))
    start_s = time.monotonic()
    outcome = run(serve(), over)
    assert time.monotonic() - start_s < 20
    assert outcome.records.planned_s.tolist() == [500.0, 500.1]
    assert 500.0 <= outcome.records.sent_s[0] < 500.1 <= outcome.records.sent_s[1] < 501


@pytest.mark.parametrize("crlf", [False, True])
@pytest.mark.parametrize(("tokens_per_event", "events"), [(1, [1] * 16), (6, [6, 6, 4]), (100, [16])])
def test_tokens_are_counted_by_id_whatever_the_size_of_a_chunk(
    serve: Serve, crlf: bool, tokens_per_event: int, events: list[int]
) -> None:
    outcome = run(serve(gap_s=0.02, tokens_per_event=tokens_per_event, crlf=crlf), trace([(30, 16), (40, 16)]))
    records = outcome.records
    assert assert_adds_up(outcome, 2)["ok"] == 2
    for index in range(2):
        own = slice(records.chunk_offsets[index], records.chunk_offsets[index + 1])
        assert records.chunk_tokens[own].tolist() == events
        times = records.chunk_time_s[own]
        assert (np.diff(times) > 0).all()
        assert times[0] == records.first_token_s[index]
        assert times[-1] == records.last_token_s[index]
        assert records.sent_s[index] < times[0] <= times[-1] <= records.done_s[index]


def test_a_server_without_token_ids_is_timed_by_its_text(serve: Serve) -> None:
    outcome = run(serve(ids=False, tokens_per_event=4), trace([(30, 16)]))
    assert assert_adds_up(outcome, 1)["ok"] == 1
    assert outcome.counted is False
    assert outcome.records.chunk_tokens.tolist() == [1, 1, 1, 1]


def test_a_role_chunk_is_not_the_first_token(serve: Serve) -> None:
    outcome = run(serve(faults={"31": "role first"}), trace([(30, 4), (31, 4)], gap_s=0))
    ttft = metrics.ttft_s(outcome.records)
    assert assert_adds_up(outcome, 2)["ok"] == 2
    assert ttft[1] >= 0.5 > ttft[0]


def test_a_usage_event_that_comes_late_adds_nothing_to_latency(serve: Serve) -> None:
    outcome = run(serve(faults={"31": "late usage"}), trace([(31, 4)]))
    assert assert_adds_up(outcome, 1)["ok"] == 1
    assert metrics.latency_s(outcome.records)[0] < 0.25
    assert outcome.records.done_s[0] - outcome.records.last_token_s[0] >= 0.3


@pytest.mark.parametrize(
    ("fault", "status", "detail"),
    [
        ("refuse", "http_status", "503: .*too busy today"),
        ("drop", "connection", "Server"),
        ("cut", "cut_stream", "Client(PayloadError|OSError|ConnectionResetError)"),
        ("no end mark", "cut_stream", r"without its end mark, data: \[DONE\]"),
        ("error event", "stream_error", "the engine broke"),
        ("garbage", "stream_error", "not a JSON object"),
        ("no usage", "wrong_length", "no usage"),
        ("short", "wrong_length", "completion_tokens is 3, planned 4"),
        ("ids missing", "wrong_length", "completion_tokens is 5, planned 4"),
        ("other prompt length", "wrong_length", "prompt_tokens is 102, planned 101"),
        ("hang", "timeout", "within 1 s of its planned time"),
        ("stall", "timeout", "within 1 s of its planned time"),
    ],
)
def test_a_fault_fails_its_own_requests_with_its_own_reason(serve: Serve, fault: str, status: str, detail: str) -> None:
    """Half the requests meet it; the others are complete, and their latencies are those of a run without it."""
    over = trace([(100 + index % 2, 4) for index in range(10)])
    outcome = run(serve(gap_s=0.01, faults={"101": fault}), over, timeout_s=1.0)
    count = assert_adds_up(outcome, 10)
    assert count["ok"] == 5
    assert count[status] == 5
    assert outcome.records.status == ("ok", status) * 5
    assert all(re.search(detail, text) for text in outcome.details[1::2])
    assert not any(outcome.details[::2])
    assert not math.isnan(metrics.value("mean_latency_s", outcome.records))
    failed = ~outcome.records.ok
    assert np.isnan(metrics.latency_s(outcome.records)[failed]).all()
    assert not np.isnan(outcome.records.sent_s).any()
    first = outcome.records.first_token_s[failed]
    assert np.isnan(first).all() == np.isnan(first).any() == (fault in ("refuse", "drop", "hang"))


def test_nobody_listening_fails_every_request_and_scores_none() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        outcome = run(f"http://127.0.0.1:{closed.getsockname()[1]}", trace([(10, 2)] * 5))
    count = assert_adds_up(outcome, 5)
    assert (count["ok"], count["connection"]) == (0, 5)
    assert math.isnan(metrics.value("mean_latency_s", outcome.records))
    assert "refused" in (outcome.first_failure() or "") or "connect" in (outcome.first_failure() or "")


def test_a_server_killed_in_the_middle_fails_what_was_open_and_what_comes_later(serve: Serve) -> None:
    url = serve(gap_s=0.05)
    (server,) = children(os.getpid(), "openai_server.py")
    over = trace([(10, 2), (11, 200)], gap_s=0)
    over = Trace("killed", (*over.requests, TraceRequest(3.0, 12, 2)))
    outcome = run(url, over, progress=_Watch(lambda: os.kill(server, signal.SIGKILL)))
    assert_adds_up(outcome, 3)
    assert outcome.records.status == ("ok", "cut_stream", "connection")


def test_a_stopped_run_keeps_what_finished_and_counts_the_rest(serve: Serve) -> None:
    watch = _Watch(lambda: None)
    over = trace([(10, 1), (11, 1000), (12, 1)], gap_s=0)
    over = Trace("stopped", (*over.requests, TraceRequest(60.0, 13, 1)))
    outcome = run(serve(gap_s=0.05), over, progress=watch, stop=lambda: "enough" if watch.steps >= 2 else None)
    assert outcome.records.status == ("ok", "stopped", "ok", "unsent")
    count = assert_adds_up(outcome, 4)
    assert (count["sent"], count["unsent"], count["stopped"]) == (3, 1, 1)
    assert (outcome.valid, outcome.reason) == (False, "stopped: enough")


def test_a_client_that_was_held_up_makes_an_invalid_run(serve: Serve) -> None:
    def hold_up() -> None:
        (client,) = clients()
        os.kill(client, signal.SIGSTOP)
        time.sleep(0.6)
        os.kill(client, signal.SIGCONT)

    outcome = run(serve(), trace([(10, 2)] * 60, gap_s=0.03), progress=_Watch(hold_up))
    assert assert_adds_up(outcome, 60)["ok"] == 60
    assert outcome.valid is False
    assert "the client sent late" in (outcome.reason or "")
    assert outcome.lag.max_s > 0.3


def test_a_client_held_up_while_it_had_nothing_to_send_makes_an_invalid_run_too(serve: Serve) -> None:
    def hold_up() -> None:
        (client,) = clients()
        os.kill(client, signal.SIGSTOP)
        time.sleep(0.6)
        os.kill(client, signal.SIGCONT)

    outcome = run(serve(gap_s=0.05), trace([(10, 1), (11, 40)], gap_s=0), progress=_Watch(hold_up))
    assert assert_adds_up(outcome, 2)["ok"] == 2
    assert outcome.lag.p99_s < 0.3
    assert outcome.lag.stalled_share > 0.1
    assert outcome.valid is False


def test_prompts_of_fifty_thousand_tokens_arrive_whole_and_on_time(serve: Serve) -> None:
    url = serve(gap_s=0.01)
    over = trace([(50_000, 8)] * 4, gap_s=0.2)
    outcome = run(url, over)
    assert assert_adds_up(outcome, 4)["ok"] == 4
    assert [request["prompt"] for request in seen(url)] == [50_000] * 4
    assert len({request["digest"] for request in seen(url)}) == 4
    assert outcome.lag.p99_s < 0.25
    assert metrics.value("mean_tpot_s", outcome.records) < 0.1


def test_shared_blocks_reach_the_server_as_shared_prefixes_and_a_warm_up_shares_nothing(
    serve: Serve, tmp_path: Path
) -> None:
    url = serve()
    blocks = [(1, 2), (1, 3), (4, 2)]
    over = Trace("blocks", tuple(TraceRequest(0.0, 30, 1, block_hashes=hashes) for hashes in blocks), block_size=16)
    write_trace(over, tmp_path / "blocks.jsonl")
    over = read_trace(tmp_path / "blocks.jsonl")  # as a user's trace comes, with its ids packed
    for purpose in ("measured", WARM_UP):
        assert assert_adds_up(run(url, over, purpose=purpose), 3)["ok"] == 3
    heads = [tuple(request["head"][:16]) for request in seen(url)]
    assert len(set(heads[:3])) == 2
    assert not set(heads[:3]) & set(heads[3:])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "SIGKILL"])
def test_no_client_outlives_its_tuner(serve: Serve, number: int) -> None:
    url = serve(faults={"10": "hang"})
    code = (
        "from autotune.replay.run import replay; from traces.format import Trace, TraceRequest; "
        f"replay({url!r}, Trace('t', (TraceRequest(0.0, 10, 2),)), model='m', cache_salt=None)"
    )
    tuner = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        # Where these tests run in the background of a shell Ctrl-C is ignored, and a child would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_until(lambda: seen(url), 30)
    (client,) = children(tuner.pid, "autotune.replay.client")
    tuner.send_signal(number)
    tuner.wait(timeout=20)
    wait_until(lambda: is_gone(client), 5)


def test_a_client_without_a_file_descriptor_left_makes_an_invalid_run_instead_of_a_slow_server(serve: Serve) -> None:
    url = serve(first_s=1.0)
    code = (
        "import resource; from autotune.replay.run import replay; from traces.format import Trace, TraceRequest\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        "over = Trace('t', tuple(TraceRequest(0.0, 10, 2) for _ in range(60)))\n"
        f"outcome = replay({url!r}, over, model='m', cache_salt=None)\n"
        "print(outcome.accounting()['connection'] > 0, outcome.valid, outcome.reason)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("True False the client")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:99999", "http://x/?a=1"])
def test_an_address_that_is_none_is_refused_before_anything_starts(url: str) -> None:
    with pytest.raises(InvalidInput, match="is not the address of a server"):
        run(url, trace([(10, 1)]))


def test_the_address_may_be_given_with_or_without_its_api_path() -> None:
    assert {base_url(f"http://x:1{rest}") for rest in ("", "/", "/v1", "/v1/")} == {"http://x:1"}
    assert base_url("https://x/proxy/v1") == "https://x/proxy"


class _Watch:
    """A progress that acts at the first finished request."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act
        self.steps = 0

    def begin(self, stage: str, total: int, done: int = 0) -> None:
        pass

    def advance(self, note: str = "") -> None:
        self.steps += 1
        if self.steps == 1:
            self.act()

    def end(self) -> None:
        pass
