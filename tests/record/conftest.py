"""The fixtures of this folder; what they are made of stands in `recordings`."""

from recordings import record, run_command, serve, started

__all__ = ["record", "run_command", "serve", "started"]
