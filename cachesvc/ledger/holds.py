"""A prefix that is kept resident: pinned in place, tracked while it is loaded to the device, released once.

A hold owns two pins and its window pins. ``[0, sealed)`` are shared blocks down to ``anchor``, which is pinned on the
device; ``[sealed, hit_blocks)`` are being loaded, or are to be, down to ``host_anchor``, which is pinned on the host
until they have come. Where either end is NO_ROW nothing is pinned there.

Of a hit that is to be loaded in part, the last window may lie partly on the host, and partly on the device behind what
is in place. Until its loads begin, these copies are pinned by themselves, wherever they are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from cachesvc.ledger.index.block_ledger import BlockLedger, Hit, window_positions
from cachesvc.ledger.index.pins import Pin, WindowPins
from cachesvc.ledger.index.tier_copies import NO_ROW, Place
from cachesvc.ledger.sequence_state import ACTIVE, ENDED, FAILED, LOADING, SequenceState, move
from cachesvc.ledger.tickets import Ticket
from cachesvc.model.words import READY


class Hold:
    """``loads``: tickets that it relies on. ``failed``: why it cannot go on, once one of them has failed. ``state``: of
    a sequence; a prefetch uses those of its loads alone."""

    __slots__ = (
        "_device",
        "_host",
        "_until_loaded",
        "failed",
        "hit_blocks",
        "ledger",
        "loads",
        "place",
        "sealed",
        "state",
        "windows",
    )

    is_use = True
    """True where holding blocks counts as a use of them."""

    def __init__(self, ledger: BlockLedger, place: Place) -> None:
        self.ledger = ledger
        self.place = place
        self._device = Pin(ledger, place)
        self._host = Pin(ledger, ledger.host)
        self.windows = WindowPins(ledger, place)
        self._until_loaded: tuple[Pin | WindowPins, ...] = ()
        self.sealed = 0
        self.hit_blocks = 0
        self.loads: list[int] = []
        self.failed = ""
        self.state = ACTIVE

    @property
    def anchor(self) -> int:
        """The deepest row that it keeps on the device."""
        return self._device.row

    @property
    def host_anchor(self) -> int:
        """The deepest row that it keeps on the host."""
        return self._host.row

    @property
    def window_rows(self) -> Mapping[int, Mapping[int, int]]:
        """Windowed group -> position -> row of the copies that it keeps."""
        return self.windows.rows

    def pins(self) -> Iterator[tuple[int, int | None, int]]:
        """Number of the place, windowed group (None: a whole block) and row of each pin that it owns. For audits."""
        for pin in (self._device, self._host, self.windows, *self._until_loaded):
            if isinstance(pin, WindowPins):
                for group, held in pin.rows.items():
                    yield from ((pin.place.number, group, row) for row in held.values())
            elif pin.row != NO_ROW:
                yield pin.place.number, None, pin.row

    def hold(self, hit: Hit, stamp: int) -> None:
        """Stamp and pin a hit's deepest blocks: one on the device, one on the host if that is deeper."""
        self.sealed = hit.device_blocks
        self.hit_blocks = hit.blocks
        if hit.device_row != NO_ROW:
            self._device.move(hit.device_row)
            self.place.used[hit.device_row] |= self.is_use
            self.ledger.index.touch(hit.device_row, stamp)
        if hit.blocks > hit.device_blocks:
            self._host.move(hit.row)
            self.ledger.index.touch(hit.row, stamp)
            if self.place.window_groups:
                self._hold_windows_to_load(hit)

    def _hold_windows_to_load(self, hit: Hit) -> None:
        """Keep the windowed copies behind what is in place where they are: on the device, or on the host."""
        ledger, place, host = self.ledger, self.place, self.ledger.host
        path = ledger.index.path(hit.row, hit.device_row)
        here, there = WindowPins(ledger, place), WindowPins(ledger, host)
        deepest = -1
        for group in place.window_groups:
            for position in window_positions(ledger.layout, group, hit.blocks):
                at = position - hit.device_blocks
                if at < 0:
                    continue
                if place.states[group][path[at]] == READY:
                    here.hold(group, position, path[at])
                    deepest = max(deepest, at)
                elif host.states[group][path[at]] == READY:
                    there.hold(group, position, path[at])
        self._until_loaded = (Pin(ledger, place, path[deepest] if deepest >= 0 else NO_ROW), here, there)

    def hold_windows(self, group: int, rows: Mapping[int, int], tip: int) -> None:
        """Keep the windowed copies of ``rows``, by position, that a hit down to ``tip`` looks back to."""
        self.windows.hold_all(group, rows)  # first: what is held is in no order that its use would change
        self.ledger.use_windows(rows.values(), tip)

    def rest(self) -> array[int]:
        """Rows of the hit that it does not hold on the device yet, root first."""
        if self.loads or self.host_anchor == NO_ROW:
            return array("i")
        return self.ledger.index.path(self.host_anchor, self.anchor)

    def rely_on(self, rows: array[int], needed: Mapping[int, Mapping[int, int]], tickets: Sequence[Ticket]) -> None:
        """The rest of the hit, ``rows``, is on the device or comes there with ``tickets``.

        ``needed[g]``: position -> row of the windowed copies among them that the hit needs. What is there already is
        held from now on: nothing in flight may be all that keeps it.
        """
        present = np.flatnonzero(self.place.states_of(self.place.lead, rows) >= READY)
        if len(present):
            self._device.move(rows[present[-1]])
            self.sealed += len(present)
        for group, positions in needed.items():
            self.hold_windows(group, positions, self.host_anchor)
        self._let_go_until_loaded()
        for ticket in tickets:
            ticket.waiters.append(self)
            self.loads.append(ticket.id)
        if tickets:
            self.state = move(self.state, LOADING)
        if rows and not tickets:
            self._settle()

    def _let_go_until_loaded(self) -> None:
        for pin in self._until_loaded:
            pin.let_go()
        self._until_loaded = ()

    def load_ended(self, ticket: int, reason: str) -> None:
        """A load has ended, for ``reason`` if it failed. After the last one all is held on the device, or it failed."""
        if ticket not in self.loads:
            return  # it has let go
        self.loads.remove(ticket)
        if reason and not self.failed:
            self.failed = f"load {ticket} failed: {reason}"
            self._reach(FAILED)
            self.windows.leave(self.anchor)  # what they held may be gone; it can only be released now
        if self.failed:
            return
        if not self.loads:
            self._reach(ACTIVE)
            self._settle()
        elif self.place.is_hittable(self.host_anchor):  # only windows further up still come: they keep nothing below
            self._device.move(self.host_anchor)
            self.sealed = self.hit_blocks

    def _reach(self, state: SequenceState) -> None:
        """Move on when its loads have ended, unless it has begun to end before them."""
        if self.state is not ENDED:
            self.state = move(self.state, state)

    def _settle(self) -> None:
        """Hold the hit on the device, where all of it is now, and nothing on the host."""
        tip = self.host_anchor
        self._device.move(tip)
        self.place.used[tip] |= self.is_use
        self._host.let_go()
        self.sealed = self.hit_blocks

    def let_go(self) -> None:
        """Hold nothing any more. What it relied on goes on without it. Twice is fine."""
        if self._until_loaded:
            self._let_go_until_loaded()
        if self.windows.rows:
            self.windows.leave(self.anchor)
        self._device.move(NO_ROW)
        self._host.move(NO_ROW)
        self.loads.clear()


class Prefetch(Hold):
    """A prefix in flight to the device that no sequence uses yet: it is held until its loads have ended.

    ``siblings``: the prefetches of its lease that have not ended; this one is there until it has.
    """

    __slots__ = ("siblings",)

    is_use = False

    def __init__(self, ledger: BlockLedger, place: Place, siblings: dict[Prefetch, None]) -> None:
        super().__init__(ledger, place)
        self.siblings = siblings
        siblings[self] = None

    def load_ended(self, ticket: int, reason: str) -> None:
        """See ``Hold``; with its last load it ends."""
        super().load_ended(ticket, reason)
        if not self.loads:
            self.let_go()

    def let_go(self) -> None:
        """See ``Hold``."""
        super().let_go()
        self.siblings.pop(self, None)
