"""An exported setting in the shapes of vLLM's own tuning tools, to confirm it there or to feed what reads them.

vllm-sweep.json   `vllm bench sweep serve --serve-params`: exported setting, reference and best static budget by name
auto_tune.txt     what `auto_tune.sh` leaves: each static budget with its figures, and the best one last
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from autotune.export.common import SCHEDULER_CLASS
from autotune.results import HeldOut, Setting, StudyResults
from ppas_core.plain_json import dump_json
from ppas_core.policy import PolicyParams

_E2E_PERCENTILE: Final = 99
_NO_FIGURES: Final = "0"


def sweep_params(results: StudyResults, setting: Setting) -> str:
    """Name to server parameters, the exported setting first, then what it was compared with."""
    named = {"exported": setting.to_params()}
    for held in results.held_out:
        if held.role not in ("tuned", "runner-up", "cold") and not held.role.startswith("mbt-"):
            named.setdefault(_name(held.role), held.setting.to_params())
    named.setdefault("best-static", results.best_static.to_params())
    return dump_json({name: _server_params(params) for name, params in named.items()}, indent=1) + "\n"


def auto_tune_result(results: StudyResults) -> str:
    """The held-out figures of every static budget, one line per load, and the line that names the best.

    That tool knows `max-num-seqs` and `max-num-batched-tokens` alone, so its best is the best static budget: no P-PAS
    setting can be said in it. Throughput and goodput are requests per second over the makespan, all of them completed.
    """
    lines = [f"hash:ppas-autotune, {results.origin}"]
    best = results.best_static.to_params()
    throughputs: dict[PolicyParams, list[float]] = {}
    for held in results.held_out:
        params = held.setting.to_params()
        if not params.is_static or params in throughputs:
            continue
        throughputs[params] = []
        for regime, means in held.regimes.items():
            rate, throughput = (
                _rate(results, regime),
                _throughput(results, held, regime, means.get("makespan_s", math.nan)),
            )
            if rate is None or throughput is None:
                continue
            throughputs[params].append(throughput)
            lines.append(
                f"max_num_seqs: {params.max_num_seqs}, max_num_batched_tokens: {params.b_max}, request_rate: {rate:.4g}, "
                f"e2el: {_e2e_ms(held, regime):.2f}, throughput: {throughput:.4g}, goodput: {throughput:.4g}"
            )
    found = throughputs.get(best)
    top = f"{max(found):.4g}" if found else _NO_FIGURES
    lines.append(
        f"best_max_num_seqs: {best.max_num_seqs}, best_num_batched_tokens: {best.b_max}, best_throughput: {top}"
    )
    return "\n".join(lines) + "\n"


def _server_params(params: PolicyParams) -> dict[str, Any]:
    flags: dict[str, Any] = {"max_num_batched_tokens": params.b_max, "max_num_seqs": params.max_num_seqs}
    if not params.is_static:
        flags |= {"scheduler_cls": SCHEDULER_CLASS, "additional_config": {"ppas": params.to_dict()}}
    return flags


def _name(role: str) -> str:
    return role.replace(" ", "-")


def _traces(results: StudyResults, regime: str) -> list[Any]:
    return [trace for trace in results.traces if trace.purpose == "held-out" and trace.regime == regime]


def _rate(results: StudyResults, regime: str) -> float | None:
    rates = [trace.rate_per_s for trace in _traces(results, regime) if math.isfinite(trace.rate_per_s)]
    return sum(rates) / len(rates) if rates else None


def _throughput(results: StudyResults, held: HeldOut, regime: str, makespan_s: float) -> float | None:
    requests = sum(name == regime for name in held.requests.regime)
    traces = len(_traces(results, regime))
    if not requests or not traces or not makespan_s > 0:
        return None
    return requests / traces / makespan_s


def _e2e_ms(held: HeldOut, regime: str) -> float:
    rows: Sequence[float] = [
        latency
        for latency, name in zip(held.requests.latency_s, held.requests.regime, strict=True)
        if name == regime and latency is not None
    ]
    return float(np.percentile(rows, _E2E_PERCENTILE)) * 1000 if rows else math.nan
