"""Why a server did not start, told from its log and exit code, and what to do about it."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final

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
    "what else uses the memory",
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


def diagnose(log: str, exit_code: int | None) -> tuple[StartFailure, str]:
    """The kind of failure that `log` shows, and the line that shows it."""
    for kind, sign in _SIGNS:
        if match := re.search(sign, log):
            start = log.rfind("\n", 0, match.start()) + 1
            end = log.find("\n", match.end())
            line = log[start : end if end >= 0 else None].strip()
            return kind, line if len(line) <= 400 else line[:399] + "…"
    if exit_code == _KILLED:
        return StartFailure.OUT_OF_MEMORY, "it was killed without a word, as the kernel does when memory runs out"
    return StartFailure.DIED, f"exit code {exit_code}"


def failure(kind: StartFailure, line: str, tail: str = "") -> ServerInputError | ServerFailed:
    """The error to raise: what happened, the remedy, the end of the log."""
    message = f"the server did not start: {kind}: {line}; {_REMEDIES[kind]}"
    if tail:
        message += f"\nThe end of its log:\n{tail}"
    error = ServerInputError(message) if kind in _INPUT else ServerFailed(message)
    error.kind = kind
    return error
