"""Starts, positions, slots, key ranges, window rows and expanded tables against their oracle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gpu_ops.kernels import batches, reference_batches
from gpu_ops.kernels.batches import EVERYTHING, BlockTable, Reach
from tests.gpu.frameworks import cupy
from tests.gpu.kernel_rig import Reaches, batch_of, put, random_batch, random_table, run, same_bits

pytestmark = pytest.mark.gpu

PAGES = 37
BEYOND = 5
"""Tokens behind the last row, as in a padded batch."""


@pytest.fixture(autouse=True)
def exact_allocations() -> Iterator[None]:
    """Every array an allocation of its own, so that compute-sanitizer knows its borders."""
    with cupy.cuda.using_allocator(None):
        yield


@pytest.fixture
def stream() -> Any:
    return cupy.cuda.Stream(non_blocking=True)


def blank(shape: tuple[int, ...], kind: type[np.generic] = np.int32) -> Any:
    return put(np.full(shape, 0x5A5A, kind))


@pytest.mark.parametrize("reach", Reaches)
@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 1023, 1024, 1025, 2500])
def test_lengths_are_summed(rng: np.random.Generator, stream: Any, rows: int, reach: Reach) -> None:
    batch = random_batch(rng, rows, 50, reach)
    starts_q, starts_k, longest = blank((rows + 1,)), blank((rows + 1,)), blank((2,))
    given = put(batch.added), put(batch.cached)
    run(stream, lambda on: batches.cumulate_lengths(*given, starts_q, starts_k, longest, on, reach))
    for found, want in ((starts_q, batch.starts_q), (starts_k, batch.starts_k), (longest, batch.longest)):
        same_bits(found, want)


def test_no_rows_and_no_tokens_still_have_a_start(stream: Any) -> None:
    starts_q, starts_k, longest = blank((1,)), blank((1,)), blank((2,))
    nothing = put(np.zeros(0, np.int32))
    run(stream, lambda on: batches.cumulate_lengths(nothing, nothing, starts_q, starts_k, longest, on))
    for found in (starts_q, starts_k, longest):
        assert not found.get().any()


@pytest.mark.parametrize("block_tokens", [1, 16, 60, 128])
@pytest.mark.parametrize("rows", [1, 7, 1500])
def test_positions_slots_and_ranges(rng: np.random.Generator, stream: Any, rows: int, block_tokens: int) -> None:
    batch = random_batch(rng, rows, 40)
    table = random_table(rng, batch, block_tokens, PAGES)
    tokens = batch.tokens + BEYOND
    positions, slots = blank((tokens,)), blank((tokens,), np.int64)
    begins, ends = blank((tokens,)), blank((tokens,))
    starts_q, starts_k, cached = put(batch.starts_q), put(batch.starts_k), put(batch.cached)
    pool = BlockTable(put(table), PAGES, block_tokens)

    def queue(on: int) -> None:
        batches.token_positions(starts_q, cached, positions, on)
        batches.token_slots(starts_q, cached, pool, slots, on)
        batches.key_ranges(starts_q, starts_k, begins, ends, on)

    run(stream, queue)
    where = batch.starts_q, batch.cached
    same_bits(positions, reference_batches.token_positions(*where, tokens))
    same_bits(slots, reference_batches.token_slots(*where, table, PAGES, block_tokens, tokens))
    wanted = reference_batches.key_ranges(batch.starts_q, batch.starts_k, tokens)
    for found, want in zip((begins, ends), wanted, strict=True):
        same_bits(found, want)


@pytest.mark.parametrize("reach", [reach for reach in Reaches if reach.window_tokens])
@pytest.mark.parametrize("block_tokens", [16, 32, 64, 128, 50])
def test_rows_of_a_window(rng: np.random.Generator, stream: Any, block_tokens: int, reach: Reach) -> None:
    batch = random_batch(rng, 12, 50, reach)
    table = random_table(rng, batch, block_tokens, PAGES)
    tokens = batch.tokens + BEYOND
    width = -(-(reach.window_tokens + reach.sink_tokens) // 64) * 64
    paged, gathered = blank((tokens, 1, width)), blank((tokens, 1, width))
    starts_q, starts_k, cached = put(batch.starts_q), put(batch.starts_k), put(batch.cached)
    pool = BlockTable(put(table), PAGES, block_tokens)

    def queue(on: int) -> None:
        batches.window_rows_paged(starts_q, cached, pool, reach, paged, on)
        batches.window_rows_gathered(starts_q, starts_k, cached, reach, gathered, on)

    run(stream, queue)
    shape = (tokens, width)
    where = batch.starts_q, batch.cached
    same_bits(paged, reference_batches.window_rows_paged(*where, table, reach, shape, PAGES, block_tokens))
    starts = batch.starts_q, batch.starts_k, batch.cached
    same_bits(gathered, reference_batches.window_rows_gathered(*starts, reach, shape))


@pytest.mark.parametrize("heads", [[0], [0, 1, 1, 0], [2, 0, 1, 1, 1, 2, 0, 0], [at % 2 for at in range(64)]])
@pytest.mark.parametrize("spare", [9, 4])  # rows that begin on 16 bytes, and rows that do not
def test_tables_of_groups_become_those_of_heads(
    rng: np.random.Generator, stream: Any, heads: list[int], spare: int
) -> None:
    rows, width = 5, 2300
    tables = [
        rng.integers(-1, PAGES, (rows, columns)).astype(np.int32) for columns in (width, 7, 1256)[: max(heads) + 1]
    ]
    room = blank((rows * len(heads), width + spare))
    given = [put(table) for table in tables]
    run(stream, lambda on: batches.expand_tables(given, heads, room[:, :width], on))
    same_bits(room[:, :width], reference_batches.expand_tables(tables, heads, width))
    assert (room[:, width:].get() == 0x5A5A).all()


def test_a_batch_can_be_captured_and_replayed_with_other_lengths(stream: Any) -> None:
    first, second = batch_of([3, 0, 5], [9, 2, 0]), batch_of([1, 6, 1], [0, 4, 33])
    added, cached = put(first.added), put(first.cached)
    starts_q, starts_k, longest, positions = blank((4,)), blank((4,)), blank((2,)), blank((8,))

    def queue(on: int) -> None:
        batches.cumulate_lengths(added, cached, starts_q, starts_k, longest, on, EVERYTHING)
        batches.token_positions(starts_q, cached, positions, on)

    run(stream, queue)  # loads the kernels
    with stream:
        stream.begin_capture()
        queue(stream.ptr)
        graph = stream.end_capture()
    for batch in (second, first):
        added.set(batch.added)
        cached.set(batch.cached)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        same_bits(starts_k, batch.starts_k)
        same_bits(positions, reference_batches.token_positions(batch.starts_q, batch.cached, 8))
