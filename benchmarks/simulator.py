"""How fast the simulator is: replays and steps per second, the compiled kernel against its Python twin in one run.

`python benchmarks/simulator.py [--seconds S] [--json]`, from the project's root. The trace is the paper's at λ = 1.0,
seed 0: 22 requests of 25,000 prompt and 32 output tokens in 50 s, under the paper's P-PAS setting, with KV blocks and
preemption modelled. One core. A replay of the kernel is timed as searches use it (packed traces) and one at a time;
and packed with the prefix cache on, where all prompts begin with the same 12,288 tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from ppas_core.defaults import published
from ppas_core.sim.prefixes import SharedPrefixes
from ppas_core.sim.profile import DEFAULT_PROFILE, load_profile
from ppas_core.sim.reference import simulate_reference
from ppas_core.sim.simulate import RequestArrays, RequestBatch, simulate, simulate_many
from traces.generate import rag_bursts

BAR_REPLAYS_PER_S = 10_000
PACKED = 30  # traces of one study's evaluation: six load regimes, five seeds


def rate_per_s(call: Callable[[], object], seconds: float) -> float:
    """Calls per second over about `seconds`: the best of three stretches, as other load only ever slows one down."""
    call()
    best = 0.0
    for _ in range(3):
        calls, start_s = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - start_s) < seconds / 3:
            call()
            calls += 1
        best = max(best, calls / elapsed_s)
    return best


def measure(seconds: float) -> dict[str, float | int | str]:
    profile, params = load_profile(DEFAULT_PROFILE), published("ppas")
    trace = rag_bursts(1.0, 0)
    shape = [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in trace.requests]
    arrival_s, prompts, outputs = zip(*shape, strict=True)
    requests = RequestArrays(np.array(arrival_s), np.array(prompts), np.array(outputs))
    batch = RequestBatch.pack([requests] * PACKED)
    caching = dataclasses.replace(profile, prefix_caching=True)
    hashes = [[*range(24), *range(1000 * (index + 1), 1000 * (index + 1) + 25)] for index in range(len(requests))]
    sharing = dataclasses.replace(requests, prefixes=SharedPrefixes.of(512, hashes))
    sharing_batch = RequestBatch.pack([sharing] * PACKED)
    lone = RequestArrays(np.zeros(1), np.ones(1, np.int64), np.ones(1, np.int64))

    start_s = time.perf_counter()
    result = simulate(params, requests, profile)
    first_call_s = time.perf_counter() - start_s
    twin = simulate_reference(params, requests, profile)
    assert twin.token_time_s.tobytes() == result.token_time_s.tobytes(), "the kernel and its twin differ"
    start_s = time.perf_counter()
    cached = simulate(params, sharing, caching)
    first_cached_call_s = time.perf_counter() - start_s
    twin = simulate_reference(params, sharing, caching)
    assert twin.token_time_s.tobytes() == cached.token_time_s.tobytes(), "the kernel and its twin differ"

    packed = rate_per_s(lambda: simulate_many(params, batch, profile), seconds) * PACKED
    with_cache = rate_per_s(lambda: simulate_many(params, sharing_batch, caching), seconds) * PACKED
    single = rate_per_s(lambda: simulate(params, requests, profile), seconds)
    overhead = 1 / rate_per_s(lambda: simulate(params, lone, profile), seconds)
    plain = rate_per_s(lambda: simulate_reference(params, requests, profile), seconds)
    steps = result.steps.num_steps
    return {
        "machine": platform.processor() or platform.machine(),
        "requests": len(requests),
        "steps_per_replay": steps,
        "first_call_s": first_call_s,
        "kernel_packed_replays_per_s": packed,
        "kernel_packed_steps_per_s": packed * steps,
        "first_cached_call_s": first_cached_call_s,
        "cached_share": float(cached.cached_tokens.sum() / sharing.prompt_tokens.sum()),
        "kernel_cached_replays_per_s": with_cache,
        "kernel_cached_steps_per_s": with_cache * cached.steps.num_steps,
        "kernel_single_replays_per_s": single,
        "kernel_single_steps_per_s": single * steps,
        "kernel_overhead_per_call_s": overhead,
        "twin_replays_per_s": plain,
        "twin_steps_per_s": plain * steps,
        "kernel_over_twin": packed / plain,
        "bar_replays_per_s": BAR_REPLAYS_PER_S,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1.5, help="time for each measurement (default 1.5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    found = measure(options.seconds)
    if options.json:
        print(json.dumps(found))
    else:
        print(
            f"trace: {found['requests']} requests, {found['steps_per_replay']} steps; "
            f"first call {found['first_call_s']:.2f} s, with the prefix cache {found['first_cached_call_s']:.2f} s"
        )
        for label, key in (
            ("kernel, packed traces", "kernel_packed"),
            ("the same, prefix cache", "kernel_cached"),
            ("kernel, one at a time", "kernel_single"),
            ("Python twin", "twin"),
        ):
            replays, steps = found[f"{key}_replays_per_s"], found[f"{key}_steps_per_s"]
            print(f"{label:22} {replays:12,.0f} replays/s {steps:14,.0f} steps/s")
        print(f"overhead of a call     {float(found['kernel_overhead_per_call_s']) * 1e6:12.1f} µs")
        print(f"kernel over twin       {found['kernel_over_twin']:12,.0f} x")
    reached = float(found["kernel_packed_replays_per_s"]) >= BAR_REPLAYS_PER_S
    if not reached:
        print(f"below the bar of {BAR_REPLAYS_PER_S:,} replays/s", file=sys.stderr)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
