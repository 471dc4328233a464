"""The requests in vLLM's own log, written with --enable-log-requests, made flat.

What the log tells depends on its level. The line "Received request" has the time, to the second and without a year, and
the sampling parameters. Only at DEBUG is there a line with the prompt's token ids, and the ids of answers need
--enable-log-outputs as well (at DEBUG from 0.32 on). Without those, an answer's length is known where it was fixed:
ignore_eos, or min_tokens as large as max_tokens. Lines of uvicorn's access log have no time at all and tell nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Final

from ppas_core.errors import InvalidInput
from traces.importers.rows import Row
from traces.importers.values import MAX_TOKENS
from traces.lines import numbered_lines

NO_GENERATION: Final = "no generation"
SEVERAL: Final = "several answers to one prompt"
ABORTED: Final = "aborted"
FAILED: Final = "failed"
NO_PROMPT: Final = "without the prompt's length (set VLLM_LOGGING_LEVEL=DEBUG)"
CUT_PROMPT: Final = "with a prompt cut in the log (leave out --max-log-len)"
NO_LENGTH: Final = "without the answer's length (set --enable-log-outputs and VLLM_LOGGING_LEVEL=DEBUG)"

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_HEAD = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (\d\d)-(\d\d) (\d\d):(\d\d):(\d\d) \[[^\]]*:\d+\] ")
_JSON_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[,.](\d{1,6}))?")
_RECEIVED = re.compile(r"Received request (\S+): ")
_DETAILS = re.compile(r"Request (\S+) details: prompt: ")
_ENDED_BADLY = re.compile(r"Request (\S+) (aborted|failed)\b")
_GENERATED = re.compile(r"Generated response (\S+?)( \(streaming (?:delta|complete)\))?(?: details)?: ")
_LENGTHS = re.compile(r"ignore_eos=(True|False), max_tokens=(\d{1,12}|None), min_tokens=(\d{1,12}), ")
_N = re.compile(r"params: SamplingParams\(n=(\d{1,6}), ")
_LIST = re.compile(r"[\[(]([\d, ]*)[\])]")
_COUNTED = re.compile(r"<streaming_complete: (\d{1,12}) tokens>")
_MAX_LOG_LEN = re.compile(r"'max_log_len': (\d{1,12})")
_DETECT_LINES: Final = 200
_DAYS: Final = (0, *accumulate((31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)))
_LATE_DAYS: Final = 180
"""A date this far before the last one is of the next year."""


@dataclass(slots=True)
class _Logged:
    """One request as far as the log has told."""

    number: int
    time_s: Decimal
    params: str
    prompt_tokens: int | None = None
    blocks: list[int] = field(default_factory=list)
    output_tokens: int | None = None
    reason: str | None = None


def is_vllm_log(path: Path) -> bool:
    """Whether the file is a log of vLLM's: one of its first lines has vLLM's head, or is JSON of a logger."""
    return any(
        _HEAD.search(_COLOUR.sub("", line)) or _json(line) for _, line in islice(numbered_lines(path), _DETECT_LINES)
    )


def vllm_log_rows(path: Path, block_size: int) -> Iterator[Row]:
    """The requests of a log, in the order in which they were received; a row's number is the line of its receipt.

    Equal beginnings of prompts get equal block ids, which are counted up from 0 and tell nothing else.
    """
    logged: list[_Logged] = []
    by_id: dict[str, _Logged] = {}
    details: dict[str, tuple[int | None, list[int]]] = {}
    clock, blocks = _Clock(), _Blocks(block_size)
    max_log_len = None
    for number, raw in numbered_lines(path):
        time_s, message = _message(raw, clock, path, number)
        if time_s is None:
            continue
        if match := _RECEIVED.match(message):
            found = _Logged(number, time_s, message[match.end() :])
            known = details.pop(match[1], None)
            if known is None:  # older releases say all in one line
                known = _prompt(message, blocks)
            found.prompt_tokens, found.blocks = known
            if max_log_len is not None and found.prompt_tokens is not None and found.prompt_tokens >= max_log_len:
                found.reason = CUT_PROMPT
            logged.append(found)
            by_id[match[1]] = found
        elif match := _DETAILS.match(message):
            details[match[1]] = _prompt(message, blocks)
        elif match := _GENERATED.match(message):
            # A /v1/responses request is received as ID_0, its first turn, and answered as ID.
            if (answered := by_id.get(match[1]) or by_id.get(f"{match[1]}_0")) is not None:
                _take_output(answered, message[match.end() :])
        elif match := _ENDED_BADLY.match(message):
            if (answered := by_id.get(match[1])) is not None:
                answered.reason = ABORTED if match[2] == "aborted" else FAILED
        elif match := _MAX_LOG_LEN.search(message):
            max_log_len = int(match[1])
    for found in logged:
        yield found.number, _row(found)


def _message(raw: str, clock: _Clock, path: Path, number: int) -> tuple[Decimal | None, str]:
    """The time and the message of a line; no time for a line that is not vLLM's."""
    line = _COLOUR.sub("", raw) if "\x1b" in raw else raw
    try:
        if (data := _json(line)) is not None:
            return clock.dated(data["asctime"]), data["message"]
        if (head := _HEAD.search(line)) is not None:
            return clock.undated(*(int(part) for part in head.groups())), line[head.end() :]
    except InvalidInput as error:
        raise InvalidInput(f"{path}, row {number}: {error}") from None
    return None, ""


def _json(line: str) -> dict[str, str] | None:
    if not line.startswith("{"):
        return None
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not all(isinstance(data.get(key), str) for key in ("asctime", "message")):
        return None
    return data if _JSON_TIME.match(data["asctime"]) else None


def _prompt(message: str, blocks: _Blocks) -> tuple[int | None, list[int]]:
    """A prompt's length and blocks from the last list of ids in `message`: the text before may hold anything."""
    place = message.rfind("prompt_token_ids: ")
    found = _LIST.match(message, place + len("prompt_token_ids: ")) if place >= 0 else None
    ids = _ids(found[1]) if found else None
    return (None, []) if ids is None else (len(ids), blocks.of(ids))


def _ids(text: str) -> array[int] | None:
    try:
        return array("I", (int(part) for part in text.split(",") if part.strip()))
    except (ValueError, OverflowError):
        return None


def _take_output(found: _Logged, text: str) -> None:
    """Adds what one line about an answer says about its length; parts of a stream add up."""
    if (whole := _COUNTED.search(text)) is not None:
        found.output_tokens = int(whole[1])
        return
    place = text.rfind("output_token_ids: ")
    ids = _LIST.match(text, place + len("output_token_ids: ")) if place >= 0 else None
    if ids is not None:
        count = len(ids[1].split(",")) if ids[1].strip() else 0
        found.output_tokens = (found.output_tokens or 0) + count


def _row(found: _Logged) -> dict[str, Any]:
    several, lengths = _N.match(found.params), _LENGTHS.search(found.params)
    output = found.output_tokens
    if output is None and lengths is not None and lengths[2] != "None":
        most, least = int(lengths[2]), int(lengths[3])
        output = most if lengths[1] == "True" or most == least else None
    reason = found.reason
    if several is None:
        several = re.search(r"SamplingParams\(n=(\d{1,6}), ", found.params)
    if several is None:
        reason = NO_GENERATION
    elif int(several[1]) > 1:
        reason = SEVERAL
    elif reason is None and not found.prompt_tokens:
        reason = NO_PROMPT
    elif reason is None and (output is None or output > MAX_TOKENS):
        reason = NO_LENGTH
    return {
        "received": found.time_s,
        "prompt_tokens": found.prompt_tokens,
        "output_tokens": output,
        "blocks": found.blocks,
        "reason": reason,
    }


class _Clock:
    """Makes seconds of dates: from 1 January of the log's first year where the log names no year, else from 1970."""

    def __init__(self) -> None:
        self._years = 0
        self._last_day = -1
        self._leap_days = 0
        self._leap_seen = False

    def undated(self, month: int, day: int, hour: int, minute: int, second: int) -> Decimal:
        """Seconds of a date without a year. A February gets its 29th day when the log has one."""
        if not (
            1 <= month <= 12
            and 1 <= day <= _DAYS[month] - _DAYS[month - 1]
            and hour < 24
            and minute < 60
            and second < 61
        ):
            raise InvalidInput(
                f"the date is {month:02}-{day:02} {hour:02}:{minute:02}:{second:02}; allowed: one that the calendar has"
            )
        today = _DAYS[month - 1] + day - 1
        if self._last_day >= 0 and today < self._last_day - _LATE_DAYS:
            self._years += 1
            self._leap_days += self._leap_seen
            self._leap_seen = False
        self._leap_seen |= (month, day) == (2, 29)
        self._last_day = today
        days = self._years * 365 + self._leap_days + today - (month > 2 and not self._leap_seen)
        return Decimal(days * 86_400 + hour * 3600 + minute * 60 + second)

    def dated(self, text: str) -> Decimal:
        """Seconds since 1970 of a whole date."""
        match = _JSON_TIME.match(text)
        try:
            if match is None:
                raise ValueError
            moment = datetime(*(int(part) for part in match.groups()[:6]), tzinfo=UTC)  # type: ignore[misc, arg-type]
        except ValueError:
            raise InvalidInput(f"asctime is {text[:60]!r}; allowed: a date that the calendar has") from None
        return Decimal(int(moment.timestamp())) + Decimal(f"0.{match[7] or 0}")


class _Blocks:
    """Numbers blocks of token ids: equal numbers for prompts that begin with the same ids."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._numbers: dict[bytes, int] = {}

    def of(self, ids: array[int]) -> list[int]:
        data, step = ids.tobytes(), self._size * ids.itemsize
        link, found = b"", []
        for place in range(0, len(data), step):
            link = hashlib.blake2b(link + data[place : place + step], digest_size=16).digest()
            found.append(self._numbers.setdefault(link, len(self._numbers)))
        return found
