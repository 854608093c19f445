"""Commands and goals in the documents exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest

from tests.style.tree import ROOT, read_texts


def test_every_goal_that_the_docs_name_exists() -> None:
    goals = list_goals((ROOT / "Makefile").read_text())
    unknown = [
        f"{name}: make {goal}" for name, text in read_texts(".md") for goal in find_goals(text) if goal not in goals
    ]
    assert not unknown, "\n".join(unknown)


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
