"""Plain technical English: phrases that name no actor, and docstrings that open without a verb or a noun."""

from __future__ import annotations

import ast
import re
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

OPENINGS = ("What", "Who", "Whoever", "Whose", "How", "Which", "Of", "As")
"""A docstring opens with an imperative verb, or with a noun phrase that names the thing."""

QUOTED = ("examples/texts/", "tests/style/test_english.py")
"""Texts of other authors, and the list itself."""

UNREVISED: tuple[str, ...] = (
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/",
    "cachesvc/__main__.py",
    "cachesvc/command_line.py",
    "cachesvc/daemon.py",
    "cachesvc/flows/",
    "cachesvc/hardware.py",
    "cachesvc/ledger/",
    "cachesvc/memory/",
    "cachesvc/model/",
    "cachesvc/mover/",
    "cachesvc/nodes.py",
    "cachesvc/peer/",
    "cachesvc/policy/",
    "cachesvc/questions/",
    "cachesvc/service/",
    "cachesvc/simulation.py",
    "cachesvc/storage/",
    "cachesvc/storages.py",
    "cachesvc/swap/",
    "cachesvc/telemetry/",
    "cachesvc/wire/",
    "client/cachesvc_client/",
    "client/cachesvc_ctl/",
    "client/cachesvc_vllm/",
    "deploy/",
    "docs/deploying.md",
    "docs/events.md",
    "docs/figures.md",
    "docs/glossary.md",
    "docs/gpu.md",
    "docs/integrating.md",
    "docs/lane.md",
    "docs/logs.md",
    "docs/metrics.md",
    "docs/nodes.md",
    "docs/operating.md",
    "docs/security.md",
    "docs/simulating.md",
    "docs/staying-up.md",
    "docs/storage-mooncake.md",
    "docs/vllm.md",
    "examples/",
    "gpu_ops/",
    "proto/ERRORS.md",
    "proto/kvcache/",
    "tests/README.md",
    "tests/candidates.py",
    "tests/chaos/",
    "tests/conservation.py",
    "tests/contracts/",
    "tests/deploy/",
    "tests/e2e/",
    "tests/fuzz/",
    "tests/gpu/",
    "tests/hazard_oracle.py",
    "tests/mutations/",
    "tests/oracle.py",
    "tests/routers/",
    "tests/sim/",
    "tests/style/",
    "tests/unit/",
    "tests/vllm/",
    "tests/work.py",
    "tools/",
)
"""Folders and files that still hold such phrases. Only ever remove entries."""

GAP = r"\s+(?:(?:#+|//+|\*)\s+)?"  # a phrase may run over the end of a comment's line
PATTERN = re.compile(
    r"(?<![\w-])(?:" + "|".join(GAP.join(each.split()) for each in PHRASES) + r")(?!\w)", re.IGNORECASE
)
OPENING = re.compile(r"\W*(?:" + "|".join(OPENINGS) + r")\b")


def test_texts_are_plain_english() -> None:
    found = [f"{name}:{hit}" for name, text in revised() for hit in find_phrases(text)]
    assert not found, "name the actor, or use the field's word:\n" + "\n".join(found)


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    found = [f"{name}:{hit}" for name, text in revised(".py") for hit in find_openings(text)]
    assert not found, "open with an imperative verb or a noun phrase:\n" + "\n".join(found)


def test_what_is_unrevised_still_needs_it() -> None:
    needy = [name for name, text in read_texts() if any(find_phrases(text)) or _opens_badly(name, text)]
    assert [path for path in UNREVISED if not any(name.startswith(path) for name in needy)] == []


@pytest.mark.parametrize("bad", ["for ever", "For\never", "# it waits for\n    # ever", "it Is told", "Nobody's"])
def test_phrases_are_found_over_line_ends(bad: str) -> None:
    assert len(list(find_phrases(f"x = 1  # one\n{bad}\n"))) == 1


@pytest.mark.parametrize("good", ["forever", "test_nobody_waits", "`user` is toldo", "so-much", "as it isolates"])
def test_parts_of_other_words_pass(good: str) -> None:
    assert list(find_phrases(good)) == []


def test_openings_are_those_of_docstrings() -> None:
    assert list(find_openings('"""What it is."""\n')) == ["1: What it is."]
    assert list(find_openings('LIMIT = 3\n"""Of pages."""\n')) == ["2: Of pages."]
    assert list(find_openings('X = """How so."""\n\n\ndef f():\n    """Howl at it."""\n')) == []


def revised(*suffixes: str) -> Iterator[tuple[str, str]]:
    """Name and text of every file outside of ``UNREVISED`` and ``QUOTED``."""
    for name, text in read_texts(*suffixes):
        if not name.startswith(UNREVISED + QUOTED):
            yield name, text


def find_phrases(text: str) -> Iterator[str]:
    """Line and words of each banned phrase."""
    for match in PATTERN.finditer(text):
        yield f"{text.count(chr(10), 0, match.start()) + 1}: {' '.join(match[0].split())}"


def find_openings(source: str) -> Iterator[str]:
    """Line and first line of each docstring, of a constant too, that opens with a word of ``OPENINGS``."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(said))) if OPENING.match(said):
                yield f"{node.lineno}: {said.strip().splitlines()[0]}"


def _opens_badly(name: str, text: str) -> bool:
    return name.endswith(".py") and any(find_openings(text))
