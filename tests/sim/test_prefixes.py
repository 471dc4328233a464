"""Prompts share KV blocks exactly where their tokens are equal, whatever the block size of the trace is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from autotune import aggregate
from autotune.cli import app
from autotune.evaluate import SimulatedEvaluator, request_arrays
from autotune.plan import simulated_evaluator
from autotune.records import request_table
from autotune.spec import parse_spec
from ppas_core.errors import InvalidInput
from ppas_core.policy import PolicyParams
from ppas_core.sim.blocks import PrefixCache
from ppas_core.sim.prefixes import SharedPrefixes
from ppas_core.sim.profile import DEFAULT_PROFILE, Profile, load_profile
from ppas_core.sim.reference import Request
from ppas_core.sim.simulate import RequestArrays, RequestBatch, simulate, simulate_many
from traces.format import Trace, TraceRequest, write_trace
from traces.prompts import Vocabulary, prompt_ids

PLAIN = load_profile(DEFAULT_PROFILE)
CACHING = dataclasses.replace(PLAIN, prefix_caching=True)
PARAMS = PolicyParams.static(2048)


def trace(*requests: tuple[float, int, tuple[int, ...]], block_size: int = 512, output_tokens: int = 2) -> Trace:
    return Trace(
        "t",
        tuple(TraceRequest(at_s, prompt, output_tokens, hashes) for at_s, prompt, hashes in requests),
        block_size=block_size,
    )


def cached(requests: Trace, profile: Profile = CACHING) -> list[int]:
    return simulate(PARAMS, request_arrays(requests, prefixes=True), profile).cached_tokens.tolist()


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 40), st.integers(1, 20))
def test_two_prompts_hit_each_other_as_far_as_their_ids_agree(data: st.DataObject, hashed: int, served: int) -> None:
    lengths = [data.draw(st.integers(1, 200)) for _ in range(2)]
    hashes = [tuple(data.draw(st.integers(0, 1)) for _ in range(-(-length // hashed))) for length in lengths]
    pair = trace(*zip((0.0, 100.0), lengths, hashes, strict=True), block_size=hashed, output_tokens=1)
    vocabulary = Vocabulary(100_000)
    ids = [
        prompt_ids(pair.digest, index, length, vocabulary, block_hashes=hashes[index], block_size=hashed)
        for index, length in enumerate(lengths)
    ]
    agree = next((i for i, (one, other) in enumerate(zip(*ids, strict=False)) if one != other), min(lengths))
    # Whole blocks of the server, never the last token of the second prompt.
    expected = min(agree, lengths[1] - 1) // served * served
    assert cached(pair, dataclasses.replace(CACHING, block_size=served)) == [0, expected]


def test_a_prompt_of_512_token_blocks_hits_in_the_servers_blocks_of_16() -> None:
    # The second is the beginning of the first; the third leaves it after one block; the fourth is alone.
    requests = trace((0, 1500, (1, 2, 3)), (9, 1000, (1, 2)), (18, 1500, (1, 9, 3)), (27, 1500, ()))
    assert cached(requests) == [0, 992, 512, 0]
    assert cached(requests, PLAIN) == [0, 0, 0, 0]


def test_an_equal_prompt_recomputes_its_last_block_as_the_last_token_needs_its_logits() -> None:
    assert cached(trace((0, 512, (1,)), (9, 512, (1,)))) == [0, 496]
    assert cached(trace((0, 513, (1, 2)), (9, 513, (1, 2)))) == [0, 512]


def test_a_hit_shortens_the_prefill_and_its_pairs_still_count_the_cached_context() -> None:
    one = request_arrays(trace((0, 4096, tuple(range(8))), (9, 4096, (*range(7), 99))), prefixes=True)
    log = simulate(PolicyParams.static(8192), one, CACHING, record_steps=True).step_log
    assert log is not None
    assert log.scheduled(2) == {1: 512}
    assert log.prefill_pairs[2] == 512 * 3584 + 512 * 513 // 2
    assert log.cached_tokens.tolist() == [0, 0, 3584, 0]


def test_requests_of_one_step_share_what_the_first_of_them_only_begins_to_compute() -> None:
    assert cached(trace((0, 512, (1,)), (0, 512, (1,)))) == [0, 496]


def test_blocks_of_a_finished_request_are_evicted_tail_first_when_others_need_room() -> None:
    # 40 blocks: the first leaves 32 with content, the second needs 20 and takes 12 of these; 20 are left to hit.
    tight = dataclasses.replace(CACHING, num_kv_blocks=41)
    requests = trace((0, 512, (1,)), (9, 320, (2,)), (18, 512, (1,)), output_tokens=1)
    result = simulate(PARAMS, request_arrays(requests, prefixes=True), tight)
    assert result.cached_tokens.tolist() == [0, 0, 320]


def test_the_last_released_block_without_content_is_handed_out_first() -> None:
    cache = PrefixCache(10, 16, None)
    one, other = Request(0, 0.0, 40, 1), Request(1, 0.0, 160, 1)
    cache.admit(one, [])
    cache.allocate(one, 3)
    cache.keep(one, 40)  # two full blocks
    cache.release(one)
    assert cache.num_free == 10
    assert cache.find_hits(one, 40) == [0, 1]
    cache.admit(other, [])
    cache.allocate(other, 8)
    assert cache.evicted_blocks == 0
    cache.allocate(other, 1)
    assert cache.evicted_blocks == 1
    assert cache.find_hits(one, 40) == [0]


def test_a_batch_keeps_the_caches_and_block_sizes_of_its_traces_apart() -> None:
    first = request_arrays(trace((0, 1024, (1, 2)), (9, 1024, (1, 2))), prefixes=True)
    other = request_arrays(trace((0, 64, (1, 2, 3, 4)), (9, 64, (1, 2, 3, 5)), block_size=16), prefixes=True)
    plain = RequestArrays(np.zeros(1), np.array([1024]), np.array([1]))
    batch = simulate_many(PARAMS, RequestBatch.pack([first, plain, other, first]), CACHING)
    assert batch.cached_tokens.tolist() == [0, 1008, 0, 0, 48, 0, 1008]


def test_the_evaluator_reports_cached_tokens_and_doubts_a_profile_that_ignores_sharing() -> None:
    requests = trace((0, 1500, (1, 2, 3)), (9, 1000, (1, 2)))
    caching = SimulatedEvaluator(CACHING).replay(PARAMS, requests)
    assert aggregate.cached_share([caching]) == pytest.approx(992 / 2500)
    plain = SimulatedEvaluator(PLAIN).replay(PARAMS, requests)
    assert plain.requests.cached_tokens is None
    assert aggregate.cached_share([plain]) is None
    assert request_table([caching, plain])["cached_tokens"].tolist() == [0, 992, -1, -1]
    doubts = [SimulatedEvaluator(profile).doubts(PARAMS, [requests]) for profile in (PLAIN, CACHING)]
    assert [any("prefix_caching" in doubt for doubt in said) for said in doubts] == [True, False]


def test_a_profile_says_prefix_caching_only_where_it_is_on_and_keeps_its_digest_otherwise() -> None:
    assert "prefix_caching" not in PLAIN.to_dict()
    assert Profile.from_dict(CACHING.to_dict()).prefix_caching
    assert CACHING.digest != PLAIN.digest
    with pytest.raises(InvalidInput, match="prefix_caching is 1"):
        dataclasses.replace(PLAIN, prefix_caching=1)


def test_prefixes_that_do_not_cover_the_prompts_are_refused() -> None:
    two = SharedPrefixes.of(16, [(1, 2), ()])
    with pytest.raises(InvalidInput, match="request 0 has 2 block hashes for 40 prompt tokens"):
        RequestArrays(np.zeros(2), np.array([40, 40]), np.array([1, 1]), prefixes=two)
    with pytest.raises(InvalidInput, match="prefixes of 2 requests for 1 prompts"):
        RequestArrays(np.zeros(1), np.array([32]), np.array([1]), prefixes=two)
    with pytest.raises(InvalidInput, match="block_size is 0"):
        SharedPrefixes.of(0, [])


def test_simulate_and_a_study_switch_the_cache_on_and_tell_its_share(tmp_path: Path) -> None:
    path = tmp_path / "shared.jsonl"
    write_trace(trace((0, 1500, (1, 2, 3)), (9, 1000, (1, 2))), path)
    shares = []
    for flags in ([], ["--prefix-caching"]):
        run = CliRunner().invoke(app, ["simulate", "ppas", "-t", str(path), "--json", *flags])
        assert run.exit_code == 0, run.output
        shares.append(json.loads(run.stdout)[0]["cached_share"])
    assert shares == [None, pytest.approx(992 / 2500)]
    caching = simulated_evaluator(parse_spec({"name": "cached", "prefix_caching": True}, "test"))
    assert caching.profile.prefix_caching
    assert caching.describe()["prefix_caching"] is True
