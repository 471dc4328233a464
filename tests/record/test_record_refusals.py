"""What `ppas trace record` refuses, in one message and before anything is touched."""

import json
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recordings import Serve
from typer.testing import CliRunner

from autotune.cli import app
from autotune.record import journal
from autotune.record.hashes import block_hashes, chunk_hashes
from ppas_core.errors import InvalidInput, NoResult
from traces.format import read_trace

SERVER = ("--to", "http://127.0.0.1:9")
LINES = (
    '{"format": "ppas-recording", "version": 1, "block_size": 16, "started_ns": 5}',
    '{"at_ns": 7, "prompt_tokens": 20, "output_tokens": 2, "by": "ids", "blocks": [1, 2]}',
    '{"left_out": "HTTP status 503"}',
    '{"at_ns": 3, "prompt_tokens": 40, "output_tokens": 2, "by": "text", "bytes": 150, "chunks": [4, 5, 6]}',
)


def refused(*options: object, code: int = 2) -> str:
    found = CliRunner().invoke(app, ["trace", "record", *map(str, options)])
    assert found.exit_code == code, found.output
    assert found.stderr.count("error:") == 1
    return found.stderr


def test_what_cannot_be_recorded_is_refused_in_words(tmp_path: Path) -> None:
    output = tmp_path / "t.jsonl"
    assert "--to is missing" in refused("-o", output)
    assert "is not the address of a server" in refused("-o", output, "--to", "127.0.0.1:8000")
    assert "--for is 'soon'" in refused("-o", output, *SERVER, "--for", "soon")
    assert "--for is '0s'; allowed: 0.001s to 30d" in refused("-o", output, *SERVER, "--for", "0s")
    assert "port is 99999" in refused("-o", output, *SERVER, "--port", 99999)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "choose another --port" in refused("-o", output, *SERVER, "--port", taken.getsockname()[1])
    assert list(tmp_path.iterdir()) == []
    salt = tmp_path / "salt"
    salt.write_text("00" * 32)
    salt.chmod(0o644)
    assert "chmod 600" in refused("-o", output, *SERVER, "--salt-file", salt)
    salt.chmod(0o600)
    salt.write_text("00")
    assert "a salt of 1 bytes; allowed: 32" in refused("-o", output, *SERVER, "--salt-file", salt)
    output.write_text("mine")
    assert "exists" in refused("-o", output, *SERVER)
    assert "exists" in refused("-o", output, "--recover", salt)
    assert "exists" in refused("-o", tmp_path, *SERVER, "--force")
    assert output.read_text() == "mine"
    assert "half a character" in refused("-o", tmp_path / "u", *SERVER, "--name", "\ud800")
    (tmp_path / "t.jsonl.part").write_text("")
    assert "--recover" in refused("-o", output, *SERVER, "--force")


@pytest.mark.parametrize(
    ("place", "line", "words"),
    [
        (0, "nonsense", "is not the journal"),
        (0, '{"format": "ppas-trace"}', "is not the journal"),
        (0, LINES[0].replace("1,", "2,", 1), "recording version 2"),
        (0, LINES[0].replace("16", "0"), "block_size is 0"),
        (1, "nonsense", "line 2: is not JSON"),
        (1, "[1]", "line 2: is not a JSON object"),
        (1, LINES[1].replace("[1, 2]", "5"), "line 2: blocks are no hashes"),
        (1, '{"at_ns": 1}', "line 2: is not a line of a recording"),
    ],
)
def test_an_edited_journal_is_refused_with_its_line(tmp_path: Path, place: int, line: str, words: str) -> None:
    path = tmp_path / "t.part"
    path.write_text("\n".join([*LINES[:place], line, *LINES[place + 1 :]]))
    with pytest.raises(InvalidInput, match=words):
        journal.assemble(path, name="t")
    assert path.exists()


@given(st.integers(0, sum(len(line) + 1 for line in LINES)))
def test_a_journal_cut_at_any_byte_gives_its_whole_lines(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.part"
    content = ("\n".join(LINES) + "\n").encode()[:cut]
    path.write_bytes(content)
    whole = [json.loads(line) for line in LINES if line.encode() in content]
    requests = [row for row in whole if "at_ns" in row]
    try:
        made = journal.assemble(path, name="t")
    except InvalidInput:
        assert not whole
    except NoResult:
        assert whole
        assert not requests
    else:
        assert len(made.trace.requests) == len(requests)
        assert made.trace.requests[-1].arrival_s in (0.0, 4e-9)


def test_a_journal_of_a_prompt_of_any_size_fits_its_blocks(tmp_path: Path) -> None:
    path = tmp_path / "t.part"
    rows = []
    for place, (tokens, text_bytes) in enumerate(
        [(1, 1), (16, 64), (17, 3), (40, 5000), (5000, 40), (33, 128), (16, 64)]
    ):
        chunks = chunk_hashes(b"a" * text_bytes, b"s" * 32, b"")
        rows.append(
            {"at_ns": place, "prompt_tokens": tokens, "output_tokens": 1, "bytes": text_bytes, "chunks": chunks}
        )
    path.write_text("\n".join([LINES[0], *map(json.dumps, rows)]))
    made = journal.assemble(path, name="t")
    assert made.ledger.without_block_hashes == 0
    assert made.trace.requests[1].block_hashes == made.trace.requests[6].block_hashes


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 7)
)  # fmt: skip
def test_hashes_are_equal_just_as_far_as_the_blocks_are(first: list[int], second: list[int], size: int) -> None:
    one, two = (block_hashes(ids, size, b"s" * 32, b"m") for ids in (first, second))
    for place, (mine, other) in enumerate(zip(one, two, strict=False)):
        assert (mine == other) == (first[: (place + 1) * size] == second[: (place + 1) * size])
    assert not set(one) & set(block_hashes(first, size, b"t" * 32, b"m"))
    assert not set(one) & set(block_hashes(first, size, b"s" * 32, b"n"))


def test_a_trace_without_any_hash_has_no_block_size(tmp_path: Path, serve: Serve) -> None:
    path = tmp_path / "t.part"
    path.write_text("\n".join([LINES[0], LINES[1].replace("[1, 2]", "[1]")]))
    found = CliRunner().invoke(app, ["trace", "record", "--recover", str(path), "-o", str(tmp_path / "t.jsonl")])
    assert "1 requests are kept without block hashes" in found.stdout
    assert read_trace(tmp_path / "t.jsonl").block_size is None
