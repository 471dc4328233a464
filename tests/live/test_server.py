"""The life of a server around a stand-in for vLLM: a real process that serves HTTP, starts a helper, and misbehaves."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from traffic import children, is_gone, wait_until

from autotune import server_facts
from autotune.serve import ServeCommand
from autotune.server import Server, existing_server, free_port, launch, start_server
from autotune.server_facts import cache_config
from autotune.server_failures import ServerFailed, ServerInputError, StartFailure, diagnose
from ppas_core.errors import InvalidInput

ROOT = Path(__file__).parents[2]

STAND_IN = """
import http.server, json, os, signal, subprocess, sys, time
behaviour, port, pids = sys.argv[1], int(sys.argv[2]), sys.argv[3]
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
with open(pids, "w") as file:
    file.write(f"{os.getpid()} {helper.pid}")
if behaviour == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if behaviour == "hang":
    time.sleep(60)
print("non-default args: {'max_num_seqs': 8, 'dtype': 'float32'}")
print("Chunked prefill is enabled with max_num_batched_tokens=4096.")
print("P-PAS settings: 2/4096/512/prefill (from additional-config); AsyncPpasScheduler", flush=True)
PAGES = {
    "/health": "",
    "/v1/models": json.dumps({"data": [{"id": "tiny", "max_model_len": 8192}]}),
    "/version": json.dumps({"version": "0.27.1"}),
    "/metrics": 'vllm:cache_config_info{block_size="16",num_gpu_blocks="3051",cache_dtype="auto"} 1.0\\n',
}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if behaviour == "stop answering":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(5)
        if behaviour == "healthy, then silent" and self.path != "/health":
            time.sleep(60)
        self.send_response(200 if self.path in PAGES else 404)
        self.end_headers()
        self.wfile.write(PAGES.get(self.path, "").encode())
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def stand_in(tmp_path: Path, behaviour: str, port: int) -> ServeCommand:
    return ServeCommand((sys.executable, "-c", STAND_IN, behaviour, str(port), str(tmp_path / "pids")), {})


def start(tmp_path: Path, behaviour: str = "", **options: object) -> Server:
    port = free_port()
    given = {"grace_s": 1.0, "timeout_s": 30.0, **options}
    return launch(stand_in(tmp_path, behaviour, port), port, log=tmp_path / "logs" / "server.log", **given)  # type: ignore[arg-type]


def pids(tmp_path: Path) -> list[int]:
    return [int(pid) for pid in (tmp_path / "pids").read_text().split()]


def assert_nothing_stays(tmp_path: Path) -> None:
    wait_until(lambda: all(is_gone(pid) for pid in pids(tmp_path)), 5)
    assert not children(os.getpid(), "autotune.server_guard")


def test_a_started_server_says_what_it_resolved_and_leaves_nothing_when_it_is_stopped(tmp_path: Path) -> None:
    with start(tmp_path, needs_ppas=True) as server:
        assert server.ended() is None
        facts = server.facts
        assert (facts.vllm_version, facts.model, facts.max_model_len) == ("0.27.1", "tiny", 8192)
        assert (facts.kv_blocks, facts.block_size, facts.max_num_batched_tokens) == (3051, 16, 4096)
        assert (facts.scheduler, facts.settings) == ("AsyncPpasScheduler", "2/4096/512/prefill")
        assert facts.flags == {"max_num_seqs": 8, "dtype": "float32"}
        assert facts.cache["cache_dtype"] == "auto"
        assert server.log is not None
        assert server.log.read_text().startswith(f"$ {server.command}\n")
        assert existing_server(server.url + "/v1").facts.kv_blocks == 3051
    assert "ended" in (server.ended() or "")
    assert_nothing_stays(tmp_path)


@pytest.mark.parametrize("behaviour", ["deaf", "stop answering"])
def test_a_server_that_does_not_listen_is_killed_after_its_grace(tmp_path: Path, behaviour: str) -> None:
    if behaviour == "deaf":
        server = start(tmp_path, behaviour)
        start_s = time.monotonic()
        server.stop()
        assert 0.5 < time.monotonic() - start_s < 10
    else:
        with pytest.raises(ServerFailed, match="hung: not healthy after 4 s") as raised:
            start(tmp_path, behaviour, timeout_s=4.0)
        assert raised.value.kind is StartFailure.HUNG
    assert_nothing_stays(tmp_path)


def test_a_server_that_falls_silent_right_after_its_health_is_a_failed_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_facts, "_TIMEOUT_S", 0.5)
    with pytest.raises(ServerFailed, match="it was healthy and then did not answer"):
        start(tmp_path, "healthy, then silent")
    assert_nothing_stays(tmp_path)


def test_a_server_that_never_gets_healthy_is_ended_and_shows_its_log(tmp_path: Path) -> None:
    told: list[float] = []

    def waiting(waited_s: float, _line: str) -> None:
        told.append(waited_s)
        wait_until(
            lambda: (tmp_path / "pids").exists() and len(pids(tmp_path)) == 2
        )  # so that it hangs, and not Python

    with pytest.raises(ServerFailed, match="give it more time"):
        start(tmp_path, "hang", timeout_s=2.0, waiting=waiting)
    assert told
    assert_nothing_stays(tmp_path)


def test_a_server_given_by_url_goes_on_when_we_are_done_with_it_and_is_missed_when_it_ends(tmp_path: Path) -> None:
    with start(tmp_path) as owned:
        given = existing_server(owned.url)
        assert given.ended() is None
        given.stop()
        assert owned.ended() is None
    assert "nobody listens" in (given.ended() or "")


def test_a_server_killed_while_it_serves_is_noticed_with_its_log_and_takes_its_helper_along(tmp_path: Path) -> None:
    server = start(tmp_path)
    os.kill(pids(tmp_path)[0], signal.SIGKILL)
    wait_until(server.ended)
    assert "was ended by signal 9" in (server.ended() or "")
    assert "P-PAS settings" in (server.ended() or "")
    server.stop()
    assert_nothing_stays(tmp_path)


def test_a_killed_tuner_takes_its_server_along(tmp_path: Path) -> None:
    port = free_port()
    command = stand_in(tmp_path, "deaf", port)
    code = (
        "import time; from pathlib import Path; from autotune.server import launch; "
        "from autotune.serve import ServeCommand; "
        f"launch(ServeCommand({command.argv!r}, {{}}), {port}, log=Path({str(tmp_path / 'log')!r}), grace_s=1.0); "
        "print('up', flush=True); time.sleep(60)"
    )
    tuner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert tuner.stdout is not None
    assert tuner.stdout.readline() == "up\n"
    tuner.kill()
    tuner.wait()
    wait_until(lambda: all(is_gone(pid) for pid in pids(tmp_path)), 10)


def test_a_taken_port_is_refused_before_anything_starts_even_one_that_vllm_would_share(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ServerInputError, match=f"port taken: port {port}.*name no port") as raised:
            launch(stand_in(tmp_path, "", port), port, log=tmp_path / "log")
    assert raised.value.kind is StartFailure.PORT_TAKEN
    assert not (tmp_path / "pids").exists()


def test_a_stock_scheduler_is_a_failure_where_ppas_is_needed(tmp_path: Path) -> None:
    port = free_port()
    code = STAND_IN.replace('print("P-PAS', 'print("')
    command = ServeCommand((sys.executable, "-c", code, "", str(port), str(tmp_path / "pids")), {})
    with pytest.raises(ServerFailed, match=r"scheduler not loaded.*ppas doctor"):
        launch(command, port, log=tmp_path / "log", needs_ppas=True, grace_s=1.0)
    assert_nothing_stays(tmp_path)


def test_a_second_start_into_the_same_log_is_judged_by_its_own_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("torch.OutOfMemoryError: CUDA out of memory\n")
    with pytest.raises(ServerFailed, match="died: exit code 3"):
        launch(ServeCommand((sys.executable, "-c", "import sys; sys.exit(3)"), {}), free_port(), log=log)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("api_server.py: error: unrecognized arguments: --no-such-flag", StartFailure.BAD_FLAG),
        ("api_server.py: error: argument --max-num-seqs: invalid int value: 'minus'", StartFailure.BAD_FLAG),
        ("pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig", StartFailure.BAD_FLAG),
        ("OSError: [Errno 98] Address already in use", StartFailure.PORT_TAKEN),
        (
            "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or …",
            StartFailure.MODEL_NOT_FOUND,
        ),
        ("huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate", StartFailure.MODEL_NOT_FOUND),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", StartFailure.OUT_OF_MEMORY),
        ("ValueError: No available memory for the cache blocks.", StartFailure.OUT_OF_MEMORY),
        ("ModuleNotFoundError: No module named 'ppas_core'", StartFailure.SCHEDULER_NOT_LOADED),
        ("Traceback (most recent call last):", StartFailure.DIED),
    ],
)
def test_failed_starts_are_told_apart_by_their_log(tmp_path: Path, line: str, kind: StartFailure) -> None:
    """Lines as vLLM 0.27.1 wrote them, the two about GPU memory from its source."""
    prefix = "(EngineCore pid=7) ERROR 11-30 19:34:55 [core.py:12] "
    code = f"import sys; print('Loading'); print({prefix!r} + {line!r}); print('later noise'); sys.exit(1)"
    with pytest.raises((ServerInputError, ServerFailed)) as raised:
        launch(ServeCommand((sys.executable, "-c", code), {}), free_port(), log=tmp_path / "log")
    assert raised.value.kind is kind
    assert isinstance(raised.value, InvalidInput) == (kind in ("bad flag", "port taken", "model not found"))
    said = str(raised.value)
    assert f"The log: {tmp_path / 'log'}" in said
    assert "Loading" in said
    if kind is StartFailure.DIED:
        assert said.endswith("later noise")
    else:
        assert line in said.splitlines()[0], "the cause comes first"
        assert "pid=7" not in said.splitlines()[0]
        assert "later noise" not in said


def test_the_cause_is_what_was_raised_first_and_not_the_source_that_raised_it() -> None:
    """As vLLM 0.27.1 ended without a network, shortened."""
    log = "\n".join(
        f"(APIServer pid=19359) {line}"
        for line in (
            "Resolved architecture",
            "Traceback (most recent call last):",
            "    raise LocalEntryNotFoundError(",
            "huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the file on the Hub",
            "The above exception was the direct cause of the following exception:",
            "    raise OSError(",
            "           ^^^^^^^^",
            "OSError: We couldn't connect to the hub, and couldn't find them in the cached files.",
        )
    )
    found = diagnose(log, 1)
    assert found.kind is StartFailure.MODEL_NOT_FOUND
    assert found.cause.startswith("vLLM has none of that name on this machine and could not download it (hugging")
    assert found.before == "Resolved architecture"


def test_of_an_unknown_cause_the_exception_is_told_that_caused_the_others() -> None:
    lines = ["ValueError: the model is of another world", "RuntimeError: it failed. See root cause above.", "bye"]
    log = "\n".join(f"ERROR 11-30 19:34:55 [core.py:912] {line}" for line in lines)
    assert diagnose(log, 1)[:2] == (StartFailure.DIED, "exit code 1: ValueError: the model is of another world")


def test_a_start_killed_without_a_word_is_called_out_of_memory() -> None:
    assert diagnose("Loading weights", 137)[0] is StartFailure.OUT_OF_MEMORY


def test_what_cannot_start_at_all_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ServerInputError, match="model not found: there is no /no/such/model"):
        start_server("/no/such/model", log=tmp_path / "log")
    with pytest.raises(InvalidInput, match=r"wrapper command 'no-such-profiler' is not installed"):
        start_server("org/model", log=tmp_path / "log", wrapper=("no-such-profiler", "profile"))
    with pytest.raises(InvalidInput, match=r"no server answers at http://127\.0\.0\.1"):
        existing_server(f"http://127.0.0.1:{free_port()}")
    assert not (tmp_path / "log").exists()


def test_labels_with_quotes_and_commas_are_read() -> None:
    text = '# HELP vllm:cache_config_info x\nvllm:cache_config_info{a="1,2",b="say \\"x\\"",num_gpu_blocks="7"} 1.0\n'
    assert cache_config(text) == {"a": "1,2", "b": 'say \\"x\\"', "num_gpu_blocks": "7"}
    assert cache_config("") == {}
