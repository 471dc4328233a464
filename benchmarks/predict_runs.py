"""How well runs are predicted that the simulator was not fitted on, for any sweep log: `predict_runs.py LOG…`.

A profile is fitted to some runs of the logs (by default all with a static budget), others are predicted with it (by
default all with an adaptive setting), and the errors are printed: per load regime (means over its runs) and per run, of
mean latency, mean TTFT and P95 latency. Runs are chosen by setting, seed and file, so that any held-out question can be
asked: `--fit-seeds 0,1,2 --predict-seeds 3,4`, `--fit-files '*20k*,*30k*' --predict-files '*25k*'`,
`--fit-configs mbt_512*,mbt_2048* --predict-configs 'ppas*'`. Logs of several servers are fitted one server at a time.
Settings: `static` and `adaptive` mean all of that kind, else names with `*` and `?`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from autotune.calibration.fit_runs import Server, fit_runs, with_held_out
from autotune.calibration.runs_simulated import FitRun, Fleet, simulatable
from autotune.cli.console import Bar, err, out, print_json, table
from autotune.runlogs.configs import parse_mapping
from autotune.runlogs.model import METRICS, RunResult
from autotune.runlogs.read import read_runs
from ppas_core.errors import InvalidInput, PpasError
from ppas_core.sim.profile import Profile, load_profile

SHOWN = {"mean_latency_s": "latency", "mean_ttft_s": "TTFT", "p95_latency_s": "P95"}
PLACES = [METRICS.index(name) for name in SHOWN]
BARS = {"regime": 0.04, "run": 0.06}
"""Mean absolute error that is allowed, per load regime and per run."""


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def seeds(text: str) -> set[int]:
    found: set[int] = set()
    for word in words(text):
        first, dash, last = word.partition("-")
        found |= set(range(int(first), int(last) + 1)) if dash else {int(first)}
    return found


def lengths(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in words(text))


def chosen(runs: Sequence[FitRun], configs: list[str], of_seeds: set[int] | None, files: list[str]) -> list[FitRun]:
    def fits(run: FitRun) -> bool:
        kind = "static" if run.params.is_static else "adaptive"
        names = (run.config, run.params.label())
        return (
            any(kind == pattern or any(fnmatchcase(name, pattern) for name in names) for pattern in configs)
            and (of_seeds is None or run.seed in of_seeds)
            and (not files or any(fnmatchcase(run.file, pattern) or pattern in run.file for pattern in files))
        )

    return [run for run in runs if fits(run)]


def natural(text: str) -> list[tuple[float, str]]:
    """Sorts λ=0.4 before λ=1.2 before λ=10."""
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return [(float(part), "") if place % 2 else (-1.0, part) for place, part in enumerate(parts)]


def server_of(runs: Sequence[RunResult], options: argparse.Namespace) -> Server:
    first = runs[0]
    told_length = first.flags.get("--max-model-len", "")
    own_length = int(told_length) if told_length.isdigit() and len(told_length) < 9 else None
    return Server(
        model=options.model or first.model,
        gpu=options.gpu or first.gpu,
        vllm_version=first.vllm,
        num_kv_blocks=options.num_kv_blocks,
        block_size=options.block_size,
        max_model_len=options.max_model_len or own_length,
        pipeline_depth=options.pipeline_depth,
    )


def errors(profile: Profile, runs: Sequence[FitRun]) -> dict[str, Any]:
    fleet = Fleet(runs)
    predicted = fleet.predict(profile)[:, PLACES]
    measured = fleet.measured[:, PLACES]
    per_run = predicted / measured - 1
    rows = []
    for (setting, regime), members in sorted(fleet.cells(), key=lambda cell: (cell[0][0], natural(cell[0][1]))):
        rows.append(
            {
                "setting": runs[members[0]].config,
                "params": setting,
                "regime": regime,
                "runs": len(members),
                "measured": dict(zip(SHOWN, measured[members].mean(0).tolist(), strict=True)),
                "predicted": dict(zip(SHOWN, predicted[members].mean(0).tolist(), strict=True)),
                "error": dict(
                    zip(SHOWN, (predicted[members].mean(0) / measured[members].mean(0) - 1).tolist(), strict=True)
                ),
                "error_per_run": dict(zip(SHOWN, np.abs(per_run[members]).mean(0).tolist(), strict=True)),
            }
        )
    by_regime = np.array([[abs(row["error"][name]) for name in SHOWN] for row in rows])
    means = {"regime": np.nanmean(by_regime, axis=0), "run": np.nanmean(np.abs(per_run), axis=0)}
    return {
        "cells": rows,
        "mean_absolute_error": {kind: dict(zip(SHOWN, mean.tolist(), strict=True)) for kind, mean in means.items()},
        "worst_regime": dict(zip(SHOWN, by_regime.max(0).tolist(), strict=True)),
        "runs": [
            {"setting": run.config, "regime": run.regime, "seed": run.seed, "file": run.file}
            | {name: float(value) for name, value in zip(SHOWN, error, strict=True)}
            for run, error in zip(runs, per_run, strict=True)
        ],
    }


def passes(found: dict[str, Any]) -> bool:
    means = found["mean_absolute_error"]
    return all(value <= BARS[kind] for kind in BARS for value in means[kind].values())


def show(served: str, profile: Profile, fitted: int, found: dict[str, Any], per_run: bool) -> None:
    table(
        f"{served}: predicted against measured, fitted on {fitted} other runs" if fitted else f"{served}: predicted",
        [
            "setting, regime",
            "runs",
            *(f"{name} {what}" for name in SHOWN.values() for what in ("measured s", "error", "per run")),
        ],
        [
            (
                f"{row['setting']}  {row['regime']}",
                str(row["runs"]),
                *(
                    text
                    for name in SHOWN
                    for text in (
                        f"{row['measured'][name]:.2f}",
                        f"{row['error'][name]:+.1%}",
                        f"{row['error_per_run'][name]:.1%}",
                    )
                ),
            )
            for row in found["cells"]
        ],
    )
    if per_run:
        table(
            "per run",
            ["setting, regime, seed", *SHOWN.values()],
            [
                (f"{run['setting']}  {run['regime']}  {run['seed']}", *(f"{run[name]:+.1%}" for name in SHOWN))
                for run in found["runs"]
            ],
        )
    for kind, bar in BARS.items():
        means = found["mean_absolute_error"][kind]
        shown = ", ".join(f"{label} {means[name]:.2%}" for name, label in SHOWN.items())
        verdict = "within" if max(means.values()) <= bar else "beyond"
        out.print(f"mean absolute error per {kind}: {shown} ({verdict} the bar of {bar:.0%})")
    for sentence in profile.fit.get("identified", {}).get("because_of_the_runs", ()):
        out.print(f"not identified: {sentence}", markup=False)


def run(options: argparse.Namespace) -> int:
    log = read_runs(options.logs)
    for note in log.notes[:20]:
        err.print(f"note: {note}", markup=False)
    shapes = [(lengths(options.prompt_lengths), lengths(options.output_lengths))] if options.prompt_lengths else []
    mapping = parse_mapping(options.setting)
    groups: dict[str, list[RunResult]] = {}
    for one in log.runs:
        groups.setdefault(one.served, []).append(one)
    answers, good = [], True
    for served, own in groups.items():
        runs, left_out = simulatable(own, mapping, shapes)
        if left_out:
            err.print(f"{served}: {len(left_out)} runs are left out, the first: {left_out[0]}", markup=False)
        predicted = chosen(runs, words(options.predict_configs), options.predict_seeds, words(options.predict_files))
        if not predicted:
            raise InvalidInput(
                f"{served}: no run is chosen to be predicted; settings: {', '.join({r.config for r in runs})}"
            )
        held_out = {id(one) for one in predicted}
        fitted = [
            one
            for one in chosen(runs, words(options.fit_configs), options.fit_seeds, words(options.fit_files))
            if id(one) not in held_out
        ]
        if options.profile:
            profile, fitted = load_profile(options.profile), []
        else:
            profile = fit_runs(
                fitted,
                name=options.name,
                server=server_of(own, options),
                starts=options.starts,
                time_limit_s=options.time_limit,
                progress=Bar(),
            )
            profile = with_held_out(profile, predicted)
        found = errors(profile, predicted)
        good &= passes(found)
        if options.json:
            answers.append({"served": served, "fitted_runs": len(fitted), **found, "profile": profile.to_dict()})
        else:
            show(served, profile, len(fitted), found, options.per_run)
            costs = ", ".join(f"{key} {value:.3g}" for key, value in dataclasses.asdict(profile.cost).items())
            out.print(
                f"profile: {costs}, frontend_delay_s {profile.frontend_delay_s:.3g}, {profile.num_kv_blocks} KV blocks, "
                f"pipeline depth {profile.pipeline_depth}",
                markup=False,
            )
        if options.out:
            options.out.write_text(json.dumps(profile.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.json:
        print_json(answers)
    return 0 if good or not options.check else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path, help="published sweep logs, tables of runs (.csv), run folders")
    parser.add_argument("--fit-configs", default="static", help="settings to fit on (default: static)")
    parser.add_argument("--fit-seeds", type=seeds, help="seeds to fit on, as in 0,1 or 0-3 (default: all)")
    parser.add_argument("--fit-files", default="", help="files to fit on, as parts of names or with * (default: all)")
    parser.add_argument("--predict-configs", default="adaptive", help="settings to predict (default: adaptive)")
    parser.add_argument("--predict-seeds", type=seeds, help="seeds to predict (default: all)")
    parser.add_argument("--predict-files", default="", help="files to predict (default: all)")
    parser.add_argument("--setting", action="append", default=[], help="NAME=SETTING for a name that is not known")
    parser.add_argument(
        "--prompt-lengths", default="", help="lengths of a mix that the log does not name, as in 8192,16384"
    )
    parser.add_argument("--output-lengths", default="16,32,64,128,256", help="output lengths of that mix")
    parser.add_argument("--model", default="", help="model, where the log does not name it: only for the prior")
    parser.add_argument("--gpu", default="", help="GPU, where the file's name does not: only for the prior")
    parser.add_argument("--num-kv-blocks", type=int, help="KV blocks of the server, where known")
    parser.add_argument("--block-size", type=int, help="tokens of a KV block (default 16)")
    parser.add_argument("--max-model-len", type=int, help="most tokens of a request")
    parser.add_argument("--pipeline-depth", type=int, choices=(1, 2), help="2 with asynchronous scheduling")
    parser.add_argument("--profile", default="", help="predict with this profile instead of a fit")
    parser.add_argument("--name", default="fitted", help="name of the fitted profile")
    parser.add_argument("--out", type=Path, help="file for the fitted profile")
    parser.add_argument("--starts", type=int, default=4, help="starting points of the fit (default 4)")
    parser.add_argument(
        "--time-limit", type=float, default=240.0, help="seconds for a fit; then the best so far counts"
    )
    parser.add_argument("--per-run", action="store_true", help="show each run's errors too")
    parser.add_argument("--check", action="store_true", help="exit with 1 beyond the bars")
    parser.add_argument("--json", action="store_true", help="print JSON")
    try:
        sys.exit(run(parser.parse_args()))
    except PpasError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
