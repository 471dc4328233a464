"""Which token budget a scheduler step gets: the P-PAS and P-PAS+ decision as pure functions.

Source: T. Sämann, "P-PAS: Prefill-Pressure Adaptive Scheduling for Long-Context LLM Serving", arXiv 2608.15171
(Algorithm 1) and, for P-PAS+ and the global scope, the public vLLM 0.27.1 generation of the author's repository.
This module knows neither vLLM nor the simulator; it neither logs nor reads the environment.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, NamedTuple

from ppas_core.errors import InvalidSettings

DEFAULT_MAX_NUM_SEQS = 256
"""vLLM's default cap on concurrent sequences on the paper's machines."""
MAX_VALUE = 2**24
"""The largest value of any setting: no engine has such a budget, and arithmetic with it is safe everywhere."""


class Scope(StrEnum):
    """What the budget bounds in a step."""

    PREFILL = "prefill"
    """The prefill tokens; decodes come on top, within b_max as a whole (the paper's Algorithm 1)."""
    GLOBAL = "global"
    """All tokens of the step (the vLLM 0.27.1 generation)."""


class Branch(StrEnum):
    """Which condition set the budget of a step."""

    MAX = "max"
    """No condition held: b_max."""
    PRESSURE = "pressure"
    """Prefill pressure: at least n_th active prefills while something decodes."""
    LARGE_PREFILL = "large_prefill"
    """P-PAS+ only: one running prefill with at least t_large tokens left beside two or more decodes."""


# Looked up once: a member of an enumeration costs a Python call each time, and `decide` runs at every step of a server.
_MAX, _PRESSURE, _LARGE_PREFILL, _GLOBAL = Branch.MAX, Branch.PRESSURE, Branch.LARGE_PREFILL, Scope.GLOBAL


@dataclass(frozen=True, slots=True)
class PolicyParams:
    """One complete setting of the scheduler; validated at construction.

    b_max: budget in tokens without pressure; the engine's `max_num_batched_tokens`.
    b_cap: budget in tokens under pressure; equal to b_max for a static budget.
    n_th: number of active prefills from which pressure holds.
    t_large: P-PAS+ threshold in remaining prompt tokens; None is P-PAS.
    scope: what the budget bounds, see `Scope`.
    max_num_seqs: the engine's cap on concurrently running requests.
    decode_guard: under the global scope, raise a step's budget by its running decodes, so that none starves.

    Raises InvalidSettings when a value is out of range, and when a global b_cap below max_num_seqs could starve
    decodes: vLLM serves its running list in order, so a budget below its length leaves the tail without a token.
    """

    b_max: int
    b_cap: int
    n_th: int = 2
    t_large: int | None = None
    scope: Scope = Scope.PREFILL
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    decode_guard: bool = False

    def __post_init__(self) -> None:
        for name in ("b_max", "b_cap", "n_th", "max_num_seqs"):
            _require_positive_int(name, getattr(self, name))
        if self.t_large is not None:
            _require_positive_int("t_large", self.t_large)
        try:
            object.__setattr__(self, "scope", Scope(self.scope))
        except ValueError:
            raise InvalidSettings(f"scope is {self.scope!r}; allowed: 'prefill' or 'global'") from None
        if not isinstance(self.decode_guard, bool):
            raise InvalidSettings(f"decode_guard is {self.decode_guard!r}; allowed: true or false")
        if self.b_cap > self.b_max:
            raise InvalidSettings(f"b_cap is {self.b_cap}; it must not exceed b_max, which is {self.b_max}")
        if self.b_max < self.max_num_seqs:
            raise InvalidSettings(
                f"b_max is {self.b_max}; vLLM needs one token per sequence (max_num_seqs = {self.max_num_seqs})"
            )
        if self.scope is Scope.GLOBAL and self.b_cap < self.max_num_seqs and not self.decode_guard:
            raise InvalidSettings(
                f"b_cap is {self.b_cap} under the global scope; below max_num_seqs = {self.max_num_seqs} it can starve "
                f"running decodes: raise b_cap, lower max_num_seqs, or set decode_guard"
            )

    @property
    def is_static(self) -> bool:
        """Whether the budget never changes."""
        return self.b_cap == self.b_max

    @classmethod
    def static(cls, budget: int, *, max_num_seqs: int = DEFAULT_MAX_NUM_SEQS) -> PolicyParams:
        """A static budget of `budget` tokens a step: stock vLLM with that `max_num_batched_tokens`."""
        return cls(b_max=budget, b_cap=budget, scope=Scope.GLOBAL, max_num_seqs=max_num_seqs)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PolicyParams:
        """Settings from parsed JSON or YAML. Raises InvalidSettings on unknown or missing keys and on bad values."""
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(data) - set(known), key=str):
            raise InvalidSettings(f"unknown setting {unknown[0]!r}; allowed: {', '.join(known)}")
        if missing := [name for name in ("b_max", "b_cap") if name not in data]:
            raise InvalidSettings(f"setting {missing[0]!r} is missing; required: b_max and b_cap")
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain JSON values; `from_dict` gives them back."""
        return {**asdict(self), "scope": str(self.scope)}

    def label(self) -> str:
        """A short name for tables: `mbt-2048` for a static budget, else n_th/b_max/b_cap: `2/16384/2048 prefill`.

        Further parts are T and t_large for P-PAS+, s and max_num_seqs where it is not vLLM's default, and `guard`.
        """
        if self.is_static:
            parts = [f"mbt-{self.b_max}"]
        else:
            parts = [f"{self.n_th}/{self.b_max}/{self.b_cap}"]
            parts += [f"T{self.t_large}"] if self.t_large is not None else []
            parts += [str(self.scope)]
            parts += ["guard"] if self.decode_guard else []
        parts += [f"s{self.max_num_seqs}"] if self.max_num_seqs != DEFAULT_MAX_NUM_SEQS else []
        return " ".join(parts)


class QueueState(NamedTuple):
    """What the policy sees of the scheduler at the start of a step.

    A prefill is a request with num_computed_tokens < num_prompt_tokens; a decode is any other running request.

    running_prefills, running_decodes: counts over the running queue.
    waiting_prefills: prefills in the waiting queue and the skipped-waiting queue together.
    remaining_running_prefill_tokens: prompt tokens still to compute over the running prefills.
    """

    running_prefills: int
    running_decodes: int
    waiting_prefills: int
    remaining_running_prefill_tokens: int


class Decision(NamedTuple):
    """The budget of one step in tokens, and the branch that set it. What the budget bounds is the scope's matter."""

    budget: int
    branch: Branch


def decide(state: QueueState, params: PolicyParams) -> Decision:
    """The budget for the step that starts in `state`.

        pressure      = running_prefills + waiting_prefills >= n_th  and  running_decodes > 0
        large_prefill = running_prefills == 1 and running_decodes >= 2 and remaining_running_prefill_tokens >= t_large

    b_cap when pressure, or (P-PAS+) large_prefill, holds; b_max otherwise. Pressure is named when both hold. With
    `decode_guard` under the global scope a capped budget grows by running_decodes, never beyond b_max.
    """
    branch = _branch(state, params)
    if branch is _MAX:
        return Decision(params.b_max, branch)
    if params.decode_guard and params.scope is _GLOBAL:
        return Decision(min(params.b_cap + state.running_decodes, params.b_max), branch)
    return Decision(params.b_cap, branch)


def _branch(state: QueueState, params: PolicyParams) -> Branch:
    running_prefills, running_decodes, waiting_prefills, remaining_tokens = state
    if running_prefills + waiting_prefills >= params.n_th and running_decodes > 0:
        return _PRESSURE
    t_large = params.t_large
    if t_large is not None and running_prefills == 1 and running_decodes >= 2 and remaining_tokens >= t_large:
        return _LARGE_PREFILL
    return _MAX


def _require_positive_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidSettings(f"{name} is {value!r}; allowed: a whole number from 1 to {MAX_VALUE}")
    if value > MAX_VALUE:
        shown = value if value < 10**30 else "a number of more than 30 digits"
        raise InvalidSettings(f"{name} is {shown}; allowed: 1 to {MAX_VALUE}")
