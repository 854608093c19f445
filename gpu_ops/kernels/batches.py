"""Index arrays for a batch's tokens: where rows begin, positions, slots, key ranges, window rows.

Row ``b`` of a batch has ``added[b]`` new tokens behind ``cached[b]`` cached ones; ``starts`` are their sums, rows + 1
of them, and all of this is int32 unless said otherwise. A window of 0 tokens has no bound; otherwise it counts the
query itself. Nothing here waits; arrays must stay until the stream has come by. All raise ValueError, with nothing
queued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_ops.kernels.launch import MAX_GRID, blocks_for, launch
from gpu_ops.kernels.operands import Array, Kind, Operand, operand, require, same_device

SOURCE = "sequences"
THREADS = 256
SCAN_THREADS = 1024
ROW_THREADS = 128
WARP = 32
COLUMNS = 4
MAX_HEADS = 64
"""Kv heads of a rank: a kernel takes a group's members as bits of one word."""
MAX_ROW = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Reach:
    """Keys of a sequence that a layer sees. ``window_tokens`` 0: everything."""

    window_tokens: int = 0
    sink_tokens: int = 0

    def check(self) -> None:
        """Check the fields. Raises ValueError."""
        require(self.window_tokens >= 0, f"window_tokens: {self.window_tokens} is negative")
        require(self.sink_tokens >= 0, f"sink_tokens: {self.sink_tokens} is negative")


EVERYTHING = Reach()


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """Pages by row and block, -1 in holes; the pool that they are of. A cell beyond the pool counts as a hole."""

    cells: Array
    pages: int
    block_tokens: int

    def read(self, rows: int | None) -> tuple[Operand, tuple[int, int]]:
        """The cells, and their row stride in cells and their columns. Raises ValueError."""
        cells = operand("table", self.cells, Kind.INT32, (rows, None)).dense(1).spaced()
        require(self.block_tokens > 0, f"block_tokens: {self.block_tokens}")
        slots = self.pages * self.block_tokens
        require(0 <= slots <= MAX_ROW, f"pages: {self.pages} of {self.block_tokens} tokens are not numbered in int32")
        return cells, (cells.strides[0] // cells.size_bytes, cells.shape[1])


def cumulate_lengths(
    added: Array,
    cached: Array,
    starts_q: Array,
    starts_k: Array,
    longest: Array,
    stream: int,
    reach: Reach = EVERYTHING,
) -> None:
    """Write where the rows begin: among the new tokens, and among new and cached ones within reach of a prefill.

    ``longest``: the largest number of new tokens of a row, and of both. Of cached tokens a window keeps
    ``window - 1`` and the sinks before them.
    """
    reach.check()
    rows = operand("added", added, Kind.INT32, (None,)).count
    inputs = [operand("added", added, Kind.INT32, (rows,)), operand("cached", cached, Kind.INT32, (rows,))]
    outputs = [
        operand(name, array, Kind.INT32, (size,))
        for name, array, size in (("starts_q", starts_q, rows + 1), ("starts_k", starts_k, rows + 1))
    ]
    outputs.append(operand("longest", longest, Kind.INT32, (2,)))
    device = same_device(*(one.dense() for one in inputs + outputs))
    arguments = (*inputs, rows, reach.window_tokens, reach.sink_tokens, *outputs)
    launch(SOURCE, "cumulate_lengths", (1,), SCAN_THREADS, arguments, stream, device)


def token_positions(starts_q: Array, cached: Array, positions: Array, stream: int) -> None:
    """Write each new token's position: cached[b] + i; -1 behind the last row's end."""
    starts, before, rows = _read_rows(starts_q, cached)
    out = operand("positions", positions, Kind.INT32, (None,)).dense()
    if out.count:
        device = same_device(starts, before, out)
        arguments = (starts, before, rows, out.count, out)
        launch(SOURCE, "token_positions", (blocks_for(out.count, THREADS),), THREADS, arguments, stream, device)


def token_slots(starts_q: Array, cached: Array, table: BlockTable, slots: Array, stream: int) -> None:
    """Write each new token's slot, page * block_tokens + its place there, int64; -1 in a hole and behind the end."""
    starts, before, rows = _read_rows(starts_q, cached)
    cells, shape = table.read(rows)
    out = operand("slots", slots, Kind.INT64, (None,)).dense()
    if out.count:
        device = same_device(starts, before, cells, out)
        arguments = (
            starts,
            before,
            rows,
            cells,
            *shape,
            table.pages,
            table.block_tokens,
            out.count,
            out,
        )
        launch(SOURCE, "token_slots", (blocks_for(out.count, THREADS),), THREADS, arguments, stream, device)


def key_ranges(starts_q: Array, starts_k: Array, begins: Array, ends: Array, stream: int) -> None:
    """Write which keys, gathered by ``starts_k``, each new token may see: [begin, end), itself the last one."""
    rows = _rows_of(starts_q)
    inputs = [
        operand(name, array, Kind.INT32, (rows + 1,)).dense()
        for name, array in (("starts_q", starts_q), ("starts_k", starts_k))
    ]
    first = operand("begins", begins, Kind.INT32, (None,)).dense()
    last = operand("ends", ends, Kind.INT32, first.shape).dense()
    if first.count:
        device = same_device(*inputs, first, last)
        arguments = (*inputs, rows, first.count, first, last)
        launch(SOURCE, "key_ranges", (blocks_for(first.count, THREADS),), THREADS, arguments, stream, device)


def window_rows_paged(
    starts_q: Array, cached: Array, table: BlockTable, reach: Reach, rows_out: Array, stream: int
) -> None:
    """Write, for decode, the pool's rows that each new token sees: ``rows_out`` is ``[tokens, 1, width]``.

    In order: the sinks before its window, the window with itself last; then -1, which holes of the table are too. The
    width is at least sinks + window, for a kernel that takes rows by the 64 the next multiple of that.
    """
    starts, before, rows = _read_rows(starts_q, cached)
    cells, shape = table.read(rows)
    out = _read_window(rows_out, reach)
    if out.count:
        device = same_device(starts, before, cells, out)
        pool = (cells, *shape, table.pages, table.block_tokens)
        arguments = (
            starts,
            before,
            rows,
            *pool,
            reach.window_tokens,
            reach.sink_tokens,
            out.shape[2],
            out.shape[0],
            out,
        )
        launch(SOURCE, "window_rows_paged", _grid_of(out), ROW_THREADS, arguments, stream, device)


def window_rows_gathered(
    starts_q: Array, starts_k: Array, cached: Array, reach: Reach, rows_out: Array, stream: int
) -> None:
    """Window rows for prefill: rows of the buffer that ``gather_latents`` fills by the same ``starts_k`` and reach."""
    starts, before, rows = _read_rows(starts_q, cached)
    keys = operand("starts_k", starts_k, Kind.INT32, (rows + 1,)).dense()
    out = _read_window(rows_out, reach)
    if out.count:
        device = same_device(starts, keys, before, out)
        arguments = (
            starts,
            keys,
            before,
            rows,
            reach.window_tokens,
            reach.sink_tokens,
            out.shape[2],
            out.shape[0],
            out,
        )
        launch(SOURCE, "window_rows_gathered", _grid_of(out), ROW_THREADS, arguments, stream, device)


def expand_tables(tables: Sequence[Array], group_of_head: Sequence[int], out: Array, stream: int) -> None:
    """Write the tables of groups, ``[batch, blocks]`` each, as one of heads: row ``b * heads + h``, -1 behind the end.

    One launch for each group.
    """
    heads = len(group_of_head)
    require(0 < heads <= MAX_HEADS, f"group_of_head: {heads} heads; 1 to {MAX_HEADS}")
    unknown = [group for group in group_of_head if not 0 <= group < len(tables)]
    require(not unknown, f"group_of_head: {unknown} of {len(tables)} tables")
    groups = [operand(f"tables[{at}]", table, Kind.INT32, (None, None)) for at, table in enumerate(tables)]
    batch = groups[0].shape[0]
    written = operand("out", out, Kind.INT32, (batch * heads, None)).dense(1).spaced()
    for group in groups:
        require(group.dense(1).spaced().shape[0] == batch, f"{group.name}: {group.shape[0]} rows, not {batch}")
        require(group.shape[1] <= written.shape[1], f"{group.name}: {group.shape[1]} blocks, out {written.shape[1]}")
    if not written.count:
        return
    device = same_device(*groups, written)
    for at, group in enumerate(groups):
        members = sum(1 << head for head, mine in enumerate(group_of_head) if mine == at)
        if not members:
            continue
        each = 1 if _splits_words(group) or _splits_words(written) else COLUMNS
        source = (group, group.strides[0] // group.size_bytes // each, group.shape[1] // each)
        width = written.shape[1] // each
        target = (written.strides[0] // written.size_bytes // each, width, written)
        grid = (batch, blocks_for(width, THREADS))
        require(grid[1] <= MAX_GRID, f"out: {written.shape[1]} blocks a row; at most {MAX_GRID * THREADS}")
        name = "expand_table" if each == 1 else "expand_table_by_4"
        launch(SOURCE, name, grid, THREADS, (*source, heads, _signed(members), *target), stream, device)


def _grid_of(rows_out: Operand) -> tuple[int]:
    return (blocks_for(rows_out.shape[0], ROW_THREADS // WARP),)


def _splits_words(table: Operand) -> bool:
    """True where some row of a table does not begin or end with a word of ``COLUMNS`` cells."""
    word = COLUMNS * table.size_bytes
    return bool(table.address % word or table.strides[0] % word or table.shape[1] % COLUMNS)


def _signed(word: int) -> int:
    """Signed number of the same 64 bits."""
    return word - (1 << 64) if word >> 63 else word


def _rows_of(starts_q: Array) -> int:
    starts = operand("starts_q", starts_q, Kind.INT32, (None,))
    require(starts.count > 1, f"starts_q: {starts.count} entries; rows + 1, of one row at least")
    return starts.count - 1


def _read_rows(starts_q: Array, cached: Array) -> tuple[Operand, Operand, int]:
    rows = _rows_of(starts_q)
    starts = operand("starts_q", starts_q, Kind.INT32, (rows + 1,)).dense()
    return starts, operand("cached", cached, Kind.INT32, (rows,)).dense(), rows


def _read_window(rows_out: Array, reach: Reach) -> Operand:
    reach.check()
    require(reach.window_tokens > 0, "window_tokens: 0 has no bound, and rows for it no width")
    out = operand("rows_out", rows_out, Kind.INT32, (None, 1, None)).dense().aligned()
    width, needed = out.shape[2], reach.window_tokens + reach.sink_tokens
    require(width >= needed, f"rows_out: width {width} for {needed} rows")
    require(width % COLUMNS == 0, f"rows_out: width {width}, not a multiple of {COLUMNS}")
    return out
