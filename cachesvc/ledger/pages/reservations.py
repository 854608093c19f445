"""Free pages that are kept for a call that waits for more, so that no other call takes them before it runs again.

A call that must wait reserves what is free of what it wants, and when a transfer that it started has freed pages it
reserves those, up to what it wants. So a reservation never holds a page that is not free, two calls that wait can never
hold each other up for good (each waits for transfers, and is refused or goes on once they have ended), and a later call
pays with evictions of its own. It ends with its call, its sequence or its lease, and by a deadline.

Where many pages are wanted they are taken ahead, some in each turn of the call, once all are there: they are the
sequence's own, in no table yet. If its call is given up meanwhile, its next one begins with them, and
gives back those that it does not want.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from cachesvc.ledger.pages.page_pool import PagePool
from cachesvc.model.words import PageState


class Reservation:
    """Pages that one call waits for on one place: ``wanted[g]`` pages, of which ``held[g]`` are free and kept for it.

    ``line``: all reservations of the place that have not ended. ``until``: seconds, monotonic; then it ends anyhow.
    ``own[g]``: pages that the requester already owns; ``ahead[g]``: those of them that were taken ahead.
    """

    __slots__ = ("_line", "_own", "_pools", "ahead", "held", "until", "wanted")

    def __init__(self, line: dict[Reservation, None], pools: Sequence[PagePool], own: Sequence[set[int]] = ()) -> None:
        self._line = line
        self._pools = pools
        self._own = own
        self.ahead = [array("i") for _ in pools]
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

    def take_ahead(self, wanted: Sequence[int], most: int) -> bool:
        """Take up to ``most`` pages of each group towards ``wanted[g]``, for which there is room, or give back as many
        that a larger call before has taken; True when there are ``wanted[g]``."""
        is_whole = True
        for count, ahead, own, pool in zip(wanted, self.ahead, self._own, self._pools, strict=True):
            missing = count - len(ahead)
            if missing < 0:
                spare = ahead[max(count, len(ahead) - most) :]
                del ahead[len(ahead) - len(spare) :]
                own.difference_update(spare)
                pool.move_all(spare, PageState.FREE)
            pages = pool.take(max(0, min(missing, most)), PageState.PRIVATE)
            ahead.extend(pages)
            own.update(pages)
            is_whole &= abs(missing) <= most
        return is_whole

    def hand_over(self, counts: Sequence[int]) -> list[array[int]]:
        """Take up to ``counts[g]`` pages of each group out of those taken ahead; they are no longer kept for a call."""
        pages = [ahead[:count] for ahead, count in zip(self.ahead, counts, strict=True)]
        for ahead, count in zip(self.ahead, counts, strict=True):
            del ahead[:count]
        return pages

    def give_back(self) -> None:
        """Release the held pages to its call, which runs. What it started still frees pages for it."""
        for group, pool in enumerate(self._pools):
            pool.reserved -= self.held[group]
            self.held[group] = 0

    def shorten(self, until: float) -> None:
        """End it at ``until`` at the latest."""
        self.until = min(self.until, until)

    def release(self) -> None:
        """End the reservation. Idempotent."""
        self.give_back()
        self._line.pop(self, None)


def expire(line: dict[Reservation, None], now: float) -> None:
    """Drop expired reservations of calls that disappeared."""
    for reservation in [each for each in line if each.until < now]:
        reservation.release()
