"""Sealing what nobody has sealed before, of many sequences in one go: the straight way of ``BlockTables.seal``.

A block whose key is new has no copy, no child and no user anywhere, and its parent is pinned by the sequence or new
itself. So nothing that is filed anywhere moves, and the columns are written in plain loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from cachesvc.ledger.index import BlockIndex
from cachesvc.ledger.place import NO_ROW, Place
from cachesvc.ledger.tables import BlockTables

NewBlocks = tuple[BlockTables, Sequence[bytes]]
"""The next computed blocks of a sequence, none of whose keys the index has."""


def seal_new(place: Place, parts: Sequence[NewBlocks], stamp: int, reuses: Mapping[bytes, int]) -> list[list[int]]:
    """Seal all of ``parts``, each of a sequence of its own, whose pages at these positions are private or, in windowed
    groups, none. ``stamp``: the first of as many access numbers as there are blocks and parts. ``reuses``: the
    remembered reuse counts. Returns the rows, part by part. Raises IllegalMove."""
    index = parts[0][0].ledger.index
    paths = index.insert_paths([(tables.anchor, keys) for tables, keys in parts], stamp, reuses)
    rows = list(chain.from_iterable(paths))
    for group in range(len(place.pools)):
        pages: list[int] = []
        for tables, keys in parts:
            tables.give_up(group, len(keys), pages)
        place.seal_new(group, rows, pages)
    place.come(rows, index.parent)
    moves = [(tables.sealed_new(keys, path), path[-1]) for (tables, keys), path in zip(parts, paths, strict=True)]
    pin_below(place, index, moves, len(rows))
    return paths


def pin_below(place: Place, index: BlockIndex, moves: Sequence[tuple[int, int]], blocks: int) -> None:
    """Take pins back from the first of each pair (NO_ROW: none) and pin the second, which is new and somewhere below
    it: neither is a candidate. ``blocks``: from the first of each pair down to the second, of all together."""
    pins, pinned, depth, head = place.pins, place.pinned, index.depth, index.head
    protected, tips = place.protected, place.protected.tips
    kept = protected.blocks
    for above, row in moves:
        pins[row] = 1
        pinned.add(row)
        if above != NO_ROW:
            left = pins[above] - 1
            pins[above] = left
            if not left:
                pinned.discard(above)
                chain_of = head[row]
                if chain_of == head[above]:  # whose last row ``above`` was, and so its tip
                    tips[chain_of] = depth[row]
                else:
                    protected.keep(row)
                    protected.leave(above)
                continue
        protected.keep(row)
    protected.blocks = kept + blocks  # all that is new, for what they come from was kept
    place.counts.pinned += blocks
