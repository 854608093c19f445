"""Outer limits of a file and a function: a subject decides where a file ends, not these."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.style.tree import list_functions, read_texts

FILE_LINES = 900
FUNCTION_LINES = 100
SOURCES = (".py", ".cu", ".cuh", ".cpp", ".h", ".proto", ".sh")


def test_files_are_short() -> None:
    long = [
        f"{name}: {lines} lines" for name, text in read_texts(*SOURCES) if (lines := count_lines(text)) > FILE_LINES
    ]
    assert not long, f"more than {FILE_LINES} lines; which second idea can leave?\n" + "\n".join(long)


def test_functions_are_short() -> None:
    long = [f"{name}:{found}" for name, text in read_texts(".py") for found in find_long_functions(text)]
    assert not long, f"more than {FUNCTION_LINES} lines:\n" + "\n".join(long)


def test_a_function_of_the_limit_passes_and_one_line_more_does_not() -> None:
    body = "    x = 1\n" * (FUNCTION_LINES - 1)
    assert list(find_long_functions(f"def fits():\n{body}")) == []
    assert list(find_long_functions(f"@wraps\nasync def grows():\n{body}    y = 2\n")) == ["2 grows: 101 lines"]
    assert count_lines("one\ntwo\n") == 2


def count_lines(text: str) -> int:
    return len(text.splitlines())


def find_long_functions(source: str) -> Iterator[str]:
    if count_lines(source) <= FUNCTION_LINES:
        return
    for function in list_functions(source):
        lines = last_line(function) - function.lineno + 1
        if lines > FUNCTION_LINES:
            yield f"{function.lineno} {function.name}: {lines} lines"


def last_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    return function.end_lineno
