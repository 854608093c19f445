"""Sealing what nobody has sealed before, of many sequences in one go: the straight way of ``BlockTables.seal``.

A block whose key is new has no copy, no child and no user anywhere, and its parent is pinned by the sequence or new
itself. So nothing that is filed anywhere moves, and the columns are written in plain loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from cachesvc.ledger.place import Place
from cachesvc.ledger.tables import BlockTables

NewBlocks = tuple[BlockTables, Sequence[bytes]]
"""The next computed blocks of a sequence, none of whose keys the index has."""


def seal_new(place: Place, parts: Sequence[NewBlocks], stamp: int, reuses: Mapping[bytes, int]) -> list[list[int]]:
    """Seal all of ``parts``, each of a sequence of its own, whose pages at these positions are private or, in windowed
    groups, none. ``stamp``: the first of as many access numbers as there are blocks and parts. ``reuses``: the
    remembered reuse counts. Returns the rows, part by part. Raises IllegalMove."""
    ledger = parts[0][0].ledger
    index = ledger.index
    anchors = [tables.anchor for tables, _ in parts]
    new = [keys for _, keys in parts]
    paths = index.insert_paths(zip(anchors, new, strict=True), stamp, reuses)
    rows = list(chain.from_iterable(paths))
    for group in range(len(place.pools)):
        pages: list[int] = []
        for tables, keys in parts:
            tables.give_up(group, len(keys), pages)
        place.seal_new(group, rows, pages)
    place.come(rows, index.parent)
    ledger.pin_below(place, [(anchor, path[-1]) for anchor, path in zip(anchors, paths, strict=True)])
    for (tables, keys), path in zip(parts, paths, strict=True):
        tables.sealed_new(keys, path)
    return paths
