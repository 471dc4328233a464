"""Trials on a running vLLM server: settings are switched at a step, not by a restart.

One server serves a whole study. It starts with the largest budget that the study will try; for each setting the live
settings file is replaced, a probe request makes the engine take a step, and the acknowledgement is awaited. A replay
begins on a drained server, with a prefix-cache salt of its own, and counts only when the client was on time.
"""

from __future__ import annotations

import contextlib
import re
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pandas as pd

from autotune.export import SCHEDULER_CLASS
from autotune.records import Origin, Replay
from autotune.replay.outcome import ReplayOutcome
from autotune.replay.run import replay as replay_trace
from autotune.server import Server, existing_server, start_server
from ppas_core.errors import InvalidInput, NoResult, PpasError
from ppas_core.files import write_atomically
from ppas_core.plain_json import dump_json, load_json
from ppas_core.policy import PolicyParams
from ppas_core.vllm.live import wait_for_ack, write_settings
from traces.format import Trace, TraceRequest
from traces.prompts import WARM_UP, Vocabulary

_ATTEMPTS: Final = 3
"""Replays of a trace whose client was late, before the setting counts as not measurable."""
_SAY_EVERY_S: Final = 15
_ACK_TIMEOUT_S: Final = 30.0
_DRAIN_TIMEOUT_S: Final = 60.0
_LOG_FLUSH_S: Final = 0.25
"""The engine's reporter writes the step log every 0.1 s."""
_STEP_LOG_BYTES: Final = 2**33
"""Never rotated within a study: rows are read once, from where the last reading ended."""
_WAITING_REQUESTS: Final = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? ([0-9.e+]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How the server of a live study is started.

    model: as for `vllm serve`. flags, environment: passed on as they are. wrapper: a command before the server's.
    vocabulary_size: ids that prompts are drawn from. start_timeout_s, request_timeout_s: when to give up.
    max_send_lag_s: a replay counts only when the client's P99 lateness stays below this plus 1 % of mean latency.
    url, settings_file: a server that somebody else started, and the file that it watches (PPAS_SETTINGS_FILE there);
        both or neither. It is never started, restarted or ended, and its step log is not known.
    """

    model: str
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    wrapper: tuple[str, ...] = ()
    vocabulary_size: int = 32_000
    start_timeout_s: float = 900.0
    request_timeout_s: float = 600.0
    max_send_lag_s: float = 0.005
    url: str | None = None
    settings_file: Path | None = None


class LiveEvaluator:
    """Replays on a vLLM server of our own; to be used within its `session`.

    budget: the largest b_max that will be asked for; the server starts with it. max_num_seqs: of every setting.
    say: told what is going on, a short line each, such as that the server starts.
    """

    origin = Origin.LIVE
    is_noisy = True
    error_pct: float | None = None

    def __init__(
        self, options: ServerOptions, *, budget: int, max_num_seqs: int, say: Callable[[str], None] | None = None
    ) -> None:
        self.options = options
        self.budget = budget
        self.max_num_seqs = max_num_seqs
        self.say: Callable[[str], None] = say or (lambda text: None)
        self.starts = 0
        self.switch_s: list[float] = []
        self._vocabulary = Vocabulary(options.vocabulary_size)
        self._deadly: dict[PolicyParams, str] = {}
        self._folder: Path | None = None
        self._server: Server | None = None
        self._in_force: PolicyParams | None = None
        self._steps = _StepTail(Path())

    @contextlib.contextmanager
    def session(self, folder: Path) -> Iterator[None]:
        """Lets replays start servers, with their logs in `folder`; ends the server at the end, however that comes."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        try:
            yield
        finally:
            self._stop()
            self._folder = None

    def check(self, trace: Trace) -> None:
        """Nothing to refuse before the server told its limits; a request beyond them fails its replay."""

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
            "max_num_batched_tokens": self.budget,
            "max_num_seqs": self.max_num_seqs,
        }

    def describe(self) -> dict[str, Any]:
        """The identity and what the server said of itself."""
        facts = _read_json(self._facts_file) if self._folder is not None else None
        return {**self.identity(), **({"server": facts} if facts else {}), "server_starts": self.starts}

    def replay(self, params: PolicyParams, trace: Trace, repeat: int = 0) -> Replay:
        """One replay of `trace` under `params`; `repeat` changes nothing here, reality brings its own noise.

        Raises NoResult, with the reason, when the server died, refused the settings, or the client was late each time.
        """
        if params in self._deadly:
            raise NoResult(f"this setting ended the server before, so it is not tried again: {self._deadly[params]}")
        server = self._running(trace)
        self._drain(server)
        if params != self._in_force:
            self._switch(server, params)
        outcome = self._valid_outcome(server, params, trace)
        if self.options.url is not None:
            return live_replay(params, trace, outcome, None)
        time.sleep(_LOG_FLUSH_S)
        return live_replay(params, trace, outcome, self._steps.read_new())

    @contextlib.contextmanager
    def cold(self, config: Path) -> Iterator[Callable[[PolicyParams, Trace], Replay]]:
        """A fresh server started with exactly the export `config`, nothing live about it; ends the study's server.

        Yields a function that replays a trace there; the settings given to it are the label of the record.
        """
        self._stop()
        log = self._new_log("cold")
        self.say("starting a server with the exported file, to compare hot with cold")
        with start_server(
            self.options.model,
            log=log,
            config=config,
            flags=self.options.flags,
            environment=self.options.environment,
            wrapper=self.options.wrapper,
            timeout_s=self.options.start_timeout_s,
        ) as server:
            warm = [False]

            def replay_cold(params: PolicyParams, trace: Trace) -> Replay:
                if not warm[0]:
                    self._warm_up(server, trace)
                    warm[0] = True
                self._drain(server)
                return live_replay(params, trace, self._valid_outcome(server, params, trace), None)

            yield replay_cold

    # --- the server ---

    def _running(self, trace: Trace) -> Server:
        if self._server is not None and (died := self._server.ended()) is not None:
            self.say(f"the server ended between trials ({died.splitlines()[0]}); starting another")
            self._stop()
        if self._server is None:
            try:
                self._server = self._start() if self.options.url is None else self._join(self.options.url)
            except PpasError as error:
                error.stops_study = True  # it would not start for the next setting either
                raise
            self._warm_up(self._server, trace)
        return self._server

    def _join(self, url: str) -> Server:
        self.say(f"joining the server at {url}; its settings are changed through {self._settings_file}")
        server = existing_server(url)
        self._remember_facts(server)
        return server

    def _start(self) -> Server:
        self.starts += 1
        log = self._new_log("server")
        self.say(f"starting vLLM with {self.options.model} (log: {log})")
        self._steps = _StepTail(log.with_suffix(".steps.csv"))
        budget, max_num_seqs = str(self.budget), str(self.max_num_seqs)
        server = start_server(
            self.options.model,
            log=log,
            flags=(
                *self.options.flags,
                *("--max-num-batched-tokens", budget, "--max-num-seqs", max_num_seqs),
                *("--scheduler-cls", SCHEDULER_CLASS),
            ),
            environment={
                **self.options.environment,
                # A static budget to begin with; every trial brings its own settings through the file.
                "PPAS_ENABLED": "1",
                "PPAS_B_CAP": budget,
                "PPAS_SCOPE": "global",
                "PPAS_SETTINGS_FILE": str(self._settings_file.resolve()),
                "PPAS_STEP_LOG": str(self._steps.path.resolve()),
                "PPAS_STEP_LOG_MAX_BYTES": str(_STEP_LOG_BYTES),
            },
            wrapper=self.options.wrapper,
            needs_ppas=True,
            timeout_s=self.options.start_timeout_s,
            waiting=self._say_waiting,
        )
        self._remember_facts(server)
        return server

    def _say_waiting(self, waited_s: float, line: str) -> None:
        if int(waited_s) % _SAY_EVERY_S == 0:
            self.say(f"waiting for vLLM, {waited_s:.0f} s: {line[-100:]}")

    def _remember_facts(self, server: Server) -> None:
        """Keeps what the first server said, and refuses to go on with another version or model than that."""
        facts = {**server.facts.to_dict(), "start_s": server.start_s}
        before = _read_json(self._facts_file)
        if before is None:
            write_atomically(self._facts_file, dump_json(facts, indent=1).encode())
            return
        for key in ("vllm_version", "model"):
            if before.get(key) != facts.get(key):
                server.stop()
                raise InvalidInput(
                    f"the server's {key} is {facts.get(key)!r}, but this study was begun on {before.get(key)!r}; "
                    "start a new study, or restore the former one"
                )

    def _stop(self) -> None:
        server, self._server, self._in_force = self._server, None, None
        if server is not None:
            server.stop()

    def _warm_up(self, server: Server, trace: Trace) -> None:
        """Two requests of the trace's shapes, with other tokens, so that no trial pays for what is done once."""
        first = TraceRequest(0.0, trace.requests[0].prompt_tokens, 2)
        last = TraceRequest(0.0, trace.requests[-1].prompt_tokens, 2)
        self._replay_once(server, Trace(name="warm-up", requests=(first, last)), purpose=WARM_UP)

    def _drain(self, server: Server) -> None:
        """Waits until no request is running or waiting; a server that does not drain is replaced."""
        deadline = time.monotonic() + _DRAIN_TIMEOUT_S
        while True:
            left = _requests_left(server.url)
            if left == 0:
                return
            if left is None or time.monotonic() > deadline:
                state = "does not answer" if left is None else f"still has {left} requests"
                self._stop()
                raise NoResult(f"the server {state} after {_DRAIN_TIMEOUT_S:g} s between replays; it was ended")
            time.sleep(0.02)

    def _switch(self, server: Server, params: PolicyParams) -> None:
        started = time.perf_counter()
        version = write_settings(self._settings_file, params)
        self._probe(server)
        ack = wait_for_ack(self._settings_file, version, timeout_s=_ACK_TIMEOUT_S)
        if ack["status"] != "applied":
            raise NoResult(f"the engine refused the settings: {ack['reason']}")
        self._in_force = params
        self._drain(server)
        time.sleep(_LOG_FLUSH_S)
        self._steps.read_new()  # the probe's steps are nobody's
        self.switch_s.append(time.perf_counter() - started)

    def _probe(self, server: Server) -> None:
        probe = Trace(name="probe", requests=(TraceRequest(0.0, 4, 1),))
        outcome = self._replay_once(server, probe, purpose=WARM_UP)
        if outcome.records.failures():
            raise NoResult(f"the server did not answer a request of 4 tokens: {outcome.first_failure()}")

    def _valid_outcome(self, server: Server, params: PolicyParams, trace: Trace) -> ReplayOutcome:
        """A replay whose client was on time. Records the setting as deadly when the server dies under it."""
        reason = ""
        for attempt in range(1, _ATTEMPTS + 1):
            outcome = self._replay_once(server, trace)
            if (died := server.ended()) is not None:
                self._deadly[params] = died.splitlines()[0]
                self._stop()
                raise NoResult(f"the server died: {died}")
            if outcome.valid:
                return outcome
            reason = outcome.reason or "no reason was given"
            self.say(f"replay of {trace.name} is invalid ({reason}); attempt {attempt} of {_ATTEMPTS}")
            self._drain(server)
        raise NoResult(f"trace {trace.name!r} could not be measured in {_ATTEMPTS} attempts: {reason}")

    def _replay_once(self, server: Server, trace: Trace, **options: Any) -> ReplayOutcome:
        return replay_trace(
            server.url,
            trace,
            model=server.facts.model or self.options.model,
            cache_salt=uuid.uuid4().hex,
            timeout_s=self.options.request_timeout_s,
            vocabulary=self._vocabulary,
            max_lag_s=self.options.max_send_lag_s,
            stop=server.ended,
            **options,
        )

    @property
    def _settings_file(self) -> Path:
        return self.options.settings_file or self._in_folder("settings.json")

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
            raise AssertionError("a live evaluator replays within its session only")
        return self._folder / name


def live_replay(params: PolicyParams, trace: Trace, outcome: ReplayOutcome, steps: pd.DataFrame | None) -> Replay:
    """The record of one replay; `steps` are the engine's steps during it, None where they are not known."""
    branches = {} if steps is None or steps.empty else steps["branch"].value_counts().to_dict()
    return Replay(
        params=params,
        trace_name=trace.name,
        trace_digest=trace.digest,
        regime=trace.regime,
        origin=Origin.LIVE,
        requests=outcome.records,
        branch_steps={str(branch): int(count) for branch, count in branches.items()},
        steps=steps,
    )


class _StepTail:
    """Reads a growing step log piece by piece: each row once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._columns: list[str] = []

    def read_new(self) -> pd.DataFrame:
        """Complete rows since the last call; empty where there is none."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return pd.DataFrame()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        lines = complete.decode("ascii").splitlines()
        if lines and not self._columns:
            self._columns = lines.pop(0).split(",")
        frame = pd.DataFrame([line.split(",") for line in lines], columns=self._columns or None)
        for column in frame.columns:
            if column not in ("scope", "branch"):
                frame[column] = pd.to_numeric(frame[column])
        return frame


def _requests_left(url: str) -> int | None:
    """Requests that run or wait; None where the server does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:  # noqa: S310 - our own server's address
            text = reply.read().decode(errors="replace")
    except (OSError, ValueError):
        return None
    return int(sum(float(count) for count in _WAITING_REQUESTS.findall(text)))


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        data = load_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InvalidInput(f"{path}: is damaged: {error}; name another folder with --run") from None
    if not isinstance(data, dict):
        raise InvalidInput(f"{path}: is damaged: it is no JSON object; name another folder with --run")
    return data
