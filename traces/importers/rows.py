"""How the rows of a foreign file are reached: CSV by column name, JSON Lines by key, or one JSON document.

A row's number is its line in the file, counted from 1, as an editor or a spreadsheet shows it; in a JSON document it is
the request's place in the list.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Final

from ppas_core.errors import InvalidInput
from traces.importers.values import shown
from traces.lines import numbered_lines

Row = tuple[int, Mapping[str, Any]]

_MAX_DOCUMENT_CHARS: Final = 2**30


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        raise ValueError(text) from None


# Fractions keep all their digits; NaN and Infinity come through as floats, for the column's own check to name.
_DECODER = json.JSONDecoder(parse_float=_decimal)


def first_character(path: Path) -> str:
    """The first character of the file that is not white space: `{` and `[` begin JSON. Raises InvalidInput if empty."""
    for _, line in numbered_lines(path):
        return line.lstrip()[0]
    raise InvalidInput(f"{path}: the file is empty; a trace has at least one request")


def json_rows(path: Path) -> Iterator[Row]:
    """The objects of a JSON Lines file."""
    for number, line in numbered_lines(path):
        try:
            data = _DECODER.decode(line)
        except (ValueError, RecursionError):
            raise InvalidInput(f"{path}, row {number}: is not JSON: {shown(line)}") from None
        if not isinstance(data, dict):
            raise InvalidInput(f"{path}, row {number}: is {shown(data)}; allowed: one JSON object a line")
        yield number, data


def json_document(path: Path) -> dict[str, Any]:
    """A file that is one JSON object."""
    lines, length = [], 0
    for _, line in numbered_lines(path):
        length += len(line)
        if length > _MAX_DOCUMENT_CHARS:
            raise InvalidInput(f"{path}: is longer than {_MAX_DOCUMENT_CHARS} characters; save fewer requests")
        lines.append(line)
    try:
        data = _DECODER.decode("\n".join(lines))
    except (ValueError, RecursionError):
        raise InvalidInput(f"{path}: is neither JSON Lines nor one JSON document; is it cut?") from None
    if not isinstance(data, dict):
        raise InvalidInput(f"{path}: is {shown(data)}; allowed: one JSON object")
    return data


def csv_columns(path: Path) -> list[str]:
    """The column names of a CSV file, from its first row."""
    for _, line in numbered_lines(path):
        return _fields(path, line)
    raise InvalidInput(f"{path}: the file is empty; a trace has at least one request")


def csv_rows(path: Path) -> Iterator[Row]:
    """The rows of a CSV file under its header, by column name."""
    lines = _Lines(path)
    reader = csv.reader(lines, strict=True)
    try:
        columns = [name.strip() for name in next(reader, [])]
        if repeated := sorted({name for name in columns if columns.count(name) > 1}):
            raise InvalidInput(
                f"{path}, row {lines.number}: the column {shown(repeated[0])} is there twice; rename one"
            )
        for read, fields in enumerate(reader, start=2):
            if lines.read != read:
                raise InvalidInput(f"{path}, row {lines.number}: a quoted field runs over a line end; close the quotes")
            if len(fields) != len(columns):
                raise InvalidInput(
                    f"{path}, row {lines.number}: has {len(fields)} fields, {shown(','.join(fields))}; "
                    f"the header has {len(columns)}; is the row cut?"
                )
            yield lines.number, dict(zip(columns, fields, strict=True))
    except csv.Error as error:
        raise InvalidInput(f"{path}, row {lines.number}: is not CSV: {error}: {shown(lines.text)}") from None


class _Lines(Iterator[str]):
    """The lines that are not blank, and which one was read last."""

    def __init__(self, path: Path) -> None:
        self._lines = numbered_lines(path)
        self.number = self.read = 0
        self.text = ""

    def __next__(self) -> str:
        self.number, self.text = next(self._lines)
        self.read += 1
        return self.text


def _fields(path: Path, line: str) -> list[str]:
    try:
        return [name.strip() for name in next(csv.reader([line], strict=True))]
    except csv.Error as error:
        raise InvalidInput(f"{path}, row 1: is not CSV: {error}: {shown(line)}") from None
