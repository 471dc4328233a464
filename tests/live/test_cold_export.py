"""The cold check starts its server with the exported file, on a stand-in for vLLM."""

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from live_study import ROOT, command, environment, own_server, write_study

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed, and its command is what is stood in for"
)


def test_the_cold_server_gets_the_exported_file_and_only_what_that_cannot_hold_beside(tmp_path: Path) -> None:
    flags = ["--dtype", "float32", "--max-model-len", "8192", "-O3", "--api-key", "s3cret"]
    path = write_study(tmp_path, {**own_server(tmp_path), "cold_check": True, "flags": flags}, stop_at_noise_pct=None)
    done = subprocess.run(
        command(path, "--run", str(tmp_path / "run")),
        cwd=ROOT, env=environment(COLUMNS="200"), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    export, used = tmp_path / "run/export/vllm.yaml", tmp_path / "run/servers/exported.yaml"
    exported = yaml.safe_load(export.read_text())
    assert exported == yaml.safe_load(used.read_text())
    assert (exported["dtype"], exported["max-model-len"]) == ("float32", 8192)
    started = (tmp_path / "run/servers/cold-1.log").read_text().splitlines()[0]
    assert f"--config {used} -O3 --api-key s3cret --enable-prompt-tokens-details" in started
    assert "--dtype" not in started
    assert f"ppas serve tiny --config {export} -O3" in " ".join(done.stdout.split()), "the command to copy"
    assert "--api-key" in done.stdout
    assert "s3cret" not in done.stdout
