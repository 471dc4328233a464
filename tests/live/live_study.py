"""Small live studies on a stand-in for vLLM (`stand_in_vllm.py`) or on a joined stand-in: seconds instead of minutes."""

import json
import os
import re
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from autotune.evaluate import Evaluator
from autotune.live import LiveEvaluator
from autotune.plan import Plan, make_plan
from autotune.spec import load_spec
from ppas_core.policy import PolicyParams
from traces.format import Trace, TraceRequest, write_trace

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
REFERENCE = PolicyParams(b_max=2048, b_cap=512, n_th=2, max_num_seqs=16)
NUM_REQUESTS = 5
MIDDLE = 2
"""A request that no warm-up has the length of."""


def static(budget: int) -> str:
    """Label of a static budget."""
    return PolicyParams.static(budget, max_num_seqs=16).label()


def write_study(folder: Path, server: dict[str, Any], *, gap_s: float = 0.03, **changes: Any) -> Path:
    """A study file with its traces: one to tune on, two held out; request MIDDLE of trace k has 300 + k tokens."""
    for number, name in enumerate(("tune", "held-a", "held-b")):
        lengths = [100] * NUM_REQUESTS
        lengths[MIDDLE] = 300 + number
        requests = tuple(TraceRequest(i * gap_s, length, 4) for i, length in enumerate(lengths))
        write_trace(Trace(name, requests, regime="only"), folder / f"{name}.jsonl")
    study = {
        "name": "small",
        "backend": "vllm",
        "server": {"model": "tiny", "vocabulary_size": 1000, "max_send_lag_ms": 200, "request_timeout": "4s", **server},
        "reference": REFERENCE.to_dict(),
        "space": {
            "preset": "ppas",
            "b_max": {"low": 256, "high": 2048, "step": 128},
            "b_cap": {"low": 64, "high": 2048, "step": 64},
            "n_th": {"low": 1, "high": 4},
            "max_num_seqs": 16,
        },
        "static_budgets": [1024],
        "workload": {"family": "files", "tuning": ["tune.jsonl"], "held_out": ["held-a.jsonl", "held-b.jsonl"]},
        "objectives": ["mean_latency_s"],
        "sampler": "tpe",
        "simulate": False,
        "trials": 1,
        "stop_at_noise_pct": None,
        **changes,
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study))
    return path


def own_server(folder: Path, *before: str, **behaviour: Any) -> dict[str, Any]:
    """A server block: started by the tuner, stood in for; `before` goes before the stand-in in the wrapper."""
    file = folder / "behaviour.json"
    file.write_text(json.dumps({"gap_s": 0.005, **behaviour}))
    return {
        "wrapper": [*before, sys.executable, str(HERE / "stand_in_vllm.py"), str(file)],
        "environment": {"PYTHONPATH": str(ROOT)},
        "cold_check": False,
    }


def plan_of(path: Path) -> Plan:
    return make_plan(load_spec(path), path.parent)


def live(evaluator: Evaluator) -> LiveEvaluator:
    assert isinstance(evaluator, LiveEvaluator)
    return evaluator


def command(path: Path, *options: str, verb: str = "tune") -> list[str]:
    return [sys.executable, "-m", "autotune.entry", verb, str(path), *options]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def logs(run: Path, kind: str = "server") -> list[str]:
    return sorted(file.name for file in (run / "servers").glob(f"{kind}-*.log"))


def url_of(log: Path) -> str:
    """Where a server of ours serves, from the first line of its log."""
    found = re.search(r"--port (\d+)", log.read_text())
    assert found
    return f"http://127.0.0.1:{found[1]}"


def get(url: str) -> Any:
    with urllib.request.urlopen(url) as reply:  # noqa: S310
        return json.load(reply)


def settings_seen(url: str, least_tokens: int = 11) -> Sequence[str]:
    """Labels of the settings that requests of at least so many tokens met, in order."""
    return [request["setting"] for request in get(f"{url}/seen") if request["prompt"] >= least_tokens]
