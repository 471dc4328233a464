"""What the recording proxy adds to a request, and how well a recording equals the traffic that made it.

`python benchmarks/record_proxy.py [--json]`, from the project's root. Direct requests and requests through the proxy take
turns, one by one, in the same run, so that both see the same machine; then several clients at a time do the same. At last
a trace is replayed through the proxy and its recording compared with it. Server, proxy and clients are processes of
their own; they and whatever else runs share the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from autotune.replay.run import replay
from traces.format import Trace, TraceRequest, read_trace

ROOT = Path(__file__).parents[1]
BAR_MEDIAN_S, BAR_ARRIVAL_S = 0.001, 0.005
PAIRS = 300
CLIENTS, PAUSE_S = 32, 0.2
RATE_PER_S, REQUESTS = 50, 500


@contextmanager
def process(*command: str) -> Iterator[str]:
    """The address of a server that prints its port."""
    server = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.kill()
        server.wait()


async def serve() -> None:
    """Answers every request on a connection, as fast as it can, with 16 events and lengths where they are asked for."""
    event = b'data: {"choices":[{"index":0,"text":"x","token_ids":[5]}]}\n\n'
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":1000,"completion_tokens":16}}\n\n'
    done = b"data: [DONE]\n\n"

    def chunk(data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data)

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                found = re.search(rb"content-length: *(\d+)", head)
                body = await reader.readexactly(int(found[1]) if found else 0)
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
                )
                for _ in range(16):
                    writer.write(chunk(event))
                asked = b'"include_usage"' in body[:200] or b'"include_usage"' in body[-200:]
                writer.write((chunk(usage) if asked else b"") + chunk(done) + b"0\r\n\r\n")

    server = await asyncio.start_server(connection, "127.0.0.1", 0, limit=2**22)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def recording(upstream: str, output: Path) -> Iterator[str]:
    """The address of a proxy, as a user starts it; its trace is in `output` afterwards."""
    command = [sys.executable, "-m", "autotune.entry", "trace", "record", "--to", upstream, "--port", "0", "--json"]
    proxy = subprocess.Popen(
        [*command, "-o", str(output)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert proxy.stderr is not None
    found = re.search(r"recording (\S+) -> ", proxy.stderr.readline())
    assert found
    try:
        yield found[1]
    finally:
        proxy.send_signal(signal.SIGINT)
        assert proxy.wait(timeout=60) == 0


class Client:
    """One connection that is kept, as HTTP clients keep theirs."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: bytes) -> tuple[float, float]:
        """Seconds to the first event of the answer and to its end."""
        start_s = time.perf_counter()
        self.socket.sendall(request)
        answer, first_s = b"", 0.0
        while not answer.endswith(b"0\r\n\r\n"):
            answer += self.socket.recv(1 << 16)
            if not first_s and b"data:" in answer:
                first_s = time.perf_counter() - start_s
        assert answer.count(b"data:") in (17, 18), answer
        return first_s, time.perf_counter() - start_s


def message(prompt_tokens: int, usage: bool) -> bytes:
    request: dict[str, Any] = {
        "model": "tiny", "prompt": [100 + n % 800 for n in range(prompt_tokens)], "max_tokens": 16, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    if usage:
        request["stream_options"] = {"include_usage": True}
    body = json.dumps(request).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


def pairs(
    direct: str, proxied: str, count: int, prompt_tokens: int, usage: bool, clients: int = 1, pause_s: float = 0.0
) -> dict[str, float]:
    """Both ways in turns by each of `clients` threads, with pauses around `pause_s`; what the proxy adds."""
    request = message(prompt_tokens, usage)
    found: list[tuple[tuple[float, float], tuple[float, float]]] = []

    def client(number: int) -> None:
        rng = np.random.default_rng(number)
        straight, through = Client(direct), Client(proxied)
        for _ in range(count // clients):
            time.sleep(rng.uniform(0, 2 * pause_s))
            one = straight.ask(request)
            time.sleep(rng.uniform(0, 2 * pause_s))
            found.append((one, through.ask(request)))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times = np.array(found)
    added = times[:, 1] - times[:, 0]
    return {
        "pairs": len(found),
        "direct_first_s": float(np.median(times[:, 0, 0])),
        "direct_end_s": float(np.median(times[:, 0, 1])),
        "added_first_s": float(np.median(times[:, 1, 0]) - np.median(times[:, 0, 0])),
        "added_end_s": float(np.median(times[:, 1, 1]) - np.median(times[:, 0, 1])),
        "added_first_p99_s": float(np.quantile(added[:, 0], 0.99)),
        "ratio_end": float(np.median(times[:, 1, 1]) / np.median(times[:, 0, 1])),
    }


def capacity(url: str) -> float:
    """Requests per second that one proxy passes at most, with four connections that never pause."""
    request, count = message(1000, False), 300

    def client() -> None:
        through = Client(url)
        for _ in range(count):
            through.ask(request)

    threads = [threading.Thread(target=client) for _ in range(4)]
    start_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(threads) * count / (time.perf_counter() - start_s)


def fidelity(upstream: str, folder: Path) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(1 / RATE_PER_S, REQUESTS))
    requests = []
    for place, arrival_s in enumerate(arrivals):
        tokens = 64 + place % 100
        blocks = (place % 5, *range(20, 20 + (tokens - 1) // 16))
        requests.append(TraceRequest(float(arrival_s), tokens, 1 + place % 12, blocks))
    source = Trace("source", tuple(requests), block_size=16)
    output = folder / "replayed.jsonl"
    with recording(upstream, output) as url:
        outcome = replay(url, source, model="tiny", cache_salt="x", timeout_s=60.0)
    trace = read_trace(output)
    same = [(r.prompt_tokens, r.output_tokens) for r in trace.requests] == [
        (r.prompt_tokens, r.output_tokens) for r in source.requests
    ]
    found: dict[str, Any] = {"requests": len(trace.requests), "planned": REQUESTS, "same_lengths": same}
    recorded_s = np.array([request.arrival_s for request in trace.requests])
    for name, reference_s in (("source", arrivals), ("sent", outcome.records.sent_s)):
        late_s = recorded_s - (reference_s - reference_s[0])
        late_s = np.abs(late_s - np.median(late_s))
        for label, quantile in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
            found[f"arrival_{label}_s_to_{name}"] = float(np.quantile(late_s, quantile))
    return found


def measure() -> dict[str, Any]:
    found: dict[str, Any] = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    slow = str(ROOT / "tests" / "live" / "openai_server.py")
    with tempfile.TemporaryDirectory() as name, process(__file__, "--serve") as upstream, process(slow) as other:
        folder = Path(name)
        with recording(upstream, folder / "pairs.jsonl") as url:
            pairs(upstream, url, 40, 1000, False)
            found["short"] = pairs(upstream, url, PAIRS, 1000, False)
            found["short_usage"] = pairs(upstream, url, PAIRS, 1000, True)
            found["long"] = pairs(upstream, url, PAIRS // 3, 25_000, False)
            found["many"] = pairs(upstream, url, 4 * PAIRS, 1000, False, CLIENTS, PAUSE_S)
            found["capacity_per_s"] = capacity(url)
        found["fidelity"] = fidelity(other, folder)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
    found = measure()
    fine = found["fidelity"]
    reached = found["short"]["added_first_s"] < BAR_MEDIAN_S and fine["arrival_p99_s_to_source"] <= BAR_ARRIVAL_S
    reached = reached and fine["same_lengths"] and fine["requests"] == fine["planned"]
    if options.json:
        print(json.dumps(found))
        return 0 if reached else 1
    print(f"{found['cores']} cores, load {found['load']:.1f}; medians in ms; 16 output tokens sent without a pause")
    print(f"{'':44} {'direct':>8} {'added':>7} {'added':>9} {'added':>9} {'ratio':>6}")
    print(f"{'':44} {'1st byte':>8} {'1st':>7} {'1st P99':>9} {'end':>9} {'end':>6}")
    for key, label in (
        ("short", "1,000-token prompts, usage asked and filtered"),
        ("short_usage", "1,000-token prompts, usage asked by the user"),
        ("long", "25,000-token prompts"),
        ("many", f"1,000-token prompts, {CLIENTS} clients, {CLIENTS / PAUSE_S:.0f}/s"),
    ):
        row = found[key]
        values = (row["direct_first_s"], row["added_first_s"], row["added_first_p99_s"], row["added_end_s"])
        print(f"{label:44} " + " ".join(f"{1000 * value:8.2f}" for value in values) + f" {row['ratio_end']:6.2f}")
    print(f"at most {found['capacity_per_s']:,.0f} requests a second pass, on one core shared with their clients")
    print(
        f"replayed through the proxy: {fine['requests']} of {fine['planned']} requests, "
        f"lengths {'equal' if fine['same_lengths'] else 'DIFFER'}; arrivals off the source's by "
        f"{1000 * fine['arrival_p50_s_to_source']:.2f} ms P50, {1000 * fine['arrival_p99_s_to_source']:.2f} P99, "
        f"{1000 * fine['arrival_max_s_to_source']:.2f} max; off the client's sending by "
        f"{1000 * fine['arrival_p50_s_to_sent']:.2f}, {1000 * fine['arrival_p99_s_to_sent']:.2f}, "
        f"{1000 * fine['arrival_max_s_to_sent']:.2f}"
    )
    if not reached:
        print(
            "a bar was missed: 1 ms added at the median to the first byte, arrivals within 5 ms (P99)", file=sys.stderr
        )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
