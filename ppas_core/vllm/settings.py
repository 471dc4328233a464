"""Where a starting server's P-PAS settings come from: `--additional-config` or the environment.

Knows the names of the published patches' variables and ours beyond them (docs/decisions/vllm-activation.md), and
what the engine's start-up values allow. Does not know live changes: see `control`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ppas_core.errors import InvalidInput, InvalidSettings
from ppas_core.policy import PolicyParams, Scope

PATCH_022_B_CAP = 2048
"""b_cap that the published 0.22.1 patch fixes; the default where PPAS_B_CAP is not set."""
DEFAULT_T_LARGE = 65536
"""Default of PPAS_LARGE_PREFILL_THRESHOLD in the published 0.27.1 patch."""
POLICY_KEY = "ppas"
RUNTIME_KEY = "ppas_runtime"
SETTINGS_FILE_VARIABLE = "PPAS_SETTINGS_FILE"


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine was started with. startup_budget_tokens: its tokens per step; max_num_seqs: its running
    requests.
    """

    startup_budget_tokens: int
    max_num_seqs: int

    def check(self, params: PolicyParams) -> None:
        """Raise InvalidSettings where `params` cannot act in this engine."""
        if params.b_max > self.startup_budget_tokens:
            raise InvalidSettings(
                f"b_max is {params.b_max}; this server was started with {self.startup_budget_tokens} tokens per step, "
                f"which sized its memory: stay at or below it, or restart with a larger --max-num-batched-tokens"
            )
        if params.max_num_seqs != self.max_num_seqs:
            raise InvalidSettings(
                f"max_num_seqs is {params.max_num_seqs}; this server was started with --max-num-seqs "
                f"{self.max_num_seqs}: leave the key out, or restart the server with that value"
            )


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """What is not policy.

    settings_file: JSON file of live settings, checked at each step; None for none.
    step_log: CSV file of one row a step; None for none.
    step_log_max_bytes: size at which the step log rotates. step_log_files: old files kept.
    """

    settings_file: Path | None = None
    step_log: Path | None = None
    step_log_max_bytes: int = 64 * 1024 * 1024
    step_log_files: int = 4

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RuntimeOptions:
        """Options from parsed JSON. Raises InvalidSettings on unknown keys and bad values."""
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(data) - set(known)):
            raise InvalidSettings(f"unknown key {unknown[0]!r} in {RUNTIME_KEY}; allowed: {', '.join(known)}")
        values: dict[str, Any] = {}
        for name, value in data.items():
            if name.startswith("step_log_"):
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise InvalidSettings(f"{name} is {value!r}; allowed: a whole number of at least 1")
                values[name] = value
            elif value is not None:
                if not isinstance(value, str) or not value:
                    raise InvalidSettings(f"{name} is {value!r}; allowed: a path")
                values[name] = Path(value)
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Activation:
    """How this server starts. params: the policy, None for off; source: where it came from, for logs and `ppas
    doctor`.
    """

    params: PolicyParams | None
    options: RuntimeOptions
    source: str


def read_activation(additional_config: object, environ: Mapping[str, str], limits: EngineLimits) -> Activation:
    """The settings for an engine that is being built. `additional_config` is vLLM's; it wins over the environment.

    Raises InvalidSettings when they are malformed or beyond the engine's limits: a server must not start with
    other settings than it was asked for.
    """
    config: Mapping[str, Any] = additional_config if isinstance(additional_config, Mapping) else {}
    runtime = config.get(RUNTIME_KEY) or {}
    if not isinstance(runtime, Mapping):
        raise InvalidSettings(f"{RUNTIME_KEY} is {runtime!r}; allowed: a mapping")
    options = RuntimeOptions.from_dict({**_options_from_environment(environ), **runtime})
    if config.get(POLICY_KEY) is not None:
        params = params_from_json(config[POLICY_KEY], limits)
        return Activation(params, options, "additional-config")
    from_environment = params_from_environment(environ, limits)
    if from_environment is not None:
        limits.check(from_environment)
        return Activation(from_environment, options, "environment")
    return Activation(None, options, "none")


def params_from_json(data: object, limits: EngineLimits) -> PolicyParams:
    """A policy from parsed JSON for this engine; `max_num_seqs` may be left out. Raises InvalidSettings."""
    if not isinstance(data, Mapping):
        raise InvalidSettings(f"the settings are {data!r}; allowed: a mapping of policy settings, or null for off")
    params = PolicyParams.from_dict({"max_num_seqs": limits.max_num_seqs, **data})
    limits.check(params)
    return params


def enabled_by_environment(environ: Mapping[str, str]) -> bool:
    """Whether the published variables switch P-PAS or P-PAS+ on."""
    return _flag(environ, "PPAS_ENABLED") or _flag(environ, "PPAS_PLUS_ENABLED")


def params_from_environment(environ: Mapping[str, str], limits: EngineLimits) -> PolicyParams | None:
    """The policy that the variables describe; b_max is the engine's budget. None when they do not switch it on."""
    base, plus = _flag(environ, "PPAS_ENABLED"), _flag(environ, "PPAS_PLUS_ENABLED")
    if base and plus:
        raise InvalidInput("PPAS_ENABLED and PPAS_PLUS_ENABLED are both set; set one of them")
    if not base and not plus:
        return None
    b_cap = _number(environ, "PPAS_B_CAP")
    if plus and b_cap is None:
        raise InvalidInput("PPAS_PLUS_ENABLED is set without PPAS_B_CAP; set PPAS_B_CAP to the capped budget in tokens")
    t_large = None
    if plus:
        t_large = _number(environ, "PPAS_LARGE_PREFILL_THRESHOLD") or DEFAULT_T_LARGE
    scope = environ.get("PPAS_SCOPE") or (Scope.PREFILL if b_cap is None else Scope.GLOBAL)
    return PolicyParams(
        b_max=limits.startup_budget_tokens,
        b_cap=PATCH_022_B_CAP if b_cap is None else b_cap,
        n_th=_number(environ, "PPAS_N_TH") or 2,
        t_large=t_large,
        scope=scope,  # type: ignore[arg-type] # PolicyParams turns the name into a Scope, or refuses it
        max_num_seqs=limits.max_num_seqs,
        decode_guard=_flag(environ, "PPAS_DECODE_GUARD"),
    )


def _options_from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if path := environ.get(SETTINGS_FILE_VARIABLE):
        options["settings_file"] = path
    if path := environ.get("PPAS_STEP_LOG"):
        options["step_log"] = path
    if size := _number(environ, "PPAS_STEP_LOG_MAX_BYTES"):
        options["step_log_max_bytes"] = size
    return options


def _flag(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "").strip().lower()
    if text in ("", "0", "false", "no", "off"):
        return False
    if text in ("1", "true", "yes", "on"):
        return True
    raise InvalidInput(f"{name} is {environ[name]!r}; allowed: 1 or 0")


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise InvalidInput(f"{name} is {environ[name]!r}; allowed: a whole number of at least 1")
    return value
