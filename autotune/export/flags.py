"""What the flags of a `vllm serve` command say: which hold secrets, how many GPUs they ask for, what they switch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from autotune.distributed.url import redacted
from ppas_core.plain_json import load_json

HIDDEN: Final = "***"
"""Stands where a secret stood."""
_NEGATIVE: Final = re.compile(r"-\d+|-\d*\.\d+")
_PART: Final = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+(?![a-z])")
_ANYWHERE: Final = frozenset({"secret", "password", "passwd", "passphrase", "apikey", "credential", "credentials"})
_AT_THE_END: Final = frozenset({"key", "keys", "token", "auth", "authorization", "bearer"})
_TOKENS_OF_TEXT: Final = frozenset(
    (
        "bos",
        "eos",
        "pad",
        "unk",
        "mask",
        "sep",
        "cls",
        "start",
        "end",
        "stop",
        "think",
        "image",
        "video",
        "audio",
        "from",
    )
)
"""What stands before `token` where a model's vocabulary is meant."""
_SWITCHES: Final = frozenset({"--allow-credentials", "--no-allow-credentials"})
_SECRET_FLAGS: Final = (("--api-key", "--api-k"), ("--hf-token", "--hf-t"))
"""vLLM 0.27.1's own, each with its shortest spelling: the parser takes any beginning that fits one flag alone."""
_USER_IN_URL: Final = re.compile(r"(?P<head>\w[\w+.-]*://)[^\s/@]+(?=@)")
_TOKEN: Final = re.compile(r"\bhf_[A-Za-z0-9]{20,}|(?<=\bBearer )\S+")
_IN_QUERY: Final = re.compile(r"(?P<head>[?&](?P<name>[\w.-]+)=)[^&#\s]+")
_SIGNATURES: Final = frozenset({"sig", "signature"})
_ASSIGNED: Final = re.compile(r"(?P<name>[A-Z][A-Z0-9_]*)=.+", re.DOTALL)
_IN_A_PRINT: Final = re.compile(r"api_?key|hf_token|secret|passw|auth_token|access_token|session_token", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag with its values. name: normalised, "" for words before the first flag. words: as they were written."""

    name: str
    values: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def holds_secret(self) -> bool:
        """Whether its name or one of its values says that a secret is in it."""
        if self.name in _SWITCHES:
            return False
        own = any(is_flag(self.name, full, shortest) for full, shortest in _SECRET_FLAGS) or names_secret(self.name)
        return own or any(_assigns_secret(value) or scrubbed_text(value) != value for value in self.values)


def grouped(words: Iterable[str]) -> list[Flag]:
    """The flags of a command in their order, each with the words that vLLM's parser takes for its values."""
    found: list[Flag] = []
    for word in words:
        if is_value(word):
            last = found.pop() if found else Flag("", (), ())
            found.append(Flag(last.name, (*last.values, word), (*last.words, word)))
        else:
            name, value = _split(word)
            found.append(Flag(name, () if value is None else (value,), (word,)))
    return found


def is_value(word: str) -> bool:
    """Whether vLLM's parser takes `word` for a value and not for a flag."""
    if not word.startswith("-") or word == "-" or _NEGATIVE.fullmatch(word):
        return True
    if "=" in word or not re.search(r"\s", word):
        return False
    name = _split(word)[0]
    return not (names_secret(name) or any(is_flag(name, *flag) for flag in _SECRET_FLAGS))


def is_flag(name: str, full: str, shortest: str) -> bool:
    """Whether `name` is the flag `full`, or a beginning of it that is not shorter than `shortest`."""
    return full.startswith(name) and name.startswith(shortest)


def abbreviates(name: str, full: Iterable[str]) -> bool:
    """Whether vLLM's parser may take `name`, normalised, for one of the flags `full`: it takes any beginning of one."""
    return name.startswith("--") and len(name) > len("--") and any(flag.startswith(name) for flag in full)


def without_secrets(words: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the words without the flags that hold secrets, names of those)."""
    flags = grouped(words)
    kept = tuple(word for flag in flags if not flag.holds_secret for word in flag.words)
    return kept, tuple(flag.name or "a word without a flag" for flag in flags if flag.holds_secret)


def gpus(words: Iterable[str]) -> int:
    """GPUs that the command needs on its machine: tensor, pipeline, prefill-context and data parallelism multiplied.

    data parallelism: the share of this machine, where the flags say it.
    """
    flags = grouped(words)
    data = _count(flags, "-dpl", "--data-parallel-size-local", "--data-parallel-size-")
    return (
        _count(flags, "-tp", "--tensor-parallel-size", "--te")
        * _count(flags, "-pp", "--pipeline-parallel-size", "--pi")
        * _count(flags, "-pcp", "--prefill-context-parallel-size", "--prefill-c")
        * (data if data > 1 else _count(flags, "-dp", "--data-parallel-size", "--data-parallel-size"))
    )


def without_prefix_caching(words: Iterable[str]) -> tuple[list[str], bool]:
    """(the words that are left, whether prefix caching is on); vLLM's own default is on."""
    on = True
    kept: list[str] = []
    for flag in grouped(words):
        if is_flag(flag.name, "--enable-prefix-caching", "--enable-pref"):
            on = True
        elif is_flag(flag.name, "--no-enable-prefix-caching", "--no-enable-pref"):
            on = False
        else:
            kept += flag.words
    return kept, on


def names_secret(name: str) -> bool:
    """Whether something of this name holds a secret, as api_key, --hf-token or awsSecretAccessKey do."""
    parts = [part.lower() for part in _PART.findall(name)]
    if not parts:
        return False
    if parts[-1] == "token" and len(parts) > 1 and parts[-2] in _TOKENS_OF_TEXT:
        return False
    return parts[-1] in _AT_THE_END or not _ANYWHERE.isdisjoint(parts)


def scrubbed(data: Any) -> Any:
    """`data`, plain JSON values, with HIDDEN for every secret in it; lists of words are read as commands."""
    if isinstance(data, Mapping):
        return {key: _scrubbed_entry(str(key), value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return scrubbed_words(data) if _are_words(data) else [scrubbed(value) for value in data]
    return scrubbed_text(data) if isinstance(data, str) else data


def scrubbed_words(words: Sequence[str]) -> list[str]:
    """The words of a command, with HIDDEN for the secrets: the values of flags that hold them, and `TOKEN=…`."""
    found: list[str] = []
    for flag in grouped(words):
        if flag.name and flag.holds_secret:
            found += [flag.name, *(HIDDEN for _ in flag.values)]
        else:
            found += [_scrubbed_word(word) for word in flag.words]
    return found


def scrubbed_text(text: str) -> str:
    """`text` with HIDDEN for passwords in URLs and for tokens; HIDDEN alone where it is JSON, or nearly, with a secret in
    it.
    """
    if text.lstrip()[:1] in ("{", "["):
        try:
            data = load_json(text)
        except ValueError:
            if _IN_A_PRINT.search(text):
                return HIDDEN
        else:
            if json.dumps(scrubbed(data)) != json.dumps(data):
                return HIDDEN
    text = _IN_QUERY.sub(_scrubbed_query, _USER_IN_URL.sub(rf"\g<head>{HIDDEN}", redacted(text)))
    return _TOKEN.sub(HIDDEN, text)


def _split(word: str) -> tuple[str, str | None]:
    """The normalised name of a flag and what stands behind its `=`; vLLM's parser takes `_` for `-` up to a dot."""
    name, found, value = word.partition("=")
    if not found:
        name, *rest = word.split(maxsplit=1) or [word]
        value = rest[0] if rest else ""
        found = value
    head, dot, tail = name.partition(".")
    return (head.replace("_", "-") if name.startswith("--") else head) + dot + tail, value if found else None


def _count(flags: Sequence[Flag], short: str, full: str, shortest: str) -> int:
    """The last whole number above 0 of a flag; 1 where there is none."""
    found = 1
    for flag in flags:
        if flag.values and (flag.name == short or is_flag(flag.name, full, shortest)):
            text = flag.values[0].strip()
            found = int(text) if re.fullmatch(r"\+?[0-9]{1,6}", text) and int(text) > 0 else found
    return found


def _assigns_secret(value: str) -> bool:
    """Whether `value` gives an environment variable that holds a secret, as HF_TOKEN=…"""
    found = _ASSIGNED.fullmatch(value)
    return found is not None and names_secret(found["name"])


def _scrubbed_query(found: re.Match[str]) -> str:
    signs = found["name"].lower().rpartition("-")[2] in _SIGNATURES
    return f"{found['head']}{HIDDEN}" if signs or names_secret(found["name"]) else found[0]


def _are_words(data: Sequence[Any]) -> bool:
    return len(data) > 0 and all(isinstance(value, str) for value in data)


def _scrubbed_entry(key: str, value: Any) -> Any:
    if names_secret(key) and (isinstance(value, str) or (isinstance(value, list | tuple) and _are_words(value))):
        return HIDDEN if value else value
    if key == "unparsed" and isinstance(value, str) and _IN_A_PRINT.search(value):  # what a server printed of its flags
        return HIDDEN
    return scrubbed(value)


def _scrubbed_word(word: str) -> str:
    name, found, value = word.partition("=")
    if found and value and re.fullmatch(r"-{0,2}[\w.-]+", name) and name not in _SWITCHES and names_secret(name):
        return f"{name}={HIDDEN}"
    return scrubbed_text(word)
