"""Which settings are not tried again since a server ended under them."""

from pathlib import Path

import pytest

from autotune.server_deaths import Deaths
from ppas_core.errors import NoResult
from ppas_core.policy import PolicyParams

REFERENCE, OTHER = PolicyParams.static(2048), PolicyParams.static(256)


def test_an_end_under_the_reference_is_not_held_against_it_neither_an_old_one_nor_a_new_one(tmp_path: Path) -> None:
    file = tmp_path / "deadly.json"
    before = Deaths(file)
    for params in (REFERENCE, OTHER):
        before.add(params, "the server died: killed for memory")
    deaths = Deaths(file)
    with pytest.raises(NoResult, match="not tried again"):
        deaths.check(REFERENCE)
    deaths.spare(REFERENCE)
    deaths.check(REFERENCE)
    deaths.add(REFERENCE, "the server died: the GPU fell off the bus")
    for known in (deaths, Deaths(file)):
        known.check(REFERENCE)
        with pytest.raises(NoResult, match="killed for memory"):
            known.check(OTHER)
