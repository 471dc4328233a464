"""Which version a run folder is of, and whether this release can work in it. Knows nothing else of run folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ppas_core.plain_json import load_json
from ppas_core.versions import require_version

RUN_VERSION: Final = 1
"""Of the whole folder: raised whenever an earlier release would misread one of its files. Folders that were made before
versions were written down say none, and are read as version 1."""
AGAIN: Final = "name another folder with --run"


def require_readable_run(path: Path) -> None:
    """Raises InvalidInput, naming both versions, for a run folder of a newer release. What is damaged others refuse."""
    try:
        identity = load_json((path / "identity.json").read_bytes())
    except (OSError, ValueError):
        return
    if isinstance(identity, dict):
        check_run_version(path, identity)


def check_run_version(path: Path, identity: Mapping[str, Any]) -> None:
    """As `require_readable_run`, of what `identity.json` at `path` says."""
    require_version(f"{path}: is a run folder of", identity.get("version", RUN_VERSION), RUN_VERSION, again=AGAIN)
