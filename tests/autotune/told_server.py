"""The simulator as a live server that a test tells what to do."""

from collections.abc import Callable
from dataclasses import replace

from small_study import small

from autotune.plan import Plan, make_plan
from autotune.records import Origin, Replay
from ppas_core.policy import PolicyParams
from traces.format import Trace


class ToldServer:
    """asked: the settings and traces that it replayed, in order, by name. tell: what becomes of each replay; may raise."""

    origin = Origin.LIVE
    is_noisy = True

    def __init__(self, plan: Plan) -> None:
        self._inner = plan.evaluator
        self.asked: list[tuple[str, str]] = []
        self.tell: Callable[[Replay], Replay] = lambda replay: replay

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def replay(self, params: PolicyParams, trace: Trace, repeat: int = 0) -> Replay:
        found = self.tell(self._inner.replay(params, trace, repeat))
        self.asked.append((params.label(), trace.name))
        return replace(found, origin=self.origin)


def told_plan(**changes: object) -> tuple[Plan, ToldServer]:
    """A small study on such a server."""
    inner = make_plan(small(noise_sigma=0.02, **changes))
    server = ToldServer(inner)
    return replace(inner, evaluator=server), server  # type: ignore[arg-type]
