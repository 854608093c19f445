"""Every test that tests/README.md names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent


def test_the_tests_that_the_table_names_are_there() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w*)`", (TESTS / "README.md").read_text(encoding="utf-8"))
    assert len(named) > 50
    missing = [f"{file}::{name}" for file, name in named if not is_there(TESTS / file, name)]
    assert missing == []


def is_there(path: Path, name: str) -> bool:
    """True where the file has a function of that name, a name bound to a test case, or no name was asked for."""
    if not path.exists():
        return False
    bound = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            bound.add(node.name)
        elif isinstance(node, ast.Assign):
            bound.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return not name or name in bound
