"""Writes the profiles that nobody measured: step costs from a model's public shape and a GPU's data sheet, by roofline.

`python scripts/roofline_profiles.py [--out FOLDER]`, from the project's root. They exist so that the published
heterogeneous P-PAS+ workloads can be tried at all: their prompts of 65,536 and 131,072 tokens fit no measured profile.
They say how cost grows with tokens and context, and nothing about how far off they are; a measured profile of the
same server replaces them.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from ppas_core.sim.cost import StepCost
from ppas_core.sim.profile import Profile

NVFP4_BYTES: Final = 0.5625
"""Bytes a weight: 4 bits, and an 8-bit scale for each block of 16."""
FP8_BYTES: Final = 1
BF16_BYTES: Final = 2
BLOCK_TOKENS: Final = 16
MAX_MODEL_LEN: Final = 132_000
"""--max-model-len of the published runs."""


@dataclass(frozen=True)
class Gpu:
    """Data sheet values: dense (not sparse) tensor rates in FLOP/s, memory in bytes and bytes per second."""

    name: str
    fp4_flops: float
    bf16_flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    source: str


@dataclass(frozen=True)
class Model:
    """A model's shape. Weights are counted without embedding and output head, which stay in BF16 (edge_weights).

    Of the weights, a token uses always_weights, and routed_weights more in those experts that it is sent to;
    all_routed_weights: in all experts together. attention: layers with full attention, their query heads, KV heads and
    head size. The other layers keep a state of fixed size, whose cost is left out.
    """

    profile: str
    model: str
    like: str
    always_weights: float
    routed_weights: float
    all_routed_weights: float
    edge_weights: float
    attention: tuple[int, int, int, int]
    matmul_share: float
    source: str


RTX5090: Final = Gpu(
    "NVIDIA GeForce RTX 5090", 1676e12, 209.5e12, 32 * 2**30, 1792e9,
    "NVIDIA RTX Blackwell GPU architecture white paper: FP4 and BF16 tensor rates with FP32 accumulation, dense",
)  # fmt: skip
QWEN: Final = Model(
    profile="rtx5090-qwen3.8-27b-not-measured",
    model="Qwen3.8-27B NVFP4",
    like="Qwen3.5-27B, the nearest shape that is public: 64 layers, hidden size 5120, vocabulary 248320, untied",
    always_weights=27e9 - 2 * 248_320 * 5120,
    routed_weights=0,
    all_routed_weights=0,
    edge_weights=2 * 248_320 * 5120,
    attention=(16, 24, 4, 256),
    matmul_share=0.4,
    source="every fourth of 64 layers has full attention: 24 query heads, 4 KV heads, head size 256",
)
NEMOTRON: Final = Model(
    profile="rtx5090-nemotron-30b-not-measured",
    model="Nemotron-3.5-Lightning-30B-A3B NVFP4",
    like="Nemotron-3-Nano-30B-A3B, the nearest shape that is public: 52 layers (23 Mamba-2, 23 MoE, 6 attention), "
    "hidden size 2688, vocabulary 131072, 31.6e9 weights, 3.5e9 of them active",
    always_weights=3.5e9 - 23 * 6 * 2 * 2688 * 1856 - 131_072 * 2688,
    routed_weights=23 * 6 * 2 * 2688 * 1856,
    all_routed_weights=23 * 128 * 2 * 2688 * 1856,
    edge_weights=2 * 131_072 * 2688,
    attention=(6, 32, 2, 128),
    matmul_share=0.25,
    source="6 attention layers: 32 query heads, 2 KV heads, head size 128; 6 of 128 experts of width 1856 a token",
)

MEMORY_SHARE: Final = 0.8
ATTENTION_SHARE: Final = 0.6
LAUNCH_S: Final = 0.001
FRONTEND_DELAY_S: Final = 0.1
MEMORY_USED: Final = 0.9
WORKSPACE_BYTES: Final = 3e9


def roofline(model: Model, gpu: Gpu) -> Profile:
    """The profile of `model` on `gpu`, each cost the time that arithmetic or memory alone would take at its share."""
    bytes_per_s = MEMORY_SHARE * gpu.memory_bytes_per_s
    layers, query_heads, kv_heads, head_size = model.attention
    kv_bytes = layers * 2 * kv_heads * head_size * FP8_BYTES
    token_flops = 2 * (model.always_weights + model.routed_weights)
    cost = StepCost(
        step_s=LAUNCH_S + model.always_weights * NVFP4_BYTES / bytes_per_s,
        prefill_token_s=token_flops / (model.matmul_share * gpu.fp4_flops),
        prefill_pair_s=4 * layers * query_heads * head_size / (ATTENTION_SHARE * gpu.bf16_flops),
        # A decode reads the experts that it is sent to (few decodes share any), and the output head's arithmetic.
        decode_token_s=model.routed_weights * NVFP4_BYTES / bytes_per_s
        + token_flops / (model.matmul_share * gpu.fp4_flops),
        decode_context_token_s=kv_bytes / bytes_per_s,
        prefill_step_s=model.all_routed_weights * NVFP4_BYTES / bytes_per_s,  # a chunk wakes every expert
    )
    weights_bytes = (model.always_weights + model.all_routed_weights) * NVFP4_BYTES + model.edge_weights * BF16_BYTES
    pool_bytes = MEMORY_USED * gpu.memory_bytes - weights_bytes - WORKSPACE_BYTES
    return Profile(
        name=model.profile,
        model=model.model,
        gpu=gpu.name,
        vllm_version="0.27.1",
        cost=StepCost(**{name: float(f"{value:.4g}") for name, value in cost.to_dict().items()}),
        frontend_delay_s=FRONTEND_DELAY_S,
        num_kv_blocks=int(pool_bytes // (kv_bytes * BLOCK_TOKENS)),
        block_size=BLOCK_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        pipeline_depth=2,
        provenance=_provenance(model, gpu),
        fit={
            "not_measured": "its step costs are computed from the shape of a public model and the GPU's data sheet, so no "
            "error of it is known; take the direction of a result from it, never a number, and calibrate a profile on "
            "the server itself",
            "not_identified": "all of it; mixed_step_s (what decodes wait for in a mixed step) and the ramp of small "
            "chunks are taken as 0, which makes a small budget look cheaper than it is",
        },
    )


def _provenance(model: Model, gpu: Gpu) -> dict[str, Any]:
    return {
        "source": "not measured: roofline from public facts",
        "script": "scripts/roofline_profiles.py",
        "date": "2026-11-30",
        "model_shape": f"{model.like}; {model.source}",
        "gpu_data_sheet": f"{gpu.source}; memory {gpu.memory_bytes_per_s / 1e9:g} GB/s",
        "assumed": {
            "gpu": "the published runs do not state theirs here; it is the paper's card that has NVFP4",
            "model": f"the shape of {model.model} was not at hand; that of the model named above is taken",
            "shares_of_the_data_sheet": f"matrix products {model.matmul_share:g} of the FP4 rate, attention "
            f"{ATTENTION_SHARE:g} of the BF16 rate, memory {MEMORY_SHARE:g}",
            "frontend_delay_s": f"{FRONTEND_DELAY_S:g}, below what the paper's runs at 25,000 tokens suggest",
            "num_kv_blocks": f"{MEMORY_USED:.0%} of the memory less weights and {WORKSPACE_BYTES / 1e9:g} GB, over the bytes "
            f"of {BLOCK_TOKENS} tokens in FP8 (--kv-cache-dtype fp8_e4m3); states of the other layers left out, and "
            "vLLM makes blocks of such models larger",
            "max_model_len": f"{MAX_MODEL_LEN}, as in the published runs",
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    folder = Path(__file__).parents[1] / "ppas_core" / "sim" / "profiles"
    parser.add_argument("--out", type=Path, default=folder, help="folder of the profiles (default: the shipped ones)")
    out = parser.parse_args().out
    for model in (QWEN, NEMOTRON):
        profile = roofline(model, RTX5090)
        (out / f"{profile.name}.json").write_text(json.dumps(profile.to_dict(), indent=2) + "\n", encoding="utf-8")
        print(f"{profile.name}: {profile.num_kv_blocks} KV blocks, {profile.cost}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
