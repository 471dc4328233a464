"""`ppas trace import` and its shaping commands, as typed: what is printed, what is written, which exit code."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from autotune.cli import app
from traces.format import read_trace

VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(f"{n},{n + 1},{n % 3}\n" for n in range(12))


def ppas(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.csv"
    path.write_text(VIDUR)
    return path


def test_an_import_prints_its_account_and_keeps_it_in_the_file(tmp_path: Path, source: Path) -> None:
    result = ppas("import", source, "-o", tmp_path / "t.jsonl.gz", "--name", "mine", "--regime", "peak")
    assert result.exit_code == 0
    assert "rows read 12 = kept 8 + dropped 4 (4 without output tokens)" in result.stdout
    trace = read_trace(tmp_path / "t.jsonl.gz")
    assert (trace.name, trace.regime, len(trace.requests)) == ("mine", "peak", 8)
    assert trace.provenance["file"] == "in.csv"
    assert trace.provenance["import"]["dropped"] == {"without output tokens": 4}
    assert trace.digest in result.stdout


def test_json_is_all_that_is_on_stdout_when_asked(tmp_path: Path, source: Path) -> None:
    result = ppas("import", source, "-o", tmp_path / "t.jsonl", "--json", "--spread", 1)
    account = json.loads(result.stdout)
    assert (account["rows_read"], account["kept"]) == (12, 8)
    assert account["digest"] == read_trace(tmp_path / "t.jsonl").digest


def test_a_bad_row_gives_one_message_exit_code_2_and_no_file(tmp_path: Path, source: Path) -> None:
    source.write_text(VIDUR + "99,-4,1\n")
    result = ppas("import", source, "-o", tmp_path / "t.jsonl")
    assert result.exit_code == 2
    assert "row 14: num_prefill_tokens is '-4'" in result.stderr
    assert not (tmp_path / "t.jsonl").exists()


def test_shaping_commands_write_what_they_say(tmp_path: Path, source: Path) -> None:
    whole, part, slow, drawn = (tmp_path / f"{name}.jsonl" for name in ("whole", "part", "slow", "drawn"))
    tuning, held_out = tmp_path / "tuning.jsonl", tmp_path / "held-out.jsonl"
    for command in (
        ("import", source, "-o", whole),
        ("window", whole, "--from", 2, "--to", 8, "-o", part),
        ("scale", whole, "--rate", 0.5, "-o", slow, "--regime", "slow"),
        ("split", whole, "--tuning", tuning, "--held-out", held_out),
        ("resample", whole, "--window", 3, "--seed", 5, "-o", drawn, "--name", "again"),
    ):
        result = ppas(*command)
        assert result.exit_code == 0, result.stderr
    assert [request.arrival_s for request in read_trace(part).requests] == [1, 2, 4, 5]
    assert read_trace(slow).duration_s == 14
    assert read_trace(slow).regime == "slow"
    assert len(read_trace(tuning).requests) + len(read_trace(held_out).requests) == 8
    assert (read_trace(drawn).name, read_trace(drawn).seed) == ("again", 5)


@pytest.mark.parametrize("options", [(), ("--time", 2, "--rate", 1)])
def test_scale_needs_one_way_to_scale(tmp_path: Path, source: Path, options: tuple[object, ...]) -> None:
    ppas("import", source, "-o", tmp_path / "t.jsonl")
    result = ppas("scale", tmp_path / "t.jsonl", "-o", tmp_path / "s.jsonl", *options)
    assert result.exit_code == 2
    assert "give one of --time FACTOR and --rate" in result.stderr
