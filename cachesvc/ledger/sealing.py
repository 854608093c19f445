"""Sealing of new blocks of many sequences in one go: the fast path of ``OpenSequence.seal``.

A block whose key is new has no copy, no child and no user anywhere, and its parent is pinned by the sequence or new
itself. So nothing that is filed anywhere moves, and the columns are written in plain loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

from cachesvc.ledger.block_index import BlockIndex
from cachesvc.ledger.sequences import OpenSequence
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.words import KEY_BYTES, NO_PAGE


class NewBlocks(NamedTuple):
    """The next computed blocks of some sequences, each once: the n-th has those of ``keys[bounds[n]:bounds[n + 1]]``,
    one at least; a range is of one each. The index has none of the keys, which are distinct."""

    tables: Sequence[OpenSequence]
    keys: list[bytes]
    bounds: Sequence[int]


def seal_new(place: Place, blocks: NewBlocks, stamp: int, reuses: Mapping[bytes, int]) -> Sequence[Sequence[int]]:
    """Seal all of ``blocks`` but for states and scratch. Their pages are private or, in windowed groups, none.
    ``stamp``: the first of as many access numbers as there are blocks and sequences. ``reuses``: the remembered reuse
    counts. Returns the rows of each sequence. Raises IllegalMove."""
    all_tables, keys, bounds = blocks
    index = all_tables[0].ledger.index
    tips = [tables.anchor for tables in all_tables]
    paths: Sequence[Sequence[int]]
    parts: Sequence[Sequence[bytes]]
    if isinstance(bounds, range):
        rows = last = insert_each(index, tips, keys, stamp, reuses)
        paths, parts = list(zip(rows)), list(zip(keys))
    else:
        parts = [keys[first:end] for first, end in pairwise(bounds)]
        paths = index.insert_paths(zip(tips, parts, strict=True), stamp, reuses)
        rows, last = list(chain.from_iterable(paths)), [path[-1] for path in paths]
    for group in range(len(place.pools)):
        if group not in place.unsealed_groups:
            place.seal_new(group, rows, _give_up(group, blocks))
    place.come(rows, index.parent)
    for tables, path, part in zip(all_tables, paths, parts, strict=True):
        tables.sealed_new(part, path)
    pin_below(place, index, zip(tips, last, strict=True), len(rows))
    return paths


def insert_each(
    index: BlockIndex, tips: Sequence[int], keys: Sequence[bytes], stamp: int, reuses: Mapping[bytes, int]
) -> list[int]:
    """``BlockIndex.insert_paths`` for a path of one key below each of ``tips``. Returns the row of each."""
    parts, keys_of, parent, depth, head = index.rows.parts, index.keys, index.parent, index.depth, index.head
    children, continued, stamps, hits = index.children, index.continued, index.stamp, index.hits
    rows = index.take_rows(len(keys))
    accesses = range(stamp + 1, stamp + 2 * len(keys), 2)
    for row, key, above, access in zip(rows, keys, tips, accesses, strict=True):
        parts[key[-1]][key] = row
        keys_of[row] = key
        parent[row] = above
        stamps[row] = access
        hits[row] += 1
        if above == NO_ROW:
            depth[row] = 0
            head[row] = row
        else:
            depth[row] = depth[above] + 1
            children[above] += 1
            head[row] = row if continued[above] else head[above]
            continued[above] = 1
    if reuses:
        for key, row in zip(keys, rows, strict=True):
            index.reuses[row] = reuses.get(key, 0)
    return rows


def _give_up(group: int, blocks: NewBlocks) -> list[int]:
    """Hand over the pages of these blocks in a group: no sequence owns them from now on."""
    pages: list[int] = []
    if isinstance(blocks.bounds, range):
        for tables in blocks.tables:
            page = tables.tables[group][tables.sealed]
            pages.append(page)
            tables.own[group].discard(page)
        return pages
    for tables, (first, end) in zip(blocks.tables, pairwise(blocks.bounds), strict=True):
        mine = tables.tables[group][tables.sealed : tables.sealed + end - first]
        pages += mine
        tables.own[group].difference_update(mine)
    return pages


def pin_below(place: Place, index: BlockIndex, moves: Iterable[tuple[int, int]], blocks: int) -> None:
    """Take pins back from the first of each pair (NO_ROW: none) and pin the second, which is new and somewhere below
    it: neither is a candidate. ``blocks``: from the first of each pair down to the second, of all together."""
    pins, depth, head = place.pins, index.depth, index.head
    protected, tips = place.protected, place.protected.tips
    kept = protected.blocks
    for above, row in moves:
        pins[row] = 1
        if above != NO_ROW:
            left = pins[above] - 1
            pins[above] = left
            if not left:
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


def grow_by(all_tables: Sequence[OpenSequence], bounds: Sequence[int], columns: Sequence[Sequence[int]]) -> None:
    """``OpenSequence.grow`` for each of some sequences: the n-th by the pages ``[bounds[n], bounds[n + 1])`` of each
    group's column; a range is of one page each. Group by group: a loop over each sequence's groups costs more than what
    it does."""
    for group, column in enumerate(columns):
        if NO_PAGE in column:
            _grow_in_part(all_tables, bounds, group, column)
            continue
        if isinstance(bounds, range):
            for tables, page in zip(all_tables, column[bounds[0] : bounds[-1]], strict=True):
                tables.tables[group].append(page)
                tables.own[group].add(page)
            continue
        for tables, (first, last) in zip(all_tables, pairwise(bounds), strict=True):
            pages = column[first:last]
            tables.tables[group].extend(pages)
            tables.own[group].update(pages)
    computing = all_tables[0].ledger.computing if all_tables else {}
    for tables in all_tables:
        declared, known = tables.declared, len(tables.keys)
        if known <= declared * KEY_BYTES:
            continue
        last = len(tables.tables[0])
        if declared + 1 != last or declared < tables.sealed or declared < tables.hit_blocks:
            tables.declare(last)
        else:  # by far the most: its next block
            tables.declared = last
            key = bytes(tables.keys[declared * KEY_BYTES : last * KEY_BYTES])
            computing[key] = computing.get(key, 0) + 1


def _grow_in_part(all_tables: Sequence[OpenSequence], bounds: Sequence[int], group: int, column: Sequence[int]) -> None:
    """Grow the tables of a windowed group, in which some blocks have no page."""
    for tables, (first, last) in zip(all_tables, pairwise(bounds), strict=True):
        pages = column[first:last]
        tables.tables[group].extend(pages)
        tables.own[group].update(page for page in pages if page != NO_PAGE)
