"""Host blocks that other nodes read: they stay until no stream sends from them any more."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from cachesvc.ledger.index.block_ledger import BlockLedger
from cachesvc.ledger.index.pins import Pin, WindowPins, held_by


class LentBlocks:
    """A run of a path that is whole on the host, ``rows`` root first. ``pages[g]``: of each row its host page, or
    NO_PAGE where a window has none. ``keys``: of each row; ``parent``: of the block above the first, empty for none.
    Pinned by its deepest row: the host evicts leaves first."""

    def __init__(self, blocks: BlockLedger, rows: array[int], pages: list[array[int]]) -> None:
        self.rows = rows
        self.pages = pages
        self.keys = [blocks.index.key_of(row) for row in rows]
        self.parent = blocks.index.key_of(blocks.index.parent[rows[0]])
        self._pin = Pin(blocks, blocks.host, rows[-1])
        self._windows = WindowPins(blocks, blocks.host)
        for group in blocks.host.window_groups:
            held = {at: row for at, (row, page) in enumerate(zip(rows, pages[group], strict=True)) if page >= 0}
            self._windows.hold_all(group, held)

    def pins(self) -> Iterator[tuple[int, int | None, int]]:
        """Place, group (None: the block's own) and row of each pin. For audits."""
        yield from held_by(self._pin, self._windows)

    def let_go(self) -> None:
        """Unpin them: they have no reader any more."""
        self._windows.let_go()
        self._pin.let_go()
