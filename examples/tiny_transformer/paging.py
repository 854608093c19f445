"""Where a call's rows lie in the pages, and what they may see there. Knows no attention.

A call is cut into chunks at block borders, and a chunk always has block_tokens rows: what a row is worth must
not depend on which of its neighbours were computed in the same call. So the blocks that a chunk gathers come
from its block's index alone; those that no computed row can see are zeros, and their pages are not touched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from examples.tiny_transformer.arrays import Array, Arrays
from examples.tiny_transformer.config import Group

PageIds = npt.NDArray[np.int32]


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
    """What one chunk writes and reads in one group. keys = gathered blocks * block_tokens."""

    write_page: int
    gathered_blocks: int
    live_slots: Array  # which of the gathered blocks are read; the others are zeros
    live_pages: Array  # their pages, int64
    dead_rows: Array  # [keys], rows that no computed row may see: zeroed, whatever the page holds
    hidden: Array  # [T, keys], True where a query may not see a key

    def on(self, arrays: Arrays) -> Reach:
        """The same as arrays of a module."""
        return replace(
            self,
            live_slots=arrays.put(self.live_slots),
            live_pages=arrays.put(self.live_pages),
            dead_rows=arrays.put(self.dead_rows),
            hidden=arrays.put(self.hidden),
        )


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


def find_reach(group: Group, chunk: Chunk, block_tokens: int, table: PageIds) -> Reach:
    """Work out a chunk's reads and its write from the group's rule and table [blocks]. Raises PageMissing."""
    block_start = chunk.block * block_tokens
    blocks = _gathered_blocks(group, chunk.block, block_tokens)
    keys = (blocks[:, None] * block_tokens + np.arange(block_tokens)).reshape(-1)
    first_query, end_query = block_start + chunk.first_row, block_start + chunk.end_row
    live = keys < end_query
    queries = np.arange(block_start, block_start + block_tokens)[:, None]
    hidden = keys > queries
    if group.window_tokens is not None:
        is_sink = keys < group.sink_tokens
        live &= is_sink | (keys > first_query - group.window_tokens)
        hidden |= ~is_sink & (keys <= queries - group.window_tokens)
    live_slots = np.flatnonzero(live.reshape(-1, block_tokens).any(axis=1))
    live_blocks = blocks[live_slots]
    for block in live_blocks:
        if block >= len(table) or table[block] < 0:
            raise PageMissing(group.name, int(block))
    live_pages = table[live_blocks].astype(np.int64)
    # a chunk sees its own block, so the last page that it reads is the one that it writes
    return Reach(int(live_pages[-1]), len(blocks), live_slots, live_pages, ~live, hidden)


def write_rows(pages: Array, reach: Reach, chunk: Chunk, rows: Array) -> None:
    """Put a chunk's computed rows [page_heads, T, width] into its page of [pages, page_heads, T, width]."""
    computed = slice(chunk.first_row, chunk.end_row)
    pages[reach.write_page, :, computed] = rows[:, computed]


def gather_rows(arrays: Arrays, pages: Array, reach: Reach) -> Array:
    """A contiguous [page_heads, keys, width] of all rows that a chunk may see; rows that it may not are 0 bytes."""
    _, page_heads, block_tokens, width = pages.shape
    gathered = arrays.zeros((page_heads, reach.gathered_blocks, block_tokens, width), pages)
    gathered[:, reach.live_slots] = pages[reach.live_pages].swapaxes(0, 1)
    rows = gathered.reshape(page_heads, -1, width)
    rows[:, reach.dead_rows] = 0
    return rows


def _gathered_blocks(group: Group, block: int, block_tokens: int) -> npt.NDArray[np.int64]:
    """The blocks that any row of `block` can see, ascending: the sinks' and the window's, or all."""
    if group.window_tokens is None:
        return np.arange(block + 1)
    first = max(block * block_tokens - group.window_tokens + 1, 0) // block_tokens
    sink_blocks = -(-group.sink_tokens // block_tokens)
    return np.concatenate((np.arange(min(sink_blocks, first)), np.arange(first, block + 1)))
