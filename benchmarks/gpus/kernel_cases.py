"""Problems for the kernels that move bytes: arrays on the device, what to queue, what the oracle says of the outputs.

Each is made for any number of tokens, small ones for comparing and large ones for timing: 64 tokens a block, pages in
no order, 62 of 64 keys cached. DeepSeek-V3's sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.kernels import reference_batches, reference_keys
from gpu_ops.kernels.batches import (
    EVERYTHING,
    BlockTable,
    Reach,
    cumulate_lengths,
    expand_tables,
    token_positions,
    window_rows_gathered,
    window_rows_paged,
)
from gpu_ops.kernels.index_keys import apart, gather_index_keys, read_index_keys, write_index_keys
from gpu_ops.kernels.latents import Gathering, NewLatents, gather_latents, gather_packed_latents
from gpu_ops.kernels.operands import Half
from gpu_ops.kernels.packed_keys import read_packed_keys, write_packed_keys
from gpu_ops.kernels.page_copies import copy_pages, page_pairs, page_planes

SMALL, BIG = 1 << 11, 1 << 18
"""Keys."""
ROW_KEYS = 2048
BLOCK_TOKENS = 64
LATENT, ROPE, INDEX = 512, 64, 128
ROW_BYTES, INDEX_BYTES = 656, 132
HALF_BYTES, WORD_BYTES, SLOT_BYTES = 2, 4, 8
WINDOW = Reach(1984, 64)
WIDTH = 2048
LAYERS = 16
GROUPS = (0, 1, 1, 1, 0, 1, 1, 1)


@dataclass(frozen=True, eq=False)
class Case:
    """``bytes``: what one launch has to read and write."""

    queue: Callable[[int], None]
    bytes: int
    outputs: Sequence[Any]
    want: Callable[[], Sequence[npt.NDArray[Any]]]


class Rows:
    """Rows of ``ROW_KEYS`` keys with one part in 32 new, and a table of pages in no order."""

    def __init__(self, rng: np.random.Generator, keys: int, reach: Reach = EVERYTHING) -> None:
        rows = keys // ROW_KEYS
        self.pages = keys // BLOCK_TOKENS
        self.added = np.full(rows, ROW_KEYS // 32, np.int32)
        self.cached = np.full(rows, ROW_KEYS, np.int32) - self.added
        self.starts_q, self.starts_k, self.longest = reference_batches.cumulate_lengths(self.added, self.cached, reach)
        self.table = rng.permutation(self.pages).reshape(rows, -1).astype(np.int32)
        self.new = int(self.starts_q[-1])
        self.keys = int(self.starts_k[-1])


def _put(array: npt.NDArray[Any]) -> Any:
    import cupy

    return cupy.asarray(array)


def _blank(shape: tuple[int, ...], kind: Any = np.uint16) -> Any:
    return _put(np.zeros(shape, kind))


def _halves(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.uint16]:
    """bf16 of both signs, from 2^-3 to 4."""
    signs = rng.integers(0, 2, shape, np.uint16) << np.uint16(15)
    bits: npt.NDArray[np.uint16] = rng.integers(0x3E00, 0x4080, shape, np.uint16) | signs
    return bits


def _slots(rng: np.random.Generator, keys: int) -> npt.NDArray[np.int64]:
    """Slots of a prefill: tokens of a block in order, blocks in none."""
    blocks = rng.permutation(keys // BLOCK_TOKENS)[:, None] * BLOCK_TOKENS
    return (blocks + np.arange(BLOCK_TOKENS)).reshape(-1).astype(np.int64)


def _packed(rng: np.random.Generator, keys: int) -> npt.NDArray[np.uint8]:
    """Rows that were packed."""
    latent, rope = _halves(rng, (SMALL, LATENT)), _halves(rng, (SMALL, ROPE))
    rows = reference_keys.pack_rows(latent, rope, Half.BF16)
    return np.tile(rows, (keys // SMALL, 1)).reshape(-1, 1, BLOCK_TOKENS, ROW_BYTES)


def case_gather_latents(rng: np.random.Generator, keys: int) -> Case:
    rows = Rows(rng, keys)
    content = _halves(rng, (rows.pages, 1, BLOCK_TOKENS, LATENT + ROPE))
    new = _halves(rng, (rows.new, LATENT + ROPE))
    pool, given = _put(content), _put(new)
    whose = Gathering(_put(rows.table), _put(rows.starts_q), _put(rows.starts_k))
    latent, rope = _blank((rows.keys, LATENT)), _blank((rows.keys, ROPE))
    parts = NewLatents(given[:, :LATENT], given[:, LATENT:])
    starts = (rows.starts_q, rows.starts_k)
    return Case(
        lambda on: gather_latents(pool, parts, whose, latent, rope, on),
        2 * rows.keys * (LATENT + ROPE) * HALF_BYTES,
        (latent, rope),
        lambda: reference_batches.gather_latents(content, new[:, :LATENT], new[:, LATENT:], rows.table, *starts),
    )


def case_gather_packed_latents(rng: np.random.Generator, keys: int) -> Case:
    rows = Rows(rng, keys)
    content, new = _packed(rng, keys), _halves(rng, (rows.new, LATENT + ROPE))
    pool, given = _put(content), _put(new)
    whose = Gathering(_put(rows.table), _put(rows.starts_q), _put(rows.starts_k))
    latent, rope = _blank((rows.keys, LATENT)), _blank((rows.keys, ROPE))
    parts = NewLatents(given[:, :LATENT], given[:, LATENT:])

    def want() -> tuple[Any, Any]:
        plain = reference_batches.unpack_pool(content, LATENT, Half.BF16)
        starts = (rows.starts_q, rows.starts_k)
        return reference_batches.gather_latents(plain, new[:, :LATENT], new[:, LATENT:], rows.table, *starts)

    whole_row = (LATENT + ROPE) * HALF_BYTES
    return Case(
        lambda on: gather_packed_latents(pool, parts, whose, latent, rope, on, Half.BF16),
        (rows.keys - rows.new) * ROW_BYTES + rows.new * whole_row + rows.keys * whole_row,
        (latent, rope),
        want,
    )


def case_write_packed_keys(rng: np.random.Generator, keys: int) -> Case:
    rows, slots = _halves(rng, (keys, LATENT + ROPE)), _slots(rng, keys)
    pool = _blank((keys // BLOCK_TOKENS, 1, BLOCK_TOKENS, ROW_BYTES), np.uint8)
    given, places = _put(rows), _put(slots)

    def want() -> tuple[Any]:
        out = np.zeros(pool.shape, np.uint8)
        reference_keys.write_packed_keys(out, slots, rows[:, :LATENT], rows[:, LATENT:], Half.BF16)
        return (out,)

    return Case(
        lambda on: write_packed_keys(pool, places, given[:, :LATENT], given[:, LATENT:], on, Half.BF16),
        keys * ((LATENT + ROPE) * HALF_BYTES + ROW_BYTES + SLOT_BYTES),
        (pool,),
        want,
    )


def case_read_packed_keys(rng: np.random.Generator, keys: int) -> Case:
    content, slots = _packed(rng, keys), _slots(rng, keys)
    pool, places = _put(content), _put(slots)
    latent, rope = _blank((keys, LATENT)), _blank((keys, ROPE))
    return Case(
        lambda on: read_packed_keys(pool, places, latent, rope, on, Half.BF16),
        keys * ((LATENT + ROPE) * HALF_BYTES + ROW_BYTES + SLOT_BYTES),
        (latent, rope),
        lambda: reference_keys.read_packed_keys(content, slots, LATENT, Half.BF16),
    )


def case_write_index_keys(rng: np.random.Generator, keys: int) -> Case:
    keys *= 4  # rows are short
    given, slots = _halves(rng, (keys, INDEX)), _slots(rng, keys)
    shape = (keys // BLOCK_TOKENS, BLOCK_TOKENS)
    codes, scales = _blank((*shape, INDEX), np.uint8), _blank(shape, np.float32)
    planes, rows, places = apart(codes, scales), _put(given), _put(slots)

    def want() -> tuple[Any, Any]:
        out = np.zeros(codes.shape, np.uint8), np.zeros(shape, np.float32)
        reference_keys.write_index_keys(*out, slots, given, Half.BF16, power_of_two=False)
        return out

    return Case(
        lambda on: write_index_keys(planes, places, rows, on, Half.BF16),
        keys * (INDEX * HALF_BYTES + INDEX_BYTES + SLOT_BYTES),
        (codes, scales),
        want,
    )


def _index_planes(rng: np.random.Generator, keys: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    shape = (keys // BLOCK_TOKENS, BLOCK_TOKENS)
    return rng.integers(0, 0x7F, (*shape, INDEX), np.uint8), rng.random(shape, np.float32)


def case_read_index_keys(rng: np.random.Generator, keys: int) -> Case:
    keys *= 4
    slots, (codes, scales) = _slots(rng, keys), _index_planes(rng, keys)
    planes, places, out = apart(_put(codes), _put(scales)), _put(slots), _blank((keys, INDEX))
    return Case(
        lambda on: read_index_keys(planes, places, out, on, Half.BF16),
        keys * (INDEX * HALF_BYTES + INDEX_BYTES + SLOT_BYTES),
        (out,),
        lambda: (reference_keys.read_index_keys(codes, scales, slots, Half.BF16),),
    )


def case_gather_index_keys(rng: np.random.Generator, keys: int) -> Case:
    keys *= 8
    rows, (codes, scales) = Rows(rng, keys), _index_planes(rng, keys)
    planes, cells, starts = apart(_put(codes), _put(scales)), _put(rows.table), _put(rows.starts_k)
    values, factors = _blank((keys, INDEX), np.uint8), _blank((keys,), np.float32)
    return Case(
        lambda on: gather_index_keys(planes, cells, starts, values, factors, on),
        2 * keys * INDEX_BYTES,
        (values, factors),
        lambda: reference_keys.gather_index_keys(codes, scales, rows.table, rows.starts_k),
    )


def case_copy_pages(rng: np.random.Generator, keys: int) -> Case:
    pages = keys // BLOCK_TOKENS // 8
    width = BLOCK_TOKENS * (LATENT + ROPE) * HALF_BYTES
    content = [rng.integers(0, 256, (pages, width), np.uint8) for _ in range(LAYERS)]
    rooms = [_put(plane) for plane in content]
    order = rng.permutation(pages)
    sources, targets = (part.tolist() for part in np.split(order[: pages // 2 * 2], 2))
    planes = page_planes(rooms)
    pairs = page_pairs(sources, targets, planes.device)

    def want() -> Sequence[Any]:
        for plane in content:
            plane[targets] = plane[sources]
        return content

    return Case(lambda on: copy_pages(planes, pairs, on), 2 * LAYERS * len(targets) * width, rooms, want)


def case_window_rows_paged(rng: np.random.Generator, keys: int) -> Case:
    rows = Rows(rng, keys, WINDOW)
    out = _blank((rows.new, 1, WIDTH), np.int32)
    starts, cached = _put(rows.starts_q), _put(rows.cached)
    pool = BlockTable(_put(rows.table), rows.pages, BLOCK_TOKENS)
    shape = (rows.new, WIDTH)
    where = (rows.starts_q, rows.cached, rows.table, WINDOW, shape, rows.pages, BLOCK_TOKENS)
    return Case(
        lambda on: window_rows_paged(starts, cached, pool, WINDOW, out, on),
        rows.new * WIDTH * WORD_BYTES,
        (out,),
        lambda: (reference_batches.window_rows_paged(*where),),
    )


def case_window_rows_gathered(rng: np.random.Generator, keys: int) -> Case:
    rows = Rows(rng, keys, WINDOW)
    out = _blank((rows.new, 1, WIDTH), np.int32)
    starts_q, starts_k, cached = _put(rows.starts_q), _put(rows.starts_k), _put(rows.cached)
    where = (rows.starts_q, rows.starts_k, rows.cached, WINDOW, (rows.new, WIDTH))
    return Case(
        lambda on: window_rows_gathered(starts_q, starts_k, cached, WINDOW, out, on),
        rows.new * WIDTH * WORD_BYTES,
        (out,),
        lambda: (reference_batches.window_rows_gathered(*where),),
    )


def case_cumulate_lengths(rng: np.random.Generator, keys: int) -> Case:
    rows = Rows(rng, keys)
    added, cached = _put(rows.added), _put(rows.cached)
    outputs = starts_q, starts_k, longest = [_blank((size,), np.int32) for size in (len(added) + 1, len(added) + 1, 2)]
    return Case(
        lambda on: cumulate_lengths(added, cached, starts_q, starts_k, longest, on),
        4 * len(rows.added) * WORD_BYTES,
        outputs,
        lambda: (rows.starts_q, rows.starts_k, rows.longest),
    )


def case_token_positions(rng: np.random.Generator, keys: int) -> Case:
    rows = Rows(rng, keys)
    starts, cached, out = _put(rows.starts_q), _put(rows.cached), _blank((rows.new,), np.int32)
    return Case(
        lambda on: token_positions(starts, cached, out, on),
        rows.new * WORD_BYTES,
        (out,),
        lambda: (reference_batches.token_positions(rows.starts_q, rows.cached, rows.new),),
    )


def case_expand_tables(rng: np.random.Generator, keys: int) -> Case:
    batch, columns = keys // 256, 2048
    tables = [rng.integers(-1, 1 << 20, (batch, columns)).astype(np.int32) for _ in range(2)]
    given, out = [_put(table) for table in tables], _blank((batch * len(GROUPS), columns), np.int32)
    return Case(
        lambda on: expand_tables(given, GROUPS, out, on),
        batch * columns * WORD_BYTES * (len(tables) + len(GROUPS)),
        (out,),
        lambda: (reference_batches.expand_tables(tables, GROUPS, columns),),
    )


CASES: dict[str, Callable[[np.random.Generator, int], Case]] = {
    name.removeprefix("case_"): make for name, make in list(globals().items()) if name.startswith("case_")
}
