"""Packed keys and indexer pages against their oracle, byte by byte, and nothing beside them touched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gpu_ops.kernels.index_keys import (
    IndexPlanes,
    Rounding,
    apart,
    gather_index_keys,
    read_index_keys,
    whole_pages,
    write_index_keys,
)
from gpu_ops.kernels.operands import Half
from gpu_ops.kernels.packed_keys import packed_row_bytes, read_packed_keys, write_packed_keys
from gpu_ops.kernels.reference_keys import gather_index_keys as oracle_gather
from gpu_ops.kernels.reference_keys import read_index_keys as oracle_read_index
from gpu_ops.kernels.reference_keys import read_packed_keys as oracle_read
from gpu_ops.kernels.reference_keys import split_pages
from gpu_ops.kernels.reference_keys import write_index_keys as oracle_write_index
from gpu_ops.kernels.reference_keys import write_packed_keys as oracle_write
from tests.gpu.frameworks import cupy
from tests.gpu.kernel_rig import (
    POISON_BYTE,
    awkward_halves,
    put,
    random_batch,
    random_table,
    run,
    same_bits,
    spaced_pages,
)

pytestmark = pytest.mark.gpu

PAGES = 11
BLOCKS = (4, 16, 60, 64, 128)
SIZES = ((512, 64), (512, 8), (1024, 64))


@pytest.fixture(autouse=True)
def exact_allocations() -> Iterator[None]:
    """Every array an allocation of its own, so that compute-sanitizer knows its borders."""
    with cupy.cuda.using_allocator(None):
        yield


@pytest.fixture
def stream() -> Any:
    return cupy.cuda.Stream(non_blocking=True)


def random_slots(rng: np.random.Generator, tokens: int, block_tokens: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Different slots in no order; some that there are not."""
    slots = rng.permutation(PAGES * block_tokens)[:tokens].astype(np.int64)
    slots[rng.random(tokens) < 0.2] = -1
    slots[-1] = PAGES * block_tokens
    return slots


@pytest.mark.parametrize("half", Half)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("block_tokens", BLOCKS)
def test_packed_keys_are_written_and_read_as_the_oracle_says(
    rng: np.random.Generator, stream: Any, block_tokens: int, sizes: tuple[int, int], half: Half
) -> None:
    tokens = 3 * block_tokens + 1
    before = rng.integers(0, 256, (PAGES, 1, block_tokens, packed_row_bytes(*sizes)), np.uint8)
    room, pool = spaced_pages(before, POISON_BYTE)
    slots = random_slots(rng, tokens, block_tokens)
    rows = awkward_halves(rng, (tokens, sum(sizes)), half)  # latent and rope as columns of one array
    keys = put(rows)
    want = before.copy()
    oracle_write(want, slots, rows[:, : sizes[0]], rows[:, sizes[0] :], half)
    places = put(slots)
    run(stream, lambda on: write_packed_keys(pool, places, keys[:, : sizes[0]], keys[:, sizes[0] :], on, half))
    same_bits(pool, want)
    assert (room.get()[:, 1] == POISON_BYTE).all()
    latent, rope = (put(np.full((tokens, size), 0xDEAD, np.uint16)) for size in sizes)
    run(stream, lambda on: read_packed_keys(pool, places, latent, rope, on, half))
    for found, expected in zip((latent, rope), oracle_read(want, slots, sizes[0], half), strict=True):
        same_bits(found, expected)


def index_planes(
    rng: np.random.Generator, block_tokens: int, is_whole: bool
) -> tuple[IndexPlanes, Any, Any, list[Any]]:
    """Planes on the device full of random bytes, the same in NumPy (codes, scales), and the device's arrays."""
    content = rng.integers(0, 256, (PAGES, block_tokens, 132), np.uint8)
    codes, scales = split_pages(content)
    if is_whole:
        room, pool = spaced_pages(content, POISON_BYTE)
        return whole_pages(pool), codes, scales, [room]
    rooms = [spaced_pages(np.ascontiguousarray(plane), POISON_BYTE) for plane in (codes, scales)]
    return apart(rooms[0][1], rooms[1][1]), codes, scales, [room for room, _ in rooms]


def planes_hold(is_whole: bool, rooms: list[Any], codes: Any, scales: Any) -> None:
    """Assert that the device's arrays hold these codes and scales."""
    if is_whole:
        found = rooms[0].get()
        got = split_pages(np.ascontiguousarray(found[:, 0]))
        assert (found[:, 1] == POISON_BYTE).all()
    else:
        got = (rooms[0].get()[:, 0], np.ascontiguousarray(rooms[1].get()[:, 0]))
        assert (rooms[0].get()[:, 1] == POISON_BYTE).all()
    np.testing.assert_array_equal(got[0], codes)
    np.testing.assert_array_equal(got[1].view(np.uint32), np.ascontiguousarray(scales).view(np.uint32))


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "apart"])
@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("half", Half)
@pytest.mark.parametrize("block_tokens", BLOCKS)
def test_index_keys_are_written_and_read_as_the_oracle_says(
    rng: np.random.Generator, stream: Any, block_tokens: int, half: Half, rounding: Rounding, is_whole: bool
) -> None:
    tokens = 2 * block_tokens + 3
    planes, codes, scales, rooms = index_planes(rng, block_tokens, is_whole)
    slots = random_slots(rng, tokens, block_tokens)
    keys = awkward_halves(rng, (tokens, 128), half)
    power_of_two = rounding is Rounding.UP_TO_POWER_OF_TWO
    oracle_write_index(codes, scales, slots, keys, half, power_of_two=power_of_two)
    given, places = put(keys), put(slots)
    run(stream, lambda on: write_index_keys(planes, places, given, on, half, rounding))
    planes_hold(is_whole, rooms, codes, scales)
    out = put(np.full((tokens, 128), 0xDEAD, np.uint16))
    run(stream, lambda on: read_index_keys(planes, places, out, on, half))
    same_bits(out, oracle_read_index(codes, scales, slots, half))


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "apart"])
@pytest.mark.parametrize("block_tokens", BLOCKS)
def test_index_keys_of_cached_and_new_tokens_are_gathered(
    rng: np.random.Generator, stream: Any, block_tokens: int, is_whole: bool
) -> None:
    planes, codes, scales, _ = index_planes(rng, block_tokens, is_whole)
    batch = random_batch(rng, 9, 70)
    table = random_table(rng, batch, block_tokens, PAGES)
    values, factors = oracle_gather(codes, scales, table, batch.starts_k)
    beyond = 5
    found = put(np.full((batch.keys + beyond, 128), POISON_BYTE, np.uint8))
    found_scales = put(np.full(batch.keys + beyond, 7, np.float32))
    cells, starts = put(table), put(batch.starts_k)
    run(stream, lambda on: gather_index_keys(planes, cells, starts, found, found_scales, on))
    same_bits(found[: batch.keys], values)
    same_bits(found_scales[: batch.keys], factors)
    assert (found[batch.keys :].get() == POISON_BYTE).all()
    assert (found_scales[batch.keys :].get() == 7).all()


def test_every_code_is_read_and_what_is_halfway_is_written_to_even(stream: Any) -> None:
    """All 256 codes with a scale of one, and every middle between two of them."""
    codes = np.arange(256, dtype=np.uint8).reshape(1, 2, 128)
    planes = apart(put(codes), put(np.ones((1, 2), np.float32)))
    slots = np.array([0, 1], np.int64)
    places = put(slots)
    for half in Half:
        out = put(np.zeros((2, 128), np.uint16))
        cupy.cuda.Device().synchronize()
        read_index_keys(planes, places, out, stream.ptr, half)
        stream.synchronize()
        same_bits(out, oracle_read_index(codes, np.ones((1, 2), np.float32), slots, half))
    exponents = np.arange(0x3A00, 0x43E1)  # bf16 from 2^-11 to 448: a middle has one bit more than a code
    rows = -(-len(exponents) // 126)
    spread = np.resize(exponents, rows * 126).reshape(rows, 126)
    keys = np.concatenate([np.full((rows, 1), 0x43E0), np.full((rows, 1), 0xC3E0), spread], axis=1).astype(np.uint16)
    values, scales = np.zeros((1, len(keys), 128), np.uint8), np.zeros((1, len(keys)), np.float32)
    slots = np.arange(rows, dtype=np.int64)
    device, places, given = apart(put(values), put(scales)), put(slots), put(keys)
    run(stream, lambda on: write_index_keys(device, places, given, on, Half.BF16))
    oracle_write_index(values, scales, slots, keys, Half.BF16, power_of_two=False)
    assert (scales == 1).all()
    same_bits(device.codes.owner, values)
