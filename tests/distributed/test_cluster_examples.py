"""The examples for clusters are what Slurm's shell and Kubernetes take."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import kubernetes_validate
import yaml

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"


def test_the_kubernetes_example_passes_its_schemas_and_takes_the_storage_from_a_secret() -> None:
    resources = list(yaml.safe_load_all((CLUSTER / "kubernetes-workers.yaml").read_text()))
    for resource in resources:
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)
        (container,) = resource["spec"]["template"]["spec"]["containers"]
        assert container["env"][0]["name"] == "PPAS_STORAGE"
        assert "secretKeyRef" in container["env"][0]["valueFrom"]
    assert [resource["spec"]["template"]["spec"]["containers"][0]["command"][1] for resource in resources] == [
        "worker",
        "tune",
    ]


def test_the_slurm_example_is_a_script_and_names_no_storage_on_a_command_line() -> None:
    script = CLUSTER / "slurm-worker.sh"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
    commands = [line for line in script.read_text().splitlines() if "ppas worker" in line or "ppas tune" in line]
    assert len(commands) == 3
    assert not any("--storage" in line for line in commands)


def test_the_shell_of_the_first_slurm_node_waits_at_sigterm_until_trials_are_given_back(tmp_path: Path) -> None:
    """With stand-ins for srun and for ppas, which takes a second to end: the shell's own behaviour is what is asked."""
    for name, text in {
        "srun": 'shift; export SLURM_NODEID=0; exec "$@"',
        "ppas": f'trap "sleep 1; echo $1 >>{tmp_path}/gave_back; exit 130" TERM; touch {tmp_path}/up.$1; '
        "for i in $(seq 200); do sleep 0.1; done",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = subprocess.Popen(
        ["bash", str(CLUSTER / "slurm-worker.sh"), "study.yaml"], start_new_session=True,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PPAS_STORAGE": "postgresql://db/x"},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 30
        while not all((tmp_path / f"up.{name}").exists() for name in ("worker", "tune")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        # To every process of the step, as Slurm does; the batch shell itself gets none.
        shell = int(subprocess.check_output(["pgrep", "-P", str(job.pid)], text=True).split()[0])
        for child in subprocess.check_output(["pgrep", "-P", str(shell)], text=True).split():
            os.kill(int(child), signal.SIGTERM)
        os.kill(shell, signal.SIGTERM)
        assert job.wait(timeout=30) == 130
        assert sorted((tmp_path / "gave_back").read_text().split()) == ["tune", "worker"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
