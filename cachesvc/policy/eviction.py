"""Eviction order as a rank, one number: among the leaves that may go, the lowest rank goes first.

``stamp`` numbers the last access of a block or of anything that was below it (``STAMP_BITS`` bits at most), ``hits``
counts accesses that ended at it, ``depth`` is its position in the prompt.
"""

from __future__ import annotations

from collections.abc import Callable

from cachesvc.model.errors import InvalidRequest
from cachesvc.model.words import STAMP_BITS

RankRule = Callable[[int, int, int], int]


def lru(stamp: int, hits: int, depth: int) -> int:
    """Least recently used first."""
    return stamp


def lfu(stamp: int, hits: int, depth: int) -> int:
    """Least often hit first; the older access breaks ties."""
    return hits << STAMP_BITS | stamp


def deepest_first(stamp: int, hits: int, depth: int) -> int:
    """Longest prefixes first: keeps the shared beginnings of many prompts. The older access breaks ties."""
    return stamp - (depth << STAMP_BITS)


RANK_RULES: dict[str, RankRule] = {"lru": lru, "lfu": lfu, "deepest_first": deepest_first}


def rank_rule(name: str) -> RankRule:
    """The rule of that name. Raises InvalidRequest that lists the names."""
    rule = RANK_RULES.get(name)
    if rule is None:
        raise InvalidRequest(f"unknown eviction policy {name!r}; choose one of {', '.join(sorted(RANK_RULES))}")
    return rule
