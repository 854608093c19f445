"""Figures are those of the files in benchmarks/results."""

from __future__ import annotations

import re

from tools.tables import PAGES, TABLE, TABLES, render


def test_tables_are_fresh() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert render(text) == text, f"{page.name}: run python -m tools.tables"


def test_no_marker_is_passed_over_and_no_table_unused() -> None:
    """One that ``render`` does not see would keep whatever stands below it."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = re.findall("<!-- table:(.*)-->", text)
    assert [name.strip() for name in named] == TABLE.findall(text)
    assert {name.strip() for name in named} == set(TABLES)
