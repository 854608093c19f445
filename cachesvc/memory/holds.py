"""Counted holds on regions: memory is not freed before its readers have finished.

Copies need none: the ledger closes no pool that a ticket touches. Readers beside it (checksums, verification) look a
page up on one thread while another one may be closing the page's slab.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cachesvc.model.errors import LedgerBroken, NotFound


class Holds:
    """Open regions, and how many hold each. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count: dict[int, int] = {}
        self._ending: set[int] = set()

    def begin(self, region: int) -> None:
        """The region may be held from now on. Numbers are not used again."""
        with self._changed:
            self._count[region] = 0

    @contextmanager
    def hold(self, region: int) -> Iterator[None]:
        """Keep a region's memory for a while. Raises NotFound where it is unknown, closed, or being closed."""
        with self._changed:
            if region not in self._count or region in self._ending:
                raise NotFound("region", region, "its slab was closed")
            self._count[region] += 1
        try:
            yield
        finally:
            with self._changed:
                self._count[region] -= 1
                self._changed.notify_all()

    def end(self, region: int) -> None:
        """Allow no new hold on the region, and wait for its holders. Raises LedgerBroken for a second time."""
        with self._changed:
            if region not in self._count or region in self._ending:
                raise LedgerBroken(f"region {region} was closed before")
            self._ending.add(region)
            while self._count[region]:
                self._changed.wait()
            self._ending.remove(region)
            del self._count[region]
