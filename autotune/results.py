"""What a finished study says, as one versioned file. The report and the export are made from it alone.

Everything here is plain data: no metric is computed, nothing is decided. `trial`s are what the search saw on the tuning
traces; `held_out` and `comparisons` are what is quoted as a result.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from autotune.aggregate import is_measurable, is_within_error
from autotune.records import Origin
from ppas_core.errors import InvalidInput
from ppas_core.files import write_atomically
from ppas_core.plain_json import dump_json, load_json
from ppas_core.policy import PolicyParams
from ppas_core.versions import require_version

VERSION = 1

Arm = Literal["reference", "published", "static", "predicted", "search", "random"]
Verdict = Literal["better", "worse", "no clear winner", "inconclusive", "unchanged"]


def _from_null(value: Any) -> Any:
    return math.nan if value is None else value


Number = Annotated[float, BeforeValidator(_from_null)]
"""A number; NaN where it is undefined, which stands in the file as null."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null", allow_inf_nan=True)


def _require_known_version(path: Path, data: bytes) -> None:
    """Raises InvalidInput where the results cannot be read since they are of another version."""
    with contextlib.suppress(ValueError):
        said = load_json(data)
        if isinstance(said, dict) and "version" in said:
            require_version(f"{path}: results", said["version"], VERSION, again="search anew with another --run")


class Setting(_Model):
    """Scheduler settings as plain values, with a short label for tables."""

    label: str
    params: dict[str, Any]

    @classmethod
    def of(cls, params: PolicyParams) -> Setting:
        """The setting that `params` describe."""
        return cls(label=params.label(), params=params.to_dict())

    def to_params(self) -> PolicyParams:
        """The validated settings. Raises InvalidSettings."""
        return PolicyParams.from_dict(self.params)


class Objective(_Model):
    """A metric that the study optimises, as ratio to the reference on the same traces: lower is better, 1 is equal.

    For a metric where higher is better the ratio is reference / setting.
    """

    metric: str
    label: str
    better: Literal["lower", "higher"]


class ClientLateness(_Model):
    """How late the client of a live trial sent, in seconds: the highest of its replays.

    repeated: replays that were made again since the client was too late.
    """

    p50_s: Number
    p99_s: Number
    max_s: Number
    repeated: int


class Trial(_Model):
    """One setting on all tuning traces.

    arm: why it was tried; `predicted` settings were proposed by the simulator before a live search.
    state: `ok`; `failed` with the reason; `stopped` with the reason when its deficit was certain before the last trace.
    objectives: metric name to ratio (geometric mean over regimes), of a stopped trial over the traces seen; empty when
        failed. by_trace: trace name to metric name to value. predicted: as objectives, from the simulator, made
        without this trial's measurement; empty where nothing was predicted.
    regimes: regime to metric name to mean over its traces, in seconds.
    dimensions: the search space's own coordinates of this setting; empty when it lies outside the space.
    client: live only, how late the client was.
    cached_share: share of the prompt tokens that came out of the prefix cache; None where nothing is known of one.
    server_memory_bytes: live only, what the server's processes held at the trial's end; None where that is not known.
    measurements: how often it was measured; the figures are means over them.
    """

    number: int
    arm: Arm
    setting: Setting
    state: Literal["ok", "failed", "stopped"]
    reason: str | None = None
    objectives: dict[str, Number]
    by_trace: dict[str, dict[str, Number]] = {}
    predicted: dict[str, Number] = {}
    regimes: dict[str, dict[str, Number]]
    branch_steps: dict[str, int]
    dimensions: dict[str, float | None]
    on_front: bool
    duration_s: Number
    client: ClientLateness | None = None
    cached_share: float | None = None
    server_memory_bytes: int | None = None
    measurements: int = Field(default=1, ge=1)


class HeldOutRequests(_Model):
    """Per-request values of one setting on the held-out traces, in one order for all settings (so rows pair up)."""

    trace: list[str]
    regime: list[str]
    latency_s: list[float | None]
    ttft_s: list[float | None]
    tpot_s: list[float | None]
    prompt_tokens: list[int]
    output_tokens: list[int]

    @model_validator(mode="after")
    def _rows_are_whole(self) -> HeldOutRequests:
        lengths = {name: len(getattr(self, name)) for name in type(self).model_fields}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"its columns have different lengths: {lengths}")
        return self


class HeldOut(_Model):
    """One setting on the held-out traces.

    role: `tuned`, `paper default`, `best static` or `static`.
    regimes: regime to metric name to mean over its traces. regime_spread: the same, to [lowest, highest] trace.
    """

    role: str
    setting: Setting
    regimes: dict[str, dict[str, Number]]
    regime_spread: dict[str, dict[str, tuple[Number, Number]]]
    branch_steps: dict[str, int]
    requests: HeldOutRequests


class Effect(_Model):
    """An improvement in per cent, (1 - ratio) * 100, positive is better, with its bootstrap interval."""

    improvement_pct: Number
    low_pct: Number
    high_pct: Number

    @property
    def is_measurable(self) -> bool:
        """Whether the interval says anything; see `autotune.aggregate.is_measurable`."""
        return is_measurable(self.low_pct, self.high_pct)


class Comparison(_Model):
    """A setting against a reference on the held-out traces.

    overall: metric name to effect, geometric mean over regimes. regimes: regime to metric name to effect.
    steady: as overall, without the `saturated` regimes; None where none is saturated, or all are.
    share_faster, share_slower: of the matched requests, by more than `tie_s` seconds; with the bootstrap interval.
    verdict: on the preferred objective, `unchanged` where both are one setting; sentence: the same in words.
    costs: in words, metrics that are clearly worse, and regimes where a preferred one is. did_the_same: at every step of
    these traces; what was measured between them is noise then.
    """

    candidate: str
    reference: str
    preferred_metric: str
    overall: dict[str, Effect]
    regimes: dict[str, dict[str, Effect]]
    share_faster: Number
    share_faster_interval: tuple[Number, Number]
    share_slower: Number
    tie_s: Number
    num_requests: int
    num_traces: int
    confidence: Number
    verdict: Verdict
    sentence: str
    costs: list[str] = []
    did_the_same: bool = False
    steady: dict[str, Effect] | None = None
    saturated: list[str] = []

    def word(self, simulator_error_pct: float | None) -> str:
        """The verdict; one that rests on less than the simulator's own error is one in the simulator."""
        effect = self.overall.get(self.preferred_metric)
        is_within = effect is not None and is_within_error(effect.improvement_pct, simulator_error_pct)
        return f"{self.verdict} in the simulator" if is_within and self.verdict in ("better", "worse") else self.verdict


class NoiseInfo(_Model):
    """What an A/A measurement of the reference showed, in per cent; see `autotune.noise.NoiseFloor`.

    visible_held_out_pct: the smallest difference that the held-out comparison can see; a smaller gain is no winner.
    alike_pct: the largest difference that noise alone makes between two trials, at the study's confidence; trials within
    it cannot be told apart. None in results of an earlier version.
    further: measurements beyond the A/A test, of settings that did the same, which widened it.
    """

    metric: str
    replay_pct: Number
    objective_pct: Number
    visible_pct: Number
    visible_held_out_pct: Number
    repeats: int
    num_traces: int
    further: int = 0
    freedom: int = 0
    alike_pct: float | None = None


class DriftPoint(_Model):
    """The reference measured again after so many trials: change of its preferred objective; None with the reason."""

    after_trial: int
    change_pct: float | None
    reason: str | None


class Prediction(_Model):
    """The simulator beside a live study: what it was asked, and how far its predictions were off.

    profile: its name; source: where it comes from. settings: how many it swept, in sweep_s seconds.
    num_trials: measured trials that it is judged by. error_pct: mean absolute error of the preferred objective's ratio.
        bias_pct: mean error with its sign, positive where ratios are foretold too high and so gains too small; None in
        results of an earlier version.
    concordance: share of the pairs of trials, clearly apart when measured, that it ranks rightly; None without such
        pairs. rank_correlation: Spearman's, over all of them.
    verdict: `trusted`, `refitted` (to the trials' own step logs, then trusted) or `dropped`; sentence: why, in words.
    """

    profile: str
    source: Literal["calibrated", "given"]
    settings: int
    sweep_s: Number
    num_trials: int
    error_pct: Number
    concordance: float | None
    rank_correlation: float | None
    verdict: Literal["trusted", "refitted", "dropped"]
    sentence: str
    bias_pct: float | None = None


class RobustnessPoint(_Model):
    """The pick against the reference on held-out traces played faster or slower.

    rate_factor: 1 is the traffic as given. origin: `simulated` beside a live study too.
    overall, regimes: metric name to improvement in per cent, positive is better; per regime as well.
    saturated: regimes whose queue still grew at the end under either setting; figures there are not firm.
    """

    rate_factor: Number
    origin: Origin
    overall: dict[str, Number]
    regimes: dict[str, dict[str, Number]]
    saturated: list[str] = []


class ColdCheck(_Model):
    """The exported setting on a server started cold with the exported file, against its hot measurements.

    change_pct: how far the metric is from hot to cold, positive is worse; None when it could not be measured.
    reason: in words. noise_pct: what the noise explains over so many traces; None where it is not known.
    """

    metric: str
    num_traces: int
    change_pct: float | None
    reason: str
    noise_pct: float | None = None

    @property
    def is_beyond_noise(self) -> bool:
        """Whether cold and hot differ by more than the noise explains."""
        return None not in (self.change_pct, self.noise_pct) and abs(self.change_pct or 0) > (self.noise_pct or 0)


class ServerMemory(_Model):
    """The memory of a live study's servers; see `autotune.server_memory`. GPU memory, which vLLM takes whole, is no part.

    replays: after how many of them it was looked at. used_bytes, left_bytes: at the last look.
    growth_bytes: a trial, of the server that grew most; None where none did. is_near: whether memory would not last for
    long. restarts: servers started anew for it. sentence: the same in words.
    """

    replays: int
    used_bytes: int
    left_bytes: int | None
    growth_bytes: float | None
    is_near: bool
    restarts: int
    sentence: str


class Landscape(_Model):
    """The preferred objective over a plane of the space, other knobs as in the pick.

    ratio[row][column], row in y and column in x; None where the space does not allow the setting.
    """

    metric: str
    x_name: str
    y_name: str
    x: list[int]
    y: list[int]
    ratio: list[list[float | None]]
    fixed: dict[str, Any]


class Lane(_Model):
    """What the engine did under one setting on one trace: stretches of like steps in order of time, columns alike long.

    start_s, end_s: seconds from the trace's start; between two stretches the engine was idle. steps: scheduler steps in
    the stretch. budget: tokens allowed per step; branch: which rule set it, as its place in `Timeline.branches`.
    running, waiting: requests when a step began. tokens: scheduled per step, on average.
    thinned: whether stretches were merged to keep the file small; then the smallest budget stands for the others.
    """

    role: str
    setting: Setting
    start_s: list[Number]
    end_s: list[Number]
    steps: list[int]
    budget: list[int]
    branch: list[int]
    running: list[int]
    waiting: list[int]
    tokens: list[Number]
    thinned: bool = False


class Timeline(_Model):
    """One held-out trace step by step, under the tuned setting and those that it is compared with.

    why: why this trace, in words. arrival_s, prompt_tokens: its requests. branches: the names that lanes refer to.
    """

    trace: str
    regime: str
    why: str
    arrival_s: list[Number]
    prompt_tokens: list[int]
    branches: list[str]
    lanes: list[Lane]


class TraceInfo(_Model):
    """A trace of the study, by name and digest."""

    name: str
    regime: str
    purpose: Literal["tuning", "held-out"]
    seed: int | None
    digest: str
    num_requests: int
    duration_s: Number
    rate_per_s: Number


class StudyResults(_Model):
    """Everything that a study found.

    pick_trial: what the choice rule named; `pick` may differ from it in knobs that never acted.
    exported: what is exported (the reference, when there is no clear winner).
    importance: metric name to dimension name to share, summing to 1; with the method's name.
    hypervolume: arm name (`search`, `random`) to the hypervolume of the front after each of its trials.
    noise: the A/A measurement, one entry per preferred metric; empty where measurements do not vary. noise_beside: the
    same of the other objectives, which decide nothing.
    drift: the reference re-measured during the search. cold: the export on a cold server; None for a simulated study.
    server_memory: whether a live study's server leaked; None where its memory is not known.
    maps: simulated maps over b_max and b_cap, one for each n_th and t_large; empty where nothing was swept.
    prediction: how well the simulator foretold a live study's trials; None without one.
    robustness: the pick at other rates; empty where it was not asked. saturated: regimes of the held-out traces whose
    queue still grew at the end: results there are of low confidence.
    timeline: one held-out trace step by step; None where no steps were recorded.
    simulator_error_pct: how far the profile was off in mean latency where that could be checked; None where it could not,
    and for live studies.
    not_identified: knobs whose branch never fired on the traces, with the reason; their defaults are exported.
    provenance: profile or server, versions, seeds, command line, digests.
    """

    version: Literal[1] = 1
    name: str
    origin: Origin
    created_at: str
    objectives: list[Objective]
    prefer: str
    space: dict[str, Any]
    traces: list[TraceInfo]
    trials: list[Trial]
    reference_trial: int
    pick_trial: int
    choice: str
    exported: Setting
    exported_role: str
    best_static: Setting
    held_out: list[HeldOut]
    comparisons: list[Comparison]
    importance: dict[str, dict[str, Number]]
    importance_method: str
    hypervolume: dict[str, list[Number]]
    landscape: Landscape | None
    maps: list[Landscape] = []
    prediction: Prediction | None = None
    robustness: list[RobustnessPoint] = []
    saturated: list[str] = []
    timeline: Timeline | None = None
    simulator_error_pct: float | None = None
    not_identified: dict[str, str]
    warnings: list[str]
    noise: list[NoiseInfo] = []
    noise_beside: list[NoiseInfo] = []
    drift: list[DriftPoint] = []
    cold: ColdCheck | None = None
    server_memory: ServerMemory | None = None
    provenance: dict[str, Any]

    @property
    def reference_measurements(self) -> int:
        """How often the reference was measured before the search; what others are compared with is the mean."""
        return next((trial.measurements for trial in self.trials if trial.number == self.reference_trial), 1)

    @property
    def pick(self) -> Setting:
        """The tuned setting, as it was compared: the picked trial's, with the reference's value for what never acted."""
        compared = [setting.setting for setting in self.held_out if setting.role == "tuned"]
        return compared[0] if compared else self.trials[self.pick_trial].setting

    def save(self, path: Path) -> None:
        """Writes the results to `path`, whole or not at all."""
        write_atomically(path, dump_json(self.model_dump(mode="json")).encode())

    @classmethod
    def load(cls, path: Path) -> StudyResults:
        """The results in the file `path`. Raises InvalidInput when it is missing, damaged or of another version."""
        try:
            data = path.read_bytes()
            found = cls.model_validate_json(data)
        except FileNotFoundError:
            raise InvalidInput(f"{path}: there is no such file; a finished `ppas tune` leaves it") from None
        except OSError as error:
            raise InvalidInput(f"{path}: cannot be read: {error.strerror}; run `ppas tune` again") from None
        except ValidationError as error:
            _require_known_version(path, data)
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"]) or "the file"
            raise InvalidInput(
                f"{path}: {place}: {first['msg']}; this release reads results version {VERSION}"
            ) from None
        settings = [found.exported, found.best_static, *(trial.setting for trial in found.trials)]
        settings += [one.setting for one in found.held_out]
        try:
            for setting in settings:
                setting.to_params()
        except InvalidInput as error:
            raise InvalidInput(f"{path}: {setting.label}: {error}") from None
        for name in ("reference_trial", "pick_trial"):
            if not 0 <= getattr(found, name) < len(found.trials):
                raise InvalidInput(
                    f"{path}: {name} is {getattr(found, name)}, and there are {len(found.trials)} trials"
                )
        return found
