"""An exported setting as containers: Docker Compose, Kubernetes, and values for the Helm chart of vLLM's production stack.

Each file starts `vllm serve` with the study's own server flags and the exported setting. A P-PAS setting needs an image
with ppas-autotune in it, which the exported Dockerfile builds from vLLM's official one; a static budget runs on the
official image as it is. What the study does not know (model of a folder, vLLM version, the built image's name) is a
placeholder that stops the tool with a message, never a guess.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from autotune.export.common import SCHEDULER_CLASS, header, one_line
from autotune.export.patches import server_flags
from autotune.results import StudyResults
from ppas_core.policy import PolicyParams

OFFICIAL_IMAGE: Final = "vllm/vllm-openai"
CHANGE_ME: Final = "CHANGE-ME"
"""Stands where the study does not know a name; no registry and no model hub has it."""
_PORT: Final = 8000
_CONFIG_AT: Final = "/etc/ppas/vllm.yaml"
_GPUS_FLAG: Final = ("--tensor-parallel-size", "-tp")
_SECRET_FLAGS: Final = ("--api-key", "--ssl-keyfile-password", "--hf-token")
_MODEL_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_RELEASE: Final = re.compile(r"\d+\.\d+\.\d+(\.post\d+|rc\d+)?")


@dataclass(frozen=True, slots=True)
class Deployment:
    """What a container needs to know beside the setting.

    model: a model hub's name, None where the study used a folder. version: vLLM's release, None where the study does
    not know it. flags: the server flags of the study, without secrets. dropped: flags left out, by name.
    gpus: as the flags ask for.
    """

    model: str | None
    version: str | None
    flags: tuple[str, ...]
    dropped: tuple[str, ...]
    gpus: int

    @classmethod
    def of(cls, results: StudyResults) -> Deployment:
        """What `results` say in their provenance."""
        measured = results.provenance.get("measured_on") or {}
        study = results.provenance.get("study") or {}
        facts, server = measured.get("server") or {}, study.get("server") or {}
        model = str(measured.get("model") or facts.get("model") or "")
        if not _MODEL_ID.fullmatch(model) or server.get("model", model) != model or Path(model).is_dir():
            model = ""  # a folder: no other machine has it under that name
        version = str(facts.get("vllm_version") or measured.get("vllm_version") or "").split("+", 1)[0]
        flags, dropped = _without_secrets([str(flag) for flag in server.get("flags") or ()])
        return cls(
            model=model or None,
            version=version if _RELEASE.fullmatch(version) else None,
            flags=flags,
            dropped=dropped,
            gpus=_gpus(flags),
        )


def compose(params: PolicyParams, deployment: Deployment, origin: Iterable[str]) -> str:
    """`compose.yaml`: one server beside `vllm.yaml`, which it mounts."""
    version = _version_variable(deployment)
    service: dict[str, Any] = {}
    if params.is_static:
        service["image"] = f"{OFFICIAL_IMAGE}:v{version}"
    else:
        service["image"] = "vllm-openai-ppas:local"
        service["build"] = {"context": ".", "args": {"VLLM_VERSION": version}}
    model = deployment.model
    service |= {
        "entrypoint": ["vllm", "serve"],
        "command": [
            f"${{MODEL:-{model}}}" if model else "${MODEL:?name the model}",
            "--config",
            _CONFIG_AT,
            *_escaped(deployment.flags),
        ],
        "environment": ["HF_TOKEN"],
        "ports": [f"127.0.0.1:{_PORT}:{_PORT}"],
        "ipc": "host",
        "volumes": [
            {"type": "bind", "source": "./vllm.yaml", "target": _CONFIG_AT, "read_only": True},
            {"type": "volume", "source": "models", "target": "/root/.cache/huggingface"},
        ],
        "deploy": {
            "resources": {
                "reservations": {
                    "devices": [{"driver": "nvidia", "count": deployment.gpus, "capabilities": ["gpu"]}],
                }
            }
        },
        "healthcheck": {
            "test": [
                "CMD",
                "python3",
                "-c",
                f"import urllib.request as r; r.urlopen('http://127.0.0.1:{_PORT}/health')",
            ],
            "interval": "10s",
            "start_period": "15m",
        },
        "restart": "unless-stopped",
    }
    lines = [*origin, "Use, beside vllm.yaml: docker compose up", *_image_lines(params), *_notes(deployment)]
    body = {"services": {"vllm": service}, "volumes": {"models": {}}}
    return header(lines, params) + _yaml(body)


def dockerfile(params: PolicyParams, deployment: Deployment, origin: Iterable[str]) -> str | None:
    """`Dockerfile`: vLLM's official image with ppas-autotune in it; None for a static budget, which needs none."""
    if params.is_static:
        return None
    default = f"={deployment.version}" if deployment.version else ""
    lines = [
        *origin,
        "First put the wheel of ppas-autotune beside this file: pip wheel --no-deps --wheel-dir . PATH-TO-PPAS-AUTOTUNE",
        "It brings no package with it; vLLM's stay as they are.",
    ]
    if not deployment.version:
        lines.append("The study does not know vLLM's version: docker build --build-arg VLLM_VERSION=…")
    return header(lines, params) + (
        f"ARG VLLM_VERSION{default}\n"
        f"FROM {OFFICIAL_IMAGE}:v${{VLLM_VERSION}}\n"
        "COPY ppas_autotune-*.whl /tmp/\n"
        "RUN uv pip install --system --no-deps /tmp/ppas_autotune-*.whl && rm /tmp/ppas_autotune-*.whl\n"
    )


def kubernetes(params: PolicyParams, deployment: Deployment, origin: Iterable[str], vllm_yaml: str) -> str:
    """`kubernetes.yaml`: `vllm.yaml` as a ConfigMap, a Deployment that mounts it, and a Service."""
    labels = {"app.kubernetes.io/name": "vllm-ppas"}
    repository, tag = _image(params, deployment)
    model = deployment.model or CHANGE_ME
    health = {"path": "/health", "port": "http"}
    container = {
        "name": "vllm",
        "image": f"{repository}:{tag}",
        "command": ["vllm", "serve"],
        "args": [model, "--config", _CONFIG_AT, *deployment.flags],
        "ports": [{"name": "http", "containerPort": _PORT}],
        "resources": {"limits": {"nvidia.com/gpu": str(deployment.gpus)}},
        "startupProbe": {"httpGet": health, "periodSeconds": 10, "failureThreshold": 180},
        "readinessProbe": {"httpGet": health, "periodSeconds": 5},
        "livenessProbe": {"httpGet": health, "periodSeconds": 10, "failureThreshold": 3},
        "volumeMounts": [
            {"name": "settings", "mountPath": "/etc/ppas", "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - where vLLM's processes talk to each other
        ],
    }
    pod = {
        "enableServiceLinks": False,  # their variables begin with VLLM_, which vLLM takes for its own
        "containers": [container],
        "volumes": [
            {"name": "settings", "configMap": {"name": "vllm-ppas"}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    parts: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "vllm-ppas", "labels": labels},
            "data": {"vllm.yaml": vllm_yaml},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "vllm-ppas", "labels": labels},
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "vllm-ppas", "labels": labels},
            "spec": {"selector": labels, "ports": [{"name": "http", "port": _PORT, "targetPort": "http"}]},
        },
    ]
    lines = [
        *origin,
        "Use: kubectl apply -f kubernetes.yaml",
        *_image_lines(params),
        *_change_lines(params, deployment),
        "A model that is not public needs its token: add it to the container as an environment variable from a Secret.",
        *_notes(deployment),
    ]
    return header(lines, params) + "---\n".join(_yaml(part) for part in parts)


def helm_values(params: PolicyParams, deployment: Deployment, origin: Iterable[str]) -> str:
    """`helm-values.yaml` for the chart of the vLLM production stack."""
    repository, tag = _image(params, deployment)
    flags, prefix_caching = _without_prefix_caching(deployment.flags)
    budget, seqs = server_flags(params)[1::2]
    arguments = [*flags, "--max-num-batched-tokens", budget]
    if not params.is_static:
        settings = json.dumps({"ppas": params.to_dict()}, separators=(",", ":"))
        arguments += ["--scheduler-cls", SCHEDULER_CLASS, "--additional-config", settings]
    model = {
        "name": "ppas",
        "repository": repository,
        "tag": tag,
        "modelURL": deployment.model or CHANGE_ME,
        "replicaCount": 1,
        "requestCPU": 4,
        "requestMemory": "16Gi",
        "requestGPU": deployment.gpus,
        "vllmConfig": {
            "enablePrefixCaching": prefix_caching,  # the chart switches it off where this key is missing
            "maxNumSeqs": int(seqs),
            "extraArgs": arguments,
        },
    }
    lines = [
        *origin,
        "Use: helm repo add vllm https://vllm-project.github.io/production-stack",
        "     helm install vllm vllm/vllm-stack -f helm-values.yaml",
        "requestCPU and requestMemory are no measurement: set them to what your nodes have and the model needs.",
        *_image_lines(params),
        *_change_lines(params, deployment),
        *_notes(deployment),
    ]
    return header(lines, params) + _yaml({"servingEngineSpec": {"modelSpec": [model]}})


def _image(params: PolicyParams, deployment: Deployment) -> tuple[str, str]:
    """Repository and tag; a placeholder where only the user can know."""
    tag = f"v{deployment.version}" if deployment.version else CHANGE_ME
    return (OFFICIAL_IMAGE if params.is_static else f"{CHANGE_ME}/vllm-openai-ppas"), tag


def _image_lines(params: PolicyParams) -> list[str]:
    if params.is_static:
        return ["A static budget needs nothing of ours: vLLM's official image as it is."]
    return ["The image is vLLM's official one with ppas-autotune in it; the Dockerfile beside this file builds it."]


def _change_lines(params: PolicyParams, deployment: Deployment) -> list[str]:
    unknown = [
        *([] if params.is_static else ["the registry that you pushed the built image to"]),
        *([] if deployment.version else ["vLLM's version, which the study does not know"]),
        *([] if deployment.model else ["the model, which the study read from a folder"]),
    ]
    return [f"Replace {CHANGE_ME}: {'; '.join(unknown)}."] if unknown else []


def _notes(deployment: Deployment) -> list[str]:
    return [f"Left out, since a file is no place for a secret: {one_line(name)}." for name in deployment.dropped]


def _version_variable(deployment: Deployment) -> str:
    if deployment.version:
        return f"${{VLLM_VERSION:-{deployment.version}}}"
    return "${VLLM_VERSION:?the vLLM release to run, such as 0.27.1}"


def _escaped(flags: Iterable[str]) -> list[str]:
    """Compose replaces variables in every text; a doubled dollar is a dollar."""
    return [flag.replace("$", "$$") for flag in flags]


def _without_secrets(flags: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    kept: list[str] = []
    dropped: list[str] = []
    skip = False
    for flag in flags:
        name = flag.split("=", 1)[0]
        if name in _SECRET_FLAGS:
            dropped.append(name)
            skip = "=" not in flag
        elif skip and not flag.startswith("-"):
            skip = False
        else:
            skip = False
            kept.append(flag)
    return tuple(kept), tuple(dropped)


def _without_prefix_caching(flags: tuple[str, ...]) -> tuple[list[str], bool]:
    """The flags that are left, and whether prefix caching is on; vLLM's own default is on."""
    on = True
    kept = []
    for flag in flags:
        if flag in ("--enable-prefix-caching", "--no-enable-prefix-caching"):
            on = flag == "--enable-prefix-caching"
        else:
            kept.append(flag)
    return kept, on


def _gpus(flags: tuple[str, ...]) -> int:
    words = [word for flag in flags for word in flag.split("=", 1)]
    for name, value in itertools.pairwise(words):
        if name in _GPUS_FLAG and value.isdigit() and int(value) > 0:
            return int(value)
    return 1


def _yaml(body: dict[str, Any]) -> str:
    text: str = yaml.dump(body, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=120)
    return text


class _Plain(yaml.SafeDumper):
    """Writes a text of several lines as a block, and no anchors: what repeats is written again."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _block)
