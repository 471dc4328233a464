"""Which settings did the very same on the same traces: what is measured between them is noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autotune.records import Replay
from ppas_core.policy import Branch, PolicyParams

Behaviour = tuple[int, int]
"""The budget of every step, and max_num_seqs."""


def behaviour(params: PolicyParams, branch_steps: Mapping[str, int]) -> Behaviour | None:
    """What `params` did in steps that took these branches; None where it capped some, or nothing is known of them.

    A setting that never caps is a static budget of b_max, and of a static budget it makes no difference which branch
    a step took.
    """
    never_capped = sum(branch_steps.values()) > 0 and sum(branch_steps.values()) == branch_steps.get(Branch.MAX, 0)
    return (params.b_max, params.max_num_seqs) if params.is_static or never_capped else None


def acted_alike(one: Sequence[Replay], other: Sequence[Replay]) -> bool:
    """Whether two settings had the same budget at every step of these replays of the same traces."""
    pairs = [
        (behaviour(a.params, a.branch_steps), behaviour(b.params, b.branch_steps))
        for a, b in zip(one, other, strict=True)
    ]
    return all(first is not None and first == second for first, second in pairs)
