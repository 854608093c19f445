"""Writes and reads packed keys, rows of ``latent`` fp8 codes, a float32 scale for each 128, and unpacked rope.

With 512 latent and 64 rope values a row has 656 bytes. ``gpu_ops.kernels.reference_keys`` says what the bytes are.
"""

from __future__ import annotations

from gpu_ops.kernels.launch import blocks_for, launch
from gpu_ops.kernels.operands import VECTOR_BYTES, Array, Half, Kind, Operand, operand, require, same_device

SOURCE = "packed_keys"
WARP, WARPS = 32, 8
TILE_VALUES = 128
STEP_VALUES = 512
"""Values that a warp takes at a time; it also keeps rows at multiples of 16 bytes."""
SCALE_BYTES = 4


def packed_row_bytes(latent_values: int, rope_values: int) -> int:
    """Bytes of one token's row. Raises ValueError for sizes that kernels do not take."""
    require(
        latent_values > 0 and latent_values % STEP_VALUES == 0,
        f"latent: {latent_values} values, not a multiple of {STEP_VALUES}",
    )
    require(rope_values * 2 % VECTOR_BYTES == 0, f"rope: {rope_values} values, not a multiple of 8")
    return latent_values + latent_values // TILE_VALUES * SCALE_BYTES + 2 * rope_values


def read_packed_pool(pool: Array, latent_values: int, rope_values: int) -> Operand:
    """A pool ``[pages, 1, block_tokens, row bytes]``, checked. Raises ValueError."""
    row_bytes = packed_row_bytes(latent_values, rope_values)
    pages = operand("pool", pool, Kind.BYTE, (None, 1, None, row_bytes))
    return pages.dense(2).aligned(1).spaced()


def write_packed_keys(pool: Array, slots: Array, latent: Array, rope: Array, stream: int, half: Half) -> None:
    """Queue the packing of ``[tokens, ...]`` latents and ropes into the slots, int64, of ``pool``.

    A slot is page * block_tokens + the place there; one outside of the pool, as -1, writes nothing. No slot twice.
    Raises ValueError, with nothing queued.
    """
    where = operand("slots", slots, Kind.INT64, (None,)).dense()
    keys = operand("latent", latent, half.kind, (where.count, None)).dense(1).aligned(1).spaced()
    ropes = operand("rope", rope, half.kind, (where.count, None)).dense(1).aligned(1).spaced()
    pages = read_packed_pool(pool, keys.shape[1], ropes.shape[1])
    given = (keys, keys.strides[0], ropes, ropes.strides[0])
    _launch(f"write_packed_keys_{half.value}", pages, where, (keys, ropes), given, stream)


def read_packed_keys(pool: Array, slots: Array, latent_out: Array, rope_out: Array, stream: int, half: Half) -> None:
    """Queue the reading of slots: code times scale in fp32, rounded to ``half``; zeros for a slot outside of the pool.

    Raises ValueError, with nothing queued.
    """
    where = operand("slots", slots, Kind.INT64, (None,)).dense()
    keys = operand("latent_out", latent_out, half.kind, (where.count, None)).dense().aligned()
    ropes = operand("rope_out", rope_out, half.kind, (where.count, None)).dense().aligned()
    pages = read_packed_pool(pool, keys.shape[1], ropes.shape[1])
    _launch(f"read_packed_keys_{half.value}", pages, where, (keys, ropes), (keys, ropes), stream)


def _launch(
    kernel: str,
    pages: Operand,
    slots: Operand,
    keys: tuple[Operand, Operand],
    given: tuple[Operand | int, ...],
    stream: int,
) -> None:
    if not slots.count:
        return
    device = same_device(pages, slots, *keys)
    arguments = (
        *(pages, pages.strides[0], pages.shape[0], pages.shape[2]),
        *(keys[0].shape[1], keys[1].shape[1], slots, slots.count, *given),
    )
    launch(SOURCE, kernel, (blocks_for(slots.count, WARPS),), WARP * WARPS, arguments, stream, device)
