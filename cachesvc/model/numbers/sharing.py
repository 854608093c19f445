"""Shares of a limit: the most that one of several callers may hold, so that none of them takes all."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, TypeVar

Party = bytes | tuple[int, int]
"""A process: its uid and pid, or the token of its life connection where the daemon cannot see its pid."""
BACKGROUND: Party = b""
"""The party of what no process has asked for."""

Holder = TypeVar("Holder", bound=Hashable)
Item = TypeVar("Item")


class Rounds(Generic[Holder, Item]):
    """A queue with a row for each party, served round robin: one item of each party before any has two, and within a
    party the first comes first. So what one party has queued delays an item of another one by one item of each party.
    """

    def __init__(self) -> None:
        self._rows: dict[Holder, deque[Item]] = {}  # in the order of their next items; none is empty

    def __bool__(self) -> bool:
        return bool(self._rows)

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def __iter__(self) -> Iterator[Item]:
        """Every item that waits, by party."""
        for row in self._rows.values():
            yield from row

    def add(self, party: Holder, item: Item) -> None:
        """Queue an item behind those of its party."""
        row = self._rows.get(party)
        if row is None:
            self._rows[party] = deque((item,))
        else:
            row.append(item)

    def add_first(self, party: Holder, item: Item) -> None:
        """Queue an item that is the next one."""
        row = self._rows.pop(party, deque())
        row.appendleft(item)
        self._rows = {party: row, **self._rows}

    def take(self) -> Item:
        """The next item. Raises StopIteration where there is none."""
        party = next(iter(self._rows))
        row = self._rows.pop(party)
        item = row.popleft()
        if row:
            self._rows[party] = row
        return item


def count_held(held: dict[Holder, int], holder: Holder, by: int) -> None:
    """Count more or less of what one holds; one that holds nothing is forgotten."""
    left = held.get(holder, 0) + by
    if left:
        held[holder] = left
    else:
        held.pop(holder, None)


def share_of(limit: int, busy: int) -> int:
    """The most that one of ``busy`` may hold: three quarters alone, so that the next one gets in; else its part."""
    return max(1, limit * 3 // 4 if busy == 1 else limit // busy)


def most_of(holder: Holder, held: Mapping[Holder, int], limit: int) -> int:
    """The most that one may hold beside what all hold now: its share, and no more than three quarters of what the
    others have left, so that one that comes new always gets in."""
    others = {each: count for each, count in held.items() if each != holder and count}
    left = limit - sum(others.values())
    return max(1, min(share_of(limit, len(others) + 1), left * 3 // 4))
