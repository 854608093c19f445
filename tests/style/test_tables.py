"""README's figures are those of the files in benchmarks/results."""

from __future__ import annotations

import re

from tools.tables import README, TABLE, TABLES, render


def test_readme_tables_are_fresh() -> None:
    text = README.read_text(encoding="utf-8")
    assert render(text) == text, "run python -m tools.tables"


def test_no_marker_is_passed_over() -> None:
    """One that ``render`` does not see would keep whatever stands below it."""
    text = README.read_text(encoding="utf-8") + "".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in TABLES)
    named = re.findall("<!-- table:(.*)-->", text)
    assert [name.strip() for name in named] == TABLE.findall(text)
    assert {name.strip() for name in named} == set(TABLES)
