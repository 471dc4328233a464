"""What a server with the study's flags cannot do for its users: random weights, no text; and a request that it does answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from autotune.export.flags import Flag, grouped, is_flag

_URL: Final = "http://127.0.0.1:8000/v1/completions"


def caveats(words: Iterable[str]) -> list[str]:
    """A line for each of the server flags `words` with which a server is not what its users expect."""
    flags = grouped(words)
    found = []
    if _has_dummy_weights(flags):
        found.append("Random weights (load-format dummy): for trying things out, not for production.")
    if _has_no_tokenizer(flags):
        found.append("No tokenizer (skip-tokenizer-init): the server takes and gives token ids, and refuses text.")
    if _is_on(flags, "--enforce-eager", "--enf"):
        found.append(
            "Eager mode, without CUDA graphs (enforce-eager), as measured: on a GPU slower than vLLM's default."
        )
    return found


def request(words: Iterable[str], dropped: Iterable[str] = ()) -> str:
    """A command that asks a server with the flags `words` for some tokens. dropped: names of flags that hold secrets."""
    asked = '"prompt": [1, 2, 3], "max_tokens": 8, "return_token_ids": true'
    if not _has_no_tokenizer(grouped(words)):
        asked = '"prompt": "Once upon a time", "max_tokens": 16'
    key = (
        ' -H "Authorization: Bearer $API_KEY"' if any(is_flag(name, "--api-key", "--api-k") for name in dropped) else ""
    )
    return f"curl {_URL} -H 'Content-Type: application/json'{key} -d '{{{asked}}}'"


def _has_dummy_weights(flags: Iterable[Flag]) -> bool:
    values = [flag.values for flag in flags if is_flag(flag.name, "--load-format", "--load-f")]
    return bool(values) and values[-1] == ("dummy",)


def _has_no_tokenizer(flags: Iterable[Flag]) -> bool:
    return _is_on(flags, "--skip-tokenizer-init", "--skip-t")


def _is_on(flags: Iterable[Flag], name: str, shortest: str) -> bool:
    """Whether the switch `name`, or what stands for it, comes after the last `--no-` of it."""
    on = False
    for flag in flags:
        if is_flag(flag.name, name, shortest):
            on = True
        elif is_flag(flag.name, f"--no-{name[2:]}", f"--no-{shortest[2:]}"):
            on = False
    return on
