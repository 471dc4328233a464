"""Each format's columns, times, units and endings are understood; what is left out has a name."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ppas_core.errors import InvalidInput
from traces.format import BlockHashes, Trace, TraceRequest, write_trace
from traces.importers import Imported, import_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n"


def load(tmp_path: Path, content: str | bytes, **options: Any) -> Imported:
    path = tmp_path / "input"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return import_trace(path, **options)


def lines(*rows: object) -> str:
    return "\n".join(json.dumps(row) for row in rows)


def mooncake(time: object, prompt: int = 600, blocks: object = (1, 2), **more: object) -> dict[str, object]:
    return {"timestamp": time, "input_length": prompt, "output_length": 5, "hash_ids": blocks, **more}


def arrivals(imported: Imported) -> list[float]:
    return [request.arrival_s for request in imported.trace.requests]


PLAIN = VIDUR + "0.5,10,1\n2.25,20,2\n"


@pytest.mark.parametrize(
    "content",
    [
        PLAIN.encode(),
        b"\xef\xbb\xbf" + PLAIN.encode(),
        PLAIN.replace("\n", "\r\n").encode(),
        PLAIN.strip().encode(),
        PLAIN.replace("\n", "\n\n \n").encode(),
        b"\n\n" + PLAIN.encode(),
        gzip.compress(PLAIN.encode()),
        gzip.compress(PLAIN[:40].encode()) + gzip.compress(PLAIN[40:].encode()),
        b"num_decode_tokens, arrived_at ,x,num_prefill_tokens\n1,0.5,?,10\n2,2.25,?,20\n",
        b'"arrived_at","num_prefill_tokens","num_decode_tokens"\n"0.5","10","1"\n"2.25","20.0","2."\n',
    ],
    ids=["plain", "bom", "crlf", "no-final-newline", "blank-lines", "blank-first", "gzip", "gzip-parts", "other-order",
         "quoted"],
)  # fmt: skip
def test_the_same_rows_come_in_whatever_the_file_looks_like(tmp_path: Path, content: bytes) -> None:
    imported = load(tmp_path, content)
    assert imported.trace.requests == (TraceRequest(0.0, 10, 1), TraceRequest(1.75, 20, 2))
    assert imported.ledger.offset == "0.5 s"
    assert imported.trace.provenance["import"]["rows_read"] == 2


@pytest.mark.parametrize(
    ("first", "second", "gap_s"),
    [
        ("2023-11-16 18:15:46.6805900", "2023-11-16 18:15:46.6805901", 1e-7),
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 01:00:00.009931+01:00", 1e-6),
        ("2024-05-10T00:00:00Z", "2024-05-09T20:00:01-0400", 1.0),
        ("2024-02-29 23:59:59", "2024-03-01 00:00:00.5", 1.5),
        ("2024-12-31 23:59:59.999999999", "2025-01-01 00:00:00", 1e-9),
    ],
)
def test_dates_keep_their_digits_and_their_zones(tmp_path: Path, first: str, second: str, gap_s: float) -> None:
    assert arrivals(load(tmp_path, f"{AZURE}{first},1,1\n{second},1,1")) == [0.0, gap_s]


@pytest.mark.parametrize(("unit", "gap_s"), [("s", 3.0), ("ms", 3e-3), ("us", 3e-6), ("ns", 3e-9)])
def test_a_named_time_unit_is_believed(tmp_path: Path, unit: str, gap_s: float) -> None:
    imported = load(tmp_path, lines(mooncake(0), mooncake(3)), time_unit=unit)
    assert arrivals(imported) == [0.0, gap_s]
    assert imported.ledger.time_unit == unit


def test_long_unix_times_lose_no_digit(tmp_path: Path) -> None:
    content = VIDUR + "1759813207.532900363,10,1\n1759813207.532900364,10,1\n"
    assert arrivals(load(tmp_path, content)) == [0.0, 1e-9]


@pytest.mark.parametrize("v3", [False, True])
def test_burstgpt_requests_without_output_are_dropped_by_name(tmp_path: Path, v3: bool) -> None:
    more, values = (",Session ID,Elapsed time", ",s1,4") if v3 else ("", "")
    content = f"Timestamp{more},Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    content += f"5{values},ChatGPT,472,18,490,Conversation log\n45{values},ChatGPT,1087,0,1087,API log\n"
    imported = load(tmp_path, content)
    assert (imported.ledger.rows_read, imported.ledger.kept) == (2, 1)
    assert imported.ledger.dropped == {"without output tokens": 1}
    assert imported.trace.requests == (TraceRequest(0.0, 472, 18, session="s1" if v3 else None),)
    assert "rows read 2 = kept 1 + dropped 1 (1 without output tokens)" in imported.ledger.lines()


def test_mooncake_and_vllm_timed_traces_are_told_apart_by_their_blocks(tmp_path: Path) -> None:
    small = load(tmp_path, lines(mooncake(0, 30, [1, 2]), mooncake(7, 33, [1, 2, 3])))
    assert (small.ledger.format, small.trace.block_size, arrivals(small)) == ("vllm-timed", 16, [0.0, 7.0])
    large = load(tmp_path, lines(mooncake(0), mooncake(7, 512, [1])))
    assert (large.ledger.format, large.trace.block_size, arrivals(large)) == ("mooncake", 512, [0.0, 0.007])
    assert large.trace.requests[0].block_hashes == (1, 2)


def test_another_block_size_can_be_named(tmp_path: Path) -> None:
    imported = load(tmp_path, lines(mooncake(0, 60, [1, 2])), format_name="mooncake", block_size=32)
    assert imported.trace.block_size == 32
    assert imported.trace.requests[0].block_hashes == (1, 2)


def test_block_ids_beyond_64_bits_are_kept_as_they_are(tmp_path: Path) -> None:
    imported = load(tmp_path, lines(mooncake(0, 512, [2**64]), mooncake(1, 512, [-(2**63)])))
    assert [tuple(request.block_hashes) for request in imported.trace.requests] == [(2**64,), (-(2**63),)]
    assert isinstance(imported.trace.requests[1].block_hashes, BlockHashes)


def test_late_rows_are_sorted_counted_and_equal_times_keep_the_files_order(tmp_path: Path) -> None:
    content = VIDUR + "0,1,1\n5,2,1\n3,3,1\n5,4,1\n4,5,1\n9,6,1\n"
    imported = load(tmp_path, content)
    assert [request.prompt_tokens for request in imported.trace.requests] == [1, 3, 5, 2, 4, 6]
    assert imported.ledger.late_rows == 2


def test_a_lone_straggler_is_a_late_row_and_not_a_new_recording(tmp_path: Path) -> None:
    content = VIDUR + "".join(f"{time},1,1\n" for time in [*range(100), 0.5, *range(100, 110)])
    assert load(tmp_path, content).ledger.late_rows == 1


def test_rows_in_no_order_come_in_when_that_is_said(tmp_path: Path) -> None:
    content = VIDUR + "".join(f"{time},1,1\n" for time in (50, 90, 0, 1, 40))
    assert arrivals(load(tmp_path, content, any_order=True)) == [0, 1, 40, 50, 90]


def test_quantised_arrivals_are_spread_within_their_tick_only_when_asked(tmp_path: Path) -> None:
    content = lines(*(mooncake(time) for time in [0] * 5 + [2999] * 5 + [6000] * 5))
    before = load(tmp_path, content)
    assert sorted(set(arrivals(before))) == [0.0, 2.999, 6.0]
    assert before.ledger.tick_s == 3.001
    assert before.ledger.spread_seed is None
    after, again, other = (load(tmp_path, content, spread_seed=seed) for seed in (1, 1, 2))
    assert after.trace == again.trace
    assert after.trace != other.trace
    assert after.trace.provenance["import"]["spread_seed"] == 1
    for index, arrival_s in enumerate(arrivals(after)):
        assert (0.0, 2.999, 6.0)[index // 5] <= arrival_s < (2.999, 6.0, 9.001)[index // 5]
    assert len(set(arrivals(after))) == 15


def test_spread_arrivals_never_pass_the_next_tick_however_near_it_is(tmp_path: Path) -> None:
    content = lines(*(mooncake(time) for time in [0] * 9 + [7] * 9 + [3000] * 9 + [6001] * 9 + [9000] * 9))
    times = arrivals(load(tmp_path, content, spread_seed=1))
    assert times == sorted(times)
    assert max(times[:9]) < 0.007 <= min(times[9:])


def test_a_clock_of_whole_seconds_is_reported(tmp_path: Path) -> None:
    content = VIDUR + "".join(f"{time},1,1\n" for time in range(0, 60, 4))
    assert load(tmp_path, content).ledger.tick_s == 4.0


def test_a_fine_clock_is_not_taken_for_a_coarse_one(tmp_path: Path) -> None:
    content = VIDUR + "".join(f"{time + time**2 / 1000},1,1\n" for time in range(60))
    assert load(tmp_path, content, spread_seed=1).ledger.tick_s is None


def aiperf(start_ns: int, prompt: object = 550, output: object = 9, **metadata: object) -> dict[str, object]:
    return {
        "metadata": {"x_correlation_id": "c", "request_start_ns": start_ns, "benchmark_phase": "profiling",
                     "was_cancelled": False, **metadata},
        "metrics": {"input_sequence_length": {"value": prompt, "unit": "tokens"},
                    "output_sequence_length": {"value": output, "unit": "tokens"}},
        "error": None,
    }  # fmt: skip


def test_an_aiperf_run_comes_in_without_its_failures_and_warm_up(tmp_path: Path) -> None:
    start_ns = 1_759_813_207_532_900_363
    failed = {**aiperf(start_ns), "metrics": {"error_isl": {"value": 550}}, "error": {"code": 499}}
    imported = load(
        tmp_path,
        lines(
            aiperf(start_ns + 7_000_000_001),
            aiperf(start_ns, 20, 3),
            aiperf(start_ns, was_cancelled=True),
            aiperf(start_ns, benchmark_phase="warmup"),
            failed,
        ),
    )
    assert imported.ledger.format == "aiperf"
    assert imported.trace.requests == (
        TraceRequest(0.0, 20, 3, session="c"),
        TraceRequest(7.000000001, 550, 9, session="c"),
    )
    assert imported.ledger.dropped == {"cancelled": 1, "from another phase than profiling": 1, "failed": 1}


def guidellm(successful: list[Any], total: int | None = None, **other: Any) -> dict[str, Any]:
    totals = {"successful": len(successful) if total is None else total}
    return {"requests": {"successful": successful, **other}, "metrics": {"request_totals": totals}}


def request(start: float, prompt: object = 128, output: object = 32) -> dict[str, object]:
    return {"request_start_time": start, "prompt_tokens": prompt, "output_tokens": output, "request_id": "r"}


@pytest.mark.parametrize("indent", [None, 1])
def test_a_guidellm_report_comes_in_without_its_failures(tmp_path: Path, indent: int | None) -> None:
    one = guidellm([request(1759813209.5), request(1759813208.0)], errored=[request(1759813210.0)], incomplete=[{}])
    imported = load(tmp_path, json.dumps({"benchmarks": [one]}, indent=indent))
    assert imported.trace.requests == (TraceRequest(0.0, 128, 32), TraceRequest(1.5, 128, 32))
    assert (imported.ledger.format, imported.ledger.rows_read) == ("guidellm", 4)
    assert imported.ledger.dropped == {"incomplete": 1, "failed": 1}


def test_one_benchmark_of_a_guidellm_report_is_chosen_by_its_place(tmp_path: Path) -> None:
    report = json.dumps({"benchmarks": [guidellm([request(1.0)]), guidellm([request(1.0), request(2.0)])]})
    assert load(tmp_path, report, benchmark=2).ledger.kept == 2
    with pytest.raises(InvalidInput, match="holds 2 benchmarks; name one with --benchmark, 1 to 2"):
        load(tmp_path, report)


def test_our_own_trace_passes_through_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    trace = Trace(name="t", requests=(TraceRequest(1 / 3, 5, 6),), regime="r", seed=4, provenance={"a": 1})
    write_trace(trace, path)
    imported = import_trace(path)
    assert imported.trace.requests == trace.requests
    assert (imported.trace.name, imported.trace.regime, imported.trace.seed) == ("t", "r", 4)
    assert imported.trace.provenance["a"] == 1
    assert imported.ledger.format == "ppas"


def test_the_traces_name_is_the_files_without_its_endings(tmp_path: Path) -> None:
    path = tmp_path / "conv.v2.jsonl.gz"
    path.write_bytes(gzip.compress(lines(mooncake(0)).encode()))
    assert import_trace(path).trace.name == "conv.v2"
    assert import_trace(path, name="n", regime="peak").trace.regime == "peak"
