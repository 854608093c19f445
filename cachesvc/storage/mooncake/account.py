"""Account of the objects that this daemon has put into a shared store, which may lose them."""

from __future__ import annotations

import threading
from collections import OrderedDict

from cachesvc.storage.seam import Kept, ObjectName, Scope, StoreStatus, Totals

MOST_NAMES = 1 << 17
"""Most recent objects that are counted, some 230 bytes each."""


class Account:
    """Objects that were put here and not seen go. Any thread."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[ObjectName, int] = OrderedDict()
        self._kept: dict[Scope, Kept] = {}
        self._lock = threading.Lock()

    def describe(self, scope: Scope, label: str) -> None:
        """Set the label of a scope."""
        with self._lock:
            self._of(scope).label = label

    def add(self, name: ObjectName, size_bytes: int) -> None:
        """Count an object that was put, and was there."""
        with self._lock:
            self._drop(name)
            self._sizes[name] = size_bytes
            kept = self._of(name.scope)
            kept.objects += 1
            kept.size_bytes += size_bytes
            if len(self._sizes) > MOST_NAMES:
                self._drop(next(iter(self._sizes)))

    def drop(self, name: ObjectName) -> None:
        """Forget an object, if it is known."""
        with self._lock:
            self._drop(name)

    def purge(self, scope: Scope | None) -> None:
        """Forget all objects of a scope, or all."""
        with self._lock:
            for name in [name for name in self._sizes if scope in (None, name.scope)]:
                self._drop(name)

    def status(self) -> StoreStatus:
        """Never complete: other nodes' objects are not in it."""
        with self._lock:
            scopes = {scope: Kept(kept.label, kept.objects, kept.size_bytes) for scope, kept in self._kept.items()}
            return StoreStatus(len(self._sizes), sum(self._sizes.values()), is_complete=False, scopes=scopes)

    def totals(self) -> Totals:
        """Their sums; the store's capacity is not this daemon's."""
        with self._lock:
            return Totals(len(self._sizes), sum(kept.size_bytes for kept in self._kept.values()), 0, 0)

    def names(self) -> list[ObjectName]:
        """Names of all counted objects."""
        with self._lock:
            return list(self._sizes)

    def _of(self, scope: Scope) -> Kept:
        return self._kept.setdefault(scope, Kept(""))

    def _drop(self, name: ObjectName) -> None:
        size_bytes = self._sizes.pop(name, None)
        if size_bytes is not None:
            kept = self._of(name.scope)
            kept.objects -= 1
            kept.size_bytes -= size_bytes
