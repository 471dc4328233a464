"""The entry point of `vllm.general_plugins`: P-PAS by environment alone, without `--scheduler-cls`.

vLLM calls `register` in each of its processes before the engine is built. Where no variable asks for us it does
nothing and imports nothing of vLLM.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppas_core.vllm.settings import SETTINGS_FILE_VARIABLE, enabled_by_environment


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Whether the environment asks for our scheduler: switched on, or only to be switched or logged later."""
    return enabled_by_environment(environ) or bool(environ.get(SETTINGS_FILE_VARIABLE) or environ.get("PPAS_STEP_LOG"))


def register() -> None:
    """Have vLLM build our scheduler where no scheduler class was named. May be called more than once."""
    if not is_wanted(os.environ):
        return
    from vllm.config import SchedulerConfig

    stock: Any = SchedulerConfig.get_scheduler_cls
    if not getattr(stock, "made_by_ppas", False):
        SchedulerConfig.get_scheduler_cls = _with_ppas(stock)
    if path := os.environ.get(SETTINGS_FILE_VARIABLE):
        from ppas_core.vllm.metrics import register_metrics

        register_metrics(Path(path))


def _with_ppas(stock: Any) -> Any:
    @functools.wraps(stock)
    def get_scheduler_cls(self: Any) -> Any:
        if self.scheduler_cls is not None:
            return stock(self)  # somebody asked for a class by name; it may be ours
        from ppas_core.vllm.scheduler import AsyncPpasScheduler, SyncPpasScheduler

        return AsyncPpasScheduler if self.async_scheduling else SyncPpasScheduler

    get_scheduler_cls.made_by_ppas = True  # type: ignore[attr-defined]
    return get_scheduler_cls
