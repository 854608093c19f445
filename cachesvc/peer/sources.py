"""Peers before a store: what another daemon has comes from there; all else, or what it fails to send, from the store.

To the tier it is one engine. Objects are written to the store alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from cachesvc.model.keys import KEY_BYTES
from cachesvc.peer.borrower import PeerStorage
from cachesvc.storage.seam import (
    Caps,
    Check,
    Checked,
    Chooser,
    Each,
    Found,
    Gone,
    Item,
    ObjectName,
    Outcome,
    Part,
    Scope,
    Step,
    StorageBackend,
    StoreStatus,
    Totals,
    Use,
    no_step,
)


class Sources:
    """Two engines in one: ``peers`` first, then ``store``."""

    def __init__(self, peers: PeerStorage, store: StorageBackend) -> None:
        self.kind = store.kind
        self.caps: Caps = replace(store.caps)
        self.peers = peers
        self.store = store

    def start(self) -> None:
        """Start both. Raises a CacheError that says what is missing."""
        self.store.start()
        self.peers.start()

    def register(self, chunk: memoryview) -> None:
        """Register memory with the store: peers need none."""
        self.store.register(chunk)

    def describe(self, scope: Scope, label: str) -> None:
        """Set the label in the store."""
        self.store.describe(scope, label)

    def watch(self, gone: Gone) -> None:
        """Watch the store's evictions."""
        self.store.watch(gone)

    def used(self, scope: Scope, uses: Sequence[Use], chooser: Chooser | None) -> None:
        """Report uses to the store."""
        self.store.used(scope, uses, chooser)

    def expects(self, scope: Scope, keys: bytes, parts: Sequence[Part]) -> int | None:
        """Return None while a peer can be asked, else the store's hint."""
        stored = self.store.expects(scope, keys, parts)
        has_all = stored is not None and stored * KEY_BYTES == len(keys)
        return stored if has_all or self.peers.expects(scope, keys, parts) is not None else None

    def exists(self, names: Sequence[ObjectName], deadline: float, found: Found) -> None:
        """Find the objects that either has."""

        def lent(answers: Sequence[bool] | None) -> None:
            there = answers or [False] * len(names)
            rest = [name for name, is_there in zip(names, there, strict=True) if not is_there]
            if not rest:
                found(there)
                return

            def stored(kept: Sequence[bool] | None) -> None:
                if kept is None and not any(there):
                    found(None)
                    return
                answers = iter(kept or [False] * len(rest))
                found([is_there or next(answers) for is_there in there])

            self.store.exists(rest, deadline, stored)

        self.peers.exists(names, deadline, lent)

    def get(self, items: Sequence[Item], deadline: float, each: Each) -> None:
        """Read what is borrowed from its peer (LENT), or else from the store."""
        lent: list[int] = []
        mine: list[int] = []
        for index, item in enumerate(items):
            (lent if self.peers.holds(item.name) else mine).append(index)

        def from_peer(at: int, outcome: Outcome) -> None:
            index = lent[at]
            if outcome is Outcome.OK:
                each(index, Outcome.LENT)
            else:
                self._get_stored([index], items, deadline, each)

        if lent:
            self.peers.get([items[index] for index in lent], deadline, from_peer)
        if mine:
            self._get_stored(mine, items, deadline, each)

    def put(self, items: Sequence[Item], deadline: float, each: Each) -> None:
        """Write to the store."""
        self.store.put(items, deadline, each)

    def remove(self, names: Sequence[ObjectName]) -> None:
        """Remove an object where it came from: a peer's wrong object says nothing against the store's."""
        if self.peers.is_telling:
            self.peers.remove(names)
        else:
            self.store.remove(names)

    def doubt(self, names: Sequence[ObjectName], check: Check) -> None:
        """Doubt an object where it came from, as ``remove``."""
        if self.peers.is_telling:
            self.peers.remove(names)
        else:
            self.store.doubt(names, check)

    def purge(self, scope: Scope | None, step: Step = no_step) -> int:
        """Purge the store."""
        return self.store.purge(scope, step)

    def status(self) -> StoreStatus:
        """Status of the store."""
        return self.store.status()

    def totals(self) -> Totals:
        """Totals of the store."""
        return self.store.totals()

    def check_all(self, check: Check, step: Step = no_step) -> Checked:
        """Check the store."""
        return self.store.check_all(check, step)

    def close(self) -> None:
        """Close both."""
        self.peers.close()
        self.store.close()

    def _get_stored(self, indexes: list[int], items: Sequence[Item], deadline: float, each: Each) -> None:
        chosen = [items[index] for index in indexes]
        self.store.get(chosen, deadline, lambda at, outcome: each(indexes[at], outcome))


class Nowhere:
    """Empty store for nodes without storage: it keeps the last few small objects, so that a canary comes back."""

    kind = "peers"
    MOST_OBJECTS = 4
    MOST_BYTES = 64 << 10

    def __init__(self) -> None:
        self.caps = Caps(is_shared=True, survives="daemon", evicts_itself=True)
        self._kept: OrderedDict[ObjectName, bytes] = OrderedDict()
        self._is_open = False

    def start(self) -> None:
        """Open at once."""
        self._is_open = True

    def register(self, chunk: memoryview) -> None:
        """No-op: no memory is written."""

    def describe(self, scope: Scope, label: str) -> None:
        """Do nothing: labels have no reader here."""

    def watch(self, gone: Gone) -> None:
        """No-op: nothing is evicted."""

    def used(self, scope: Scope, uses: Sequence[Use], chooser: Chooser | None) -> None:
        """No-op: it keeps nothing."""

    def expects(self, scope: Scope, keys: bytes, parts: Sequence[Part]) -> int | None:  # noqa: ARG002 - the seam's
        """Expect nothing."""
        return 0

    def exists(self, names: Sequence[ObjectName], deadline: float, found: Found) -> None:  # noqa: ARG002
        """Find none, for the last few calls."""
        found([name in self._kept for name in names])

    def get(self, items: Sequence[Item], deadline: float, each: Each) -> None:  # noqa: ARG002 - the seam's
        """Answer MISS, for the last few calls."""
        for index, item in enumerate(items):
            content = self._kept.get(item.name, b"")
            if len(content) != len(item.head) + item.payload_bytes:
                each(index, Outcome.MISS if self._is_open else Outcome.BUSY)
                continue
            at = 0
            for piece in (item.head, *item.pages):
                piece[:] = content[at : at + len(piece)]
                at += len(piece)
            each(index, Outcome.OK)

    def put(self, items: Sequence[Item], deadline: float, each: Each) -> None:  # noqa: ARG002 - the seam's
        """Keep small objects for a moment."""
        for index, item in enumerate(items):
            if not self._is_open or item.payload_bytes > self.MOST_BYTES:
                each(index, Outcome.BUSY)
                continue
            self._kept[item.name] = b"".join((item.head, *item.pages))
            while len(self._kept) > self.MOST_OBJECTS:
                self._kept.popitem(last=False)
            each(index, Outcome.OK)

    def remove(self, names: Sequence[ObjectName]) -> None:
        """Forget objects."""
        for name in names:
            self._kept.pop(name, None)

    def doubt(self, names: Sequence[ObjectName], check: Check) -> None:  # noqa: ARG002 - the seam's
        """Forget objects."""
        self.remove(names)

    def purge(self, scope: Scope | None, step: Step = no_step) -> int:  # noqa: ARG002 - the seam's
        """Purge nothing."""
        return 0

    def status(self) -> StoreStatus:
        """Report an empty store."""
        return StoreStatus()

    def totals(self) -> Totals:
        """Report no objects."""
        return Totals(0, 0, 0, 0)

    def check_all(self, check: Check, step: Step = no_step) -> Checked:  # noqa: ARG002 - the seam's
        """Check nothing."""
        return Checked()

    def close(self) -> None:
        """Close. Idempotent."""
        self._is_open = False
