"""Where a call's rows lie in the pages, and what they may see there. Knows no attention.

A call is cut into chunks at block borders, and a chunk always has block_tokens rows: what a row is worth must
not depend on which of its neighbours were computed in the same call. So the blocks that a chunk gathers come
from its block's index alone; those that no computed row can see are zeros, and their pages are not touched.

Chunks that gather equally much stand side by side, in lanes. There are always as many lanes, empty ones among them:
what a row is worth must not depend on the other sequences of the call either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from examples.tiny_transformer.arrays import Array, Arrays
from examples.tiny_transformer.config import Bool, Group

PageIds = npt.NDArray[np.int32]
Index = npt.NDArray[np.int64]

SIGHTS = 256  # remembered: at most 32 MiB where a prompt has 8,192 tokens in blocks of 16


class PageMissing(Exception):
    """A block table has no page for a block that this call reads or writes."""

    def __init__(self, group: str, block: int) -> None:
        super().__init__(f"group {group}: the table has no page for block {block}")
        self.group = group
        self.block = block


@dataclass(frozen=True)
class Chunk:
    """The rows [first_row, end_row) of one block that a call computes; the other rows are padding."""

    block: int
    first_row: int
    end_row: int


@dataclass(frozen=True)
class Reach:
    """Pages that one chunk writes and reads in one group. keys = gathered blocks * block_tokens."""

    write_page: int
    own_slot: int  # which of the gathered blocks is the chunk's
    live_slots: Index  # which of them are read; the others are zeros
    live_pages: Index  # their pages
    dead_rows: Bool  # [gathered blocks, T], rows that no computed row may see: zeroed, whatever the page holds
    hidden: Bool  # [T, keys], True where a query may not see a key


@dataclass(frozen=True)
class StackedReach:
    """Pages that the chunks in all lanes write and read in one group, as arrays of a module."""

    write_pages: Array  # [computed rows]
    live_slots: Array  # of lanes * gathered blocks
    live_pages: Array
    dead_rows: Array  # [lanes * gathered blocks, T]
    hidden: Array  # [lanes, T, keys]
    previous_keys: Array  # of lanes * keys: the key before each computed row but the first of all positions


@dataclass(frozen=True)
class Rows:
    """Mask of the computed rows [lanes * T] of a stack, as arrays of a module."""

    stack_rows: Array  # [computed rows]
    page_rows: Array  # [computed rows], which row of its page each is
    follower_rows: Array  # stack_rows without position 0, before which there is none
    positions: Array  # [lanes * T], of computed and other rows alike


def cut_into_chunks(start_position: int, token_count: int, block_tokens: int) -> list[Chunk]:
    """The chunks of positions [start_position, start_position + token_count), in order."""
    end = start_position + token_count
    return [
        Chunk(
            block,
            max(start_position - block * block_tokens, 0),
            min(end - block * block_tokens, block_tokens),
        )
        for block in range(start_position // block_tokens, -(-end // block_tokens))
    ]


def find_reach(group: Group, chunk: Chunk, block_tokens: int, table: PageIds, step_blocks: int) -> Reach:
    """Work out a chunk's reads and its write from the group's rule and table [blocks]. Raises PageMissing.

    step_blocks: see ``_gathered_blocks``.
    """
    block_start = chunk.block * block_tokens
    sight = _find_sight(group, chunk.block, block_tokens, step_blocks)
    live = sight.keys < block_start + chunk.end_row
    if group.window_tokens is not None:
        first_query = block_start + chunk.first_row
        live &= (sight.keys < group.sink_tokens) | (sight.keys > first_query - group.window_tokens)
    live_slots = np.flatnonzero(live.reshape(-1, block_tokens).any(axis=1))
    live_blocks = sight.blocks[live_slots]
    for block in live_blocks:
        if block >= len(table) or table[block] < 0:
            raise PageMissing(group.name, int(block))
    live_pages = table[live_blocks].astype(np.int64)
    # a chunk sees its own block, so the last page that it reads is the one that it writes
    own_slot = int(live_slots[-1])
    return Reach(int(live_pages[-1]), own_slot, live_slots, live_pages, ~live.reshape(-1, block_tokens), sight.hidden)


def stack_rows(arrays: Arrays, chunks: Sequence[Chunk], block_tokens: int) -> Rows:
    """The computed rows of chunks, one in each of the first lanes."""
    page_rows = [np.arange(chunk.first_row, chunk.end_row) for chunk in chunks]
    stacked = [lane * block_tokens + rows for lane, rows in enumerate(page_rows)]
    followers = [
        rows[1:] if chunk.block == chunk.first_row == 0 else rows for chunk, rows in zip(chunks, stacked, strict=True)
    ]
    blocks = np.zeros((arrays.lanes, 1), dtype=np.int64)
    blocks[: len(chunks), 0] = [chunk.block for chunk in chunks]
    positions = (blocks * block_tokens + np.arange(block_tokens)).reshape(-1)
    parts = (np.concatenate(stacked), np.concatenate(page_rows), np.concatenate(followers), positions)
    return Rows(*map(arrays.put, parts))


def stack_reaches(arrays: Arrays, chunks: Sequence[Chunk], reaches: Sequence[Reach], block_tokens: int) -> StackedReach:
    """The reaches of chunks that gather as many blocks in a group, one in each of the first lanes."""
    count, slots = len(chunks), len(reaches[0].dead_rows)
    dead = np.ones((arrays.lanes, slots, block_tokens), dtype=np.bool_)
    dead[:count] = [reach.dead_rows for reach in reaches]
    hidden = np.zeros((arrays.lanes, block_tokens, slots * block_tokens), dtype=np.bool_)  # of an empty lane, nothing
    hidden[:count] = [reach.hidden for reach in reaches]
    computed = [chunk.end_row - chunk.first_row for chunk in chunks]
    previous = [
        (lane * slots + reach.own_slot) * block_tokens
        + np.arange(max(chunk.first_row, int(chunk.block == 0)), chunk.end_row)
        - 1
        for lane, (chunk, reach) in enumerate(zip(chunks, reaches, strict=True))
    ]
    stacked = StackedReach(
        write_pages=np.repeat([reach.write_page for reach in reaches], computed),
        live_slots=np.concatenate([lane * slots + reach.live_slots for lane, reach in enumerate(reaches)]),
        live_pages=np.concatenate([reach.live_pages for reach in reaches]),
        dead_rows=dead.reshape(-1, block_tokens),
        hidden=hidden,
        previous_keys=np.concatenate(previous),
    )
    return replace(stacked, **{each.name: arrays.put(getattr(stacked, each.name)) for each in fields(stacked)})


def write_rows(pages: Array, reach: StackedReach, which: Rows, rows: Array) -> None:
    """Put the computed rows of [page_heads, lanes * T, width] into their pages of [pages, page_heads, T, width]."""
    pages[reach.write_pages, :, which.page_rows] = rows[:, which.stack_rows].swapaxes(0, 1)


def gather_rows(arrays: Arrays, pages: Array, reach: StackedReach) -> Array:
    """A contiguous [lanes * page_heads, keys, width] of all rows that chunks may see; others are 0 bytes."""
    _, page_heads, block_tokens, width = pages.shape
    gathered = arrays.zeros((len(reach.dead_rows), page_heads, block_tokens, width), pages)
    gathered[reach.live_slots] = pages[reach.live_pages]
    arrays.blank(gathered, reach.dead_rows)
    lanes = gathered.reshape(arrays.lanes, -1, page_heads, block_tokens, width).swapaxes(1, 2)
    return lanes.reshape(arrays.lanes * page_heads, -1, width)


class _Sight(NamedTuple):
    """Blocks that the rows of one block may see: the same for all its chunks."""

    blocks: Index
    keys: Index  # the positions in those blocks
    hidden: Bool  # [T, keys]


@lru_cache(SIGHTS)
def _find_sight(group: Group, block: int, block_tokens: int, step_blocks: int) -> _Sight:
    blocks = _gathered_blocks(group, block, block_tokens, step_blocks)
    keys = (blocks[:, None] * block_tokens + np.arange(block_tokens)).reshape(-1)
    queries = np.arange(block * block_tokens, (block + 1) * block_tokens)[:, None]
    hidden = keys > queries
    if group.window_tokens is not None:
        hidden |= (keys >= group.sink_tokens) & (keys <= queries - group.window_tokens)
    return _Sight(blocks, keys, hidden)


def _gathered_blocks(group: Group, block: int, block_tokens: int, step_blocks: int) -> Index:
    """The blocks that any row of `block` can see, ascending: the sinks' and the window's, or all.

    Behind them stand later ones, hidden from every row, so that there are as many for more blocks: with a step of more
    than 1 a multiple of it, or the most that a window ever has.
    """
    if group.window_tokens is None:
        return np.arange(-(-(block + 1) // step_blocks) * step_blocks)
    first = max(block * block_tokens - group.window_tokens + 1, 0) // block_tokens
    sink_blocks = -(-group.sink_tokens // block_tokens)
    sinks, end = np.arange(min(sink_blocks, first)), block + 1
    if step_blocks > 1:
        end = first + sink_blocks - len(sinks) + -(-(group.window_tokens - 1) // block_tokens) + 1
    return np.concatenate((sinks, np.arange(first, end)))
