"""Every row of what runs under vLLM has the evidence that it names."""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

import pytest

from tests.style.tree import ROOT
from tools.tables_vllm import ran, support

ROWS = [row for rows in support().values() for row in rows]
WORDS = {"what": str, "tests": list, "runs": list, "refused": str, "note": str}
FOREIGN = "vLLM: "


@cache
def functions(path: str) -> frozenset[str]:
    """Tests of a file."""
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    return frozenset(each.name for each in body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))


@cache
def sentences() -> tuple[str, ...]:
    """Strings of the connector, "..." for what is filled in."""
    found = []
    for path in sorted((ROOT / "client" / "cachesvc_vllm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [str(each.value) if isinstance(each, ast.Constant) else "..." for each in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["what"])
def test_a_row_has_its_evidence(row: dict[str, Any]) -> None:
    assert all(isinstance(value, WORDS[name]) for name, value in row.items())
    for test in row.get("tests", ()):
        path, _, name = test.partition("::")
        assert name in functions(path), f"{path} has no {name}"
    for run in row.get("runs", ()):
        gpu, date = ran(run)
        assert gpu, run
        assert date, run
    words = row.get("refused", FOREIGN)
    if not words.startswith(FOREIGN):
        assert "runs" not in row
        assert row["tests"]
        assert any(words in each for each in sentences()), f"the connector does not say: {words}"


def test_no_row_stands_twice() -> None:
    assert len({row["what"] for row in ROWS}) == len(ROWS)
