"""`ppas init`: asks for model, server and traffic, and writes a commented study file that can start."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer
from rich.markup import escape

from autotune.cli import console, init_proposals
from autotune.cli.init_proposals import Proposal
from autotune.model_limits import ModelLimits, model_limits
from autotune.server_options import DEFAULT_VOCABULARY
from ppas_core.errors import InvalidInput
from ppas_core.naming import did_you_mean

if TYPE_CHECKING:
    from autotune.plan import Plan

T = TypeVar("T")

_BACKENDS: Final = ("simulator", "vllm")
_TRAFFIC: Final = ("rag-bursts", "heterogeneous", "files")
_PREFER: Final = ("mean", "p95", "balanced")
_OUTPUT_TOKENS: Final = 32
_OUTPUTS: Final = (32, 256)
_LONG_MIN: Final = 90
"""Minutes above which it is said how to make a study shorter."""


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command()(init)


def _option(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, show_default=False)


@console.reports_errors
def init(
    output: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="The file to write.")] = Path("study.yaml"),
    name: Annotated[str | None, _option("Name of the study and its run folder; default: the file's.")] = None,
    backend: Annotated[str | None, _option("Where trials run: simulator or vllm.")] = None,
    profile: Annotated[str | None, _option("Simulator: a shipped profile or a profile file.")] = None,
    model: Annotated[str | None, _option("vllm: the model, as for `vllm serve`.")] = None,
    url: Annotated[
        str | None, _option("vllm: a server that runs already, instead of one that the tuner starts.")
    ] = None,
    settings_file: Annotated[str | None, _option("vllm: the PPAS_SETTINGS_FILE of that server.")] = None,
    server_flags: Annotated[
        str | None, _option("vllm: further flags of the server, in one text, as '--dtype bfloat16'.", "--server-flags")
    ] = None,
    traffic: Annotated[str | None, _option("What arrives: rag-bursts, heterogeneous or files.")] = None,
    rates: Annotated[str | None, _option("rag-bursts: burst rates per second, as 0.4,0.8,1.2.")] = None,
    phases: Annotated[
        list[str] | None, _option("heterogeneous: a schedule as 20:0.05,10:0.4; repeat for more.")
    ] = None,
    prompt_tokens: Annotated[str | None, _option("Prompt length; heterogeneous: several, as 512,8192.")] = None,
    output_tokens: Annotated[str | None, _option("Output length; heterogeneous: several, as 32,256.")] = None,
    tuning_trace: Annotated[list[Path] | None, _option("files: a trace to tune on; repeat for more.")] = None,
    held_out_trace: Annotated[list[Path] | None, _option("files: a trace to compare on; repeat for more.")] = None,
    space: Annotated[str | None, _option("Search space: static, ppas, ppas-plus or a file.")] = None,
    prefer: Annotated[str | None, _option("What decides the pick: mean, p95 or balanced.")] = None,
    trials: Annotated[int | None, _option("Search trials.")] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask nothing: take the default of what no flag says.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for pipes.")] = False,
) -> None:
    """Ask for model, server and traffic, and write a commented study file.

    Every question has a flag; without a terminal, or with --yes, nothing is asked. A file that exists is never
    overwritten. Example: ppas init my-study.yaml --backend vllm --model Qwen/Qwen2.5-3B-Instruct
    """
    if os.path.lexists(output):
        raise InvalidInput(f"{output}: exists already, and is not overwritten; name another file, or move it away")
    ask = _Asker(interactive=sys.stdin.isatty() and not yes)
    given: dict[str, Any] = {
        "--rates": rates, "--phases": phases, "--prompt-tokens": prompt_tokens, "--output-tokens": output_tokens,
        "--tuning-trace": tuning_trace, "--held-out-trace": held_out_trace,
    }  # fmt: skip
    folder, limits, proposal = output.parent, ModelLimits(), init_proposals.SIMULATED
    try:
        answers: dict[str, Any] = {"name": ask("Name of the study", name, "--name", str, _stem(output))}
        where = ask("Where trials run: simulator or vllm", backend, "--backend", _one_of(_BACKENDS), "simulator")
        answers["backend"] = where
        if where == "vllm":
            _refuse(where, {"--profile": profile})
            answers["server"], limits, proposal = _server(ask, model, url, settings_file, server_flags, folder)
        else:
            _refuse(
                where,
                {"--model": model, "--url": url, "--settings-file": settings_file, "--server-flags": server_flags},
            )
            answers["profile"] = _profile(ask, profile, folder)
        answers["space"] = ask("Search space: static, ppas, ppas-plus or a file", space, "--space", str, "ppas")
        kind = ask(f"What arrives: {', '.join(_TRAFFIC)}", traffic, "--traffic", _one_of(_TRAFFIC), "rag-bursts")
        answers["workload"] = {"family": kind, **_WORKLOAD[kind](ask, given, folder, limits, proposal)}
        if where == "vllm" and kind != "files":
            answers |= {"tuning_seeds": [0], "held_out_seeds": list(proposal.held_out_seeds)}
        answers["prefer"] = ask("What decides: mean, p95 or balanced", prefer, "--prefer", str, "mean")
        text = None if trials is None else str(trials)
        answers["trials"] = ask("Search trials", text, "--trials", _whole, proposal.trials)
    except typer.Abort:
        console.err.print("\nNothing was written.")
        raise typer.Exit(console.INTERRUPTED) from None
    made = next((parent for parent in reversed(folder.parents) if not parent.exists()), folder)
    is_new = not folder.exists()
    command = f"ppas tune {shlex.quote(str(output))}"
    notes = _write(output, answers, command, proposal.why)
    if is_new:
        notes.insert(0, f"made the folder {made}")
    if json_output:
        console.print_json({"file": str(output), "next": command, "notes": notes, "assumed": ask.assumed})
    elif not quiet:
        console.out.print(f"wrote {escape(str(output))}")
        for note in notes:
            console.out.print(escape(note))
        console.out.print(f"next: [bold]{escape(command)}[/]")
        if ask.assumed:
            console.err.print(escape(f"assumed, since nobody was asked: {_flags_in_words(ask.assumed)}"))


class _Asker:
    """Asks a question on the terminal, unless a flag answered it or nobody is there.

    assumed: the flags of questions that nobody was asked, with the answers that were taken.
    """

    def __init__(self, *, interactive: bool) -> None:
        self._interactive = interactive
        self.assumed: dict[str, str] = {}

    def __call__(
        self, question: str, given: str | None, flag: str, parse: Callable[[str], T], default: str | None = None
    ) -> T:
        """The answer as `parse` reads it; on the terminal a bad one is asked for again.

        Raises InvalidInput for a bad flag, and, naming the flag, when nobody can be asked and there is no default.
        """
        if given is not None:
            return parse(given)
        while self._interactive:
            try:
                return parse(typer.prompt(question, default=default, err=True))
            except InvalidInput as error:
                console.err.print(escape(str(error)))
        if default is None:
            raise InvalidInput(f"{question}? Nobody can be asked here: give {flag}")
        self.assumed[flag] = default
        return parse(default)

    def optional(self, question: str, given: str | None, flag: str) -> str | None:
        """A text; an empty answer, and nobody there, is None."""
        return self(question, given, flag, str, default="") or None


def _flags_in_words(answers: dict[str, str]) -> str:
    """Flags as they would be given, then those that were left out."""
    given = shlex.join(word for flag, answer in answers.items() if answer for word in (flag, answer))
    left_out = " or ".join(flag for flag, answer in answers.items() if not answer)
    return f"{given}; no {left_out}" if left_out else given


def _server(
    ask: _Asker, model: str | None, url: str | None, settings_file: str | None, flags: str | None, folder: Path
) -> tuple[dict[str, Any], ModelLimits, Proposal]:
    """The block of the study file, what is known of the model, and what to propose for it."""
    from autotune.doctor import is_cpu_build

    name = ask("Model, a name or a folder", model, "--model", _not_blank)
    server: dict[str, Any] = {"model": _beside(Path(name), folder) if Path(name).is_dir() else name}
    limits = model_limits(name, ())
    if limits.vocabulary_size is not None and limits.vocabulary_size < DEFAULT_VOCABULARY:
        server["vocabulary_size"] = limits.vocabulary_size
    joined = ask.optional("Address of a server that runs already (empty: the tuner starts one)", url, "--url")
    if joined is not None:
        _refuse("--url", {"--server-flags": flags})
        file = ask("Its PPAS_SETTINGS_FILE", settings_file, "--settings-file", Path)
        return {**server, "url": joined, "settings_file": _beside(file, folder)}, limits, init_proposals.GPU
    if settings_file is not None:
        raise InvalidInput("--settings-file belongs to --url; give both")
    words = ask("Further flags of vllm serve (empty: none)", flags, "--server-flags", _words, "")
    proposal = init_proposals.GPU
    if is_cpu_build():
        proposal = init_proposals.CPU
        words = [*words, *init_proposals.flags_without_gpu(name, limits, words)]
        server |= proposal.server
    return ({**server, "flags": words} if words else server), model_limits(name, words), proposal


def _profile(ask: _Asker, profile: str | None, folder: Path) -> str:
    from ppas_core.sim.profile import DEFAULT_PROFILE, profile_names

    question = f"Simulator profile: {', '.join(profile_names())} or a file"
    answer = ask(question, profile, "--profile", str, DEFAULT_PROFILE)
    return _beside(Path(answer), folder) if answer.endswith(".json") else answer


def _rag_bursts(
    ask: _Asker, given: dict[str, Any], _folder: Path, limits: ModelLimits, proposal: Proposal
) -> dict[str, Any]:
    _refuse("rag-bursts", {flag: given[flag] for flag in ("--phases", "--tuning-trace", "--held-out-trace")})
    proposed = str(limits.prompt_at_most(_OUTPUT_TOKENS, proposal.prompt_tokens))
    found: dict[str, Any] = {
        "rates_per_s": ask("Burst rates per second", given["--rates"], "--rates", _numbers, proposal.rates),
        "prompt_tokens": ask("Prompt tokens", given["--prompt-tokens"], "--prompt-tokens", _whole, proposed),
        "output_tokens": ask("Output tokens", given["--output-tokens"], "--output-tokens", _whole, str(_OUTPUT_TOKENS)),
    }
    _require_room(limits, found["prompt_tokens"], found["output_tokens"])
    return found | proposal.workload


def _require_room(limits: ModelLimits, prompt_tokens: int, output_tokens: int) -> None:
    """Refuses requests that the server would refuse, all of them."""
    if limits.longest_tokens is not None and prompt_tokens + output_tokens > limits.longest_tokens:
        raise InvalidInput(
            f"{prompt_tokens} prompt and {output_tokens} output tokens do not fit into the {limits.longest_tokens} of "
            f"{limits.says}; give shorter ones"
        )


def _heterogeneous(
    ask: _Asker, given: dict[str, Any], _folder: Path, limits: ModelLimits, proposal: Proposal
) -> dict[str, Any]:
    _refuse("heterogeneous", {flag: given[flag] for flag in ("--rates", "--tuning-trace", "--held-out-trace")})
    prompts, outputs = given["--prompt-tokens"], given["--output-tokens"]
    proposed = dict.fromkeys(limits.prompt_at_most(max(_OUTPUTS), tokens) for tokens in proposal.prompts)
    found: dict[str, Any] = {
        "phases": list(given["--phases"] or ())
        or [ask("Phases, SECONDS:RATE,…", None, "--phases", _schedule, "20:0.05,10:0.4,20:0.05")],
        "prompt_tokens": ask("Prompt tokens, several", prompts, "--prompt-tokens", _wholes, _listed(proposed)),
        "output_tokens": ask("Output tokens, several", outputs, "--output-tokens", _wholes, _listed(_OUTPUTS)),
    }
    _require_room(limits, max(found["prompt_tokens"]), max(found["output_tokens"]))
    return found


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(str(number) for number in numbers)


def _files(
    ask: _Asker, given: dict[str, Any], folder: Path, _limits: ModelLimits, _proposal: Proposal
) -> dict[str, Any]:
    _refuse("files", {flag: given[flag] for flag in ("--rates", "--phases", "--prompt-tokens", "--output-tokens")})
    found = {}
    for key, flag, purpose in (("tuning", "--tuning-trace", "tune"), ("held_out", "--held-out-trace", "compare")):
        paths = given[flag] or ask(f"Traces to {purpose} on, separated by commas", None, flag, _paths)
        found[key] = [_beside(path, folder) for path in paths]
    return found


_WORKLOAD: Final[dict[str, Callable[..., dict[str, Any]]]] = {
    "rag-bursts": _rag_bursts,
    "heterogeneous": _heterogeneous,
    "files": _files,
}


def _write(output: Path, answers: dict[str, Any], command: str, why: Sequence[str]) -> list[str]:
    """Writes the study once it is known to load and to start; what is worth knowing of it, a line each."""
    from autotune.plan import make_plan
    from autotune.spec import parse_spec
    from autotune.template import study_file
    from search_spaces.yaml_file import parse_yaml

    spec = parse_spec(parse_yaml(study_file(answers, command), "the answers are no YAML"), "the answers")
    with _folder(output.parent):  # the study names its files from there
        plan = make_plan(spec, output.parent)
        about = [*why, *_about(plan, output)] if spec.backend == "vllm" else []
        try:
            with output.open("x", encoding="utf-8") as file:
                file.write(study_file(answers, command, about))
        except FileExistsError:
            raise InvalidInput(f"{output}: exists already, and is not overwritten; name another file") from None
    notes = [doubt for params in [plan.reference] for doubt in plan.evaluator.doubts(params, plan.tuning)]
    return [*notes, *about]


def _about(plan: Plan, output: Path) -> list[str]:
    """How long a live study will take, and how it is made longer or shorter, for its file's head and the terminal."""
    found = plan.estimate()
    minutes = found.total_s() / 60
    traces = f"{len(plan.tuning)} trace{'s' if len(plan.tuning) > 1 else ''}"
    lines = [
        f"About {minutes:.0f} minutes and {found.starts_in_words}: {found.settings} settings on {traces} each, the best on "
        f"{len(plan.held_out)} held-out ones."
    ]
    if minutes > _LONG_MIN:
        return [
            *lines,
            "Shorter: `time_budget: 30m` ends the search then; `ppas trace window` cuts traces of your own.",
        ]
    further = f"ppas tune {shlex.quote(str(output))} --trials {4 * plan.spec.trials}"
    lines.append(f"That is a first look. `{further}` goes on from there, and searches four times as much.")
    if plan.spec.workload.family != "files":
        lines.append("More seeds make the verdict surer; that is another study, so give it another name.")
    return lines


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[None]:
    """Makes the folder; where the work in it fails, what was made goes again."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for folder in made:
            folder.rmdir()
        raise


def _stem(output: Path) -> str:
    return "my-study" if output.stem in ("", "study") else output.stem


def _beside(path: Path, folder: Path) -> str:
    """`path` as the study file in `folder` has to name it."""
    return str(path) if path.is_absolute() else os.path.relpath(path, folder)


def _not_blank(text: str) -> str:
    if not text.strip():
        raise InvalidInput("a model has a name; give one, or its folder")
    return text


def _paths(text: str) -> list[Path]:
    return [Path(part.strip()) for part in text.split(",") if part.strip()]


def _one_of(allowed: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise InvalidInput(f"{text!r} is no answer{did_you_mean(text, allowed)}")
        return text

    return parse


def _refuse(kind: str, flags: dict[str, Any]) -> None:
    for flag, value in flags.items():
        if value:
            raise InvalidInput(f"{flag} does not go with {kind}; leave it out")


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InvalidInput(f"{text!r}: {error}; quote it as for a shell") from None


def _schedule(text: str) -> str:
    from traces.generate import parse_phases

    parse_phases(text)
    return text


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(f"{text!r} is no whole number, as 32") from None


def _wholes(text: str) -> list[int]:
    return [_whole(part) for part in text.split(",")]


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InvalidInput(f"{text!r} are no numbers, as 0.4,0.8,1.2") from None
