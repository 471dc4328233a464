"""Readers of run-level results: what they take, what they refuse with the line's number, and that nothing is run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweep_log import row, write_rows
from terminal import COMMAND, ENVIRONMENT

from autotune.runlogs.literal import MAX_CHARACTERS, parse_dict
from autotune.runlogs.read import read_runs
from ppas_core.errors import InvalidInput
from ppas_core.policy import PolicyParams
from traces.format import write_trace
from traces.generate import rag_bursts

CSV = "config,phases,seed,prompt_tokens,output_tokens,num_requests,avg_latency,p95_latency_ms,mean_ttft_s\n"


@pytest.mark.parametrize(
    "text",
    [
        "{'trace_id': __import__('os').system('true')}",
        "{'trace_id': [x for x in (1, 2)]}",
        "{'trace_id': 1 + 1}",
        "{'trace_id': f'{1}'}",
        "{'trace_id': b'x'}",
        "{'trace_id': 1j}",
        "{'trace_id': {1, 2}}",
        "{'trace_id': np.load('file')}",
        "{'trace_id': np.float64('1')}",
        "{'trace_id': 0, 'trace_id': 1}",
        "{1: 2}",
        "{**{}}",
        "{'trace_id': " + "9" * 5000 + "}",
        "{'trace_id': " + "9" * 40 + "}",
        "{'trace_id': " + "[" * 150 + "]" * 150 + "," * 3 + "}",
        "{'trace_id': " + "[" * 5000 + "]" * 5000 + "}",
        "{'trace_id': " + "-" * 30000 + "1}",
        "{'trace_id': '" + "x" * MAX_CHARACTERS + "'}",
        "{'trace_id': 0, 'seed': 1",
        "{'trace_id': 'a\x00b'}",
        "[1, 2]",
        "7",
        "",
    ],
)
def test_what_is_no_dict_of_plain_values_is_refused_in_one_short_sentence(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"^somewhere: ") as caught:
        parse_dict(text, "somewhere")
    assert len(str(caught.value)) < 400


def test_numbers_are_read_however_they_were_printed() -> None:
    text = "{'a': np.float64(0.5), 'b': nan, 'c': -3, 'd': (1, 2), 'e': None, 'f': {'g': True}, 'h': -inf}"
    found = parse_dict(text, "here")
    assert (found["a"], found["c"], found["d"], found["e"], found["f"]) == (0.5, -3, [1, 2], None, {"g": True})
    assert found["b"] != found["b"]
    assert found["h"] == float("-inf")


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_and_never_breaks_the_reader(text: str) -> None:
    try:
        parse_dict("{" + text + "}", "here")
    except InvalidInput as error:
        assert str(error).startswith("here: ")  # noqa: PT017 - either outcome is right


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"avg_latency": "fast"}, "avg_latency is 'fast'"),
        ({"avg_latency": -1.0}, "at least 0 seconds"),
        ({"avg_latency": float("inf")}, "finite number"),
        ({"num_requests": 2.5}, "num_requests is 2.5"),
        ({"num_requests": 0}, "num_requests is 0"),
        ({"num_requests": 10**12}, "num_requests"),
        ({"num_requests": None}, "has no 'num_requests'"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"config_name": ""}, "has no 'config_name'"),
        ({"phase_schedule": "10:0.2,whenever"}, "phase 'whenever'"),
        ({"configured_prompt_tokens": -5}, "token counts"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"failed": True}, "failed is True"),
    ],
)
def test_a_bad_value_is_named_with_its_line(tmp_path: Path, change: dict[str, object], said: str) -> None:
    good, bad = row(), row("mbt_4096_s256") | change
    log = write_rows(tmp_path / "log.txt", [good, bad])
    line = next(n for n, text in enumerate(log.read_text().splitlines(), 1) if repr(bad) in text)
    with pytest.raises(InvalidInput, match=f"log.txt, line {line}: ") as caught:
        read_runs([log])
    assert said in str(caught.value)


def test_a_cut_last_line_is_named_and_not_passed_over(tmp_path: Path) -> None:
    log = write_rows(tmp_path / "log.txt", [row()])
    log.write_text(log.read_text()[:-40])
    with pytest.raises(InvalidInput, match=r"log.txt, line 7: is no dict of plain values"):
        read_runs([log])


def test_a_file_without_runs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("nothing here\n")
    with pytest.raises(InvalidInput, match="holds no run"):
        read_runs([tmp_path / "log.txt"])


def test_a_log_given_twice_counts_once_and_says_so(tmp_path: Path) -> None:
    first, second = (write_rows(tmp_path / name, [row(), row("ppas_")]) for name in ("a.txt", "b.txt"))
    found = read_runs([first, second])
    assert len(found.runs) == 2
    assert any("2 runs stand in an earlier file already" in note for note in found.notes)


def test_settings_of_one_name_but_other_budgets_are_told_apart(tmp_path: Path) -> None:
    rows = [row("ppas_", max_num_batched_tokens=16384), row("ppas_", max_num_batched_tokens=8192), row()]
    names = [run.config for run in read_runs([write_rows(tmp_path / "log.txt", rows)]).runs]
    assert len(set(names)) == 3
    assert "8192" in names[1]
    assert names[2] == "mbt_2048_s256"


def test_requests_find_their_run_before_or_behind_it(tmp_path: Path) -> None:
    runs = [row("mbt_2048_s256", num_requests=2), row("ppas_", num_requests=2)]
    requests = [
        [
            f"REQUEST_RESULT: {{'request_id': {i}, 'config_name': {one['config_name']!r}, 'e2e_latency_ms': {ms}}}"
            for i in (0, 1)
        ]
        for one, ms in zip(runs, (4000, 3000), strict=True)
    ]
    starts = ["START SERVER: vllm serve m/M", "START SERVER: vllm serve m/M"]
    before = [starts[0], *requests[0], repr(runs[0]), starts[1], *requests[1], repr(runs[1])]
    behind = [starts[0], repr(runs[0]), *requests[0], starts[1], repr(runs[1]), *requests[1]]
    one_server = [starts[0], *requests[0], repr(runs[0]), *requests[1], repr(runs[1])]
    for lines in (before, behind, one_server):
        log = tmp_path / "log.txt"
        log.write_text("\n".join(lines) + "\n")
        found = read_runs([log])
        latencies = [list(run.requests.latency_s) for run in found.runs if run.requests is not None]
        assert latencies == [[4.0, 4.0], [3.0, 3.0]]
        assert {run.vllm for run in found.runs} == {"0.27.1"}


def test_requests_under_unknown_names_are_left_out_with_the_names_they_have(tmp_path: Path) -> None:
    log = write_rows(tmp_path / "log.txt", [row(num_requests=1)])
    log.write_text(log.read_text() + "REQUEST_RESULT: {'request_id': 0, 'dauer': 4.0}\n")
    found = read_runs([log])
    assert found.runs[0].requests is None
    assert any("dauer" in note for note in found.notes)


def test_lengths_that_the_trace_contradicts_are_not_believed(tmp_path: Path) -> None:
    mixed = row(prompt_mean=30720.0, prompt_max=65536, output_mean=99.2, output_max=256)
    assert read_runs([write_rows(tmp_path / "log.txt", [mixed])]).runs[0].workload.prompt_tokens == ()


def test_a_table_of_runs_is_read_by_the_names_of_its_columns(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(CSV + 'mbt-2048,"10:0.2,10:0.6,10:0.2,10:0.6,10:0.2",0,25000,32,15,4.0,6000,\n')
    found = read_runs([table])
    (run,) = found.runs
    assert run.metrics == {"mean_latency_s": 4.0, "p95_latency_s": 6.0}
    assert run.workload.regime == "λ=0.6"
    assert any("mean_ttft_s" in note for note in found.notes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (CSV + "mbt-2048,10:1,0\n", "line 2: has 3 cells; the head has 9 columns"),
        (CSV + "mbt-2048,10:1,0,25000,32,15,soon,,\n", "line 2: avg_latency is 'soon'"),
        (CSV + ",10:1,0,25000,32,15,1,,\n", "line 2: has no 'config'"),
        (CSV, "holds no run below its head"),
        ("config,phases\nmbt-2048,10:1\n", "no figure of a run"),
        ("hello\n", "no head of distinct column names"),
        ("config,config\n", "no head of distinct column names"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_with_the_place(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "runs.csv").write_text(text)
    with pytest.raises(InvalidInput, match=said):
        read_runs([tmp_path / "runs.csv"])


def with_pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("command", [["evaluate"], ["fit", "-o", "mine.json"]], ids=["evaluate", "fit"])
@pytest.mark.parametrize("name", ["log.txt", "log.csv", "/dev/zero"])
def test_a_pipe_or_device_is_refused_at_once_and_never_waited_for(
    command: list[str], name: str, tmp_path: Path
) -> None:
    path = Path(name) if name.startswith("/") else with_pipe(tmp_path / name)
    done = subprocess.run(
        [*COMMAND, *command, path],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert re.search(r"is a (pipe|device); allowed: a\s+file", done.stderr)
    assert not (tmp_path / "mine.json").exists()


@pytest.mark.parametrize("name", ["results.json", "profile.json", "trials/0/requests.parquet"])
def test_a_pipe_in_a_run_folder_is_not_waited_for(name: str, tmp_path: Path) -> None:
    (tmp_path / "trials/0").mkdir(parents=True)
    (tmp_path / "identity.json").write_text("{}")
    (tmp_path / "trials/0/settings.json").write_text(json.dumps(PolicyParams.static(2048).to_dict()))
    with_pipe(tmp_path / name)
    script = (
        f"from pathlib import Path; from autotune.runlogs.read import read_runs; read_runs([Path({str(tmp_path)!r})])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, "it ends"
    assert "InvalidInput" in done.stderr


def a_table(folder: Path, trace_file: str) -> Path:
    folder.mkdir(exist_ok=True)
    table = folder / "runs.csv"
    table.write_text(f'config,trace_file,avg_latency\nppas,"{trace_file}",4.0\n')
    return table


def test_a_table_reads_the_traces_in_its_folder_and_below(tmp_path: Path) -> None:
    write_trace(rag_bursts(0.6, 0), tmp_path / "deep/trace.jsonl")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "deep/trace.jsonl")
    for name in ("deep/trace.jsonl", "./deep/trace.jsonl", "link.jsonl"):
        (run,) = read_runs([a_table(tmp_path, name)]).runs
        assert run.workload.arrays is not None


def test_a_table_leads_to_no_file_outside_its_folder(tmp_path: Path) -> None:
    write_trace(rag_bursts(0.6, 0), tmp_path / "outside.jsonl")
    (tmp_path / "table").mkdir()
    (tmp_path / "table/link.jsonl").symlink_to(tmp_path / "outside.jsonl")
    (tmp_path / "table/up").symlink_to(tmp_path)
    (tmp_path / "table/loop").symlink_to(tmp_path / "table/loop")
    for name in (
        "../outside.jsonl", str(tmp_path / "outside.jsonl"), "link.jsonl", "up/outside.jsonl", "/etc/passwd", "x\x00y",
        "../table/runs.csv", str(tmp_path / "table/runs.csv"), "loop",
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match=r"runs\.csv, line 2: trace_file is ") as caught:
            read_runs([a_table(tmp_path / "table", name)])
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["PASSWORD=s3cret\n", '{"s3cret": 1}\n', '{"format": "s3cret"}\n', "\xff s3cret"])
def test_no_line_of_another_file_is_shown_by_a_table_that_names_it(text: str, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(text, encoding="latin-1")
    with pytest.raises(InvalidInput, match="holds no trace that can be read") as caught:
        read_runs([a_table(tmp_path, ".env")])
    assert "s3cret" not in str(caught.value)
    (tmp_path / ".env").unlink()
    with_pipe(tmp_path / ".env")
    with pytest.raises(InvalidInput, match="there is no such file"):
        read_runs([tmp_path / "runs.csv"])
