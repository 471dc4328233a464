"""Replays a trace against a live server: starts the client process, follows it, and leaves none behind.

The client ends when it is done, when this process ends in whatever way (its standard input closes), and when it does
not finish in time. Ctrl-C reaches only this process, which ends the client.
"""

from __future__ import annotations

import importlib.util
import os
import selectors
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import urlsplit

import numpy as np

from autotune.progress import Progress, Silent
from autotune.replay import frames
from autotune.replay.answer import OK, RawAnswer
from autotune.replay.outcome import LAG_BOUND_S, ReplayOutcome, Turn, make_outcome
from ppas_core.errors import InvalidInput, NoResult
from traces.format import Trace
from traces.prompts import MEASURED, Vocabulary
from traces.session import predecessors

DEFAULT_TIMEOUT_S: Final = 600.0
SMALLEST_VOCABULARY: Final = Vocabulary(32_000)
"""Its ids are ordinary tokens of nearly every model that is served."""

_MAX_TIMEOUT_S: Final = 86_400.0
_POLL_S: Final = 0.2
_PREPARE_TIMEOUT_S: Final = 600.0
_SLACK_S: Final = 30.0


def replay(
    url: str,
    trace: Trace,
    *,
    model: str,
    cache_salt: str | None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    vocabulary: Vocabulary = SMALLEST_VOCABULARY,
    purpose: str = MEASURED,
    api_key: str | None = None,
    progress: Progress | None = None,
    max_lag_s: float = LAG_BOUND_S,
    stop: Callable[[], str | None] | None = None,
) -> ReplayOutcome:
    """One replay of `trace` against the OpenAI-compatible server at `url`: in open loop, or as its sessions say.

    A turn that waits is planned a think time after the answer before it ended; that is its planned time in the records.
    A failed turn ends its session, whose further turns count as unsent.

    cache_salt: isolates this run from the prefix caches of others; sharing within the trace stays. None sends none.
    timeout_s: a request fails that is not complete this long after its planned time.
    purpose: prompts of different purposes have nothing in common; see `traces.prompts`.
    max_lag_s: how late the client may send (P99, before 1 % of the mean latency is added) for the run to be valid.
    stop: asked a few times a second; a text ends the run early with that reason, for instance that the server died.
        Finished requests are kept, those in flight count as stopped, the others as unsent; the run is invalid.

    Failed requests are recorded, never raised. Raises InvalidInput for a bad URL, a bad timeout or a missing aiohttp,
    and NoResult when the client process broke.
    """
    if not 0 < timeout_s <= _MAX_TIMEOUT_S:
        raise InvalidInput(f"timeout_s is {timeout_s!r}; allowed: seconds above 0, at most {_MAX_TIMEOUT_S:g} (a day)")
    base = base_url(url)
    if importlib.util.find_spec("aiohttp") is None:
        raise InvalidInput("a live replay needs aiohttp: pip install 'ppas-autotune[live]'")
    turns = waiting_turns(trace)
    job = {
        "url": base,
        "model": model,
        "cache_salt": cache_salt,
        "timeout_s": timeout_s,
        "api_key": api_key,
        "purpose": purpose,
        "vocabulary_size": vocabulary.size,
        "special_ids": sorted(vocabulary.special_ids),
        "trace_digest": trace.digest,
        "block_size": trace.block_size,
        "requests": [(r.arrival_s, r.prompt_tokens, r.output_tokens, list(r.block_hashes)) for r in trace.requests],
        "turns": turns,
    }
    progress = progress or Silent()
    at_most_s = _longest_s(trace, turns, timeout_s)
    run = _Run(len(trace.requests), at_most_s, progress, stop or (lambda: None))
    progress.begin(f"Replaying {trace.name}", len(trace.requests))
    try:
        run.follow(job)
    finally:
        progress.end()
    about = {
        "trace": trace.name,
        "trace_digest": trace.digest,
        "regime": trace.regime,
        "url": base,
        "model": model,
        "cache_salt": cache_salt,
        "purpose": purpose,
        "vocabulary_size": vocabulary.size,
        "timeout_s": timeout_s,
        "concurrency_cap": None,
        "mode": trace.mode,
        **run.clock,
    }
    plan = [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in trace.requests]
    return make_outcome(
        plan, run.answers, run.lateness_s, turns=turns, stopped=run.stopped, about=about, max_lag_s=max_lag_s
    )


def waiting_turns(trace: Trace) -> list[Turn]:
    """Every turn that waits: its place, the place of the turn before, and the think time in seconds; in trace order."""
    return [
        (index, before, trace.requests[index].think_time_s or 0.0)
        for index, before in enumerate(predecessors(trace))
        if before is not None
    ]


def _longest_s(trace: Trace, turns: Sequence[Turn], timeout_s: float) -> float:
    """How long requests may take from the start of the clock, when every answer takes until its timeout."""
    begin_s = trace.requests[0].arrival_s
    latest_s = [request.arrival_s - begin_s + timeout_s for request in trace.requests]
    for index, before, think_s in turns:
        latest_s[index] = latest_s[before] + think_s + timeout_s
    return max(latest_s)


def base_url(url: str) -> str:
    """`url` without a trailing slash or `/v1`. Raises InvalidInput when it is not http or https with a host."""
    parts = urlsplit(url)
    try:
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment:
        raise InvalidInput(f"{url!r} is not the address of a server; give one such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass(slots=True)
class _Run:
    """Follows one client process. at_most_s: how long requests may take from the start of the clock."""

    requests: int
    at_most_s: float
    progress: Progress
    stop: Callable[[], str | None]
    answers: dict[int, RawAnswer] = field(default_factory=dict)
    clock: Mapping[str, Any] = field(default_factory=dict)
    lateness_s: np.ndarray[Any, np.dtype[np.float64]] = field(default_factory=lambda: np.empty(0))
    stopped: str | None = None
    _finished: bool = False
    _failed: int = 0
    _session_ended: int = 0

    def follow(self, job: dict[str, Any]) -> None:
        with tempfile.TemporaryFile() as errors:
            client = _start(errors)
            try:
                self._exchange(client, job)
                if self._finished:
                    client.wait(timeout=_SLACK_S)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                pass  # judged below
            finally:
                client.kill()
                client.wait()
                for pipe in (client.stdin, client.stdout):
                    _close(pipe)
            missing = self.requests - len(self.answers) - self._session_ended
            if not self._finished or (missing and self.stopped is None):
                errors.seek(max(0, errors.seek(0, os.SEEK_END) - 2000))
                said = errors.read().decode(errors="replace").strip()
                raise NoResult(
                    f"the replay client broke with {missing} of {self.requests} requests open "
                    f"(exit code {client.returncode}); it said: {said or 'nothing'}"
                )

    def _exchange(self, client: subprocess.Popen[bytes], job: dict[str, Any]) -> None:
        stdin, stdout = client.stdin, client.stdout
        if stdin is None or stdout is None:
            raise NoResult("the replay client has no pipes")
        stdin.write(frames.encode(frames.JOB, job))
        stdin.flush()
        decoder = frames.Decoder()
        asked = time.monotonic()
        deadline = asked + _PREPARE_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while not self._finished:
                if selector.select(_POLL_S):
                    data = os.read(stdout.fileno(), 1 << 20)
                    if not data:
                        return
                    for frame in decoder.feed(data):
                        if frame[0] == frames.STARTED:
                            deadline = time.monotonic() + self.at_most_s + _SLACK_S
                        self._take(frame)
                if self.stopped is None and time.monotonic() - asked >= _POLL_S:
                    asked = time.monotonic()
                    if (reason := self.stop()) is not None:
                        self.stopped = reason
                        deadline = time.monotonic() + _SLACK_S
                        stdin.write(frames.encode(frames.STOP))
                        stdin.flush()
                if time.monotonic() > deadline:
                    raise NoResult(
                        f"the replay client did not finish in time, with {len(self.answers)} of {self.requests} "
                        "requests ended; it was ended"
                    )

    def _take(self, frame: frames.Frame) -> None:
        kind, header, payload = frame
        if kind == frames.STARTED:
            self.clock = {"anchor_monotonic_s": header["anchor_s"], "anchor_unix_s": header["unix_s"]}
        elif kind == frames.ANSWER:
            answer = _raw_answer(header, payload)
            self.answers[answer.index] = answer
            self._failed += answer.ended != OK or answer.http_status != 200
            self.progress.advance(f"{self._failed} failed" if self._failed else "")
        elif kind == frames.FINISHED:
            self.lateness_s = np.frombuffer(payload, dtype=np.float64)
            self._session_ended = len(header["unsent"])
            self._finished = True


def _raw_answer(header: dict[str, Any], payload: bytes) -> RawAnswer:
    times_s, sizes = array("d"), array("I")
    pieces = header.pop("pieces")
    split = pieces * times_s.itemsize
    end = split + pieces * sizes.itemsize
    times_s.frombytes(payload[:split])
    sizes.frombytes(payload[split:end])
    return RawAnswer(**header, times_s=times_s, sizes=sizes, body=payload[end:])


def _start(errors: IO[bytes]) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
    return subprocess.Popen(
        [sys.executable, "-m", "autotune.replay.client"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C is for the tuner, which ends the client
    )


def _close(pipe: IO[bytes] | None) -> None:
    try:
        if pipe is not None:
            pipe.close()
    except BrokenPipeError:
        pass  # what was still buffered for it will not be missed
