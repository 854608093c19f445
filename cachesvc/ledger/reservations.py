"""Free pages that are kept for a call that waits for more, so that nobody takes them before it runs again.

A call that must wait reserves what is free of what it wants, and when a transfer that it started has freed pages it
reserves those, up to what it wants. So a reservation never holds a page that is not free, two calls that wait can never
hold each other up for good (each waits for transfers, and is refused or goes on once they have ended), and whoever
comes later pays with evictions of its own. It ends with its call, its sequence or its lease, and by a deadline.
"""

from __future__ import annotations

from collections.abc import Sequence

from cachesvc.ledger.pages import PagePool


class Reservation:
    """What one call waits for on one place: ``wanted[g]`` pages, of which ``held[g]`` are free and kept for it.

    ``line``: all reservations of the place that have not ended. ``until``: seconds, monotonic; then it ends anyhow.
    """

    __slots__ = ("_line", "_pools", "held", "until", "wanted")

    def __init__(self, line: dict[Reservation, None], pools: Sequence[PagePool]) -> None:
        self._line = line
        self._pools = pools
        self.wanted = [0] * len(pools)
        self.held = [0] * len(pools)
        self.until = 0.0

    @property
    def is_open(self) -> bool:
        """False before it has been kept for the first time, and once it has ended."""
        return self in self._line

    def keep(self, wanted: Sequence[int], until: float) -> None:
        """The call waits for ``wanted`` pages from now on, ``until`` at the latest."""
        self.give_back()
        self.wanted = list(wanted)
        self.until = until
        self._line[self] = None
        self.top_up()

    def top_up(self) -> None:
        """Reserve what is free now, up to what is wanted. Nothing where it has ended."""
        if not self.is_open:
            return
        for group, pool in enumerate(self._pools):
            more = min(self.wanted[group] - self.held[group], pool.unreserved)
            if more > 0:
                self.held[group] += more
                pool.reserved += more

    def give_back(self) -> None:
        """What it holds can be taken: its call runs. What it started still frees pages for it."""
        for group, pool in enumerate(self._pools):
            pool.reserved -= self.held[group]
            self.held[group] = 0

    def release(self) -> None:
        """It is over. Once is enough; twice is fine."""
        self.give_back()
        self._line.pop(self, None)


def expire(line: dict[Reservation, None], now: float) -> None:
    """End what has outlived its deadline: its call has gone without a word."""
    for reservation in [each for each in line if each.until < now]:
        reservation.release()
