"""Why a server did not start, told from its log and exit code, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from ppas_core.errors import InvalidInput, NoResult


class StartFailure(StrEnum):
    """Kinds of failed starts."""

    OUT_OF_MEMORY = "out of memory"
    BAD_FLAG = "bad flag"
    PORT_TAKEN = "port taken"
    MODEL_NOT_FOUND = "model not found"
    SCHEDULER_NOT_LOADED = "scheduler not loaded"
    DIED = "died"
    HUNG = "hung"


class ServerInputError(InvalidInput):
    """The server cannot start as asked; `kind` says why."""

    kind: StartFailure


class ServerFailed(NoResult):
    """The server did not start, or not as it should; `kind` says why."""

    kind: StartFailure


_INPUT: Final = {StartFailure.BAD_FLAG, StartFailure.PORT_TAKEN, StartFailure.MODEL_NOT_FOUND}

_REMEDIES: Final = {
    StartFailure.OUT_OF_MEMORY: "lower --max-num-batched-tokens, --max-model-len or --gpu-memory-utilization, or end "
    "what else uses the memory; without a GPU, --kv-cache-memory-bytes says how much is taken",
    StartFailure.BAD_FLAG: "correct the flag; `vllm serve --help` of this version lists them",
    StartFailure.PORT_TAKEN: "end what listens there, or name no port to have a free one chosen",
    StartFailure.MODEL_NOT_FOUND: "give the model's folder, or its name where it can be downloaded",
    StartFailure.SCHEDULER_NOT_LOADED: "run `ppas doctor` in the server's environment; P-PAS is loaded by an export, "
    "by --scheduler-cls or by PPAS_ENABLED=1",
    StartFailure.DIED: "read its log",
    StartFailure.HUNG: "read its log; give it more time where it was still loading or compiling",
}

# In this order: a scheduler that cannot be imported also ends in an error about a flag, and everything ends in "died".
_SIGNS: Final = (
    (
        StartFailure.SCHEDULER_NOT_LOADED,
        r"ppas_core\.errors\.\w+: |No module named 'ppas_core|module 'ppas_core[^']*' has no attribute"
        r"|(?:ImportError|AttributeError|ModuleNotFoundError).*\bscheduler\w*",
    ),
    (StartFailure.PORT_TAKEN, r"[Aa]ddress already in use"),
    (
        StartFailure.BAD_FLAG,
        r": error: (?:unrecognized arguments|argument |ambiguous option|the following arguments)"
        r"|validation errors? for \w+",
    ),
    (
        StartFailure.MODEL_NOT_FOUND,
        r"Repository Not Found|RepositoryNotFoundError|LocalEntryNotFoundError|is not a valid model identifier"
        r"|does not appear to have a file named config\.json|Can't load the configuration of"
        r"|Repo id must be in the form|Invalid repository ID or local directory|OfflineModeIsEnabled|gated repo",
    ),
    (
        StartFailure.OUT_OF_MEMORY,
        r"out of memory|OutOfMemoryError|No available memory for the cache blocks|MemoryError|Cannot allocate memory"
        r"|larger than the (?:maximum number of tokens|available KV cache memory)|KV cache is needed"
        r"|less than desired (?:GPU|CPU) memory utilization|bad_alloc",
    ),
)  # fmt: skip
_KILLED: Final = 128 + 9
_PREFIX: Final = re.compile(r"^(?:\([\w -]+ pid=\d+\)\s?)?(?:[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\]\s?)?")
"""What vLLM's processes and its logger put before a line."""
_CODE: Final = re.compile(r"^\s*(?:raise\b|File \"|\^+$|[~^ ]+$|return\b)|[(,]$")
"""Lines of a traceback that are somebody's source, and say nothing by themselves."""
_EXCEPTION: Final = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception): \S")
_REFERS: Final = "See root cause"
"""Stands in vLLM's last exception, which another one caused."""
_MODEL_IN_WORDS: Final = (
    (
        r"LocalEntryNotFoundError|OfflineModeIsEnabled",
        "vLLM has none of that name on this machine and could not download it",
    ),
    (r"Repository ?Not ?Found", "the hub has none of that name, or asks for a token of somebody who may see it"),
    (r"gated repo", "the hub gives it only to those who may have it, and asks for their token"),
)
_LONGEST: Final = 400
_BEFORE: Final = 4
"""Lines of the log before the cause that are shown."""


class Diagnosis(NamedTuple):
    """kind: of the failure. cause: in a line. before: the log's lines that lead to it, without what loggers add."""

    kind: StartFailure
    cause: str
    before: str = ""


def diagnose(log: str, exit_code: int | None) -> Diagnosis:
    """Why the server whose log this is did not start."""
    lines = [_PREFIX.sub("", line).rstrip() for line in log.splitlines()]
    for kind, sign in _SIGNS:
        shown = [place for place, line in enumerate(lines) if re.search(sign, line)]
        if shown:
            place = next((place for place in shown if not _CODE.search(lines[place])), shown[0])
            return Diagnosis(kind, _in_words(kind, lines[place].strip()), _lead(lines, place))
    if exit_code == _KILLED:
        killed = "it was killed without a word, as the kernel does when memory runs out"
        return Diagnosis(StartFailure.OUT_OF_MEMORY, killed, _lead(lines, len(lines)))
    raised = [place for place, line in enumerate(lines) if _EXCEPTION.match(line) and _REFERS not in line]
    if not raised:
        return Diagnosis(StartFailure.DIED, f"exit code {exit_code}", _lead(lines, len(lines)))
    return Diagnosis(StartFailure.DIED, f"exit code {exit_code}: {_cut(lines[raised[-1]])}", _lead(lines, raised[-1]))


def _in_words(kind: StartFailure, line: str) -> str:
    if kind is StartFailure.MODEL_NOT_FOUND:
        for sign, words in _MODEL_IN_WORDS:
            if re.search(sign, line):
                return f"{words} ({_cut(line, _LONGEST // 2)})"
    return _cut(line)


def _cut(line: str, longest: int = _LONGEST) -> str:
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def _lead(lines: Sequence[str], place: int) -> str:
    """The last lines before `place` that tell something; a traceback's lines do not."""
    said = [_cut(line) for line in lines[:place] if line and not line.startswith((" ", "Traceback "))]
    return "\n".join(said[-_BEFORE:])


def failure(
    kind: StartFailure, line: str, shown: str = "", *, log: Path | None = None
) -> ServerInputError | ServerFailed:
    """The error to raise: what happened, the remedy, then `shown`, lines of the log, and where the whole log is."""
    message = f"the server did not start: {kind}: {line}; {_REMEDIES[kind]}"
    if log is not None:
        message += f"\nThe log: {log}"
    if shown:
        message += f"\nFrom it:\n{shown}"
    error = ServerInputError(message) if kind in _INPUT else ServerFailed(message)
    error.kind = kind
    return error
