"""The file in an export that names the others, and the command that each is for."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from autotune.export.caveats import caveats, request
from autotune.export.common import one_line
from autotune.export.deploy import Deployment, unsure_model
from autotune.results import StudyResults

INDEX_FILE: Final = "README.md"
_USES: Final = {
    "vllm.yaml": ("the setting, and the flags of the server that was measured, for vLLM", "the one above"),
    "ppas.env": (
        "the setting as environment variables, for vLLM with ppas-autotune installed beside it",
        "`set -a; . ./ppas.env; set +a`, then `vllm serve MODEL` with the flags that the file names",
    ),
    "vllm-0.22.1.env": ("the same for the published patch of vLLM 0.22.1", "as for `ppas.env`"),
    "vllm-0.27.1.env": ("the same for the published patch of vLLM 0.27.1", "as for `ppas.env`"),
    "settings.json": (
        "the setting with its provenance and the other files' digests, for programs",
        "`ppas verify .`; or in place of a setting's name: `ppas compare settings.json ppas`",
    ),
    "compose.yaml": ("one server, for Docker Compose", "`docker compose up`"),
    "Dockerfile": ("vLLM's official image with ppas-autotune in it", "`docker build .`; `docker compose up` does that"),
    "kubernetes.yaml": ("one server, for Kubernetes", "`kubectl apply -f kubernetes.yaml`"),
    "helm-values.yaml": (
        "values for the Helm chart of the vLLM production stack",
        "`helm install vllm vllm/vllm-stack -f helm-values.yaml`",
    ),
    "vllm-sweep.json": ("settings for vLLM's own sweep", "`vllm bench sweep serve --serve-params vllm-sweep.json`"),
    "auto_tune.txt": ("the static budgets, as vLLM's `auto_tune.sh` writes its result", "none"),
}


def serve_lines(results: StudyResults, config: Path) -> list[str]:
    """The command that serves with the export `config`, to copy here; what has to be added to it: a secret, a model; and
    what such a server cannot do.
    """
    deployment = Deployment.of(results)
    is_here = os.path.isdir(deployment.named)
    lines = [_serve(str(config), deployment, deployment.named if is_here else _model(deployment))]
    if deployment.dropped:
        lines.append(f"add {', '.join(one_line(name) for name in deployment.dropped)}: no file holds a secret")
    if not deployment.named:
        lines.append("MODEL is yours to name: the study names none")
    elif not is_here and _is_elsewhere(deployment):
        lines.append(_where_model_is(deployment))
    return [*lines, *caveats(deployment.flags)]


def index(names: Iterable[str], deployment: Deployment, origin: Iterable[str], verdict: Iterable[str]) -> str:
    """`README.md`: what was found of the setting, what each of the files `names` is, and the command that takes it."""
    found = "".join(f"    {line}\n" for line in verdict)
    quoted = [*origin, "To serve with it, in this folder:", ""]
    quoted.append(f"  {_serve('vllm.yaml', deployment, _model(deployment))}")
    notes = [_where_model_is(deployment)] if _is_elsewhere(deployment) else []
    if not deployment.is_sure:
        notes.append(unsure_model(deployment))
    if notes := [*notes, *server_lines(deployment)]:
        quoted += ["", *notes]
    quoted += ["", "To ask it, once it is up:", "", f"  {request(deployment.flags, deployment.dropped)}"]
    rows = [(name, *_USES[name]) for name in names]
    lines = [
        "# An exported setting",
        "",
        *(f"    {line}".rstrip() for line in quoted),  # as it is: no word of a user is read as Markdown
        "",
        "## What the study found",
        "",
        found,
        "## The files",
        "",
        "| file | what it is | command, in this folder |",
        "|---|---|---|",
        *(f"| `{name}` | {what} | {command} |" for name, what, command in rows),
        "",
        "The comments at the head of each file say what it needs.",
    ]
    return "".join(f"{line}\n" for line in lines)


def server_lines(deployment: Deployment) -> list[str]:
    """What a reader of `vllm.yaml` must know of the measured server's flags."""
    if deployment.server == "joined":
        return [
            "The study measured a server that somebody else started, whose flags it does not know: only the setting "
            "stands in vllm.yaml. Start yours with the flags that that one had."
        ]
    if deployment.server == "none":
        return ["No server was measured, so vllm.yaml has no flags but the setting's: add what your model needs."]
    lines = ["The server's flags are those of the study. Flags on the command line win."]
    if deployment.beside:
        lines.append(
            f"A config file cannot say these, so they stand in the command: {one_line(shlex.join(deployment.beside))}"
        )
    if deployment.dropped:
        names = ", ".join(one_line(name) for name in deployment.dropped)
        lines.append(f"Left out, since a file is no place for a secret: {names}. Add it to the command.")
    if deployment.environment:
        names = ", ".join(one_line(name) for name in deployment.environment)
        lines.append(f"The measured server was given these environment variables, whose values no file has: {names}")
    return [*lines, *caveats(deployment.flags)]


def _serve(config: str, deployment: Deployment, model: str) -> str:
    return one_line(shlex.join(["ppas", "serve", model, "--config", config, *deployment.beside]))


def _model(deployment: Deployment) -> str:
    """What stands for the model in a command that is typed anywhere."""
    return "MODEL" if not deployment.named or _is_elsewhere(deployment) else deployment.named


def _is_elsewhere(deployment: Deployment) -> bool:
    """Whether the model was a folder that the study named from where it ran."""
    return bool(deployment.named) and deployment.model is None and not os.path.isabs(deployment.named)


def _where_model_is(deployment: Deployment) -> str:
    return f"MODEL is the path of the model's folder: {one_line(deployment.named)}, seen from the folder where the study ran."
