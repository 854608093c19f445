"""One request's block tables, and what it holds: pins, private pages, loads that it relies on."""

from __future__ import annotations

from dataclasses import dataclass, field

from cachesvc.ledger.place import NO_ROW
from cachesvc.model.keys import KEY_BYTES


@dataclass(slots=True)
class Sequence:
    """Positions ``[0, sealed)`` are shared blocks down to ``anchor``; ``[sealed, hit_blocks)`` are being loaded.

    ``anchor`` is pinned on the device; ``host_anchor`` on the host while its blocks are still to be loaded, or while
    the sequence is swapped out. ``tables[g][i]`` is a page or NO_PAGE. ``own[g]``: pages that this sequence alone may
    write, in its tables or spare (their key was sealed by somebody else first). ``cursors[g]``: first position behind
    the sinks that a windowed group still holds; ``window_rows[g]``: position -> row of its pinned shared pages.
    ``hit_pins``: ``(place, group, row)`` of what else a hit relies on until its loads begin: a windowed copy, or where
    there is no group a block. ``swapped``: ``(group, position, host page)`` of own pages while swapped out.
    ``declared``: the keys of positions from ``max(sealed, hit_blocks)`` up to here count as being computed by it.
    """

    id: int
    lease: str
    model: int
    replica: int
    keys: bytearray
    tables: list[list[int]]
    cursors: dict[int, int]
    own: list[set[int]]
    anchor: int = NO_ROW
    host_anchor: int = NO_ROW
    sealed: int = 0
    hit_blocks: int = 0
    declared: int = 0
    window_rows: dict[int, dict[int, int]] = field(default_factory=dict)
    hit_pins: list[tuple[int, int | None, int]] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    swap_ticket: int = 0
    swapped_out: bool = False
    swapped: list[tuple[int, int, int]] = field(default_factory=list)
    failed: str = ""

    @property
    def blocks(self) -> int:
        """Length of the block tables."""
        return len(self.tables[0])

    def key(self, position: int) -> bytes:
        """Key of one block, as far as the keys are known."""
        return bytes(self.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES])

    @property
    def known_keys(self) -> int:
        """How many blocks' keys are known."""
        return len(self.keys) // KEY_BYTES

    def own_pages(self) -> list[tuple[int, int]]:
        """``(group, page)`` of everything that this sequence alone may write."""
        return [(group, page) for group, pages in enumerate(self.own) for page in sorted(pages)]
