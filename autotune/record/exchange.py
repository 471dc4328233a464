"""What one request and its answer say: lengths and what the prompt is, or why the request is left out.

No network and no clock; the rules are those of vLLM's four generating endpoints.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from autotune.record.requests import CHAT, COMPLETIONS, MESSAGES
from traces.format import MAX_TOKENS

ENDED: Final = "ended"
CLIENT_LEFT: Final = "the client left before the end"
NO_ANSWER: Final = "no answer from the server"
CUT: Final = "the answer was cut"
STOPPED: Final = "still open when the recording ended"

NOT_JSON: Final = "the request is no JSON object"
SEVERAL_PROMPTS: Final = "several prompts in one request"
SEVERAL_ANSWERS: Final = "several answers asked for in one request"
SERVER_ERROR: Final = "the stream ended in an error"
NO_USAGE: Final = "the answer tells no lengths"
NO_OUTPUT: Final = "without output tokens"


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request with its answer as they crossed the proxy.

    at_ns: when the request's head had come, in nanoseconds from the start of the recording.
    endpoint: one of requests.RECORDED. status: 0 when no answer began. ended: ENDED or why it did not.
    """

    at_ns: int
    endpoint: str
    status: int
    ended: str
    body: bytes
    answer: bytes


@dataclass(frozen=True, slots=True)
class Finding:
    """What a kept request is. Of `ids` and `text` at most one is there; neither where the prompt is not known whole.

    scope: what else must be equal for two prompts to share a prefix: model and cache salt.
    request: the request's JSON, to ask the server for the ids of a text or to keep the text.
    """

    prompt_tokens: int
    output_tokens: int
    model: str
    scope: bytes
    ids: list[int] | None
    text: bytes | None
    request: dict[str, Any] = field(repr=False)


def read_exchange(found: Exchange) -> Finding | str:
    """The lengths and the prompt of a request, or the reason for leaving it out."""
    if found.ended in (CLIENT_LEFT, NO_ANSWER, STOPPED):
        return found.ended
    if found.status != 200:
        return f"HTTP status {found.status}"
    if found.ended != ENDED:
        return found.ended
    request = _object(found.body)
    if request is None:
        return NOT_JSON
    if (reason := _several(request)) is not None:
        return reason
    usage = _usage(found, streamed=request.get("stream") is True)
    if isinstance(usage, str):
        return usage
    prompt_tokens, output_tokens = usage
    if output_tokens == 0:
        return NO_OUTPUT
    ids, text = _prompt(found.endpoint, request)
    model = str(request.get("model") or "").encode("utf-8", "replace").decode()
    scope = json.dumps([model, request.get("cache_salt")]).encode()
    return Finding(prompt_tokens, output_tokens, model, scope, ids, text, request)


def _several(request: dict[str, Any]) -> str | None:
    for name in ("n", "best_of"):
        if isinstance(count := request.get(name), int) and count > 1:
            return SEVERAL_ANSWERS
    if request.get("use_beam_search"):
        return SEVERAL_ANSWERS
    prompt = request.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        return SEVERAL_PROMPTS
    return None


def _usage(found: Exchange, *, streamed: bool) -> tuple[int, int] | str:
    """Prompt and output tokens as the server counted them, or what is wrong with the answer."""
    events = list(_events(found.answer)) if streamed else [_object(found.answer) or {}]
    prompt_tokens = output_tokens = None
    complete = not streamed
    for event in events:
        if event is None:
            complete = True
            continue
        if event.get("error") or event.get("type") in ("error", "response.failed") or event.get("object") == "error":
            return SERVER_ERROR
        if event.get("type") in ("response.completed", "response.incomplete", "message_stop"):
            complete = True
        for holder in (event, event.get("response"), event.get("message")):
            usage = holder.get("usage") if isinstance(holder, dict) else None
            if isinstance(usage, dict):
                prompt_tokens = _prompt_tokens(usage, prompt_tokens)
                output_tokens = _first_int(usage, ("completion_tokens", "output_tokens"), output_tokens)
    if not complete:
        return CUT
    usable = prompt_tokens is not None and 0 < prompt_tokens <= MAX_TOKENS and output_tokens is not None
    return (prompt_tokens or 0, output_tokens or 0) if usable else NO_USAGE


def _prompt_tokens(usage: dict[str, Any], before: int | None) -> int | None:
    """Anthropic's API counts tokens from the prefix cache apart; all others within."""
    apart = ("cache_read_input_tokens", "cache_creation_input_tokens")
    found = _first_int(usage, ("prompt_tokens", "input_tokens"), None)
    if found is None:
        return before
    return found + sum(_first_int(usage, (name,), 0) or 0 for name in apart)


def _first_int(usage: dict[str, Any], names: tuple[str, ...], default: int | None) -> int | None:
    return next(
        (usage[name] for name in names if type(usage.get(name)) is int and 0 <= usage[name] <= MAX_TOKENS), default
    )


def _events(answer: bytes) -> Iterator[dict[str, Any] | None]:
    """The events that may say something about lengths, errors or the end; None for the end mark."""
    for line in answer.split(b"\n"):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            yield None
        elif b'"usage"' in data or b'"error"' in data or b'"type"' in data:
            event = _object(data)
            if event is not None:
                yield event


def _prompt(endpoint: str, request: dict[str, Any]) -> tuple[list[int] | None, bytes | None]:
    """Token ids, or the text whose beginnings are compared: what a template puts first comes first."""
    if endpoint == COMPLETIONS:
        prompt = request.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return None, _utf8(prompt)
        return (
            (prompt, None) if isinstance(prompt, list) and prompt and not request.get("prompt_embeds") else (None, None)
        )
    if request.get("previous_response_id"):
        return None, None  # most of the prompt is not in this request
    head = (
        ("tools", "system") if endpoint == MESSAGES else ("tools",) if endpoint == CHAT else ("tools", "instructions")
    )
    parts = [_utf8(json.dumps(request[name])) for name in head if request.get(name)]
    turns = request.get("messages" if endpoint in (CHAT, MESSAGES) else "input")
    for turn in turns if isinstance(turns, list) else [turns]:
        parts.append(_turn(turn))
    return None, b"\x1e".join(parts)


def _turn(turn: object) -> bytes:
    if not isinstance(turn, dict):
        return _utf8(str(turn))
    content = turn.get("content")
    pieces = [_utf8(str(turn.get("role")))]
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            pieces.append(_utf8(part))
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            pieces.append(_utf8(part["text"]))
        elif part is not None:  # a picture is one thing, however many bytes it has
            pieces.append(hashlib.sha256(json.dumps(part).encode()).digest())
    rest = {name: value for name, value in turn.items() if name not in ("role", "content")}
    return b"\x1f".join([*pieces, _utf8(json.dumps(rest))] if rest else pieces)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None
