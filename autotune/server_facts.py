"""What a running server says of itself: version, model, KV blocks, budget, flags. Read back, never assumed."""

from __future__ import annotations

import ast
import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from ppas_core.errors import InvalidInput
from ppas_core.files import write_atomically
from ppas_core.plain_json import dump_json, load_json

_CACHE_CONFIG: Final = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SCHEDULER: Final = re.compile(r"P-PAS settings: (.+?) \(from (.+?)\); (\w+)")
_BUDGET: Final = re.compile(r"max_num_batched_tokens=(\d+)")
_FLAGS: Final = re.compile(r"non-default args: (\{.*\})")
_TIMEOUT_S: Final = 10.0
_MAX_BYTES: Final = 16 * 1024 * 1024
"""More than any server has to say of itself; what lies beyond is not read."""
_MAX_DIGITS: Final = 18


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """None and empty where the server does not tell.

    kv_blocks, block_size: blocks of the KV pool, and tokens in one. max_num_batched_tokens: the budget it started with.
    scheduler, settings: the P-PAS class and the policy that it started with; None under a stock scheduler.
    flags: the flags that differ from the defaults. cache: vLLM's whole cache configuration.
    """

    vllm_version: str | None = None
    model: str | None = None
    max_model_len: int | None = None
    kv_blocks: int | None = None
    block_size: int | None = None
    max_num_batched_tokens: int | None = None
    scheduler: str | None = None
    settings: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    cache: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        return asdict(self)


def read_facts(url: str, log: str, *, api_key: str | None = None) -> ServerFacts:
    """What the server at `url` says, and its `log` where there is one. Raises OSError when nobody answers."""
    models = _get_json(f"{url}/v1/models", api_key)
    listed = models.get("data")
    first = listed[0] if isinstance(listed, list) and listed else None
    served = first if isinstance(first, dict) else {}
    cache = cache_config(_get(f"{url}/metrics", api_key))
    said = _SCHEDULER.search(log)
    return ServerFacts(
        vllm_version=_text(_get_json(f"{url}/version", api_key).get("version")),
        model=_text(served.get("id")),
        max_model_len=_whole(str(served.get("max_model_len"))),
        kv_blocks=_whole(cache.get("num_gpu_blocks")),
        block_size=_whole(cache.get("block_size")),
        max_num_batched_tokens=_last_number(_BUDGET, log),
        scheduler=said[3] if said else None,
        settings=said[1] if said else None,
        flags=_flags(log),
        cache=cache,
    )


def keep_facts(file: Path, facts: Mapping[str, Any]) -> None:
    """Keeps what the first server of a study said in `file`.

    Raises InvalidInput where a later one is of another version or model than the first.
    """
    before = kept_facts(file)
    if before is None:
        write_atomically(file, dump_json(dict(facts), indent=1).encode())
        return
    for key in ("vllm_version", "model"):
        if before.get(key) != facts.get(key):
            raise InvalidInput(
                f"the server's {key} is {facts.get(key)!r}, but this study was begun on {before.get(key)!r}; "
                "start a new study, or restore the former one"
            )


def kept_facts(file: Path) -> dict[str, Any] | None:
    """What `keep_facts` kept; None where it kept nothing. Raises InvalidInput when it is damaged."""
    try:
        data = load_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InvalidInput(f"{file}: is damaged: {error}; name another folder with --run") from None
    if not isinstance(data, dict):
        raise InvalidInput(f"{file}: is damaged: it is no JSON object; name another folder with --run")
    return data


def cache_config(metrics: str) -> dict[str, str]:
    """The labels of `vllm:cache_config_info` in a Prometheus text; empty where it is absent."""
    found = _CACHE_CONFIG.search(metrics)
    return dict(_LABEL.findall(found[1])) if found else {}


def _flags(log: str) -> dict[str, Any]:
    found = _FLAGS.search(log)
    try:
        flags = ast.literal_eval(found[1]) if found else {}
        json.dumps(flags)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return {"unparsed": found[1] if found else ""}
    return flags if isinstance(flags, dict) else {}


def _last_number(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.findall(text)
    return _whole(found[-1]) if found else None


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) <= _MAX_DIGITS else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _get_json(url: str, api_key: str | None) -> dict[str, Any]:
    try:
        data = load_json(_get(url, api_key) or "{}")
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _get(url: str, api_key: str | None) -> str:
    """The body, empty where the server has no such page. Raises OSError when nobody answers."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - base_url checked the scheme
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:  # noqa: S310
            body: bytes = reply.read(_MAX_BYTES)
    except urllib.error.HTTPError:
        return ""
    return body.decode(errors="replace")
