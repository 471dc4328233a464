"""The decision table of P-PAS and P-PAS+, and what settings are refused."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppas_core import Branch, Decision, PolicyParams, QueueState, Scope, decide
from ppas_core.defaults import PUBLISHED, STATIC_BUDGETS, published
from ppas_core.errors import InvalidInput, InvalidSettings

PPAS = PolicyParams(b_max=16384, b_cap=2048, n_th=2)
PLUS = PolicyParams(b_max=2048, b_cap=768, n_th=2, t_large=32768, scope=Scope.GLOBAL, max_num_seqs=20)


@pytest.mark.parametrize(
    ("running_prefills", "running_decodes", "waiting_prefills", "branch"),
    [
        (0, 0, 0, Branch.MAX),
        (2, 0, 0, Branch.MAX),  # nothing decodes: nobody waits for a token
        (1, 5, 0, Branch.MAX),  # below n_th
        (0, 1, 2, Branch.PRESSURE),  # waiting prefills count
        (1, 1, 1, Branch.PRESSURE),
        (2, 1, 0, Branch.PRESSURE),
        (9, 9, 9, Branch.PRESSURE),
    ],
)
def test_ppas_caps_the_budget_exactly_under_prefill_pressure(
    running_prefills: int, running_decodes: int, waiting_prefills: int, branch: Branch
) -> None:
    state = QueueState(running_prefills, running_decodes, waiting_prefills, 10**9)
    assert decide(state, PPAS) == Decision(2048 if branch is Branch.PRESSURE else 16384, branch)


@pytest.mark.parametrize(
    ("state", "branch"),
    [
        (QueueState(1, 2, 0, 32768), Branch.LARGE_PREFILL),
        (QueueState(1, 2, 0, 32767), Branch.MAX),  # too little is left
        (QueueState(1, 1, 0, 32768), Branch.MAX),  # a single decode
        (QueueState(0, 2, 1, 0), Branch.MAX),  # the prefill only waits
        (QueueState(2, 2, 0, 32768), Branch.PRESSURE),
        (QueueState(1, 2, 1, 32768), Branch.PRESSURE),  # both hold: pressure is named
    ],
)
def test_ppas_plus_also_caps_one_large_prefill_beside_two_decodes(state: QueueState, branch: Branch) -> None:
    assert decide(state, PLUS) == Decision(2048 if branch is Branch.MAX else 768, branch)


def test_without_t_large_a_large_prefill_does_not_cap() -> None:
    assert decide(QueueState(1, 9, 0, 10**9), PPAS).branch is Branch.MAX


@given(
    st.integers(0, 99), st.integers(0, 99), st.integers(0, 99), st.integers(0, 10**6), st.sampled_from(STATIC_BUDGETS)
)
def test_a_static_setting_always_has_the_same_budget(a: int, b: int, c: int, tokens: int, budget: int) -> None:
    assert decide(QueueState(a, b, c, tokens), PolicyParams.static(budget)).budget == budget


@given(st.integers(0, 300), st.integers(1, 300), st.integers(0, 300))
def test_the_decode_guard_raises_a_capped_global_budget_by_the_decodes_and_never_past_b_max(
    prefills: int, decodes: int, waiting: int
) -> None:
    guarded = PolicyParams(b_max=512, b_cap=100, scope=Scope.GLOBAL, max_num_seqs=300, decode_guard=True)
    found = decide(QueueState(prefills, decodes, waiting, 0), guarded)
    assert found.budget == (min(100 + decodes, 512) if found.branch is Branch.PRESSURE else 512)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"b_max": 0, "b_cap": 0}, "b_max is 0"),
        ({"b_max": 2048.0, "b_cap": 512}, "b_max is 2048.0"),
        ({"b_max": True, "b_cap": 1}, "b_max is True"),
        ({"b_max": 2048, "b_cap": 4096}, "b_cap is 4096; it must not exceed b_max"),
        ({"b_max": 2048, "b_cap": 512, "n_th": 0}, "n_th is 0"),
        ({"b_max": 2048, "b_cap": 512, "t_large": 0}, "t_large is 0"),
        ({"b_max": 2048, "b_cap": 512, "scope": "both"}, "scope is 'both'; allowed: 'prefill' or 'global'"),
        ({"b_max": 128, "b_cap": 64}, "max_num_seqs = 256"),
        ({"b_max": 2048, "b_cap": 128, "scope": "global"}, "set decode_guard"),
        ({"b_max": 2048, "b_cap": 512, "decode_guard": 1}, "decode_guard is 1"),
        ({"b_max": 2048}, "'b_cap' is missing"),
        ({"b_max": 2048, "b_cap": 512, "bcap": 1}, "unknown setting 'bcap'"),
    ],
)
def test_a_bad_setting_is_refused_with_its_value_and_what_is_allowed(settings: dict[str, object], word: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        PolicyParams.from_dict(settings)
    assert word in str(caught.value)


def test_a_global_cap_below_the_sequence_cap_is_allowed_with_the_decode_guard() -> None:
    assert PolicyParams(b_max=2048, b_cap=128, scope=Scope.GLOBAL, decode_guard=True).b_cap == 128


@pytest.mark.parametrize("params", [PPAS, PLUS, PolicyParams.static(1024), *PUBLISHED.values()])
def test_settings_survive_the_way_through_plain_values(params: PolicyParams) -> None:
    assert PolicyParams.from_dict(params.to_dict()) == params


def test_published_settings_are_those_of_the_paper() -> None:
    assert published("ppas") == PolicyParams(b_max=16384, b_cap=2048, n_th=2, scope=Scope.PREFILL, max_num_seqs=256)
    assert published("ppas-plus-qwen3.8-27b") == PLUS
    nemotron = published("ppas-plus-nemotron-30b")
    assert (nemotron.b_max, nemotron.b_cap, nemotron.t_large) == (16384, 1280, 65536)
    with pytest.raises(InvalidInput, match="known: ppas, ppas-plus"):
        published("ppass")


def test_importing_the_policy_loads_nothing_beyond_the_standard_library() -> None:
    code = "import sys, ppas_core, ppas_core.defaults; print([m for m in ('numpy', 'vllm', 'torch', 'yaml') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["b_max", "b_cap", "n_th", "t_large", "max_num_seqs"])
@pytest.mark.parametrize("value", [2**24 + 1, 2**63, 10**4000])
def test_a_setting_beyond_any_engine_is_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(InvalidSettings, match=f"{name} is .*; allowed: 1 to 16777216"):
        PolicyParams.from_dict({"b_max": 16384, "b_cap": 2048, name: value})


def test_the_largest_settings_are_accepted() -> None:
    largest = 2**24
    assert PolicyParams(largest, largest, largest, largest, Scope.GLOBAL, largest).b_max == largest


def test_unknown_keys_of_any_kind_are_named() -> None:
    with pytest.raises(InvalidSettings, match="unknown setting 1; allowed: b_max"):
        PolicyParams.from_dict({1: 1, "a": 3})  # type: ignore[dict-item]
