"""A real vLLM under our scheduler: settings change while it runs, the step log proves it, and nothing stays behind."""

from __future__ import annotations

import importlib.util
import json
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from live_server import FLAGS, ROOT, Server

from autotune.export import write_export
from autotune.plan import make_plan
from autotune.runfolder import folder_name
from autotune.spec import parse_spec
from autotune.sweep import sweep
from ppas_core.policy import PolicyParams, QueueState, Scope, decide
from ppas_core.vllm import live
from ppas_core.vllm.steplog import read_step_log
from traces.format import Trace, TraceRequest, write_trace

pytestmark = pytest.mark.live

EXPORTED = PolicyParams(b_max=2048, b_cap=256, n_th=2, scope=Scope.PREFILL, max_num_seqs=16)
PLUS = PolicyParams(b_max=1024, b_cap=128, n_th=4, t_large=500, scope=Scope.GLOBAL, max_num_seqs=16)


def export_of(params: PolicyParams, folder: Path) -> Path:
    """`vllm.yaml` as the main job writes it."""
    spec = importlib.util.spec_from_file_location("export_tests", ROOT / "tests" / "autotune" / "test_export.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    provenance = {"study": {"server": {"model": "tiny", "flags": list(FLAGS)}}}
    return write_export(module.results_of(params, provenance=provenance), folder)[0]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Two servers, started side by side: one from an export with everything on, one by published variables alone."""
    folder = tmp_path_factory.mktemp("live")
    exported = Server(
        folder / "exported",
        export_of(EXPORTED, folder / "export"),
        (),
        {"VLLM_PLUGINS": "ppas", "PPAS_SETTINGS_FILE": str(folder / "exported" / "settings.json")},
    )
    by_environment = Server(
        folder / "environment",
        None,
        ("--max-num-batched-tokens", "1024", "--max-num-seqs", "8"),
        {"PPAS_ENABLED": "1", "PPAS_B_CAP": "96", "PPAS_SCOPE": "prefill"},
    )
    try:
        exported.wait_until_healthy()
        by_environment.wait_until_healthy()
        yield exported, by_environment
    finally:
        exported.end()
        by_environment.end()


@pytest.fixture
def server(servers: tuple[Server, Server]) -> Server:
    return servers[0]


def rows_of(server: Server) -> pd.DataFrame:
    """All steps with tokens so far; the log is written ten times a second."""
    time.sleep(0.5)
    frame = read_step_log(server.step_log)
    return frame[frame["prefill_tokens"] + frame["decode_tokens"] > 0]


def assert_rows_follow(rows: pd.DataFrame, params: PolicyParams) -> set[str]:
    """Each row's budget and branch are what the policy says of its queues, and its tokens stay within. The branches."""
    assert len(rows) > 0
    for row in rows.to_dict("records"):
        state = QueueState(
            row["running_prefills"],
            row["running_decodes"],
            row["waiting_prefills"],
            row["remaining_running_prefill_tokens"],
        )
        assert (row["budget"], row["branch"]) == decide(state, params)
        assert row["scope"] == params.scope
        total = row["prefill_tokens"] + row["decode_tokens"]
        assert total <= row["step_budget"] <= params.b_max
        assert (row["prefill_tokens"] if params.scope is Scope.PREFILL else total) <= row["budget"]
    return set(rows["branch"])


def change(server: Server, params: PolicyParams | None) -> dict[str, Any]:
    """Ask over HTTP, wake the engine with a request, and return the acknowledgement."""
    answer: list[tuple[int, Any]] = []
    body = {"ppas": None if params is None else params.to_dict()}
    asking = threading.Thread(target=lambda: answer.append(server.call("PUT", "/ppas/settings?wait_s=30", body)))
    asking.start()
    while asking.is_alive():
        server.complete(4, 2)
    status, ack = answer[0]
    assert status == 200, ack
    return dict(ack)


def test_an_exported_file_starts_a_server_that_reports_exactly_these_settings(server: Server) -> None:
    state = server.status()
    assert state["in_force"] == {"version": 0, "since_step": 1, "ppas": EXPORTED.to_dict()}
    assert state["engine"]["startup_budget_tokens"] == EXPORTED.b_max
    assert state["engine"]["max_num_seqs"] == EXPORTED.max_num_seqs
    assert state["engine"]["scheduler"] == "SyncPpasScheduler"  # vLLM has no async scheduling on CPUs
    assert state["engine"]["settings_source"] == "additional-config"
    assert "vllm.entrypoints.openai.api_server" in server.log.read_text()


def test_the_request_that_the_exports_readme_shows_is_answered(server: Server) -> None:
    readme = (server.settings_file.parents[1] / "export/README.md").read_text()
    command = next(line for line in readme.splitlines() if line.strip().startswith("curl "))
    url, _, body = shlex.split(command)[1::2]
    status, reply = server.call("POST", url.split(":8000")[1], json.loads(body))
    assert (status, len(reply["choices"][0]["token_ids"])) == (200, 8), reply


def test_every_step_under_load_has_the_budget_and_branch_that_the_policy_sets(server: Server) -> None:
    server.load()
    rows = rows_of(server)
    assert assert_rows_follow(rows, EXPORTED) == {"max", "pressure"}
    assert (rows["done_s"] >= rows["scheduled_s"]).mean() > 0.99
    assert rows["step"].is_monotonic_increasing


def test_settings_change_without_a_restart_at_the_acknowledged_step(server: Server) -> None:
    engine = server.status()["engine"]
    ack = change(server, PLUS)
    assert (ack["status"], ack["ppas"]) == ("applied", PLUS.to_dict())
    server.load()
    rows = rows_of(server)
    assert server.status()["engine"] == engine  # the same process, started at the same time
    before, after = rows[rows["step"] < ack["step"]], rows[rows["step"] >= ack["step"]]
    assert set(after["settings_version"]) == {ack["version"]}
    assert set(before["settings_version"]) == {ack["version"] - 1}
    assert assert_rows_follow(after, PLUS) >= {"max", "large_prefill"}
    assert after["step_budget"].max() == PLUS.b_max


def test_the_settings_file_alone_changes_settings_too(server: Server) -> None:
    params = PolicyParams.static(512, max_num_seqs=16)
    version = live.write_settings(server.settings_file, params)
    server.complete(1500, 2)
    ack = live.wait_for_ack(server.settings_file, version, timeout_s=10)
    assert ack["status"] == "applied"
    rows = rows_of(server)
    assert set(rows[rows["settings_version"] == version]["step_budget"]) == {512}


def test_bad_settings_are_refused_acknowledged_and_leave_the_old_ones_in_force(server: Server) -> None:
    before = server.status()["in_force"]
    too_large = PolicyParams(b_max=4096, b_cap=512, max_num_seqs=16)
    status, reply = server.call("PUT", "/ppas/settings", {"ppas": too_large.to_dict()})
    assert (status, "started with 2048 tokens per step" in json.dumps(reply)) == (422, True)
    version = live.write_settings(server.settings_file, too_large)  # past the route, straight to the engine
    server.complete(4, 2)
    ack = live.wait_for_ack(server.settings_file, version, timeout_s=10)
    assert ack["status"] == "refused"
    assert "started with 2048 tokens per step" in ack["reason"]
    server.settings_file.write_text("{ not json")
    server.complete(4, 2)
    ack = live.wait_for_ack(server.settings_file, 0, timeout_s=10)
    assert (ack["status"], "not JSON" in ack["reason"]) == ("refused", True)
    assert server.status()["in_force"] == before
    assert server.call("GET", "/ppas/settings")[1]["in_force"] == before


def test_switched_off_the_steps_have_the_startup_budget(server: Server) -> None:
    ack = change(server, None)
    assert (ack["status"], ack["ppas"]) == ("applied", None)
    server.load()
    rows = rows_of(server)
    off = rows[rows["step"] >= ack["step"]]
    assert set(off["branch"]) == set(off["scope"]) == {"off"}
    assert set(off["step_budget"]) == {EXPORTED.b_max}
    assert off["prefill_tokens"].max() > PLUS.b_max  # the static 512 and the 1024 before are gone


def test_the_routes_serve_no_browser_page_and_no_proxy(server: Server) -> None:
    for headers in ({"Origin": "http://127.0.0.1"}, {"X-Forwarded-For": "10.0.0.9"}, {"Host": "evil.example"}):
        status, _ = server.call("PUT", "/ppas/settings", {"ppas": None}, headers)
        assert status == 403, headers


def test_prometheus_shows_budget_branches_and_version(server: Server) -> None:
    change(server, EXPORTED)
    server.load()
    time.sleep(1.5)
    status, text = server.call("GET", "/metrics")
    assert status == 200
    version = server.status()["in_force"]["version"]
    assert f"ppas_settings_version {float(version)}" in text
    assert 'ppas_steps_total{branch="pressure"}' in text
    assert "ppas_budget_tokens " in text


def test_the_published_variables_alone_switch_it_on(servers: tuple[Server, Server]) -> None:
    server = servers[1]
    server.load()
    params = PolicyParams(b_max=1024, b_cap=96, scope=Scope.PREFILL, max_num_seqs=8)
    assert assert_rows_follow(rows_of(server), params) == {"max", "pressure"}
    assert f"P-PAS settings: {params.label()} (from environment); SyncPpasScheduler" in server.log.read_text()
    assert server.call("GET", "/ppas/status")[0] == 404  # the routes are off unless VLLM_PLUGINS names them


@pytest.mark.parametrize("way", ["route", "file"])
def test_a_study_joins_this_server_and_each_of_its_trials_runs_its_own_settings(
    server: Server, tmp_path: Path, way: str
) -> None:
    """The acknowledgements and the server's own step log prove it; afterwards it lives, with the settings that it had."""
    server.complete(100, 2)  # there is a step log from now on
    engine, before = server.status()["engine"], server.status()["in_force"]["ppas"]
    first_row = int(rows_of(server)["step"].max())
    requests = tuple(TraceRequest(0.05 * number, 1500, 4) for number in range(4))
    write_trace(Trace("few", requests, regime="only"), tmp_path / "few.jsonl")
    write_trace(Trace("unused", requests[:2], regime="only"), tmp_path / "unused.jsonl")
    joined = {"url": f"http://127.0.0.1:{server.port}", "model": str(server.model), "vocabulary_size": 512}
    if way == "file":
        joined["settings_file"] = str(server.settings_file)
    study = {
        "name": "joined",
        "backend": "vllm",
        "server": {**joined, "max_send_lag_ms": 200},
        "reference": EXPORTED.to_dict(),
        "space": {"preset": "ppas", "b_max": 2048, "b_cap": {"low": 64, "high": 2048, "step": 64}, "max_num_seqs": 16},
        "published": [],
        "static_budgets": [256, 1024],
        "workload": {"family": "files", "tuning": ["few.jsonl"], "held_out": ["unused.jsonl"]},
    }
    swept = sweep(make_plan(parse_spec(study, "test"), tmp_path), tmp_path / "run")
    assert [one.outcome.reason for one in swept] == [None] * 3
    rows = rows_of(server)
    rows = rows[rows["step"] > first_row]
    for one in swept:
        (about,) = json.loads((tmp_path / "run/sweep" / folder_name(one.params.label()) / "replays.json").read_text())
        assert (about["ack"]["status"], about["ack"]["ppas"]) == ("applied", one.params.to_dict())
        own = rows[rows["settings_version"] == about["ack"]["version"]]
        assert_rows_follow(own, one.params)
        assert own["prefill_tokens"].sum() >= 4 * 1500
        steps = read_step_log(server.step_log)  # those without tokens count as well
        assert 4 <= sum(about["branch_steps"].values()) <= (steps["settings_version"] == about["ack"]["version"]).sum()
    state = server.status()
    assert state["engine"] == engine
    assert state["in_force"]["ppas"] == before
    server.complete(100, 2)


def test_sigterm_to_the_launcher_ends_everything_and_keeps_the_log(servers: tuple[Server, Server]) -> None:
    server = servers[0]
    last = server.status()["step"]
    assert len(server.processes()) >= 3  # launcher, API server, engine
    server.launcher.send_signal(signal.SIGTERM)
    server.launcher.wait(timeout=60)
    server.wait_until_gone()
    state = json.loads(live.state_path(server.settings_file).read_text())
    assert state["step"] >= last
    assert state["step_log"]["dropped"] == 0
    assert read_step_log(server.step_log)["step"].max() >= last


def test_sigkill_of_the_launcher_leaves_no_process(servers: tuple[Server, Server]) -> None:
    server = servers[1]
    assert len(server.processes()) >= 3
    server.launcher.kill()
    server.launcher.wait(timeout=10)
    server.wait_until_gone()
