"""Which scheduler settings a study may try, and how a point of the optimiser becomes one of them.

Users write plain numbers (b_max, b_cap, n_th, t_large). The optimiser sees an encoding in which every point is valid
and no range depends on another knob, so that a joint model (Optuna's GP) keeps all of them:

    b_max, max_num_seqs  log2 of the value
    b_cap                fraction from 0 to 1 of the way, in log space, from the smallest cap that fits to b_max
    n_th                 the number itself
    t_large              log2 of the value; the top fifth or so of the interval means off

Rounding to the allowed values comes last. A static budget (b_cap == b_max) leaves the space in one form,
`PolicyParams.static`: the other knobs cannot act there, so points that differ in them alone are the same setting.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from math import isfinite, log2
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ppas_core.errors import InvalidInput, InvalidSettings
from ppas_core.naming import did_you_mean
from ppas_core.policy import DEFAULT_MAX_NUM_SEQS, PolicyParams, Scope
from search_spaces.explain import explain
from search_spaces.knobs import Interval, Range, ThresholdRange, log_edges, nearest_on_log_scale, refused, thin
from search_spaces.yaml_file import parse_yaml, read_text

if TYPE_CHECKING:
    import optuna

KNOBS: Final = ("b_max", "b_cap", "n_th", "t_large", "max_num_seqs")
"""Every knob that can be free, in the order of `Space.dimensions`."""

_DEFAULT_N_TH = 2
_OFF_SHARE = 0.25
"""Width of the bin that means off, as a share of the width of all values of t_large."""


class Space(BaseModel):
    """The settings that a study may try. Each knob is a number (fixed) or a range; checked when loaded.

    Raises pydantic's ValidationError; `load_space` turns it into InvalidInput.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    about: str = Field(default="", description="What the space is for, in one sentence.")
    b_max: Range = Field(description="Budget in tokens without pressure; the server's max_num_batched_tokens.")
    b_cap: Range | None = Field(
        default=None, description="Budget in tokens under pressure, at most b_max. Left out: static budgets only."
    )
    n_th: Interval = Field(
        default=Interval(low=_DEFAULT_N_TH, high=_DEFAULT_N_TH),
        description="Number of active prefills from which pressure holds.",
    )
    t_large: ThresholdRange | None = Field(
        default=None,
        description="P-PAS+: remaining prompt tokens from which one running prefill counts as large. "
        "Left out: P-PAS. With `off: true` both are tried.",
    )
    scope: Literal["prefill", "global"] = Field(
        default="prefill",
        description="What the budget bounds: the prefill tokens of a step, or all of its tokens.",
    )
    max_num_seqs: Range = Field(
        default=Range(low=DEFAULT_MAX_NUM_SEQS, high=DEFAULT_MAX_NUM_SEQS),
        description="Cap on concurrently running requests; usually fixed.",
    )
    decode_guard: bool = Field(
        default=False,
        description="Global scope only: raise a capped budget by the running decodes, so that none starves.",
    )

    @model_validator(mode="before")
    @classmethod
    def _off_is_absent(cls, data: Any) -> Any:
        """`t_large: off` reads as false in YAML 1.1; it means the same as leaving the key out."""
        if isinstance(data, Mapping) and data.get("t_large") is False:
            return {key: value for key, value in data.items() if key != "t_large"}
        return data

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        seqs, lowest = self.max_num_seqs.values[-1], self.b_max.values[0]
        if seqs > lowest:
            raise refused(
                f"max_num_seqs reaches {seqs}, above the smallest b_max, which is {lowest}; vLLM needs at least one "
                f"token per sequence: raise b_max.low or lower max_num_seqs"
            )
        if self.b_cap is None:
            for name in ("n_th", "t_large", "decode_guard", "scope"):
                if name in self.model_fields_set and getattr(self, name) is not None:
                    raise refused(f"{name} has no effect on static budgets; add b_cap, or remove {name}")
            return self
        if self.decode_guard and self.scope == "prefill":
            raise refused("decode_guard has no effect under the prefill scope; remove it, or set scope: global")
        if not self._caps(lowest, seqs):
            raise refused(self._why_no_cap(lowest, seqs))
        if self.b_cap.values[0] >= self.b_max.values[-1]:
            raise refused(
                f"b_cap starts at {self.b_cap.values[0]}, the largest b_max, so every setting is a static budget; "
                f"lower b_cap.low, or remove b_cap to search static budgets"
            )
        return self

    def _why_no_cap(self, b_max: int, max_num_seqs: int) -> str:
        assert self.b_cap is not None  # noqa: S101 - only asked when there is one
        low, high = self.b_cap.values[0], self.b_cap.values[-1]
        if low > b_max:
            return (
                f"b_cap starts at {low}, above the smallest b_max, which is {b_max}; b_cap must not exceed b_max: "
                f"lower b_cap.low to at most {b_max}, or raise b_max.low to at least {low}"
            )
        return (
            f"b_cap has no value from max_num_seqs = {max_num_seqs} to the smallest b_max = {b_max} (b_cap goes from "
            f"{low} to {high}); under the global scope a smaller one can starve running decodes: raise b_cap.high "
            f"and b_max.low, lower max_num_seqs, or set decode_guard: true"
        )

    # What there is

    @property
    def dimensions(self) -> tuple[str, ...]:
        """The free knobs by the user's names; also the names of the study's parameters."""
        return tuple(name for name in KNOBS if self._is_free(name))

    @property
    def max_b_max(self) -> int:
        """The largest b_max in tokens: what a server must be started with to serve every setting."""
        return self.b_max.values[-1]

    def size(self) -> int:
        """The number of distinct settings."""
        variants = len(self.n_th.values) * len(self._thresholds())
        if self.b_cap is None:
            return len(self.b_max.values) * len(self.max_num_seqs.values)
        caps, sequence_caps = self.b_cap.values, self.max_num_seqs.values
        too_small = sum(bisect_left(caps, n) for n in sequence_caps) if self._seqs_bound_caps else 0
        total = 0
        for b_max in self.b_max.values:
            pairs = len(sequence_caps) * bisect_right(caps, b_max) - too_small
            static = len(sequence_caps) * (b_max in caps)
            total += (pairs - static) * variants + static
        return total

    def describe(self) -> dict[str, Any]:
        """The space as plain JSON values, as a person writes it; `load_space` gives it back."""
        form: dict[str, Any] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name == "b_max" or (name in self.model_fields_set and value is not None):
                form[name] = value.plain() if isinstance(value, Interval) else value
        return form

    def contains(self, params: PolicyParams) -> bool:
        """Whether the space can produce these settings; of a static budget only b_max and max_num_seqs count."""
        return self._why_outside(params) is None

    def ends(self, params: PolicyParams) -> dict[str, str]:
        """The free knobs of `params` that are "lowest" or "highest" here; ends that no space can move do not count."""
        ends: dict[str, str] = {}
        for name in ("b_max", "max_num_seqs") if params.is_static else self.dimensions:
            knob: Interval = getattr(self, name)
            value, low, high = getattr(params, name), knob.values[0], knob.values[-1]
            if name == "b_cap" and self._seqs_bound_caps:
                low = max(low, params.max_num_seqs + 1)
            if value is None or low >= high:
                continue
            if value == low > 1:
                ends[name] = "lowest"
            elif value == high and not getattr(knob, "off", False):  # beyond the highest threshold comes off
                ends[name] = "highest"
        return ends

    def coordinates(self, params: PolicyParams) -> dict[str, float | None]:
        """The plain values of the free knobs in `params`, in tokens or counts; t_large None is off."""
        values = {name: getattr(params, name) for name in self.dimensions}
        return {name: None if value is None else float(value) for name, value in values.items()}

    def grid(self, max_points: int | None = None) -> Iterator[PolicyParams]:
        """Every distinct setting, or about `max_points` (never more), evenly over the log scale of each knob.

        Raises InvalidInput when max_points is below 1.
        """
        if max_points is not None and max_points < 1:
            raise InvalidInput(f"max_points is {max_points}; allowed: at least 1")
        return self._grid(self._counts(max_points))

    def _grid(self, counts: Mapping[str, int]) -> Iterator[PolicyParams]:
        thresholds = self._thin_thresholds(counts["t_large"])
        for max_num_seqs, b_max, caps in self._planes(counts):
            for b_cap in caps:
                if b_cap == b_max:
                    yield PolicyParams.static(b_max, max_num_seqs=max_num_seqs)
                    continue
                for n_th in thin(self.n_th.values, counts["n_th"]):
                    for t_large in thresholds:
                        yield self._setting(b_max, b_cap, n_th, t_large, max_num_seqs)

    def _planes(self, counts: Mapping[str, int]) -> Iterator[tuple[int, int, list[int]]]:
        """max_num_seqs, b_max and the caps beside them, thinned to `counts`."""
        for max_num_seqs in thin(self.max_num_seqs.values, counts["max_num_seqs"]):
            for b_max in thin(self.b_max.values, counts["b_max"]):
                yield max_num_seqs, b_max, thin(self._caps(b_max, max_num_seqs), counts["b_cap"])

    def _counts(self, max_points: int | None) -> dict[str, int]:
        """How many values of each knob make a balanced grid of at most `max_points`."""
        lengths = {
            "b_max": len(self.b_max.values),
            "b_cap": len(self._caps(self.max_b_max, self.max_num_seqs.values[0])),
            "n_th": len(self.n_th.values),
            "t_large": len(self._thresholds()),
            "max_num_seqs": len(self.max_num_seqs.values),
        }
        if max_points is None or self.size() <= max_points:
            return lengths
        counts = dict.fromkeys(lengths, 1)
        growing = [name for name in lengths if lengths[name] > 1]
        while growing:
            name = min(growing, key=counts.__getitem__)
            grown = {**counts, name: counts[name] + 1}
            if counts[name] == lengths[name] or self._grid_size(grown) > max_points:
                growing.remove(name)
            else:
                counts = grown
        return counts

    def _grid_size(self, counts: Mapping[str, int]) -> int:
        variants = min(counts["n_th"], len(self.n_th.values)) * counts["t_large"]
        return sum(variants * len(caps) - (b_max in caps) * (variants - 1) for _, b_max, caps in self._planes(counts))

    # The optimiser's view

    def encoded_bounds(self) -> dict[str, tuple[float, float]]:
        """The lowest and highest encoded value of each free knob; n_th takes whole numbers only."""
        return {name: self._bounds(name) for name in self.dimensions}

    def suggest(self, trial: optuna.Trial) -> PolicyParams:
        """The settings of `trial`: asks it for every free knob and decodes."""
        point: dict[str, float] = {}
        for name, (low, high) in self.encoded_bounds().items():
            if name == "n_th":
                point[name] = trial.suggest_int(name, int(low), int(high))
            else:
                point[name] = trial.suggest_float(name, low, high)
        return self.decode(point)

    def decode(self, point: Mapping[str, float]) -> PolicyParams:
        """The settings at an encoded point; values beyond the bounds count as the bound.

        Raises InvalidSettings when a free knob is missing, unknown, or no number.
        """
        if set(point) != set(self.dimensions):
            raise InvalidSettings(
                f"the point has {', '.join(sorted(point)) or 'no knob'}; "
                f"this space needs {', '.join(self.dimensions) or 'none'}"
            )
        clipped: dict[str, float] = {}
        for name, (low, high) in self.encoded_bounds().items():
            value = float(point[name])
            if not isfinite(value):
                raise InvalidSettings(f"encoded {name} is {value}; allowed: {low:g} to {high:g}")
            clipped[name] = min(max(value, low), high)
        max_num_seqs = _decoded(self.max_num_seqs.values, clipped.get("max_num_seqs"))
        b_max = _decoded(self.b_max.values, clipped.get("b_max"))
        caps = self._caps(b_max, max_num_seqs)
        low, high = log_edges(caps)
        b_cap = nearest_on_log_scale(caps, low + (high - low) * clipped.get("b_cap", 0.5))
        n_th = round(clipped.get("n_th", self.n_th.low))
        return self._setting(b_max, b_cap, n_th, self._decoded_threshold(clipped.get("t_large")), max_num_seqs)

    def encode(self, params: PolicyParams) -> dict[str, float | int]:
        """The point that decodes to `params`, for `study.enqueue_trial`. Raises InvalidSettings when outside.

        A static budget with other knobs set decodes to the same budget as `PolicyParams.static`.
        """
        if (reason := self._why_outside(params)) is not None:
            raise InvalidSettings(f"{params.label()} lies outside the space: {reason}")
        low, high = log_edges(self._caps(params.b_max, params.max_num_seqs))
        point: dict[str, float | int] = {
            "b_max": log2(params.b_max),
            "b_cap": (log2(params.b_cap) - low) / (high - low),
            "n_th": min(max(params.n_th, self.n_th.low), self.n_th.high),
            "t_large": self._encoded_threshold(params.t_large),
            "max_num_seqs": log2(params.max_num_seqs),
        }
        return {name: point[name] for name in self.dimensions}

    # Parts

    @property
    def _seqs_bound_caps(self) -> bool:
        """Whether a b_cap below max_num_seqs is out of the question."""
        return self.scope == "global" and not self.decode_guard and self.b_cap is not None

    def _caps(self, b_max: int, max_num_seqs: int) -> Sequence[int]:
        """The values of b_cap that fit beside the other two, ascending."""
        if self.b_cap is None:
            return (b_max,)
        values = self.b_cap.values
        least = max_num_seqs if self._seqs_bound_caps else 1
        return values[bisect_left(values, least) : bisect_right(values, b_max)]

    def _thresholds(self) -> list[int | None]:
        if self.t_large is None:
            return [None]
        return [*self.t_large.values, *([None] if self.t_large.off else [])]

    def _thin_thresholds(self, count: int) -> list[int | None]:
        if self.t_large is None or (self.t_large.off and count == 1):
            return [None]
        if self.t_large.off:
            return [*thin(self.t_large.values, count - 1), None]
        return list(thin(self.t_large.values, count))

    def _is_free(self, name: str) -> bool:
        if name == "b_cap":
            return len(self._caps(self.max_b_max, self.max_num_seqs.values[0])) > 1
        knob: Interval | None = getattr(self, name)
        return knob is not None and knob.is_free

    def _bounds(self, name: str) -> tuple[float, float]:
        if name == "b_cap":
            return 0.0, 1.0
        knob: Interval = getattr(self, name)
        if name == "n_th":
            return knob.low, knob.high
        low, high = log_edges(knob.values)
        if isinstance(knob, ThresholdRange) and knob.off:
            high += _OFF_SHARE * (high - low)
        return low, high

    def _decoded_threshold(self, encoded: float | None) -> int | None:
        if self.t_large is None:
            return None
        if encoded is not None and self.t_large.off and encoded > log_edges(self.t_large.values)[1]:
            return None
        return _decoded(self.t_large.values, encoded)

    def _encoded_threshold(self, t_large: int | None) -> float:
        if t_large is not None:
            return log2(t_large)
        # A static budget is off even where off is no choice of its own; any value decodes to it.
        if self.t_large is None or not self.t_large.off:
            return log2(self.t_large.values[-1]) if self.t_large is not None else 0.0
        return (log_edges(self.t_large.values)[1] + self._bounds("t_large")[1]) / 2

    def _setting(self, b_max: int, b_cap: int, n_th: int, t_large: int | None, max_num_seqs: int) -> PolicyParams:
        if b_cap == b_max:
            return PolicyParams.static(b_max, max_num_seqs=max_num_seqs)
        return PolicyParams(b_max, b_cap, n_th, t_large, Scope(self.scope), max_num_seqs, self.decode_guard)

    def _why_outside(self, params: PolicyParams) -> str | None:
        """The first knob of `params` that the space does not allow; None when it allows all."""
        if params.max_num_seqs not in self.max_num_seqs.values:
            return f"max_num_seqs is {params.max_num_seqs}; allowed: {_spelled(self.max_num_seqs.values)}"
        if params.b_max not in self.b_max.values:
            return f"b_max is {params.b_max}; allowed: {_spelled(self.b_max.values)}"
        caps = self._caps(params.b_max, params.max_num_seqs)
        if params.b_cap not in caps:
            return f"b_cap is {params.b_cap}; allowed with this b_max: {_spelled(caps)}"
        if params.is_static:
            return None
        if params.n_th not in self.n_th.values:
            return f"n_th is {params.n_th}; allowed: {_spelled(self.n_th.values)}"
        if params.t_large not in self._thresholds():
            return f"t_large is {params.t_large or 'off'}; allowed: {self.describe().get('t_large', 'off')}"
        if params.scope != self.scope:
            return f"scope is {params.scope}; allowed: {self.scope}"
        if params.decode_guard != self.decode_guard:
            return f"decode_guard is {params.decode_guard}; allowed: {self.decode_guard}"
        return None


def preset_names() -> tuple[str, ...]:
    """The names of the spaces that come with the package."""
    return tuple(sorted(file.name.removesuffix(".yaml") for file in _preset_files() if file.name.endswith(".yaml")))


def load_space(source: str | Path | Mapping[str, Any]) -> Space:
    """The space that `source` names: a preset, a YAML file, or the keys themselves.

    The key `preset` takes a preset as the base; the other keys replace its own, one by one.
    Raises InvalidInput, naming the source, the value, what is allowed and the remedy.
    """
    where, data = ("search space", source) if isinstance(source, Mapping) else _read(source)
    if "preset" in data:
        _, base = _read_preset(str(data["preset"]))
        data = {**base, **{key: value for key, value in data.items() if key != "preset"}}
    try:
        return Space.model_validate(data)
    except ValidationError as error:
        raise InvalidInput(f"{where}: {explain(error, Space)[0]}") from None


def _read(source: str | Path) -> tuple[str, Mapping[str, Any]]:
    if isinstance(source, str) and not (source.endswith((".yaml", ".yml")) or "/" in source):
        return _read_preset(source)
    try:
        return _parsed(str(source), read_text(Path(source)))
    except FileNotFoundError:
        raise InvalidInput(
            f"{source}: cannot be read: there is no such file; give a preset name or a YAML file"
        ) from None


def _read_preset(name: str) -> tuple[str, Mapping[str, Any]]:
    if name not in preset_names():
        raise InvalidInput(f"no search space {name!r}{did_you_mean(name, preset_names())}, or the path of a YAML file")
    file = resources.files("search_spaces").joinpath("presets", f"{name}.yaml")
    return _parsed(f"preset {name}", file.read_text(encoding="utf-8"))


def _preset_files() -> Iterator[Any]:
    return resources.files("search_spaces").joinpath("presets").iterdir()


def _parsed(where: str, text: str) -> tuple[str, Mapping[str, Any]]:
    data = parse_yaml(text, where)
    if not isinstance(data, Mapping):
        raise InvalidInput(f"{where}: holds no keys; a search space starts with b_max: (see the presets)")
    return where, data


def _decoded(values: Sequence[int], encoded: float | None) -> int:
    return values[0] if encoded is None else nearest_on_log_scale(values, encoded)


def _spelled(values: Sequence[int]) -> str:
    if len(values) <= 8:
        return ", ".join(map(str, values)) or "none"
    if isinstance(values, range):
        return f"{values[0]} to {values[-1]} in steps of {values.step}"
    return ", ".join(map(str, values))
