"""What a trace means on a profile, and sessions through the simulated evaluator."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from autotune import look as looking
from autotune.cli import app
from autotune.evaluate import SimulatedEvaluator
from autotune.foresight.forecast import forecast
from autotune.look import look
from ppas_core.defaults import published
from ppas_core.policy import Branch, PolicyParams
from ppas_core.sim.profile import load_profile
from search_spaces.space import load_space
from traces.format import Trace, TraceRequest, read_trace, write_trace
from traces.generate import Phase, heterogeneous, rag_bursts
from traces.session import Thinking, predecessors, to_sessions

PROFILE = load_profile("rtx5090-qwen2.5-3b")
PPAS = published("ppas")
PLUS = load_space("ppas-plus")


def chats(think_s: float = 2.0) -> Trace:
    """Ten sessions of four turns, recorded far faster than a server answers."""
    rows = sorted((0.5 * talk + 0.1 * turn, talk, turn) for talk in range(10) for turn in range(4))
    requests = tuple(TraceRequest(time_s, 4000 * (turn + 1), 20, session=f"s{talk}") for time_s, talk, turn in rows)
    return to_sessions(Trace("chats", requests), Thinking(think_s=think_s))


def test_a_light_trace_never_reaches_pressure_and_identifies_no_threshold() -> None:
    found = look(heterogeneous([Phase(600, 0.02)], 0, prompt_tokens=[8192]), PROFILE, PPAS, PLUS)
    assert found["origin"] == "simulated"
    assert found["findings"][0].startswith("The load is light")
    assert (
        "Pressure is never reached for n_th of 1 to 6: n_th and b_cap cannot be identified from this trace."
        in (found["findings"])
    )
    assert any("t_large cannot be identified" in sentence for sentence in found["findings"])
    assert [one["steps"] for one in found["branches"]["n_th"]] == [0] * 6
    assert found["load"]["slowdown"] == pytest.approx(1.0, abs=1e-3)


def test_bursts_reach_pressure_and_say_from_which_n_th_on_they_do_not() -> None:
    found = look(rag_bursts(0.4, 0), PROFILE, PPAS, PLUS)
    assert "Pressure is never reached from n_th = 2 on: larger values cannot be told apart here." in found["findings"]
    assert "Under the setting itself (n_th = 2) no step is capped." in found["findings"]
    assert found["branches"]["steps"][Branch.PRESSURE] == 0
    by_value = {one["value"]: one for one in found["branches"]["n_th"]}
    assert by_value[1]["steps"] > 0
    assert by_value[3]["same_as_before"]
    assert not by_value[2]["same_as_before"]


def test_the_branch_counts_are_those_of_a_replay_under_that_setting() -> None:
    trace = rag_bursts(1.2, 0)
    found = look(trace, PROFILE, PPAS, PLUS)
    for one in found["branches"]["n_th"]:
        params = PolicyParams(b_max=PPAS.b_max, b_cap=PPAS.b_cap, n_th=one["value"], max_num_seqs=PPAS.max_num_seqs)
        replayed = SimulatedEvaluator(PROFILE).replay(params, trace)
        assert replayed.branch_steps["pressure"] == one["steps"] > 0
        latency_s = replayed.requests.last_token_s - replayed.requests.planned_s
        assert one["mean_latency_s"] == pytest.approx(float(latency_s.mean()))


def test_more_load_is_named_moderate_then_near_saturation_then_overload() -> None:
    said = [look(rag_bursts(rate, 0), PROFILE, PPAS, PLUS)["findings"][0] for rate in (0.4, 1.2, 3.0)]
    assert said[0].startswith("The load is moderate")
    assert said[1].startswith("It is near saturation")
    assert said[2].startswith("It overloads the profile: 38 requests are unfinished when the last arrives")


def test_requests_that_can_never_be_served_are_counted_and_left_out() -> None:
    trace = Trace("t", (TraceRequest(0.0, 40_000, 5), TraceRequest(1.0, 1000, 5), TraceRequest(2.0, 1000, 5)))
    found = look(trace, PROFILE, PPAS, PLUS)
    assert found["fit"]["requests_too_long"] == 1
    assert found["load"]["requests"] == 2
    assert any("It does not fit: not all requests can be served. 1 of 3 need more" in one for one in found["findings"])
    none = look(Trace("t", trace.requests[:1]), PROFILE, PPAS, PLUS)
    assert none["load"] is None
    assert none["findings"][0].startswith("It does not fit: no request can be served.")


def test_a_long_trace_is_simulated_up_to_a_bound_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "MAX_TOKENS", 100)
    found = look(rag_bursts(1.2, 0), PROFILE, PPAS, PLUS)
    assert found["load"]["requests"] == 3
    assert any(one.startswith("Simulated are the first 3 requests; 22 further ones") for one in found["findings"])


def test_a_static_budget_has_no_branch_to_look_at() -> None:
    found = look(rag_bursts(1.2, 0), PROFILE, PolicyParams.static(2048), load_space("static"))
    assert "The setting is a static budget: no branch of P-PAS can act under it." in found["findings"]


def test_sessions_are_planned_by_their_answers_in_the_simulator_too() -> None:
    trace = chats()
    replayed = SimulatedEvaluator(PROFILE).replay(PPAS, trace).requests
    for place, before in enumerate(predecessors(trace)):
        due_s = trace.requests[place].arrival_s if before is None else replayed.done_s[before] + 2.0
        assert replayed.planned_s[place] == due_s
    assert (replayed.sent_s == replayed.planned_s).all()
    slower = SimulatedEvaluator(PROFILE).replay(PolicyParams.static(512), trace).requests
    assert slower.planned_s.max() > replayed.planned_s.max()


def test_a_step_log_of_sessions_names_the_requests_of_the_trace() -> None:
    log = SimulatedEvaluator(PROFILE).step_log(PPAS, chats())
    computed = np.bincount(log.entry_request, weights=log.entry_tokens)
    assert computed.tolist() == [r.prompt_tokens + r.output_tokens - 1 for r in chats().requests]


def test_a_forecast_of_sessions_is_that_of_the_evaluator() -> None:
    trace = chats()
    space = load_space({"b_max": {"low": 1024, "high": 4096, "step": 1024}})
    found = forecast(PROFILE, space, [trace], PolicyParams.static(4096), ["mean_latency_s"])
    for place, params in enumerate(found.settings):
        replayed = SimulatedEvaluator(PROFILE).replay(params, trace).requests
        latency_s = float((replayed.last_token_s - replayed.planned_s).mean())
        assert found.by_trace["mean_latency_s"][place, 0] == pytest.approx(latency_s)


def test_a_look_at_sessions_calls_no_slow_answer_an_overload() -> None:
    found = look(chats(0.0), PROFILE, PPAS, PLUS)
    assert found["load"]["closed_loop"]
    assert "overloads" not in found["findings"][0]


def ppas(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["trace", *map(str, arguments)])
    return done.exit_code, done.output


def test_show_draws_the_trace_and_what_the_profile_makes_of_it(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    write_trace(heterogeneous([Phase(20, 0.3), Phase(20, 2.0)], 1, prompt_tokens=[4000, 9000]), file)
    code, said = ppas("show", file, "--profile", "rtx5090-qwen2.5-3b", "--space", "ppas-plus")
    assert code == 0, said
    assert "open loop" in said
    assert any("▕" in line and "█" in line for line in said.splitlines())
    assert "8,192 to 16,383 ████" in said
    assert "(simulated)" in said
    assert "n_th in place of the setting's own" in said
    assert "t_large in place of the setting's own" in said
    code, said = ppas("show", file, "--profile", "rtx5090-qwen2.5-3b", "--json")
    assert code == 0, said
    assert json.loads(said)["predicted"]["origin"] == "simulated"


def test_sessions_are_made_shown_and_undone_on_the_command_line(tmp_path: Path) -> None:
    recorded, waiting, back = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    rows = [(0.0, 100, "a"), (1.0, 100, "b"), (9.0, 300, "a")]
    write_trace(Trace("t", tuple(TraceRequest(t, n, 10, session=who) for t, n, who in rows)), recorded)
    code, said = ppas("sessions", recorded, "-o", waiting, "--first-token", 1, "--per-token", 0.5)
    assert code == 0, said
    assert [r.think_time_s for r in read_trace(waiting).requests] == [None, None, 3.0]
    assert "later turns wait for answers" in ppas("show", waiting)[1]
    assert ppas("sessions", waiting, "-o", back, "--open-loop")[0] == 0
    assert read_trace(back).mode == "open loop"
    code, said = ppas("sessions", waiting, "-o", tmp_path / "d.jsonl", "--open-loop", "--think", 1)
    assert (code, "leave out the think times" in said) == (2, True)


def test_a_file_that_is_there_is_overwritten_only_when_asked(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    assert ppas("generate", "rag-bursts", "-o", file)[0] == 0
    before = file.read_bytes()
    code, said = ppas("generate", "rag-bursts", "-o", file, "--rate", 0.4)
    assert (code, "is there already; name another file, or overwrite it with --force" in said) == (2, True)
    assert ppas("scale", file, "-o", file, "--time", 2)[0] == 2
    assert file.read_bytes() == before
    assert ppas("generate", "rag-bursts", "-o", file, "--rate", 0.4, "--force")[0] == 0
    assert file.read_bytes() != before
    assert ppas("scale", file, "-o", file, "--time", 2, "--force")[0] == 0
