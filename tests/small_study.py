"""A study that takes a second or two."""

from pathlib import Path

import yaml

from autotune.spec import StudySpec, parse_spec

SMALL = {
    "name": "small",
    "workload": {"family": "rag-bursts", "rates_per_s": [0.4, 1.0], "prompt_tokens": 4000},
    "space": {"preset": "ppas", "b_cap": {"low": 512, "high": 16384, "step": 512}},
    "static_budgets": [512, 2048, 16384],
    "tuning_seeds": [0, 1],
    "held_out_seeds": [10, 11],
    "sampler": "tpe",
    "trials": 6,
}


def small(**changes: object) -> StudySpec:
    return parse_spec({**SMALL, **changes}, "test")


def write_study(folder: Path, **changes: object) -> Path:
    """The small study as a file in `folder`, with some keys changed."""
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **changes}))
    return path
