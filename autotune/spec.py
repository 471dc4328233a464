"""What a study file may say, and what it resolves to. Every key is documented here; unknown keys are refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator

from autotune import choose, metrics
from autotune.durations import parse_duration_s
from autotune.fields import Float, Int, Length, Model, RateFactor, Seed
from autotune.metrics import Limits
from autotune.settings import parse_setting
from autotune.workloads import WORKLOADS, RagBursts, TraceFiles, Workload
from ppas_core import defaults
from ppas_core.errors import InvalidInput
from ppas_core.naming import did_you_mean
from ppas_core.policy import PolicyParams
from search_spaces.explain import explain
from search_spaces.yaml_file import read_yaml
from traces.format import Trace, read_trace

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SETTING_FILES: Final = (".json", ".yaml", ".yml", ".env")


class LimitsSpec(Model):
    """Service levels that a request must meet to count for goodput."""

    latency_s: Annotated[Float, Field(gt=0)] | None = Field(default=None, description="End-to-end latency, seconds.")
    ttft_s: Annotated[Float, Field(gt=0)] | None = Field(default=None, description="Time to first token, seconds.")
    tpot_s: Annotated[Float, Field(gt=0)] | None = Field(default=None, description="Time per output token, seconds.")


class ServerSpec(Model):
    """The vLLM server of a live study: started by the tuner, once, and ended with it; or one that runs already."""

    model: str = Field(min_length=1, description="The model, as for `vllm serve`: a folder or a name.")
    flags: tuple[str, ...] = Field(
        default=(), description="Further `vllm serve` flags, one word an entry; the budget and max_num_seqs are added."
    )
    environment: dict[str, SecretStr] = Field(
        default={}, description="Environment variables of the server. Only their names appear in results."
    )
    url: str | None = Field(
        default=None,
        description="A running server instead, as http://127.0.0.1:8000, started with P-PAS and PPAS_SETTINGS_FILE; its "
        "settings are changed through its route /ppas/settings, or settings_file, and put back; it is never ended.",
    )
    settings_file: str | None = Field(
        default=None, description="With url: change settings through the file that this server watches, not the route."
    )
    token_file: str | None = Field(
        default=None,
        description="With url: a file with the route's token; default: the variable PPAS_HTTP_TOKEN, where it is set.",
    )
    wrapper: tuple[str, ...] = Field(
        default=(),
        description="A command before the server's, such as a profiler; {output} becomes a path of this server's own in "
        "the run folder, as in [nsys, profile, -o, '{output}'].",
    )
    restart_per_trial: bool = Field(
        default=False,
        description="Start the server anew for each setting, with its export, instead of switching; for comparison.",
    )
    memory_reserve_gib: Annotated[Float, Field(ge=0, le=100_000)] = Field(
        default=2.0,
        description="A server whose memory (not the GPU's) grows from trial to trial is started anew, between trials, "
        "before less than this is left.",
    )
    vocabulary_size: Annotated[Int, Field(ge=32, le=10_000_000)] = Field(
        default=32_000, description="Prompts are drawn from token ids below this; not above the model's own."
    )
    cold_check: bool = Field(
        default=True, description="Check the export at the end on a server started cold with exactly the exported file."
    )
    start_timeout: str = Field(default="15m", description="How long the server may take to become healthy.")
    request_timeout: str = Field(default="10m", description="How long one request may take before it counts as failed.")
    max_send_lag_ms: Annotated[Float, Field(gt=0, le=1000)] = Field(
        default=5.0,
        description="A replay whose client sent later than this (P99, plus 1 % of mean latency) is not used.",
    )

    @field_validator("start_timeout", "request_timeout")
    @classmethod
    def _timeouts_parse(cls, value: str) -> str:
        return _checked_duration(value)

    @field_validator("url")
    @classmethod
    def _url_is_an_address(cls, value: str | None) -> str | None:
        if value is not None:
            from autotune.replay.run import base_url  # numpy loads there, which most studies need later

            try:
                base_url(value)
            except InvalidInput as error:
                raise ValueError(str(error)) from None
        return value

    @field_validator("flags")
    @classmethod
    def _flags_are_free(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        taken = {"--max-num-batched-tokens", "--max-num-seqs", "--scheduler-cls", "--port", "--host", "--config"}
        for flag in value:
            name = re.split(r"[=\s]", flag, maxsplit=1)[0].replace("_", "-")
            if name.startswith("--") and name != "--" and any(full.startswith(name) for full in taken):
                raise ValueError(
                    f"flag {flag!r} is set by the tuner; take it out (max_num_seqs belongs to the settings)"
                )
        return value

    @model_validator(mode="after")
    def _one_kind_of_server(self) -> ServerSpec:
        if self.url is None and (self.settings_file is not None or self.token_file is not None):
            raise ValueError("settings_file and token_file belong to a server that runs already; give its url, too")
        if self.settings_file is not None and self.token_file is not None:
            raise ValueError("settings_file and token_file are two ways to change settings; give one of them")
        if self.url is not None and (self.flags or self.environment or self.wrapper or self.restart_per_trial):
            raise ValueError(
                "flags, environment, wrapper and restart_per_trial belong to a server that the tuner starts; leave out "
                "url, or them"
            )
        return self


class StudySpec(Model):
    """A study file as written by the user."""

    name: str = Field(
        description="Names the study and its run folder: letters, digits, '.', '_' and '-', 64 at most.",
    )
    backend: Literal["simulator", "vllm"] = Field(
        default="simulator", description="Where trials run: on the embedded simulator, or on a live vLLM server."
    )
    server: ServerSpec | None = Field(default=None, description="The server of a live study (backend: vllm).")
    profile: str | None = Field(
        default=None,
        description="Simulator profile: a shipped name or a profile file (JSON). Default: rtx5090-qwen2.5-3b; a live study "
        "calibrates one of its own server.",
    )
    prefix_caching: bool = Field(
        default=False,
        description="Simulate vLLM's prefix cache: prompts whose traces share block hashes reuse each other's KV blocks. Off, "
        "each prompt is computed whole, as in the paper; a live server does what its flags say.",
    )
    noise_sigma: Annotated[Float, Field(ge=0, le=1)] = Field(
        default=0.0, description="Simulator only: log-normal noise per step (standard deviation); 0 is exact."
    )
    reference: str | dict[str, Any] = Field(
        default="ppas", description="The setting to beat: a published name, N_TH/B_MAX/B_CAP, or a mapping of settings."
    )
    published: tuple[str, ...] | None = Field(
        default=None,
        description="Published settings to try as trials of the study, by name; default: all that the space contains.",
    )
    static_budgets: tuple[Length, ...] = Field(
        default=defaults.STATIC_BUDGETS, min_length=1, description="Static budgets to try (stock vLLM)."
    )
    space: str | dict[str, Any] = Field(
        default="ppas",
        description="Search space: a preset (static, ppas, ppas-plus, paper-neighbourhood), a file, or inline.",
    )
    workload: Workload = Field(
        default=RagBursts(family="rag-bursts"), description="What arrives: rag-bursts, heterogeneous or files."
    )
    more_workloads: tuple[Workload, ...] = Field(
        default=(),
        max_length=8,
        description="Further workloads, written as workload: their load regimes count as much, and the pick is judged on "
        "each of them.",
    )
    tuning_seeds: tuple[Seed, ...] = Field(
        default=(0, 1, 2, 3, 4), min_length=1, description="Seeds of the traces that the search sees."
    )
    held_out_seeds: tuple[Seed, ...] = Field(
        default=tuple(range(100, 110)), min_length=1, description="Seeds of the traces that results are quoted on."
    )
    objectives: tuple[str, ...] = Field(
        default=("mean_latency_s", "p95_latency_s"),
        min_length=1,
        max_length=4,
        description="Metrics to optimise, each as ratio to the reference: geometric mean over load regimes.",
    )
    limits: LimitsSpec = Field(default=LimitsSpec(), description="Service levels for goodput_per_s.")
    prefer: str = Field(
        default="",
        description="What decides the pick: mean, p95, balanced, or an objective's name; default: the first objective.",
    )
    protect: tuple[str, ...] | Literal["all", "everywhere"] = Field(
        default=(),
        description="Load regimes in which the pick must not be worse than the reference, or all; everywhere: in all, and "
        "at every one of robustness_rates (simulated), too.",
    )
    robustness_rates: tuple[RateFactor, ...] = Field(
        default=(0.7, 1.3),
        max_length=8,
        description="Multiples of the traffic's rate at which the pick is judged as well (simulated); [] for none.",
    )
    sampler: Literal["auto", "gp", "tpe", "cmaes", "nsga2", "qmc", "random"] = Field(
        default="auto", description="Optuna sampler; auto is gp where torch is installed, else tpe."
    )
    seed: Seed = Field(default=0, description="Seed of the sampler and of the bootstrap.")
    trials: Annotated[Int, Field(ge=1, le=100_000)] = Field(
        default=100, description="Search trials, beside the reference, published and static settings."
    )
    time_budget: str | None = Field(
        default=None, description="Stop the search after this long, as in 90s, 45m, 2h; the trials reached are used."
    )
    random_arm: bool = Field(default=False, description="Run a random search of the same size beside, for comparison.")
    simulate: bool = Field(
        default=True,
        description="Live only: calibrate the simulator on the server (or take profile), sweep the space in it and measure "
        "first what it finds good. It only proposes; measurements decide.",
    )
    calibration: str = Field(
        default="90s", description="Live only: how many seconds of load the calibration of the simulator aims at."
    )
    race: bool = Field(
        default=True,
        description="Where measurements vary: stop a setting before its last trace once its deficit is certain.",
    )
    stop_early: bool = Field(
        default=True,
        description="Live only: end the search once no gain above the noise is to be expected of another trial.",
    )
    confidence: Annotated[Float, Field(ge=0.5, le=0.9999)] = Field(
        default=0.95, description="Confidence of the bootstrap intervals."
    )
    tie_pct: Annotated[Float, Field(ge=0, le=50)] = Field(
        default=0.5,
        description="Settings this close to the best (per cent) are ties; the nearest to the reference wins.",
    )
    min_gain_pct: Annotated[Float, Field(ge=0, le=50)] = Field(
        default=1.0,
        description="The smallest gain (per cent) on held-out traces that is worth having: a smaller one is not called better.",
    )
    stop_at_noise_pct: Annotated[Float, Field(gt=0, le=1e6)] | None = Field(
        default=100.0,
        description="Live only: stop before the search where, measured twice, no gain below this (per cent) could be seen; "
        "null goes on.",
    )

    @field_validator("name")
    @classmethod
    def _name_is_a_files(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("use letters, digits, '.', '_' and '-', 64 at most, a letter or digit first")
        return value

    @field_validator("objectives")
    @classmethod
    def _objectives_exist(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name not in metrics.METRICS:
                raise ValueError(f"no metric {name!r}{did_you_mean(name, metrics.METRICS)}")
        if len(set(value)) != len(value):
            raise ValueError("an objective is named twice")
        return value

    @field_validator("calibration")
    @classmethod
    def _calibration_parses(cls, value: str) -> str:
        return _checked_duration(value)

    @field_validator("time_budget")
    @classmethod
    def _time_budget_parses(cls, value: str | None) -> str | None:
        return None if value is None else _checked_duration(value)

    @model_validator(mode="before")
    @classmethod
    def _prefer_the_first_objective(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("prefer"):
            return data
        objectives = data.get("objectives") or ["mean_latency_s"]
        first = objectives[0] if isinstance(objectives, list | tuple) else objectives
        return {**data, "prefer": {"mean_latency_s": "mean", "p95_latency_s": "p95"}.get(first, first)}

    @model_validator(mode="after")
    def _parts_agree(self) -> StudySpec:
        if shared := sorted(set(self.tuning_seeds) & set(self.held_out_seeds)):
            raise ValueError(
                f"seed {shared[0]} is both in tuning_seeds and in held_out_seeds; results must come from unseen traces"
            )
        if (self.backend == "vllm") != (self.server is not None):
            raise ValueError("backend: vllm and a server: block go together; give both, or neither")
        if "goodput_per_s" in self.objectives and self.limits == LimitsSpec():
            raise ValueError(
                "goodput_per_s is an objective, but no limit is set under limits: (latency_s, ttft_s, tpot_s)"
            )
        try:
            choose.preferred_metrics(self.prefer, self.objectives)
            if not (isinstance(self.reference, str) and self.reference.endswith(_SETTING_FILES)):
                self.reference_params()
            for name in self.published or ():
                defaults.published(name)
        except InvalidInput as error:
            raise ValueError(str(error)) from None
        return self

    def reference_params(self, folder: Path = Path()) -> PolicyParams:
        """The reference setting; a file is looked for from `folder`. Raises InvalidInput."""
        if isinstance(self.reference, str) and self.reference.endswith(_SETTING_FILES):
            return parse_setting(str(folder / self.reference))
        return parse_setting(self.reference)

    def protected(self, regimes: Sequence[str]) -> Sequence[str]:
        """Of a study's `regimes`, those that are protected."""
        return regimes if isinstance(self.protect, str) else self.protect

    def metric_limits(self) -> Limits:
        """The service levels for goodput."""
        return Limits(**self.limits.model_dump())

    def time_budget_s(self) -> float | None:
        """The search's time budget in seconds, if any."""
        return None if self.time_budget is None else parse_duration_s(self.time_budget)

    def build_traces(self, folder: Path) -> tuple[list[Trace], list[Trace]]:
        """(tuning traces, held-out traces); files are looked for from `folder`. Raises InvalidInput."""
        tuning: list[Trace] = []
        held_out: list[Trace] = []
        for number, workload in enumerate((self.workload, *self.more_workloads), start=1):
            if isinstance(workload, TraceFiles):
                key = "workload" if number == 1 else f"more_workloads.{number - 2}"
                parts = [
                    [_named_trace(f"{key}.{purpose}", name, folder) for name in names]
                    for purpose, names in (("tuning", workload.tuning), ("held_out", workload.held_out))
                ]
            else:
                parts = [workload.traces(seeds) for seeds in (self.tuning_seeds, self.held_out_seeds)]
            taken = {trace.regime for trace in (*tuning, *held_out)}
            for traces, part in zip((tuning, held_out), parts, strict=True):
                traces += [_told_apart(trace, number) if trace.regime in taken else trace for trace in part]
        seen: dict[str, str] = {}
        for trace in [*tuning, *held_out]:
            if trace.digest in seen:
                raise InvalidInput(
                    f"traces {seen[trace.digest]!r} and {trace.name!r} hold the same requests; every trace of a study, "
                    "tuning or held-out, must be its own"
                )
            seen[trace.digest] = trace.name
        names = Counter(trace.name for trace in (*tuning, *held_out))
        if twice := [name for name, count in names.items() if count > 1]:
            raise InvalidInput(f"two traces are called {twice[0]!r}; give every trace of a study a name of its own")
        regimes = list(dict.fromkeys(trace.regime for trace in tuning))
        if unknown := [name for name in self.protected(()) if name not in regimes]:
            raise InvalidInput(f"protect names the regime {unknown[0]!r}; the tuning traces have: {', '.join(regimes)}")
        return tuning, held_out

    def to_yaml(self) -> str:
        """The study as resolved, every key written out."""
        text: str = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        return text


def load_spec(path: Path) -> StudySpec:
    """The study in the YAML file `path`. Raises InvalidInput naming the key, the value and what is allowed."""
    try:
        data = read_yaml(path)
    except FileNotFoundError:
        raise InvalidInput(f"{path}: there is no such study file; examples/ holds some") from None
    if not isinstance(data, dict):
        raise InvalidInput(f"{path}: a study file is a mapping such as 'name: my-study'")
    return parse_spec(data, str(path))


def parse_spec(data: dict[str, Any], origin: str) -> StudySpec:
    """The study in parsed YAML; `origin` names it in messages. Raises InvalidInput for every problem at once."""
    try:
        return StudySpec.model_validate(data)
    except ValidationError as error:
        problems = explain(error, StudySpec, WORKLOADS)
        raise InvalidInput("\n".join(f"{origin}: {problem}" for problem in problems)) from None


def _named_trace(key: str, name: str, folder: Path) -> Trace:
    try:
        return read_trace(folder / name)
    except InvalidInput as error:
        raise InvalidInput(f"{key} in the study file: {error}") from None


def _told_apart(trace: Trace, number: int) -> Trace:
    """The trace of workload `number`, whose regime's name another workload has taken."""
    return replace(trace, name=f"{trace.name}, workload {number}", regime=f"{trace.regime}, workload {number}")


def _checked_duration(text: str) -> str:
    try:
        parse_duration_s(text)
    except InvalidInput as error:
        raise ValueError(str(error)) from None
    return text
