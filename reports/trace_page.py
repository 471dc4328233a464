"""How what `ppas trace show --profile` says becomes one HTML file that opens offline. Computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppas_core.files import write_atomically
from ppas_core.policy import PolicyParams
from reports import html
from reports.drawing import axis, blank
from reports.numbers import cleaned, counted, duration, percent, significant
from reports.panel import Panel
from reports.tables import Cell, Table
from reports.theme import colour

_LENGTHS = ("min", "P50", "mean", "P90", "P95", "P99", "max", "total")


def write_trace_page(facts: Mapping[str, Any], path: Path) -> None:
    """Writes the page to `path`, whole or not at all. Raises OSError.

    facts: as of `traces.describe.describe`, with what `autotune.look.look` found under `predicted`.
    """
    write_atomically(path, render(facts).encode("utf-8", "replace"))


def render(facts: Mapping[str, Any]) -> str:
    """The page as one HTML document."""
    found = facts["predicted"]
    panels = [_arrivals(facts), *(_lengths(facts, name) for name in ("prompt tokens", "output tokens"))]
    branches = found["branches"] or {}
    thresholds = [_threshold(knob, branches[knob]) for knob in ("n_th", "t_large") if branches.get(knob)]
    return html.document(
        "trace.html.j2",
        {panel.id: panel for panel in (*panels, *thresholds)},
        title=cleaned(facts["name"], 120),
        kind="P-PAS trace",
        simulated=True,
        lead=_lead(facts),
        profile=cleaned(found["profile"]),
        setting=PolicyParams.from_dict(found["setting"]).label(),
        findings=[cleaned(sentence, 1000) for sentence in found["findings"]],
        about=[panel.id for panel in panels],
        thresholds=[panel.id for panel in thresholds],
        lengths=_length_table(facts),
        load=_load_table(found["load"]),
        digest=facts["digest"],
    )


def _lead(facts: Mapping[str, Any]) -> str:
    rate = facts["requests per second"]
    pace = "all at one time" if rate is None else f"at {significant(rate)} a second"
    talks = f", {counted(facts['sessions'], 'session')}" if facts["sessions"] else ""
    span = duration(facts["last arrival, s"] - facts["first arrival, s"])
    return (
        f"{counted(facts['requests'], 'request')} {pace} over {span}{talks}; "
        f"{percent(100 * facts['prefix sharing'], signed=False)} of the prompt tokens stand in prefixes seen before."
    )


def _arrivals(facts: Mapping[str, Any]) -> Panel:
    load = facts["load"]
    starts = [place * load["bin_s"] for place in range(len(load["requests"]))]
    words = [f"arrivals per {found['window_s']:g} s vary by {found['index']:.2g}" for found in facts["dispersion"]]
    if facts["burstiness"] is not None:
        words.insert(0, f"gaps vary by {facts['burstiness']:.2f} of their mean")
    said = "; ".join(words)
    caption = (
        f"Requests per {load['bin_s']:g} s. {said[:1].upper()}{said[1:]}{' (1 for a Poisson process).' if said else ''}"
    )
    figure = _bars(starts, load["requests"], "%{y} requests from %{x:g} s on", "Seconds", "Requests")
    figure.update_traces(width=load["bin_s"] * 0.92, offset=0)
    return Panel("arrivals", "Arrivals over time", caption, caption, (), {"": figure})


def _lengths(facts: Mapping[str, Any], name: str) -> Panel:
    found = facts[name]["histogram"]
    labels = [f"{low:,} to {2 * low - 1:,}" if low > 1 else "1" for low in found["from"]]
    figure = _bars(labels, found["requests"], "%{y} requests of %{x} tokens", name.capitalize(), "Requests")
    figure.update_layout(xaxis={"type": "category"})
    alt = "; ".join(f"{label}: {count}" for label, count in zip(labels, found["requests"], strict=True))
    caption = f"Requests by {name}, each bar over twice the range of the one before."
    return Panel(name.replace(" ", "-"), name.capitalize(), caption, f"{caption} {alt}.", (), {"": figure})


def _threshold(knob: str, tried: list[dict[str, Any]]) -> Panel:
    shares = [100 * one["share"] for one in tried]
    labels = [f"{one['value']:,}" for one in tried]
    figure = _bars(labels, shares, f"{knob} %{{x}}: %{{y:.1f}} % of the steps", knob, "Steps that it caps, %")
    figure.update_layout(xaxis={"type": "category"})
    caption = f"Share of scheduler steps that the branch of {knob} caps, with each value in place of the setting's own."
    alt = "; ".join(f"{label}: {share:.1f} %" for label, share in zip(labels, shares, strict=True))
    return Panel(f"threshold-{knob}", f"When {knob} acts", caption, f"{caption} {alt}.", (), {"": figure})


def _bars(x: list[Any], y: list[Any], hover: str, x_title: str, y_title: str) -> Any:
    figure = blank()
    figure.add_bar(x=x, y=y, marker={"color": colour("front")}, hovertemplate=f"{hover}<extra></extra>")
    figure.update_layout(xaxis=axis(x_title), yaxis=axis(y_title, rangemode="tozero"), bargap=0.08)
    return figure


def _length_table(facts: Mapping[str, Any]) -> Table:
    rows = tuple(
        (Cell(name.capitalize(), kind="head"), *(Cell(f"{facts[name][c]:,.0f}", kind="number") for c in _LENGTHS))
        for name in ("prompt tokens", "output tokens")
    )
    return Table("lengths", "Lengths", ("", *_LENGTHS), rows, "", sortable=False)


def _load_table(load: Mapping[str, Any] | None) -> Table:
    entries: list[tuple[str, str]] = []
    if load is not None:
        entries = [
            ("GPU busy", percent(100 * load["busy_share"], signed=False)),
            ("Arrivals per second", significant(load["requests_per_s"])),
            ("Served per second of GPU work", significant(load["requests_per_busy_s"])),
            ("Mean latency", duration(load["mean_latency_s"])),
            ("Mean latency over that of lone requests", significant(load["slowdown"])),
            ("Unfinished at the last arrival", f"{load['unfinished_at_last_arrival']:,}"),
            ("Running at most", f"{load['peak_running']:,}"),
            ("Waiting at most", f"{load['peak_waiting']:,}"),
            ("KV blocks held at most", f"{load['peak_kv_blocks']:,} of {load['kv_blocks']:,}"),
            ("Preemptions", f"{load['preemptions']:,}"),
        ]
    rows = tuple((Cell(name, kind="head"), Cell(value, kind="number")) for name, value in entries)
    return Table(
        "load", "Predicted load", ("", "Value"), rows, "No request of this trace fits the profile.", sortable=False
    )
