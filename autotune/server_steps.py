"""What the engine did during a replay: rows of its growing step log, and what it still has to do."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import Final

import pandas as pd

_WORDS: Final = ("scope", "branch")
_OPEN_REQUESTS: Final = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? ([0-9.e+]+)", re.MULTILINE)


class StepTail:
    """Reads a growing step log piece by piece: each row once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._columns: list[str] = []

    def read_new(self) -> pd.DataFrame:
        """Complete rows since the last call; empty where there is none."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:  # not yet, or never: a stock scheduler writes none
            return pd.DataFrame()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        lines = complete.decode("ascii").splitlines()
        if lines and not self._columns:
            self._columns = lines.pop(0).split(",")
        frame = pd.DataFrame([line.split(",") for line in lines], columns=self._columns or None)
        for column in frame.columns:
            if column not in _WORDS:
                frame[column] = pd.to_numeric(frame[column])
        return frame


def open_requests(url: str) -> int | None:
    """Requests that run or wait at the vLLM server at `url`; None where it does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:  # noqa: S310 - base_url checked the scheme
            text = reply.read().decode(errors="replace")
    except (OSError, ValueError):
        return None
    return int(sum(float(count) for count in _OPEN_REQUESTS.findall(text)))
