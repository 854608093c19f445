"""Loans of peers to this node, by the names of objects: each is read once, or given back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from cachesvc.peer.fleet.control import Loan
from cachesvc.peer.fleet.health import Peer
from cachesvc.peer.wire import STREAMS
from cachesvc.storage.seam import Item, ObjectName, Part, Scope

STREAM_BYTES = 4 << 20
"""Least bytes of a stream: opening one for fewer costs more than it saves."""
UNUSED_SECONDS = 10.0
"""Time after which unread loans are given back, seconds."""


@dataclass(eq=False)
class HeldLoan:
    """Loan of a peer: ``numbers`` by name. ``is_expected``: it was asked for ahead, by ``expect``. ``readers``: streams
    that have not ended, of those that read it. ``waiting``: those of them that have not begun; without these it is
    renewed by what its streams bring. ``has_failed``: one of them has. ``is_unwanted``: they bring no more."""

    peer: Peer
    loan: Loan
    numbers: dict[ObjectName, int]
    since: float
    is_expected: bool = False
    readers: int = 0
    waiting: int = 0
    has_failed: bool = False
    is_unwanted: bool = False


@dataclass(slots=True)
class Wanted:
    """Items of one call that one stream of a peer brings."""

    held: HeldLoan
    items: list[tuple[int, Item]] = field(default_factory=list)

    def by_stream(self) -> list[Wanted]:
        """Deal the items to as many streams as are worth it, in turn: what comes first is wanted first."""
        size_bytes = sum(item.payload_bytes for _, item in self.items)
        streams = max(1, min(self.held.loan.streams, STREAMS, len(self.items), size_bytes // STREAM_BYTES))
        self.held.readers = self.held.waiting = streams
        return [Wanted(self.held, self.items[at::streams]) for at in range(streams)]


class HeldLoans:
    """Loans that are not read yet, and those that wait for streams. Any thread. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_name: dict[ObjectName, HeldLoan] = {}
        self._unread: list[HeldLoan] = []
        self._taken: dict[int, HeldLoan] = {}
        self._read: dict[int, HeldLoan] = {}
        self._lock = threading.Lock()

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock()

    def find(self, name: ObjectName) -> HeldLoan | None:
        """The loan of an object."""
        return self._by_name.get(name)

    def hold(
        self,
        peer: Peer,
        loan: Loan,
        scope: Scope,
        keys: Sequence[bytes],
        parts: Sequence[Part],
        *,
        is_expected: bool = False,
    ) -> dict[ObjectName, int]:
        """Hold a loan of ``parts`` of each of ``keys``; return what it lends, with the numbers on its stream.
        One that lends none of them is given back."""
        names = (ObjectName(scope, key, part) for key in keys for part in parts)
        lent = {name: at for at, (name, is_there) in enumerate(zip(names, loan.lent, strict=False)) if is_there}
        held = HeldLoan(peer, loan, lent, self._clock(), is_expected)
        with self._lock:
            if not lent:
                self._unread.append(held)
            before = {id(each): each for each in map(self._by_name.get, lent) if each is not None}
            self._by_name.update(dict.fromkeys(lent, held))
            self._unread += [
                each for each in before.values() if all(self._by_name.get(name) is not each for name in each.numbers)
            ]
        return lent

    def take(self, items: Sequence[Item]) -> tuple[list[Wanted], list[int]]:
        """Take the loans of items, which are read now; and the indexes of those that nothing lends."""
        missing = dict(enumerate(items))
        wanted: list[Wanted] = []
        with self._lock:
            while (held := self._best_for(missing.values())) is not None:
                mine = [(index, item) for index, item in missing.items() if item.name in held.numbers]
                wanted.append(Wanted(held, mine))
                for index, _ in mine:
                    del missing[index]
                self._drop(held)  # a loan is read once
            shares = [share for one in wanted for share in one.by_stream()]
            self._taken |= {id(one.held): one.held for one in wanted}
            self._read |= {id(one.held): one.held for one in wanted}
        return shares, list(missing)

    def begun(self, held: HeldLoan) -> None:
        """Note that a stream of a loan begins, or never will."""
        with self._lock:
            held.waiting -= 1
            if not held.waiting:
                del self._taken[id(held)]

    def ended(self, held: HeldLoan) -> bool:
        """Note the end of a stream of a loan; True for the last one."""
        with self._lock:
            held.readers -= 1
            if not held.readers:
                del self._read[id(held)]
            return not held.readers

    def drop(self, names: Sequence[ObjectName]) -> None:
        """Give back loans that were asked for ahead and have some of these objects; streams that read them end."""
        with self._lock:
            for held in [*self._all(), *self._read.values()]:
                if not held.is_expected or held.is_unwanted or held.numbers.keys().isdisjoint(names):
                    continue
                held.is_unwanted = True
                if id(held) not in self._read:
                    self._drop(held)
                    self._unread.append(held)

    def failed(self, held: HeldLoan) -> bool:
        """Note the failure of a stream of a loan; True for the first one: all have the same lender."""
        with self._lock:
            is_first, held.has_failed = not held.has_failed, True
            return is_first

    def leave_unread(self, held: HeldLoan) -> None:
        """Note a loan that is not read after all: the next heartbeat gives it back."""
        with self._lock:
            self._unread.append(held)

    def take_unread(self) -> list[HeldLoan]:
        """Loans to give back: those that nothing reads, and those that were not read in time."""
        late = self._clock() - UNUSED_SECONDS
        with self._lock:
            unread, self._unread = self._unread, []
            for held in self._all():
                if held.since < late:
                    self._drop(held)
                    unread.append(held)
        return unread

    def waiting(self) -> list[HeldLoan]:
        """Loans whose bytes are still to be asked for: nothing but a heartbeat keeps them."""
        with self._lock:
            return [*self._all(), *self._taken.values()]

    def _all(self) -> list[HeldLoan]:
        return list({id(held): held for held in self._by_name.values()}.values())

    def _drop(self, held: HeldLoan) -> None:
        for name in held.numbers:
            if self._by_name.get(name) is held:
                del self._by_name[name]

    def _best_for(self, items: Iterable[Item]) -> HeldLoan | None:
        """The loan that has most of the items: another call may have borrowed some of them since, for itself."""
        names = [item.name for item in items]
        loans = {id(held): held for held in map(self._by_name.get, names) if held is not None}
        return max(loans.values(), key=lambda held: sum(name in held.numbers for name in names), default=None)
