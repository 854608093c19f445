"""Commands and goals in the documents exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

import pytest

from tests.style.tree import ROOT, list_files, read_texts

ROOTS = ("", "cachesvc/", "client/")
"""Folders that the map leaves out."""
LIBRARY = ("random.py",)
"""Files of Python's library."""
LABEL = "cachesvc/gpus"
"""A label of Kubernetes, which looks like a path."""


def test_every_goal_that_the_docs_name_exists() -> None:
    goals = list_goals((ROOT / "Makefile").read_text())
    unknown = [
        f"{name}: make {goal}" for name, text in read_texts(".md") for goal in find_goals(text) if goal not in goals
    ]
    assert not unknown, "\n".join(unknown)


def test_every_file_and_module_that_a_document_names_exists() -> None:
    files = list_files()
    missing = [
        f"{name}: {path}"
        for name, text in read_texts(".md")
        if name != "CHANGELOG.md"  # names of its own time
        for path in find_missing(text, files)
    ]
    assert not missing, "\n".join(missing)


def test_every_file_that_a_comment_or_docstring_names_exists() -> None:
    tails = {path.split("/", at)[-1] for path in list_files() for at in range(path.count("/") + 1)}
    missing = [
        f"{name}: {path}"
        for name, text in read_texts(".py")
        if name.startswith(("cachesvc/", "client/", "gpu_ops/"))
        for path in re.findall(r"``((?:[\w-]+/)*[\w-]+\.py)``", text)
        if path not in tails and path not in LIBRARY
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("See `cachesvc/wire/lane.py`, `wire/lane.py`, `lane.py` and `cachesvc/wire/`.", []),
        (
            "See `cachesvc/wire/gone.py`, `ire/lane.py` and `cachesvc/gone/`.",
            ["cachesvc/wire/gone.py", "ire/lane.py", "cachesvc/gone"],
        ),
        ("`tests/unit/test_x.py::test_a` and `tests/unit/test_*.py`", ["tests/unit/test_x.py"]),
        ("Run `python -m cachesvc.wire.lane --json OUT` or `python -m cachesvc.wire`.", []),
        ("Run `python -m cachesvc.wire.gone`; `cachesvc.wire.Lane` is a class.", ["cachesvc.wire.gone"]),
    ],
)
def test_a_missing_file_is_found(text: str, missing: list[str]) -> None:
    files = ["cachesvc/wire/__init__.py", "cachesvc/wire/lane.py"]
    assert list(find_missing(text, files)) == missing


def test_a_file_of_the_map_without_a_folder_lies_beside_the_one_before_it() -> None:
    assert list(find_astray((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"), list_files())) == []


def test_a_file_beside_none_is_found() -> None:
    files = ["cachesvc/wire/lane.py", "cachesvc/wire/parse.py", "client/cachesvc_client/client.py"]
    assert list(find_astray("| the lane | `wire/lane.py`, `parse.py`; `cachesvc_client/client.py` |", files)) == []
    assert list(find_astray("| the lane | `wire/lane.py`, `lease.py` |\n| more | `parse.py` |", files)) == [
        "lease.py",
        "parse.py",
    ]


def test_the_map_is_short() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split()) <= 1800, "docs/internals.md has reasons"


def test_every_goal_has_a_line_of_help() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony is not None
    assert set(phony[1].split()) == set(re.findall(r"^([a-z0-9-]+):.*## \S", makefile, re.MULTILINE))


@pytest.mark.parametrize(
    ("text", "goals"),
    [
        ("Run `make test`, then make sure that it passed.", ["test"]),
        ("Run `make PYTHON=python3.12 lint types PYTEST_ARGS='-k a'`.", ["lint", "types"]),
        (
            "```sh\n$ make demo  # make it run\nmake bench && make clean\n```\nmake no-goal",
            ["demo", "bench", "clean"],
        ),
        ("`make -C sub` and `cmake build` and `make`", []),
    ],
)
def test_goals_are_found_in_code_alone(text: str, goals: list[str]) -> None:
    assert list(find_goals(text)) == goals


def find_missing(markdown: str, files: Sequence[str]) -> Iterator[str]:
    """Paths and modules in inline code that no file has. A path may leave out the folders above it."""
    tails, folders = set(), set()
    for name in files:
        parts = name.split("/")
        tails |= {"/".join(parts[at:]) for at in range(len(parts))}
        folders |= {"/".join(parts[:at]) for at in range(1, len(parts))}
    tops = {folder for folder in folders if "/" not in folder}
    for code in re.findall(r"`([^`\n]+)`", markdown):
        for path in re.findall(r"(?<![\w./*~$-])(?:\.\./)*((?:[\w.-]+/)*[\w-]+\.py)(?![\w*])", code):
            if path not in tails:
                yield path
        whole = code.rstrip("/")
        is_path = re.fullmatch(r"(?:[\w.-]+/)+[\w.-]+", whole) and not whole.endswith(".py")
        if whole != LABEL and is_path and whole.partition("/")[0] in tops and whole not in tails | folders:
            yield whole
        for module in re.findall(r"python3? -m ([a-z_0-9.]+)(?![A-Z])", code):
            path = module.replace(".", "/")
            known = {f"{path}.py", f"{path}/__main__.py", f"{path}/__init__.py"} & tails
            if path.partition("/")[0] in tops and not known:
                yield module


def find_astray(markdown: str, files: Sequence[str]) -> Iterator[str]:
    """Files of a table's row that lie in another folder than the file before them, by which they are named."""
    for row in (line for line in markdown.splitlines() if line.startswith("|")):
        folder = ""
        for path in re.findall(r"`([\w/]+\.py)`", row):
            if "/" in path:
                folder = next((found for root in ROOTS if (found := root + path) in files), path).rpartition("/")[0]
            elif f"{folder}/{path}" not in files:
                yield path


def list_goals(makefile: str) -> set[str]:
    return set(re.findall(r"^([a-z][a-z0-9-]*):", makefile, re.MULTILINE))


def find_goals(markdown: str) -> Iterator[str]:
    """Goals after the word make, in inline code and in fenced blocks."""
    is_fenced = False
    for line in markdown.splitlines():
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
            continue
        for code in [line.split("#")[0]] if is_fenced else re.findall(r"`([^`]+)`", line):
            for command in re.split(r"&&|[|;]", code):
                yield from _goals_of(command.strip().removeprefix("$ "))


def _goals_of(command: str) -> Iterator[str]:
    if not command.startswith("make "):
        return
    for word in shlex.split(command)[1:]:
        if word.startswith("-"):
            return
        if "=" not in word:
            yield word
