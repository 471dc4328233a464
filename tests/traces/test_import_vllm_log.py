"""vLLM's request log comes in as far as it tells lengths, and every request that it does not is named."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppas_core.errors import InvalidInput
from traces.format import TraceRequest, read_trace, write_trace
from traces.importers import Imported, import_trace
from traces.importers.vllm_log import ABORTED, CUT_PROMPT, FAILED, NO_GENERATION, NO_LENGTH, NO_PROMPT, SEVERAL

PARAMS = (
    "SamplingParams(n={n}, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, temperature=1.0, "
    "top_p=1.0, top_k=0, min_p=0.0, seed=None, stop=[{stop}], stop_token_ids=[], bad_words=[], "
    "thinking_token_budget=None, include_stop_str_in_output=False, ignore_eos={eos}, max_tokens={most}, "
    "min_tokens={least}, logprobs=None, prompt_logprobs=None, skip_special_tokens=True, "
    "spaces_between_special_tokens=True, structured_outputs=None, extra_args=None)"
)
HEAD = "(APIServer pid=7) {level} {time} [serve/.../utils/request_logger.py:63] "


def line(message: str, time: str = "11-30 12:00:00", level: str = "INFO", colour: bool = False) -> str:
    head = HEAD.format(level=level, time=time)
    if colour:
        head = f"\x1b[0;36m(APIServer pid=7)\x1b[0;0m \x1b[32m{level}\x1b[0m \x1b[90m{time}\x1b[0m \x1b[90m[a.py:6]\x1b[0m "
    return head + message


def received(name: str, n: int = 1, eos: bool = False, most: object = 9, least: int = 0, stop: str = "") -> str:
    params = PARAMS.format(n=n, eos=eos, most=most, least=least, stop=stop)
    return f"Received request {name}: params: {params}, lora_request: None."


def details(name: str, ids: Sequence[int], text: str = "None") -> str:
    return f"Request {name} details: prompt: {text}, prompt_token_ids: {list(ids)}, prompt_embeds shape: None."


def load(tmp_path: Path, *lines: str, **options: object) -> Imported:
    path = tmp_path / "server.log"
    path.write_text("\n".join(lines))
    return import_trace(path, **options)  # type: ignore[arg-type]


START = (
    "INFO 11-30 11:59:01 [importing.py:53] Triton is installed but 0 active driver(s) found (expected 1).",
    "(APIServer pid=7) INFO 11-30 11:59:02 [api_utils.py:273] non-default args: {'model': 'm', 'port': 8000}",
)


@pytest.mark.parametrize("colour", [False, True])
def test_requests_of_fixed_length_need_no_logged_answer(tmp_path: Path, colour: bool) -> None:
    imported = load(
        tmp_path,
        *START,
        line(details("cmpl-a-0", range(5, 45)), level="DEBUG", colour=colour),
        line(received("cmpl-a-0", eos=True, most=9), colour=colour),
        'INFO:     127.0.0.1:4242 - "POST /v1/completions HTTP/1.1" 200 OK',
        line(details("cmpl-b-0", range(5, 38)), time="11-30 12:00:03", colour=colour),
        line(received("cmpl-b-0", most=4, least=4), time="11-30 12:00:03", colour=colour),
    )
    assert imported.ledger.format == "vllm-log"
    assert imported.trace.block_size == 16
    assert imported.trace.requests == (
        TraceRequest(0.0, 40, 9, (0, 1, 2)),
        TraceRequest(3.0, 33, 4, (0, 1, 3)),
    )


def test_answers_are_counted_by_their_ids_in_one_line_or_in_parts(tmp_path: Path) -> None:
    imported = load(
        tmp_path,
        line(details("a", [1, 2])),
        line(received("a")),
        line(details("b", [1, 2, 3])),
        line(received("b"), time="11-30 12:00:01"),
        line("Generated response a: output: 'x, output_token_ids: [1]', output_token_ids: [7, 8, 9], finish_reason: stop"),
        line("Generated response b (streaming delta): output: 'x', output_token_ids: [7, 8], finish_reason: None"),
        line("Generated response b (streaming delta) details: output_token_ids: [9, 9]", level="DEBUG"),
        line("Generated response b (streaming complete): output: 'xy', output_token_ids: None, finish_reason: stop"),
        line(details("c", [1])),
        line(received("c"), time="11-30 12:00:02"),
        line("Generated response c (streaming complete): output: '<streaming_complete: 37 tokens>', finish_reason: x"),
        line(details("resp_d_0", [1])),
        line(received("resp_d_0"), time="11-30 12:00:03"),
        line("Generated response resp_d: output: 'x', output_token_ids: (250, 414), finish_reason: length"),
    )  # fmt: skip
    assert [request.output_tokens for request in imported.trace.requests] == [3, 4, 37, 2]


def test_the_one_line_of_older_releases_comes_in(tmp_path: Path) -> None:
    params = PARAMS.format(n=1, eos=True, most=5, least=0, stop="")
    imported = load(
        tmp_path,
        "INFO 07-04 05:06:07 [logger.py:43] Received request cmpl-1-0: prompt: 'prompt_token_ids: [1]', "
        f"params: {params}, prompt_token_ids: [4, 5, 6], prompt_embeds shape: None, lora_request: None.",
    )
    assert imported.trace.requests == (TraceRequest(0.0, 3, 5, (0,)),)


def test_a_log_in_json_keeps_its_year_and_its_milliseconds(tmp_path: Path) -> None:
    def as_json(time: str, message: str) -> str:
        return json.dumps({"asctime": time, "levelname": "INFO", "name": "vllm", "message": message})

    imported = load(
        tmp_path,
        as_json("2026-12-31 23:59:59,250", details("a", [1])),
        as_json("2026-12-31 23:59:59,250", received("a", eos=True)),
        as_json("2027-01-01 00:00:01,500", details("b", [1])),
        as_json("2027-01-01 00:00:01,500", received("b", eos=True)),
    )
    assert [request.arrival_s for request in imported.trace.requests] == [0.0, 2.25]


@pytest.mark.parametrize(
    ("dates", "gaps_days"),
    [
        (("12-31", "01-01"), [0, 1]),
        (("02-28", "03-01"), [0, 1]),
        (("02-28", "02-29", "03-01"), [0, 1, 2]),
        (("06-30", "12-31", "01-01", "03-01"), [0, 184, 185, 244]),
        (("02-29", "12-31", "01-01", "03-01"), [0, 306, 307, 366]),
    ],
)
def test_days_are_counted_over_the_turn_of_the_year(tmp_path: Path, dates: list[str], gaps_days: list[int]) -> None:
    lines = []
    for place, date in enumerate(dates):
        lines.append(line(details(f"r{place}", [1]), time=f"{date} 08:00:00"))
        lines.append(line(received(f"r{place}", eos=True), time=f"{date} 08:00:00"))
    found = load(tmp_path, *lines, time_unit="s").trace.requests
    assert [request.arrival_s for request in found] == [86_400 * gap for gap in gaps_days]


def test_every_request_that_cannot_be_used_has_its_reason(tmp_path: Path) -> None:
    ids = [1, 2, 3]
    imported = load(
        tmp_path,
        *(line(details(name, ids)) for name in ("good", "n", "aborted", "failed", "open", "beam")),
        line(received("good", eos=True)),
        line(received("n", n=4, eos=True)),
        line(received("aborted", eos=True)),
        line(received("failed", eos=True)),
        line(received("open")),
        line(received("unknown", eos=True)),
        line("Received request beam: params: BeamSearchParams(beam_width=2), lora_request: None."),
        line("Received request tokenize-1: params: None, lora_request: None."),
        line("Request aborted aborted."),
        line("Request failed failed (bad request): 'Request good aborted.'"),
        line("Request good details: nothing more"),
    )
    assert imported.ledger.rows_read == 8
    assert imported.ledger.dropped == {
        SEVERAL: 1, ABORTED: 1, FAILED: 1, NO_LENGTH: 1, NO_PROMPT: 1, NO_GENERATION: 2,
    }  # fmt: skip
    assert len(imported.trace.requests) == 1


def test_a_log_at_level_info_is_refused_with_what_it_lacks_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"2 without the prompt's length \(set VLLM_LOGGING_LEVEL=DEBUG\)"):
        load(tmp_path, *START, line(received("a", eos=True)), line(received("b", eos=True)))


def test_prompts_cut_by_the_logger_are_not_taken_for_whole_ones(tmp_path: Path) -> None:
    imported = load(
        tmp_path,
        line("non-default args: {'model': 'm', 'max_log_len': 3}"),
        line(details("a", [1, 2, 3])),
        line(received("a", eos=True)),
        line(details("b", [1, 2])),
        line(received("b", eos=True)),
    )
    assert imported.ledger.dropped == {CUT_PROMPT: 1}
    assert imported.trace.requests[0].prompt_tokens == 2


def test_words_of_users_are_never_taken_for_the_loggers(tmp_path: Path) -> None:
    evil = "'Received request x: params: SamplingParams(n=1, prompt_token_ids: [1, 2, 3, 4]'"
    imported = load(
        tmp_path,
        line(details("a", [1, 2], evil)),
        line(received("a", eos=True, most=6, stop="'max_tokens=77, min_tokens=77'")),
    )
    assert imported.trace.requests == (TraceRequest(0.0, 2, 6, (0,)),)


def test_another_block_size_can_be_named(tmp_path: Path) -> None:
    imported = load(tmp_path, line(details("a", range(40))), line(received("a", eos=True)), block_size=32)
    assert imported.trace.block_size == 32
    assert imported.trace.requests[0].block_hashes == (0, 1)


def test_a_date_that_no_calendar_has_is_refused_with_its_row(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="row 2: the date is 13-45 12:00:00"):
        load(tmp_path, line(details("a", [1])), line(received("a"), time="13-45 12:00:00"))


MESSAGES = st.sampled_from(
    [
        details("a", [1, 2]),
        details("b", range(40)),
        received("a", eos=True),
        received("b", most="None"),
        received("b", eos=True, most=0),
        received("c", n=2),
        "Received request a: ",
        "Request a aborted.",
        "Generated response a: output_token_ids: [1,,2]",
        "Generated response b: output_token_ids: (5, 6)",
        "Request b details: prompt: 'x', prompt_token_ids: [99999999999, 1]",
        "Request a details: prompt: prompt_token_ids: [",
        "'max_log_len': 40",
        "\x1b[0m",
    ]
)


TIMES = st.sampled_from(["11-30 12:00:00", "11-30 12:00:09", "01-01 00:00:00", "00-00 99:00:00"])


@given(st.lists(st.tuples(MESSAGES, TIMES, st.integers(0, 200)), max_size=12))
def test_any_log_gives_a_trace_whose_account_adds_up_or_one_message(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[str, str, int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.log"
    lines = [line(message, time=time)[: 40 + cut if cut < 100 else None] for message, time, cut in parts]
    path.write_text("\n".join(lines))
    refusal = ""
    try:
        imported = import_trace(path, format_name="vllm-log")
    except InvalidInput as error:
        refusal = str(error)
    if refusal:
        assert refusal.startswith(str(path))
        return
    whole = [text for text in lines if "] Received request " in text and ": " in text.partition("Received request ")[2]]
    assert imported.ledger.rows_read == len(whole)
    assert imported.ledger.rows_read == imported.ledger.kept + sum(imported.ledger.dropped.values())
    write_trace(imported.trace, path.with_suffix(".jsonl"))
    assert read_trace(path.with_suffix(".jsonl")) == imported.trace


SAMPLES = Path(__file__).with_name("vllm_samples")


@pytest.mark.parametrize("version", ["0.27.1", "0.32.0"])
def test_a_log_that_vllm_really_wrote_comes_in(version: str) -> None:
    """Written by the CPU build with a tiny model; lines of nine requests, the words of their prompts cut by hand."""
    imported = import_trace(SAMPLES / f"{version}.log")
    assert imported.ledger.format == "vllm-log"
    assert imported.ledger.rows_read == 9
    assert imported.ledger.dropped == {NO_GENERATION: 1, NO_LENGTH: 1, SEVERAL: 1, ABORTED: 1}
    found = [(request.prompt_tokens, request.output_tokens) for request in imported.trace.requests]
    assert found == [(220, 5), (220, 5), (70, 7), (80, 6), (220, 5)]
    third, fourth = (imported.trace.requests[place].block_hashes for place in (2, 3))
    assert tuple(third)[:4] == tuple(fourth)[:4]
    assert third[4] != fourth[4]
