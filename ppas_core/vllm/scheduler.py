"""The scheduler class that vLLM loads: stock scheduling under the budget that the policy sets for each step.

`PpasScheduler` is the name for `--scheduler-cls`. When the engine is built it becomes `AsyncPpasScheduler` or
`SyncPpasScheduler`, over the class that stock vLLM would have taken. Each step: look at the settings, read the
queues, ask `policy.decide`, set `max_num_scheduled_tokens` for this one step, and let vLLM schedule. With the policy
off nothing is set and nothing is read.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any

from vllm import __version__ as vllm_version
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from ppas_core.errors import InvalidSettings
from ppas_core.policy import Branch, Decision, PolicyParams, Scope, decide
from ppas_core.vllm import compat
from ppas_core.vllm.control import Ack, LiveControl
from ppas_core.vllm.live import STATE_FORMAT, state_path
from ppas_core.vllm.prefill_scope import ShortenedPrefills
from ppas_core.vllm.queues import QueueReading, count_decode_tokens, read_queues
from ppas_core.vllm.reporter import Reporter
from ppas_core.vllm.settings import EngineLimits, read_activation
from ppas_core.vllm.steplog import StepLog, StepRow
from ppas_core.vllm.tracking import RunningTracker

logger = init_logger("vllm.ppas")

NAN = float("nan")


class PpasMixin:
    """P-PAS over a stock scheduler class, which must stand behind it in the class's bases.

    ppas_step: schedule() calls so far, as acknowledgements and the step log count them.
    ppas_decision: the last step's decision, None while the policy is off.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scheduler: Any = self
        compat.require_known_shape(Scheduler, Request, vllm_version)
        config = scheduler.vllm_config
        self._startup_budget: int = scheduler.max_num_scheduled_tokens
        limits = EngineLimits(self._startup_budget, scheduler.max_num_running_reqs)
        activation = read_activation(getattr(config, "additional_config", None), os.environ, limits)
        options = activation.options
        if options.settings_file is not None and not options.settings_file.parent.is_dir():
            raise InvalidSettings(
                f"settings_file is {options.settings_file}; its folder does not exist: "
                f"create it before the server starts"
            )
        self.ppas_step = 0
        self.ppas_decision: Decision | None = None
        self._steps_by_branch = dict.fromkeys(Branch, 0)
        self._steps_off = 0
        self._shortened = ShortenedPrefills()
        self._threshold: int = scheduler.scheduler_config.long_prefill_token_threshold
        self._max_position: int = scheduler.max_model_len - getattr(scheduler, "num_sampled_tokens_per_step", 1)
        self._waiting_queues = compat.waiting_queues(scheduler)  # made once by vLLM, never replaced
        self._waiting_may_hold_tokens = scheduler.connector is not None
        self._has_streaming_input = hasattr(scheduler, "num_waiting_for_streaming_input")
        self._tokens_in_flight = isinstance(self, AsyncScheduler)
        self._decodes_differ = bool(
            scheduler.connector is not None
            or scheduler.num_spec_tokens
            or config.parallel_config.pipeline_parallel_size > 1
        )
        self._tracker: RunningTracker | None = None
        if not self._decodes_differ:
            self._tracker = RunningTracker(
                RequestStatus.RUNNING,
                max_position=self._max_position,
                tokens_in_flight=self._tokens_in_flight,
                long_prefill_token_threshold=self._threshold,
            )
        self._tracked_step = -1
        self._open_rows: deque[tuple[Any, dict[str, Any]]] = deque()  # steps whose output is not back yet
        rank = getattr(config.parallel_config, "data_parallel_rank", 0) or 0
        self._step_log: StepLog | None = None
        if options.step_log is not None:
            log_path = options.step_log
            if rank != 0:
                log_path = log_path.with_name(f"{log_path.name}.dp{rank}")
            self._step_log = StepLog(log_path, max_bytes=options.step_log_max_bytes, keep_files=options.step_log_files)
        self._engine_facts = {
            "pid": os.getpid(),
            "vllm": vllm_version,
            "scheduler": type(self).__name__,
            "startup_budget_tokens": limits.startup_budget_tokens,
            "max_num_seqs": limits.max_num_seqs,
            "settings_source": activation.source,
            "started_s": time.time(),
        }
        self._reporter: Reporter | None = None
        self._control = LiveControl(activation.params, limits, options.settings_file, self._on_ack)
        if options.settings_file is not None or self._step_log is not None:
            state_file = None if options.settings_file is None else state_path(options.settings_file, rank)
            self._reporter = Reporter(self.ppas_state, state_file, self._step_log)
        self._control.poll(1)
        if not compat.is_checked(vllm_version):
            logger.warning("P-PAS was not checked with vLLM %s; its scheduler has the expected shape", vllm_version)
        in_force = "off" if self._control.params is None else self._control.params.label()
        logger.info("P-PAS settings: %s (from %s); %s", in_force, activation.source, type(self).__name__)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """One step of stock `schedule` under the budget of this step."""
        self.ppas_step += 1
        params = self._control.poll(self.ppas_step)
        log = self._step_log
        if log is None:
            if params is None:
                self._steps_off += 1
                self.ppas_decision = None
                return super().schedule(*args, **kwargs)  # type: ignore[misc]
            return self._schedule_within(self._decide(params, self._read_queues()), args, kwargs)
        start_s = time.monotonic()
        reading = self._read_queues()
        if params is None:
            self._steps_off += 1
            self.ppas_decision = None
            step_budget = self._startup_budget
        else:
            step_budget = self._decide(params, reading)
        scheduler: Any = self
        before = _Before(scheduler.running, reading.prefills)
        output = self._schedule_within(step_budget, args, kwargs)
        self._log_step(log, output, start_s, step_budget, reading, before)
        return output

    def _schedule_within(self, step_budget: int, args: Any, kwargs: Any) -> Any:
        scheduler: Any = self
        num_running = len(scheduler.running)
        scheduler.max_num_scheduled_tokens = step_budget
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            if self._shortened:
                self._shortened.restore()
            scheduler.max_num_scheduled_tokens = self._startup_budget
        if self._tracker is not None:
            self._tracked_step = self.ppas_step
            if len(scheduler.running) > num_running:  # vLLM admits nobody in a step that preempts
                self._tracker.admit(scheduler.running[num_running:], self.ppas_step)
        return output

    def _read_queues(self) -> QueueReading:
        scheduler: Any = self
        may_hold_tokens = self._waiting_may_hold_tokens or (
            self._has_streaming_input and scheduler.num_waiting_for_streaming_input > 0
        )
        tracker = self._tracker
        if tracker is None or may_hold_tokens:
            return read_queues(scheduler.running, self._waiting_queues, waiting_may_hold_tokens=may_hold_tokens)
        if self._tracked_step != self.ppas_step - 1:  # steps went by without us
            tracker.rebuild(scheduler.running, self.ppas_step)
        return tracker.read(scheduler.running, self._waiting_queues)

    def _decide(self, params: PolicyParams, reading: QueueReading) -> int:
        """Tokens that vLLM may schedule in this step in all. See `prefill_scope` for the prefill scope."""
        state = reading.state
        decision = decide(state, params)
        self.ppas_decision = decision
        self._steps_by_branch[decision.branch] += 1
        budget = decision.budget
        if params.scope is Scope.GLOBAL or budget == params.b_max:
            return budget
        scheduler: Any = self
        tracker = self._tracker
        if tracker is not None:
            decode_tokens = tracker.count_decode_tokens(
                scheduler.requests, len(scheduler.running), state.running_decodes, self.ppas_step
            )
        else:
            decode_tokens = count_decode_tokens(
                scheduler.running,
                state.running_decodes,
                max_position=self._max_position,
                tokens_in_flight=self._tokens_in_flight,
                long_prefill_token_threshold=self._threshold,
                decode_step=getattr(scheduler, "current_step", 0) + 1,
            )
        if reading.decode_behind_prefill:
            self._shortened.shorten(reading.prefills, budget, long_prefill_token_threshold=self._threshold)
        return min(params.b_max, decode_tokens + budget)

    def _make_cached_request_data(self, *args: Any, **kwargs: Any) -> Any:
        # The first to read placeholders after the running loop, which alone may see the lowered ones.
        if self._shortened:
            self._shortened.restore()
        return super()._make_cached_request_data(*args, **kwargs)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Stock `update_from_output`; the step's row in the log ends here."""
        if self._step_log is not None and self._open_rows:
            self._close_row(self._step_log, scheduler_output, time.monotonic())
        return super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def shutdown(self) -> None:
        """Stock `shutdown`, after the log and the state are written."""
        if self._step_log is not None:
            while self._open_rows:
                self._step_log.add(StepRow(done_s=NAN, **self._open_rows.popleft()[1]))
        if self._reporter is not None:
            self._reporter.close()
        super().shutdown()  # type: ignore[misc]

    def ppas_state(self) -> dict[str, Any]:
        """What the state file says: settings in force, steps by branch, acknowledgements. Only reads."""
        control = self._control
        log = self._step_log
        return {
            "format": STATE_FORMAT,
            "engine": self._engine_facts,
            "in_force": {
                "version": control.version,
                "since_step": control.since_step,
                "ppas": None if control.params is None else control.params.to_dict(),
            },
            "step": self.ppas_step,
            "budget": None if self.ppas_decision is None else self.ppas_decision.budget,
            "steps_by_branch": {str(branch): count for branch, count in self._steps_by_branch.items()},
            "steps_off": self._steps_off,
            "step_log": None if log is None else {"path": str(log.path), "rows": log.written, "dropped": log.dropped},
            "ack_counts": dict(control.ack_counts),
            "acks": [ack.to_dict() for ack in tuple(control.acks)],
        }

    def _on_ack(self, ack: Ack) -> None:
        if ack.status == "applied":
            logger.info("P-PAS settings version %d in force from step %d", ack.version, ack.step)
        else:
            logger.warning("P-PAS settings version %d refused at step %d: %s", ack.version, ack.step, ack.reason)
        if self._reporter is not None:
            self._reporter.publish()

    def _log_step(
        self, log: StepLog, output: Any, start_s: float, step_budget: int, reading: QueueReading, before: _Before
    ) -> None:
        scheduler: Any = self
        scheduled: dict[str, int] = output.num_scheduled_tokens
        chunks = before.chunks(scheduler.running, scheduled)
        prefill_tokens = 0
        pairs = 0
        for chunk, context in chunks:
            prefill_tokens += chunk
            pairs += chunk * context + chunk * (chunk + 1) // 2
        num_decodes = len(scheduled) - len(chunks)
        decode_tokens: int = output.total_num_scheduled_tokens - prefill_tokens
        decision = self.ppas_decision
        params = self._control.params
        row = dict[str, Any](
            step=self.ppas_step,
            start_s=start_s,
            scheduled_s=time.monotonic(),
            settings_version=self._control.version,
            scope="off" if params is None else str(params.scope),
            branch="off" if decision is None else str(decision.branch),
            budget=self._startup_budget if decision is None else decision.budget,
            step_budget=step_budget,
            running_prefills=reading.state.running_prefills,
            running_decodes=reading.state.running_decodes,
            waiting_prefills=reading.state.waiting_prefills,
            remaining_running_prefill_tokens=reading.state.remaining_running_prefill_tokens,
            prefill_tokens=prefill_tokens,
            decode_tokens=decode_tokens,
            prefill_chunks=len(chunks),
            decodes=num_decodes,
            prefill_pairs=pairs,
            decode_context_tokens=before.decode_context(scheduled, num_decodes),
            free_kv_blocks=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            preemptions=max(0, len(before.running) - len(scheduler.running)),
            dropped_rows=log.dropped,
        )
        if len(self._open_rows) >= 8:  # more than any pipeline depth: outputs that never come back
            log.add(StepRow(done_s=NAN, **self._open_rows.popleft()[1]))
        self._open_rows.append((output, row))

    def _close_row(self, log: StepLog, output: Any, done_s: float) -> None:
        while self._open_rows:
            opened, row = self._open_rows.popleft()
            if opened is output:
                log.add(StepRow(done_s=done_s, **row))
                return
            log.add(StepRow(done_s=NAN, **row))


class _Before:
    """The running list as it stood before a step, for what the log says about the step."""

    def __init__(self, running: list[Any], prefills: list[Any]) -> None:
        self.running = running[:]
        self._prefills = prefills

    def chunks(self, running: list[Any], scheduled: dict[str, int]) -> list[tuple[int, int]]:
        """(tokens, context before) of each prefill chunk of the step, after it was scheduled."""
        requests = list(self._prefills)
        if len(running) > len(self.running):  # vLLM admits nobody in a step that preempts
            requests += running[len(self.running) :]
        chunks = []
        for request in requests:
            tokens = scheduled.get(request.request_id)
            if tokens is not None:
                chunks.append((tokens, request.num_computed_tokens - tokens))
        return chunks

    def decode_context(self, scheduled: dict[str, int], num_decodes: int) -> int:
        """Sum of the contexts, new tokens included, of the `num_decodes` decodes that were scheduled."""
        context: int = sum([r.num_computed_tokens for r in self.running])  # of a preempted request: 0 by now
        for request in self._prefills:
            context -= request.num_computed_tokens
        if num_decodes < len(self.running) - len(self._prefills):
            prefills = set(map(id, self._prefills))
            for request in self.running:
                if request.request_id not in scheduled and id(request) not in prefills:
                    context -= request.num_computed_tokens
        return context


class SyncPpasScheduler(PpasMixin, Scheduler):  # type: ignore[misc] # vLLM's classes are untyped here
    """P-PAS over vLLM's `Scheduler`."""


class AsyncPpasScheduler(PpasMixin, AsyncScheduler):  # type: ignore[misc]
    """P-PAS over vLLM's `AsyncScheduler`: steps are planned while the one before runs."""


class PpasScheduler:
    """The name for `--scheduler-cls`: builds the scheduler that fits the engine's choice of async scheduling."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An `AsyncPpasScheduler` or a `SyncPpasScheduler`, fully built."""
        config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        return class_for(config)(*args, **kwargs)


def class_for(vllm_config: Any) -> type:
    """The P-PAS class over the scheduler class that stock vLLM takes for this configuration."""
    return AsyncPpasScheduler if vllm_config.scheduler_config.async_scheduling else SyncPpasScheduler
