"""Step durations from the log of vLLM's own schedulers, under a virtual clock that knows the truth."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

real = pytest.importorskip("real_scheduler")

import ppas_core.vllm.scheduler  # noqa: E402
from ppas_core.policy import PolicyParams, Scope  # noqa: E402
from ppas_core.sim.cost import StepCost  # noqa: E402
from ppas_core.sim.fit import StepFeatures, fit_steps  # noqa: E402
from ppas_core.sim.profile import Profile  # noqa: E402
from ppas_core.sim.requests import RequestArrays  # noqa: E402
from ppas_core.vllm.steplog import read_step_log  # noqa: E402

COST = StepCost(
    step_s=0.004, prefill_token_s=2e-5, prefill_pair_s=1e-8, decode_token_s=3e-4, decode_context_token_s=2e-6,
    prefill_step_s=0.003, mixed_step_s=0.006,
)  # fmt: skip


def virtual_now_s() -> float:
    """`now_s` of the replay that is calling, however deep it is in the scheduler."""
    frame = sys._getframe(1)
    while frame.f_code is not real.replay.__code__:
        assert frame.f_back is not None, "the scheduler asked for the time outside a replay"
        frame = frame.f_back
    return float(frame.f_locals["now_s"])


def served(depth: int, number: int, folder: Path) -> tuple[StepFeatures, np.ndarray]:
    """The features from the real scheduler's log of one random trace, and how long its steps really took."""
    rng = random.Random(f"{depth} {number}")
    size = 24
    arrival_s = np.sort([rng.uniform(0, 3) if rng.random() < 0.8 else rng.uniform(5, 9) for _ in range(size)])
    prompts = np.array([rng.choice((40, 300, 1200)) for _ in range(size)])
    trace = RequestArrays(arrival_s, prompts, np.array([rng.randint(1, 40) for _ in range(size)]))
    params = PolicyParams(b_max=rng.choice((256, 1024)), b_cap=256, scope=Scope.PREFILL, max_num_seqs=16)
    profile = Profile("x", "x", "x", "x", COST, 0.001, rng.choice((120, 400)), 16, 2048, depth)
    path = folder / f"{number}.csv"
    scheduler = real.build_scheduler(
        params,
        asynchronous=depth == 2,
        num_kv_blocks=profile.num_kv_blocks,
        additional_config={"ppas": params.to_dict(), "ppas_runtime": {"step_log": str(path)}},
    )
    replayed = real.replay(scheduler, trace, profile)
    scheduler.shutdown()
    return StepFeatures.of(read_step_log(path)), np.array([step.end_s - step.start_s for step in replayed.steps])


@pytest.mark.parametrize("depth", [1, 2], ids=["Scheduler", "AsyncScheduler"])
def test_durations_and_coefficients_come_out_of_the_real_schedulers_log(
    depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=virtual_now_s, time=time.time)
    monkeypatch.setattr(ppas_core.vllm.scheduler, "time", clock)
    parts = []
    for number in range(8):
        found, truth_s = served(depth, number, tmp_path)
        assert set(found.left_out) <= {"computed nothing"}, found.left_out
        np.testing.assert_allclose(found.duration_s, truth_s, atol=3e-6)
        parts.append(found)
    fit = fit_steps(StepFeatures.join(parts))
    for entry in fit.coefficients:
        assert entry.value == pytest.approx(getattr(COST, entry.name, 0.0), rel=0.02), entry.name
