"""`ppas serve` and `ppas doctor` around processes that are not vLLM: signals, exit codes, orphans, bad input."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotune import doctor, serve
from autotune.cli import app
from ppas_core.errors import InvalidInput
from ppas_core.policy import PolicyParams

ROOT = Path(__file__).parents[2]

# A stand-in for a server: it starts a helper, as vLLM starts its engine, and ends as told.
SERVER = """
import os, signal, subprocess, sys, time
behaviour, pids = sys.argv[1], sys.argv[2]
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
def end(number, frame):
    if behaviour == "tidy":
        helper.kill()
        helper.wait()
    if behaviour != "deaf":
        sys.exit(7)
signal.signal(signal.SIGTERM, end)
with open(pids + ".part", "w") as file:
    file.write(f"{os.getpid()} {helper.pid}")
os.replace(pids + ".part", pids)
if behaviour == "crash":
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour == "leave":
    sys.exit(3)
time.sleep(60)
"""
LAUNCHER = """
import os, sys
from autotune.serve import supervise
sys.exit(supervise([sys.executable, "-c", {server!r}, {behaviour!r}, {pids!r}], os.environ, grace_s=1.0))
"""


def launch(tmp_path: Path, behaviour: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    pids = tmp_path / "pids"
    code = LAUNCHER.format(server=SERVER, behaviour=behaviour, pids=str(pids))
    launcher = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    wait_until(pids.exists)
    return launcher, [int(pid) for pid in pids.read_text().split()]


def wait_until(condition: "object", timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"  # nobody here reaps the orphans of a killed launcher
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(
    ("behaviour", "code"), [("tidy", 7), ("untidy", 7), ("deaf", 128 + signal.SIGKILL)], ids=["tidy", "untidy", "deaf"]
)
def test_a_signal_is_passed_on_and_nothing_stays_behind(tmp_path: Path, behaviour: str, code: int) -> None:
    launcher, pids = launch(tmp_path, behaviour)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=20) == code
    wait_until(lambda: all(is_gone(pid) for pid in pids), 5)


@pytest.mark.parametrize(("behaviour", "code"), [("crash", 128 + signal.SIGKILL), ("leave", 3)])
def test_when_the_server_ends_by_itself_what_it_started_ends_too(tmp_path: Path, behaviour: str, code: int) -> None:
    launcher, pids = launch(tmp_path, behaviour)
    assert launcher.wait(timeout=20) == code
    wait_until(lambda: all(is_gone(pid) for pid in pids), 5)


def test_a_killed_launcher_takes_the_server_with_it(tmp_path: Path) -> None:
    launcher, pids = launch(tmp_path, "tidy")
    launcher.kill()
    launcher.wait(timeout=20)
    wait_until(lambda: all(is_gone(pid) for pid in pids))


def test_unknown_flags_are_passed_through_and_the_exact_command_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "bin" / "vllm"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    config = tmp_path / "vllm.yaml"
    config.write_text("max-num-seqs: 8\nadditional-config: {ppas: {b_max: 64, b_cap: 32, max_num_seqs: 8}}\n")
    monkeypatch.setattr(serve, "_working_console_script", lambda python: str(script))
    shown: list[str] = []
    code = serve.run_serve("org/model", config, ["--port", "81", "--made-up", "a b"], dry_run=True, show=shown.append)
    assert code == 0
    assert shown[0].endswith(f"{script} serve org/model --config {config} --port 81 --made-up 'a b'")
    assert serve.check_config(config) == PolicyParams(64, 32, max_num_seqs=8)


@pytest.mark.parametrize("policy", ["5", "[b_max, b_cap]", "true", "text", "{b_max: -1, b_cap: 2}", "{b_max: 5}"])
def test_a_config_whose_settings_are_none_is_refused_by_name(policy: str, tmp_path: Path) -> None:
    config = tmp_path / "odd.yaml"
    config.write_text(f"additional-config: {{ppas: {policy}}}\n")
    with pytest.raises(InvalidInput, match=r"odd\.yaml: "):
        serve.check_config(config)


def test_the_commands_report_and_refuse_as_the_others_do(tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["serve", "m", "--made-up", "1", "--dry-run"])
    if run.exit_code == 2:
        assert "vLLM is not installed" in run.output
    else:
        assert "m --made-up 1" in run.output
    refused = CliRunner().invoke(app, ["serve", "m", "--config", str(tmp_path / "none.yaml")])
    assert (refused.exit_code, "cannot be read" in refused.output) == (2, True)
    refused = CliRunner().invoke(app, ["patch", "apply", "--vllm", str(tmp_path)])
    assert (refused.exit_code, "is no vLLM package" in refused.output) == (2, True)
    assert "ppas-autotune" in CliRunner().invoke(app, ["doctor"]).output


def test_a_broken_console_script_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "vllm").write_text("#!/bin/sh\n")
    if serve._version_known("vllm"):
        pytest.skip("a distribution named vllm is installed: its script works")
    assert serve._working_console_script(str(tmp_path / "python")) is None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.yaml", None, "cannot be read"),
        ("export.json", "{}", "ends in .yaml or .yml"),
        ("bad.yaml", "a: [", "is not YAML"),
        ("list.yaml", "- 1", "is not a mapping"),
        ("study.yaml", "name: mine\ntrials: 3", r"study\.yaml: is a study file.*give .*runs/NAME/export/vllm\.yaml"),
        ("live.yaml", "backend: vllm\nserver: {model: m}", "is a study file"),
        ("setting.yaml", "b_max: 64\nb_cap: 32", "is a setting, no config"),
        ("compose.yaml", "services: {vllm: {}}", "give vllm.yaml beside it"),
        ("policy.yaml", "additional-config: {ppas: {b_max: 64}}", "'b_cap' is missing"),
    ],
)
def test_an_unusable_export_is_refused_before_anything_starts(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InvalidInput, match=message):
        serve.serve_command("model", tmp_path / name, ())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("MODEL", "stands for your model"),
        ("./none", "no such folder"),
        ("/no/where", "no such folder"),
        ("a/b/c", "no such folder"),
        ("models/mine", r"no such folder in .*; give /.*/models/mine$"),
        ("was/a-folder", "no such folder in .*; give its path from here"),
    ],
)
def test_a_models_folder_that_is_not_there_is_refused_before_anything_starts(
    tmp_path: Path, model: str, message: str
) -> None:
    (tmp_path / "models/mine").mkdir(parents=True)
    (tmp_path / "models/mine/config.json").write_text("{}")
    export = tmp_path / "run/export"
    export.mkdir(parents=True)
    (export / "vllm.yaml").write_text("max-num-seqs: 8\n")
    (export / "settings.json").write_text('{"measured_on": {"model": "was/a-folder", "model_is_folder": true}}')
    with pytest.raises(InvalidInput, match=message):
        serve.run_serve(model, export / "vllm.yaml", dry_run=True)


def test_what_may_be_a_name_is_left_to_vllm_and_a_folder_that_is_there_is_taken(tmp_path: Path) -> None:
    (tmp_path / "vllm.yaml").write_text("max-num-seqs: 8\n")
    for name in ("org/model", "gpt2"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    for recorded in (
        '{"measured_on": {"model": "org/model", "model_is_folder": false}}',
        "[",
        "[]",
        '{"measured_on": 1}',
    ):
        (tmp_path / "settings.json").write_text(recorded)
        for model in ("gpt2", "org/other", "s3://bucket/a/b", "org/repo/weights.gguf", str(tmp_path)):
            serve.check_model(model, tmp_path / "vllm.yaml")
    (tmp_path / "settings.json").write_text('{"measured_on": {"model": "org/model", "model_is_folder": false}}')
    serve.check_model("org/model", tmp_path / "vllm.yaml")
    serve.check_model("org/model")


def test_the_doctor_says_what_the_variables_do_and_what_is_wrong_with_them() -> None:
    lines: list[str] = []
    doctor.run_doctor(lines.append, {"PPAS_ENABLED": "1", "PPAS_B_CAP": "768"})
    assert any("switches P-PAS on: n_th 2, b_cap 768, scope global" in line for line in lines)
    lines.clear()
    assert doctor.run_doctor(lines.append, {"PPAS_PLUS_ENABLED": "1"}) == 1
    assert any(line.startswith("NO") and "without PPAS_B_CAP" in line for line in lines)


def test_the_doctor_answers_without_importing_vllm() -> None:
    code = "import sys; from autotune.doctor import run_doctor; run_doctor(); sys.exit('vllm' in sys.modules)"
    start_s = time.monotonic()
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=dict(os.environ))
    assert run.returncode == 0, run.stdout + run.stderr
    assert time.monotonic() - start_s < 10
    assert "ppas-autotune" in run.stdout
