"""The published settings, by name. Source: the P-PAS paper and its public repository (see `policy`)."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from ppas_core.errors import InvalidInput
from ppas_core.policy import PolicyParams, Scope

STATIC_BUDGETS: Final = (512, 1024, 2048, 4096, 8192, 16384)
"""Static `max_num_batched_tokens` baselines of the paper."""

PUBLISHED: Final = MappingProxyType(
    {
        # Qwen2.5-0.5B/3B, SmolLM3-3B, Llama-3.2-3B on RTX 5090, A100 and H100.
        "ppas": PolicyParams(b_max=16384, b_cap=2048, n_th=2, scope=Scope.PREFILL, max_num_seqs=256),
        "ppas-plus-qwen3.8-27b": PolicyParams(
            b_max=2048, b_cap=768, n_th=2, t_large=32768, scope=Scope.GLOBAL, max_num_seqs=20
        ),
        # max_num_seqs is not stated for Nemotron; vLLM's default is assumed.
        "ppas-plus-nemotron-30b": PolicyParams(
            b_max=16384, b_cap=1280, n_th=2, t_large=65536, scope=Scope.GLOBAL, max_num_seqs=256
        ),
    }
)
"""Name to setting, as published."""


def published(name: str) -> PolicyParams:
    """The published setting called `name`. Raises InvalidInput with the known names."""
    try:
        return PUBLISHED[name]
    except KeyError:
        raise InvalidInput(f"no published setting {name!r}; known: {', '.join(PUBLISHED)}") from None
