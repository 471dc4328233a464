"""What a `vllm serve --config` file can say of a server's flags, and what only a command line can.

vLLM turns each entry of such a file back into `--key value` and puts it before the command line's own flags, which so
win. A file has no place for a flag that stands there twice, one with a single dash that has no long name, and a value
that the parser would take for a flag.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from autotune.export.common import SCHEDULER_CLASS
from autotune.export.flags import Flag, abbreviates, grouped, is_value
from autotune.export.yaml_text import yaml_text
from ppas_core.plain_json import load_json
from ppas_core.policy import PolicyParams

_LONG_NAMES: Final = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpl": "--data-parallel-size-local",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-q": "--quantization",
    "-cc": "--compilation-config",
    "-sc": "--speculative-config",
    "-ac": "--attention-config",
}
"""vLLM's short flags that say how a server computes, as 0.27.1 has them."""
_SAID_ELSEWHERE: Final = frozenset(
    {"--max-num-batched-tokens", "--max-num-seqs", "--scheduler-cls", "--host", "--port", "--config", "--model"}
)
"""By the exported setting, and by the command: where it listens, and what it serves."""
_EXTRA: Final = "--additional-config"
_KEY: Final = re.compile(r"--[A-Za-z0-9][A-Za-z0-9._-]*")
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,9})?")


@dataclass(frozen=True, slots=True)
class Placed:
    """Flags of a server, by where they go. entries: keys and values of a config file. beside: on the command line.
    secret: in no file, since they hold one.
    """

    entries: Mapping[str, Any]
    beside: tuple[Flag, ...]
    secret: tuple[Flag, ...]

    def words_beside(self) -> tuple[str, ...]:
        """What a command needs beside the file, but for secrets."""
        return tuple(word for flag in self.beside for word in flag.words)


def placed(words: Iterable[str]) -> Placed:
    """The flags `words` of a `vllm serve` command, but for those that the exported setting or the command says itself."""
    flags = [flag for flag in grouped(words) if not abbreviates(flag.name, _SAID_ELSEWHERE)]
    secret = tuple(flag for flag in flags if flag.holds_secret)
    others = [flag for flag in flags if not flag.holds_secret]
    times = Counter(_long(flag) for flag in others)
    fitting = [flag for flag in others if times[_long(flag)] == 1 and _fits(flag)]
    return Placed(
        {_long(flag).removeprefix("--"): _value(flag) for flag in fitting},
        tuple(flag for flag in others if flag not in fitting),
        secret,
    )


def words_beside(words: Iterable[str]) -> tuple[str, ...]:
    """What starts a server with the flags `words` beside its config file, secrets included."""
    found = placed(words)
    return (*found.words_beside(), *(word for flag in found.secret for word in flag.words))


def vllm_config_text(params: PolicyParams, flags: Iterable[str] = ()) -> str:
    """What `vllm serve --config` needs to run `params` on a server with `flags`, as YAML without comments."""
    entries = dict(placed(flags).entries)
    extra = entries.pop(_EXTRA.removeprefix("--"), {})
    body: dict[str, Any] = {"max-num-batched-tokens": params.b_max, "max-num-seqs": params.max_num_seqs}
    if not params.is_static:
        body["scheduler-cls"] = SCHEDULER_CLASS
        extra = {**extra, "ppas": params.to_dict()}
    return yaml_text({**body, **({"additional-config": extra} if extra else {}), **entries})


def _long(flag: Flag) -> str:
    return _LONG_NAMES.get(flag.name, flag.name)


def _fits(flag: Flag) -> bool:
    """Whether an entry of a file becomes these words again."""
    if not _KEY.fullmatch(_long(flag)) or not all(is_value(value) for value in flag.values):
        return False
    if _long(flag) == _EXTRA:
        return len(flag.values) == 1 and _object(flag.values[0]) is not None
    is_apart = len(flag.words) == len(flag.values) + 1
    return is_apart or (len(flag.values) == 1 and "=" in flag.words[0])


def _value(flag: Flag) -> Any:
    if _long(flag) == _EXTRA:
        return {key: value for key, value in (_object(flag.values[0]) or {}).items() if key != "ppas"}
    if not flag.values:
        return True
    values = [_scalar(value) for value in flag.values]
    return values if len(values) > 1 else values[0]


def _scalar(text: str) -> Any:
    """`text`, or the number that is written exactly so."""
    if not _NUMBER.fullmatch(text):
        return text
    number = float(text) if "." in text else int(text)
    return number if str(number) == text else text


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object in `text`, if it is one."""
    try:
        data = load_json(text)
    except ValueError:
        return None
    return data if isinstance(data, dict) else None
