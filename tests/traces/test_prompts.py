"""Prompts are exact, reproducible, share what the trace shares, and avoid special ids."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppas_core.errors import InvalidInput
from traces.prompts import WARM_UP, Vocabulary, prompt_ids

VOCABULARY = Vocabulary(32_000)
DIGEST = "sha256:abc"


def test_a_prompt_is_the_same_in_another_process() -> None:
    here = prompt_ids(DIGEST, 7, 1000, VOCABULARY)
    code = f"from traces.prompts import *; print(prompt_ids({DIGEST!r}, 7, 1000, Vocabulary(32000)))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == str(here)
    assert here[:6] == [29538, 3498, 19942, 7393, 27983, 3119]  # written down: a release must not change prompts


@given(st.integers(1, 300), st.integers(0, 5), st.integers(16, 2000))
def test_a_prompt_has_exactly_the_planned_length_and_ordinary_ids(length: int, index: int, size: int) -> None:
    vocabulary = Vocabulary(max(size, 64), frozenset({30, 31}))
    ids = prompt_ids(DIGEST, index, length, vocabulary)
    assert len(ids) == length
    assert not {0, 1, vocabulary.size - 1, 30, 31} & set(ids)
    assert max(ids) < vocabulary.size


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
    st.integers(1, 16),
    st.integers(1, 16),
)
def test_two_prompts_share_exactly_the_prefix_that_their_block_hashes_share(
    one: list[int], two: list[int], last_one: int, last_two: int
) -> None:
    block_size = 16
    lengths = [(len(blocks) - 1) * block_size + last for blocks, last in ((one, last_one), (two, last_two))]
    first, second = (
        prompt_ids(DIGEST, index, length, VOCABULARY, block_hashes=blocks, block_size=block_size)
        for index, (blocks, length) in enumerate(zip((one, two), lengths, strict=True))
    )
    shared_blocks = 0
    while shared_blocks < min(len(one), len(two)) and one[shared_blocks] == two[shared_blocks]:
        shared_blocks += 1
    planned = min(shared_blocks * block_size, *lengths)
    assert (len(first), len(second)) == tuple(lengths)
    assert first[:planned] == second[:planned]
    rest = list(zip(first[planned : planned + 4], second[planned : planned + 4], strict=False))
    assert not rest or any(a != b for a, b in rest) or len(rest) < 4


def test_prompts_without_hashes_other_traces_and_warm_ups_have_nothing_in_common() -> None:
    prompts = [
        tuple(prompt_ids(digest, index, 16, VOCABULARY, purpose=purpose))
        for digest in (DIGEST, "sha256:def")
        for index in range(20)
        for purpose in ("measured", WARM_UP)
    ]
    assert len(set(prompts)) == len(prompts)
    assert len({prompt[:4] for prompt in prompts}) == len(prompts)


def test_a_vocabulary_too_small_for_prompts_is_refused() -> None:
    with pytest.raises(InvalidInput, match="at least 16 are needed"):
        Vocabulary(17)
