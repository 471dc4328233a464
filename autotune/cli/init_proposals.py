"""What `ppas init` proposes for a live study: what one GPU serves, or what vLLM's CPU build serves in 40 minutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from autotune.model_limits import FLAG, ModelLimits

_LONGEST_TOKENS: Final = 8192
_LONGEST_UNKNOWN_TOKENS: Final = 2048
"""Small models that do not say more here can do this, nearly all."""
_KV_BYTES: Final = 2_000_000_000
_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_TOKENIZER: Final = ("tokenizer*", "*.model", "vocab*")


@dataclass(frozen=True, slots=True)
class Proposal:
    """Defaults of the questions. workload: keys of rag-bursts that are not asked for. server: of the server block.

    held_out_seeds: of a live study's traces. why: what is to be known of them, for the study file.
    """

    rates: str
    prompt_tokens: int
    trials: str
    prompts: tuple[int, ...] = (512, 4096, 16384)
    workload: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    held_out_seeds: tuple[int, ...] = (100, 101)
    why: tuple[str, ...] = ()


SIMULATED: Final = Proposal(rates="0.4,0.8,1.2", prompt_tokens=25_000, trials="100")
GPU: Final = Proposal(rates="0.4,1.0", prompt_tokens=25_000, trials="10")
"""A live study replays in real time: a first one on few traces, so that it ends within about an hour."""
CPU: Final = Proposal(
    rates="1.0,2.0",
    prompt_tokens=1000,
    trials="6",
    prompts=(128, 512, 1000),
    workload={"phase_s": 5.0},
    server={"max_send_lag_ms": 50.0},
    held_out_seeds=(100, 101, 102, 103),  # a CPU is noisy: on two traces of each load hardly anything can be concluded
    why=(
        "No GPU: vLLM's CPU build is installed here. That is why prompts are short, trials few and max_send_lag_ms is 50.",
        "--kv-cache-memory-bytes is there since vLLM takes 92 % of the memory otherwise, and does not start where less is free.",
        "Raise the rates until requests wait for each other: tuning has nothing to gain on an idle server.",
    ),
)


def flags_without_gpu(model: str, limits: ModelLimits, given: Sequence[str]) -> list[str]:
    """Flags with which the CPU build starts on a machine of its own size, as far as `given` does not say."""
    from autotune.export.flags import abbreviates, grouped  # loads more than the command's help needs

    longest = min(limits.longest_tokens or _LONGEST_UNKNOWN_TOKENS, _LONGEST_TOKENS)
    proposed = {
        FLAG: [FLAG, str(longest)],
        "--kv-cache-memory-bytes": ["--kv-cache-memory-bytes", str(_KV_BYTES)],
        "--enforce-eager": ["--enforce-eager"],
        **_flags_of_bare(Path(model)),
    }
    names = [flag.name for flag in grouped(given)]
    taken = {name for name in proposed if any(abbreviates(flag, [name]) for flag in names)}
    if any(abbreviates(flag, ["--gpu-memory-utilization"]) for flag in names):
        taken.add("--kv-cache-memory-bytes")
    return [word for name, words in proposed.items() if name not in taken for word in words]


def _flags_of_bare(folder: Path) -> dict[str, list[str]]:
    """What a model's folder takes that has a config.json alone, as those under examples/."""
    if not (folder / "config.json").is_file():
        return {}
    found = {}
    if not any(list(folder.glob(pattern)) for pattern in _WEIGHTS):
        found["--load-format"] = ["--load-format", "dummy"]
    if not any(list(folder.glob(pattern)) for pattern in _TOKENIZER):
        found["--skip-tokenizer-init"] = ["--skip-tokenizer-init"]
    return found
