"""How long a scheduler step takes: the step-time model. It knows neither the scheduler nor any GPU in particular."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ppas_core.errors import InvalidInput

_LARGEST = 1e7
_SHORTEST_S = 1e-9


@dataclass(frozen=True, slots=True)
class StepCost:
    """Coefficients of the step time, all at least 0, in seconds; validated at construction.

        t = step_s
          + prefill_step_s * [P > 0] + prefill_token_s * P + prefill_pair_s * A
          + prefill_ramp_token_s * min(P, prefill_ramp_tokens)
          + decode_token_s * D + decode_context_token_s * K
          + mixed_step_s * [P > 0 and D > 0]

    P: prefill tokens of the step. A: pairs of a prefill token and a token it attends to, the sum over chunks of
    `chunk * context_before + chunk * (chunk + 1) / 2`. D: decode tokens. K: KV entries that the decodes read, the sum
    of their contexts with the new token. A step is one fused pass: nothing is paid twice because it is mixed.

    mixed_step_s is what the decodes of a mixed step wait for: their attention runs in the kernel for prefills, which
    does not split a long context over the GPU. The ramp says that small chunks fill the GPU less well than large ones:
    each token costs prefill_ramp_token_s more until the step holds prefill_ramp_tokens (tokens, not seconds) of them.
    """

    step_s: float
    prefill_token_s: float
    prefill_pair_s: float
    decode_token_s: float
    decode_context_token_s: float
    prefill_step_s: float = 0.0
    mixed_step_s: float = 0.0
    prefill_ramp_token_s: float = 0.0
    prefill_ramp_tokens: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= _LARGEST:  # false for NaN as well
                unit = "tokens" if field.name == "prefill_ramp_tokens" else "seconds"
                raise InvalidInput(f"{field.name} is {value!r}; allowed: a finite number of {unit}, 0 to {_LARGEST:g}")
            object.__setattr__(self, field.name, float(value))
        if self.step_s + self.prefill_token_s + self.decode_token_s < _SHORTEST_S:
            raise InvalidInput(
                f"a step must take time: one of step_s, prefill_token_s, decode_token_s must be at least {_SHORTEST_S:g}"
            )

    def seconds(self, prefill_tokens: int, prefill_pairs: int, decode_tokens: int, decode_context_tokens: int) -> float:
        """The step's duration in seconds, summed in exactly the order of the compiled kernel."""
        duration = self.step_s
        if prefill_tokens > 0:
            duration += self.prefill_step_s
            duration += self.prefill_token_s * prefill_tokens
            duration += self.prefill_pair_s * prefill_pairs
            duration += self.prefill_ramp_token_s * min(float(prefill_tokens), self.prefill_ramp_tokens)
        if decode_tokens > 0:
            duration += self.decode_token_s * decode_tokens
            duration += self.decode_context_token_s * decode_context_tokens
            if prefill_tokens > 0:
                duration += self.mixed_step_s
        return duration

    def as_array(self) -> npt.NDArray[np.float64]:
        """The coefficients in field order, float64."""
        return np.array(
            (
                self.step_s,
                self.prefill_token_s,
                self.prefill_pair_s,
                self.decode_token_s,
                self.decode_context_token_s,
                self.prefill_step_s,
                self.mixed_step_s,
                self.prefill_ramp_token_s,
                self.prefill_ramp_tokens,
            )
        )

    def to_dict(self) -> dict[str, float]:
        """The coefficients as plain JSON values; `from_dict` gives them back."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StepCost:
        """Coefficients from parsed JSON. Those with a default may be absent.

        Raises InvalidInput on unknown or missing keys and on bad values.
        """
        known = [field.name for field in fields(cls)]
        required = [field.name for field in fields(cls) if field.default is MISSING]
        if unknown := sorted(set(data) - set(known)):
            raise InvalidInput(f"unknown step cost {unknown[0]!r}; allowed: {', '.join(known)}")
        if missing := [name for name in required if name not in data]:
            raise InvalidInput(f"step cost {missing[0]!r} is missing; required: {', '.join(required)}")
        return cls(**data)
