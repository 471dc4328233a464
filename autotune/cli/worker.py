"""`ppas worker`: takes part in a study that several processes or machines measure together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from autotune.cli import console, server_block
from autotune.distributed.beats import HEARTBEAT_S
from autotune.distributed.per_gpu import parse_gpus, run_workers
from autotune.distributed.url import VARIABLE, StorageUrl
from autotune.durations import parse_duration_s
from autotune.heartbeat import Heartbeat
from autotune.progress import Progress, Silent, Together
from ppas_core.errors import InvalidInput

if TYPE_CHECKING:
    from autotune.distributed.work import Shared
    from autotune.spec import StudySpec

Storage = Annotated[
    str | None,
    typer.Option(
        envvar=VARIABLE,
        show_envvar=False,
        help="Where the trials of a shared study are: postgresql://, mysql://, grpc://, or sqlite:///FILE on one machine; "
        f"with a password better as {VARIABLE}.",
        show_default=False,
    ),
]
HeartbeatEvery = Annotated[
    str | None,
    typer.Option(
        "--heartbeat",
        help="With --storage, of a study that begins: a worker that is silent for four of these counts as dead; "
        "default 15s.",
        show_default=False,
    ),
]


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command()(worker)


def storage_url(storage: str | None, heartbeat: str | None) -> StorageUrl | None:
    """The storage that the options name, None for a study of this process alone. Raises InvalidInput."""
    if storage is not None:
        return StorageUrl.parse(storage)
    if heartbeat is not None:
        raise InvalidInput("--heartbeat goes with --storage; give both")
    return None


def make_shared(where: StorageUrl, heartbeat: str | None) -> Shared:
    """The shared part of a study at `where`; its messages go to stderr. Raises InvalidInput."""
    from autotune.distributed.work import Shared

    heartbeat_s = HEARTBEAT_S if heartbeat is None else parse_duration_s(heartbeat)
    shared = Shared(where, say=_say, heartbeat_s=heartbeat_s)
    _ = shared.storage  # before a server is started or a folder made
    return shared


@console.reports_errors
def worker(
    study: Annotated[
        Path, typer.Argument(metavar="STUDY.yaml", help="The study file, the same for all.", show_default=False)
    ],
    storage: Storage = None,
    run: Annotated[
        Path | None,
        typer.Option(help="Run folder of this worker; default runs/NAME.worker, or .gpuN.", show_default=False),
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(help="Start one worker for each of these GPUs: 0,1,2,3.", show_default=False)
    ] = None,
    time_budget: Annotated[
        str | None, typer.Option(help="Take no new trial after this long: 45m, 2h.", show_default=False)
    ] = None,
    heartbeat: HeartbeatEvery = None,
    server_url: server_block.ServerUrl = None,
    settings_file: server_block.SettingsFile = None,
    token_file: server_block.TokenFile = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress; messages stay.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for pipes.")] = False,
) -> None:
    """Measure trials of a shared study until all are done; `ppas tune` with the same storage finishes it.

    Start it on every GPU or machine. A worker measures the reference itself first. One that dies loses nothing: its
    trial is measured by another. The same command takes part again.
    """
    from autotune.spec import load_spec, parse_spec

    spec = load_spec(study)
    where = storage_url(storage, None)
    if where is None:
        raise InvalidInput(f"no storage is given; give --storage postgresql://…, or set {VARIABLE}")
    path = run or Path("runs") / f"{spec.name}.worker"
    if gpus is not None:
        if server_url is not None:
            raise InvalidInput("--gpus starts a server per GPU, --server-url joins one; give one of them")
        further = [*_given("--time-budget", time_budget), *_given("--heartbeat", heartbeat)]
        base = run or Path("runs") / spec.name
        commands = {
            gpu: ["worker", str(study), "--quiet", "--run", str(base.with_name(f"{base.name}.gpu{gpu}")), *further]
            for gpu in parse_gpus(gpus)
        }
        code = run_workers(commands, {VARIABLE: storage or ""}, _say)
        if code:
            raise typer.Exit(code)
        return
    server = server_block.as_block(spec, server_url, settings_file, token_file)
    changed = {key: value for key, value in {"server": server, "time_budget": time_budget}.items() if value is not None}
    if changed:
        spec = parse_spec({**spec.model_dump(), **changed}, f"{study} with the command's options")
    _work(spec, study.parent, path, make_shared(where, heartbeat), quiet=quiet, json_output=json_output)


def _work(spec: StudySpec, base: Path, path: Path, shared: Shared, *, quiet: bool, json_output: bool) -> None:
    from autotune.distributed.work import work
    from autotune.live import LiveEvaluator
    from autotune.plan import make_plan

    plan = make_plan(spec, base)
    if isinstance(plan.evaluator, LiveEvaluator):
        plan.evaluator.say = _say
    progress: Progress = Silent() if quiet else console.Bar()
    with Heartbeat(path, "worker") as heartbeat:
        done, search = work(plan, path, Together(progress, heartbeat), shared)
    retried = {number: attempts for number, attempts in search.attempts().items() if attempts > 1}
    summary: dict[str, Any] = {
        "name": spec.name,
        "storage": str(shared.where),
        "trials": len(done),
        "measured_here": sorted(search.mine()),
        "attempts_of_retried": retried,
    }
    if json_output:
        console.print_json(summary)
    elif not quiet:
        console.out.print(f"{len(done)} trials are done, {len(summary['measured_here'])} of them measured here.")
        console.out.print(escape(f"`ppas tune STUDY.yaml` with the same storage finishes the study {spec.name!r}."))


def _given(name: str, value: str | None) -> list[str]:
    return [] if value is None else [name, value]


def _say(text: str) -> None:
    console.err.print(f"[dim]{escape(text)}[/]")
