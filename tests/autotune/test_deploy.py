"""Exports for containers and for vLLM's own tools: what their consumers, or the official schemas, make of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from pydantic import BaseModel, ConfigDict
from test_export import GUARDED, PLUS, PPAS, STATIC, TUNED, results_of

from autotune.export import SCHEDULER_CLASS, load_export, write_export
from autotune.export.deploy import CHANGE_ME
from autotune.results import HeldOut, HeldOutRequests, Setting, StudyResults
from ppas_core.policy import PolicyParams

SIMULATED = {"measured_on": {"backend": "simulator", "model": "Qwen/Qwen2.5-3B-Instruct", "vllm_version": "0.22.1"}}
LIVE = {
    "measured_on": {
        "backend": "vllm",
        "model": "Qwen/Qwen2.5-3B-Instruct",
        "server": {"vllm_version": "0.27.1+cpu", "model": "Qwen/Qwen2.5-3B-Instruct"},
    },
    "study": {
        "server": {
            "model": "Qwen/Qwen2.5-3B-Instruct",
            "flags": [
                "--tensor-parallel-size", "2", "--api-key", "s3cret-1", "--max-model-len=32768", "--no-enable-prefix-caching",
                "--api-key=s3cret-2", "--chat-template", "{{ $x }}",
            ],
        }
    },
}  # fmt: skip
UNKNOWN: dict[str, Any] = {"measured_on": {"backend": "vllm", "model": "/models/mine"}}
PROVENANCES = {"simulated": SIMULATED, "live": LIVE, "unknown": UNKNOWN}
SETTINGS = [PPAS, PLUS, TUNED, GUARDED, STATIC]


@pytest.fixture(params=[(name, params) for name in PROVENANCES for params in SETTINGS], ids=str)
def exported(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, PolicyParams, str]:
    """The folder of an export, its setting, and what was known of the server."""
    name, params = request.param
    write_export(results_of(params, provenance=PROVENANCES[name]), tmp_path / "export")
    return tmp_path / "export", params, name


def test_compose_passes_the_schema_of_the_compose_specification(exported: tuple[Path, PolicyParams, str]) -> None:
    folder, params, known = exported
    tool = Path(sys.executable).with_name("check-jsonschema")
    done = subprocess.run(
        [tool, "--builtin-schema", "vendor.compose-spec", folder / "compose.yaml"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    service = yaml.safe_load((folder / "compose.yaml").read_text())["services"]["vllm"]
    mount = service["volumes"][0]
    assert mount["target"] in service["command"]
    assert load_export(folder / mount["source"]) == params, "the server reads the exported settings themselves"
    assert ("build" in service) is (not params.is_static)
    assert (folder / "Dockerfile").exists() is (not params.is_static)
    image = json.dumps(service)
    version = {"simulated": ":-0.22.1}", "live": ":-0.27.1}", "unknown": ":?the vLLM release"}[known]
    assert f"${{VLLM_VERSION{version}" in image
    model = "${MODEL:?name the model}" if known == "unknown" else "${MODEL:-Qwen/Qwen2.5-3B-Instruct}"
    assert service["command"][0] == model
    devices = service["deploy"]["resources"]["reservations"]["devices"]
    assert devices[0]["count"] == (2 if known == "live" else 1)


def test_a_compose_file_that_is_wrong_does_not_pass(tmp_path: Path) -> None:
    write_export(results_of(TUNED), tmp_path)
    file = tmp_path / "compose.yaml"
    file.write_text(file.read_text().replace("healthcheck:", "healthchek:"))
    tool = Path(sys.executable).with_name("check-jsonschema")
    done = subprocess.run([tool, "--builtin-schema", "vendor.compose-spec", file], capture_output=True, check=False)
    assert done.returncode == 1


def test_kubernetes_passes_its_own_schemas_and_the_pieces_belong_together(
    exported: tuple[Path, PolicyParams, str], tmp_path: Path
) -> None:
    folder, params, known = exported
    text = (folder / "kubernetes.yaml").read_text()
    config, deployment, service = yaml.safe_load_all(text)
    for resource in (config, deployment, service):
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)
    pod = deployment["spec"]["template"]
    container = pod["spec"]["containers"][0]
    mounted = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    mount = next(m for m in container["volumeMounts"] if m["name"] == "settings")
    assert mounted["settings"]["configMap"]["name"] == config["metadata"]["name"]
    path = container["args"][container["args"].index("--config") + 1]
    assert Path(path).parent == Path(mount["mountPath"])
    copied = tmp_path / Path(path).name
    copied.write_text(config["data"][Path(path).name])
    assert load_export(copied) == params
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert deployment["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == ("2" if known == "live" else "1")
    complete = params.is_static and known != "unknown"
    assert (CHANGE_ME in yaml.safe_dump(deployment)) is not complete
    assert (f"Replace {CHANGE_ME}: " in text) is not complete, "what has to be replaced is said"


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class VllmConfig(Strict):
    enablePrefixCaching: bool  # noqa: N815 - the chart's names, from its documentation
    maxNumSeqs: int  # noqa: N815
    extraArgs: list[str]  # noqa: N815


class ModelSpec(Strict):
    """The keys of servingEngineSpec.modelSpec[] that the export uses, as the production stack documents them."""

    name: str
    repository: str
    tag: str
    modelURL: str  # noqa: N815
    replicaCount: int  # noqa: N815
    requestCPU: int  # noqa: N815
    requestMemory: str  # noqa: N815
    requestGPU: int  # noqa: N815
    vllmConfig: VllmConfig  # noqa: N815


class ServingEngineSpec(Strict):
    modelSpec: list[ModelSpec]  # noqa: N815


class HelmValues(Strict):
    servingEngineSpec: ServingEngineSpec  # noqa: N815


def test_helm_values_have_the_keys_of_the_production_stack_and_start_the_setting(
    exported: tuple[Path, PolicyParams, str],
) -> None:
    folder, params, known = exported
    values = HelmValues.model_validate(yaml.safe_load((folder / "helm-values.yaml").read_text()))
    (model,) = values.servingEngineSpec.modelSpec
    arguments = model.vllmConfig.extraArgs
    assert model.vllmConfig.maxNumSeqs == params.max_num_seqs
    assert arguments[arguments.index("--max-num-batched-tokens") + 1] == str(params.b_max)
    assert model.vllmConfig.enablePrefixCaching is (known != "live"), "as measured; the chart's own default is off"
    assert not any("prefix-caching" in word for word in arguments)
    if params.is_static:
        assert "--scheduler-cls" not in arguments
        assert model.repository == "vllm/vllm-openai"
    else:
        assert arguments[arguments.index("--scheduler-cls") + 1] == SCHEDULER_CLASS
        settings = json.loads(arguments[arguments.index("--additional-config") + 1])
        assert PolicyParams.from_dict(settings["ppas"]) == params
        assert model.repository.startswith(f"{CHANGE_ME}/"), "only the user knows where he pushed the built image"
    assert model.tag == {"simulated": "v0.22.1", "live": "v0.27.1", "unknown": CHANGE_ME}[known]


def test_no_secret_of_the_servers_flags_reaches_a_file_and_the_gap_is_said(tmp_path: Path) -> None:
    for file in write_export(results_of(TUNED, provenance=LIVE), tmp_path):
        assert "s3cret" not in file.read_text()
    for name in ("compose.yaml", "kubernetes.yaml", "helm-values.yaml"):
        text = (tmp_path / name).read_text()
        assert "Left out, since a file is no place for a secret: --api-key." in text
        assert "max-model-len" in (text if name != "compose.yaml" else (tmp_path / "vllm.yaml").read_text())
    assert "{{ $$x }}" in (tmp_path / "helm-values.yaml").read_text(), "a dollar is a dollar"


def test_a_static_export_over_another_one_leaves_no_dockerfile_behind(tmp_path: Path) -> None:
    write_export(results_of(TUNED), tmp_path)
    assert (tmp_path / "Dockerfile").exists()
    files = write_export(results_of(STATIC), tmp_path)
    assert sorted(files) == sorted(tmp_path.iterdir())


def test_hostile_names_stay_comments(tmp_path: Path) -> None:
    results = results_of(TUNED, name="x\nservices: {evil: {}}\r\u2028FROM evil", provenance=SIMULATED)
    write_export(results, tmp_path)
    assert set(yaml.safe_load((tmp_path / "compose.yaml").read_text())["services"]) == {"vllm"}
    lines = (tmp_path / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("FROM")] == ["FROM vllm/vllm-openai:v${VLLM_VERSION}"]


def held(role: str, params: PolicyParams, latency_s: float) -> HeldOut:
    requests = HeldOutRequests(
        trace=["t"] * 100, regime=["1.0"] * 100, latency_s=[latency_s + i / 100 for i in range(100)],
        ttft_s=[0.1] * 100, tpot_s=[0.01] * 100, prompt_tokens=[10] * 100, output_tokens=[5] * 100,
    )  # fmt: skip
    return HeldOut(
        role=role, setting=Setting.of(params), regimes={"1.0": {"makespan_s": 50.0}}, regime_spread={},
        branch_steps={}, requests=requests,
    )  # fmt: skip


def compared() -> StudyResults:
    other = PolicyParams.static(4096, max_num_seqs=64)
    roles = [held("tuned", TUNED, 1.0), held("paper default", PPAS, 2.0), held("best static", STATIC, 3.0)]
    return results_of(TUNED, held_out=[*roles, held(other.label(), other, 4.0)])


def test_auto_tune_lines_have_the_shape_that_vllms_script_writes(tmp_path: Path) -> None:
    write_export(compared(), tmp_path)
    head, *lines, best = (tmp_path / "auto_tune.txt").read_text().splitlines()
    assert head == "hash:ppas-autotune, simulated"
    assert best == "best_max_num_seqs: 64, best_num_batched_tokens: 2048, best_throughput: 2"
    pattern = (
        r"max_num_seqs: (\d+), max_num_batched_tokens: (\d+), request_rate: ([\d.]+), e2el: ([\d.]+), "
        r"throughput: ([\d.]+), goodput: ([\d.]+)"
    )
    found = [re.fullmatch(pattern, line) for line in lines]
    assert [match and match.groups() for match in found] == [
        ("64", "2048", "0.44", "3980.10", "2", "2"),
        ("64", "4096", "0.44", "4980.10", "2", "2"),
    ]


@pytest.mark.live
def test_vllms_own_sweep_reads_its_file_and_the_servers_parser_takes_that_and_the_helm_values(tmp_path: Path) -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    write_export(compared(), tmp_path)
    # In its own process: importing vLLM changes logging and the environment.
    script = (
        "import json, sys\n"
        "from vllm.benchmarks.sweep.param_sweep import ParameterSweep\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser\n"
        "parser = Parser()\n"
        "for name in ('max-num-batched-tokens', 'max-num-seqs'): parser.add_argument('--' + name, type=int)\n"
        "parser.add_argument('--scheduler-cls'); parser.add_argument('--additional-config', type=json.loads)\n"
        "for item in ParameterSweep.read_json(sys.argv[1]):\n"
        "    print(json.dumps([item.name, vars(parser.parse_args(item.apply_to_cmd([])))]))\n"
        "print(json.dumps(['helm', vars(parser.parse_args(sys.argv[2:]))]))\n"
    )
    values = yaml.safe_load((tmp_path / "helm-values.yaml").read_text())["servingEngineSpec"]["modelSpec"][0][
        "vllmConfig"
    ]
    arguments = ["--max-num-seqs", str(values["maxNumSeqs"]), *values["extraArgs"]]
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "vllm-sweep.json", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert list(found) == ["exported", "paper-default", "best-static", "helm"]
    assert found["helm"] == found["exported"]
    for name, params in (("exported", TUNED), ("paper-default", PPAS), ("best-static", STATIC)):
        assert found[name]["max_num_batched_tokens"] == params.b_max
        assert found[name]["max_num_seqs"] == params.max_num_seqs
        assert found[name]["additional_config"] == (None if params.is_static else {"ppas": params.to_dict()})
