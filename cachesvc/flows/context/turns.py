"""Work budgets per event-loop slice, so that no caller waits for another's long flow.

A call's flow that has more to do than a turn answers ``TURN`` and is run again, with a new ``Call``, once others had
theirs. What it has done until then is a legal state of the ledger for all other calls, and its next run finds it;
pages that it has made free are kept for it by a reservation. What no call waits for (a transfer that landed, a lease
that is lost) goes on as a background task.

"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from cachesvc.model.answers import Wait
from cachesvc.model.numbers.sharing import BACKGROUND, Party, Rounds

TURN = Wait(())
LAST_TURNS = Wait((), goes_on=True)
"""A part is done for good: from here on the flow waits for its turns alone, raises nothing, and ends."""
LONG_TURNS = 4
"""Turns above which a call that cannot be undone half-way lines up behind the long calls of its process."""


class Turns(NamedTuple):
    """Most work of one turn: some 0.3 ms (2026-11-22, Python 3.11 on a crowded machine).

    ``evicted``: blocks that are dropped, or begin to be written back, up to 9 us each; some hundreds where they go in
    long runs that the host has, of a layout without windows. ``landed``: blocks whose transfer has ended, 3 us each.
    ``drained``: blocks that go once they are written back, 8 us each. ``holds``: sequences and prefetches of a lost
    lease that end. ``pages``: that are taken or given back by themselves, 0.1 us each in long runs and more than 1 us
    each alone. ``sealed``: blocks that are published, 2.4 us each. ``forgotten``: keys of a model that is gone.
    ``loaded``: blocks of one load, 0.1 us each in single pages.
    """

    evicted: int = 32
    landed: int = 48
    drained: int = 12
    holds: int = 32
    pages: int = 256
    sealed: int = 64
    forgotten: int = 4096
    loaded: int = 8192


NO_MODEL = 0
"""Model of a background task that frees no pages and leaves nothing half-done."""


class Chore(NamedTuple):
    """Background work of a model. ``go_on`` does a turn of it and returns whether it is over. ``gives_back``: it may
    free pages that eviction could not, so that a call that finds too few waits for it. ``party``: the process that has
    caused it, where one has."""

    model: int
    go_on: Callable[[], bool]
    gives_back: bool = True
    party: Party = BACKGROUND


class Chores:
    """Background work that waits, round robin by party: the end of a process with a thousand leases delays a landing of
    another one by one turn in two."""

    def __init__(self) -> None:
        self._rounds: Rounds[Party, Chore] = Rounds()

    def __bool__(self) -> bool:
        return bool(self._rounds)

    def __len__(self) -> int:
        return len(self._rounds)

    def __iter__(self) -> Iterator[Chore]:
        return iter(self._rounds)

    def append(self, chore: Chore) -> None:
        """Queue a chore behind those of its party."""
        self._rounds.add(chore.party, chore)

    def appendleft(self, chore: Chore) -> None:
        """Queue a chore that has the next turn."""
        self._rounds.add_first(chore.party, chore)

    def popleft(self) -> Chore:
        """The chore that has the next turn."""
        return self._rounds.take()


def begin(
    chores: Chores, model: int, go_on: Callable[[], bool], *, at_once: bool = True, party: Party = BACKGROUND
) -> None:
    """Do a turn of it now, unless the caller has had one (not ``at_once``), and leave the rest for later."""
    if not at_once or not go_on():
        chores.append(Chore(model, go_on, party=party))


def tidy(chores: Chores) -> None:
    """Do a turn of what has waited longest of the party whose turn it is. A chore that raises is not gone on with."""
    go_on_with(chores, chores.popleft())


def go_on_with(chores: Chores, chore: Chore) -> None:
    """Do a turn of a chore that was taken from the queue; what is left of it waits again."""
    if not chore.go_on():
        chores.append(chore)
