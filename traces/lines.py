"""How a text file of records, plain or gzip, is read line by line without ever being in memory as a whole."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Final

from ppas_core.errors import InvalidInput

MAX_LINE_BYTES: Final = 64 * 2**20
"""Longest line that is read; a record of a million block ids is far below it."""


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of `path` that are not blank, without their ends, each with its number in the file, from 1.

    Gzip is known by its first bytes, whatever the name. A byte-order mark is skipped, and a carriage return at a line's
    end; the last line needs no end. Raises InvalidInput, with the path, for a file that cannot be read or is not UTF-8.
    """
    number = 1
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            # Lines of bytes end at \n alone: a name may hold characters that splitting text would split at.
            with gzip.GzipFile(fileobj=raw) if packed else nullcontext(raw) as file:
                while line := file.readline(MAX_LINE_BYTES):
                    if len(line) == MAX_LINE_BYTES:
                        raise InvalidInput(f"{path}, line {number}: is longer than {MAX_LINE_BYTES} bytes")
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                    if text.strip():
                        yield number, text
                    number += 1
    except FileNotFoundError:
        raise InvalidInput(f"{path}: there is no such file") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: is not UTF-8 text (line {number}, byte {error.start} of it)") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidInput(f"{path}: cannot be read: {error}") from None
    except ValueError as error:  # a zero byte, or half a character
        raise InvalidInput(f"{str(path)!r}: is no file name: {error}") from None
