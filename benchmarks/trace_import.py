"""How long a million-row Mooncake-format file takes to import, and how much memory that needs.

`python benchmarks/trace_import.py [--rows N] [--json]`, from the project's root. The file is written first, to a
temporary folder: shapes as in Mooncake's conversation trace (prompts around 12,000 tokens, so about 24 block ids a row,
nine in ten of them new; 3 s ticks). The import then runs as `ppas trace import` does, in a process of its own, with the
trace written as the last step. Exit code 1 above the bars: 60 s, 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
BAR_S = 60.0
BAR_BYTES = 2**30
BLOCK = 512
PER_TICK = 9
TICK_MS = 3000


def write_mooncake(path: Path, rows: int, seed: int = 0) -> None:
    """A file of `rows` requests, the same for a seed."""
    rng = random.Random(seed)
    next_id = 1000
    with path.open("w") as file:
        for row in range(rows):
            prompt = min(120_000, 1 + int(rng.lognormvariate(8.9, 1.0)))
            blocks = -(-prompt // BLOCK)
            shared = blocks // 10
            ids = list(range(shared)) + list(range(next_id, next_id + blocks - shared))
            next_id += blocks - shared
            line = {
                "timestamp": row // PER_TICK * TICK_MS,
                "input_length": prompt,
                "output_length": 1 + int(rng.expovariate(1 / 350)),
                "hash_ids": ids,
            }
            file.write(json.dumps(line) + "\n")


def import_once(source: Path, target: Path) -> dict[str, float]:
    """What the child process does: the import as the command line runs it."""
    sys.path.insert(0, str(ROOT))
    start_s = time.perf_counter()
    from traces.format import write_trace
    from traces.importers import import_trace

    imported = import_trace(source)
    read_s = time.perf_counter() - start_s
    write_trace(imported.trace, target)
    blocks = sum(len(request.block_hashes) for request in imported.trace.requests)
    return {
        "rows": imported.ledger.rows_read,
        "kept": imported.ledger.kept,
        "blocks": blocks,
        "read_s": read_s,
        "total_s": time.perf_counter() - start_s,
        "cpu_s": time.process_time(),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--child", nargs=2, metavar=("SOURCE", "TARGET"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(import_once(*map(Path, options.child))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "mooncake.jsonl", Path(folder) / "trace.jsonl"
        write_mooncake(source, options.rows)
        command = [sys.executable, __file__, "--child", str(source), str(target)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        found["file_bytes"] = source.stat().st_size
    if options.json:
        print(json.dumps(found))
    else:
        print(
            f"{found['rows']:,} rows, {found['file_bytes'] / 2**20:,.0f} MiB, {found['blocks']:,} block ids\n"
            f"read {found['read_s']:.1f} s, with writing {found['total_s']:.1f} s (bar {BAR_S:g} s), "
            f"{found['cpu_s']:.1f} s of one core\n"
            f"peak resident memory {found['peak_bytes'] / 2**20:,.0f} MiB (bar {BAR_BYTES / 2**20:,.0f} MiB)"
        )
    assert found["rows"] == found["kept"] == options.rows
    return 0 if found["total_s"] <= BAR_S and found["peak_bytes"] <= BAR_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
