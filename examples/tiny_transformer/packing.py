"""Rows of bytes: fp8 (e4m3fn) with scales, and bf16. All is worked out row by row, the same bytes on either module.

A packed latent row: R fp8 values in tiles of 128, a float32 scale for each tile, then the rotated key in bf16: 656
bytes for R = 512 and 64 rotated columns. It is the row of `gpu_ops.kernels.reference_keys`, which starts from bf16.
"""

from __future__ import annotations

import numpy as np

from examples.tiny_transformer.arrays import Array, Arrays
from gpu_ops.kernels.reference_keys import SMALLEST_LARGEST, SMALLEST_NORMAL, TILE_VALUES
from gpu_ops.kernels.reference_numbers import MAX_E4M3

SCALE_BYTES = 4


def packed_width(rank: int, rope_dim: int) -> int:
    """Bytes of a packed row. Raises ValueError where the latent is not whole tiles."""
    if rank % TILE_VALUES:
        raise ValueError(f"a packed latent is whole tiles of {TILE_VALUES} columns, got {rank}")
    return rank + SCALE_BYTES * (rank // TILE_VALUES) + 2 * rope_dim


def scale_fp8(arrays: Arrays, values: Array, *, least_largest: np.float32 | None = None) -> tuple[Array, Array]:
    """Values [..., n] as codes [..., n] and a scale [..., 1] for each row: its largest / 448.

    ``least_largest`` is what a row's largest counts as at least; without it the least scale is float32's least normal.
    """
    largest = arrays.xp.amax(abs(values), axis=-1, keepdims=True)
    if least_largest is not None:
        largest = arrays.xp.clip(largest, float(least_largest), None)
    # by an array: torch on a GPU divides by a plain number as it multiplies by that number's rounded reciprocal
    scales = largest / arrays.xp.full_like(largest, float(MAX_E4M3))
    scales = arrays.xp.clip(scales, float(SMALLEST_NORMAL), None)
    return arrays.to_fp8(values / scales), scales


def pack_latent(arrays: Arrays, latent: Array, rope_key: Array) -> Array:
    """Rows [T, rank] and [T, rope_dim] as packed rows [T, width]."""
    codes, scales = scale_fp8(arrays, latent.reshape(len(latent), -1, TILE_VALUES))
    parts = (codes.reshape(latent.shape), arrays.to_bytes(scales[..., 0]), arrays.to_bf16(rope_key))
    return arrays.xp.concatenate(parts, axis=1)


def unpack_latent(arrays: Arrays, rows: Array, rank: int) -> Array:
    """Packed rows [..., width] as float32 [..., rank + rope_dim]."""
    scales_end = rank + SCALE_BYTES * (rank // TILE_VALUES)
    scales = arrays.from_bytes(rows[..., rank:scales_end])
    tiles = arrays.from_fp8(rows[..., :rank]).reshape(*rows.shape[:-1], -1, TILE_VALUES) * scales[..., None]
    return arrays.xp.concatenate((tiles.reshape(*rows.shape[:-1], rank), arrays.from_bf16(rows[..., scales_end:])), -1)


def pack_index_key(arrays: Arrays, key: Array) -> tuple[Array, Array]:
    """Indexer keys [T, width] as fp8 [T, width] and scales [T, 1]: two planes."""
    return scale_fp8(arrays, key, least_largest=SMALLEST_LARGEST)
