"""Plain technical English: phrases that name no actor, and docstrings that open without a verb or a noun."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.style.tree import read_texts

PHRASES = (
    "whoever",
    "nobody",
    "somebody",
    "thrice",
    "for ever",
    "is told",
    "are told",
    "is believed",
    "is heard",
    "so much",
    "so many",
    "as it is",
    "goes away",
    "gives way",
    "at the very",
    "by and by",
)
"""Name the actor (client, daemon, mover, engine, caller, waiter, operator) or the field's word instead."""

OPENINGS = ("What", "Who", "Whom", "Whoever", "Whose", "How", "Which", "Why", "Where", "Whether", "Of", "As")
"""A docstring opens with an imperative verb, or with a noun phrase that names the thing."""

QUOTED = ("examples/texts/", "tests/style/test_english.py")
"""Texts of other authors, and the list itself."""

GAP = r"\s+(?:(?:#+|//+|\*)\s+)?"  # a phrase may run over the end of a comment's line
PATTERN = re.compile(
    r"(?<![\w-])(?:" + "|".join(GAP.join(each.split()) for each in PHRASES) + r")(?!\w)", re.IGNORECASE
)
OPENING = re.compile(r"\W*(?:" + "|".join(OPENINGS) + r")\b")
QUOTED_OPENING = re.compile(r"[\"']" + OPENING.pattern)


def test_texts_are_plain_english() -> None:
    found = [f"{name}:{hit}" for name, text in ours() for hit in find_phrases(text, is_code=name.endswith(".py"))]
    assert not found, "name the actor, or use the field's word:\n" + "\n".join(found)


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    found = [f"{name}:{hit}" for name, text in ours(".py") for hit in find_openings(text)]
    assert not found, "open with an imperative verb or a noun phrase:\n" + "\n".join(found)


@pytest.mark.parametrize("bad", ["for ever", "For\never", "# it waits for\n    # ever", "it Is told", "Nobody's"])
def test_phrases_are_found_over_line_ends(bad: str) -> None:
    assert len(list(find_phrases(f"x = 1  # one\n{bad}\n"))) == 1


@pytest.mark.parametrize("good", ["forever", "test_nobody_waits", "`user` is toldo", "so-much", "as it isolates"])
def test_parts_of_other_words_pass(good: str) -> None:
    assert list(find_phrases(good)) == []


def test_names_of_code_are_not_judged() -> None:
    assert list(find_phrases("nobody = 1  # so many\n", is_code=True)) == ["1: so many"]


def test_openings_are_those_of_docstrings() -> None:
    assert list(find_openings('"""What it is."""\n')) == ["1: What it is."]
    assert list(find_openings('LIMIT = 3\n"""Of pages."""\n')) == ["2: Of pages."]
    assert list(find_openings('X = """How so."""\n\n\ndef f():\n    """Howl at it."""\n')) == []


def ours(*suffixes: str) -> Iterator[tuple[str, str]]:
    """Name and text of every file but those of ``QUOTED``."""
    return ((name, text) for name, text in read_texts(*suffixes) if not name.startswith(QUOTED))


def find_phrases(text: str, *, is_code: bool = False) -> Iterator[str]:
    """Line and words of each banned phrase; of Python code in comments and strings alone."""
    if is_code and PATTERN.search(text):
        text = _without_names(text)
    for match in PATTERN.finditer(text):
        yield f"{text.count(chr(10), 0, match.start()) + 1}: {' '.join(match[0].split())}"


def find_openings(source: str) -> Iterator[str]:
    """Line and first line of each docstring, of a constant too, that opens with a word of ``OPENINGS``."""
    if not QUOTED_OPENING.search(source):  # parsing all files takes seconds
        return
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(said))) if OPENING.match(said):
                yield f"{node.lineno}: {said.strip().splitlines()[0]}"


def _without_names(source: str) -> str:
    """The source with an underscore for each letter of its names and of the values in its f-strings."""
    lines = source.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        row = token.start[0] - 1
        if token.type == tokenize.STRING and token.string[0] in "fF":  # one token, before Python 3.12
            lines[row] = re.sub(r"\{[^{}]*\}", lambda value: "_" * len(value[0]), lines[row])
        if token.type == tokenize.NAME:
            first, last = token.start[1], token.end[1]
            lines[row] = lines[row][:first] + "_" * (last - first) + lines[row][last:]
    return "".join(lines)
