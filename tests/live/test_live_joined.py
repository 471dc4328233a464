"""Studies on a server that somebody else started: its settings changed through its route or file, and put back."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from live_study import REFERENCE, command, environment, get, live, plan_of, static, write_study
from traffic import trace, wait_until

from autotune.cli.server_block import as_block
from autotune.replay.run import replay
from autotune.server_settings import RouteChannel, read_token
from autotune.spec import load_spec
from autotune.sweep import sweep
from ppas_core.errors import InvalidInput, NoResult
from ppas_core.policy import PolicyParams
from ppas_core.vllm import live as settings_live
from traces.prompts import Vocabulary

Serve = Callable[..., str]

TOKEN = "made-up-4711-token"  # noqa: S105 - of a test server
BEFORE = PolicyParams(b_max=2048, b_cap=128, n_th=3, max_num_seqs=16)
needs_fastapi = pytest.mark.skipif(find_spec("fastapi") is None, reason="FastAPI comes with vLLM")


def engine(folder: Path, **options: Any) -> dict[str, Any]:
    (folder / "theirs").mkdir(exist_ok=True)
    return {"settings_file": str(folder / "theirs/settings.json"), "params": BEFORE.to_dict(), **options}


def in_force(folder: Path) -> Any:
    state = settings_live.read_state(folder / "theirs/settings.json")
    assert state is not None
    return state["in_force"]["ppas"]


def assert_acknowledged(run: Path, labels: list[str]) -> None:
    """Every swept setting was acknowledged as applied, each under a version of its own, by the same server."""
    versions = set()
    for folder in (run / "sweep").iterdir():
        params = json.loads((folder / "settings.json").read_text())
        for kept in json.loads((folder / "replays.json").read_text()):
            assert kept["ack"]["status"] == "applied"
            assert kept["ack"]["ppas"] == params
            assert kept["branch_steps"] == {"max": 5}  # the stand-in makes one step a request
            versions.add(kept["ack"]["version"])
    assert len(versions) == len(list((run / "sweep").iterdir())) == len(labels)


@needs_fastapi
def test_a_server_is_tuned_through_its_route_and_the_token_is_written_nowhere(serve: Serve, tmp_path: Path) -> None:
    url = serve(engine=engine(tmp_path, route=True, token=TOKEN))
    path = write_study(tmp_path, {"flags": ["--dtype", "auto"]}, static_budgets=[256])
    options = ("--server-url", url, "--run", str(tmp_path / "run"))
    call = command(path, *options, verb="sweep")
    wrong = subprocess.run(
        call, env=environment(PPAS_HTTP_TOKEN="x" + TOKEN), capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2
    assert "wants another token" in wrong.stderr
    right = subprocess.run(call, env=environment(PPAS_HTTP_TOKEN=TOKEN), capture_output=True, text=True, check=False)
    assert right.returncode == 0, right.stderr
    assert_acknowledged(tmp_path / "run", [REFERENCE.label(), static(256)])
    assert in_force(tmp_path) == BEFORE.to_dict(), "the server has its own settings back"
    for text in (wrong.stdout, wrong.stderr, right.stdout, right.stderr):
        assert TOKEN not in text
    for file in (tmp_path / "run").rglob("*"):
        assert not file.is_file() or TOKEN.encode() not in file.read_bytes(), file


def test_a_server_is_tuned_through_the_file_that_it_watches(serve: Serve, tmp_path: Path) -> None:
    url = serve(engine=engine(tmp_path))
    path = write_study(tmp_path, {"url": url, "settings_file": "theirs/settings.json"}, static_budgets=[256])
    plan = plan_of(path)
    said: list[str] = []
    live(plan.evaluator).say = said.append
    swept = sweep(plan, tmp_path / "run")
    assert {one.outcome.reason for one in swept} == {None}
    assert_acknowledged(tmp_path / "run", [REFERENCE.label(), static(256)])
    assert in_force(tmp_path) == BEFORE.to_dict()
    assert any(text.startswith(f"joining the server at {url}") for text in said)
    assert not (tmp_path / "run/servers/joined.json").exists()


def test_a_killed_tuners_successor_puts_the_servers_own_settings_back(serve: Serve, tmp_path: Path) -> None:
    url = serve(engine=engine(tmp_path))
    plan = plan_of(write_study(tmp_path, {"url": url, "settings_file": "theirs/settings.json"}))
    evaluator, over = live(plan.evaluator), plan.tuning[0]
    script = f"""
import os
from live_study import REFERENCE, plan_of
from pathlib import Path
plan = plan_of(Path({str(tmp_path / "study.yaml")!r}))
with plan.evaluator.session(Path({str(tmp_path / "servers")!r})):
    plan.evaluator.replay(REFERENCE, plan.tuning[0])
    os.kill(os.getpid(), 9)
"""
    here = str(Path(__file__).parent)
    paths = os.pathsep.join([here, str(Path(here).parents[1])])
    killed = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": paths}, check=False)
    assert killed.returncode == -9
    assert in_force(tmp_path) == REFERENCE.to_dict()
    with evaluator.session(tmp_path / "servers"):
        evaluator.replay(PolicyParams.static(256, max_num_seqs=16), over)
    assert in_force(tmp_path) == BEFORE.to_dict()


def test_a_tuner_that_is_told_to_end_puts_the_servers_own_settings_back(serve: Serve, tmp_path: Path) -> None:
    url = serve(engine=engine(tmp_path))
    path = write_study(tmp_path, {"url": url, "settings_file": "theirs/settings.json"}, gap_s=2)
    before = tmp_path / "run/servers/joined.json"
    tuner = subprocess.Popen(command(path, "--run", str(tmp_path / "run"), "--quiet", verb="sweep"), env=environment())
    try:
        wait_until(lambda: before.exists() and in_force(tmp_path) == REFERENCE.to_dict(), timeout_s=60)
        tuner.send_signal(signal.SIGTERM)
        assert tuner.wait(timeout=60) == 130
    finally:
        tuner.kill()
        tuner.wait()
    assert in_force(tmp_path) == BEFORE.to_dict()
    assert not before.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 1024}, "started with 1024 tokens per step, the study asks for up to 2048"),
        ({"max_num_seqs": 8}, "started with --max-num-seqs 8, the study's settings have 16"),
    ],
)
def test_a_server_that_would_refuse_the_studys_settings_is_not_begun_with(
    serve: Serve, tmp_path: Path, options: dict[str, int], message: str
) -> None:
    url = serve(engine={**engine(tmp_path, **options), "params": None})
    path = write_study(tmp_path, {"url": url, "settings_file": "theirs/settings.json"})
    with pytest.raises(InvalidInput, match=message):
        sweep(plan_of(path), tmp_path / "run")
    assert not (tmp_path / "theirs/settings.json").exists()


def test_a_file_that_the_server_does_not_watch_stops_the_study_at_once(serve: Serve, tmp_path: Path) -> None:
    path = write_study(tmp_path, {"url": serve(), "settings_file": "nobody.json"})
    with pytest.raises(
        InvalidInput, match=r"the engine reports nothing to .*nobody\.json; start the server with P-PAS"
    ):
        sweep(plan_of(path), tmp_path / "run")
    assert not (tmp_path / "nobody.json").exists()


def test_settings_that_somebody_else_changes_in_the_middle_of_a_replay_fail_that_trial_alone(
    serve: Serve, tmp_path: Path
) -> None:
    url = serve(engine=engine(tmp_path))
    plan = plan_of(write_study(tmp_path, {"url": url, "settings_file": "theirs/settings.json"}))
    evaluator, over = live(plan.evaluator), plan.tuning[0]
    meddler = PolicyParams.static(512, max_num_seqs=16)
    with evaluator.session(tmp_path / "servers"):
        evaluator.replay(REFERENCE, over)
        settings_live.write_settings(tmp_path / "theirs/settings.json", meddler)  # applied at the replay's first step
        with pytest.raises(NoResult, match="somebody else changed the settings in the middle of the replay"):
            evaluator.replay(REFERENCE, over)
        assert evaluator.replay(REFERENCE, over).ack is not None
        assert in_force(tmp_path) == REFERENCE.to_dict()


def test_a_joined_server_that_ends_stops_the_study_and_is_not_replaced(serve: Serve, tmp_path: Path) -> None:
    url = serve(engine=engine(tmp_path), by_setting={static(256): "die"})
    path = write_study(tmp_path, {"url": url, "settings_file": "theirs/settings.json"}, static_budgets=[256, 1024])
    with pytest.raises(InvalidInput, match=f"no server answers at {url}"):
        sweep(plan_of(path), tmp_path / "run")
    found = json.loads((tmp_path / "run/sweep" / "mbt-256-s16" / "metrics.json").read_text())
    assert "the server died: nobody listens" in found["reason"]
    assert not list((tmp_path / "run/servers").glob("*.log"))


@needs_fastapi
def test_the_route_says_what_is_wrong_with_it(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = serve(engine=engine(tmp_path, route=True, token=TOKEN))
    channel = RouteChannel(url, TOKEN)
    state = channel.state()
    assert state is not None
    assert state["in_force"]["ppas"] == BEFORE.to_dict()
    assert TOKEN not in channel.name
    with pytest.raises(NoResult, match="started with 2048 tokens per step"):
        channel.ask(PolicyParams(b_max=4096, b_cap=512, max_num_seqs=16))
    with pytest.raises(InvalidInput, match="wants another token"):
        RouteChannel(url, None).ask(REFERENCE)
    with pytest.raises(InvalidInput, match="VLLM_PLUGINS=ppas"):
        RouteChannel(serve(), TOKEN).state()
    with pytest.raises(NoResult, match="does not answer"):
        RouteChannel("http://127.0.0.1:9", TOKEN).state()
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert channel.state() is not None, "the token goes to the server alone, past any proxy"


def test_a_token_comes_from_its_file_or_the_environment_and_is_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    monkeypatch.delenv("PPAS_HTTP_TOKEN", raising=False)
    assert read_token(None) is None
    monkeypatch.setenv("PPAS_HTTP_TOKEN", "from-environment")
    assert read_token(None) == "from-environment"
    file.write_text(f"{TOKEN}\n")
    assert read_token(file) == TOKEN
    for content in ("", "two words", "line\nbreak", "h\u00e9"):
        file.write_text(content)
        with pytest.raises(InvalidInput, match=r"holds no token|one word of printable ASCII") as caught:
            read_token(file)
        assert str(file) in str(caught.value)
        assert not content or content not in str(caught.value)
    with pytest.raises(InvalidInput, match="the token cannot be read: No such file"):
        read_token(tmp_path / "none")


def test_a_url_on_the_command_line_leaves_out_what_belongs_to_a_server_of_our_own(tmp_path: Path) -> None:
    spec = load_spec(
        write_study(tmp_path, {"flags": ["--dtype", "auto"], "wrapper": ["env"], "environment": {"A": "b"}})
    )
    server = as_block(spec, "http://127.0.0.1:1", None, Path("token"))
    assert server is not None
    assert (server["url"], server["flags"], server["wrapper"], server["environment"]) == (
        "http://127.0.0.1:1",
        (),
        (),
        {},
    )
    assert server["token_file"] == str(Path("token").resolve())
    with pytest.raises(InvalidInput, match="--settings-file and --token-file go with --server-url"):
        as_block(spec, None, Path("x"), None)
    assert as_block(spec, None, None, None) is None
    restarts = as_block(spec, None, None, None, restart_per_trial=True)
    assert restarts is not None
    assert (restarts["restart_per_trial"], restarts["flags"]) == (True, ("--dtype", "auto"))


def test_a_busy_server_is_not_measured(serve: Serve, tmp_path: Path) -> None:
    url = serve(engine=engine(tmp_path), faults={"50": "hang"})
    path = write_study(tmp_path, {"url": url, "settings_file": "theirs/settings.json", "request_timeout": "1s"})
    hold = threading.Thread(
        target=replay,
        args=(url, trace([(50, 2)])),
        kwargs={"model": "tiny", "cache_salt": None, "timeout_s": 8.0, "vocabulary": Vocabulary(1000)},
    )
    hold.start()
    wait_until(lambda: get(f"{url}/seen"))
    try:
        with pytest.raises(NoResult, match=r"it still has 1 requests .*it must serve nobody else"):
            sweep(plan_of(path), tmp_path / "run")
    finally:
        hold.join()
