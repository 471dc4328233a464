"""The recording proxy: passes every request and every piece of its answer on at once, and hands a copy to the writer.

One event loop, no limit on how many connections are open, nothing buffered: a piece of an
answer is written to the client before the next one is read. It parses only what it must change. Needs aiohttp.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from autotune.record import exchange
from autotune.record.requests import CHAT, COMPLETIONS, UsageFilter, ask_for_usage, recorded_path

HEARTBEAT_S: Final = 0.05
LATE_S: Final = 0.005
READ_BUFFER_BYTES: Final = 4 * 2**20
KEEP_ALIVE_S: Final = 3600.0
"""To clients: the server's own habits do not show, so nobody may be surprised by a connection closed early."""
SERVER_KEEP_ALIVE_S: Final = 2.0
"""To the server: a connection that it closes (vLLM: after 5 s) just when it is used again would lose a request."""
BEHIND_BYTES: Final = 8 * 2**20
"""So much waits for the writer that it shall not spend time on asking for token ids."""
FULL_BYTES: Final = 512 * 2**20
"""So much waits for the writer that further requests are passed on without being recorded."""
NOT_RECORDED: Final = "passed on unrecorded, as the writer could not keep up"

_HOP_BY_HOP: Final = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
     "transfer-encoding", "upgrade", "host", "expect")
)  # fmt: skip
_NO_AUTO_HEADERS: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


@dataclass(slots=True)
class Counts:
    """What the proxy did so far. `recordable` ended, of which `failed` had no complete answer; `other` paths."""

    open: int = 0
    recordable: int = 0
    failed: int = 0
    other: int = 0
    late_beats: int = 0
    beats: int = 0
    latest_s: float = 0.0
    left_out: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Passing:
    """One request while it is passed on."""

    at_ns: int
    endpoint: str | None
    body: bytes = b""
    status: int = 0
    ended: str = exchange.NO_ANSWER
    pieces: list[bytes] = field(default_factory=list)


class Proxy:
    """Passes requests from clients to `upstream`, an address without a slash at its end.

    hand_over: takes the header and the payload of a recorded exchange; it must return at once.
    waiting_bytes: how much of what was handed over has not left this process.
    untouched: never ask for lengths; streams whose users did not ask are then left out.
    """

    def __init__(
        self,
        upstream: str,
        hand_over: Callable[[dict[str, Any], bytes], None],
        waiting_bytes: Callable[[], int],
        *,
        untouched: bool = False,
    ) -> None:
        self.counts = Counts()
        self.recording = True
        self.port = 0
        self.zero_ns = time.perf_counter_ns()
        self._upstream = upstream
        self._hand_over = hand_over
        self._waiting_bytes = waiting_bytes
        self._untouched = untouched
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.ServerRunner | None = None
        self._site: web.TCPSite | None = None
        self._beating: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> None:
        """Listens; `port` 0 takes a free one. Raises OSError when it cannot."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=SERVER_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=READ_BUFFER_BYTES,
            skip_auto_headers=_NO_AUTO_HEADERS,
            max_line_size=2**16,
            max_field_size=2**16,
        )
        server = web.Server(
            self._handle,
            handler_cancellation=True,  # a client that leaves cancels its request, and so the server's work on it
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=KEEP_ALIVE_S,
            read_bufsize=READ_BUFFER_BYTES,
            max_line_size=2**16,
            max_field_size=2**16,
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, host, port, backlog=4096)
        await self._site.start()
        self.port = self._runner.addresses[0][1]
        gc.collect()
        gc.freeze()
        self._beating = asyncio.create_task(self._beat())

    async def stop_listening(self) -> None:
        """Takes no new connection; requests on open ones are still passed on, unrecorded."""
        if self._site is not None:
            await self._site.stop()
            self._site = None
        self.recording = False

    async def close(self) -> None:
        """Ends what is open."""
        if self._beating is not None:
            self._beating.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()
        gc.unfreeze()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        endpoint = recorded_path(request.rel_url.raw_path) if request.method == "POST" and self.recording else None
        passing = _Passing(time.perf_counter_ns() - self.zero_ns, endpoint)
        self.counts.open += 1
        try:
            return await self._pass(request, passing)
        except asyncio.CancelledError:
            passing.ended = exchange.CLIENT_LEFT if self._site is not None else exchange.STOPPED
            raise
        finally:
            self.counts.open -= 1
            self._record(request, passing)

    async def _pass(self, request: web.BaseRequest, passing: _Passing) -> web.StreamResponse:
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return web.Response(status=501, text="the recording proxy passes no WebSockets on; ask the server itself")
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        headers = _passed(request.headers)
        data: Any = request.content if request.body_exists else None
        usage_filter = None
        if passing.endpoint is not None:
            data = passing.body = await request.content.read()
            # Read, so it must be readable; no client minds an answer that is not compressed.
            headers["Accept-Encoding"] = "identity"
            headers.popall("Content-Length", None)
            if passing.endpoint in (COMPLETIONS, CHAT) and not self._untouched:
                changed = ask_for_usage(passing.body)
                if changed is not None:
                    data, usage_filter = changed, UsageFilter()
        try:
            if self._session is None:
                raise aiohttp.ClientError("the proxy is closed")
            answering = await self._session.request(
                request.method,
                URL(self._upstream + request.rel_url.raw_path_qs, encoded=True),
                headers=headers,
                data=data,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError) as error:
            message = f"the recording proxy got no answer from the server: {type(error).__name__}: {error}"
            return web.json_response({"error": {"message": message, "type": "bad_gateway", "code": 502}}, status=502)
        async with answering as answer:
            return await self._answer(request, passing, answer, usage_filter)

    async def _answer(
        self,
        request: web.BaseRequest,
        passing: _Passing,
        answer: aiohttp.ClientResponse,
        usage_filter: UsageFilter | None,
    ) -> web.StreamResponse:
        passing.status = answer.status
        passing.ended = exchange.CUT
        if answer.status != 200 or "text/event-stream" not in answer.headers.get("Content-Type", ""):
            usage_filter = None
        headers = _passed(answer.headers)
        if usage_filter is not None:
            headers.popall("Content-Length", None)
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
        if not self.recording:
            response.force_close()
        await response.prepare(request)
        keep = passing.endpoint is not None and answer.status == 200
        complete = await self._copy(answer.content, response, passing.pieces if keep else None, usage_filter)
        if complete:
            passing.ended = exchange.ENDED
            await response.write_eof()
        elif complete is None:
            passing.ended = exchange.CLIENT_LEFT
        elif request.transport is not None:
            request.transport.close()  # the client shall see a cut answer as one, and not as one that ended
        return response

    async def _copy(
        self,
        source: aiohttp.StreamReader,
        response: web.StreamResponse,
        kept: list[bytes] | None,
        usage_filter: UsageFilter | None,
    ) -> bool | None:
        """Whether the answer came whole; None when the client did not stay for it."""
        complete = False
        while True:
            try:
                piece = await source.readany()
                complete = not piece
            except (aiohttp.ClientError, OSError):
                piece = b""
            if kept is not None:
                kept.append(piece)
            passed = piece
            if usage_filter is not None:
                passed = usage_filter.feed(piece) if piece else usage_filter.rest()
            try:
                if passed:
                    await response.write(passed)
            except (aiohttp.ClientError, OSError):
                return None
            if not piece:
                return complete

    def _record(self, request: web.BaseRequest, passing: _Passing) -> None:
        if passing.endpoint is None:
            self.counts.other += 1
            return
        self.counts.recordable += 1
        self.counts.failed += passing.ended != exchange.ENDED or passing.status != 200
        waiting = self._waiting_bytes()
        if waiting > FULL_BYTES:
            self.counts.left_out[NOT_RECORDED] += 1
            return
        header = {
            "at_ns": passing.at_ns,
            "endpoint": passing.endpoint,
            "status": passing.status,
            "ended": passing.ended,
            "body_bytes": len(passing.body),
            "behind": waiting > BEHIND_BYTES,
            "authorization": request.headers.get("Authorization", ""),
        }
        self._hand_over(header, b"".join((passing.body, *passing.pieces)))

    async def _beat(self) -> None:
        """Notes how late this process is: while it is held up, arrivals are stamped late."""
        counts = self.counts
        due = time.perf_counter() + HEARTBEAT_S
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                late_s = time.perf_counter() - due
                counts.beats += 1
                counts.late_beats += late_s > LATE_S
                counts.latest_s = max(counts.latest_s, late_s)
                due = max(due, due + late_s) + HEARTBEAT_S


def _passed(headers: Any) -> CIMultiDict[str]:
    """The headers that are for the other end, not for the connection."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if name.lower() not in _HOP_BY_HOP and name.lower() not in named
    )
