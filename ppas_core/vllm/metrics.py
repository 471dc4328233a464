"""Prometheus metrics on vLLM's own `/metrics`, from the state file that the engine keeps.

The engine runs in another process than the API server, whose registry is scraped; so the collector reads the state
file at each scrape. With several API servers (`--api-server-count`) vLLM scrapes a multiprocess registry instead,
which has no place for custom collectors: the metrics are then absent.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ppas_core.errors import PpasError
from ppas_core.vllm.live import read_state

_registered: set[Path] = set()


class PpasCollector:
    """Reads one engine's state at each scrape; gives nothing while there is none."""

    def __init__(self, settings_file: Path) -> None:
        self._settings_file = settings_file

    def collect(self) -> Iterator[Any]:
        """The metrics of the engine's latest state, which is at most a second old while it works."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        try:
            state = read_state(self._settings_file)
        except (PpasError, OSError):
            return
        if state is None:
            return
        yield GaugeMetricFamily(
            "ppas_settings_version", "Version of the settings in force, 0 at start", value=state["in_force"]["version"]
        )
        yield GaugeMetricFamily(
            "ppas_enabled", "1 while a policy is in force", value=float(state["in_force"]["ppas"] is not None)
        )
        if state["budget"] is not None:
            yield GaugeMetricFamily("ppas_budget_tokens", "Budget of the latest step in tokens", value=state["budget"])
        steps = CounterMetricFamily("ppas_steps", "Scheduler steps by what set their budget", labels=["branch"])
        for branch, count in {**state["steps_by_branch"], "off": state["steps_off"]}.items():
            steps.add_metric([branch], count)
        yield steps
        changes = CounterMetricFamily("ppas_settings_changes", "Settings changes by outcome", labels=["status"])
        for status, count in state["ack_counts"].items():
            changes.add_metric([status], count)
        yield changes


def register_metrics(settings_file: Path) -> None:
    """Put the collector into the process's default registry, once."""
    if settings_file in _registered:
        return
    _registered.add(settings_file)
    from prometheus_client import REGISTRY

    REGISTRY.register(PpasCollector(settings_file))
