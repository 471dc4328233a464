"""What a live trial costs beside its replays: a switch of settings against a restart of the server, in one run.

Starts vLLM's CPU build with the tiny model of examples/, switches settings a few times, replays one short trace for each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from autotune.live import LiveEvaluator
from autotune.plan import make_plan
from autotune.spec import load_spec

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/live-cpu-smoke.yaml"


def measure(switches: int) -> dict[str, float]:
    """Medians in seconds; restart_s is the start of the server until it is healthy."""
    plan = make_plan(load_spec(EXAMPLE), EXAMPLE.parent)
    evaluator = plan.evaluator
    assert isinstance(evaluator, LiveEvaluator)
    trace = plan.tuning[0]
    settings = [params for _, params in plan.known]
    turn_s, replay_s = [], []
    with tempfile.TemporaryDirectory() as folder, evaluator.session(Path(folder)):
        evaluator.replay(settings[0], trace)
        restart_s = evaluator.describe()["server"]["start_s"]
        for number in range(switches):
            started = time.perf_counter()
            found = evaluator.replay(settings[(number + 1) % len(settings)], trace)
            turn_s.append(time.perf_counter() - started)
            replay_s.append(float(found.requests.done_s.max()))
    switch_s = statistics.median(evaluator.switch_s[1:])
    return {
        "switches": switches,
        "restart_s": restart_s,
        "switch_s": switch_s,
        "switch_max_s": max(evaluator.switch_s[1:]),
        "restart_over_switch": restart_s / switch_s,
        "trial_s": statistics.median(turn_s),
        "replay_s": statistics.median(replay_s),
        "overhead_per_replay_s": statistics.median(t - r for t, r in zip(turn_s, replay_s, strict=True)) - switch_s,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--switches", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.switches)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print(f"restart of the server      {found['restart_s']:8.2f} s")
        print(f"switch of settings         {found['switch_s']:8.2f} s (max {found['switch_max_s']:.2f} s)")
        print(f"restart / switch           {found['restart_over_switch']:8.1f}")
        print(f"one replay with its switch {found['trial_s']:8.2f} s, of which the trace {found['replay_s']:.2f} s")
        print(f"rest (client, drain, log)  {found['overhead_per_replay_s']:8.2f} s")
