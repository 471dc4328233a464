"""What the bytes of one streamed answer say: tokens and when they came, lengths, or why the request failed.

No clock and no network: the client stamped the pieces as they arrived, and this reads them after the run. The rules
are those of OpenAI's completions stream with vLLM's additions (token ids, cached tokens). Standard library alone.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

OK: Final = "ok"
HTTP_STATUS: Final = "http_status"
STREAM_ERROR: Final = "stream_error"
CUT_STREAM: Final = "cut_stream"
WRONG_LENGTH: Final = "wrong_length"
TIMEOUT: Final = "timeout"
CONNECTION: Final = "connection"
STOPPED: Final = "stopped"
"""In flight when the run was stopped."""
UNSENT: Final = "unsent"
"""Not sent: the run was stopped, or an earlier turn of its session failed. Every other word means sent or tried."""

FAILURES: Final = (HTTP_STATUS, STREAM_ERROR, CUT_STREAM, WRONG_LENGTH, TIMEOUT, CONNECTION, STOPPED)

CLIENT_LIMIT: Final = "the client's machine has no file descriptor or port left for another connection"
"""Detail of a CONNECTION failure that is no fault of the server, and makes the run invalid."""

_DETAIL_LENGTH: Final = 300
_END_BYTES: Final = 64
_ERROR: Final = re.compile(rb'"error"\s*:\s*(?!\s|null)|"object"\s*:\s*"error"')


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """One request as the client saw it.

    index: its place in the trace. sent_s: when its first body byte went to the socket, or when connecting failed.
    done_s: when its answer ended, however it ended. Seconds from the anchor.
    http_status: 0 when no answer began.
    ended: OK when the answer ended as HTTP says that it should, else TIMEOUT, CONNECTION, CUT_STREAM or STOPPED.
    times_s, sizes: arrival and length in bytes of every piece of `body`.
    """

    index: int
    sent_s: float
    done_s: float
    http_status: int
    ended: str
    detail: str
    times_s: array[float]
    sizes: array[int]
    body: bytes


@dataclass(slots=True)
class Reading:
    """What an answer means.

    status: OK or one of FAILURES; detail says more about a failure.
    chunk_time_s, chunk_tokens: arrival and tokens of every event that carried generated tokens.
    cached_tokens: prompt tokens that came out of the prefix cache; -1 when the server does not tell.
    counted: whether the server sent token ids; without them an event with text counts as one token.
    """

    status: str = OK
    detail: str = ""
    chunk_time_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    cached_tokens: int = -1
    counted: bool = True


def broken(http_status: int, pieces: Sequence[bytes]) -> bool:
    """Whether an answer that ended as HTTP says failed all the same, told without reading its JSON.

    For the client, which must know at once whether a session goes on. A wrong length is found by `read_answer` alone.
    In generated text a quotation mark is escaped, so only an event can have a key called "error".
    """
    body = b"".join(pieces)
    return http_status != 200 or b"[DONE]" not in body[-_END_BYTES:] or _ERROR.search(body) is not None


def read_answer(raw: RawAnswer, prompt_tokens: int, output_tokens: int) -> Reading:
    """What `raw` means for a request planned with these lengths."""
    reading = Reading()
    if raw.http_status not in (0, 200):
        reading.status = HTTP_STATUS
        reading.detail = f"{raw.http_status}: {_shorten(_message(raw.body))}"
        return reading
    usage: dict[str, Any] | None = None
    complete = False
    for time_s, data in _events(raw):
        if data == b"[DONE]":
            complete = True
            continue
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            return _failed(reading, STREAM_ERROR, f"an event is not a JSON object: {data[:80]!r}")
        if event.get("error") or event.get("object") == "error":
            return _failed(reading, STREAM_ERROR, json.dumps(event.get("error") or event))
        _take_tokens(reading, time_s, event.get("choices") or [])
        usage = event.get("usage") or usage
    if raw.ended != OK:
        return _failed(reading, raw.ended, raw.detail)
    if not complete:
        return _failed(reading, CUT_STREAM, "the stream ended without its end mark, data: [DONE]")
    return _check_lengths(reading, usage, prompt_tokens, output_tokens)


def _events(raw: RawAnswer) -> Iterator[tuple[float, bytes]]:
    """The data of every event and when the piece that completed it arrived. Comments and other fields are skipped."""
    start, piece, arrived = 0, 0, raw.sizes[0] if raw.sizes else 0
    while (end := raw.body.find(b"\n", start)) >= 0:
        while end >= arrived:
            piece += 1
            arrived += raw.sizes[piece]
        line = raw.body[start:end].strip()
        start = end + 1
        if line.startswith(b"data:"):
            yield raw.times_s[piece], line[5:].strip()


def _take_tokens(reading: Reading, time_s: float, choices: list[Any]) -> None:
    tokens = 0
    for choice in choices:
        ids = choice.get("token_ids")
        if ids is not None:
            tokens += len(ids)
        elif choice.get("text"):
            reading.counted = False
            tokens += 1
    if tokens:
        reading.chunk_time_s.append(time_s)
        reading.chunk_tokens.append(tokens)


def _check_lengths(reading: Reading, usage: dict[str, Any] | None, prompt_tokens: int, output_tokens: int) -> Reading:
    if usage is None:
        return _failed(reading, WRONG_LENGTH, "the server sent no usage, so the lengths cannot be checked")
    details = usage.get("prompt_tokens_details") or {}
    reading.cached_tokens = -1 if details.get("cached_tokens") is None else int(details["cached_tokens"])
    for name, planned in (("prompt_tokens", prompt_tokens), ("completion_tokens", output_tokens)):
        if usage.get(name) != planned:
            return _failed(reading, WRONG_LENGTH, f"{name} is {usage.get(name)}, planned {planned}")
    received = sum(reading.chunk_tokens)
    if reading.counted and received != output_tokens:
        return _failed(reading, WRONG_LENGTH, f"{received} token ids arrived, planned {output_tokens}")
    if not received:
        return _failed(reading, WRONG_LENGTH, "no event carried a token or text, so no token has a time")
    return reading


def _message(body: bytes) -> str:
    """What a refusal says: the first line of its message, as vLLM wraps it under `error` or older releases at the top."""
    text = body.decode(errors="replace")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return text
    inner = data.get("error", data) if isinstance(data, dict) else None
    message = inner.get("message") if isinstance(inner, dict) else inner
    return message.strip().partition("\n")[0] if isinstance(message, str) and message.strip() else text


def _failed(reading: Reading, status: str, detail: str) -> Reading:
    reading.status, reading.detail = status, _shorten(detail)
    return reading


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _DETAIL_LENGTH else text[: _DETAIL_LENGTH - 1] + "…"
