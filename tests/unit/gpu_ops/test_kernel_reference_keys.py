"""The oracle of packed keys and indexer pages: sizes, places and scales, one row written out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_ops.kernels.operands import Half
from gpu_ops.kernels.packed_keys import packed_row_bytes
from gpu_ops.kernels.reference_keys import (
    gather_index_keys,
    pack_index_keys,
    pack_rows,
    read_index_keys,
    read_packed_keys,
    split_pages,
    unpack_rows,
    write_index_keys,
    write_packed_keys,
)
from gpu_ops.kernels.reference_numbers import HalfBits, decode_e4m3, narrow, widen

LATENT, ROPE = 512, 64


def halves(values: Any, half: Half = Half.BF16) -> HalfBits:
    return narrow(np.asarray(values, np.float32), half)


def random_rows(rng: np.random.Generator, tokens: int, width: int, half: Half = Half.BF16) -> HalfBits:
    return halves(rng.standard_normal((tokens, width)) * 2.0 ** rng.integers(-9, 9, (tokens, 1)), half)


def test_a_packed_row_is_written_out_by_hand() -> None:
    latent = np.zeros((1, LATENT), np.float32)
    latent[0, 0], latent[0, 1] = 448, -224  # a scale of one
    latent[0, 128], latent[0, 129] = 1, 0.5  # of 1 / 448, not rounded
    latent[0, 256:258] = (np.nan, np.inf)  # neither makes the scale
    latent[0, 258] = 896
    rope = np.arange(ROPE, dtype=np.uint16).reshape(1, ROPE) + 0x7FC0  # NaNs with their payloads
    row = pack_rows(halves(latent), rope, Half.BF16)[0]
    assert len(row) == packed_row_bytes(LATENT, ROPE) == 656
    assert row[[0, 1, 2, 128, 129, 256, 257, 258]].tolist() == [0x7E, 0xF6, 0, 0x7E, 0x76, 0x7F, 0x7E, 0x7E]
    tiny = np.finfo(np.float32).tiny
    want = np.array([1, np.float32(1) / np.float32(448), 2, tiny], np.float32)
    np.testing.assert_array_equal(row[512:528].view(np.float32), want)
    np.testing.assert_array_equal(row[528:].view(np.uint16), rope[0])


@pytest.mark.parametrize("half", Half)
def test_packing_loses_a_sixteenth_at_most_and_no_rope(half: Half) -> None:
    rng = np.random.default_rng(7)
    latent, rope = random_rows(rng, 50, LATENT, half), random_rows(rng, 50, ROPE, half)
    found, same = unpack_rows(pack_rows(latent, rope, half), LATENT, half)
    np.testing.assert_array_equal(same, rope)
    before, after = widen(latent, half), widen(found, half)
    tile = np.abs(before).reshape(50, 4, 128).max(axis=2, keepdims=True).repeat(128, 2).reshape(50, LATENT)
    assert (np.abs(after - before) <= np.abs(before) / 15 + tile * 2.0**-18).all()


def test_a_rows_bytes_do_not_depend_on_its_neighbours() -> None:
    rng = np.random.default_rng(8)
    latent, rope = random_rows(rng, 9, LATENT), random_rows(rng, 9, ROPE)
    together = pack_rows(latent, rope, Half.BF16)
    for at in range(9):
        np.testing.assert_array_equal(pack_rows(latent[at : at + 1], rope[at : at + 1], Half.BF16)[0], together[at])


def test_slots_that_there_are_not_are_neither_written_nor_read() -> None:
    rng = np.random.default_rng(9)
    pool = np.full((3, 1, 5, 656), 0xA5, np.uint8)
    slots = np.array([7, -1, 15, 0], np.int64)
    latent, rope = random_rows(rng, 4, LATENT), random_rows(rng, 4, ROPE)
    write_packed_keys(pool, slots, latent, rope, Half.BF16)
    rows = pack_rows(latent, rope, Half.BF16)
    np.testing.assert_array_equal(pool[1, 0, 2], rows[0])
    np.testing.assert_array_equal(pool[0, 0, 0], rows[3])
    assert (np.delete(pool.reshape(15, -1), [0, 7], axis=0) == 0xA5).all()
    _, ropes = read_packed_keys(pool, slots, LATENT, Half.BF16)
    assert not ropes[1:3].any()
    np.testing.assert_array_equal(ropes[[0, 3]], rope[[0, 3]])


def test_an_indexer_page_holds_all_codes_and_then_all_scales() -> None:
    """A page of 64 tokens: 8,448 bytes, scales from 8,192 on; code d of token o at 128 o + d."""
    rng = np.random.default_rng(10)
    pool = np.zeros((2, 64, 132), np.uint8)
    codes, scales = split_pages(pool)
    keys = random_rows(rng, 1, 128)
    write_index_keys(codes, scales, np.array([64 + 37], np.int64), keys, Half.BF16, power_of_two=False)
    packed, factor = pack_index_keys(keys, Half.BF16, power_of_two=False)
    page = pool[1].reshape(-1)
    assert page.size == 8448
    np.testing.assert_array_equal(page[37 * 128 : 38 * 128], packed[0])
    assert page[8192 + 4 * 37 :][:4].view(np.float32)[0] == factor[0]
    assert np.flatnonzero(page).size <= 132
    assert not pool[0].any()
    found = widen(read_index_keys(codes, scales, np.array([101, -1]), Half.BF16), Half.BF16)
    assert (np.abs(found[0] - widen(keys, Half.BF16)[0]) <= np.abs(widen(keys, Half.BF16)[0]) / 15 + 1e-3).all()
    assert not found[1].any()


def test_the_scales_of_indexer_keys() -> None:
    keys = np.zeros((5, 128), np.float32)
    keys[:, 3] = (0, 448, 449.5, 1e-5, np.inf)
    floor = np.float32(1e-4) / np.float32(448)
    _, plain = pack_index_keys(halves(keys), Half.BF16, power_of_two=False)
    assert plain.tolist() == [floor, 1, np.float32(450) / np.float32(448), floor, floor]
    codes, rounded = pack_index_keys(halves(keys), Half.BF16, power_of_two=True)
    assert rounded.tolist() == [2.0**-22, 1, 2, 2.0**-22, 2.0**-22]
    assert (rounded >= plain).all()
    assert codes[4, 3] == 0x7E
    assert decode_e4m3(codes[2])[3] == 224  # 225, of which 224 is the nearest


def test_cached_and_new_keys_are_gathered_and_holes_are_zeros() -> None:
    codes = (np.arange(4 * 2 * 128) % 255 + 1).astype(np.uint8).reshape(4, 2, 128)
    scales = np.arange(8, dtype=np.float32).reshape(4, 2) + 1
    table = np.array([[3, -1, 4], [0, 1, -1]], np.int32)
    values, factors = gather_index_keys(codes, scales, table, np.array([0, 6, 6 + 3], np.int32))
    assert factors.tolist() == [7, 8, 0, 0, 0, 0, 1, 2, 3]
    np.testing.assert_array_equal(values[[0, 1, 6, 7, 8]], codes[[3, 3, 0, 0, 1], [0, 1, 0, 1, 0]])
    assert not values[2:6].any()
