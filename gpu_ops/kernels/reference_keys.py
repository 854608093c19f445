"""Packed keys and indexer pages in NumPy: the bytes that the kernels write and what they read.

Slots are page * block_tokens + place; one outside of the pool, as -1, is not written, and zeros are read for it.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from gpu_ops.kernels.operands import Half
from gpu_ops.kernels.reference_numbers import (
    MAX_E4M3,
    Codes,
    Floats,
    HalfBits,
    divided,
    encode_e4m3,
    largest_finite,
    scaled,
    widen,
)

TILE_VALUES = 128
SMALLEST_NORMAL = np.finfo(np.float32).tiny
SMALLEST_LARGEST = np.float32(1e-4)
Slots = npt.NDArray[np.int64]


def pack_rows(latent: HalfBits, rope: HalfBits, half: Half) -> Codes:
    """Pack rows ``[tokens, row bytes]``: codes, then scales max(largest / 448, smallest normal), then unpacked rope."""
    tiles = widen(latent, half).reshape(len(latent), -1, TILE_VALUES)
    scales = np.maximum(largest_finite(tiles) / MAX_E4M3, SMALLEST_NORMAL)
    codes = encode_e4m3(divided(tiles, scales[..., None])).reshape(latent.shape)
    parts = (codes, np.ascontiguousarray(scales).view(np.uint8), np.ascontiguousarray(rope).view(np.uint8))
    return np.concatenate(parts, axis=1)


def unpack_rows(rows: Codes, latent_values: int, half: Half) -> tuple[HalfBits, HalfBits]:
    """The latents and ropes of packed rows."""
    tiles = latent_values // TILE_VALUES
    rope_at = latent_values + 4 * tiles
    codes = rows[:, :latent_values].reshape(len(rows), tiles, TILE_VALUES)
    scales = np.ascontiguousarray(rows[:, latent_values:rope_at]).view(np.float32)
    latent = scaled(codes, scales[..., None], half).reshape(len(rows), latent_values)
    return latent, np.ascontiguousarray(rows[:, rope_at:]).view(np.uint16)


def write_packed_keys(pool: Codes, slots: Slots, latent: HalfBits, rope: HalfBits, half: Half) -> None:
    """``pool``: ``[pages, 1, block_tokens, row bytes]``, written in place."""
    there = _is_there(slots, pool.shape[0] * pool.shape[2])
    page, place = np.divmod(slots[there], pool.shape[2])
    pool[page, 0, place] = pack_rows(latent, rope, half)[there]


def read_packed_keys(pool: Codes, slots: Slots, latent_values: int, half: Half) -> tuple[HalfBits, HalfBits]:
    there = _is_there(slots, pool.shape[0] * pool.shape[2])
    page, place = np.divmod(np.where(there, slots, 0), pool.shape[2])
    latent, rope = unpack_rows(pool[page, 0, place], latent_values, half)
    return latent * there[:, None], rope * there[:, None]


def pack_index_keys(keys: HalfBits, half: Half, *, power_of_two: bool) -> tuple[Codes, Floats]:
    """Codes ``[tokens, 128]`` and scales max(largest, 1e-4) / 448, where asked rounded up to a power of two."""
    values = widen(keys, half)
    scales: Floats = np.divide(np.maximum(largest_finite(values), SMALLEST_LARGEST), MAX_E4M3, dtype=np.float32)
    if power_of_two:
        fraction, exponent = np.frexp(scales)
        scales = np.ldexp(np.ones_like(scales), exponent - (fraction == np.float32(0.5)))
    return encode_e4m3(divided(values, scales[:, None])), scales


def split_pages(pool: Codes) -> tuple[Codes, Floats]:
    """Views of shared pages, ``[pages, block_tokens, 132]``: codes ``[pages, block_tokens, 128]``, and scales."""
    pages, tokens, _ = pool.shape
    flat = pool.reshape(pages, -1)
    cut = tokens * TILE_VALUES
    codes = flat[:, :cut].reshape(pages, tokens, TILE_VALUES)
    return codes, flat[:, cut:].view(np.float32)


def write_index_keys(
    codes: Codes, scales: Floats, slots: Slots, keys: HalfBits, half: Half, *, power_of_two: bool
) -> None:
    """Planes ``[pages, block_tokens, ...]``, written in place."""
    there = _is_there(slots, codes.shape[0] * codes.shape[1])
    page, place = np.divmod(slots[there], codes.shape[1])
    packed, factors = pack_index_keys(keys, half, power_of_two=power_of_two)
    codes[page, place] = packed[there]
    scales[page, place] = factors[there]


def read_index_keys(codes: Codes, scales: Floats, slots: Slots, half: Half) -> HalfBits:
    there = _is_there(slots, codes.shape[0] * codes.shape[1])
    page, place = np.divmod(np.where(there, slots, 0), codes.shape[1])
    return scaled(codes[page, place], scales[page, place][:, None], half) * there[:, None]


def gather_index_keys(
    codes: Codes, scales: Floats, table: npt.NDArray[np.int32], starts_k: npt.NDArray[np.int32]
) -> tuple[Codes, Floats]:
    """Codes and scales of every key of a batch, cached and new, one row after another."""
    block_tokens = codes.shape[1]
    values = np.zeros((int(starts_k[-1]), TILE_VALUES), np.uint8)
    factors = np.zeros(int(starts_k[-1]), np.float32)
    for row, (begin, end) in enumerate(itertools.pairwise(starts_k.tolist())):
        for at in range(begin, end):
            block, place = divmod(at - begin, block_tokens)
            page = int(table[row, block]) if block < table.shape[1] else -1
            if 0 <= page < len(codes):
                values[at], factors[at] = codes[page, place], scales[page, place]
    return values, factors


def _is_there(slots: Slots, count: int) -> npt.NDArray[np.bool_]:
    return (slots >= 0) & (slots < count)
