"""Sweep logs in the published format, written for tests: from given figures, or from the simulator as the true server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from ppas_core.policy import PolicyParams
from ppas_core.sim.profile import Profile
from ppas_core.sim.simulate import RequestArrays, simulate
from traces.format import Trace

FIGURES = ("avg_latency", "p95_latency", "avg_ttft", "p95_ttft", "avg_tpot", "p95_tpot", "makespan")


def row(
    config: str = "mbt_2048_s256",
    seed: int = 0,
    rate: float = 0.6,
    figures: Iterable[float] = (4.0, 6.0, 2.0, 3.0, 0.05, 0.07, 40.0),
    **other: object,
) -> dict[str, object]:
    """One run's dict, with the keys of a published one."""
    return {
        "trace_id": 0,
        "configured_prompt_tokens": 25000,
        "configured_output_tokens": 32,
        "configured_request_rate": "piecewise",
        "phase_schedule": f"10:0.2,10:{rate},10:0.2,10:{rate},10:0.2",
        "arrival_mode": "piecewise_poisson",
        "seed": seed,
        "workload_type": "rag",
        "num_requests": 15,
        "config_name": config,
        "max_num_batched_tokens": int(config.split("_")[1]) if config.startswith("mbt_") else 16384,
        "max_num_seqs": 256,
        **dict(zip(FIGURES, figures, strict=True)),
        "failed": 0,
        "error": "",
    } | other


def write_rows(path: Path, rows: Iterable[Mapping[str, object]], model: str = "example/Model-3B") -> Path:
    """A log with these runs, each behind the start of its server."""
    lines = ["=" * 80, "RUN: benchmark --seeds 0", "Selected server configurations:"]
    for one in rows:
        budget = one["max_num_batched_tokens"]
        lines += [
            f"START SERVER: vllm serve {model} --port 8000 --max-num-batched-tokens {budget} --max-num-seqs 256",
            "Waiting for vLLM startup...",
            "STOP SERVER",
            repr(one),
        ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def shape_of(trace: Trace) -> RequestArrays:
    requests = [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in trace.requests]
    arrival_s, prompts, outputs = zip(*requests, strict=True)
    return RequestArrays(np.array(arrival_s), np.array(prompts), np.array(outputs))


def simulated_log(
    path: Path,
    profile: Profile,
    settings: Mapping[str, PolicyParams],
    traces: Iterable[Trace],
    *,
    with_requests: bool = False,
    noise_sigma: float = 0.0,
    told: Mapping[str, object] | None = None,
) -> Path:
    """A log as the benchmark would have printed it, had `profile` been the server; settings by their names in it.

    told: entries of every run's dict beyond the usual, or in their place.
    """
    lines = []
    for trace in traces:
        arrays = shape_of(trace)
        prompts, outputs = arrays.prompt_tokens, arrays.output_tokens
        for number, (name, params) in enumerate(settings.items()):
            seed = 1000 * (trace.seed or 0) + number
            result = simulate(params, arrays, profile, noise_sigma=noise_sigma, noise_seed=seed)
            latency_s = result.last_token_s - arrays.arrival_s
            ttft_s = result.first_token_s - arrays.arrival_s
            tpot_s = (result.last_token_s - result.first_token_s) / (outputs - 1)
            figures = [f(v) for v in (latency_s, ttft_s, tpot_s) for f in (np.mean, lambda v: np.percentile(v, 95))]
            figures.append(result.last_token_s.max() - arrays.arrival_s[0])
            flags = f"--max-num-batched-tokens {params.b_max} --max-num-seqs {params.max_num_seqs}"
            lines += ["TRACE 0", f"START SERVER: vllm serve {profile.model} {flags}", "STOP SERVER"]
            if with_requests:
                lines += [
                    "REQUEST_RESULT: "
                    + repr(
                        {
                            "request_id": i,
                            "config_name": name,
                            "prompt_tokens": int(prompts[i]),
                            "output_tokens": int(outputs[i]),
                            "arrival_time": float(arrays.arrival_s[i]),
                            "latency": float(latency_s[i]),
                            "ttft": float(ttft_s[i]),
                            "tpot": float(tpot_s[i]),
                            "error": "",
                        }
                    )
                    for i in np.argsort(result.last_token_s, kind="stable").tolist()
                ]
            lines.append(
                repr(
                    {
                        "trace_id": 0,
                        "configured_prompt_tokens": int(prompts[0]),
                        "configured_output_tokens": int(outputs[0]),
                        "phase_schedule": trace.provenance["phases"],
                        "seed": trace.seed,
                        "num_requests": len(prompts),
                        "prompt_mean": float(prompts.mean()),
                        "prompt_max": int(prompts.max()),
                        "output_mean": float(outputs.mean()),
                        "output_max": int(outputs.max()),
                        "config_name": name,
                        "max_num_batched_tokens": params.b_max,
                        "max_num_seqs": params.max_num_seqs,
                        **dict(zip(FIGURES, map(float, figures), strict=True)),
                        "failed": 0,
                        "error": "",
                        **(told or {}),
                    }
                )
            )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
