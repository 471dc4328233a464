"""The failure table names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "failures.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_failure_of_the_table_names_a_test_that_exists() -> None:
    rows = [
        line for line in TABLE.read_text().splitlines() if line.startswith("| ") and not line.startswith("| failure")
    ]
    assert len(rows) > 40
    for row in rows:
        named = NAMED.findall(row)
        assert named, f"no test shows: {row}"
        for file, name in named:
            source = ROOT / file
            assert source.is_file(), f"{file} does not exist"
            assert re.search(rf"^(async )?def {name}\(", source.read_text(), re.MULTILINE), f"{file} has no {name}"
