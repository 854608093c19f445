"""Shares of a limit: the most that one of several callers may hold, so that none of them takes all."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

Party = bytes | tuple[int, int]
"""A process: its uid and pid, or the token of its life connection where the daemon cannot see its pid."""
BACKGROUND: Party = b""
"""The party of what no process has asked for."""

Holder = TypeVar("Holder", bound=Hashable)


def share_of(limit: int, busy: int) -> int:
    """The most that one of ``busy`` may hold: three quarters alone, so that the next one gets in; else its part."""
    return max(1, limit * 3 // 4 if busy == 1 else limit // busy)


def most_of(holder: Holder, held: Mapping[Holder, int], limit: int) -> int:
    """The most that one may hold beside what all hold now: its share, and no more than three quarters of what the
    others have left, so that one that comes new always gets in."""
    others = {each: count for each, count in held.items() if each != holder and count}
    left = limit - sum(others.values())
    return max(1, min(share_of(limit, len(others) + 1), left * 3 // 4))
