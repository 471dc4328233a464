"""Which requests are recorded, and how one is changed so that its answer tells its lengths. Standard library alone.

A streamed answer of OpenAI's API tells them only when `stream_options.include_usage` asks for it. Where the user did not
ask, the proxy does, and `UsageFilter` takes the event that this adds out of the answer again.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
RECORDED: Final = (COMPLETIONS, CHAT, RESPONSES, MESSAGES)

_ASK: Final = b'"stream_options":{"include_usage":true},'
# Within a JSON text every quote has a backslash before it, so none of these can be found in a prompt's words.
_PROMPT_LIST: Final = re.compile(rb'"prompt"\s*:\s*\[')
_NO_CHOICES: Final = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_EVENT_END: Final = re.compile(rb"\r?\n\r?\n")
_NUMBERS: Final = b"0123456789, \t\r\n"


def recorded_path(path: str) -> str | None:
    """The endpoint of RECORDED that a request's path, without its query, ends in; None for any other path."""
    return next((known for known in RECORDED if path.endswith(known)), None)


def ask_for_usage(body: bytes) -> bytes | None:
    """`body` of a completion or chat request, changed to ask for the lengths; None where it needs no change.

    That is: where nothing is streamed, where the user asks himself, and where `body` is no JSON object.
    """
    data = _object(_without_ids(body))
    if data is None or data.get("stream") is not True:
        return None
    options = data.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        return None
    if "stream_options" not in data:
        start = body.index(b"{") + 1
        return body[:start] + _ASK + body[start:]
    whole = _object(body) or {}
    given = options if isinstance(options, dict) else {}
    # Without include_usage the server ignores continuous_usage_stats; it must go on doing so.
    whole["stream_options"] = {**given, "include_usage": True, "continuous_usage_stats": False}
    return json.dumps(whole).encode()


class UsageFilter:
    """Takes the usage event, which has no choices, out of a stream of events; everything else passes byte for byte.

    An event that has not come whole yet is held back: nobody can read half of one.
    """

    def __init__(self) -> None:
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """What of the stream may be passed on now that `piece` has come."""
        if not self._held and piece.endswith(b"\n\n") and _NO_CHOICES.search(piece) is None:
            return piece
        data = self._held + piece
        passed, start = [], 0
        for end in _EVENT_END.finditer(data):
            event = data[start : end.end()]
            if not _is_usage(event):
                passed.append(event)
            start = end.end()
        self._held = data[start:]
        return b"".join(passed)

    def rest(self) -> bytes:
        """What was held back when the stream ended."""
        rest, self._held = self._held, b""
        return rest


def _is_usage(event: bytes) -> bool:
    if _NO_CHOICES.search(event) is None:
        return False
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    data = _object(b"".join(lines))
    return data is not None and data.get("choices") == [] and isinstance(data.get("usage"), dict)


def _without_ids(body: bytes) -> bytes:
    """`body` with a prompt of token ids emptied, whose parsing would take over a millisecond for long ones."""
    found = _PROMPT_LIST.search(body)
    if found is None:
        return body
    end = body.find(b"]", found.end())
    if end < 0 or body[found.end() : end].translate(None, _NUMBERS):
        return body
    return body[: found.end()] + body[end:]


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None
