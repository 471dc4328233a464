"""A PostgreSQL server of the tests' own."""

from collections.abc import Iterator

import pytest
from postgres import Postgres, postgres, programs


@pytest.fixture
def server() -> Iterator[Postgres]:
    if programs() is None:
        pytest.skip("PostgreSQL is not installed; scripts/install_postgres.sh installs it on Debian")
    pytest.importorskip("psycopg", reason="psycopg is not installed; it comes with ppas-autotune[distributed]")
    with postgres() as running:
        yield running
