"""The client process: sends every request at its planned time and stamps what comes back. It understands none of it.

Started by `autotune.replay.run`, so that nothing the tuner does can delay a request. One monotonic clock, one anchor,
absolute times, a connection per request, no limit on how many are open. Bodies are built before the clock starts, and
answers are handed to the tuner as raw bytes; JSON is read there. Imports aiohttp and the standard library.

A turn that waits for the turn before it is due a think time after the end of that answer. Where the answer failed, as
far as bytes tell (`answer.broken`), its session ends there, and its further turns are not sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import os
import resource
import sys
import time
from array import array
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import aiohttp

from autotune.replay import answer, frames
from traces.prompts import Vocabulary, prompt_ids

LEAD_S: Final = 0.1
"""From the start of the clock to the first request: time for the loop to settle."""
HEARTBEAT_S: Final = 0.02
READ_BUFFER_BYTES: Final = 4 * 2**20
"""Above the first event of a 128k-token prompt, which repeats the prompt's ids: reading never waits for the reader."""
PREPARE_TIMEOUT_S: Final = 5.0
PRIORITY: Final = -10
"""As of `nice`; only a privileged user gets it."""

_OUT_OF_CONNECTIONS: Final = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)


@dataclass(slots=True)
class _Ongoing:
    """One request while it lasts. Times are those of the clock."""

    index: int
    sent: float
    done: float = 0.0
    on_the_wire: bool = False
    http_status: int = 0
    times: array[float] = field(default_factory=lambda: array("d"))
    sizes: array[int] = field(default_factory=lambda: array("I"))
    pieces: list[bytes] = field(default_factory=list)


class _Client:
    def __init__(self, job: dict[str, Any], out: asyncio.StreamWriter) -> None:
        self._job = job
        self._out = out
        self._url = f"{job['url']}/v1/completions"
        self._bodies = _bodies(job)
        self._tasks: set[asyncio.Task[None]] = set()
        self._lateness = array("d")
        self._turn_after: dict[int, tuple[int, float]] = {
            before: (index, think_s) for index, before, think_s in job.get("turns", ())
        }
        self._session_ended: list[int] = []
        self._anchor = 0.0
        self._stopping = False
        self._sending: asyncio.Task[None] | None = None

    async def run(self) -> None:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream", "Accept-Encoding": "identity"}
        if self._job["api_key"]:
            headers["Authorization"] = f"Bearer {self._job['api_key']}"
        trace = aiohttp.TraceConfig()
        trace.on_request_chunk_sent.append(_stamp_sent)
        async with aiohttp.ClientSession(
            # A new connection per request: a kept one may be closed by the server just when it is used again.
            connector=aiohttp.TCPConnector(limit=0, force_close=True, ttl_dns_cache=None),
            timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
            read_bufsize=READ_BUFFER_BYTES,
            auto_decompress=False,
            headers=headers,
            trace_configs=[trace],
        ) as session:
            await self._warm(session)
            self._tell(frames.PREPARED)
            gc.collect()
            gc.freeze()
            gc.disable()  # nothing here needs it, and a collection would delay requests
            arrivals = [request[0] for request in self._job["requests"]]
            self._anchor = time.perf_counter() + LEAD_S - arrivals[0]
            self._tell(
                frames.STARTED, {"anchor_s": self._anchor, "unix_s": time.time() + self._anchor - time.perf_counter()}
            )
            heartbeat = asyncio.create_task(self._beat())
            self._sending = asyncio.create_task(self._send_all(session, arrivals))
            if self._stopping:
                self._sending.cancel()
            await asyncio.wait([self._sending])
            while self._tasks:  # an answer may bring its session's next turn
                await asyncio.wait(self._tasks)
            heartbeat.cancel()
            if not self._sending.cancelled():
                self._sending.result()
        self._tell(frames.FINISHED, {"unsent": self._session_ended}, self._lateness.tobytes())

    def stop(self) -> None:
        """Sends nothing more and ends what is in flight."""
        self._stopping = True
        for task in (*([self._sending] if self._sending else []), *self._tasks):
            task.cancel()

    async def _warm(self, session: aiohttp.ClientSession) -> None:
        """One request that is not part of the run: name look-up, lazy imports, a first connection."""
        try:
            async with asyncio.timeout(PREPARE_TIMEOUT_S), session.get(f"{self._job['url']}/health") as response:
                await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            pass  # whatever is wrong will be met, and recorded, by the requests themselves

    async def _send_all(self, session: aiohttp.ClientSession, arrivals: list[float]) -> None:
        waiting = {index for index, _ in self._turn_after.values()}
        for index, arrival_s in enumerate(arrivals):
            if index in waiting:
                continue
            due = self._anchor + arrival_s
            await _sleep_until(due)
            self._begin(self._request(session, index, due))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _turn(self, session: aiohttp.ClientSession, index: int, due: float) -> None:
        await _sleep_until(due)
        await self._request(session, index, due)

    def _follow(self, session: aiohttp.ClientSession, ongoing: _Ongoing, ended: str) -> None:
        """What comes of the session after the request that just ended, if it has further turns."""
        if ongoing.index not in self._turn_after or ended == answer.STOPPED:
            return
        if ended == answer.OK and not answer.broken(ongoing.http_status, ongoing.pieces):
            index, think_s = self._turn_after[ongoing.index]
            self._begin(self._turn(session, index, ongoing.done + think_s))
            return
        place = ongoing.index
        while place in self._turn_after:
            place, _ = self._turn_after[place]
            self._session_ended.append(place)

    async def _request(self, session: aiohttp.ClientSession, index: int, due: float) -> None:
        ongoing = _Ongoing(index, time.perf_counter())
        body, self._bodies[index] = self._bodies[index], b""
        ended, detail = answer.OK, ""
        try:
            async with (
                asyncio.timeout(due + self._job["timeout_s"] - ongoing.sent),
                session.post(self._url, data=body, allow_redirects=False, trace_request_ctx=ongoing) as response,
            ):
                ongoing.http_status = response.status
                async for piece in response.content.iter_any():
                    ongoing.times.append(time.perf_counter() - self._anchor)
                    ongoing.sizes.append(len(piece))
                    ongoing.pieces.append(piece)
        except TimeoutError:
            ended, detail = (
                answer.TIMEOUT,
                f"no complete answer within {self._job['timeout_s']:g} s of its planned time",
            )
        except asyncio.CancelledError:
            ended = answer.STOPPED
        except (aiohttp.ClientError, OSError) as error:
            ended = answer.CUT_STREAM if ongoing.http_status else answer.CONNECTION
            detail = f"{type(error).__name__}: {error}"
            if getattr(error, "errno", None) in _OUT_OF_CONNECTIONS:
                detail = answer.CLIENT_LIMIT
        ongoing.done = time.perf_counter()
        self._follow(session, ongoing, ended)
        self._hand_over(ongoing, ended, detail)

    def _hand_over(self, ongoing: _Ongoing, ended: str, detail: str) -> None:
        header = {
            "index": ongoing.index,
            "sent_s": ongoing.sent - self._anchor,
            "done_s": ongoing.done - self._anchor,
            "http_status": ongoing.http_status,
            "ended": ended,
            "detail": detail,
            "pieces": len(ongoing.pieces),
        }
        payload = b"".join((ongoing.times.tobytes(), ongoing.sizes.tobytes(), *ongoing.pieces))
        self._tell(frames.ANSWER, header, payload)

    async def _beat(self) -> None:
        """Notes how late a timer of this process is: a client that was held up cannot have stamped anything well."""
        due = time.perf_counter() + HEARTBEAT_S
        while True:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            now = time.perf_counter()
            self._lateness.append(now - due)
            due = max(due, now) + HEARTBEAT_S

    def _tell(self, kind: str, header: dict[str, Any] | None = None, payload: bytes = b"") -> None:
        self._out.write(frames.encode(kind, header, payload))  # buffered where the tuner is slow to read


async def _sleep_until(due: float) -> None:
    while (wait_s := due - time.perf_counter()) > 0:
        await asyncio.sleep(wait_s)


async def _stamp_sent(_session: object, context: SimpleNamespace, _parameters: object) -> None:
    ongoing = context.trace_request_ctx
    if ongoing is not None and not ongoing.on_the_wire:
        ongoing.sent, ongoing.on_the_wire = time.perf_counter(), True


def _bodies(job: dict[str, Any]) -> list[bytes]:
    vocabulary = Vocabulary(job["vocabulary_size"], frozenset(job["special_ids"]))
    common = {
        "model": job["model"],
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **({"cache_salt": job["cache_salt"]} if job["cache_salt"] else {}),
    }
    bodies = []
    for index, (_, prompt_tokens, output_tokens, blocks) in enumerate(job["requests"]):
        prompt = prompt_ids(
            job["trace_digest"],
            index,
            prompt_tokens,
            vocabulary,
            block_hashes=blocks,
            block_size=job["block_size"],
            purpose=job["purpose"],
        )
        lengths = {"max_tokens": output_tokens, "min_tokens": output_tokens, "prompt": prompt}
        bodies.append(json.dumps({**common, **lengths}, separators=(",", ":")).encode())
    return bodies


def _ask_for_means() -> None:
    """A connection for every request in flight, where the usual soft limit is 1024; and to run when a request is due,
    where this user may have that: the client works little, and late."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS cannot take an unlimited one; a run that meets it says so
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    with contextlib.suppress(OSError):  # Linux weighs sessions first, where it groups by them
        Path("/proc/self/autogroup").write_text(str(PRIORITY))


async def _serve_tuner(job: dict[str, Any], commands: frames.Decoder) -> None:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(1, "wb"))
    out = asyncio.StreamWriter(transport, protocol, None, loop)
    transport.set_write_buffer_limits(high=0)
    client = _Client(job, out)

    def heard() -> None:
        data = os.read(0, 4096)
        if not data:
            os._exit(1)  # the tuner is gone: nobody waits for what this would measure
        for kind, _, _ in commands.feed(data):
            if kind == frames.STOP:
                client.stop()

    loop.add_reader(0, heard)
    await client.run()
    await out.drain()
    loop.remove_reader(0)


def main() -> None:
    """Takes one job from standard input and answers on standard output."""
    commands = frames.Decoder()
    job: dict[str, Any] | None = None
    while job is None:
        data = os.read(0, 1 << 16)
        if not data:
            sys.exit(1)
        for kind, header, _ in commands.feed(data):
            if kind == frames.JOB:
                job = header
    _ask_for_means()
    sys.stdout = sys.stderr  # file descriptor 1 carries frames
    asyncio.run(_serve_tuner(job, commands))


if __name__ == "__main__":
    main()
