"""Laws of the search space: every point decodes to a setting inside, every setting inside has a point."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ppas_core.defaults import PUBLISHED, STATIC_BUDGETS
from ppas_core.errors import InvalidInput, InvalidSettings
from ppas_core.policy import PolicyParams, Scope
from search_spaces.space import Space, load_space, preset_names


@st.composite
def ranges(draw: st.DrawFn, low: int, high: int) -> dict[str, Any]:
    first = draw(st.integers(low, high))
    if draw(st.booleans()):
        return {"low": first, "high": draw(st.integers(first, high)), "powers": True}
    step = draw(st.sampled_from([1, 7, 64, 128, 1000]))
    return {"low": first, "high": first + step * draw(st.integers(0, max((high - first) // step, 0))), "step": step}


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    """Any possible space; an impossible draw is thrown away."""
    form: dict[str, Any] = {"b_max": draw(ranges(64, 40_000)), "max_num_seqs": draw(st.integers(1, 300))}
    if draw(st.booleans()):
        form["max_num_seqs"] = draw(ranges(1, 300))
    if draw(st.integers(0, 3)):
        form["b_cap"] = draw(ranges(1, 40_000))
        form["n_th"] = {"low": (n := draw(st.integers(1, 9))), "high": n + draw(st.integers(0, 5))}
        form["scope"] = draw(st.sampled_from(["prefill", "global"]))
        form["decode_guard"] = form["scope"] == "global" and draw(st.booleans())
        if draw(st.booleans()):
            form["t_large"] = {**draw(ranges(1, 200_000)), "off": draw(st.booleans())}
    try:
        return load_space(form)
    except InvalidInput:
        assume(False)
        raise


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_point_decodes_to_valid_settings_inside_the_space_and_comes_back(data: st.DataObject) -> None:
    space = data.draw(spaces())
    point = {
        name: data.draw(st.integers(int(low), int(high)) if name == "n_th" else st.floats(low, high), label=name)
        for name, (low, high) in space.encoded_bounds().items()
    }
    params = space.decode(point)
    assert space.contains(params)
    assert params.b_cap <= params.b_max <= space.max_b_max
    encoded = space.encode(params)
    assert space.decode(encoded) == params
    assert all(low <= encoded[name] <= high for name, (low, high) in space.encoded_bounds().items())
    assert set(space.coordinates(params)) == set(space.dimensions) == set(encoded)


@given(space=spaces(), points=st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_a_thinned_grid_has_distinct_settings_of_the_space_and_keeps_its_limit(space: Space, points: int) -> None:
    grid = list(space.grid(points))
    assert 1 <= len(grid) <= min(points, space.size())
    assert len(set(grid)) == len(grid)
    for params in grid:
        assert space.decode(space.encode(params)) == params


@given(space=spaces())
@settings(max_examples=100, deadline=None)
def test_the_description_is_json_and_loads_to_the_same_space(space: Space) -> None:
    again = load_space(json.loads(json.dumps(space.describe())))
    assert again.describe() == space.describe()
    assert again.encoded_bounds() == space.encoded_bounds()
    assert again.size() == space.size()


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_settings_that_the_space_does_not_contain_cannot_be_encoded(data: st.DataObject) -> None:
    space = data.draw(spaces())
    params = data.draw(any_settings())
    if space.contains(params):
        again = space.decode(space.encode(params))
        assert again == params or (params.is_static and again.is_static and again.b_max == params.b_max)
    else:
        with pytest.raises(InvalidSettings, match=r"outside the space: .+allowed"):
            space.encode(params)


@st.composite
def any_settings(draw: st.DrawFn) -> PolicyParams:
    b_max = draw(st.integers(20, 40_000))
    return PolicyParams(
        b_max=b_max,
        b_cap=draw(st.integers(20, b_max)),
        n_th=draw(st.integers(1, 4)),
        t_large=draw(st.none() | st.integers(1, 200_000)),
        scope=draw(st.sampled_from(Scope)),
        max_num_seqs=draw(st.integers(1, 20)),
    )


def test_the_whole_grid_is_every_setting_once_and_its_length_is_the_size() -> None:
    space = load_space(
        {
            "b_max": {"low": 512, "high": 2048, "powers": True},
            "b_cap": {"low": 256, "high": 1024, "step": 256},
            "n_th": {"low": 1, "high": 2},
            "t_large": {"low": 4096, "high": 8192, "powers": True, "off": True},
        }
    )
    grid = list(space.grid())
    # b_max 512: cap 256; 1024: 256, 512, 768; 2048: 256 to 1024; each with 2 x 3 variants; 512 and 1024 also static.
    assert len(grid) == len(set(grid)) == space.size() == (1 + 3 + 4) * 6 + 2
    assert {p.b_max for p in grid if p.is_static} == {512, 1024}


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_loads_says_what_it_is_for_and_spans_its_knobs_when_sampled(name: str) -> None:
    space = load_space(name)
    assert space.about.endswith(".")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seen = [space.suggest(study.ask()) for _ in range(300)]
    assert len(set(seen)) > 30
    assert all(space.contains(params) for params in seen)
    assert set(study.trials[0].params) == set(space.dimensions)
    assert max(p.b_max for p in seen) > 0.9 * space.max_b_max


def test_the_presets_are_the_promised_ones_and_hold_the_published_settings() -> None:
    assert preset_names() == ("paper-neighbourhood", "ppas", "ppas-plus", "static")
    assert load_space("ppas").contains(PUBLISHED["ppas"])
    assert load_space("paper-neighbourhood").contains(PUBLISHED["ppas"])
    assert load_space("ppas-plus").contains(PUBLISHED["ppas-plus-nemotron-30b"])
    assert load_space({"preset": "ppas-plus", "max_num_seqs": 20}).contains(PUBLISHED["ppas-plus-qwen3.8-27b"])
    for preset in ("static", "ppas", "ppas-plus"):
        assert all(load_space(preset).contains(PolicyParams.static(budget)) for budget in STATIC_BUDGETS)


def test_an_enqueued_setting_comes_back_from_the_study() -> None:
    space = load_space("ppas-plus")
    study = optuna.create_study()
    for params in (PUBLISHED["ppas-plus-nemotron-30b"], PolicyParams.static(2048)):
        study.enqueue_trial(space.encode(params))
        assert space.suggest(study.ask()) == params


def test_a_static_budget_is_one_setting_whatever_its_resting_knobs_say() -> None:
    space = load_space("ppas")
    params = PolicyParams(4096, 4096, n_th=9, t_large=5, scope=Scope.PREFILL)
    assert space.contains(params)
    assert space.decode(space.encode(params)) == PolicyParams.static(4096)


def test_off_is_the_top_of_the_threshold_scale_and_about_a_fifth_of_it() -> None:
    space = load_space({"preset": "ppas-plus", "b_max": 16384, "b_cap": 2048, "n_th": 2})
    assert space.dimensions == ("t_large",)
    low, high = space.encoded_bounds()["t_large"]
    found = [space.decode({"t_large": low + (high - low) * i / 999}).t_large for i in range(1000)]
    assert found[0] == 8192
    assert found[-1] is None
    assert 150 < sum(value is None for value in found) < 250
    values = [value for value in found if value is not None]
    assert values == sorted(values)
    assert found == values + [None] * (1000 - len(values))
    assert space.coordinates(space.decode({"t_large": high})) == {"t_large": None}


def test_every_power_of_two_is_about_equally_likely() -> None:
    space = load_space({"b_max": {"low": 512, "high": 16384, "powers": True}})
    low, high = space.encoded_bounds()["b_max"]
    counts = Counter(space.decode({"b_max": low + (high - low) * (i + 0.5) / 600}).b_max for i in range(600))
    assert counts == dict.fromkeys(STATIC_BUDGETS, 100)


def test_the_cap_stays_within_the_range_between_the_sequence_cap_and_the_budget_under_the_global_scope() -> None:
    form = {"b_max": {"low": 512, "high": 4096, "step": 512}, "b_cap": {"low": 64, "high": 4096, "step": 64}}
    unguarded = load_space({**form, "scope": "global"})
    guarded = load_space({**form, "scope": "global", "decode_guard": True})
    assert min(params.b_cap for params in unguarded.grid()) == 256
    assert min(params.b_cap for params in guarded.grid()) == 64
    assert unguarded.decode({"b_max": 9.0, "b_cap": 0.0}).b_cap == 256
    assert unguarded.decode({"b_max": 12.0, "b_cap": 1.0}) == PolicyParams.static(4096)


@pytest.mark.parametrize(
    ("changes", "params", "ends"),
    [
        ({}, PolicyParams(2048, 64, 2), {"b_cap": "lowest"}),
        ({}, PolicyParams(4096, 2048, 4), {"b_max": "highest", "b_cap": "highest", "n_th": "highest"}),
        ({}, PolicyParams(2048, 1024, 1), {}),  # nothing is below one active prefill
        ({}, PolicyParams.static(1024), {"b_max": "lowest"}),  # the other knobs cannot act
        ({"b_max": 4096}, PolicyParams(4096, 512, 3), {}),
        (
            {"t_large": {"low": 512, "high": 8192, "powers": True}},
            PolicyParams(2048, 512, 3, 8192),
            {"t_large": "highest"},
        ),
        ({"t_large": {"low": 512, "high": 8192, "powers": True, "off": True}}, PolicyParams(2048, 512, 3, 8192), {}),
        (
            {"scope": "global", "max_num_seqs": 64},
            PolicyParams(2048, 64, 3, None, Scope.GLOBAL, 64),
            {},
        ),  # none may starve
        (
            {"scope": "global", "max_num_seqs": 32},
            PolicyParams(2048, 64, 3, None, Scope.GLOBAL, 32),
            {"b_cap": "lowest"},
        ),
    ],
)
def test_the_ends_of_a_space_that_a_setting_lies_on_are_those_that_could_be_moved(
    changes: dict[str, Any], params: PolicyParams, ends: dict[str, str]
) -> None:
    form = {
        "b_max": {"low": 1024, "high": 4096, "step": 1024},
        "b_cap": {"low": 64, "high": 2048, "step": 64},
        "n_th": {"low": 1, "high": 4},
    }
    space = load_space({**form, **changes})
    assert space.ends(params) == ends


def test_a_point_beyond_the_bounds_counts_as_the_bound_and_a_wrong_one_is_refused() -> None:
    space = load_space("ppas")
    assert space.decode({"b_max": 99, "b_cap": -5, "n_th": 0}) == PolicyParams(16384, 256, n_th=1)
    with pytest.raises(InvalidSettings, match="needs b_max, b_cap, n_th"):
        space.decode({"b_max": 11.0})
    with pytest.raises(InvalidSettings, match="encoded b_cap is nan"):
        space.decode({"b_max": 11.0, "b_cap": float("nan"), "n_th": 2})


def test_a_space_without_a_choice_has_one_setting_and_no_dimension() -> None:
    space = load_space({"b_max": 16384, "b_cap": 2048})
    assert space.dimensions == ()
    assert list(space.grid()) == [PUBLISHED["ppas"]] == [space.decode({})]
    assert space.encode(PUBLISHED["ppas"]) == {}


def test_a_file_loads_and_bare_off_means_what_it_says(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("preset: ppas-plus\nt_large: {low: 1024, high: 4096, powers: true, off: true}\n")
    assert load_space(file).contains(PolicyParams(4096, 512, t_large=None, scope=Scope.GLOBAL))
    assert load_space(str(file)).contains(PolicyParams(4096, 512, t_large=2048, scope=Scope.GLOBAL))
    file.write_text("preset: ppas-plus\nt_large: off\n")
    assert "t_large" not in load_space(file).dimensions


B = {"low": 2048, "high": 16384}


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"b_mx": 4096}, r"unknown key 'b_mx'; did you mean 'b_max'\?"),
        ({"b_max": {**B, "hgh": 5}}, r"unknown key 'hgh' in b_max; did you mean 'high'\?"),
        ({"b_cap": 512}, "key 'b_max' is missing"),
        ({"b_max": {"low": 4096, "high": 2048}}, "b_max: low is 4096, above high, which is 2048; swap"),
        ({"b_max": {**B, "step": 1000}}, "high is 16384, which steps of 1000 .*: 16048 or 17048"),
        ({"b_max": {"low": 1100, "high": 2000, "powers": True}}, "no power of two from 1100 to 2000; widen"),
        ({"b_max": {**B, "powers": True, "step": 2}}, "powers and step exclude each other"),
        ({"b_max": "2048"}, "b_max: '2048' is no range; allowed: a whole number"),
        ({"b_max": {"low": 0, "high": 2048}}, "b_max.low is 0; input should be greater than or equal to 1"),
        ({"b_max": {"low": 1.5, "high": 2048}}, "b_max.low is 1.5; input should be a valid integer"),
        ({"b_max": 2048, "b_cap": 512, "scope": "both"}, "scope is 'both'; input should be 'prefill' or 'global'"),
        ({"b_max": B, "b_cap": {"low": 4096, "high": 8192}}, "b_cap starts at 4096, above the smallest b_max.*raise"),
        ({"b_max": 2048, "b_cap": {"low": 64, "high": 128}, "scope": "global"}, "no value from max_num_seqs = 256 to"),
        ({"b_max": 2048, "b_cap": {"low": 2048, "high": 4096}}, "every setting is a static budget; lower b_cap.low"),
        ({"b_max": B, "n_th": {"low": 1, "high": 3}}, "n_th has no effect on static budgets; add b_cap"),
        ({"b_max": B, "b_cap": 512, "decode_guard": True}, "decode_guard has no effect under the prefill scope"),
        ({"b_max": {"low": 128, "high": 512}}, "max_num_seqs reaches 256, above the smallest b_max, which is 128"),
        ({"preset": "pppas"}, r"no search space 'pppas'; did you mean 'ppas'\? allowed: paper-neighbourhood, ppas"),
        ({"b_max": 2048, 5: 1}, "keys should be strings"),
    ],
)
def test_an_impossible_space_is_refused_with_value_range_and_remedy(form: dict[Any, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        load_space(form)


@pytest.mark.parametrize(
    ("text", "message"),
    [("b_max: {low: 1", "is not YAML"), ("- 1\n", "holds no keys"), ("", "holds no keys"), (None, "cannot be read")],
)
def test_an_unusable_file_is_refused_by_its_path(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "space.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InvalidInput, match=rf"space\.yaml: {message}"):
        load_space(file)


def test_every_key_of_a_space_has_a_description() -> None:
    schema = Space.model_json_schema()
    blocks = [schema, *schema["$defs"].values()]
    assert all("description" in field for block in blocks for field in block["properties"].values())
