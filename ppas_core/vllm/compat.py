"""Which vLLM versions the subclass was checked against, and whether the installed scheduler has the shape that it
relies on.

The subclass relies on two lines of `Scheduler.schedule`: the step's budget is read from
`self.max_num_scheduled_tokens` at its start, and the scheduled total is asserted against the same attribute at its
end. From 0.22.1 to 0.33.0 nothing else is needed but the names below. Queues differ: `skipped_waiting` stands beside
`waiting` up to 0.30.0, `kv_holding_waiting` from 0.32.0.
"""

from __future__ import annotations

import inspect
from types import MappingProxyType
from typing import Any, Final

from ppas_core.errors import PpasError

CHECKED_VERSIONS: Final = MappingProxyType(
    {
        "0.22.1": "scheduler alone, step for step against the simulator",
        "0.27.1": "live, and step for step against the simulator",
        "0.30.0": "scheduler alone, step for step against the simulator",
        "0.32.0": "scheduler alone, step for step against the simulator",
        "0.33.0": "from its source",
    }
)
"""Version to how it was checked."""

WAITING_QUEUES: Final = ("waiting", "skipped_waiting", "kv_holding_waiting")
"""Attributes that hold requests which do not run yet; a version has some of them."""

_NEEDED_IN_SCHEDULE: Final = (
    "token_budget = self.max_num_scheduled_tokens",
    "total_num_scheduled_tokens <= self.max_num_scheduled_tokens",
    "+ request.num_output_placeholders",
    "if num_new_tokens == 0:",
    "self._make_cached_request_data(",
)
_NEEDED_METHODS: Final = ("schedule", "update_from_output", "_make_cached_request_data", "shutdown")
_NEEDED_REQUEST_NAMES: Final = (
    "num_computed_tokens",
    "num_prompt_tokens",
    "num_output_placeholders",
    "num_tokens_with_spec",
    "max_tokens",
)


class UnknownVllm(PpasError):
    """The installed vLLM does not look as the subclass needs it. The message says what was looked for."""


def problems_in_source(scheduler_source: str, request_source: str) -> list[str]:
    """What the subclass needs and these sources lack, in words; empty when everything is there."""
    found = [
        f"the scheduler has no method {name}" for name in _NEEDED_METHODS if f"def {name}(" not in scheduler_source
    ]
    found += [f"schedule() has no line with `{line}`" for line in _NEEDED_IN_SCHEDULE if line not in scheduler_source]
    found += [f"Request has no {name}" for name in _NEEDED_REQUEST_NAMES if name not in request_source]
    return found


def require_known_shape(scheduler: type, request: type, version: str) -> None:
    """Raise UnknownVllm where the installed classes lack what the subclass needs."""
    source = inspect.getsource(scheduler)
    if "self.ppas.budgets(" in source:
        raise UnknownVllm(
            f"vLLM {version}: its scheduler file carries our patch, which acts by itself; run `ppas patch revert`, or "
            f"name no scheduler class"
        )
    if found := problems_in_source(source, inspect.getsource(request)):
        raise UnknownVllm(
            f"vLLM {version}: P-PAS cannot act in this scheduler: {'; '.join(found)}. Checked versions: "
            f"{', '.join(CHECKED_VERSIONS)}. Use one of them, or switch P-PAS off"
        )


def is_checked(version: str) -> bool:
    """Whether this version, without a local part such as `+cpu`, was checked."""
    return version.split("+", 1)[0] in CHECKED_VERSIONS


def waiting_queues(scheduler: Any) -> list[Any]:
    """The queues of requests that do not run yet, as this version has them. Raises UnknownVllm where there is none."""
    queues = [queue for name in WAITING_QUEUES if (queue := getattr(scheduler, name, None)) is not None]
    if not queues:
        raise UnknownVllm(f"the scheduler has none of the queues {', '.join(WAITING_QUEUES)}")
    return queues
