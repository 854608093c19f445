"""Host blocks that are read beside the engines, by other nodes or for storage: they stay until no reader is left."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from cachesvc.ledger.index.block_ledger import BlockLedger
from cachesvc.ledger.index.pins import Pin, WindowPins, held_by
from cachesvc.ledger.index.tier_copies import NO_ROW, Place
from cachesvc.model.numbers.int32s import column
from cachesvc.model.words import NO_PAGE, READY


def filling_of(host: Place, rows: array[int]) -> npt.NDArray[np.int64]:
    """For each of some rows the ticket that brings a copy of it to the host, 0 where none does."""
    return np.frombuffer(host.filling, np.int64)[column(rows)]


class LentBlocks:
    """A run of a path that is on the host or on its way there, ``rows`` root first. ``pages[g]``: of each row its host
    page, or NO_PAGE where a window has none. ``keys``: of each row; ``parent``: of the block above the first, empty for
    none. ``tickets``: those that bring its rows; it is a ``Waiter`` of each. ``on_change``: called when more of it has
    come, or will not. Pinned by its deepest row: the host evicts leaves first."""

    def __init__(
        self, blocks: BlockLedger, rows: array[int], pages: list[array[int]], tickets: Iterable[int] = ()
    ) -> None:
        self.rows = rows
        self.pages = pages
        self.keys = [blocks.index.key_of(row) for row in rows]
        self.parent = blocks.index.key_of(blocks.index.parent[rows[0]])
        self.on_change: Callable[[], None] | None = None
        self._tickets = set(tickets)
        self._end = len(rows)
        self._is_over = False
        self._pin = Pin(blocks, blocks.host, rows[-1])
        self._host = blocks.host
        self._windows = WindowPins(blocks, blocks.host)
        for group in blocks.host.window_groups:
            held = {at: row for at, (row, page) in enumerate(zip(rows, pages[group], strict=True)) if page >= 0}
            self._windows.hold_all(group, held)

    @property
    def is_cut(self) -> bool:
        """True where a copy has failed that some of it was to come by."""
        return self._end < len(self.rows)

    def ready(self) -> int:
        """Number of its leading blocks that are on the host, whole."""
        coming = np.isin(filling_of(self._host, self.rows), list(self._tickets))
        return min(self._end, int(np.argmax(coming)) if coming.any() else len(self.rows))

    def load_ended(self, ticket: int, reason: str) -> None:
        """Handle the end of a ticket: what it failed to bring, and all below, is lent no more."""
        if self._is_over:
            return
        self._tickets.discard(ticket)
        if reason:
            self._cut(filling_of(self._host, self.rows) == ticket)
        if self.on_change is not None:
            self.on_change()

    def pins(self) -> Iterator[tuple[int, int | None, int]]:
        """Place, group (None: the block's own) and row of each pin. For audits."""
        if self._pin.row != NO_ROW:
            yield from held_by(self._pin, self._windows)

    def let_go(self) -> None:
        """Unpin them: they have no reader any more."""
        self._is_over = True
        self._windows.let_go()
        self._pin.let_go()

    def _cut(self, failed: npt.NDArray[np.bool_]) -> None:
        """Unpin the rows from the first that has ``failed`` on."""
        if not failed.any():
            return
        self._end = min(self._end, int(np.argmax(failed)))
        for group, held in self._windows.rows.items():
            self._windows.drop(group, [at for at in held if at >= self._end])
        self._pin.move(self.rows[self._end - 1] if self._end else NO_ROW)


class Keep:
    """A host block that is being written from ``pages``, of each group one or NO_PAGE: they stay its until all of its
    objects have ended. ``out``: how many have not. ``states_alone``: the rest of the block was written before."""

    def __init__(self, blocks: BlockLedger, row: int, *, states_alone: bool = False) -> None:
        host = blocks.host
        groups = host.state_groups if states_alone else range(len(host.pools))
        self.pages = tuple(
            host.pages[group][row] if group in groups and host.states[group][row] == READY else NO_PAGE
            for group in range(len(host.pools))
        )
        self.out = 0
        self.is_good = True
        self._pin = Pin(blocks, host, row)
        self._windows = WindowPins(blocks, host)
        for group in host.window_groups:
            if self.pages[group] != NO_PAGE:
                self._windows.hold(group, blocks.index.depth[row], row)

    def pins(self) -> Iterator[tuple[int, int | None, int]]:
        """Place, group (None: the block's own) and row of each pin. For audits."""
        yield from held_by(self._pin, self._windows)

    def let_go(self) -> None:
        """Unpin its pages: they have no reader any more."""
        self._windows.let_go()
        self._pin.let_go()
