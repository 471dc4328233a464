"""The tuner: studies over scheduler settings, paired comparison, choice and export.

From Python, the main job is one call, and its result is typed:

    from autotune import load_results, tune
    results = tune("examples/demo.yaml", "runs/demo")       # as `ppas tune`; resumes what is there
    results.exported.to_params()                            # the setting that is exported
    results.comparisons[0].verdict                          # against the reference, on held-out traces
    results = load_results("runs/demo")                     # a finished run again

Importing this package imports none of its parts: they load with the first call.
"""

from __future__ import annotations

import sys

# Nothing else: the command `ppas` imports this package before it can mind an interrupt.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from autotune.progress import Progress
    from autotune.results import StudyResults
    from autotune.spec import StudySpec

__all__ = ["StudyResults", "StudySpec", "load_results", "tune"]

_LAZY = {"StudyResults": "autotune.results", "StudySpec": "autotune.spec"}


def tune(
    study: str | Path | dict[str, Any] | StudySpec,
    run: str | Path | None = None,
    *,
    progress: Progress | None = None,
) -> StudyResults:
    """Runs a study, or what is left of it, and writes all its outputs: the command `ppas tune` from Python.

    study: a study file; or what such a file says, as a dictionary or a StudySpec, which then names its files from the
    current folder. run: the run folder; default runs/NAME. progress: told how far it is; see `autotune.progress`.
    Returns what `RUN/results.json` holds. Raises InvalidInput for what cannot be studied, before anything is made, and
    NoResult when the reference itself cannot be measured. KeyboardInterrupt leaves every finished trial behind: the
    same call goes on from there.
    """
    from pathlib import Path

    from autotune.cli import pipeline
    from autotune.progress import Silent
    from autotune.spec import load_spec, parse_spec

    base = Path()
    if isinstance(study, str | Path):
        base = Path(study).parent
        spec = load_spec(Path(study))
    else:
        spec = parse_spec(study, "the study") if isinstance(study, dict) else study
    path = Path(run) if run is not None else Path("runs") / spec.name
    return pipeline.run_study(spec, path, base=base, progress=progress or Silent())


def load_results(run: str | Path) -> StudyResults:
    """The results of the finished study in the run folder `run`, or in a `results.json`. Raises InvalidInput."""
    from pathlib import Path

    from autotune.results import StudyResults

    path = Path(run)
    return StudyResults.load(path / "results.json" if path.is_dir() else path)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


class _Package(type(sys)):  # type: ignore[misc]
    """Keeps `tune` the function: importing the submodule of that name would put the module in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name == "tune" and isinstance(value, type(sys))):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
