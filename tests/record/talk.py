"""A plain client: what it sends is what it is told to, and what it gets it shows with the times."""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    times_s: list[float] = field(default_factory=list)


def opened(url: str, path: str, body: Any, method: str = "POST", **headers: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request(method, path, data, {"Content-Type": "application/json", **headers})
    return connection


def send(url: str, path: str, body: Any = None, method: str = "POST", **headers: str) -> Reply:
    connection = opened(url, path, body, method, **headers)
    answer = connection.getresponse()
    found = Reply(answer.status, dict(answer.headers), b"")
    while piece := answer.read1():
        found.times_s.append(time.perf_counter())
        found.body += piece
    connection.close()
    return found


def get(url: str, path: str) -> Any:
    return json.loads(send(url, path, method="GET").body)


def chat(*turns: str, **more: Any) -> dict[str, Any]:
    roles = ("system", "user", "assistant")
    messages = [{"role": roles[min(place, 1) + place // 2 % 2], "content": turn} for place, turn in enumerate(turns)]
    return {"model": "m", "messages": messages, **more}
