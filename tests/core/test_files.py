"""Files are written whole or not at all, and never in place of something that is no file."""

import os
import socket
import stat
from pathlib import Path

import pytest

from ppas_core.files import write_atomically


def test_a_pipe_is_refused_and_left_in_place(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(FileExistsError, match="name a regular file"):
        write_atomically(pipe, b"x")
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    assert [file.name for file in tmp_path.iterdir()] == ["pipe"]


def test_a_socket_behind_a_link_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's address is short
    with socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.bind("socket")
        Path("link").symlink_to("socket")
        with pytest.raises(FileExistsError, match="device, pipe or socket"):
            write_atomically(Path("link"), b"x")
        assert stat.S_ISSOCK(Path("link").stat().st_mode)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="is a folder"):
        write_atomically(tmp_path, b"x")


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_written_through_and_stays(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there/file", tmp_path / "link"
    if exists:
        target.write_bytes(b"old")
    link.symlink_to("there/file")
    write_atomically(link, [b"n", b"ew"])
    assert (link.is_symlink(), target.is_symlink(), target.read_bytes()) == (True, False, b"new")


def test_a_loop_of_links_is_an_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic link"):
        write_atomically(tmp_path / "a", b"x")
    assert (tmp_path / "a").is_symlink()


def test_a_name_of_the_greatest_length_can_be_written(tmp_path: Path) -> None:
    write_atomically(tmp_path / ("ü" * 127), b"x")
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"x"]


def test_what_fails_in_mid_writing_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    def parts() -> list[bytes]:
        raise RuntimeError("no more")

    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(RuntimeError):
        write_atomically(tmp_path / "file", (part for _ in [0] for part in parts()))
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("file", b"old")]
