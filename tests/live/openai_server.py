"""A real HTTP server that streams completions as vLLM does, with faults on demand. Standard library alone.

`python openai_server.py '{"gap_s": 0.01, "faults": {"101": "cut"}}'` prints its port and serves on loopback. A fault
belongs to the requests with that prompt length, so that a test knows which of its requests meet it, or to those of more
than 10 tokens under a setting of that label, where an engine stands behind it (`stand_in_engine.py`). GET /seen tells
what every request asked for and when it came.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Behaviour:
    """first_s: to the first token; gap_s: between tokens; tokens_per_event; cached: told cached prompt tokens.

    engine: options of the engine, as JSON. by_setting: label to fault, or label@length to the fault of such requests.
    leak_bytes: kept for ever at every request. die_while: a file; requests of more than 10 tokens are deadly while it is there.
    """

    port: int = 0
    first_s: float = 0.0
    gap_s: float = 0.0
    tokens_per_event: int = 1
    ids: bool = True
    crlf: bool = False
    echo_prompt: bool = True
    cached: int | None = None
    faults: dict[str, str] = field(default_factory=dict)
    engine: dict[str, Any] | None = None
    by_setting: dict[str, str] = field(default_factory=dict)
    leak_bytes: int = 0
    die_while: str | None = None


class Server:
    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.seen: list[dict[str, Any]] = []
        self.running = 0
        self.leaked: list[bytes] = []
        self.engine: Any = None
        if behaviour.engine is not None:
            from stand_in_engine import EngineOptions, StandInEngine

            self.engine = StandInEngine(EngineOptions(**behaviour.engine))

    async def serve(self) -> None:
        server = await asyncio.start_server(
            self.connection, "127.0.0.1", self.behaviour.port, backlog=4096, limit=2**22
        )
        print(server.sockets[0].getsockname()[1], flush=True)
        async with server:
            await server.serve_forever()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            came_s = time.perf_counter()
            method, path, _ = head.split(" ", 2)
            length = next(
                (int(line[15:]) for line in head.lower().split("\r\n") if line.startswith("content-length:")), 0
            )
            body = await reader.readexactly(length)
            if path == "/v1/completions" and method == "POST":
                self.running += 1
                try:
                    await self.complete(json.loads(body), head, came_s, reader, writer)
                finally:
                    self.running -= 1
            elif path == "/metrics":
                page = f'vllm:num_requests_running{{engine="0"}} {self.running}.0\n'.encode()
                writer.write(b"HTTP/1.1 200 X\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(page), page))
            elif path == "/version":
                answer(writer, 200, {"version": "0.27.1"})
            elif path.startswith("/ppas/") and self.engine is not None:
                client = writer.get_extra_info("peername")[0]
                await self.engine.route(method, path, head, body, client, lambda *said: answer(writer, *said))
            elif path == "/v1/models":
                answer(writer, 200, {"data": [{"id": "tiny", "max_model_len": 131072}]})
            elif path == "/seen":
                answer(writer, 200, self.seen)
            else:
                answer(writer, 200 if path == "/health" else 404, {})
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def complete(
        self,
        request: dict[str, Any],
        head: str,
        came_s: float,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        prompt, tokens = request["prompt"], request["max_tokens"]
        self.leaked.append(b"x" * self.behaviour.leak_bytes)
        setting = "" if self.engine is None else self.engine.take_step(len(prompt))
        fault = self.behaviour.faults.get(str(len(prompt)), "")
        if len(prompt) > 10:
            fault = self.behaviour.by_setting.get(setting, fault)
            fault = self.behaviour.by_setting.get(f"{setting}@{len(prompt)}", fault)
            if self.behaviour.die_while is not None and os.path.exists(self.behaviour.die_while):
                fault = "die"
        digest = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()
        self.seen.append(
            {
                **request,
                "prompt": len(prompt),
                "digest": digest,
                "head": prompt[:32],
                "came_s": came_s,
                "key": "bearer abc" in head.lower(),
                "setting": setting,
            }
        )
        if fault == "refuse half":
            fault = "refuse" if len(self.seen) % 2 else ""
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "slow":
            await asyncio.sleep(0.5)
        if fault == "stuck":  # the request stays running, whatever becomes of its client
            await asyncio.sleep(3600)
        if fault == "hang":
            await reader.read()  # until the client gives up
            return None
        if fault == "refuse":
            return answer(writer, 503, {"error": {"message": "too busy today", "code": 503}})
        if fault == "drop":
            return writer.transport.abort()
        head_lines = (b"Content-Type: text/event-stream", b"Transfer-Encoding: chunked", b"Connection: close")
        writer.write(b"\r\n".join((b"HTTP/1.1 200 OK", *head_lines, b"", b"")))
        await asyncio.sleep(self.behaviour.first_s)
        await self.stream(fault, prompt, tokens, writer)
        return None

    async def stream(self, fault: str, prompt: list[int], tokens: int, writer: asyncio.StreamWriter) -> None:
        how = self.behaviour
        if fault == "role first":
            send(writer, how, {"choices": [{"index": 0, "text": "", "token_ids": [], "role": "assistant"}]})
            await asyncio.sleep(0.5)
        sent = 0
        produced = tokens - 1 if fault == "short" else tokens
        while sent < produced:
            count = min(how.tokens_per_event, produced - sent)
            choice: dict[str, Any] = {"index": 0, "text": "" if how.ids else "x" * count}
            if how.ids:
                choice["token_ids"] = list(range(5, 5 + count))
                if sent == 0 and how.echo_prompt:
                    choice["prompt_token_ids"] = prompt
            send(writer, how, {"object": "text_completion", "choices": [choice]})
            sent += count
            if fault == "cut":
                await writer.drain()
                await asyncio.sleep(0.05)
                return writer.transport.abort()
            if fault == "no end mark":
                return writer.write(b"0\r\n\r\n")
            if fault == "error event":
                send(writer, how, {"error": {"message": "the engine broke", "code": 500}})
                break
            if fault == "garbage":
                send(writer, how, "not json")
                break
            if fault == "stall":
                await writer.drain()
                await asyncio.sleep(3600)
            if sent < produced and how.gap_s:
                await asyncio.sleep(how.gap_s)
        if fault not in ("no usage", "error event", "garbage"):
            if fault == "late usage":
                await asyncio.sleep(0.3)
            details = None if how.cached is None else {"cached_tokens": how.cached}
            usage = {
                "prompt_tokens": len(prompt) + (fault == "other prompt length"),
                "completion_tokens": produced,
                "prompt_tokens_details": details,
            }
            if fault == "ids missing":
                usage["completion_tokens"] += 1
            send(writer, how, {"choices": [], "usage": usage})
        send(writer, how, None)
        writer.write(b"0\r\n\r\n")
        return None


def send(writer: asyncio.StreamWriter, how: Behaviour, event: Any) -> None:
    text = "[DONE]" if event is None else event if isinstance(event, str) else json.dumps(event)
    data = f": a comment\r\ndata: {text}\r\n\r\n".encode() if how.crlf else f"data: {text}\n\n".encode()
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def answer(writer: asyncio.StreamWriter, status: int, data: Any) -> None:
    body = json.dumps(data).encode()
    writer.write(
        b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
        % (status, len(body), body)
    )


if __name__ == "__main__":
    wanted = Behaviour(**json.loads(sys.argv[1]) if len(sys.argv) > 1 else {})
    asyncio.run(Server(wanted).serve())
