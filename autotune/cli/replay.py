"""`ppas replay`: one trace against a live server, what its requests saw, and how late the client itself was."""

from __future__ import annotations

import math
import os
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.markup import escape

from autotune.cli import console
from autotune.progress import Progress, Silent
from ppas_core.errors import InvalidInput
from traces.format import Trace, read_trace

if TYPE_CHECKING:
    from autotune.replay.outcome import ReplayOutcome
    from autotune.server_facts import ServerFacts

API_KEY_VARIABLE = "PPAS_API_KEY"


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command()(replay)


@console.reports_errors
def replay(
    url: Annotated[str, typer.Option(help="Address of the server, as in http://127.0.0.1:8000.", show_default=False)],
    trace: Annotated[Path, typer.Option("--trace", "-t", help="Trace file; see `ppas trace`.", show_default=False)],
    model: Annotated[
        str | None, typer.Option(help="Model name; default: the first that the server serves.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the records of all requests here (Parquet).")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds from its planned time after which a request fails.")] = 600.0,
    vocab_size: Annotated[int, typer.Option(help="Token ids of the model; prompts are made of them.")] = 32_000,
    special_id: Annotated[
        list[int] | None, typer.Option(help="A token id never to send; repeat for more.", show_default=False)
    ] = None,
    cache_salt: Annotated[
        str | None, typer.Option(help="Salt of the prefix cache; default: a new one, shared with no other run.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for pipes.")] = False,
) -> None:
    """Replay a trace against a running OpenAI-compatible server and print what its requests saw (live).

    Requests are sent at their planned times however slow the answers are, with exactly the planned tokens. Exit code 1
    when a request failed or the client itself was late: what was measured is then no score. An API key is taken from
    the environment, PPAS_API_KEY.

    Example: ppas replay --url http://127.0.0.1:8000 --trace bursts.jsonl
    """
    planned = read_trace(trace)
    from autotune.replay.records_file import write_records
    from autotune.replay.run import replay as run_replay
    from autotune.server import existing_server
    from traces.prompts import Vocabulary

    vocabulary = Vocabulary(vocab_size, frozenset(special_id or ()))
    api_key = os.environ.get(API_KEY_VARIABLE) or None
    facts = existing_server(url, api_key=api_key).facts
    _check_lengths(planned, facts)
    if model is None and facts.model is None:
        raise InvalidInput(f"the server at {url} names no model; give --model")
    progress: Progress = Silent() if quiet else console.Bar()
    try:
        outcome = run_replay(
            url,
            planned,
            model=model or facts.model or "",
            cache_salt=cache_salt if cache_salt is not None else uuid.uuid4().hex,
            timeout_s=timeout,
            vocabulary=vocabulary,
            api_key=api_key,
            progress=progress,
        )
    except KeyboardInterrupt:
        console.err.print("Interrupted: an unfinished replay is no measurement, so nothing of it is kept.")
        raise typer.Exit(console.INTERRUPTED) from None
    if json_output:
        console.print_json(_summary(outcome, facts))
    else:
        _show(outcome, facts)
    if output is not None:  # last: on a full disk the summary is already out
        write_records(outcome, output)
        console.err.print(escape(f"records: {output}"))
    if not outcome.valid or outcome.accounting()["ok"] != len(planned.requests):
        raise typer.Exit(console.NO_RESULT)


def _check_lengths(trace: Trace, facts: ServerFacts) -> None:
    if facts.max_model_len is None:
        return
    for index, request in enumerate(trace.requests):
        if request.prompt_tokens + request.output_tokens > facts.max_model_len:
            raise InvalidInput(
                f"request {index} of {trace.name!r} has {request.prompt_tokens} + {request.output_tokens} tokens; the "
                f"server takes {facts.max_model_len}: start it with a larger --max-model-len, or take another trace"
            )


def _summary(outcome: ReplayOutcome, facts: ServerFacts) -> dict[str, Any]:
    from autotune import metrics

    return {
        "origin": "live",
        "valid": outcome.valid,
        "reason": outcome.reason,
        "requests": outcome.accounting(),
        "first_failure": outcome.first_failure(),
        "metrics": _defined(metrics.summarize(outcome.records)),
        "client_lag": _defined(asdict(outcome.lag)),
        "cached_tokens": _cached_tokens(outcome),
        "tokens_counted_by_id": outcome.counted,
        "about": dict(outcome.about),
        "server": facts.to_dict(),
    }


def _show(outcome: ReplayOutcome, facts: ServerFacts) -> None:
    from autotune import metrics

    count, lag, about = outcome.accounting(), outcome.lag, outcome.about
    found = metrics.summarize(outcome.records)
    rows = [
        (_LABELS.get(name) or metrics.metric(name).label, _shown(name, value))
        for name, value in found.items()
        if not math.isnan(value)
    ]
    console.table(
        f"{about['trace']} on {about['model']} at {about['url']} (live, vLLM {facts.vllm_version or 'unknown'}), "
        f"{count['ok']} completed requests",
        ["", "value"],
        rows,
    )
    sent = f"{count['planned']} planned, {count['sent']} sent, {count['ok']} ok, {count['failed']} failed"
    reasons = [f"{word} {number}" for word, number in count.items() if word not in _COUNTED]
    console.out.print(escape(f"requests: {sent}" + (f" ({', '.join(reasons)})" if reasons else "")))
    console.out.print(
        f"client lateness: P50 {1000 * lag.p50_s:.2f} ms, P99 {1000 * lag.p99_s:.2f} ms, max {1000 * lag.max_s:.2f} ms "
        f"(P99 allowed: {1000 * lag.bound_s:.2f} ms)"
    )
    if (cached := _cached_tokens(outcome)) is not None:
        total = int(outcome.records.prompt_tokens.sum())
        console.out.print(f"prompt tokens from the prefix cache: {cached} of {total}")
    if not outcome.counted:
        console.out.print("The server sends no token ids: tokens are counted by its usage, times by its text.")
    if (failure := outcome.first_failure()) is not None:
        console.err.print(f"[bold red]not a score:[/] {escape(failure)}")
    if not outcome.valid:
        console.err.print(f"[bold red]invalid:[/] {escape(outcome.reason or '')}")


_LABELS: Final = {
    "attainment": "requests completed",  # no limits are given here
    "p95_latency_failure_adjusted_s": "P95 end-to-end latency, a failed request counted as endless",
}
"""What `metrics.summarize` gives beside the metrics."""
_COUNTED: Final = ("planned", "unsent", "sent", "ok", "failed")


def _cached_tokens(outcome: ReplayOutcome) -> int | None:
    told = outcome.cached_tokens[outcome.cached_tokens >= 0]
    return int(told.sum()) if len(told) else None


def _defined(values: dict[str, float]) -> dict[str, float | None]:
    """JSON has neither NaN nor infinity."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _shown(name: str, value: float) -> str:
    if math.isinf(value):
        return "endless"
    if name.endswith("_per_s"):
        return f"{value:.3g} /s"
    if name.endswith("_s"):
        return f"{value:.3f} s" if value >= 1 else f"{value * 1000:.2f} ms"
    return f"{100 * value:.1f} %"
