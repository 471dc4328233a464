"""Writing an export: one setting as files for vLLM with our scheduler, for the published patched servers, and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from autotune.export.caveats import caveats
from autotune.export.common import (
    KIND,
    SAFE_VALUE,
    SIGNATURE_FILE,
    VERSION,
    header,
    one_line,
    settings_digest,
    sha256,
)
from autotune.export.config_file import vllm_config_text
from autotune.export.deploy import Deployment, compose, dockerfile, helm_values, kubernetes
from autotune.export.flags import scrubbed
from autotune.export.index import INDEX_FILE, index, server_lines
from autotune.export.measured_cost import MeasuredCost, acting, measured_cost, preferred_label
from autotune.export.patches import GENERATIONS, Generation, environment, nearest_expressible, server_flags
from autotune.export.verdict import comparisons_of, role_of, verdict_lines
from autotune.export.vllm_bench import auto_tune_result, sweep_params
from autotune.provenance import now
from autotune.records import Origin
from autotune.results import Setting, StudyResults
from ppas_core import __version__
from ppas_core.files import write_atomically
from ppas_core.plain_json import dump_json
from ppas_core.policy import PolicyParams

_JSON: Final = "settings.json"
_NO_COST_PCT: Final = 0.05
"""What is shown as 0.0 %."""
Cost = Callable[[PolicyParams], float | None]
"""The predicted preferred objective of other settings as ratio to the exported one: 1.03 is 3 % worse; None: unknown."""


def write_export(
    results: StudyResults,
    directory: Path,
    *,
    setting: Setting | None = None,
    cost: Cost | None = None,
    cost_note: str = "",
    results_digest: str | None = None,
) -> tuple[Path, ...]:
    """Writes the export of a study into `directory` and returns the files, `vllm.yaml` first.

    setting: what to export; None is what the study itself exports. A static budget is exported, and loads again, as
    `PolicyParams.static`. cost: asked for the nearest settings of patches that cannot express it, where the study did not
    measure them. cost_note: how far to believe that, or why there is none. results_digest: of the file that `results`
    were read from; None is as they are saved now. Each file is written whole or not at all. Raises InvalidSettings,
    OSError.
    """
    setting = setting or results.exported
    params = acting(setting.to_params())  # what cannot act no file could say
    origin = _origin_lines(results, setting, params)
    nearest = {generation: nearest_expressible(params, generation) for generation in GENERATIONS}
    costs = {
        generation: _cost_of(results, params, near, cost) if reasons else None
        for generation, (near, reasons) in nearest.items()
    }
    deployment = Deployment.of(results)
    vllm_yaml = _vllm_yaml(params, deployment, origin)
    of_flags = [*origin, *_flag_lines(deployment)]
    files: dict[str, str | None] = {
        "vllm.yaml": vllm_yaml,
        "ppas.env": _own_env(params, of_flags, nearest),
        **{
            f"vllm-{generation}.env": _patch_env(
                params, generation, of_flags, near, reasons, _cost_lines(results, costs[generation], cost_note)
            )
            for generation, (near, reasons) in nearest.items()
        },
        _JSON: None,
        "compose.yaml": compose(params, deployment, origin),
        "Dockerfile": dockerfile(params, deployment, origin),
        "kubernetes.yaml": kubernetes(params, deployment, origin, vllm_yaml),
        "helm-values.yaml": helm_values(params, deployment, origin),
        "vllm-sweep.json": sweep_params(results, Setting.of(params)),
        "auto_tune.txt": auto_tune_result(results),
    }
    named = [name for name, text in files.items() if text is not None or name == _JSON]
    files[INDEX_FILE] = index(named, deployment, origin, verdict_lines(results, setting))
    others = {name: sha256(text.encode()) for name, text in files.items() if text is not None}
    # As `StudyResults.save` writes it; an earlier version wrote fewer entries, so that of a file is the caller's to give.
    digest = results_digest or sha256(dump_json(results.model_dump(mode="json")).encode())
    files[_JSON] = _settings_json(results, digest, setting, params, nearest, costs, others)
    written = {directory / name: text for name, text in files.items() if text is not None}
    (directory / SIGNATURE_FILE).unlink(missing_ok=True)  # it is of other files, and would only fail from now on
    for path, text in written.items():
        write_atomically(path, text.encode())
    if files["Dockerfile"] is None:  # an earlier export of another setting may have left one, and it would mislead
        (directory / "Dockerfile").unlink(missing_ok=True)
    return tuple(written)


def _origin_lines(results: StudyResults, setting: Setting, params: PolicyParams) -> list[str]:
    role = role_of(results, setting)
    named = f"{params.label()} ({one_line(role)})" if role else params.label()
    study = f"the study {one_line(results.name)}, {one_line(results.created_at)}"
    return [
        f"Made by ppas-autotune {__version__} from {study}.",
        f"Setting {named}; its measurements are {results.origin}.",
    ]


def write_vllm_config(params: PolicyParams, path: Path, flags: Sequence[str] = ()) -> Path:
    """Writes `params` for a server with `flags` as a file for `vllm serve --config`, and returns its path.

    It says what the exported `vllm.yaml` says; `words_beside` tells which flags it cannot hold.
    """
    text = header(["Made by ppas-autotune to check an export."], params) + vllm_config_text(params, flags)
    write_atomically(path, text.encode())
    return path


def _vllm_yaml(params: PolicyParams, deployment: Deployment, origin: Iterable[str]) -> str:
    use = "With ppas-autotune installed beside vLLM: "
    if params.is_static:
        use = "A static budget needs no scheduler of ours: "
    command = one_line(shlex.join(["vllm", "serve", "MODEL", "--config", "vllm.yaml", *deployment.beside]))
    lines = [*origin, use + command, *server_lines(deployment)]
    return header(lines, params) + vllm_config_text(params, deployment.flags)


def _flag_lines(deployment: Deployment) -> list[str]:
    """What stands in a file that holds no flags but the setting's."""
    if not deployment.flags:
        return []
    return [
        f"The measured server had these flags beside: {one_line(shlex.join(deployment.flags))}",
        *(f"With them: {line}" for line in caveats(deployment.flags)),
    ]


def _own_env(
    params: PolicyParams,
    origin: Iterable[str],
    nearest: dict[Generation, tuple[PolicyParams, tuple[str, ...]]],
) -> str:
    lines = [*origin, "For vLLM with ppas-autotune installed beside it; published names where there is one."]
    for generation, (_, reasons) in nearest.items():
        if reasons:
            lines.append(
                f"NOT for the patched vLLM {generation}, which would run another setting: {'; '.join(reasons)}."
            )
            lines.append(f"  Use vllm-{generation}.env there.")
    return _env_text(params, environment(params), lines)


def _patch_env(
    params: PolicyParams,
    generation: Generation,
    origin: Iterable[str],
    near: PolicyParams,
    reasons: tuple[str, ...],
    costs: list[str],
) -> str:
    lines = [*origin, f"For the published patch of vLLM {generation}."]
    if reasons:
        lines.append(f"The patch CANNOT express this setting: {'; '.join(reasons)}.")
        lines.append(f"Below is the nearest setting that it can: {near.label()}.")
        lines += costs
    else:
        lines.append("The patch expresses this setting exactly.")
    return _env_text(near, environment(near, generation), lines)


def _cost_of(
    results: StudyResults, params: PolicyParams, near: PolicyParams, cost: Cost | None
) -> MeasuredCost | float | None:
    """As measured, where a live study did; else as predicted."""
    found = measured_cost(results, params, near) if results.origin is Origin.LIVE else None
    return found if found is not None or cost is None else cost(near)


def _cost_lines(results: StudyResults, cost: MeasuredCost | float | None, note: str) -> list[str]:
    what = preferred_label(results)
    if isinstance(cost, MeasuredCost):
        return [f"Measured {cost.where}: {_cost_words(cost.ratio, what)}."]
    lines = ["The study did not measure that setting."] if results.origin is Origin.LIVE else []
    if cost is None:
        return [*lines, f"What it costs was not predicted{': ' if note else ''}{one_line(note)}."]
    return [*lines, f"Predicted (simulated): {_cost_words(cost, what)}.", *([one_line(note)] if note else [])]


def _cost_words(ratio: float, what: str) -> str:
    change = (ratio - 1) * 100
    if abs(change) < _NO_COST_PCT:
        return f"it costs nothing on {what}"
    if change < 0:
        return f"no cost; it is {-change:.1f} % better than the setting on {what}"
    return f"it costs {change:.1f} % on {what}"


def _env_text(params: PolicyParams, variables: dict[str, str], lines: list[str]) -> str:
    if variables:
        lines = [*lines, "Use: set -a; . ./THIS_FILE; set +a; vllm serve MODEL, with these flags:"]
    else:
        lines = [*lines, "A static budget: no variable, PPAS_ENABLED and PPAS_PLUS_ENABLED unset, and these flags:"]
    for name, value in variables.items():
        assert SAFE_VALUE.fullmatch(value), f"{name} needs quoting"  # noqa: S101 - values are numbers and words of ours
    body = "".join(f"{name}={value}\n" for name, value in variables.items())
    return header([*lines, f"flags {' '.join(server_flags(params))}"], params) + body


def _settings_json(
    results: StudyResults,
    results_digest: str,
    setting: Setting,
    params: PolicyParams,
    nearest: dict[Generation, tuple[PolicyParams, tuple[str, ...]]],
    costs: dict[Generation, MeasuredCost | float | None],
    others: dict[str, str],
) -> str:
    """others: digests of the export's other files."""
    data = {
        "kind": KIND,
        "version": VERSION,
        "label": params.label(),
        "params": params.to_dict(),
        "params_digest": settings_digest(params),
        "created_at": now(),
        "made_by": {"ppas-autotune": __version__},
        "origin": str(results.origin),
        "study": {
            "name": results.name,
            "created_at": results.created_at,
            "digest": results_digest,
            "role": role_of(results, setting),
            "choice": results.choice,
            "verdicts": [
                {"against": found.reference, "verdict": found.verdict, "sentence": found.sentence, "costs": found.costs}
                for found in comparisons_of(results, setting)
            ],
            "not_identified": results.not_identified,
        },
        "measured_on": scrubbed(results.provenance.get("measured_on")),
        "versions": results.provenance.get("versions"),
        "traces": [{"name": t.name, "purpose": t.purpose, "digest": t.digest} for t in results.traces],
        "files": others,
        "published_patches": {
            generation: {
                "exact": not reasons,
                "why_not": list(reasons),
                "nearest": near.to_dict(),
                **_ratios(costs[generation]),
            }
            for generation, (near, reasons) in nearest.items()
        },
    }
    return dump_json(data, indent=1) + "\n"


def _ratios(cost: MeasuredCost | float | None) -> dict[str, Any]:
    measured = cost if isinstance(cost, MeasuredCost) else None
    return {
        "predicted_ratio": None if measured is not None else cost,
        "measured": None if measured is None else asdict(measured),
    }
