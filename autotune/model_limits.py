"""What a model's folder and the server's flags say of the requests that a study may send: token ids, and how long."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ppas_core.errors import InvalidInput
from ppas_core.plain_json import load_json
from traces.format import Trace

FLAG: Final = "--max-model-len"
_LENGTH: Final = re.compile(r"(\d{1,9})(?:\.0*)?([kKmM]?)")
_UNITS: Final = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}
"""As vLLM reads `--max-model-len 32k`."""

_OVERRIDES: Final = ("--hf-o", "--hf-c", "--config")
"""Flags that may say another length than the model's folder does."""

_MAX_BYTES: Final = 16 * 1024 * 1024
"""More than any config.json has; of a larger one nothing is known."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """vocabulary_size: of the model. longest_tokens: prompt and answer together. says: which of both files says so.
    None where nobody says.
    """

    vocabulary_size: int | None = None
    longest_tokens: int | None = None
    says: str = ""

    def prompt_at_most(self, output_tokens: int, otherwise: int) -> int:
        """The prompt length to propose: `otherwise`, or what the model has room for."""
        return otherwise if self.longest_tokens is None else max(1, min(otherwise, self.longest_tokens - output_tokens))


def model_limits(model: str, flags: Sequence[str]) -> ModelLimits:
    """What is known of `model`, a name or a folder, served with `flags`. A flag is nearer than config.json."""
    from autotune.export.flags import grouped, is_flag  # loads more than the command's help needs

    data = _config(Path(model))
    text = data.get("text_config")
    both = [data, text if isinstance(text, dict) else {}]
    given = grouped(flags)
    # What stretches positions makes room for more, by rules of vLLM's own: then nobody says.
    stretched = any(map(_stretches, both)) or any(flag.name.startswith(_OVERRIDES) for flag in given)
    longest = None if stretched else _first(both, "max_position_embeddings")
    says = "the model's config.json"
    for flag in given:
        if is_flag(flag.name, FLAG, "--max-model-l") and flag.values:
            match = _LENGTH.fullmatch(flag.values[0])
            longest, says = (int(match[1]) * _UNITS[match[2]] if match else None), FLAG
    return ModelLimits(_first(both, "vocab_size"), longest, says)


def require_room(limits: ModelLimits, trace: Trace) -> None:
    """Raises InvalidInput where the server would refuse a request of `trace`: it is longer than `limits` allow."""
    most = limits.longest_tokens
    for index, request in enumerate(trace.requests):
        prompt, output = request.prompt_tokens, request.output_tokens
        if most is not None and prompt + output > most:
            longer = " or a larger --max-model-len" if limits.says == FLAG else ""
            raise InvalidInput(
                f"trace {trace.name!r}, request {index}: {prompt} prompt and {output} output tokens are {prompt + output}, "
                f"but {limits.says} allows {most}, and the server would refuse them; choose shorter ones in "
                f"`workload`{longer}"
            )


def _config(folder: Path) -> dict[str, Any]:
    from autotune.export.common import open_regular

    try:
        with open_regular(folder / "config.json") as file:
            data = load_json(file.read(_MAX_BYTES))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _stretches(place: dict[str, Any]) -> bool:
    """Whether positions beyond `max_position_embeddings` may be served: it is the length before scaling, as with YaRN."""
    scaling = [found for key in ("rope_scaling", "rope_parameters") if isinstance(found := place.get(key), dict)]
    scaling += [found for by_layer in scaling for found in by_layer.values() if isinstance(found, dict)]
    return any(isinstance(factor := found.get("factor"), int | float) and factor > 1 for found in scaling)


def _first(places: Sequence[dict[str, Any]], key: str) -> int | None:
    values = (place.get(key) for place in places)
    return next((value for value in values if type(value) is int and value > 0), None)  # true is no number here
