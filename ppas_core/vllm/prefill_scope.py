"""How a cap on the prefill tokens of a step is put on vLLM's stock `schedule()`, which knows one budget for all tokens.

The definition (the paper's Algorithm 1), with D the decided budget and the running list served in order:
a decode takes what it needs while the step stays within b_max; a prefill takes at most what is left of D, and is
skipped when nothing is left; waiting requests are admitted, in order, while anything is left of D and of b_max.

Why one budget is enough in nearly every step. Let d be the tokens that the running decodes take in this step. If all
decodes stand before all prefills, a step with the single budget T = min(b_max, d + D) serves the decodes in full, then
the prefills in order from exactly what is left of D, then admits waiting requests from the rest of it, and stops where
the definition stops. d is known before the step: `queues.count_decode_tokens`.

Decodes stand before prefills in vLLM's running list unless a later request overtook an earlier one in prefill, which
`long_prefill_token_threshold`, block alignment of hybrid models and encoder budgets allow. In such a step the
prefills are given their shares beforehand (`shorten_prefills`): vLLM computes what a request still needs as
`num_tokens_with_spec + num_output_placeholders - num_computed_tokens`, so lowering the placeholders of one request
for the length of the running loop lowers its need to its share, and a need of 0 makes vLLM skip it and go on. With T
as above no decode can then be starved by a prefill in front of it. The placeholders are put back before anything
else reads them. A preemption cannot disturb the plan: vLLM takes its victims from the tail and admits nobody in such
a step, and no share depends on a request behind it.

Where this differs from the definition: under vLLM's priority policy a victim can be one that was served already in
the same step; the token it gives back may then go to a prefill, at most one a victim.
"""

from __future__ import annotations

from collections.abc import Iterable

from ppas_core.vllm.queues import QueuedRequest


class ShortenedPrefills:
    """Running prefills whose need is lowered to their share of the step, until `restore`."""

    def __init__(self) -> None:
        self._changed: list[tuple[QueuedRequest, int, int]] = []

    def __bool__(self) -> bool:
        """Whether a request is lowered now."""
        return bool(self._changed)

    def shorten(self, prefills: Iterable[QueuedRequest], budget: int, *, long_prefill_token_threshold: int = 0) -> None:
        """Deal `budget` tokens to `prefills` in order. Those that get less than they need are lowered to what they
        get.
        """
        left = budget
        for request in prefills:
            placeholders = request.num_output_placeholders
            need = request.num_tokens_with_spec + placeholders - request.num_computed_tokens
            share = need
            if 0 < long_prefill_token_threshold < share:
                share = long_prefill_token_threshold
            if share > left:
                share = left
            left -= share
            if share < need:
                lowered = placeholders - (need - share)
                request.num_output_placeholders = lowered
                self._changed.append((request, placeholders, lowered))

    def restore(self) -> None:
        """Put back every value that nobody else changed since (a preemption resets it). Harmless when repeated."""
        for request, original, lowered in self._changed:
            if request.num_output_placeholders == lowered:
                request.num_output_placeholders = original
        self._changed.clear()
