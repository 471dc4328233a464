"""An exported setting as containers: Docker Compose, Kubernetes, and values for the Helm chart of vLLM's production stack.

Each file starts `vllm serve` with the study's own server flags and the exported setting, as `vllm.yaml` says them. A
P-PAS setting needs an image with ppas-autotune in it, which the exported Dockerfile builds from vLLM's official one; a
static budget runs on the official image as it is. What the study does not know (model of a folder, vLLM version, the
built image's name) is a placeholder that stops the tool with a message, never a guess. Every word of a user comes out of
its reader as it was given: quoted where some reader of YAML would take it for a number or a switch, and with its dollars
doubled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from autotune.export.caveats import caveats
from autotune.export.common import SCHEDULER_CLASS, header, one_line
from autotune.export.config_file import placed
from autotune.export.flags import gpus, without_prefix_caching, without_secrets
from autotune.export.patches import server_flags
from autotune.export.yaml_text import yaml_text
from autotune.results import StudyResults
from ppas_core.policy import PolicyParams

OFFICIAL_IMAGE: Final = "vllm/vllm-openai"
CHANGE_ME: Final = "CHANGE-ME"
"""Stands where the study does not know a name; no registry and no model hub has it."""
_PORT: Final = 8000
_CONFIG_AT: Final = "/etc/ppas/vllm.yaml"
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
_BUCKET: Final = re.compile(r"(s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._/-]*")
_RELEASE: Final = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+(\.post[0-9]+|rc[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Deployment:
    """What a container needs to know beside the setting.

    model: a name that another machine may have, None where the study used a folder, or does not say. is_sure: false
    where it may as well be a folder: a path beside the study file looks like a model hub's name, and studies of earlier
    versions record no more than that. named: what the study calls its model, "" where it names none. version: vLLM's
    release, None where the study does not know it. flags: the server flags of the study, without secrets. beside: those
    of them that `vllm.yaml` cannot say. dropped: flags left out, by name. environment: names of the variables that the
    measured server was given. server: whether the tuner started it, joined one (whose flags nobody knows), or measured
    none. gpus: as the flags ask for.
    """

    model: str | None
    is_sure: bool
    named: str
    version: str | None
    flags: tuple[str, ...]
    beside: tuple[str, ...]
    dropped: tuple[str, ...]
    environment: tuple[str, ...]
    server: Literal["started", "joined", "none"]
    gpus: int

    @classmethod
    def of(cls, results: StudyResults) -> Deployment:
        """What `results` say in their provenance."""
        measured, study = (_mapping(results.provenance, name) for name in ("measured_on", "study"))
        facts, server = _mapping(measured, "server"), _mapping(study, "server")
        named = str(measured.get("model") or facts.get("model") or "")
        is_bucket, recorded = _BUCKET.fullmatch(named) is not None, measured.get("model_is_folder")
        # A folder beside the study file is measured under another path than the study file says.
        is_name = (is_bucket or _HUB_NAME.fullmatch(named) is not None) and server.get("model", named) == named
        is_name = is_name and recorded is not True
        version = str(facts.get("vllm_version") or measured.get("vllm_version") or "").split("+", 1)[0]
        words = server.get("flags")
        flags, dropped = without_secrets(str(word) for word in words) if isinstance(words, list | tuple) else ((), ())
        variables = measured.get("environment")
        return cls(
            model=named if is_name else None,
            is_sure=is_bucket or not is_name or recorded is False,
            named=named,
            version=version if _RELEASE.fullmatch(version) else None,
            flags=flags,
            beside=placed(flags).words_beside(),
            dropped=dropped,
            environment=tuple(str(name) for name in variables) if isinstance(variables, list | tuple) else (),
            server="none" if not server else "joined" if server.get("url") else "started",
            gpus=gpus(flags),
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
            *_escaped(deployment.beside),
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
    lines = [*origin, "Use, beside vllm.yaml: docker compose up", *_image_lines(params)]
    if deployment.named and not model:
        lines.append(
            "The study read its model from a folder: set MODEL to a name, or mount the folder and set its path there."
        )
    lines += _notes(deployment)
    body = {"services": {"vllm": service}, "volumes": {"models": {}}}
    return header(lines, params) + yaml_text(body)


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
        "args": [model, "--config", _CONFIG_AT, *_escaped(deployment.beside)],
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
    return header(lines, params) + "---\n".join(yaml_text(part) for part in parts)


def helm_values(params: PolicyParams, deployment: Deployment, origin: Iterable[str]) -> str:
    """`helm-values.yaml` for the chart of the vLLM production stack."""
    repository, tag = _image(params, deployment)
    flags, prefix_caching = without_prefix_caching(deployment.flags)
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
            "extraArgs": _escaped(arguments),
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
    return header(lines, params) + yaml_text({"servingEngineSpec": {"modelSpec": [model]}})


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
        *([] if deployment.model else [f"the model, which the study {_why_no_model(deployment)}"]),
    ]
    return [f"Replace {CHANGE_ME}: {'; '.join(unknown)}."] if unknown else []


def _why_no_model(deployment: Deployment) -> str:
    return "read from a folder" if deployment.named else "does not name"


def _notes(deployment: Deployment) -> list[str]:
    notes = [f"Left out, since a file is no place for a secret: {one_line(name)}." for name in deployment.dropped]
    notes += [] if deployment.is_sure else [unsure_model(deployment)]
    return [*notes, *caveats(deployment.flags)]


def unsure_model(deployment: Deployment) -> str:
    """What is to be said of a model that is not `is_sure`."""
    return (
        f"The study calls its model {deployment.model}: a name, or a folder of that name where it ran; it does not "
        "record which."
    )


def _version_variable(deployment: Deployment) -> str:
    if deployment.version:
        return f"${{VLLM_VERSION:-{deployment.version}}}"
    return "${VLLM_VERSION:?the vLLM release to run, such as 0.27.1}"


def _escaped(words: Iterable[str]) -> list[str]:
    """Compose replaces variables in every text, Kubernetes in commands; in both a doubled dollar is a dollar."""
    return [word.replace("$", "$$") for word in words]


def _mapping(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """What stands under `key`, where it is an object; else an empty one."""
    found = parent.get(key)
    return found if isinstance(found, Mapping) else {}
