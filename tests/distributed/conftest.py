"""Database servers of the tests' own."""

from collections.abc import Iterator

import pytest
from mariadb import MariaDb, mariadb, program
from postgres import Postgres, postgres, programs


@pytest.fixture
def server() -> Iterator[Postgres]:
    if programs() is None:
        pytest.skip("PostgreSQL is not installed; scripts/install_postgres.sh installs it on Debian")
    pytest.importorskip("psycopg", reason="psycopg is not installed; it comes with ppas-autotune[distributed]")
    with postgres() as running:
        yield running


@pytest.fixture
def mysql() -> Iterator[MariaDb]:
    if program() is None:
        pytest.skip("MariaDB is not installed; scripts/install_mariadb.sh installs it on Debian")
    pytest.importorskip("pymysql", reason="pymysql is not installed; it comes with ppas-autotune[distributed]")
    with mariadb() as running:
        yield running
