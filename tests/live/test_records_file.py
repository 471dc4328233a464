"""The file of a live replay: whole, versioned, and harmless when the disk is full."""

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.replay.outcome import ReplayOutcome, make_outcome
from autotune.replay.records_file import read_records, write_records
from ppas_core.errors import InvalidInput

pytest.importorskip("pyarrow")

ROOT = Path(__file__).parents[2]
FROM_HERE = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]; "


def outcome(requests: int = 3) -> ReplayOutcome:
    """One complete request, one cut after its first token, the rest never sent."""
    from array import array

    from autotune.replay.answer import RawAnswer

    first = b'data: {"choices": [{"token_ids": [5]}]}\n\n'
    last = b'data: {"choices": [{"token_ids": [6, 7]}]}\n\n'
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    end = b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"usage": usage}).encode()
    pieces = [first, last, end]
    sizes = array("I", map(len, pieces))
    good = RawAnswer(0, 0.001, 0.5, 200, "ok", "", array("d", [0.1, 0.2, 0.5]), sizes, b"".join(pieces))
    cut = RawAnswer(1, 1.001, 1.5, 200, "cut_stream", "gone", array("d", [1.1]), array("I", [len(first)]), first)
    plan = [(float(index), 9, 3) for index in range(requests)]
    about = {"trace": "t", "cache_salt": None}
    return make_outcome(plan, {0: good, 1: cut}, np.array([0.001, 0.2]), stopped="enough", about=about)


def columns(of: ReplayOutcome) -> dict[str, Any]:
    return {name: getattr(of.records, name) for name in type(of.records).__dataclass_fields__ if name != "status"}


def test_what_was_written_is_read_back_to_the_last_bit(tmp_path: Path) -> None:
    written = outcome()
    assert written.records.status == ("ok", "cut_stream", "unsent")
    assert written.records.chunk_tokens.tolist() == [1, 2, 1]
    assert written.records.chunk_offsets.tolist() == [0, 2, 3, 3]
    write_records(written, tmp_path / "deep" / "requests.parquet")
    read = read_records(tmp_path / "deep" / "requests.parquet")
    for name, values in columns(written).items():
        np.testing.assert_array_equal(columns(read)[name], values, strict=True, err_msg=name)
    assert read.records.status == written.records.status
    assert (read.lag, read.valid, read.reason) == (written.lag, False, "stopped: enough")
    assert read.cached_tokens.tolist() == [4, -1, -1]
    assert (read.details, read.counted, read.about) == (written.details, True, written.about)


def test_another_file_or_another_version_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "requests.parquet"
    with pytest.raises(InvalidInput, match="no such file"):
        read_records(path)
    path.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(InvalidInput, match="is not a records file"):
        read_records(path)
    parquet.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(InvalidInput, match="is not a records file"):
        read_records(path)
    header = json.dumps({"format": "ppas-requests", "version": 2}).encode()
    parquet.write_table(pa.table({"a": [1]}).replace_schema_metadata({"ppas": header}), path)
    with pytest.raises(InvalidInput, match="version 2; this release reads"):
        read_records(path)


def test_a_full_disk_is_one_clear_error_and_loses_neither_the_outcome_nor_the_old_file(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the write itself fails in the middle."""
    path = tmp_path / "requests.parquet"
    write_records(outcome(), path)
    before = path.read_bytes()
    code = FROM_HERE + (
        "from test_records_file import outcome; from autotune.replay.records_file import write_records\n"
        "from ppas_core.errors import NoResult; import pathlib, resource\n"
        f"one, path = outcome(50), pathlib.Path({str(path)!r})\n"
        "try:\n"
        "    write_records(one, path)\n"
        "except NoResult as error:\n"
        "    print(error)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
        "assert len(one.records) == 50\n"
        "write_records(one, path.with_name('again.parquet'))\n"
    )

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))

    done = subprocess.run(
        [sys.executable, "-B", "-c", code], capture_output=True, text=True, preexec_fn=limit, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "the records of 50 requests" in done.stdout
    assert "make room" in done.stdout
    assert path.read_bytes() == before
    assert len(read_records(tmp_path / "again.parquet").records) == 50
    assert sorted(file.name for file in tmp_path.iterdir()) == ["again.parquet", "requests.parquet"]
