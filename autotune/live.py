"""Trials on a running vLLM server: settings are switched at a step, not by a restart.

One server serves a whole study. It starts with the largest budget that the study will try; for each setting the live
settings are changed, a probe request makes the engine take a step, and the acknowledgement is awaited. A replay begins
on a drained server, with a prefix-cache salt of its own, and counts only when the client was on time and nobody else
changed the settings. A server that died or hangs under a setting is replaced, and that setting is not tried again.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from autotune.export import SCHEDULER_CLASS, words_beside, write_vllm_config
from autotune.records import ClientLag, Origin, Replay
from autotune.replay.answer import TIMEOUT
from autotune.replay.outcome import ReplayOutcome
from autotune.replay.run import replay as replay_trace
from autotune.server import Server, existing_server, is_healthy, start_server
from autotune.server_deaths import Deaths
from autotune.server_facts import keep_facts, kept_facts
from autotune.server_joined import JoinedServer
from autotune.server_memory import MemoryWatch
from autotune.server_options import WRAPPER_OUTPUT, ServerOptions
from autotune.server_settings import Channel, FileChannel, wait_for_ack
from autotune.server_steps import StepTail, open_requests
from ppas_core.errors import InvalidInput, NoResult, PpasError
from ppas_core.policy import PolicyParams
from ppas_core.vllm.live import state_path
from traces.format import Trace, TraceRequest
from traces.prompts import WARM_UP, Vocabulary

API_KEY_VARIABLE: Final = "PPAS_API_KEY"
_ATTEMPTS: Final = 3
"""Replays of a trace whose client was late, before the setting counts as not measurable."""
_OUTSIDE: Final = "a live evaluator replays within its session only"
_DEATH_TOLD_S: Final = 15.0
"""So long may vLLM take to end after its engine did."""
_SAY_EVERY_S: Final = 15
_ACK_TIMEOUT_S: Final = 30.0
_DRAIN_TIMEOUT_S: Final = 60.0
"""How long a server may still have requests between replays before it counts as hanging; never above their timeout."""
_LOG_FLUSH_S: Final = 0.25
"""The engine's reporter writes the step log every 0.1 s."""
_STEP_LOG_BYTES: Final = 2**33
"""Never rotated within a study: rows are read once, from where the last reading ended."""


class LiveEvaluator:
    """Replays on a vLLM server of our own, or one that was joined; to be used within its `session`.

    budget: the largest b_max that will be asked for; the server starts with it. max_num_seqs: of every setting.
    say: told what is going on, a short line each, such as that the server starts. replays_per_trial: of a whole trial.
    starts, starting_s: how often servers were started, and the seconds until those for trials were healthy.
    """

    origin = Origin.LIVE
    is_noisy = True
    error_pct: float | None = None

    def __init__(
        self,
        options: ServerOptions,
        *,
        budget: int,
        max_num_seqs: int,
        replays_per_trial: int = 1,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.options = options
        self.budget = budget
        self.max_num_seqs = max_num_seqs
        self.replays_per_trial = replays_per_trial
        self.memory: MemoryWatch | None = None
        self.say: Callable[[str], None] = say or (lambda text: None)
        self.starts = 0
        self.starting_s = 0.0
        self.switch_s: list[float] = []
        self._vocabulary = Vocabulary(options.vocabulary_size)
        self._folder: Path | None = None
        self._deaths: Deaths | None = None
        self._server: Server | None = None
        self._joined: JoinedServer | None = None
        self._in_force: PolicyParams | None = None
        self._ack: dict[str, Any] | None = None
        self._steps = StepTail(Path())

    @contextlib.contextmanager
    def session(self, folder: Path) -> Iterator[None]:
        """Lets replays start servers, with their logs in `folder`; ends the server at the end, however that comes.

        A server that was joined gets the settings back that it had.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._deaths = Deaths(folder / "deadly.json")
        self.memory = MemoryWatch(
            folder / "memory.jsonl",
            reserve_bytes=self.options.memory_reserve_bytes,
            replays_per_trial=self.replays_per_trial,
        )
        try:
            yield
        finally:
            try:
                self._give_back()
            finally:
                self._stop()
                self._folder = None

    def check(self, trace: Trace) -> None:
        """Nothing to refuse here: `autotune.plan` looks at lengths where model or flags say them, the server at the rest."""

    def doubts(self, params: PolicyParams, traces: Sequence[Trace]) -> list[str]:
        """None: what was asked for was measured."""
        return []

    def identity(self) -> dict[str, Any]:
        """What a resumed study must have in common with the first run. Names of environment variables, never values."""
        return {
            "backend": "vllm",
            "model": self.options.model,
            "flags": list(self.options.flags),
            "environment": sorted(self.options.environment),
            "wrapper": list(self.options.wrapper),
            "url": self.options.url,
            **({"restart_per_trial": True} if self.options.restart_per_trial else {}),
            "max_num_batched_tokens": self.budget,
            "max_num_seqs": self.max_num_seqs,
        }

    def describe(self) -> dict[str, Any]:
        """The identity and what the server said of itself."""
        facts = kept_facts(self._facts_file) if self._folder is not None else None
        is_folder = {} if self.options.url is not None else {"model_is_folder": os.path.isdir(self.options.model)}
        return {**self.identity(), **is_folder, **({"server": facts} if facts else {}), "server_starts": self.starts}

    def replay(self, params: PolicyParams, trace: Trace, repeat: int = 0) -> Replay:
        """One replay of `trace` under `params`; `repeat` changes nothing here, reality brings its own noise.

        Raises NoResult, with the reason, when the server died, hung or refused the settings, when somebody else changed
        them, or the client was late each time.
        """
        self._known_deaths.check(params)
        server = self._ready(params, trace)
        if params != self._in_force:
            self._switch(server, params)
        outcome, attempts = self._valid_outcome(server, params, trace)
        if self._joined is not None:
            try:
                branches = self._joined.branches_since()
            except NoResult:
                self._in_force = None
                raise
            return _record(params, trace, outcome, attempts, branch_steps=branches, ack=self._ack)
        time.sleep(_LOG_FLUSH_S)
        memory_bytes = self._look_at_memory(server)
        steps = self._steps.read_new()
        if not steps.empty and self._ack is not None and {self._ack["version"]} != set(steps["settings_version"]):
            self._in_force = None
            raise NoResult("the settings changed in the middle of the replay; nothing else may write the settings file")
        counts = {} if steps.empty else steps["branch"].value_counts().to_dict()
        branches = {str(branch): int(count) for branch, count in counts.items()}
        known = {"branch_steps": branches, "steps": steps, "ack": self._ack, "server_memory_bytes": memory_bytes}
        return _record(params, trace, outcome, attempts, **known)

    def forget_deaths(self, settings: Sequence[PolicyParams]) -> None:
        """Has `settings` tried again: that servers ended under them was not their doing."""
        self._known_deaths.forget(settings)

    def spare(self, params: PolicyParams) -> None:
        """Has `params` tried again whatever ended under them: for the reference, which a study cannot do without."""
        self._known_deaths.spare(params)

    @contextlib.contextmanager
    def cold(self, config: Path) -> Iterator[Callable[[PolicyParams, Trace], Replay]]:
        """A fresh server started with exactly the export `config`, nothing live about it; ends the study's server.

        Yields a function that replays a trace there; the settings given to it are the label of the record.
        """
        self._stop()
        self.say("starting a server with the exported file, to compare hot with cold")
        with self._start_with(config, self._new_log("cold")) as server:
            warm = [False]

            def replay_cold(params: PolicyParams, trace: Trace) -> Replay:
                if not warm[0]:
                    self._warm_up(server, trace)
                    warm[0] = True
                self._require_idle(server)
                return _record(params, trace, *self._valid_outcome(server, params, trace))

            yield replay_cold

    # --- the server ---

    def _ready(self, params: PolicyParams, trace: Trace) -> Server:
        """A server that runs, is warm and has nothing to do. One of our own that is not is replaced."""
        if self._server is not None and (problem := self._server.ended() or self._busy(self._server)) is not None:
            self._stop()
            if self.options.url is not None:
                raise _stops_study(NoResult(f"the joined server cannot be measured: {problem}; see to it, then resume"))
            self.say(f"replacing the server between trials: {problem.splitlines()[0]}")
        if self.options.restart_per_trial and params != self._in_force:
            self._stop()
        self._spare_memory(params)
        if self._server is None:
            self._server = self._new_server(params)
            self.starting_s += self._server.start_s or 0.0
            self._warm_up(self._server, trace)
            self._require_idle(self._server)
            if self.options.restart_per_trial:
                self._mark()  # else the switch does that
        return self._server

    def _look_at_memory(self, server: Server) -> int | None:
        """Bytes that the server's processes hold; None where that is not known."""
        if self.memory is None or server.log is None:
            return None
        used_bytes, news = self.memory.note(server.log.stem, server.leader)
        if news is not None:
            self.say(news)
        return used_bytes

    def _spare_memory(self, params: PolicyParams) -> None:
        """Ends a server that leaks before it runs out of memory; in the middle of a setting's replays never."""
        if self.memory is None or self._server is None or params == self._in_force:
            return
        if (reason := self.memory.too_little()) is not None:
            self._stop()
            self.memory.restarted(reason)
            self.say(f"starting the server anew between trials: {reason}")

    def _new_server(self, params: PolicyParams) -> Server:
        if self.options.restart_per_trial:
            log = self._new_log("server")
            self.say(f"starting vLLM with {params.label()} (log: {log})")
            server = self._start_with(write_vllm_config(params, log.with_suffix(".yaml"), self.options.flags), log)
            self._remember_facts(server)
            self._in_force = params
            return server
        try:
            return self._start() if self.options.url is None else self._join(self.options.url)
        except PpasError as error:
            raise _stops_study(error) from None  # it would not start for the next setting either

    def _join(self, url: str) -> Server:
        server = existing_server(url, api_key=self._api_key)
        if (problem := self._busy(server)) is not None:
            raise NoResult(f"the server at {url} cannot be measured: {problem}; it must serve nobody else")
        options = self.options
        joined = JoinedServer.at(server.url, options.settings_file, options.token_file, self._in_folder("joined.json"))
        self.say(f"joining the server at {url}; its settings are changed through {joined.channel.name}")
        joined.require(self.budget, self.max_num_seqs, wake=lambda: self._probe(server))
        self._remember_facts(server, engine=joined.engine)
        self._joined = joined
        return server

    def _start(self) -> Server:
        log = self._new_log("server")
        self.say(f"starting vLLM with {self.options.model} (log: {log})")
        for stale in (self._settings_file, state_path(self._settings_file)):
            stale.unlink(missing_ok=True)  # a server reads it at its start, and the last setting may have ended it
        budget, max_num_seqs = str(self.budget), str(self.max_num_seqs)
        server = self._start_server(
            log,
            flags=(
                *self.options.flags,
                *("--max-num-batched-tokens", budget, "--max-num-seqs", max_num_seqs),
                *("--scheduler-cls", SCHEDULER_CLASS),
            ),
            environment={
                # A static budget to begin with; every trial brings its own settings through the file.
                "PPAS_ENABLED": "1",
                "PPAS_B_CAP": budget,
                "PPAS_SCOPE": "global",
                "PPAS_SETTINGS_FILE": str(self._settings_file.resolve()),
            },
            needs_ppas=True,
        )
        self._remember_facts(server)
        return server

    def _start_with(self, config: Path, log: Path) -> Server:
        """A server as its users start it with the export `config`: no flag but those that the file cannot hold."""
        return self._start_server(log, flags=words_beside(self.options.flags), environment={}, config=config)

    def _start_server(self, log: Path, *, environment: Mapping[str, str], **options: Any) -> Server:
        self.starts += 1
        self._steps = StepTail(log.with_suffix(".steps.csv"))
        output = str(log.with_suffix("").resolve())
        return start_server(
            self.options.model,
            log=log,
            environment={
                **self.options.environment,
                **environment,
                "PPAS_STEP_LOG": str(self._steps.path.resolve()),
                "PPAS_STEP_LOG_MAX_BYTES": str(_STEP_LOG_BYTES),
            },
            wrapper=[word.replace(WRAPPER_OUTPUT, output) for word in self.options.wrapper],
            timeout_s=self.options.start_timeout_s,
            waiting=self._say_waiting,
            **options,
        )

    def _say_waiting(self, waited_s: float, _line: str) -> None:
        if int(waited_s) % _SAY_EVERY_S == 0:
            self.say(f"waiting for vLLM to load the model, {waited_s:.0f} s so far")

    def _remember_facts(self, server: Server, **further: Any) -> None:
        try:
            keep_facts(self._facts_file, {**server.facts.to_dict(), "start_s": server.start_s, **further})
        except InvalidInput:
            server.stop()
            raise

    def _give_back(self) -> None:
        """Puts the settings back that a joined server had."""
        server, joined = self._server, self._joined
        if server is None or joined is None or server.ended() is not None:
            return
        try:
            joined.give_back(wake=lambda: self._probe(server))
        except (PpasError, OSError, ValueError, KeyError) as error:
            self.say(f"the settings that the server had before could not be put back: {error}")

    def _stop(self) -> None:
        server, self._server, self._joined, self._in_force, self._ack = self._server, None, None, None, None
        if server is not None:
            server.stop()

    def _warm_up(self, server: Server, trace: Trace) -> None:
        """Two requests of the trace's shapes, with other tokens, so that no trial pays for what is done once."""
        first = TraceRequest(0.0, trace.requests[0].prompt_tokens, 2)
        last = TraceRequest(0.0, trace.requests[-1].prompt_tokens, 2)
        self._replay_once(server, Trace(name="warm-up", requests=(first, last)), purpose=WARM_UP)

    def _busy(self, server: Server) -> str | None:
        """None once no request is running or waiting; in words what is left when that takes too long."""
        wait_s = min(_DRAIN_TIMEOUT_S, self.options.request_timeout_s)
        deadline = time.monotonic() + wait_s
        while (left := open_requests(server.url)) != 0:
            if left is None:
                return "it does not answer"
            if time.monotonic() > deadline:
                return f"it still has {left} requests {wait_s:g} s after the last replay"
            time.sleep(0.02)
        return None

    def _require_idle(self, server: Server) -> None:
        if (problem := self._busy(server)) is not None:
            self._stop()
            raise NoResult(f"the server cannot be measured: {problem}")

    def _mark(self) -> None:
        """What the engine does from now on belongs to the next replay."""
        if self._joined is not None:
            self._joined.mark()
        else:
            time.sleep(_LOG_FLUSH_S)
            self._steps.read_new()

    # --- a trial ---

    def _switch(self, server: Server, params: PolicyParams) -> None:
        started = time.perf_counter()
        channel: Channel = FileChannel(self._settings_file) if self._joined is None else self._joined.channel
        self._in_force = None
        if self._joined is not None:
            self._joined.remember_before()
        version = channel.ask(params)
        try:
            self._probe(server)
            ack = wait_for_ack(channel, version, timeout_s=_ACK_TIMEOUT_S)
        except NoResult:
            if (died := server.ended()) is not None:
                self._known_deaths.add(params, died.splitlines()[0])
            self._stop()
            raise
        if ack["status"] != "applied" or ack["ppas"] != params.to_dict():
            raise NoResult(f"the engine refused the settings: {ack['reason'] or 'others are in force'}")
        self._in_force, self._ack = params, ack
        self._require_idle(server)
        self._mark()  # the probe's steps are nobody's
        self.switch_s.append(time.perf_counter() - started)

    def _probe(self, server: Server) -> None:
        probe = Trace(name="probe", requests=(TraceRequest(0.0, 4, 1),))
        outcome = self._replay_once(server, probe, purpose=WARM_UP)
        if outcome.records.failures():
            raise NoResult(f"the server did not answer a request of 4 tokens: {outcome.first_failure()}")

    def _valid_outcome(self, server: Server, params: PolicyParams, trace: Trace) -> tuple[ReplayOutcome, int]:
        """A replay whose client was on time, and how many it took. Settings under which the server died are remembered."""
        reason = ""
        for attempt in range(1, _ATTEMPTS + 1):
            outcome = self._replay_once(server, trace)
            if (died := _death(server, outcome)) is not None:
                self._lose_server(params, f"the server died: {died}")
            if TIMEOUT in outcome.records.status and (problem := self._busy(server)) is not None:
                self._lose_server(params, f"the server hangs: {problem}")
            if outcome.valid:
                return outcome, attempt
            reason = outcome.reason or "no reason was given"
            self.say(f"replay of {trace.name} is invalid ({reason}); attempt {attempt} of {_ATTEMPTS}")
            self._require_idle(server)
            self._mark()
        raise NoResult(f"trace {trace.name!r} could not be measured in {_ATTEMPTS} attempts: {reason}")

    def _lose_server(self, params: PolicyParams, what: str) -> None:
        self._known_deaths.add(params, what.splitlines()[0])
        self._stop()
        raise NoResult(what)

    def _replay_once(self, server: Server, trace: Trace, **options: Any) -> ReplayOutcome:
        return replay_trace(
            server.url,
            trace,
            model=server.facts.model or self.options.model,
            cache_salt=uuid.uuid4().hex,
            timeout_s=self.options.request_timeout_s,
            vocabulary=self._vocabulary,
            max_lag_s=self.options.max_send_lag_s,
            api_key=self._api_key,
            stop=server.ended,
            **options,
        )

    # --- places ---

    @property
    def _api_key(self) -> str | None:
        """Of a joined server from PPAS_API_KEY; one of our own may have been given its key by vLLM's variable."""
        if self.options.url is not None:
            return os.environ.get(API_KEY_VARIABLE) or None
        return self.options.environment.get("VLLM_API_KEY") or os.environ.get("VLLM_API_KEY") or None

    @property
    def _known_deaths(self) -> Deaths:
        if self._deaths is None:
            raise AssertionError(_OUTSIDE)
        return self._deaths

    @property
    def _settings_file(self) -> Path:
        return self._in_folder("settings.json")

    @property
    def _facts_file(self) -> Path:
        return self._in_folder("facts.json")

    def _new_log(self, kind: str) -> Path:
        """A log that no earlier process of this study wrote."""
        number = 1
        while (path := self._in_folder(f"{kind}-{number}.log")).exists():
            number += 1
        return path

    def _in_folder(self, name: str) -> Path:
        if self._folder is None:
            raise AssertionError(_OUTSIDE)
        return self._folder / name


def _death(server: Server, outcome: ReplayOutcome) -> str | None:
    """How the server ended during a replay, None while it is healthy. An end may show in the requests before it is told."""
    deadline = time.monotonic() + _DEATH_TOLD_S
    while (died := server.ended()) is None and outcome.records.failures() and not is_healthy(server.url):
        if time.monotonic() > deadline:
            return "it is not healthy any more"
        time.sleep(0.05)
    return died


def _record(params: PolicyParams, trace: Trace, outcome: ReplayOutcome, attempts: int, **known: Any) -> Replay:
    """The record of one replay; `known` is what is known of the engine's part in it."""
    lag = {name: value for name, value in asdict(outcome.lag).items() if name in ClientLag.__slots__}
    return Replay(
        params=params,
        trace_name=trace.name,
        trace_digest=trace.digest,
        regime=trace.regime,
        origin=Origin.LIVE,
        requests=outcome.records,
        client=ClientLag(**lag, attempts=attempts),
        failure_details=outcome.failure_details(),
        **known,
    )


def _stops_study(error: PpasError) -> PpasError:
    error.stops_study = True
    return error
