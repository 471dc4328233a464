"""What cannot be used is refused in words: the file, the row, the value, what is allowed and what to do."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ppas_core.errors import InvalidInput
from traces.importers import import_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,10,2\n"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0,10,2\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n0,GPT-4,10,2,12,API log\n"
GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
TIMED = '{"timestamp": 0, "input_length": 30, "output_length": 5, "hash_ids": [1, 2]}\n'
BAILIAN = TIMED.replace('"timestamp": 0', '"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5')


def row(**changes: object) -> str:
    """The good Mooncake row and a second one with some values replaced; "absent" removes one."""
    merged = {**json.loads(GOOD), **changes}
    return GOOD + json.dumps({key: value for key, value in merged.items() if value != "absent"})


def aiperf(**changes: object) -> str:
    record: dict[str, object] = {
        "metadata": {"request_start_ns": 5},
        "metrics": {"input_sequence_length": {"value": 1}, "output_sequence_length": {"value": 1}},
        "error": None,
    }
    return json.dumps({**record, **changes})


def guidellm(*benchmarks: object) -> str:
    return json.dumps({"benchmarks": list(benchmarks)})


REQUEST = {"request_start_time": 1.0, "prompt_tokens": 5, "output_tokens": 5}

# name: (content, options, words that the message has)
BAD: dict[str, tuple[str | bytes, dict[str, Any], list[str]]] = {
    # The file as a whole.
    "empty file": ("", {}, ["the file is empty"]),
    "blank file": (" \n\n", {}, ["the file is empty"]),
    "header alone": ("arrived_at,num_prefill_tokens,num_decode_tokens\n", {}, ["no request", "it has no rows"]),
    "all rows dropped": (VIDUR.replace("10,2", "10,0"), {}, ["no request", "1 without output tokens"]),
    "cut gzip": (gzip.compress(VIDUR.encode())[:30], {}, ["cannot be read"]),
    "broken gzip": (gzip.compress(VIDUR.encode())[:-8] + bytes(8), {}, ["cannot be read", "CRC check failed"]),
    "UTF-16": (VIDUR.encode("utf-16"), {}, ["not UTF-8", "line 1, byte 0"]),
    "Latin-1 further down": (VIDUR.encode() + b"1,\xe9,2\n", {}, ["not UTF-8", "line 3, byte 2"]),
    "unknown columns": ("time,in,out\n1,2,3\n", {}, ["no known format", "'time', 'in', 'out'", "--format"]),
    "unknown keys": ('{"t": 1}\n', {}, ["no known format", "'t'"]),
    "JSON array": ("[" + GOOD + "]", {}, ["one JSON array", "one JSON object a line"]),
    "cut JSON": ('{"timestamp": 0,\n', {}, ["neither JSON Lines nor one JSON document"]),
    "mooncake or vllm-timed": (row(hash_ids="absent").split("\n")[1], {}, ["--format mooncake or --format vllm-timed"]),
    # Options.
    "unknown format": (VIDUR, {"format_name": "vidurr"}, ["format is 'vidurr'", "azure, vidur"]),
    "unknown unit": (VIDUR, {"time_unit": "h"}, ["time unit is 'h'", "s, ms, us, ns, date"]),
    "block size 0": (GOOD, {"block_size": 0}, ["block size is 0"]),
    "benchmark of a table": (VIDUR, {"benchmark": 1}, ["benchmark is 1", "has no benchmarks"]),
    "column of the named format missing": (VIDUR, {"format_name": "azure"}, ["row 1", "'TIMESTAMP' is missing"]),
    # Rows that are no rows.
    "column twice": (
        "arrived_at,arrived_at,num_prefill_tokens,num_decode_tokens\n",
        {},
        ["row 1", "'arrived_at' is there twice"],
    ),
    "short CSV row": (VIDUR + "1,10\n", {}, ["row 3", "has 2 fields, '1,10'", "cut"]),
    "long CSV row": (VIDUR + "1,10,2,9\n", {}, ["row 3", "has 4 fields, '1,10,2,9'"]),
    "quote over a line end": (VIDUR + '1,10,"2\n2,10,2"\n', {}, ["row 4", "runs over a line end"]),
    "quote never closed": (VIDUR + '1,10,"2\n', {}, ["row 3", "is not CSV", "unexpected end of data"]),
    "stray quote": (VIDUR + '1,10,"2"x\n', {}, ["row 3", "is not CSV", '2"x']),
    "not JSON": (GOOD + "nonsense\n", {}, ["row 2", "is not JSON: 'nonsense'"]),
    "not an object": (GOOD + "[1]\n", {}, ["row 2", "is [1]; allowed: one JSON object a line"]),
    "nested without end": (GOOD + "[" * 100_000, {}, ["row 2", "is not JSON: '[[["]),
    "number without end": (
        GOOD + '{"timestamp": ' + "9" * 5000 + "}",
        {},
        ["row 2", 'is not JSON: \'{"timestamp": 999'],
    ),
    # Times.
    "time missing": (row(timestamp="absent"), {}, ["row 2", "'timestamp' is missing"]),
    "time null": (row(timestamp=None), {}, ["row 2", "timestamp is empty"]),
    "time NaN": (row(timestamp=float("nan")), {}, ["row 2", "timestamp is nan", "finite"]),
    "time infinite": (row(timestamp=float("inf")), {}, ["row 2", "timestamp is inf"]),
    "time negative": (row(timestamp=-1), {}, ["row 2", "timestamp is -1", "0 to"]),
    "time true": (row(timestamp=True), {}, ["row 2", "timestamp is True"]),
    "time past all clocks": (row(timestamp=10**19), {}, ["row 2", "timestamp is 10000000000000000000", "--time-unit"]),
    "time of a huge power": (GOOD + GOOD.replace("0,", "1e999999999,", 1), {}, ["row 2", "timestamp is 1E+999999999"]),
    "CSV time nan": (VIDUR + "nan,10,2\n", {}, ["row 3", "arrived_at is 'nan'"]),
    "CSV time inf": (VIDUR + "-inf,10,2\n", {}, ["row 3", "arrived_at is '-inf'"]),
    "CSV time negative": (VIDUR + "-0.5,10,2\n", {}, ["row 3", "arrived_at is '-0.5'"]),
    "CSV time empty": (VIDUR + ",10,2\n", {}, ["row 3", "arrived_at is empty"]),
    "CSV time with a group mark": (VIDUR + '"1,000",10,2\n', {}, ["row 3", "arrived_at is '1,000'"]),
    "date in the number column": (
        BURST + "2023-01-01 00:00:00,GPT-4,10,2,12,API log\n",
        {},
        ["row 3", "Timestamp is '2023"],
    ),
    "number in the date column": (AZURE + "12.5,10,2\n", {}, ["row 3", "TIMESTAMP is '12.5'", "a date such as"]),
    "day first": (AZURE + "16/11/2023 18:15,10,2\n", {}, ["row 3", "TIMESTAMP is '16/11/2023 18:15'"]),
    "no such day": (AZURE + "2023-02-30 00:00:00,10,2\n", {}, ["row 3", "'2023-02-30 00:00:00'", "the calendar has"]),
    "ten digits": (AZURE + "2023-11-16 18:15:46.1234567891,10,2\n", {}, ["row 3", ".1234567891'", "nine digits"]),
    "a zone in some rows": (AZURE + "2023-11-16 18:15:47+00:00,10,2\n", {}, ["row 3", "18:15:47+00:00'", "no zone"]),
    "a zone not in all rows": (
        AZURE.replace(":46", ":46Z") + "2023-11-16 18:15:47,10,2\n",
        {},
        ["row 3", "18:15:47'", "allowed: a zone"],
    ),
    "before 1970": (AZURE.replace("2023", "1969"), {}, ["row 2", "'1969-11-16 18:15:46'", "1970 to 2262"]),
    "clock begins anew": (
        VIDUR + "50,1,1\n100,1,1\n0,1,1\n50,1,1\n",
        {},
        ["row 5", "jumps back to its start", "arrived_at 0", "--unsorted"],
    ),
    "clock begins anew below its start": (
        "arrived_at,num_prefill_tokens,num_decode_tokens\n7,1,1\n100,1,1\n2,1,1\n3,1,1\n",
        {},
        ["row 4", "arrived_at 2"],
    ),
    "ms in a file of seconds": (
        "".join(BAILIAN.replace("0.5", str(n * 3e6)) for n in range(20)),
        {},
        ["cannot be in s", "--time-unit us"],
    ),
    "seconds in a file of ms": (
        "".join(row(timestamp=n / 50).split("\n")[1] + "\n" for n in range(20)),
        {},
        ["cannot be in ms", "50,000 requests a second", "--time-unit"],
    ),
    "Unix seconds in a file of ms": (
        GOOD.replace('"timestamp": 0', '"timestamp": 1700000000'),
        {},
        ["cannot be in ms", "1700000000, is a date of our years in s"],
    ),
    # Lengths.
    "length missing": (row(output_length="absent"), {}, ["row 2", "'output_length' is missing"]),
    "length null": (row(input_length=None), {}, ["row 2", "input_length is empty"]),
    "length true": (row(input_length=True), {}, ["row 2", "input_length is True"]),
    "length fractional": (row(input_length=600.5), {}, ["row 2", "input_length is 600.5"]),
    "length zero": (row(input_length=0), {}, ["row 2", "input_length is 0;", "1 to"]),
    "length negative": (row(output_length=-3), {}, ["row 2", "output_length is -3"]),
    "length NaN": (row(output_length=float("nan")), {}, ["row 2", "output_length is nan"]),
    "length infinite": (row(output_length=float("inf")), {}, ["row 2", "output_length is inf"]),
    "length text": (row(input_length="many"), {}, ["row 2", "input_length is 'many'"]),
    "time text": (row(timestamp="now"), {}, ["row 2", "timestamp is 'now'"]),
    "length a list": (row(input_length=[600]), {}, ["row 2", "input_length is [600]"]),
    "length beyond belief": (row(output_length=10**9), {}, ["row 2", "output_length is 1000000000"]),
    "CSV length zero": (VIDUR + "1,0,2\n", {}, ["row 3", "num_prefill_tokens is '0'"]),
    "CSV length fractional": (VIDUR + "1,10.5,2\n", {}, ["row 3", "num_prefill_tokens is '10.5'"]),
    "CSV length negative": (AZURE + "2023-11-16 18:15:47,-1,2\n", {}, ["row 3", "ContextTokens is '-1'"]),
    "CSV length nan": (AZURE + "2023-11-16 18:15:47,10,NaN\n", {}, ["row 3", "GeneratedTokens is 'NaN'"]),
    "CSV length true": (BURST + "1,GPT-4,true,2,12,API log\n", {}, ["row 3", "Request tokens is 'true'"]),
    "CSV length empty": (BURST + "1,GPT-4,10,,12,API log\n", {}, ["row 3", "Response tokens is empty"]),
    "CSV length in other digits": (VIDUR + "1,٣,2\n", {}, ["row 3", "num_prefill_tokens is '٣'"]),
    # Block ids and sessions.
    "block ids no list": (row(hash_ids=7), {}, ["row 2", "hash_ids is 7"]),
    "block id true": (row(hash_ids=[1, True]), {}, ["row 2", "hash_ids[1] is True"]),
    "block id fractional": (row(hash_ids=[1.5, 2]), {}, ["row 2", "hash_ids[0] is 1.5"]),
    "block id text": (row(hash_ids=["a", 2]), {}, ["row 2", "hash_ids[0] is 'a'"]),
    "another block size fits": (
        TIMED * 3,
        {"format_name": "mooncake"},
        ["blocks of 512 tokens in 0 of 3 rows, blocks of 16 in 3", "--block-size 16"],
    ),
    "no block size fits": (
        GOOD.replace("[1, 2]", "[" + "1," * 700 + "2]"),
        {"format_name": "mooncake"},
        ["fit blocks of 512 tokens in no row"],
    ),
    "chat id a list": (BAILIAN.replace('"chat_id": 1', '"chat_id": [1]'), {}, ["row 1", "chat_id is [1]"]),
    "session id a number with a point": (row(session_id=1.5), {}, ["row 2", "session_id is 1.5"]),
    # Recorded runs.
    "AIPerf without metadata": (aiperf(metadata=3), {}, ["row 1", "metadata is 3"]),
    "AIPerf metrics a list": (aiperf(metrics=[1]), {}, ["row 1", "metrics is [1]"]),
    "AIPerf without lengths": (aiperf(metrics={}), {}, ["row 1", "'input_sequence_length' is missing"]),
    "guidellm without benchmarks": (guidellm(), {}, ["'benchmarks' is []"]),
    "guidellm with several": (guidellm({}, {}), {}, ["holds 2 benchmarks; name one with --benchmark"]),
    "guidellm benchmark out of range": (guidellm({}), {"benchmark": 2}, ["benchmark is 2; allowed: 1 to 1"]),
    "guidellm without requests": (guidellm({"requests": 4}), {}, ["benchmark 1", "its requests are 4"]),
    "guidellm requests no list": (guidellm({"requests": {"successful": 4}}), {}, ["its successful requests are 4"]),
    "guidellm request no object": (
        guidellm({"requests": {"successful": [REQUEST, 4]}}),
        {},
        ["benchmark 1, row 2", "is 4"],
    ),
    "guidellm request without length": (
        guidellm({"requests": {"successful": [{**REQUEST, "prompt_tokens": None}]}}),
        {},
        ["row 1", "prompt_tokens is empty"],
    ),
    "guidellm sample of the requests": (
        guidellm({"requests": {"successful": [REQUEST]}, "request_totals": {"successful": 9}}),
        {},
        ["holds 1 of 9 successful requests", "--sample-requests"],
    ),
    # Our own.
    "own trace without its requests": ('{"format": "ppas-trace", "digest": "x"}\n', {}, ["trace version None"]),
    "own trace with a unit": ('{"format": "ppas-trace", "digest": "x"}\n', {"time_unit": "s"}, ["needs no time unit"]),
}


def message(tmp_path: Path, name: str) -> str:
    content, options, _ = BAD[name]
    path = tmp_path / "bad.input"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InvalidInput) as caught:
        import_trace(path, **options)
    return str(caught.value).replace(str(path), "FILE")


@pytest.mark.parametrize("name", BAD)
def test_a_broken_input_is_refused_with_its_place_and_value(tmp_path: Path, name: str) -> None:
    text = message(tmp_path, name)
    for word in BAD[name][2]:
        assert word in text
    assert len(text) < 500
    assert "\n" not in text


def test_no_two_broken_inputs_get_the_same_message(tmp_path: Path) -> None:
    messages = [message(tmp_path, name) for name in BAD if name != "blank file"]
    assert len(set(messages)) == len(messages) >= 40


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no such file"):
        import_trace(tmp_path / "none.csv")
    with pytest.raises(InvalidInput, match="cannot be read"):
        import_trace(tmp_path)


def test_a_file_that_a_named_unit_explains_is_not_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(row(timestamp=n / 50).split("\n")[1] + "\n" for n in range(20)))
    assert import_trace(path, time_unit="s").trace.duration_s == 0.38
