"""The table of reported failures names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
TABLE = TESTS / "compat" / "known_failures.md"


def test_every_row_names_tests_that_exist() -> None:
    text = TABLE.read_text()
    rows = [
        line for line in text.splitlines() if line.startswith("| ") and "| report |" not in line
    ]
    assert len(rows) >= 45
    sources = {path: path.read_text() for path in TESTS.rglob("*.py")}
    everything = "\n".join(sources.values())
    for row in rows:
        place = row.split("|")[3]
        assert re.search(r"`|why not|README", place), row
        for name in re.findall(r"`(test_\w+)(?:\[\w+\])?`", place):
            assert f"def {name}(" in everything, f"{name} is in the table only"
        for key in re.findall(r'\["([^"]+)"\]', place):
            assert f'"{key}":' in everything, f"{key} is in the table only"
        for name in re.findall(r"`([\w/]+\.py)`", place):
            assert (TESTS / name).is_file() or (TESTS.parent / name).is_file(), name
