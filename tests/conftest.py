"""What all tests share."""

from pathlib import Path

import hypothesis
import pytest

# No deadline: the first example may compile the simulator, and the machine may be busy. Same examples in every run.
hypothesis.settings.register_profile("ppas", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ppas")

_SHARED = Path(__file__).resolve().parents[1] / "../shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The reference material beside the project; the test skips where it is absent."""
    if not _SHARED.is_dir():
        pytest.skip("the reference material (../shared) is not beside this checkout")
    return _SHARED
