"""Words that stand for a habit that we do not want."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.style.tree import read_texts


@dataclass(frozen=True)
class Ban:
    """Banned pattern, in files whose names match ``where``, and what to do instead."""

    name: str
    pattern: str
    instead: str
    where: str = ""

    def find(self, name: str, text: str) -> Iterator[str]:
        if not re.search(self.where, name):
            return
        for number, line in enumerate(text.splitlines(), start=1):
            if re.search(self.pattern, line):
                yield f"{name}:{number}: {line.strip()}"


BANS = (
    Ban("sleep", r"\btime\.sleep\(", "wait for the event itself", where=r"^tests/.*\.py$"),
    Ban("mock", r"unittest[.]mock|unittest import [m]ock|\bMagic[M]ock\b", "a fake at a seam", where=r"\.py$"),
    Ban("open end", r"\b(?:TO[D]O|FIX[M]E|XX[X])\b(?!\(#\d+\): \S)", "name the issue and the reason"),
    Ban("machine path", r"(?<![\w.])/(?:work|root|home/\w+)/", "a path that every machine has"),
    Ban(
        "ledger",
        r"\bcore\.ledger\b",
        "a question",
        where=r"^cachesvc/service/(?!loop/node|calls/dispatcher).*\.py$",
    ),
    Ban(
        "registry host",
        r"pypi\.org|pythonhosted\.org|npmjs\.(?:org|com)",
        "each machine's own settings name it",
    ),
)


@pytest.mark.parametrize("ban", BANS, ids=lambda ban: ban.name)
def test_no_banned_words(ban: Ban) -> None:
    found = [hit for name, text in read_texts() for hit in ban.find(name, text)]
    assert not found, f"{ban.instead}:\n" + "\n".join(found)


def test_no_failure_is_swallowed() -> None:
    found = [f"{name}:{line}" for name, text in read_texts(".py") for line in find_swallowed(text)]
    assert not found, "catch by name, where code can act:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("ban", "bad", "good"),
    [
        ("sleep", "time" + ".sleep(1)", "await asyncio.sleep(0)"),
        ("mock", "from unittest import " + "mock", "import unittest"),
        ("mock", "import unittest" + ".mock as m", "mocked = 1"),
        ("open end", "# TO" + "DO: later", "# TO" + "DO(#7): later, since the driver lacks it"),
        ("open end", "# FIX" + "ME", "a fixture"),
        ("machine path", 'open("/wo' + 'rk/main/x")', "open(framework/work/x)"),
        ("machine path", "cd /home/" + "ann/src", "/homes/ann"),
        ("registry host", "https://py" + "pi.org/simple", "a PyPI package"),
    ],
)
def test_a_ban_knows_bad_from_good(ban: str, bad: str, good: str) -> None:
    rule = next(rule for rule in BANS if rule.name == ban)
    assert list(rule.find("tests/unit/test_x.py", f"first\n{bad}\n")) == [f"tests/unit/test_x.py:2: {bad}"]
    assert list(rule.find("tests/unit/test_x.py", f"first\n{good}\n")) == []


def test_the_ledger_is_read_by_questions_and_run_by_the_node_and_the_dispatcher_alone() -> None:
    ledger = next(rule for rule in BANS if rule.name == "ledger")
    line = "x = self.core" + ".ledger.models\n"
    assert list(ledger.find("cachesvc/service/rpc/x.py", line))
    for allowed in ("cachesvc/service/loop/node.py", "cachesvc/service/calls/dispatcher.py", "cachesvc/questions/x.py"):
        assert not list(ledger.find(allowed, line))


def test_sleep_is_banned_in_tests_alone() -> None:
    sleep = BANS[0]
    assert list(sleep.find("cachesvc/daemon.py", "time" + ".sleep(1)")) == []


@pytest.mark.parametrize("caught", ["", " Exception", " BaseException", " (OSError, Exception)", " Exception as error"])
def test_swallowing_everything_is_found(caught: str) -> None:
    assert list(find_swallowed(f"try:\n    f()\nexcept{caught}:\n    pass\n")) == [3]
    assert list(find_swallowed(f"try:\n    f()\nexcept{caught}:\n    '''why'''\n    ...\n")) == [3]
    assert list(find_swallowed(f"try:\n    f()\nexcept{caught}:\n    raise\n")) == []


def test_passing_over_a_named_error_is_no_swallowing() -> None:
    assert list(find_swallowed("try:\n    f()\nexcept FileNotFoundError:\n    pass\n")) == []


def find_swallowed(source: str) -> Iterator[int]:
    """Lines of handlers that catch everything and do nothing."""
    if not re.search(r"\bexcept\s*:|\bexcept\b[^:]*Exception\b", source):  # parsing all files takes seconds
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and all(map(_is_nothing, node.body)):
            yield node.lineno


def _is_broad(caught: ast.expr | None) -> bool:
    match caught:
        case None:
            return True
        case ast.Tuple(elts=kinds):
            return any(map(_is_broad, kinds))
        case ast.Name(id="Exception" | "BaseException"):
            return True
    return False


def _is_nothing(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )
