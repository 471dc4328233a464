"""What a step's coefficients should be about, before any run is looked at: from the model's size and the GPU's data sheet.

Run-level figures leave directions open (see `fit_runs`), and what they leave open must still be physical. Known shapes
are from the models' published configurations; of an unknown model the name's number of parameters is used, and of an
unknown GPU a middling one, with wide spreads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

COEFFICIENTS: Final = (
    "step_s", "prefill_token_s", "prefill_pair_s", "decode_token_s", "decode_context_token_s", "prefill_step_s",
    "mixed_step_s", "frontend_delay_s",
)  # fmt: skip
RAMP: Final = ("prefill_ramp_token_s", "prefill_ramp_tokens")
SPREAD: Final[Mapping[str, float]] = {
    "step_s": 0.5,
    "prefill_token_s": 0.5,
    "prefill_pair_s": 0.5,
    "decode_token_s": 1.0,
    "decode_context_token_s": 1.0,
    "prefill_step_s": 1.5,
    "mixed_step_s": 1.5,
    "frontend_delay_s": 0.7,
    "prefill_ramp_token_s": 1.0,
    "prefill_ramp_tokens": 0.7,
}
"""Standard deviations of the log of a coefficient around its prior, for a known model on a known GPU."""
_UNKNOWN_SPREAD: Final = 1.5
"""What spreads are multiplied by where model or GPU is guessed, once the overall speed was found from the data."""
_OF_THE_GPU: Final = (
    "step_s", "prefill_token_s", "prefill_pair_s", "decode_context_token_s", "mixed_step_s", "prefill_ramp_token_s",
)  # fmt: skip
"""Coefficients that scale with how fast the GPU is."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model: parameters that work on each token (no embedding table), bytes of weights, attention's sizes."""

    linear_params: float
    weight_bytes: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV a token, at two bytes a number."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * 2


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its data sheet: dense bf16 FLOP/s, bytes/s and bytes of memory."""

    flops_per_s: float
    bytes_per_s: float
    memory_bytes: float


_MODELS: Final = (
    ("qwen2.5-0.5b", Shape(0.36e9, 0.99e9, 24, 14, 2, 64)),
    ("qwen2.5-3b", Shape(2.77e9, 6.17e9, 36, 16, 2, 128)),
    ("llama-3.2-3b", Shape(2.82e9, 6.43e9, 28, 24, 8, 128)),
    ("smollm3-3b", Shape(2.81e9, 6.15e9, 36, 16, 4, 128)),
)
_GPUS: Final = (
    ("5090", Gpu(209e12, 1.79e12, 32e9)),
    ("4090", Gpu(165e12, 1.01e12, 24e9)),
    ("6000", Gpu(250e12, 1.79e12, 96e9)),
    ("a100", Gpu(312e12, 2.04e12, 80e9)),
    ("h100", Gpu(800e12, 3.35e12, 80e9)),
    ("h200", Gpu(800e12, 4.8e12, 141e9)),
    ("gh200", Gpu(800e12, 4.0e12, 96e9)),
    ("b200", Gpu(2000e12, 8.0e12, 180e9)),
    ("gb10", Gpu(100e12, 0.27e12, 128e9)),
    ("l40", Gpu(180e12, 0.86e12, 48e9)),
    ("a10", Gpu(125e12, 0.6e12, 24e9)),
)
_MIDDLING: Final = Gpu(250e12, 1.8e12, 48e9)
_PARAMETERS: Final = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)b(?:[-_]a(\d+(?:\.\d+)?)b)?(?![a-z0-9])")
_RESERVED_BYTES: Final = 2e9
"""Assumed for activations and graphs."""


@dataclass(frozen=True, slots=True)
class Prior:
    """Centre and spread (standard deviation of the log) of each coefficient.

    known: whether model and GPU are both known; else the spreads are wide and the overall speed is searched for first.
    num_kv_blocks: KV blocks of 16 tokens that should fit beside the weights; None where the model or GPU is not known.
    source: in words.
    """

    centre: Mapping[str, float]
    spread: Mapping[str, float]
    known: bool
    num_kv_blocks: int | None
    source: str

    def log_centre(self, names: tuple[str, ...]) -> list[float]:
        """Logs of the centres of these coefficients."""
        return [math.log(self.centre[name]) for name in names]

    def faster(self, factor: float) -> Prior:
        """The prior of a machine whose GPU work takes `factor` of the time."""
        centre = {name: value * (factor if name in _OF_THE_GPU else 1.0) for name, value in self.centre.items()}
        return Prior(centre, self.spread, self.known, self.num_kv_blocks, self.source)


def prior_of(model: str, gpu: str) -> Prior:
    """The prior of a served model, by the names that a log gives them; "" where it gives none."""
    plain = model.lower().rpartition("/")[2]
    shape = next((shape for name, shape in _MODELS if name in plain), None)
    size = _PARAMETERS.search(plain)
    guessed = shape or _guess(size)
    card = next((card for name, card in _GPUS if name in gpu.lower().replace(" ", "")), None)
    hardware = card or _MIDDLING
    known = shape is not None and card is not None
    token_s = 2 * guessed.linear_params / hardware.flops_per_s
    centre = {
        "step_s": guessed.weight_bytes / hardware.bytes_per_s + 0.001,
        "prefill_token_s": token_s,
        "prefill_pair_s": 4 * guessed.num_layers * guessed.num_heads * guessed.head_size / hardware.flops_per_s,
        "decode_token_s": 3e-5,
        "decode_context_token_s": guessed.kv_bytes / hardware.bytes_per_s,
        "prefill_step_s": 0.001,
        "mixed_step_s": 0.004,
        "frontend_delay_s": 0.06,
        "prefill_ramp_token_s": 0.2 * token_s,
        "prefill_ramp_tokens": 2048.0,
    }
    spread = dict(SPREAD) if known else {name: value * _UNKNOWN_SPREAD for name, value in SPREAD.items()}
    blocks = None
    if shape is not None and card is not None:
        free_bytes = 0.9 * card.memory_bytes - shape.weight_bytes - _RESERVED_BYTES
        blocks = max(int(free_bytes / (16 * shape.kv_bytes)), 2)
    what = [
        f"model {model or 'not named'}: "
        + ("its configuration" if shape else f"about {guessed.linear_params:.2g} parameters"),
        f"GPU {gpu or 'not named'}: " + ("its data sheet" if card else "a middling one"),
    ]
    return Prior(centre, spread, known, blocks, "; ".join(what))


def _guess(size: re.Match[str] | None) -> Shape:
    """A transformer of common proportions with the size that a name says; 3 billion parameters where it says none."""
    total = float(size[1]) * 1e9 if size else 3e9
    active = float(size[2]) * 1e9 if size and size[2] else total
    total, active = (min(max(value, 1e7), 1e13) for value in (total, active))
    width = (8 * total) ** (1 / 3)  # 12 width² parameters a layer, width / 96 layers
    heads = max(round(width / 128), 2)
    return Shape(active, 2 * active, max(round(width / 96), 4), heads, max(heads // 6, 1), 128)
