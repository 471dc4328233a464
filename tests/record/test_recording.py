"""What a recording writes: arrivals, lengths and which prompts begin alike; no text, no key; whatever happens to it."""

import contextlib
import http.client
import json
import os
import signal
import stat
import threading
import time
from itertools import combinations, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recordings import Command, Record, Recording, RunCommand, Serve
from talk import chat, get, send
from typer.testing import CliRunner

from autotune.cli import app
from autotune.replay.run import replay
from ppas_core.errors import NoResult
from traces.format import Trace, TraceRequest, read_trace
from traces.prompts import Vocabulary

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORD = "Xylophonwaldmeister"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shared_tokens(trace: Trace, first: int, second: int) -> int:
    """Tokens of whole blocks that two prompts begin with."""
    size = trace.block_size or 0
    pairs = zip(trace.requests[first].block_hashes, trace.requests[second].block_hashes, strict=False)
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return min(alike * size, *(trace.requests[place].prompt_tokens // size * size for place in (first, second)))


def test_a_recorded_replay_equals_its_source_in_counts_lengths_arrivals_and_shared_prefixes(
    serve: Serve, run_command: RunCommand
) -> None:
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(0.02, 100))
    blocks = [
        (0, int(first), 10 + int(second), 100 + place)
        for place, (first, second) in enumerate(rng.integers(1, 4, (100, 2)))
    ]
    source = Trace(
        "source",
        tuple(
            TraceRequest(float(arrivals[place]), 50 + place % 15, 1 + place % 7, blocks[place]) for place in range(100)
        ),
        block_size=16,
    )
    recording = run_command(serve(ids=True, gap_s=0.002))
    outcome = replay(recording.url, source, model="tiny", cache_salt="s", vocabulary=Vocabulary(1000), timeout_s=30.0)
    assert outcome.accounting()["ok"] == 100, outcome.details
    account = recording.end()
    trace = read_trace(recording.output)
    assert (account["rows_read"], account["kept"], account["dropped"]) == (100, 100, {})
    assert account["recording"]["prompts_known_by"] == {"the request's token ids": 100}
    assert account["recording"]["models"] == {"tiny": 100}
    planned = [(request.prompt_tokens, request.output_tokens) for request in source.requests]
    assert [(request.prompt_tokens, request.output_tokens) for request in trace.requests] == planned
    for first, second in combinations(range(0, 100, 3), 2):
        assert shared_tokens(trace, first, second) == shared_tokens(source, first, second)
    # Half of them: a busy test machine holds up single requests. benchmarks/record_proxy.py states P99 and the largest.
    sent_s = outcome.records.sent_s - outcome.records.sent_s[0]
    late_s = np.array([request.arrival_s for request in trace.requests]) - sent_s
    late_s -= np.median(late_s)
    assert np.median(np.abs(late_s)) < 0.005
    assert np.abs(late_s).max() < 2.0


def test_no_word_of_a_prompt_an_answer_or_a_key_is_on_disk_at_any_time(
    serve: Serve, record: Record, tmp_path: Path
) -> None:
    recording = record(serve())
    ids = list(range(70_001, 70_040))
    for body in (
        chat(WORD * 9, WORD, stream=True),
        chat(WORD, user=WORD, tools=[{"name": WORD}]),
        {**chat("x"), "messages": WORD},
    ):
        send(recording.url, CHAT, body, Authorization=f"Bearer {WORD}")
    send(recording.url, COMPLETIONS, {"model": "m", "prompt": WORD})
    send(recording.url, COMPLETIONS, {"model": "m", "prompt": ids})
    send(recording.url, COMPLETIONS, f'{{"prompt": "{WORD}"'.encode())
    send(recording.url, "/v1/responses", {"model": "m", "input": WORD, "stream": True})
    send(recording.url, f"/{WORD}", {"x": WORD})
    during = files(tmp_path)
    account = recording.end()
    after = files(tmp_path)
    assert set(during) == {"traffic.jsonl.part"}
    assert set(after) == {"traffic.jsonl"}
    assert account["kept"] >= 5
    for content in (*during.values(), *after.values(), json.dumps(account).encode()):
        assert WORD.encode() not in content
        assert WORD.lower().encode() not in content.lower()
        assert b"70001" not in content
        assert b"Bearer" not in content


def test_text_is_kept_only_when_asked_for_and_for_its_owner_alone(serve: Serve, record: Record, tmp_path: Path) -> None:
    recording = record(serve(), keep_text=True)
    send(recording.url, CHAT, chat(WORD, "b"), Authorization="Bearer abc")
    recording.end()
    texts = tmp_path / "traffic.jsonl.text.jsonl"
    assert stat.S_IMODE(texts.stat().st_mode) == 0o600
    (line,) = texts.read_text().splitlines()
    kept = json.loads(line)
    assert kept["messages"] == chat(WORD, "b")["messages"]
    assert kept["output_tokens"] == 6
    assert WORD.encode() not in recording.output.read_bytes()
    assert "abc" not in line


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("refuse", "HTTP status 503"),
        ("error event", "the stream ended in an error"),
        ("cut", "the answer was cut"),
    ],
)
def test_a_failed_request_is_counted_and_left_out_with_its_reason(
    serve: Serve, record: Record, fault: str, reason: str
) -> None:
    recording = record(serve(fault=fault))
    for stream in (True, False):
        with contextlib.suppress(http.client.IncompleteRead, OSError):
            send(recording.url, CHAT, chat("a", "b", stream=stream))
    if fault == "refuse":
        with pytest.raises(NoResult, match=r"holds no request that can be replayed \(2 HTTP status 503\)"):
            recording.end()
        return
    account = recording.end()
    assert (account["rows_read"], account["kept"], account["dropped"]) == (2, 1, {reason: 1})


def test_requests_that_are_no_single_generation_are_left_out_by_name(serve: Serve, record: Record) -> None:
    recording = record(serve())
    send(recording.url, COMPLETIONS, {"model": "m", "prompt": "alone"})
    send(recording.url, COMPLETIONS, {"model": "m", "prompt": [[1, 2], [3]]})
    send(recording.url, CHAT, chat("a", n=3))
    send(recording.url, COMPLETIONS, b"{")
    assert recording.end()["dropped"] == {
        "several prompts in one request": 1,
        "several answers asked for in one request": 1,
        "HTTP status 500": 1,
    }


def test_the_responses_and_the_messages_endpoint_tell_their_lengths_too(serve: Serve, record: Record) -> None:
    recording = record(serve())
    send(recording.url, "/v1/responses", {"model": "m", "input": "x" * 400, "stream": True})
    send(recording.url, "/v1/messages", {"model": "m", "messages": "y" * 200, "stream": True})
    assert recording.end()["kept"] == 2
    found = read_trace(recording.output).requests
    assert [(request.prompt_tokens, request.output_tokens) for request in found] == [(100, 6), (50, 6)]


SYSTEM = "".join(f"Rule {n}: never say {n * 7}. " for n in range(200))
TURNS = ["first question " * 20, "an answer " * 30, "and more? " * 10]


def converse(recording: Recording | Command) -> None:
    """Two users with one system prompt; the first asks again. And one who shares nothing."""
    send(recording.url, CHAT, chat(SYSTEM, TURNS[0]))
    send(recording.url, CHAT, chat(SYSTEM, "something else " * 25, stream=True))
    send(recording.url, CHAT, chat(SYSTEM, *TURNS))
    send(recording.url, CHAT, chat("No rules. " * 400, TURNS[0]))
    send(recording.url, CHAT, chat(SYSTEM, TURNS[0]))


def test_prompts_that_come_as_text_share_about_as_many_tokens_as_their_texts(serve: Serve, record: Record) -> None:
    recording = record(serve())
    converse(recording)
    assert recording.end()["without_block_hashes"] == 0
    trace = read_trace(recording.output)
    system = len(SYSTEM) // 4
    assert shared_tokens(trace, 0, 1) == pytest.approx(system, abs=32)
    assert shared_tokens(trace, 0, 2) == pytest.approx(system + len(TURNS[0]) // 4, abs=32)
    assert shared_tokens(trace, 0, 3) == 0
    assert shared_tokens(trace, 0, 4) == trace.requests[0].prompt_tokens // 16 * 16


def test_asked_for_token_ids_the_shared_prefixes_are_exact(serve: Serve, record: Record) -> None:
    server = serve()
    recording = record(server, tokenize=True)
    converse(recording)
    account = recording.end()
    assert account["recording"]["prompts_known_by"] == {"token ids from the server's /tokenize": 5}
    trace = read_trace(recording.output)
    begin = "<system>" + SYSTEM + "\n<user>"
    assert shared_tokens(trace, 0, 1) == len(begin) // 4 // 16 * 16
    assert shared_tokens(trace, 0, 2) == len(begin + TURNS[0] + "\n<assistant>") // 4 // 16 * 16
    assert shared_tokens(trace, 0, 3) == 0
    assert sum("tokenize" in seen for seen in get(server, "/seen")["requests"]) == 5


def test_a_server_without_a_tokenizer_is_asked_three_times_and_text_serves(serve: Serve, record: Record) -> None:
    server = serve(tokenize=False)
    recording = record(server, tokenize=True)
    converse(recording)
    account = recording.end()
    assert account["recording"]["prompts_known_by"] == {"its text in pieces of 64 bytes": 5}
    assert sum("tokenize" in seen for seen in get(server, "/seen")["requests"]) == 3


def test_hashes_of_two_recordings_match_only_when_their_salt_was_kept(
    serve: Serve, record: Record, tmp_path: Path
) -> None:
    server, salt = serve(), tmp_path / "salt"
    found = []
    for place, kept in enumerate((None, None, salt, salt)):
        recording = record(server, tmp_path / f"{place}.jsonl", salt_file=kept)
        send(recording.url, COMPLETIONS, {"model": "m", "prompt": list(range(64))})
        recording.end()
        found.append(tuple(read_trace(recording.output).requests[0].block_hashes))
    assert found[2] == found[3]
    assert len(set(found)) == 3
    assert stat.S_IMODE(salt.stat().st_mode) == 0o600
    assert all(salt.read_text().strip() not in path.read_text() for path in tmp_path.glob("*.jsonl"))


def until(recording: Command, lines: int) -> Path:
    """Waits until the journal has so many lines."""
    journal = Path(f"{recording.output}.part")
    deadline = time.monotonic() + 20
    while journal.read_bytes().count(b"\n") < lines:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return journal


def test_a_killed_proxy_leaves_a_whole_trace(serve: Serve, run_command: RunCommand) -> None:
    recording = run_command(serve())
    converse(recording)
    get(recording.url, "/seen")  # after that the fifth exchange was handed over
    recording.process.kill()
    deadline = time.monotonic() + 20
    while not recording.output.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    trace = read_trace(recording.output)
    assert len(trace.requests) == 5
    assert trace.provenance["recording"]["ended"] == "the proxy was ended from outside"


def test_a_recording_killed_with_its_writer_is_recovered(serve: Serve, run_command: RunCommand, tmp_path: Path) -> None:
    recording = run_command(serve())
    converse(recording)
    journal = until(recording, 6)
    children = Path(f"/proc/{recording.process.pid}/task/{recording.process.pid}/children").read_text().split()
    for pid in (*map(int, children), recording.process.pid):
        os.kill(pid, signal.SIGKILL)
    recording.process.wait()
    with journal.open("ab") as file:
        file.write(b'{"at_ns": 12')
    again = recording_of(tmp_path, "--recover", journal)
    assert (again["kept"], again["dropped"]) == (5, {"cut off while it was written": 1})
    assert len(read_trace(recording.output).requests) == 5
    assert not journal.exists()


def test_a_full_disk_ends_the_recording_and_no_answer_and_what_was_written_is_recovered(
    serve: Serve, run_command: RunCommand, tmp_path: Path
) -> None:
    server = serve(first_s=1.0)
    recording = run_command(server, file_limit_bytes=2000)
    bodies: list[bytes] = []
    thread = threading.Thread(target=lambda: bodies.append(send(recording.url, CHAT, chat("a", stream=True)).body))
    send(recording.url, COMPLETIONS, {"model": "m", "prompt": "short"})
    thread.start()
    while len(get(server, "/seen")["requests"]) < 2:
        time.sleep(0.02)
    send(recording.url, COMPLETIONS, {"model": "m", "prompt": list(range(5000))})
    said = recording.wait(code=1)["stderr"]
    thread.join()
    assert bodies[0].endswith(b"data: [DONE]\n\n")
    assert "File too large" in said
    assert "--recover" in said
    assert recording_of(tmp_path, "--recover", f"{recording.output}.part")["kept"] == 1


def recording_of(tmp_path: Path, *options: object) -> dict[str, Any]:
    found = CliRunner().invoke(
        app, ["trace", "record", "-o", str(tmp_path / "traffic.jsonl"), "--json", *map(str, options)]
    )
    assert found.exit_code == 0, found.output
    return dict(json.loads(found.stdout))


def test_the_first_ctrl_c_lets_open_requests_finish_and_takes_no_new_ones(
    serve: Serve, run_command: RunCommand
) -> None:
    server = serve(first_s=2.0)
    recording = run_command(server)
    bodies: list[bytes] = []
    thread = threading.Thread(target=lambda: bodies.append(send(recording.url, CHAT, chat("a", stream=True)).body))
    thread.start()
    while not get(server, "/seen")["requests"]:
        time.sleep(0.02)
    recording.process.send_signal(signal.SIGINT)
    recording.hear("no new ones")
    with pytest.raises(OSError, match="refused"):
        send(recording.url, CHAT, chat("b"))
    account = recording.wait()
    thread.join()
    assert bodies[0].endswith(b"data: [DONE]\n\n")
    assert account["kept"] == 1


def test_the_second_ctrl_c_cuts_them(serve: Serve, run_command: RunCommand) -> None:
    server = serve(first_s=60.0)
    recording = run_command(server)
    send(recording.url, CHAT, chat("a"))

    def cut() -> None:
        with pytest.raises((http.client.HTTPException, OSError)):
            send(recording.url, CHAT, chat("a", stream=True))

    thread = threading.Thread(target=cut)
    thread.start()
    while len(get(server, "/seen")["requests"]) < 2:
        time.sleep(0.02)
    recording.process.send_signal(signal.SIGINT)
    recording.hear("no new ones")
    account = recording.end()
    thread.join()
    assert account["dropped"] == {"still open when the recording ended": 1}


def test_a_recording_ends_by_itself_after_its_time(serve: Serve, run_command: RunCommand) -> None:
    start_s = time.monotonic()
    recording = run_command(serve(), "--for", "1.5s")
    send(recording.url, CHAT, chat("a"))
    account = recording.wait()
    assert account["recording"]["ended"] == "as asked"
    assert 1.5 <= account["recording"]["recorded_s"] < time.monotonic() - start_s
