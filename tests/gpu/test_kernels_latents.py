"""Gathered latents against their oracle: copies bit by bit, dequantised rows too, with and without a window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gpu_ops.kernels.batches import EVERYTHING, Reach
from gpu_ops.kernels.latents import Gathering, NewLatents, gather_latents, gather_packed_latents
from gpu_ops.kernels.operands import Half
from gpu_ops.kernels.packed_keys import packed_row_bytes
from gpu_ops.kernels.reference_batches import gather_latents as oracle
from gpu_ops.kernels.reference_batches import unpack_pool
from gpu_ops.kernels.reference_keys import pack_rows
from tests.gpu.frameworks import cupy
from tests.gpu.kernel_rig import (
    POISON_HALF,
    Batch,
    Reaches,
    awkward_halves,
    batch_of,
    put,
    random_batch,
    random_table,
    run,
    same_bits,
    spaced_pages,
)

pytestmark = pytest.mark.gpu

PAGES = 13
LATENT, ROPE = 512, 64
BEYOND = 3
BATCHES = {
    "no cache": batch_of([5, 1, 9], [0, 0, 0]),
    "all but one": batch_of([1, 1], [31, 64]),
    "aligned": batch_of([16, 16], [32, 64]),
    "unaligned": batch_of([3, 7, 2], [17, 1, 63]),
    "empty rows": batch_of([0, 4, 0, 0, 2, 0], [0, 5, 9, 0, 0, 0]),
    "single": batch_of([2], [3]),
    "many": batch_of([1 + at % 3 for at in range(200)], [at % 41 for at in range(200)]),
}


@pytest.fixture(autouse=True)
def exact_allocations() -> Iterator[None]:
    """Every array an allocation of its own, so that compute-sanitizer knows its borders."""
    with cupy.cuda.using_allocator(None):
        yield


@pytest.fixture
def stream() -> Any:
    return cupy.cuda.Stream(non_blocking=True)


def gathering(batch: Batch, table: Any, reach: Reach) -> Gathering:
    cached = put(batch.cached) if reach != EVERYTHING else None
    return Gathering(put(table), put(batch.starts_q), put(batch.starts_k), cached, reach)


def outputs(batch: Batch) -> tuple[Any, Any]:
    latent, rope = (put(np.full((batch.keys + BEYOND, width), 0xDEAD, np.uint16)) for width in (LATENT, ROPE))
    return latent, rope


def check(batch: Batch, found: tuple[Any, Any], want: tuple[Any, Any]) -> None:
    for out, rows in zip(found, want, strict=True):
        same_bits(out[: batch.keys], np.ascontiguousarray(rows))
        assert (out[batch.keys :].get() == 0xDEAD).all()


def check_copy(rng: np.random.Generator, stream: Any, batch: Batch, block_tokens: int, reach: Reach) -> None:
    table = random_table(rng, batch, block_tokens, PAGES)
    content = rng.integers(0, 1 << 16, (PAGES, 1, block_tokens, LATENT + ROPE), np.uint16)
    new = rng.integers(0, 1 << 16, (batch.tokens, LATENT + ROPE), np.uint16)
    _, pool = spaced_pages(content, POISON_HALF)
    rows = put(new)
    found = outputs(batch)
    whose = gathering(batch, table, reach)
    given = NewLatents(rows[:, :LATENT], rows[:, LATENT:])
    run(stream, lambda on: gather_latents(pool, given, whose, *found, on))
    cached = batch.cached if reach != EVERYTHING else None
    starts = (batch.starts_q, batch.starts_k)
    check(batch, found, oracle(content, new[:, :LATENT], new[:, LATENT:], table, *starts, cached, reach))


@pytest.mark.parametrize("block_tokens", [1, 2, 16, 64, 100, 128])
@pytest.mark.parametrize("name", BATCHES)
def test_cached_and_new_latents_are_interleaved(
    rng: np.random.Generator, stream: Any, name: str, block_tokens: int
) -> None:
    check_copy(rng, stream, BATCHES[name], block_tokens, EVERYTHING)


@pytest.mark.parametrize("reach", Reaches)
@pytest.mark.parametrize("block_tokens", [16, 64])
def test_behind_a_window_only_what_is_in_reach_is_gathered(
    rng: np.random.Generator, stream: Any, block_tokens: int, reach: Reach
) -> None:
    check_copy(rng, stream, random_batch(rng, 17, 60, reach), block_tokens, reach)


@pytest.mark.parametrize("reach", [EVERYTHING, Reach(33, 5)])
@pytest.mark.parametrize("half", Half)
@pytest.mark.parametrize("block_tokens", [1, 16, 64, 128])
def test_packed_rows_are_dequantised_on_the_way(
    rng: np.random.Generator, stream: Any, block_tokens: int, half: Half, reach: Reach
) -> None:
    batch = random_batch(rng, 12, 40, reach)
    table = random_table(rng, batch, block_tokens, PAGES)
    keys = awkward_halves(rng, (PAGES * block_tokens, LATENT + ROPE), half)
    content = pack_rows(keys[:, :LATENT], keys[:, LATENT:], half).reshape(PAGES, 1, block_tokens, -1)
    assert content.shape[-1] == packed_row_bytes(LATENT, ROPE) == 656
    new = awkward_halves(rng, (batch.tokens, LATENT + ROPE), half)
    _, pool = spaced_pages(content, 0x7F)
    rows = put(new)
    found = outputs(batch)
    whose = gathering(batch, table, reach)
    given = NewLatents(rows[:, :LATENT], rows[:, LATENT:])
    run(stream, lambda on: gather_packed_latents(pool, given, whose, *found, on, half))
    plain = unpack_pool(content, LATENT, half)
    starts = (batch.starts_q, batch.starts_k)
    cached = batch.cached if reach != EVERYTHING else None
    check(batch, found, oracle(plain, new[:, :LATENT], new[:, LATENT:], table, *starts, cached, reach))


def test_pages_beyond_two_to_the_31_elements_are_reached(rng: np.random.Generator, stream: Any) -> None:
    block_tokens, pages = 64, 1 + (1 << 31) // (64 * (LATENT + ROPE))
    batch = batch_of([4, 1], [100, 64])
    table = np.array([[pages - 1, 0], [pages - 2, pages - 1]], np.int32)
    pool = cupy.zeros((pages, 1, block_tokens, LATENT + ROPE), np.uint16)
    used = {page: rng.integers(0, 1 << 16, (block_tokens, LATENT + ROPE), np.uint16) for page in {*table.flat}}
    few = np.stack([used[page] for page in sorted(used)])[:, None]
    for page, rows in used.items():
        pool[int(page), 0] = put(rows)
    new = rng.integers(0, 1 << 16, (batch.tokens, LATENT + ROPE), np.uint16)
    rows = put(new)
    found = outputs(batch)
    whose = gathering(batch, table, EVERYTHING)
    given = NewLatents(rows[:, :LATENT], rows[:, LATENT:])
    run(stream, lambda on: gather_latents(pool, given, whose, *found, on))
    order = np.searchsorted(sorted(used), table).astype(np.int32)
    check(batch, found, oracle(few, new[:, :LATENT], new[:, LATENT:], order, batch.starts_q, batch.starts_k))
