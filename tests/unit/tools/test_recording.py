"""Results are JSON that says what was found, a row a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.recording import render, write_result

ROWS: list[dict[str, Any]] = [{"way": "in", "gb_per_s": 1 / 3, "note": "x" * 200}, {"way": "out", "gb_per_s": 2.0}]


@pytest.mark.parametrize(
    "found",
    [{}, {"a": 1}, {"a": [], "b": {}, "c": None}, {"rows": ROWS}, {"a": {"b": {"c": list(range(200))}}}, {"é": "ü\n"}],
)
def test_what_is_written_is_what_was_found(found: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    write_result(path, found)
    assert json.loads(path.read_text(encoding="utf-8")) == found


def test_a_row_is_a_line_however_long() -> None:
    lines = render({"rows": ROWS, "series": list(range(500))}).splitlines()
    assert len(lines) == 7
    assert json.loads(lines[2].rstrip(",")) == ROWS[0]
