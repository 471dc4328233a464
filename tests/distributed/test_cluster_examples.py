"""The examples for clusters are what Slurm's shell and Kubernetes take."""

import subprocess
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
