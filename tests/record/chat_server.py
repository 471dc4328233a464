"""A real HTTP server that answers texts as vLLM does, streamed or whole, with a tokenizer of its own: 4 bytes a token.

It runs in a thread; GET /seen tells what came.
"""

import asyncio
import json
import threading
import zlib
from typing import Any

from aiohttp import web

OUTPUT = 6


class Server:
    def __init__(self, first_s: float = 0.0, gap_s: float = 0.0, tokenize: bool = True, fault: str = "") -> None:
        self.first_s, self.gap_s, self.tokenize, self.fault = first_s, gap_s, tokenize, fault
        self.seen: list[dict[str, Any]] = []
        self.left = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/v1/chat/completions", self.complete)
        app.router.add_post("/v1/responses", self.respond)
        app.router.add_post("/v1/messages", self.message)
        app.router.add_post("/tokenize", self.tokens)
        app.router.add_get("/seen", self.tell)
        app.router.add_route("*", "/{rest:.*}", self.echo)
        return app

    async def tell(self, request: web.Request) -> web.Response:
        return web.json_response({"requests": self.seen, "left": self.left})

    async def echo(self, request: web.Request) -> web.Response:
        body = await request.read()
        headers = {"X-Mine": "kept", "Set-Cookie": "a=b"}
        shown = {
            "method": request.method,
            "path": request.path_qs,
            "body": body.decode(),
            "headers": dict(request.headers),
        }
        return web.json_response(shown, status=418, headers=headers)

    async def tokens(self, request: web.Request) -> web.Response:
        self.seen.append({"tokenize": True, "key": request.headers.get("Authorization")})
        if not self.tokenize:
            return web.json_response({"error": "no tokenizer"}, status=404)
        found = ids(await request.json())
        return web.json_response({"tokens": found, "count": len(found)})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append({"body": body, "headers": dict(request.headers)})
        usage = {"prompt_tokens": len(ids(body)), "completion_tokens": OUTPUT}
        if self.fault == "refuse":
            return web.json_response({"error": {"message": "too busy"}}, status=503)
        if not body.get("stream"):
            return web.json_response({"object": "x", "choices": [{"index": 0, "text": "w " * OUTPUT}], "usage": usage})
        events: list[Any] = [
            {"choices": [{"index": 0, "text": f"w{n} ", "delta": {"content": f"w{n} "}}]} for n in range(OUTPUT)
        ]
        if self.fault == "error event":
            events[2] = {"error": {"message": "broke"}}
        if (body.get("stream_options") or {}).get("include_usage"):
            events.append({"choices": [], "usage": usage})
        return await self.stream(request, events, "data: [DONE]\n\n")

    async def respond(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        usage = {"input_tokens": len(split(str(body["input"]))), "output_tokens": OUTPUT}
        events: list[Any] = [{"type": "response.output_text.delta", "delta": "w "}] * OUTPUT
        events.append({"type": "response.completed", "response": {"usage": usage}})
        return await self.stream(request, events, "")

    async def message(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        count = len(split(str(body["messages"])))
        events: list[Any] = [
            {"type": "message_start", "message": {"usage": {"input_tokens": count, "output_tokens": 0}}},
            {"type": "message_delta", "usage": {"input_tokens": 1, "cache_read_input_tokens": count - 1, "output_tokens": 6}},
            {"type": "message_stop"},
        ]  # fmt: skip
        return await self.stream(request, events, "")

    async def stream(self, request: web.Request, events: list[Any], end: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        try:
            await asyncio.sleep(self.first_s)
            for place, event in enumerate(events):
                await response.write(f"data: {json.dumps(event)}\n\n".encode())
                await asyncio.sleep(self.gap_s)
                if self.fault == "cut" and place == 2 and request.transport is not None:
                    request.transport.abort()
            await response.write(end.encode())
        except (ConnectionError, asyncio.CancelledError):
            self.left += 1
            raise
        return response


def ids(body: dict[str, Any]) -> list[int]:
    if "messages" in body:
        return split("".join(f"<{turn['role']}>{turn['content']}\n" for turn in body["messages"]) + "<assistant>")
    prompt = body["prompt"]
    return prompt if isinstance(prompt, list) else split(prompt)


def split(text: str) -> list[int]:
    data = text.encode()
    return [zlib.crc32(data[place : place + 4]) for place in range(0, len(data), 4)]


class Running:
    """The server in a thread of its own, on a free port of loopback."""

    def __init__(self, **behaviour: Any) -> None:
        self._server = Server(**behaviour)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self.port = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(20)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)

    def _serve(self) -> None:
        runner = web.AppRunner(self._server.app(), handler_cancellation=True, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
        self.port = runner.addresses[0][1]
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()
