"""What run-level figures tell of a profile's coefficients, and what they leave to the prior: numbers and words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from autotune.calibration.runs_simulated import FitRun

HELD_FACTOR: Final = 2.0
"""By how much a coefficient is moved to see whether the others can make up for it."""

FIRM: Final = 0.15
"""Relative uncertainty, two standard deviations, up to which a coefficient is called identified."""
LOOSE: Final = 0.5
LEAST_NOISE: Final = 0.02
"""No run of a real server is trusted further than this: about 1.2 % on each of its figures."""


def measured_range(runs: Sequence[FitRun]) -> dict[str, list[float]]:
    """What the runs covered: lowest and highest budget, prompt and output length."""
    budgets = [budget for run in runs for budget in (run.params.b_max, run.params.b_cap)]
    prompts = np.concatenate([run.arrays.prompt_tokens for run in runs])
    outputs = np.concatenate([run.arrays.output_tokens for run in runs])
    return {
        "budget_tokens": [min(budgets), max(budgets)],
        "prompt_tokens": [int(prompts.min()), int(prompts.max())],
        "output_tokens": [int(outputs.min()), int(outputs.max())],
    }


def run_noise(cost: float, num_runs: int) -> float:
    """Standard deviation of what the fit leaves of one run, all its weighted figures together; at least LEAST_NOISE."""
    return max(math.sqrt(2 * cost / num_runs), LEAST_NOISE)


def identifiability(
    runs: Sequence[FitRun], values: Mapping[str, float], cost: float, held: Mapping[str, tuple[float, float]]
) -> dict[str, Any]:
    """What the runs say of each coefficient, from what happens when it is held elsewhere and the others are fitted again.

    values: the fitted coefficients. cost: of the fit to the data, without the prior. held: name to the cost with it held
    at 1 / HELD_FACTOR and at HELD_FACTOR times its value; coefficients that there was no time for are absent. The
    figures of one run rise and fall together, so a run counts as one observation; its noise is what the fit leaves.
    Uncertainties are two standard deviations.
    """
    noise = run_noise(cost, len(runs)) ** 2
    doubt: dict[str, float] = {}
    for name, costs in held.items():
        gain = 2 * max(min(costs) - cost, 0.0) / noise  # squared standard deviations, on the side that costs less
        doubt[name] = 2 * math.log(HELD_FACTOR) / math.sqrt(gain) if gain > 1e-6 else math.inf
    return {
        "held_factor": HELD_FACTOR,
        "cost_ratio_when_held": {
            name: [round(value / cost, 4) for value in costs] for name, costs in held.items() if cost > 0
        },
        "relative_uncertainty_95_percent": {name: round(sd, 4) if sd < 10 else None for name, sd in doubt.items()},
        "in_words": {
            name: f"{value:.3g}: {_sentence(doubt[name]) if name in doubt else 'not looked at, the fit ran out of time'}"
            for name, value in values.items()
        },
        "because_of_the_runs": _lengths(runs),
    }


def _sentence(doubt: float) -> str:
    if doubt <= FIRM:
        return f"identified, within about {max(doubt, 0.001):.1%}"
    if doubt <= LOOSE:
        return f"identified loosely, within about {doubt:.0%}"
    return "not identified by these runs: others make up for it, and its prior decides"


def _lengths(runs: Sequence[FitRun]) -> list[str]:
    """What lengths that are all alike leave open, in words."""
    prompts = {int(n) for run in runs for n in np.unique(run.arrays.prompt_tokens)}
    outputs = {int(n) for run in runs for n in np.unique(run.arrays.output_tokens)}
    said = []
    if len(prompts) == 1:
        said.append(
            f"All prompts have {min(prompts)} tokens: prefill_token_s, prefill_pair_s and frontend_delay_s trade against each "
            "other, and other prompt lengths are extrapolation. Runs of a second length, or `ppas calibrate` on a server, "
            "tell them apart."
        )
    if len(prompts) == 1 and len(outputs) == 1:
        said.append(
            "All outputs have one length too: decode_token_s and decode_context_token_s are hard to tell apart."
        )
    budgets = {run.params.b_max for run in runs if run.params.is_static}
    if len(budgets) < 3:
        said.append(
            f"{len(budgets)} static budgets only: step_s, prefill_step_s and the ramp (what a step costs however small) "
            "rest on few chunk sizes."
        )
    return said
