"""Paired state has an owner: no flow pins, flies or moves sealed pages by hand, or sets what others own."""

from __future__ import annotations

import re

import pytest

from tests.style.tree import read_texts

OWNED = {
    "pins": r"\.(?:un)?pin(?:_window)?\(",
    "flights": r"\.(?:begin|end)_flight\(|\.(?:start|end)_drain\(",
    "copies": r"\bplace\.(?:seal|fill|arrive|fail|drain|keep|drop)\(",
    "pages": r"\.(?:SEALED|IN_FLIGHT)\b",
    "what a sequence owns": r"\b(?:sequence|hold|held)\.\w+\s*(?:[-+|]?=)[^=]",
}


@pytest.mark.parametrize("what", OWNED)
def test_flows_leave_to_owners_what_must_be_paired(what: str) -> None:
    pattern = re.compile(OWNED[what])
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, text in read_texts(".py")
        if name.startswith("cachesvc/flows/")
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not found, f"{what} have owners in the ledger:\n" + "\n".join(found)
