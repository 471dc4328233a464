"""The one error root. Libraries raise these; only the command line prints them and picks an exit code."""


class PpasError(Exception):
    """Anything that this project reports to its user. The message names the value, the allowed range and the remedy.

    stops_study: whether no further setting can be measured after it (the server does not start); set where it is raised.
    """

    stops_study = False


class InvalidInput(PpasError):
    """What the user gave cannot be used: a setting, a file, a flag. Raised before any expensive work. Exit code 2."""


class InvalidSettings(InvalidInput):
    """A combination of scheduler settings that the policy or the engine does not allow."""


class NoResult(PpasError):
    """The work ran, but nothing that it measured can be used as a result. Exit code 1."""
