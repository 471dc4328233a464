"""The part of an engine that a live study talks to, made of the plugin's own pieces: settings file, state, step log.

What a step would decide is not computed: every request is one step of the branch `max`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from ppas_core.policy import PolicyParams
from ppas_core.vllm.control import LiveControl
from ppas_core.vllm.live import STATE_FORMAT, state_path
from ppas_core.vllm.reporter import Reporter
from ppas_core.vllm.settings import EngineLimits
from ppas_core.vllm.steplog import StepLog, StepRow


@dataclass
class EngineOptions:
    """settings_file: watched. token: of the route; None has none. route: whether there is a route."""

    settings_file: str
    step_log: str | None = None
    budget: int = 2048
    max_num_seqs: int = 16
    route: bool = False
    token: str | None = None
    params: dict[str, Any] | None = None


class StandInEngine:
    """Watches the settings file at each request, acknowledges, reports."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.step = 0
        limits = EngineLimits(options.budget, options.max_num_seqs)
        started = options.params and PolicyParams.from_dict(options.params)
        params = started or PolicyParams.static(options.budget, max_num_seqs=options.max_num_seqs)
        path = Path(options.settings_file)
        self.log = StepLog(Path(options.step_log), max_bytes=2**30, keep_files=1) if options.step_log else None
        self.facts = {
            "pid": os.getpid(),
            "startup_budget_tokens": options.budget,
            "max_num_seqs": options.max_num_seqs,
            "started_s": time.time(),
        }
        self.control = LiveControl(params, limits, path, lambda ack: self.reporter.publish())
        self.reporter = Reporter(self.state, state_path(path), self.log)
        self.router: Callable[..., Awaitable[None]] | None = self._router(path) if options.route else None

    def _router(self, path: Path) -> Any:
        from fastapi import FastAPI

        from ppas_core.vllm.routes import build_router

        app = FastAPI()
        app.include_router(build_router(lambda: path, self.options.token))
        return app

    def take_step(self, prompt_tokens: int) -> str:
        """One step; the label of the settings in force."""
        self.step += 1
        params = self.control.poll(self.step)
        assert params is not None
        if self.log is not None:
            now, budget = time.monotonic(), params.b_max
            version, scope = self.control.version, str(params.scope)
            prefilled = min(prompt_tokens, budget)
            self.log.add(
                StepRow(
                    self.step, now, now, now, version, scope, "max", budget, budget, 0, 0, 1, prompt_tokens,
                    prefilled, 0, 1, 0, 0, 0, 100, 0, 0,
                )
            )  # fmt: skip
        return params.label()

    def state(self) -> dict[str, Any]:
        params = self.control.params
        return {
            "format": STATE_FORMAT,
            "engine": self.facts,
            "in_force": {"version": self.control.version, "ppas": params and params.to_dict()},
            "step": self.step,
            "steps_by_branch": {"max": self.step},
            "acks": [ack.to_dict() for ack in tuple(self.control.acks)],
        }

    async def route(
        self, method: str, path: str, head: str, body: bytes, client: str, answer: Callable[[int, Any], None]
    ) -> None:
        """Has the real route answer one request."""
        if self.router is None:
            return answer(404, {})
        lines = [line.partition(":") for line in head.split("\r\n")[1:] if line]
        name, _, query = path.partition("?")
        scope = {
            "type": "http", "http_version": "1.1", "method": method, "scheme": "http", "path": name,
            "raw_path": name.encode(), "query_string": query.encode(), "root_path": "", "server": None,
            "client": (client, 1), "headers": [(key.strip().lower().encode(), value.strip().encode()) for key, _, value in lines],
        }  # fmt: skip
        said: list[Any] = [0, b""]

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                said[0] = message["status"]
            else:
                said[1] += message.get("body", b"")

        await self.router(scope, receive, send)
        answer(said[0], json.loads(said[1] or b"{}"))
        return None
