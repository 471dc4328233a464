"""`ppas trace show`: what a trace holds, drawn in the terminal, and what it means on a profile (simulated)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.markup import escape

from autotune.cli import console
from autotune.cli.settings import PrefixCaching, profile_option
from autotune.settings import parse_setting
from ppas_core.errors import InvalidInput
from traces.describe import describe
from traces.format import SESSIONS, read_trace
from traces.ledger import Ledger

_LEVELS: Final = " ▁▂▃▄▅▆▇█"
_BAR_WIDTH: Final = 30
_LENGTH_COLUMNS: Final = ("min", "P50", "mean", "P90", "P95", "P99", "max", "total")


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command()(show)


@console.reports_errors
def show(
    file: Annotated[Path, typer.Argument(help="A trace file.", show_default=False)],
    profile: Annotated[
        str | None, typer.Option(help="Say what it means on this simulator profile: name or file.", show_default=False)
    ] = None,
    setting: Annotated[str, typer.Option(help="With --profile: the setting, named as for `ppas simulate`.")] = "ppas",
    space: Annotated[
        str, typer.Option(help="With --profile: the search space whose thresholds are tried: a preset or a file.")
    ] = "ppas",
    prefix_caching: PrefixCaching = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="With --profile: write a page with figures here.", show_default=False)
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for pipes.")] = False,
) -> None:
    """Look before you tune: load over time, burstiness, lengths, prefixes, sessions; and what a profile makes of it.

    Example: ppas trace show traffic.jsonl --profile rtx5090-qwen2.5-3b --space ppas-plus
    """
    if html is not None and profile is None:
        raise InvalidInput("the page says what the trace means on a profile; give --profile with --html")
    trace = read_trace(file)
    facts = describe(trace)
    if profile is not None:
        from search_spaces.space import load_space

        params, tried = parse_setting(setting), load_space(space)
        from autotune.look import look  # loads numba, after the input was read
        from ppas_core.sim.profile import load_profile

        server = load_profile(profile_option(profile))
        server = replace(server, prefix_caching=prefix_caching or server.prefix_caching)
        facts["predicted"] = look(trace, server, params, tried)
    if html is not None:
        from reports.trace_page import write_trace_page

        write_trace_page(facts, html)
        console.err.print(escape(f"page: {html}"))
    if json_output:
        console.print_json(facts)
        return
    _show_arrivals(file, facts)
    _show_lengths(facts)
    _show_sharing(facts)
    if profile is not None:
        _show_predicted(facts["predicted"])
    for key, value in facts["provenance"].items():
        for line in [_plain(value)] if key != "import" else _account(value):
            console.out.print(escape(f"{key}: {line}"), style="dim")


def _show_arrivals(file: Path, facts: Mapping[str, Any]) -> None:
    span_s = facts["last arrival, s"] - facts["first arrival, s"]
    rate = facts["requests per second"]
    pace = "all at one time" if rate is None else f"in {console.duration(span_s)}, {rate:.3g} a second"
    mode = "later turns wait for answers" if facts["mode"] == SESSIONS else "open loop"
    console.out.print(f"[bold]{escape(str(file))}[/]: {facts['requests']} requests {pace}; {mode}")
    seed = "" if facts["seed"] is None else f", seed {facts['seed']}"
    console.out.print(escape(f"{facts['name']}; regime {facts['regime']}{seed}; {facts['digest']}"), style="dim")
    load = facts["load"]
    recorded = " (as recorded)" if facts["mode"] == SESSIONS else ""
    console.out.print(f"\narrivals over time{recorded}, {load['bin_s']:g} s a column, at most {max(load['requests'])}:")
    console.out.print(f"▕{sparkline(load['requests'])}▏", markup=False)
    if facts["burstiness"] is not None:
        windows = ", ".join(f"{found['index']:.2g} in {found['window_s']:g} s" for found in facts["dispersion"])
        console.out.print(
            f"gaps vary by {facts['burstiness']:.2f} of their mean"
            + (f"; arrivals per window vary by {windows}" if windows else "")
            + " (Poisson: 1)"
        )


def _show_lengths(facts: Mapping[str, Any]) -> None:
    names = ("prompt tokens", "output tokens")
    console.out.print()
    console.table(
        "",
        ("", *_LENGTH_COLUMNS),
        [(name, *(f"{facts[name][column]:,.0f}" for column in _LENGTH_COLUMNS)) for name in names],
    )
    for name in names:
        if facts[name]["min"] == facts[name]["max"]:
            continue
        found = facts[name]["histogram"]
        console.out.print(f"\n{name}:")
        most = max(found["requests"])
        for low, count in zip(found["from"], found["requests"], strict=True):
            label = f"{low:,}" if low == 1 else f"{low:,} to {2 * low - 1:,}"
            console.out.print(f"{label:>22} {bar(count, most):<{_BAR_WIDTH}} {count}", markup=False)


def _show_sharing(facts: Mapping[str, Any]) -> None:
    shared = facts["prompt tokens in prefixes seen before"]
    console.out.print(
        "\nprefixes: no prompt begins as an earlier one does"
        if shared == 0
        else f"\nprefixes: {100 * facts['prefix sharing']:.1f} % of the prompt tokens ({shared:,}) were sent before with all "
        "that precedes them: what an unbounded prefix cache would save"
    )
    talks = facts["conversations"]
    if talks is None:
        console.out.print("sessions: none")
        return
    think = talks["think time, s"]
    waiting = f"; {talks['waiting turns']} wait for an answer"
    if think is not None:
        waiting += f", thinking {think['median']:.3g} s (median, at most {think['max']:.3g})"
    console.out.print(
        f"sessions: {facts['sessions']} with {talks['requests in sessions']} requests, {talks['turns']['mean']:.2f} turns on "
        f"average, at most {talks['turns']['max']}{waiting}"
    )


def _show_predicted(found: Mapping[str, Any]) -> None:
    label = parse_setting(found["setting"]).label()
    console.out.print(f"\n[bold]On {escape(found['profile'])} under {escape(label)} (simulated)[/]")
    for sentence in found["findings"]:
        console.out.print(f"• {escape(sentence)}")
    if found["load"] is None:
        return
    load, steps = found["load"], found["branches"]["steps"]
    total = sum(steps.values())
    offered = "–" if load["requests_per_s"] is None else f"{load['requests_per_s']:.3g} /s"
    console.table(
        "",
        ("", "value"),
        [
            ("arrival rate", offered),
            ("served per second of GPU work", f"{load['requests_per_busy_s']:.3g} /s"),
            ("GPU busy", f"{100 * load['busy_share']:.1f} %"),
            ("mean latency", f"{load['mean_latency_s']:.3g} s, {load['slowdown']:.2f} times alone"),
            (
                "unfinished at the last arrival",
                f"{load['unfinished_at_last_arrival']}, {load['drain_s']:.3g} s to drain",
            ),
            ("running, waiting at most", f"{load['peak_running']}, {load['peak_waiting']}"),
            ("KV blocks held at most", f"{load['peak_kv_blocks']:,} of {load['kv_blocks']:,}"),
            ("preemptions", str(load["preemptions"])),
            *([("prompt tokens cached", f"{load['cached_prompt_tokens']:,}")] if load["cached_prompt_tokens"] else []),
            *(
                (f"steps by branch {branch}", f"{count} ({100 * count / total:.1f} %)")
                for branch, count in steps.items()
            ),
        ],
    )
    for knob in ("n_th", "t_large"):
        if tried := found["branches"].get(knob):
            console.table(
                f"{knob} in place of the setting's own",
                (knob, "steps that it caps", "share", "mean latency"),
                [
                    (
                        f"{one['value']}",
                        f"{one['steps']}",
                        f"{100 * one['share']:.1f} %",
                        f"{one['mean_latency_s']:.3g} s",
                    )
                    for one in tried
                ],
            )


def sparkline(counts: Sequence[int]) -> str:
    """One character per count, its height in proportion; only 0 is blank."""
    most = max(counts, default=0) or 1
    steps = len(_LEVELS) - 1
    return "".join(_LEVELS[-(-count * steps // most)] for count in counts)


def bar(count: int, most: int) -> str:
    """A bar in proportion, an eighth of a character fine; only 0 is blank."""
    eighths = -(-count * _BAR_WIDTH * 8 // most)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _account(value: Any) -> list[str]:
    """What became of the rows of an imported file, in the words of `ppas trace import`; another tool's as it is."""
    try:
        return Ledger(**value).lines()
    except (TypeError, ValueError):
        return [_plain(value)]


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(part)}" for key, part in value.items())
    if isinstance(value, list):
        return "; ".join(_plain(part) for part in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
