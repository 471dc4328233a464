"""`ppas simulate` and `ppas compare`: named settings on traces, without a study."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from autotune.cli import console
from autotune.settings import HELP, parse_setting
from ppas_core.errors import InvalidInput
from ppas_core.policy import PolicyParams
from traces.format import Trace, read_trace

if TYPE_CHECKING:
    from autotune.evaluate import Evaluator
    from autotune.spec import StudySpec

_SHOWN = ("mean_latency_s", "p95_latency_s", "mean_ttft_s", "p95_ttft_s", "mean_tpot_s", "makespan_s")

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for pipes.")]
Traces = Annotated[
    list[Path] | None,
    typer.Option("--trace", "-t", help="Trace file; repeat for more. Default: the held-out traces of --study."),
]
Study = Annotated[
    Path | None,
    typer.Option(help="Study file whose held-out traces and profile are used; default: the paper's workload."),
]
PrefixCaching = Annotated[bool, typer.Option("--prefix-caching", help="Simulate vLLM's prefix cache.")]
ProfileOption = Annotated[str | None, typer.Option(help="Simulator profile: name or file.", show_default=False)]


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    app.command()(simulate)
    app.command()(compare)


@console.reports_errors
def simulate(
    setting: Annotated[list[str], typer.Argument(metavar="SETTING…", help=HELP, show_default=False)],
    trace: Traces = None,
    study: Study = None,
    profile: ProfileOption = None,
    prefix_caching: PrefixCaching = False,
    json_output: Json = False,
) -> None:
    """Replay settings on the simulator and print what requests would see (simulated).

    Example: ppas simulate ppas mbt-2048 mbt-16384
    """
    params = [parse_setting(text) for text in setting]
    bench = _bench(study, trace, profile, prefix_caching)
    from autotune import aggregate, metrics

    limits = bench.spec.metric_limits()
    measured = []
    for one in params:
        replays = [bench.evaluator.replay(one, trace) for trace in bench.traces]
        measured.append((one, aggregate.regime_means(replays, metrics.METRICS, limits), replays))
    if json_output:
        console.print_json(
            [
                {
                    "setting": one.to_dict(),
                    "origin": "simulated",
                    "profile": bench.profile_name,
                    "regimes": means,
                    "branch_steps": aggregate.sum_branches(replays),
                    "cached_share": aggregate.cached_share(replays),
                }
                for one, means, replays in measured
            ]
        )
        return
    for regime in measured[0][1]:
        console.table(
            f"{regime}, {bench.profile_name} (simulated), mean over traces",
            ["setting", *(console.short(metrics.metric(name).label) for name in _SHOWN)],
            [
                (text, *(_seconds(means[regime][name]) for name in _SHOWN))
                for text, (_, means, _) in zip(setting, measured, strict=True)
            ],
        )
    if (share := aggregate.cached_share(measured[0][2])) is not None:
        console.out.print(f"prompt tokens from the prefix cache (simulated): {share:.1%} under {escape(setting[0])}")
    _say_doubts(bench, params)


@console.reports_errors
def compare(
    candidate: Annotated[str, typer.Argument(help=HELP, show_default=False)],
    reference: Annotated[str, typer.Argument(help="The setting to compare with, named likewise.")] = "ppas",
    trace: Traces = None,
    study: Study = None,
    profile: ProfileOption = None,
    prefix_caching: PrefixCaching = False,
    prefer: Annotated[
        str | None, typer.Option(help="Metric of the verdict; default: the study's.", show_default=False)
    ] = None,
    json_output: Json = False,
) -> None:
    """Compare two settings on the same traces in the simulator, paired per request, with intervals and a verdict.

    Example: ppas compare 2/16384/1024 ppas
    """
    sides = [(text, parse_setting(text)) for text in (candidate, reference)]
    if sides[0][1].label() == sides[1][1].label():
        raise InvalidInput(
            f"{candidate} and {reference} are the same setting, {sides[0][1].label()}; name another to compare with"
        )
    bench = _bench(study, trace, profile, prefix_caching)
    from autotune import choose, metrics
    from autotune.compare import compare_settings
    from autotune.robustness import saturated_regimes

    preferred = choose.preferred_metrics(prefer or bench.spec.prefer, bench.spec.objectives)
    (one, against) = [
        (text, [bench.evaluator.replay(params, trace) for trace in bench.traces]) for text, params in sides
    ]
    saturated = saturated_regimes([*one[1], *against[1]])
    comparison = compare_settings(one, against, bench.spec, preferred, saturated=saturated)
    if json_output:
        console.print_json({"origin": "simulated", "profile": bench.profile_name, **comparison.model_dump()})
        return
    names = list(comparison.overall)
    rows = [*comparison.regimes.items(), ("overall", comparison.overall)]
    console.table(
        f"{candidate} against {reference}: improvement in % (simulated, {bench.profile_name})",
        ["", *(console.short(metrics.metric(name).label) for name in names)],
        [(regime, *(console.effect(effects[name]) for name in names)) for regime, effects in rows],
    )
    console.out.print(escape(comparison.sentence))
    for cost in comparison.costs:
        console.out.print(f"[yellow]cost:[/] {escape(cost)}")
    _say_doubts(bench, [params for _, params in sides])


def _say_doubts(bench: _Bench, settings: list[PolicyParams]) -> None:
    for doubt in dict.fromkeys(doubt for params in settings for doubt in bench.evaluator.doubts(params, bench.traces)):
        console.out.print(f"[yellow]note:[/] {escape(doubt)}")


@dataclass(frozen=True)
class _Bench:
    """The simulator and traces that a command works on."""

    spec: StudySpec
    evaluator: Evaluator
    traces: list[Trace]
    profile_name: str


def _bench(study: Path | None, trace_files: list[Path] | None, profile: str | None, prefix_caching: bool) -> _Bench:
    from autotune.spec import StudySpec, load_spec

    spec = load_spec(study) if study else StudySpec(name="command-line")
    base = study.parent if study else Path()
    if profile is not None:
        spec = spec.model_copy(update={"profile": profile_option(profile)})
    if prefix_caching:
        spec = spec.model_copy(update={"prefix_caching": True})
    traces = [read_trace(path) for path in trace_files] if trace_files else spec.build_traces(base)[1]
    from autotune.plan import simulated_evaluator  # loads numba, after the input was read

    evaluator = simulated_evaluator(spec, base)
    for trace in traces:
        evaluator.check(trace)
    return _Bench(spec, evaluator, traces, evaluator.profile.name)


def profile_option(profile: str) -> str:
    """A profile file named on the command line is looked for from where the command runs, not beside the study."""
    return str(Path(profile).resolve()) if profile.endswith(".json") else profile


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value >= 1 else f"{value * 1000:.1f} ms"
