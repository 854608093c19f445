"""The table of defects fits the code: each can be put in, and the tests that must notice it exist."""

from __future__ import annotations

import ast

from tests.long_cases import looped
from tests.mutations.table import ROOT, load_mutations

MUTATIONS = load_mutations()


@looped("file", sorted({mutation.file for mutation in MUTATIONS}))
def test_a_defect_can_be_put_in(file: str) -> None:
    source = (ROOT / file).read_text(encoding="utf-8")
    sound = ast.dump(ast.parse(source))
    for mutation in MUTATIONS:
        if mutation.file == file:
            assert ast.dump(ast.parse(mutation.applied_to(source))) != sound, mutation.name


def test_what_is_to_notice_defects_is_there() -> None:
    named = {test for mutation in MUTATIONS for test in mutation.tests}
    assert [test for test in sorted(named) if not (ROOT / test).exists()] == []
    assert [mutation.name for mutation in MUTATIONS if not mutation.tests] == []


def test_names_are_their_own() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)
