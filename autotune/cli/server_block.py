"""Options of live studies about their server, and what they make of a study file's `server:` block."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppas_core.errors import InvalidInput

if TYPE_CHECKING:
    from autotune.spec import StudySpec

ServerUrl = Annotated[
    str | None,
    typer.Option(
        "--server-url",
        help="Measure on this running server, started with P-PAS, instead of starting one; its settings are changed "
        "through its route (token: PPAS_HTTP_TOKEN) and put back.",
        show_default=False,
    ),
]
SettingsFile = Annotated[
    Path | None,
    typer.Option(
        help="With --server-url: change settings through the file that the server watches.", show_default=False
    ),
]
TokenFile = Annotated[
    Path | None, typer.Option(help="With --server-url: a file with the route's token.", show_default=False)
]
RestartPerTrial = Annotated[
    bool,
    typer.Option(
        "--restart-per-trial", help="Start the server anew for each setting instead of switching; for comparison."
    ),
]


def as_block(
    spec: StudySpec,
    url: str | None,
    settings_file: Path | None,
    token_file: Path | None,
    restart_per_trial: bool = False,
) -> dict[str, Any] | None:
    """The `server:` block under these options, None where they change nothing. Raises InvalidInput.

    With a URL, what the file says of a server to be started (flags, environment, wrapper) is left out. Files are
    looked for from where the command runs.
    """
    if url is None and not restart_per_trial:
        if settings_file is not None or token_file is not None:
            raise InvalidInput("--settings-file and --token-file go with --server-url; give the server's address")
        return None
    if spec.server is None:
        raise InvalidInput(
            "--server-url and --restart-per-trial are for live studies; this one has no server: block (backend: vllm)"
        )
    if url is not None:
        from autotune.replay.run import base_url

        base_url(url)  # refused here, before a plan is made and told
    if url is not None and restart_per_trial:
        raise InvalidInput("--restart-per-trial starts servers, --server-url joins one; give one of them")
    block = spec.server.model_dump()
    if url is None:
        return {**block, "restart_per_trial": True}
    block |= {"url": url, "flags": (), "environment": {}, "wrapper": (), "restart_per_trial": False}
    if settings_file is not None or token_file is not None:
        named = {"settings_file": settings_file, "token_file": token_file}
        block |= {key: None if file is None else str(file.resolve()) for key, file in named.items()}
    return block
