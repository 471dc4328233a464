"""A study resolved and checked: everything that can be refused is refused here, before anything expensive runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from autotune import choose
from autotune.durations import parse_duration_s
from autotune.evaluate import Evaluator, SimulatedEvaluator
from autotune.live import LiveEvaluator
from autotune.model_limits import model_limits, require_room
from autotune.model_path import is_path_alone
from autotune.records import Origin
from autotune.results import Arm
from autotune.server_options import ServerOptions
from autotune.spec import StudySpec
from autotune.study import resolve_sampler
from autotune.workloads import TraceFiles
from ppas_core import defaults
from ppas_core.errors import InvalidInput
from ppas_core.policy import PolicyParams
from ppas_core.sim.profile import DEFAULT_PROFILE, Profile, load_profile
from search_spaces.space import Space, load_space
from traces.format import Trace

NOISE_RUNS: Final = 3
"""How often the reference is measured to learn the noise."""
CONFIRMED: Final = 3
"""Settings near the best that are measured again, at most, where measurements vary."""
CONFIRMATIONS: Final = 2
"""How often each of these is measured again, at most."""
REFERENCE_EVERY: Final = 8
"""Trials between two further measurements of the reference, where measurements drift."""
FINALISTS: Final = 4
"""Settings replayed on the held-out traces of a live study: pick, reference, best static budget, runner-up."""
_TAIL_S: Final = 5.0
"""Added per live replay in estimates: the last requests, the switch, the drain."""


@dataclass(frozen=True)
class Plan:
    """known: the reference, published settings and static budgets, each with the arm that it belongs to.

    profile: the simulator's, where the study names one; a simulated study without one takes the default.
    """

    spec: StudySpec
    space: Space
    evaluator: Evaluator
    tuning: tuple[Trace, ...]
    held_out: tuple[Trace, ...]
    reference: PolicyParams
    known: tuple[tuple[Arm, PolicyParams], ...]
    sampler: str
    profile: Profile | None = None
    profile_file: Path | None = None

    @property
    def in_space(self) -> tuple[tuple[Arm, PolicyParams], ...]:
        """Known settings that the space contains: they are trials of the search itself."""
        return tuple((arm, params) for arm, params in self.known if self.space.contains(params))

    @property
    def outside(self) -> tuple[tuple[Arm, PolicyParams], ...]:
        """Known settings that the space does not contain: measured beside the search."""
        return tuple((arm, params) for arm, params in self.known if not self.space.contains(params))

    @property
    def reference_role(self) -> str:
        """What the reference is called in results."""
        return "paper default" if self.reference == defaults.published("ppas") else "reference"

    def trace_files(self) -> dict[str, Trace]:
        """File name in the run folder to trace: tuning traces first."""
        return {f"{number:03}.jsonl": trace for number, trace in enumerate((*self.tuning, *self.held_out))}

    def resolved_spec(self) -> StudySpec:
        """The study as it can be run again from its run folder alone: own traces, space and profile written out."""
        changes: dict[str, Any] = {"space": self.space.describe(), "reference": self.reference.to_dict()}
        if any(isinstance(workload, TraceFiles) for workload in (self.spec.workload, *self.spec.more_workloads)):
            names = [f"traces/{name}" for name in self.trace_files()]
            split = len(self.tuning)
            changes["workload"] = TraceFiles(family="files", tuning=tuple(names[:split]), held_out=tuple(names[split:]))
            changes["more_workloads"] = ()
        if self.profile_file is not None:
            changes["profile"] = "profile.json"
        return self.spec.model_copy(update=changes)

    def estimate(self) -> Estimate:
        """What a live study will take; the traces' own duration rules it."""
        tuning_s = sum(trace.requests[-1].arrival_s + _TAIL_S for trace in self.tuning)
        held_out_s = sum(trace.requests[-1].arrival_s + _TAIL_S for trace in self.held_out)
        settings = len(self.known) + self.spec.trials * (2 if self.spec.random_arm else 1)
        again = NOISE_RUNS + self.spec.trials // REFERENCE_EVERY + CONFIRMED
        server = self.spec.server
        joined = server is not None and server.url is not None
        is_live = self.evaluator.origin is Origin.LIVE
        calibrates = self.spec.simulate and self.spec.profile is None and is_live and not joined
        cold = int(server is not None and server.cold_check and not joined)
        starts = 0 if joined or not is_live else 1 + cold
        if server is not None and server.restart_per_trial:
            starts = settings + again + FINALISTS * len(self.held_out) + cold
        per_setting = len(self.tuning)
        most_again = again + CONFIRMED * (CONFIRMATIONS - 1)
        return Estimate(
            settings=settings,
            replays=(settings + most_again) * per_setting + (FINALISTS + cold) * len(self.held_out),
            search_s=settings * tuning_s,
            reference_s=again * tuning_s,
            finalists_s=(FINALISTS + cold) * held_out_s,
            server_starts=starts,
            calibration_s=parse_duration_s(self.spec.calibration) if calibrates else 0.0,
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """Settings tried, replays at most beside the calibration's, server starts at most, and seconds: of the search, of
    measuring the reference and the best again, of the finalists, of the calibration (load alone).
    """

    settings: int
    replays: int
    search_s: float
    reference_s: float
    finalists_s: float
    server_starts: int
    calibration_s: float

    def total_s(self, time_budget_s: float | None = None) -> float:
        """All of it, the search cut at `time_budget_s`."""
        search_s = self.search_s if time_budget_s is None else min(self.search_s, time_budget_s)
        return search_s + self.reference_s + self.finalists_s + self.calibration_s

    @property
    def starts_in_words(self) -> str:
        """How often a server is started, for people."""
        few = {0: "no server start", 1: "one server start", 2: "two server starts"}
        return few.get(self.server_starts, f"{self.server_starts} server starts")


def make_plan(spec: StudySpec, folder: Path = Path()) -> Plan:
    """Resolves a study; files that it names are looked for from `folder`. Raises InvalidInput."""
    reference = spec.reference_params(folder)
    choose.preferred_metrics(spec.prefer, spec.objectives)
    space = load_space(_from_folder(spec.space, folder))
    tuning, held_out = spec.build_traces(folder)
    known: dict[PolicyParams, Arm] = {reference: "reference"}
    if spec.published is None:
        published = [params for params in defaults.PUBLISHED.values() if space.contains(params)]
    else:
        published = [defaults.published(name) for name in spec.published]
    for params in published:
        known.setdefault(params, "published")
    for budget in spec.static_budgets:
        known.setdefault(static_like(reference, budget), "static")
    if spec.backend == "vllm":
        evaluator: Evaluator = _live_evaluator(spec, space, list(known), folder, replays_per_trial=len(tuning))
    else:
        evaluator = simulated_evaluator(spec, folder)
    for trace in (*tuning, *held_out):
        evaluator.check(trace)
    if isinstance(evaluator, LiveEvaluator):
        limits = model_limits(evaluator.options.model, evaluator.options.flags)
        for trace in (*tuning, *held_out):
            require_room(limits, trace)
    profile = _named_profile(spec, folder)
    if profile is not None and spec.backend == "vllm":
        for trace in (*tuning, *held_out):
            SimulatedEvaluator(profile).check(trace)
    return Plan(
        spec=spec,
        space=space,
        evaluator=evaluator,
        tuning=tuple(tuning),
        held_out=tuple(held_out),
        reference=reference,
        known=tuple((arm, params) for params, arm in known.items()),
        sampler=resolve_sampler(spec.sampler),
        profile=profile,
        profile_file=folder / spec.profile if spec.profile is not None and spec.profile.endswith(".json") else None,
    )


def simulated_evaluator(spec: StudySpec, folder: Path = Path()) -> SimulatedEvaluator:
    """The simulator that the study names. Raises InvalidInput."""
    profile = _named_profile(spec, folder) or _cached(spec, load_profile(DEFAULT_PROFILE))
    return SimulatedEvaluator(profile, noise_sigma=spec.noise_sigma, seed=spec.seed)


def _named_profile(spec: StudySpec, folder: Path) -> Profile | None:
    if spec.profile is None:
        return None
    return _cached(spec, load_profile(str(folder / spec.profile) if spec.profile.endswith(".json") else spec.profile))


def _cached(spec: StudySpec, profile: Profile) -> Profile:
    return replace(profile, prefix_caching=True) if spec.prefix_caching else profile


def static_like(reference: PolicyParams, budget: int) -> PolicyParams:
    """A static budget with the reference's other knobs, none of which can act. Raises InvalidInput."""
    try:
        return replace(reference, b_max=budget, b_cap=budget)
    except InvalidInput as error:
        raise InvalidInput(f"static budget {budget}: {error}") from None


def _live_evaluator(
    spec: StudySpec, space: Space, known: Sequence[PolicyParams], folder: Path, *, replays_per_trial: int
) -> LiveEvaluator:
    server = spec.server
    if server is None:
        raise AssertionError("the study file's own check lets no live study without a server pass")
    reference = known[0]
    model = _existing_model(server.model, folder) if server.url is None else server.model
    if "max_num_seqs" in space.dimensions:
        raise InvalidInput("space: max_num_seqs cannot change on a running server; fix it to one number")
    for params in [*known, next(iter(space.grid(1)))]:
        if params.max_num_seqs != reference.max_num_seqs:
            raise InvalidInput(
                f"setting {params.label()} has max_num_seqs {params.max_num_seqs}, the reference "
                f"{reference.label()} has {reference.max_num_seqs}; on one server all settings share it: fix it in "
                "space, reference and published"
            )
    return LiveEvaluator(
        ServerOptions(
            model=model,
            flags=server.flags,
            environment={name: value.get_secret_value() for name, value in server.environment.items()},
            wrapper=server.wrapper,
            vocabulary_size=server.vocabulary_size,
            start_timeout_s=parse_duration_s(server.start_timeout),
            request_timeout_s=parse_duration_s(server.request_timeout),
            max_send_lag_s=server.max_send_lag_ms / 1000,
            url=server.url,
            settings_file=folder / server.settings_file if server.settings_file else None,
            token_file=folder / server.token_file if server.token_file else None,
            restart_per_trial=server.restart_per_trial,
            memory_reserve_bytes=server.memory_reserve_gib * 2**30,
        ),
        budget=max(space.max_b_max, *(params.b_max for params in known)),
        max_num_seqs=reference.max_num_seqs,
        replays_per_trial=replays_per_trial,
    )


def _existing_model(model: str, folder: Path) -> str:
    """A folder beside the study file, or a name that vLLM knows. Raises InvalidInput for a path where nothing is."""
    if (folder / model).is_dir():
        return str(folder / model)
    if is_path_alone(model) and not Path(model).expanduser().exists():
        raise InvalidInput(
            f"server.model: there is no {model}, neither beside the study file nor here; give the model's folder, or its "
            "name where vLLM can find or download it, as Qwen/Qwen2.5-3B-Instruct"
        )
    return model


def _from_folder(space: str | dict[str, Any], folder: Path) -> str | dict[str, Any]:
    """A space file is looked for beside the study file; presets and inline spaces stay as they are."""
    if isinstance(space, str) and space.endswith((".yaml", ".yml")):
        return str(folder / space)
    return space
