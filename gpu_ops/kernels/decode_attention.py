"""Decode attention over paged bf16 keys and values, by a block table for each head or for a group of heads.

Each kv head has its own window and sinks, in tokens; a window counts the query, and 0 has no bound. Holes of a table
(-1, or no page of the pool) and what is out of reach are masked and never read. Needs CuPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

import numpy as np

from gpu_ops.kernels.batches import BlockTable, Reach
from gpu_ops.kernels.launch import MAX_GRID, blocks_for, launch
from gpu_ops.kernels.operands import Array, Kind, Operand, operand, require, same_device

SOURCE = "decode_attention"
THREADS = 128
WIDTHS = (64, 128, 256)
TILE = 16
QUERIES = 16
LEAST_SPLIT_TOKENS = 256
"""Below this a split's start and its part of the merge cost more than what it reads."""
BLOCKS_PER_SM = 8
"""Blocks a multiprocessor: some four waves of what fits at once, so that the last one's idle share is small."""
MAX_SPLITS = 256


@dataclass(frozen=True, slots=True, eq=False)
class HeadRules:
    """Tables that each kv head reads of a sequence's ``tables``, and its reach; on a device."""

    heads: int
    tables: int
    device: int
    table_of: Operand
    windows: Operand
    sinks: Operand


@dataclass(frozen=True, slots=True, eq=False)
class SplitSpace:
    """Buffer of the splits' sums, float32, until they are merged: for one launch at a time. One split needs none."""

    splits: int
    sums: Array | None
    weights: Array | None


@dataclass(frozen=True, slots=True, eq=False)
class PagedCache:
    """``keys`` and ``values``: ``[pages, kv heads, block_tokens, D]`` bf16; ``cells``: tables, ``[batch * tables,
    blocks]`` int32, those of a sequence one after another; ``lengths``: tokens, the query's among them, ``[batch]``."""

    keys: Array
    values: Array
    cells: Array
    lengths: Array


def head_rules(table_of_head: Sequence[int], reach_of_head: Sequence[Reach], device: int) -> HeadRules:
    """Bring the rules to a device, and wait for them. Raises ValueError."""
    heads = len(table_of_head)
    require(heads > 0, "table_of_head: no heads")
    require(len(reach_of_head) == heads, f"reach_of_head: {len(reach_of_head)} for {heads} heads")
    for reach in reach_of_head:
        reach.check()
    used = set(table_of_head)
    require(used == set(range(len(used))), f"table_of_head: {sorted(used)}, not 0, 1, ... without a gap")
    columns = (
        ("table_of", list(table_of_head)),
        ("windows", [reach.window_tokens for reach in reach_of_head]),
        ("sinks", [reach.sink_tokens for reach in reach_of_head]),
    )
    made = [_uploaded(name, numbers, device) for name, numbers in columns]
    return HeadRules(heads, len(used), device, *made)


def plan_splits(batch: int, kv_heads: int, group: int, max_tokens: int, sms: int) -> int:
    """Number of splits that fill ``sms`` multiprocessors, for sequences of up to ``max_tokens``."""
    blocks = batch * kv_heads * blocks_for(group, QUERIES)
    useful = max(1, max_tokens // LEAST_SPLIT_TOKENS)
    return min(MAX_SPLITS, useful, blocks_for(sms * BLOCKS_PER_SM, max(1, blocks)))


def split_space(batch: int, query_heads: int, width: int, splits: int, device: int) -> SplitSpace:
    """Allocate, on CuPy's current stream of ``device``, what ``splits`` need. Raises ValueError."""
    require(0 < splits <= MAX_SPLITS, f"splits: {splits}; 1 to {MAX_SPLITS}")
    if splits == 1:
        return SplitSpace(1, None, None)
    import cupy

    with cupy.cuda.Device(device):
        sums = cupy.empty((batch, query_heads, splits, width), np.float32)
        return SplitSpace(splits, sums, cupy.empty((batch, query_heads, splits, 2), np.float32))


def decode_attention(
    queries: Array, cache: PagedCache, rules: HeadRules, space: SplitSpace, out: Array, stream: int, scale: float
) -> None:
    """Queue attention of ``queries``, ``[batch, query heads, D]`` bf16, each its sequence's last token, into ``out``.

    Query heads ``h * group ...`` share kv head ``h``. A sequence without visible tokens gives zeros. May be captured in
    a graph, after one use. Raises ValueError, with nothing queued.
    """
    asked = operand("queries", queries, Kind.BF16, (None, None, None)).dense(2).aligned(2).spaced(1)
    batch, query_heads, width = asked.shape
    require(width in WIDTHS, f"queries: D {width}; {WIDTHS}")
    require(query_heads % rules.heads == 0, f"queries: {query_heads} heads for {rules.heads} kv heads")
    require(scale > 0, f"scale: {scale}")
    pool = _read_pool(cache, rules.heads, width)
    pages, block_tokens = pool[0].shape[0], pool[0].shape[2]
    cells, shape = BlockTable(cache.cells, pages, block_tokens).read(batch * rules.tables)
    lengths = operand("lengths", cache.lengths, Kind.INT32, (batch,)).dense()
    written = operand("out", out, Kind.BF16, asked.shape).dense()
    partials = _read_space(space, asked.shape)
    group = query_heads // rules.heads
    grid = (space.splits, rules.heads * blocks_for(group, QUERIES), batch)
    require(max(grid[1:]) <= MAX_GRID, f"queries: {batch} sequences, {query_heads} heads; a grid has {MAX_GRID}")
    if not asked.count:
        return
    device = same_device(asked, *pool, cells, rules.table_of, lengths, written, *partials)
    arguments = (
        *(asked, asked.strides[0], asked.strides[1]),
        *(number for one in pool for number in (one, one.strides[0], one.strides[1])),
        *(pages, block_tokens, cells, *shape, rules.tables, rules.table_of, rules.windows, rules.sinks),
        *(lengths, rules.heads, group, float(scale * log2(np.e)), written),
        *(partials or (None, None)),
    )
    launch(SOURCE, f"decode_attention_{width}", grid, THREADS, arguments, stream, device)
    if partials:
        merging = (*partials, space.splits, written)
        launch(SOURCE, "merge_splits", (batch * query_heads,), width, merging, stream, device)


def _read_pool(cache: PagedCache, heads: int, width: int) -> tuple[Operand, Operand]:
    keys = operand("keys", cache.keys, Kind.BF16, (None, heads, None, width))
    values = operand("values", cache.values, Kind.BF16, keys.shape)
    for plane in (keys, values):
        plane.dense(2).aligned(2).spaced(1)
        require(plane.strides[0] > 0 or plane.shape[0] < 2, f"{plane.name}: stride {plane.strides[0]} between pages")
    tokens = keys.shape[2]
    require(tokens > 0 and tokens % TILE == 0, f"keys: blocks of {tokens} tokens, not a multiple of {TILE}")
    return keys, values


def _read_space(space: SplitSpace, shape: tuple[int, ...]) -> tuple[Operand, ...]:
    if space.splits == 1:
        return ()
    batch, heads, width = shape
    sums = operand("sums", space.sums, Kind.FLOAT32, (batch, heads, space.splits, width)).dense()
    return sums, operand("weights", space.weights, Kind.FLOAT32, (batch, heads, space.splits, 2)).dense()


def _uploaded(name: str, numbers: list[int], device: int) -> Operand:
    import cupy

    with cupy.cuda.Device(device):
        made = cupy.asarray(np.array(numbers, np.int32))
        cupy.cuda.get_current_stream().synchronize()
    return operand(name, made, Kind.INT32, (len(numbers),))
