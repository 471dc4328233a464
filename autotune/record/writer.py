"""The recorder's other process: understands what the proxy passed, writes lengths and hashes, makes the trace at the end.

Started by `autotune.record.run`, so that neither reading JSON nor hashing delays a request. Its standard input closes
when the proxy is done or gone; either way it finishes the file. What it prints at the end is one line of JSON.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import urlsplit

from autotune.record import hashes, journal
from autotune.record.exchange import Exchange, Finding, read_exchange
from autotune.record.requests import CHAT, COMPLETIONS
from autotune.replay import frames
from ppas_core.errors import NoResult, PpasError
from traces.format import write_trace

JOB: Final = "job"
EXCHANGE: Final = "exchange"
FINISH: Final = "finish"
GONE: Final = "the proxy was ended from outside"

_TOKENIZE_TIMEOUT_S: Final = 30.0
_TOKENIZE_TRIES: Final = 3
_TOKENIZE_KEYS: Final = (
    "model", "prompt", "messages", "tools", "add_special_tokens", "add_generation_prompt", "continue_final_message",
    "chat_template", "chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs",
)  # fmt: skip


class Writer:
    """Writes one recording. job: see `run._job`."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._salt = bytes.fromhex(job["salt"])
        self._journal_path = Path(job["journal"])
        self._journal = _private(self._journal_path)
        self._texts = _private(Path(job["texts"])) if job["texts"] else None
        self._tries = _TOKENIZE_TRIES if job["tokenize"] else 0
        _line(
            self._journal,
            {
                "format": journal.FORMAT,
                "version": journal.VERSION,
                "block_size": job["block_size"],
                "started_ns": job["started_ns"],
            },
        )

    def take(self, header: dict[str, Any], payload: bytes) -> None:
        """Writes the line of one exchange."""
        split = header["body_bytes"]
        found = read_exchange(
            Exchange(
                header["at_ns"],
                header["endpoint"],
                header["status"],
                header["ended"],
                payload[:split],
                payload[split:],
            )
        )
        if isinstance(found, str):
            _line(self._journal, {"left_out": found})
            return
        row = {"at_ns": header["at_ns"], "prompt_tokens": found.prompt_tokens, "output_tokens": found.output_tokens}
        _line(self._journal, {**row, "model": found.model, **self._prompt(found, header)})
        if self._texts is not None:
            kept = ("prompt", "messages", "input", "system", "instructions", "tools")
            _line(self._texts, {**row, **{name: found.request[name] for name in kept if name in found.request}})

    def leave_out(self, reason: str, count: int) -> None:
        """Writes that `count` requests could not be recorded."""
        for _ in range(count):
            _line(self._journal, {"left_out": reason})

    def finish(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Makes the trace file, removes the journal and says what was recorded. Raises PpasError and OSError."""
        self._journal.close()
        if self._texts is not None:
            self._texts.close()
        output = Path(self._job["output"])
        try:
            made = journal.assemble(
                self._journal_path,
                name=self._job["name"],
                regime=self._job["regime"],
                facts={"salt": self._job["salt_kept"], **facts},
            )
        except NoResult:
            self._journal_path.unlink()  # nothing in it is worth a recovery
            raise
        write_trace(made.trace, output)
        self._journal_path.unlink()
        return {
            **made.ledger.provenance(),
            "recording": made.trace.provenance["recording"],
            "digest": made.trace.digest,
            "duration_s": made.trace.duration_s,
        }

    def _prompt(self, found: Finding, header: dict[str, Any]) -> dict[str, Any]:
        """What the journal says about the prompt."""
        ids, by = found.ids, journal.BY_IDS
        if ids is None and found.text is not None and self._tries and not header["behind"]:
            ids, by = self._tokenize(header["endpoint"], found, header["authorization"]), journal.BY_TOKENIZE
        if ids is not None and len(ids) == found.prompt_tokens:
            try:
                return {
                    "by": by,
                    "blocks": hashes.block_hashes(ids, self._job["block_size"], self._salt, found.scope),
                }
            except ValueError:
                pass  # the server understood it otherwise than as ids
        if found.text:
            chunks = hashes.chunk_hashes(found.text, self._salt, found.scope)
            return {"by": journal.BY_TEXT, "bytes": len(found.text), "chunks": chunks}
        return {"by": journal.BY_NOTHING}

    def _tokenize(self, endpoint: str, found: Finding, authorization: str) -> list[int] | None:
        """The ids of a text as the server makes them; None when it does not tell, and for good after three failures."""
        if endpoint not in (COMPLETIONS, CHAT):
            return None
        body = {name: found.request[name] for name in _TOKENIZE_KEYS if name in found.request}
        url = urlsplit(self._job["upstream"])
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.hostname or "", url.port, timeout=_TOKENIZE_TIMEOUT_S)
        headers = {"Content-Type": "application/json", **({"Authorization": authorization} if authorization else {})}
        try:
            connection.request("POST", f"{url.path}/tokenize", json.dumps(body).encode(), headers)
            reply = connection.getresponse()
            data = json.loads(reply.read()) if reply.status == 200 else None
        except (OSError, http.client.HTTPException, ValueError):
            data = None
        finally:
            connection.close()
        ids = data.get("tokens") if isinstance(data, dict) else None
        if not isinstance(ids, list):
            self._tries -= 1
            return None
        self._tries = _TOKENIZE_TRIES
        return ids


def _private(path: Path) -> IO[bytes]:
    """A new file that its owner alone can read, written without a buffer: what was written outlives a kill."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0)


def _line(file: IO[bytes], data: dict[str, Any]) -> None:
    """Writes one line whole; raises OSError where the disk is full."""
    rest = memoryview(json.dumps(data, separators=(",", ":")).encode() + b"\n")
    while rest:
        rest = rest[file.write(rest) :]


def _frames(source: int) -> Iterator[frames.Frame]:
    decoder = frames.Decoder()
    while data := os.read(source, 1 << 20):
        yield from decoder.feed(data)


def main() -> int:
    """Runs until standard input ends."""
    arriving = _frames(sys.stdin.fileno())
    _, job, _ = next(arriving)
    facts: dict[str, Any] = {"ended": GONE}
    try:
        writer = Writer(job)
        print(json.dumps({"ready": True}), flush=True)
        for kind, header, payload in arriving:
            if kind == EXCHANGE:
                writer.take(header, payload)
            else:
                facts = header["facts"]
                for reason, count in header["left_out"].items():
                    writer.leave_out(reason, count)
        result = writer.finish(facts)
    except (PpasError, OSError) as error:
        result = {"error": str(error)}
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
