"""Suggestion for an unknown name: the nearest known one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

LIKENESS = 0.75
"""Share of letters in common: a letter left out, added or swapped in a name. Below it, short names look like any."""


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """``did you mean 'status'?``, or ``otherwise`` where none of the known names is close."""
    near = get_close_matches(name, list(known), 1, LIKENESS)
    return f"did you mean {near[0]!r}?" if near else otherwise
