"""Rows of bytes: fp8 (e4m3fn) with scales, and bf16, in NumPy. All is worked out row by row.

A packed latent row: R fp8 values in tiles of 128, a float32 scale for each tile, then the rotated key in bf16: 656
bytes for R = 512 and 64 rotated columns.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from examples.tiny_transformer.config import F32

Bytes = npt.NDArray[np.uint8]

TILE = 128
LARGEST = 448.0  # of e4m3fn, which has no infinity
LEAST_EXPONENT = -6  # of normal numbers: below it the step stays the same
MANTISSA_BITS = 3
SMALLEST_SCALE = np.finfo(np.float32).tiny
SMALLEST_INDEX_AMAX = 1e-4


def _decode_table() -> F32:
    """The value of each code; 0x7f and 0xff are NaN."""
    codes = np.arange(128)
    exponent, mantissa = codes >> MANTISSA_BITS, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(mantissa / 8, LEAST_EXPONENT), normal)
    values[127] = np.nan
    return np.concatenate((values, -values)).astype(np.float32)


FP8_VALUES = _decode_table()


def encode_fp8(values: F32) -> Bytes:
    """The nearest codes, of two equally near ones the even; what is larger than 448 becomes 448."""
    magnitude = np.minimum(np.abs(values), np.float32(LARGEST))
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, LEAST_EXPONENT)
    step = np.ldexp(np.float32(1), exponent - MANTISSA_BITS)
    rounded = np.rint(magnitude / step) * step  # rint rounds a half to even, and steps are powers of two
    codes: Bytes = np.searchsorted(FP8_VALUES[:127], rounded).astype(np.uint8)
    codes |= np.signbit(values).astype(np.uint8) << 7
    return codes


def decode_fp8(codes: Bytes) -> F32:
    """What codes stand for."""
    return FP8_VALUES[codes]


def encode_bf16(values: F32) -> npt.NDArray[np.uint16]:
    """The upper half of each finite float32, rounded to nearest, a half to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def decode_bf16(bits: npt.NDArray[np.uint16]) -> F32:
    """What bf16 bits stand for."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def packed_width(rank: int, rope_dim: int) -> int:
    """Bytes of a packed row. Raises ValueError where the latent is not whole tiles."""
    if rank % TILE:
        raise ValueError(f"a packed latent is whole tiles of {TILE} columns, got {rank}")
    return rank + 4 * (rank // TILE) + 2 * rope_dim


def pack_latent(latent: F32, rope_key: F32) -> Bytes:
    """Rows [T, rank] and [T, rope_dim] as packed rows [T, width]."""
    tiles = latent.reshape(len(latent), -1, TILE)
    amax = np.abs(tiles).max(axis=-1)
    scales = np.maximum(amax / np.float32(LARGEST), SMALLEST_SCALE).astype(np.float32)
    codes = encode_fp8(tiles / scales[..., None]).reshape(latent.shape)
    rope_bits = encode_bf16(rope_key)
    return np.concatenate((codes, scales.view(np.uint8), rope_bits.view(np.uint8)), axis=1)


def unpack_latent(rows: Bytes, rank: int) -> F32:
    """Packed rows [T, width] as float32 [T, rank + rope_dim]."""
    scales_end = rank + 4 * (rank // TILE)
    scales = np.ascontiguousarray(rows[:, rank:scales_end]).view(np.float32)
    rope_key = decode_bf16(np.ascontiguousarray(rows[:, scales_end:]).view(np.uint16))
    tiles = decode_fp8(rows[:, :rank]).reshape(len(rows), -1, TILE) * scales[..., None]
    return np.concatenate((tiles.reshape(len(rows), rank), rope_key), axis=1)


def pack_index_key(key: F32) -> tuple[Bytes, F32]:
    """Indexer keys [T, width] as fp8 [T, width] and scales [T, 1]: two planes."""
    amax = np.abs(key).max(axis=-1, keepdims=True)
    scales = (np.maximum(amax, np.float32(SMALLEST_INDEX_AMAX)) / np.float32(LARGEST)).astype(np.float32)
    return encode_fp8(key / scales), scales
