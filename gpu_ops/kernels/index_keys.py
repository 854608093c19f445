"""Writes, reads and gathers indexer keys: 128 fp8 codes and one float32 scale a token, as two planes.

An indexer page holds all its codes, then all its scales, whatever shape its array says: never slice rows of 132 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from gpu_ops.kernels.batches import BlockTable
from gpu_ops.kernels.launch import blocks_for, launch
from gpu_ops.kernels.operands import Array, Half, Kind, Operand, operand, require, same_device

SOURCE = "index_keys"
THREADS = 128
KEY_VALUES, SCALE_BYTES = 128, 4
ROW_BYTES = KEY_VALUES + SCALE_BYTES
TOKENS_EACH = 16
GATHERED_EACH = 64


class Rounding(IntEnum):
    """Rounding of a scale, as the kernel numbers it."""

    NEAREST = 0
    UP_TO_POWER_OF_TWO = 1


@dataclass(frozen=True, slots=True, eq=False)
class IndexPlanes:
    """Places of codes and scales; ``whole_pages`` and ``apart`` make it. ``scales_offset``: from page 0's begin."""

    codes: Operand
    scales: Operand
    scales_offset: int
    pages: int
    block_tokens: int

    def arguments(self) -> tuple[Operand | int, ...]:
        return (
            *(self.codes, self.codes.strides[0], self.scales.address + self.scales_offset, self.scales.strides[0]),
            *(self.pages, self.block_tokens),
        )


def whole_pages(pool: Array) -> IndexPlanes:
    """Planes that share pages: ``[pages, block_tokens, 132]`` bytes. Raises ValueError."""
    pages = operand("pool", pool, Kind.BYTE, (None, None, ROW_BYTES)).dense(1).aligned(1).spaced()
    return IndexPlanes(pages, pages, pages.shape[1] * KEY_VALUES, pages.shape[0], pages.shape[1])


def apart(codes: Array, scales: Array) -> IndexPlanes:
    """Planes of their own: ``[pages, block_tokens, 128]`` bytes and ``[pages, block_tokens]`` float32. Raises
    ValueError."""
    values = operand("codes", codes, Kind.BYTE, (None, None, KEY_VALUES)).dense(1).aligned(1).spaced()
    factors = operand("scales", scales, Kind.FLOAT32, values.shape[:2]).dense(1).spaced()
    return IndexPlanes(values, factors, 0, *values.shape[:2])


def write_index_keys(
    planes: IndexPlanes, slots: Array, keys: Array, stream: int, half: Half, rounding: Rounding = Rounding.NEAREST
) -> None:
    """Queue the packing of keys, ``[tokens, 128]``, into slots, int64; one outside of the pool, as -1, writes nothing.

    No slot twice. Raises ValueError, with nothing queued.
    """
    where = operand("slots", slots, Kind.INT64, (None,)).dense()
    given = operand("keys", keys, half.kind, (where.count, KEY_VALUES)).dense(1).aligned(1).spaced()
    if where.count:
        device = same_device(planes.codes, planes.scales, where, given)
        arguments = (
            *planes.arguments(),
            where,
            where.count,
            given,
            given.strides[0],
            int(rounding),
        )
        grid = (blocks_for(where.count, TOKENS_EACH),)
        launch(SOURCE, f"write_index_keys_{half.value}", grid, THREADS, arguments, stream, device)


def read_index_keys(planes: IndexPlanes, slots: Array, keys_out: Array, stream: int, half: Half) -> None:
    """Queue the reading of slots: code times scale in fp32, rounded to ``half``; zeros for a slot outside of the pool.

    Raises ValueError, with nothing queued.
    """
    where = operand("slots", slots, Kind.INT64, (None,)).dense()
    out = operand("keys_out", keys_out, half.kind, (where.count, KEY_VALUES)).dense().aligned()
    if where.count:
        device = same_device(planes.codes, planes.scales, where, out)
        arguments = (*planes.arguments(), where, where.count, out)
        grid = (blocks_for(where.count, TOKENS_EACH),)
        launch(SOURCE, f"read_index_keys_{half.value}", grid, THREADS, arguments, stream, device)


def gather_index_keys(
    planes: IndexPlanes, cells: Array, starts_k: Array, codes_out: Array, scales_out: Array, stream: int
) -> None:
    """Queue the gathering of all keys of a batch, cached and new, by its table: row ``starts_k[b] + position``.

    Write the new ones first. ``codes_out`` is ``[starts_k[-1], 128]`` bytes, ``scales_out`` as many float32; holes of
    the table are zeros, further rows stay as they are. Raises ValueError, with nothing queued.
    """
    starts = operand("starts_k", starts_k, Kind.INT32, (None,)).dense()
    rows = starts.count - 1
    require(rows > 0, f"starts_k: {starts.count} entries; rows + 1, of one row at least")
    table, shape = BlockTable(cells, planes.pages, planes.block_tokens).read(rows)
    codes = operand("codes_out", codes_out, Kind.BYTE, (None, KEY_VALUES)).dense().aligned()
    scales = operand("scales_out", scales_out, Kind.FLOAT32, codes.shape[:1]).dense()
    if codes.count:
        device = same_device(planes.codes, planes.scales, table, starts, codes, scales)
        arguments = (
            *planes.arguments(),
            table,
            *shape,
            starts,
            rows,
            codes,
            scales,
            scales.count,
        )
        grid = (blocks_for(scales.count, GATHERED_EACH),)
        launch(SOURCE, "gather_index_keys", grid, THREADS, arguments, stream, device)
