"""How punctual the replay client is, and what long prompts cost it, beside `vllm bench serve` on the same plan.

`python benchmarks/client.py [--json]`, from the project's root. A fast local server in another process answers. Lag is
the client's own (planned to sent). Lateness is the server's view, the same for both clients: how much later than
planned a request came, against the most punctual one of its run. `vllm bench serve` runs where vLLM is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from autotune import metrics
from autotune.replay.run import replay
from traces.format import Trace, TraceRequest

ROOT = Path(__file__).parents[1]
BAR_LAG_P99_S = 0.005
RATE_PER_S, SECONDS, OUTPUT_TOKENS, GAP_S = 200, 5.0, 16, 0.01

VLLM_BENCH = """
import sys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
words = {f"w{number}": number for number in range(1000)}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(sys.argv[1])
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args(["--tokenizer", sys.argv[1], *sys.argv[2:]]))
"""


def plan(rate_per_s: float, seconds: float, prompt_tokens: int) -> Trace:
    count = int(rate_per_s * seconds)
    requests = tuple(TraceRequest(index / rate_per_s, prompt_tokens, OUTPUT_TOKENS) for index in range(count))
    return Trace(f"{rate_per_s:g} req/s of {prompt_tokens} tokens", requests)


@contextmanager
def local_server() -> Iterator[str]:
    script = ROOT / "tests" / "live" / "openai_server.py"
    command = [sys.executable, str(script), json.dumps({"gap_s": GAP_S})]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.kill()
        server.wait()


def seen_lateness_s(url: str, trace: Trace) -> np.ndarray[Any, np.dtype[np.float64]]:
    with urllib.request.urlopen(f"{url}/seen") as reply:  # noqa: S310
        came_s = np.sort([request["came_s"] for request in json.load(reply)])
    assert len(came_s) == len(trace.requests), f"{len(came_s)} of {len(trace.requests)} requests came"
    late_s = came_s - np.array([request.arrival_s for request in trace.requests])
    return np.asarray(late_s - late_s.min())


def quantiles(values: np.ndarray[Any, Any]) -> dict[str, float]:
    return {
        "p50_s": float(metrics.percentile(values, 50)),
        "p99_s": float(metrics.percentile(values, 99)),
        "max_s": float(values.max()),
    }


def ours(trace: Trace) -> dict[str, Any]:
    with local_server() as url:
        outcome = replay(url, trace, model="tiny", cache_salt="benchmark", timeout_s=60.0)
        lateness = quantiles(seen_lateness_s(url, trace))
    records = outcome.records
    return {
        "ok": outcome.accounting()["ok"],
        "lag": {"p50_s": outcome.lag.p50_s, "p99_s": outcome.lag.p99_s, "max_s": outcome.lag.max_s},
        "valid": outcome.valid,
        "lateness": lateness,
        **{name: metrics.value(name, records) for name in ("mean_ttft_s", "p99_ttft_s", "mean_tpot_s")},
    }


def vllm_bench(trace: Trace) -> dict[str, Any]:
    with local_server() as url, tempfile.TemporaryDirectory() as folder:
        lines = []
        for index, request in enumerate(trace.requests):
            blocks = [10 * index + block for block in range(-(-request.prompt_tokens // 16))]
            lines.append(
                {
                    "timestamp": request.arrival_s, "input_length": request.prompt_tokens,
                    "output_length": request.output_tokens, "hash_ids": blocks,
                }
            )  # fmt: skip
        file = Path(folder) / "plan.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        options = {
            "backend": "openai", "base-url": url, "endpoint": "/v1/completions", "model": "tiny",
            "dataset-name": "timed_trace", "dataset-path": file, "num-prompts": len(trace.requests),
            "timed-trace-label-timestamp": "timestamp", "timed-trace-label-input-length": "input_length",
            "timed-trace-label-output-length": "output_length", "timed-trace-label-hash-ids": "hash_ids",
            "result-dir": folder, "result-filename": "result.json",
        }  # fmt: skip
        command = [sys.executable, "-c", VLLM_BENCH, str(Path(folder) / "tokenizer"), "--save-result", "--disable-tqdm"]
        command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
        environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            return {"error": done.stderr.strip().splitlines()[-1]}
        result = json.loads((Path(folder) / "result.json").read_text())
        return {
            "ok": result["completed"],
            "lateness": quantiles(seen_lateness_s(url, trace)),
            "mean_ttft_s": result["mean_ttft_ms"] / 1000,
            "p99_ttft_s": result["p99_ttft_ms"] / 1000,
            "mean_tpot_s": result["mean_tpot_ms"] / 1000,
        }


def measure() -> dict[str, Any]:
    fast = plan(RATE_PER_S, SECONDS, 100)
    found: dict[str, Any] = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    found["fast"] = ours(fast)
    found["short_prompts"] = ours(plan(5, 4.0, 100))
    found["long_prompts"] = ours(plan(5, 4.0, 50_000))
    if importlib.util.find_spec("vllm") is not None:
        found["vllm_bench"] = vllm_bench(fast)
        found["fast_again"] = ours(fast)
    return found


def show(label: str, row: dict[str, Any]) -> None:
    if "error" in row:
        print(f"{label:34} {row['error']}")
        return
    own = "  ".join(f"{1000 * value:7.2f}" for value in row["lag"].values()) if "lag" in row else f"{'–':>25}"
    late = "  ".join(f"{1000 * value:7.2f}" for value in row["lateness"].values())
    rest = "  ".join(f"{1000 * row[name]:7.2f}" for name in ("mean_ttft_s", "p99_ttft_s", "mean_tpot_s"))
    print(f"{label:34} {row['ok']:5d}  {own}  {late}  {rest}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    found = measure()
    reached = found["fast"]["lag"]["p99_s"] <= BAR_LAG_P99_S
    if options.json:
        print(json.dumps(found))
    else:
        print(f"{found['cores']} cores, load {found['load']:.1f}; the server sends a token every {1000 * GAP_S:g} ms")
        print(f"{'milliseconds':34} {'ok':>5}  {'own lag p50, p99, max':25}  {'lateness p50, p99, max':25}  ", end="")
        print("TTFT mean, p99, TPOT mean")
        show(f"{RATE_PER_S} req/s x {SECONDS:g} s", found["fast"])
        for key, label in (
            ("fast_again", "the same again"),
            ("vllm_bench", "the same by vllm bench serve"),
            ("short_prompts", "5 req/s, 100-token prompts"),
            ("long_prompts", "5 req/s, 50,000-token prompts"),
        ):
            if key in found:
                show(label, found[key])
    if not reached:
        print(f"lag P99 above the bar of {1000 * BAR_LAG_P99_S:g} ms", file=sys.stderr)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
