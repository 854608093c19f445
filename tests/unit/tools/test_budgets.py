"""Budgets against results: a miss without a reason is reported and fails, and so does a missing figure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.style.tree import ROOT
from tools.budgets import BUDGETS, Budget, figures_at, look, table

ROWS: dict[str, Any] = {
    "machine": {"cpu": "a processor"},
    "rows": [{"way": "in", "width": 8, "ratio": 0.9}, {"way": "in", "width": 64, "ratio": 0.7}, {"way": "out"}],
    "by_size": {"10": 3.0, "1000": 5.0},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.json").write_text(json.dumps(ROWS), encoding="utf-8")
    return tmp_path


def test_the_worst_of_several_figures_counts(folder: Path) -> None:
    ratio = look(Budget("ratio", "a.json", ("rows", {"way": "in"}, "ratio"), ">=", 0.8), folder)
    assert (ratio.figure, ratio.is_met, ratio.is_wrong, ratio.device) == (0.7, False, True, "a processor")
    size = look(Budget("size", "a.json", ("by_size", "*"), "<=", 5.0), folder)
    assert (size.figure, size.is_met, size.is_wrong) == (5.0, True, False)


def test_rows_are_chosen_by_value_and_by_range() -> None:
    assert list(figures_at(ROWS, ("rows", {"way": "in", "width": range(16, 100)}, "ratio"))) == [0.7]
    assert list(figures_at(ROWS, ("rows", {"way": "both"}, "ratio"))) == []
    assert list(figures_at(ROWS, ("absent", "*"))) == []


@pytest.mark.parametrize("file", ["a.json", "none.json"])
def test_what_was_not_measured_is_wrong_unless_it_is_known(folder: Path, file: str) -> None:
    absent = look(Budget("x", file, ("rows", {"way": "both"}, "ratio"), ">=", 1), folder)
    assert (absent.figure, absent.is_wrong, absent.verdict) == (None, True, "NOT MEASURED")
    known = look(Budget("x", file, ("rows", {"way": "both"}, "ratio"), ">=", 1, "no such machine"), folder)
    assert (known.is_wrong, known.verdict) == (False, "not measured: no such machine")


def test_a_reason_that_is_no_longer_true_is_told(folder: Path) -> None:
    found = look(Budget("x", "a.json", ("by_size", "10"), "<=", 4, "it is slow"), folder)
    assert found.verdict == "met by now, no longer: it is slow"
    assert "met by now" in table([found])


def test_every_budget_has_a_figure_and_every_miss_a_reason() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tools.budgets", "--check"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert ended.returncode == 0, ended.stdout
    assert all(budget.name in ended.stdout for budget in BUDGETS)
