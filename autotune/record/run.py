"""Records the traffic of a running server into a trace: starts the proxy here and the writer beside it, ends both.

The first interrupt (Ctrl-C, SIGTERM) or the end of the time closes the door and lets open requests finish; a second one
cuts them. Whatever way this process ends, the writer finishes the file from what was passed to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from autotune.record import writer
from autotune.record.hashes import kept_salt, new_salt
from autotune.record.proxy import Proxy
from autotune.record.recovery import plain_name
from autotune.replay import frames
from autotune.replay.run import base_url
from ppas_core.errors import InvalidInput, NoResult
from ppas_core.plain_json import require_text

DEFAULT_BLOCK_SIZE: Final = 16
"""vLLM's own on GPUs."""
PRIORITY: Final = -10
"""Of the proxy, as of `nice`; only a privileged user gets it. A proxy that waits for a core delays whom it watches."""
_TICK_S: Final = 0.2
_PIPE_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class RecordPlan:
    """What to record.

    upstream: address of the server. host, port: where the proxy listens; port 0 takes a free one.
    output: the trace file; `.part` is added for the journal that is written meanwhile.
    for_s: seconds after which the recording ends by itself; None: when it is interrupted.
    block_size: prompt tokens per block hash. name, regime: of the trace; the file's name by default.
    keep_text: also write prompts, to `output` with `.text.jsonl` added, readable by the owner alone.
    salt_file: keep the salt there, or take it from there; None: random, and forgotten.
    tokenize: ask the server's /tokenize, after each answer, for the ids of prompts that came as text.
    untouched: change no request.
    """

    upstream: str
    output: Path
    host: str = "127.0.0.1"
    port: int = 8001
    for_s: float | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    name: str | None = None
    regime: str = "all"
    keep_text: bool = False
    salt_file: Path | None = None
    tokenize: bool = False
    untouched: bool = False

    def __post_init__(self) -> None:
        for what, value in (("name", self.name or ""), ("regime", self.regime)):
            require_text(value, f"the trace's {what}")
        if not 0 <= self.port < 2**16:
            raise InvalidInput(f"port is {self.port}; allowed: 0 to 65535, 0 takes a free one")
        if self.block_size < 1:
            raise InvalidInput(f"block size is {self.block_size}; allowed: at least 1 prompt token")
        if self.for_s is not None and not 0 < self.for_s < float("inf"):
            raise InvalidInput(f"the time to record is {self.for_s} s; allowed: above 0")

    @property
    def journal(self) -> Path:
        """What is written while the recording lasts."""
        return self.output.with_name(self.output.name + ".part")

    @property
    def texts(self) -> Path:
        """Where prompts go when they are kept."""
        return self.output.with_name(self.output.name + ".text.jsonl")


@dataclass(frozen=True, slots=True)
class Status:
    """How a recording goes, a few times a second. stage: "recording", "waiting" for open requests, or "writing"."""

    stage: str
    url: str
    elapsed_s: float
    requests: int
    failed: int
    open: int


Watch = Callable[[Status], None]


def record(
    plan: RecordPlan,
    watch: Watch = lambda status: None,
    *,
    overwrite: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Records until the time is over or an interrupt comes; the account of the trace written, as plain JSON values.

    overwrite: replace an existing trace file. stop: asked a few times a second, ends the recording as an interrupt does;
    off the main thread, where interrupts do not come, it is the only way beside the time.

    Raises InvalidInput for a file that exists, an address that is none or a port that is taken, and NoResult when no
    request was recorded or the file could not be written.
    """
    upstream = base_url(plan.upstream)
    for file in (plan.output, *([plan.texts] if plan.keep_text else [])):
        if file.exists() and not (overwrite and file.is_file()):
            raise InvalidInput(f"{file} exists; name another file, or overwrite a file with --force")
    if plan.journal.exists():
        raise InvalidInput(
            f"{plan.journal} is left of a recording that was ended from outside, or one is running; make its trace "
            f"with --recover {plan.journal}, or delete it"
        )
    plan.output.parent.mkdir(parents=True, exist_ok=True)
    salt = new_salt() if plan.salt_file is None else kept_salt(plan.salt_file)
    return asyncio.run(_Recording(plan, upstream, salt, watch, stop).run())


class _Recording:
    def __init__(self, plan: RecordPlan, upstream: str, salt: bytes, watch: Watch, stop: Callable[[], bool]) -> None:
        self._plan = plan
        self._upstream = upstream
        self._salt = salt
        self._watch = watch
        self._stop = stop
        self._interrupts = 0
        self._wake = asyncio.Event()
        self._writer_ended = False
        self._began_s = time.monotonic()
        self._url = ""

    async def run(self) -> dict[str, Any]:
        with tempfile.TemporaryFile() as errors, _signals(self._interrupted), contextlib.ExitStack() as undo:
            process = await _start_writer(errors)
            undo.callback(_take_precedence())
            stdin, stdout = process.stdin, process.stdout
            if stdin is None or stdout is None:
                raise NoResult("the writer has no pipes")
            proxy = Proxy(
                self._upstream,
                lambda header, payload: stdin.write(frames.encode(writer.EXCHANGE, header, payload)),
                stdin.transport.get_write_buffer_size,
                untouched=self._plan.untouched,
            )
            try:
                stdin.write(frames.encode(writer.JOB, self._job(time.time_ns())))
                self._result(await stdout.readline(), errors)
                reading = asyncio.create_task(stdout.readline())
                reading.add_done_callback(self._writer_is_done)
                await self._listen(proxy)
                await self._until_the_end(proxy)
                self._tell("writing", proxy)
                with contextlib.suppress(ConnectionError):
                    stdin.write(frames.encode(writer.FINISH, self._facts(proxy)))
                    stdin.close()
                return self._result(await reading, errors)
            finally:
                await proxy.close()
                stdin.close()
                await process.wait()

    async def _listen(self, proxy: Proxy) -> None:
        host, port = self._plan.host, self._plan.port
        try:
            await proxy.start(host, port)
        except OSError as error:
            self._plan.journal.unlink(missing_ok=True)
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise InvalidInput(f"cannot listen on {host}:{port}: {reason}; choose another --port or --host") from None
        self._began_s = time.monotonic()
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{proxy.port}"

    async def _until_the_end(self, proxy: Proxy) -> None:
        end_s = float("inf") if self._plan.for_s is None else self._began_s + self._plan.for_s
        while not (self._interrupts or self._writer_ended or self._stop()) and (left_s := end_s - time.monotonic()) > 0:
            self._tell("recording", proxy)
            await self._pause(min(_TICK_S, left_s))
        before = self._interrupts
        await proxy.stop_listening()
        while proxy.counts.open and self._interrupts == before:
            self._tell("waiting", proxy)
            await self._pause(_TICK_S)
        await proxy.close()

    async def _pause(self, seconds: float) -> None:
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)

    def _interrupted(self) -> None:
        self._interrupts += 1
        self._wake.set()

    def _writer_is_done(self, _reading: object) -> None:
        self._writer_ended = True
        self._wake.set()

    def _tell(self, stage: str, proxy: Proxy) -> None:
        counts = proxy.counts
        elapsed_s = time.monotonic() - self._began_s
        self._watch(Status(stage, self._url, elapsed_s, counts.recordable, counts.failed, counts.open))

    def _job(self, started_ns: int) -> dict[str, Any]:
        plan = self._plan
        return {
            "upstream": self._upstream,
            "salt": self._salt.hex(),
            "salt_kept": "random, not kept" if plan.salt_file is None else "kept by the one who recorded",
            "journal": str(plan.journal),
            "output": str(plan.output),
            "texts": str(plan.texts) if plan.keep_text else None,
            "block_size": plan.block_size,
            "started_ns": started_ns,
            "name": plan.name or plain_name(plan.output),
            "regime": plan.regime,
            "tokenize": plan.tokenize,
        }

    def _facts(self, proxy: Proxy) -> dict[str, Any]:
        counts = proxy.counts
        facts = {
            "ended": "as asked",
            "recorded_s": round(time.monotonic() - self._began_s, 3),
            "other_requests_passed": counts.other,
            "late_share": round(counts.late_beats / counts.beats, 6) if counts.beats else 0.0,
            "latest_s": round(counts.latest_s, 6),
        }
        return {"facts": facts, "left_out": dict(counts.left_out)}

    def _result(self, line: bytes, errors: IO[bytes]) -> dict[str, Any]:
        """What the writer said. Raises NoResult when that is an error, or when it died."""
        if not line:
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - 2000))
            said = errors.read().decode(errors="replace").strip()
            raise NoResult(f"the recorder's writer broke; {self._left_over()}It said: {said or 'nothing'}")
        result: dict[str, Any] = json.loads(line)
        if "error" in result:
            raise NoResult(f"{result['error']}. {self._left_over()}".rstrip(". ") + ".")
        return result

    def _left_over(self) -> str:
        journal = self._plan.journal
        return f"What was recorded so far is in {journal}: --recover makes a trace of it. " if journal.exists() else ""


async def _start_writer(errors: IO[bytes]) -> asyncio.subprocess.Process:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "autotune.record.writer",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=errors,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C is for the proxy, which tells the writer
        limit=2**24,
    )  # fmt: skip
    pipe = process.stdin.get_extra_info("pipe") if process.stdin is not None else None
    if pipe is not None and hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):  # not allowed everywhere; the loop then wakes more often
            fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return process


def _take_precedence() -> Callable[[], None]:
    """Lets this thread run before others where the user is privileged, and open all files allowed; what undoes it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, min(before, PRIORITY))

    def undo() -> None:
        with contextlib.suppress(OSError, ValueError):
            os.setpriority(os.PRIO_PROCESS, 0, before)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    return undo


@contextlib.contextmanager
def _signals(call: Callable[[], None]) -> Iterator[None]:
    """Calls `call` for SIGINT and SIGTERM, which then end nothing by themselves."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            loop.add_signal_handler(number, call)
    except (ValueError, RuntimeError):
        yield  # not the main thread: whoever runs this there ends it by the time
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
