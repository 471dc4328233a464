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
from ppas_core.vllm.steplog import DONE_S, StepLog
from ppas_core.vllm.tracking import RunningTracker

logger = init_logger("vllm.ppas")

NAN = float("nan")
GLOBAL = Scope.GLOBAL  # looked up once: a member of an enumeration costs a Python call each time


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
        self._decided_on: QueueReading | None = None
        self._decided_by: PolicyParams | None = None
        self._stock_schedule = super().schedule  # type: ignore[misc]
        # An attribute over the method, so that only steps with lowered prefills pay for `_restore_first`.
        self._stock_make_cached_request_data = super()._make_cached_request_data  # type: ignore[misc]
        self._make_cached_request_data = self._stock_make_cached_request_data
        self._is_shortened = False
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
        self._open_rows: deque[tuple[Any, list[Any]]] = deque()  # steps whose output is not back yet
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
        """One step of stock `schedule` under the budget of this step.

        Everything that this class and the tracker touch has left the processor's caches since the last step, so the
        price is the number of functions and objects on the way, not the arithmetic.
        """
        self.ppas_step = step = self.ppas_step + 1
        params = self._control.poll(step)
        log = self._step_log
        start_s = 0.0
        if log is not None:
            start_s = time.monotonic()
        elif params is None:
            self._steps_off += 1
            self.ppas_decision = None
            return self._stock_schedule(*args, **kwargs)
        reading = self._read_queues(step)
        if params is None:
            self._steps_off += 1
            self.ppas_decision = None
            step_budget = self._startup_budget
        else:
            step_budget = self._decide(params, reading)
        scheduler: Any = self
        num_running = len(scheduler.running)
        scheduler.max_num_scheduled_tokens = step_budget
        try:
            output = self._stock_schedule(*args, **kwargs)
        finally:
            if self._is_shortened:
                self._restore()
            scheduler.max_num_scheduled_tokens = self._startup_budget
        running = scheduler.running
        tracker = self._tracker
        if tracker is not None:
            tracker.step = step
            if len(running) > num_running:  # vLLM admits nobody in a step that preempts
                tracker.admit(running[num_running:])
        if log is not None:
            self._log_step(log, output, start_s, step_budget, reading, num_running)
        return output

    def _read_queues(self, step: int) -> QueueReading:
        scheduler: Any = self
        tracker = self._tracker
        streaming = self._has_streaming_input and scheduler.num_waiting_for_streaming_input > 0
        if tracker is None or streaming:
            may_hold_tokens = self._waiting_may_hold_tokens or streaming
            return read_queues(scheduler.running, self._waiting_queues, waiting_may_hold_tokens=may_hold_tokens)
        if tracker.step != step - 1:  # steps went by without us
            tracker.rebuild(scheduler.running, step)
        return tracker.read(scheduler.running, self._waiting_queues)

    def _decide(self, params: PolicyParams, reading: QueueReading) -> int:
        """Tokens that vLLM may schedule in this step in all. See `prefill_scope` for the prefill scope."""
        decision = self.ppas_decision
        if decision is None or reading is not self._decided_on or params is not self._decided_by:
            self._decided_on, self._decided_by = reading, params
            self.ppas_decision = decision = decide(reading.state, params)
        budget, branch = decision
        self._steps_by_branch[branch] += 1
        b_max = params.b_max
        if budget == b_max or params.scope is GLOBAL:
            return budget
        scheduler: Any = self
        tracker = self._tracker
        num_decodes = reading.state.running_decodes
        if tracker is not None:
            decode_tokens = tracker.count_decode_tokens(scheduler.requests, num_decodes, self.ppas_step)
        else:
            decode_tokens = count_decode_tokens(
                scheduler.running,
                num_decodes,
                max_position=self._max_position,
                tokens_in_flight=self._tokens_in_flight,
                long_prefill_token_threshold=self._threshold,
                decode_step=getattr(scheduler, "current_step", 0) + 1,
            )
        if reading.decode_behind_prefill:
            self._shortened.shorten(reading.prefills, budget, long_prefill_token_threshold=self._threshold)
            self._is_shortened = True
            self._make_cached_request_data = self._restore_first
        total = decode_tokens + budget
        return total if total < b_max else b_max

    def _restore(self) -> None:
        self._shortened.restore()
        self._is_shortened = False
        self._make_cached_request_data = self._stock_make_cached_request_data

    def _restore_first(self, *args: Any, **kwargs: Any) -> Any:
        # vLLM's `_make_cached_request_data` is the first to read placeholders after the running loop, which alone may
        # see the lowered ones.
        self._restore()
        return self._stock_make_cached_request_data(*args, **kwargs)

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Stock `update_from_output`; the step's row in the log ends here."""
        if self._step_log is not None and self._open_rows:
            self._close_row(self._step_log, scheduler_output, time.monotonic())
        return super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def shutdown(self) -> None:
        """Stock `shutdown`, after the log and the state are written."""
        if self._step_log is not None:
            while self._open_rows:
                self._step_log.add(self._open_rows.popleft()[1])
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
        self, log: StepLog, output: Any, start_s: float, step_budget: int, reading: QueueReading, num_running: int
    ) -> None:
        """Open this step's row. num_running: length of the running list before the step."""
        scheduler: Any = self
        running = scheduler.running
        scheduled: dict[str, int] = output.num_scheduled_tokens
        state = reading.state
        num_chunks = prefill_tokens = pairs = 0
        prefill_context = 0  # before the step, of the prefills that were running already
        for request in reading.prefills:
            tokens = scheduled.get(request.request_id)
            if tokens is not None:
                context = request.num_computed_tokens - tokens
                num_chunks += 1
                prefill_tokens += tokens
                pairs += tokens * context + tokens * (tokens + 1) // 2
                prefill_context += context
        # vLLM's list of contexts before the step: running requests, then (by version) those resumed in this step.
        contexts = output.scheduled_cached_reqs.num_computed_tokens
        if len(running) > num_running:  # vLLM admits nobody in a step that preempts
            num_admitted = 0
            for request in running[num_running:]:
                tokens = scheduled.get(request.request_id)
                if tokens is not None:
                    num_admitted += 1
                    prefill_tokens += tokens
                    pairs += tokens * (request.num_computed_tokens - tokens) + tokens * (tokens + 1) // 2
            num_chunks += num_admitted
            contexts = contexts[: len(scheduled) - num_admitted]
        decode_tokens = output.total_num_scheduled_tokens - prefill_tokens
        if self.ppas_decision is None:
            branch, budget = "off", self._startup_budget
        else:
            budget, branch = self.ppas_decision
        control = self._control
        row = [  # the fields of StepRow, in its order
            self.ppas_step,
            start_s,
            time.monotonic(),
            NAN,
            control.version,
            "off" if control.params is None else control.params.scope,
            branch,
            budget,
            step_budget,
            *state,
            prefill_tokens,
            decode_tokens,
            num_chunks,
            len(scheduled) - num_chunks,
            pairs,
            sum(contexts) - prefill_context + decode_tokens,
            scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            max(0, num_running - len(running)),
            log.dropped,
        ]
        open_rows = self._open_rows
        if len(open_rows) >= 8:  # more than any pipeline depth: outputs that never come back
            log.add(open_rows.popleft()[1])
        open_rows.append((output, row))

    def _close_row(self, log: StepLog, output: Any, done_s: float) -> None:
        while self._open_rows:
            opened, row = self._open_rows.popleft()
            if opened is output:
                row[DONE_S] = done_s
                log.add(row)
                return
            log.add(row)


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
