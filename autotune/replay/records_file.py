"""The records of one live replay as a file: Parquet, one row per request, everything else in its metadata.

Columns: index, planned_s, sent_s, first_token_s, last_token_s, done_s, prompt_tokens, output_tokens, cached_tokens,
status, detail, chunk_time_s and chunk_tokens (lists). The schema's metadata holds, under `ppas`, a JSON object with
format, version, valid, reason, lag, counted and about.
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from autotune.records import RequestRecords
from autotune.replay.outcome import LagSummary, ReplayOutcome
from ppas_core.errors import InvalidInput, NoResult
from ppas_core.files import write_atomically
from ppas_core.versions import require_version

FORMAT: Final = "ppas-requests"
VERSION: Final = 1

_KEY: Final = b"ppas"
_TIMES: Final = ("planned_s", "sent_s", "first_token_s", "last_token_s", "done_s")


def write_records(outcome: ReplayOutcome, path: Path) -> None:
    """Writes `outcome` to `path`, whole or not at all.

    Raises NoResult when it cannot be written, for instance on a full disk. `outcome` and a former file stay as they
    are, so that the same call may follow once there is room.
    """
    import pyarrow as pa
    from pyarrow import parquet

    records = outcome.records
    columns = records_columns(records)
    columns |= {"cached_tokens": outcome.cached_tokens, "detail": pa.array(outcome.details, pa.string())}
    header = {
        "format": FORMAT,
        "version": VERSION,
        "valid": outcome.valid,
        "reason": outcome.reason,
        "lag": asdict(outcome.lag),
        "counted": outcome.counted,
        "about": dict(outcome.about),
    }
    table = pa.table(columns).replace_schema_metadata({_KEY: json.dumps(header).encode()})
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, compression="zstd")
    try:
        write_atomically(path, buffer.getvalue())
    except OSError as error:
        raise NoResult(
            f"{path}: the records of {len(records)} requests ({buffer.tell()} bytes) cannot be written: "
            f"{error.strerror or error}; make room, or name another place"
        ) from None


def read_records(path: Path) -> ReplayOutcome:
    """What `write_records` wrote. Raises InvalidInput when `path` is not such a file."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
        header = json.loads((table.schema.metadata or {})[_KEY])
    except FileNotFoundError:
        raise InvalidInput(f"{path}: there is no such file") from None
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise InvalidInput(f"{path}: is not a records file of a replay: {error}") from None
    if header.get("format") != FORMAT:
        raise InvalidInput(
            f"{path}: holds {header.get('format')!r}; allowed: {FORMAT!r}, as `ppas replay -o` writes it"
        )
    require_version(f"{path}: {FORMAT}", header.get("version"), VERSION, again="replay the trace again")
    column = {name: table.column(name).combine_chunks() for name in ("cached_tokens", "detail")}
    return ReplayOutcome(
        records_of(table),
        LagSummary(**header["lag"]),
        header["valid"],
        header["reason"],
        column["cached_tokens"].to_numpy(),
        tuple(column["detail"].to_pylist()),
        header["counted"],
        header["about"],
    )


def records_columns(records: RequestRecords) -> dict[str, Any]:
    """The columns of `records`, by name, for a pyarrow table; nothing of them is lost."""
    import pyarrow as pa

    offsets = pa.array(records.chunk_offsets, pa.int32())
    return {
        "index": np.arange(len(records)),
        **{name: getattr(records, name) for name in (*_TIMES, "prompt_tokens", "output_tokens")},
        "status": pa.array(records.status, pa.string()),
        "chunk_time_s": pa.ListArray.from_arrays(offsets, pa.array(records.chunk_time_s, pa.float64())),
        "chunk_tokens": pa.ListArray.from_arrays(offsets, pa.array(records.chunk_tokens, pa.int64())),
        **({} if records.cached_tokens is None else {"cached_tokens": records.cached_tokens}),
    }


def records_of(table: Any) -> RequestRecords:
    """The records in a pyarrow table with the columns of `records_columns`."""
    column = {name: table.column(name).combine_chunks() for name in table.column_names}
    return RequestRecords(
        **{name: column[name].to_numpy() for name in (*_TIMES, "prompt_tokens", "output_tokens")},
        status=tuple(column["status"].to_pylist()),
        chunk_time_s=column["chunk_time_s"].flatten().to_numpy(),
        chunk_tokens=column["chunk_tokens"].flatten().to_numpy(),
        chunk_offsets=column["chunk_time_s"].offsets.to_numpy().astype(np.int64),
        cached_tokens=column["cached_tokens"].to_numpy() if "cached_tokens" in column else None,
    )
