"""One finished replay as a file, for a study that goes on after it was killed: what is read back is what was measured.

Parquet with the columns of `autotune.replay.records_file.records_columns`, the rest in the metadata; the engine's steps
lie beside it, as `NAME.steps.parquet`.
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from autotune.records import ClientLag, Origin, Replay
from autotune.replay.records_file import records_columns, records_of
from ppas_core.files import write_atomically
from ppas_core.plain_json import dump_json
from ppas_core.policy import PolicyParams
from traces.format import Trace

FORMAT: Final = "ppas-replay/1"
_KEY: Final = b"ppas"


def keep_replay(replay: Replay, path: Path) -> None:
    """Writes `replay` to `path`, whole or not at all. Raises OSError, for instance on a full disk."""
    import pyarrow as pa

    if replay.steps is not None:
        _write(pa.Table.from_pandas(replay.steps, preserve_index=False), _steps_file(path))
    header = {
        "format": FORMAT,
        "params": replay.params.to_dict(),
        "trace_digest": replay.trace_digest,
        "origin": str(replay.origin),
        "branch_steps": dict(replay.branch_steps),
        "client": None if replay.client is None else asdict(replay.client),
        "ack": replay.ack,
        "has_steps": replay.steps is not None,
    }
    table = pa.table(records_columns(replay.requests))
    _write(table.replace_schema_metadata({_KEY: dump_json(header).encode()}), path)


def read_replay(path: Path, params: PolicyParams, trace: Trace) -> Replay | None:
    """The replay of `trace` under `params` that `path` holds; None where there is none, or it cannot be read."""
    import pandas as pd
    from pyarrow import parquet

    try:
        if not path.exists():
            return None
        table = parquet.read_table(path)
        header: dict[str, Any] = json.loads(table.schema.metadata[_KEY])
        wanted = (FORMAT, params.to_dict(), trace.digest)
        if (header["format"], header["params"], header["trace_digest"]) != wanted:
            return None
        return Replay(
            params=params,
            trace_name=trace.name,
            trace_digest=trace.digest,
            regime=trace.regime,
            origin=Origin(header["origin"]),
            requests=records_of(table),
            branch_steps=header["branch_steps"],
            steps=pd.read_parquet(_steps_file(path)) if header["has_steps"] else None,
            client=None if header["client"] is None else ClientLag(**header["client"]),
            ack=header["ack"],
        )
    except (OSError, KeyError, TypeError, ValueError):  # pyarrow's own errors are among them
        return None


def _steps_file(path: Path) -> Path:
    return path.with_suffix(".steps.parquet")


def _write(table: Any, path: Path) -> None:
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(table, buffer, compression="zstd")
    write_atomically(path, buffer.getvalue())
