"""Growth of many sequences in one go, by pages that are their lease's already."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from cachesvc.ledger.block_tables import BlockTables
from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.words import NO_PAGE


def grow_by(all_tables: Sequence[BlockTables], bounds: Sequence[int], columns: Sequence[Sequence[int]]) -> None:
    """``BlockTables.grow`` for each of some sequences: the n-th by the pages ``[bounds[n], bounds[n + 1])`` of each
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


def _grow_in_part(all_tables: Sequence[BlockTables], bounds: Sequence[int], group: int, column: Sequence[int]) -> None:
    """Grow the tables of a windowed group, in which some blocks have no page."""
    for tables, (first, last) in zip(all_tables, pairwise(bounds), strict=True):
        pages = column[first:last]
        tables.tables[group].extend(pages)
        tables.own[group].update(page for page in pages if page != NO_PAGE)
