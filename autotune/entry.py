"""The `ppas` command before anything is imported: says which extra is missing. Standard library alone."""

from __future__ import annotations

import sys

_OURS = ("autotune", "ppas_core", "reports", "search_spaces", "traces")


def main() -> None:
    """Runs the command line; exits with 2 and the remedy where its packages are not installed."""
    try:
        from autotune.cli import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in _OURS:
            raise
        print(
            f"ppas: the package {error.name!r} is not installed; this environment has the scheduler alone.\n"
            "For the tuner: pip install 'ppas-autotune[tune]'",
            file=sys.stderr,
        )
        sys.exit(2)
    except KeyboardInterrupt:  # the imports take a second
        sys.exit(130)
    app()


if __name__ == "__main__":
    main()
