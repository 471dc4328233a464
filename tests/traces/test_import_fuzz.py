"""Whatever bytes come in, an import ends in a trace whose account adds up or in one message; nothing else."""

import gzip
import json
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppas_core.errors import InvalidInput
from traces.format import read_trace, write_trace
from traces.importers import FORMATS, NAMES, TIME_UNITS, import_trace

COLUMNS = sorted({column for form in FORMATS.values() for column in form.needed} | {"Session ID", "Model", "x"})
KEYS = ["timestamp", "input_length", "output_length", "hash_ids", "chat_id", "parent_chat_id", "session_id", "metadata",
        "metrics", "benchmarks", "requests", "successful", "errored", "request_start_time", "prompt_tokens",
        "output_tokens", "format", "digest", "error", "value", "request_start_ns", "input_sequence_length"]  # fmt: skip
NUMBERS = st.one_of(
    st.integers(-5, 10**6),
    st.integers(),
    st.floats(),
    st.sampled_from([0, 1, 2**63, 10**30, 1e308, 5e-324, True, None]),
)
CELLS = st.one_of(
    NUMBERS.map(str),
    st.sampled_from(
        ["", " ", "nan", "1e9", "1e99999", "1_0", "0x1", "٣", '"', '"1', "2023-11-16 18:15:46.1", "1;2", "\x00"]
    ),
    st.text(max_size=6),
)
JSON = st.recursive(
    st.one_of(NUMBERS, st.text(max_size=4), st.booleans()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=12,
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "format_name": st.sampled_from(NAMES),
        "time_unit": st.sampled_from(TIME_UNITS),
        "block_size": st.integers(0, 600),
        "spread_seed": st.integers(0, 3),
        "any_order": st.booleans(),
        "benchmark": st.integers(0, 2),
    },
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "input"


def check(path: Path, content: bytes, options: dict[str, object], rows: int | None = None) -> bool:
    """Imports; whether it came in. Anything but InvalidInput fails the test by itself."""
    path.write_bytes(content)
    try:
        imported = import_trace(path, **options)  # type: ignore[arg-type]
    except InvalidInput as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert refusal.startswith((str(path), "block size is 0"))
        assert len(refusal) < 1000
        return False
    ledger = imported.ledger
    assert ledger.rows_read == ledger.kept + sum(ledger.dropped.values())
    assert ledger.kept == len(imported.trace.requests)
    assert rows is None or ledger.rows_read == rows
    assert imported.trace.provenance["import"]["kept"] == ledger.kept or ledger.format == "ppas"
    written = path.with_name("written.jsonl")
    write_trace(imported.trace, written)
    assert read_trace(written) == imported.trace
    return True


@settings(max_examples=300)
@given(st.binary(max_size=300), st.booleans(), OPTIONS)
def test_any_bytes_give_a_trace_or_one_message(
    path: Path, content: bytes, packed: bool, options: dict[str, object]
) -> None:
    check(path, gzip.compress(content) if packed else content, options)


@settings(max_examples=300)
@given(
    st.permutations(COLUMNS), st.lists(st.lists(CELLS, min_size=1, max_size=9), max_size=5), st.integers(1, 12), OPTIONS
)
def test_any_table_gives_a_trace_or_one_message(
    path: Path, columns: list[str], rows: list[list[str]], width: int, options: dict[str, object]
) -> None:
    text = "\n".join(",".join(cells) for cells in [columns[:width], *rows])
    check(path, text.encode("utf-8", "surrogatepass"), options)


@settings(max_examples=300)
@given(st.lists(JSON, max_size=5), OPTIONS)
def test_any_json_gives_a_trace_or_one_message(path: Path, rows: list[object], options: dict[str, object]) -> None:
    check(path, "\n".join(json.dumps(row) for row in rows).encode(), options)


@st.composite
def tables(draw: st.DrawFn) -> tuple[str, list[list[object]]]:
    """A format and rows that are nearly always good: time, prompt, output."""
    form = draw(st.sampled_from(["azure", "vidur", "burstgpt", "mooncake", "bailian", "vllm-timed"]))
    count = draw(st.integers(1, 30))
    times = draw(st.lists(st.integers(0, 3_600), min_size=count, max_size=count))
    lengths = st.lists(st.integers(0, 3000), min_size=count, max_size=count)
    return form, [list(row) for row in zip(times, draw(lengths), draw(lengths), strict=True)]


def as_text(form: str, rows: Iterable[list[object]]) -> str:
    found = FORMATS[form]
    if found.kind == "csv":
        lines = [",".join(found.needed)]
        for time, prompt, output in rows:
            shown = (
                f"2023-11-16 {int(time) // 3600:02}:{int(time) // 60 % 60:02}:{int(time) % 60:02}.5"
                if form == "azure"
                else time
            )
            lines.append(f"{shown},{prompt},{output}")
        return "\n".join(lines)
    more = {"chat_id": 1} if form == "bailian" else {}
    return "\n".join(
        json.dumps(
            {
                **dict(zip(found.needed, (time * (1000 if found.unit == "ms" else 1), prompt, output), strict=True)),
                **more,
            }
        )
        for time, prompt, output in rows
    )


@settings(max_examples=200)
@given(tables())
def test_no_row_is_lost_in_silence(path: Path, table: tuple[str, list[list[object]]]) -> None:
    form, rows = table
    options = {"format_name": form, "any_order": True, "time_unit": FORMATS[form].unit}
    came_in = check(path, as_text(form, rows).encode(), options, rows=len(rows))
    has_empty_prompt = any(row[1] == 0 for row in rows)
    assert came_in == (not has_empty_prompt and any(row[2] for row in rows))
    if came_in:
        trace = import_trace(path, **options).trace
        kept = sorted((row for row in rows if row[2]), key=lambda row: row[0])
        assert [request.prompt_tokens for request in trace.requests] == [row[1] for row in kept]
        assert [request.arrival_s for request in trace.requests] == [row[0] - kept[0][0] for row in kept]


@pytest.mark.shared
@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_sample_gives_a_trace_or_one_message(path: Path, shared: Path, seed: int) -> None:
    rng = random.Random(seed)
    for sample in sorted((shared / "traces").glob("*_*")):
        good = sample.read_bytes()[:3000]
        for _ in range(40):
            damaged = bytearray(good)
            for _ in range(rng.randrange(1, 4)):
                place = rng.randrange(len(damaged))
                damaged[place : place + rng.randrange(3)] = rng.choice(
                    [b"", b"\x00", b"-", b"9", b"\xff", b'"', b"\n", b",", b"e"]
                )
            check(path, bytes(damaged), {})
