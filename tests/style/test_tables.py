"""README's figures are those of the files in benchmarks/results."""

from __future__ import annotations

from tools.tables import README, render


def test_readme_tables_are_fresh() -> None:
    text = README.read_text(encoding="utf-8")
    assert render(text) == text, "run python -m tools.tables"
