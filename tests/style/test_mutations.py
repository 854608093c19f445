"""The table of defects fits the code: each can be put in, and the tests that must notice it exist."""

from __future__ import annotations

import ast

import pytest

from tests.mutations.table import ROOT, Mutation, load_mutations

MUTATIONS = load_mutations()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_defect_can_be_put_in(mutation: Mutation) -> None:
    source = (ROOT / mutation.file).read_text(encoding="utf-8")
    broken = mutation.applied_to(source)
    assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(source))


def test_what_is_to_notice_defects_is_there() -> None:
    named = {test for mutation in MUTATIONS for test in mutation.tests}
    assert [test for test in sorted(named) if not (ROOT / test).exists()] == []
    assert [mutation.name for mutation in MUTATIONS if not mutation.tests] == []


def test_names_are_their_own() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)
