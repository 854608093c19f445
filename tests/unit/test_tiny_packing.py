"""fp8, bf16 and the rows made of them, against a search of all codes."""

from __future__ import annotations

import numpy as np

from examples.tiny_transformer.packed import best_keys
from examples.tiny_transformer.packing import (
    FP8_VALUES,
    decode_bf16,
    decode_fp8,
    encode_bf16,
    encode_fp8,
    pack_index_key,
    pack_latent,
    packed_width,
    unpack_latent,
)
from examples.tiny_transformer.reference import nearest_fp8


def test_every_fp8_value_and_every_middle_between_two_is_encoded_to_nearest_even() -> None:
    codes = np.setdiff1d(np.arange(256), [0x7F, 0xFF]).astype(np.uint8)
    np.testing.assert_array_equal(encode_fp8(decode_fp8(codes)), codes)
    assert (FP8_VALUES[0x7E], FP8_VALUES[0x08], FP8_VALUES[0x01]) == (448, 2**-6, 2**-9)
    assert np.isnan(FP8_VALUES[[0x7F, 0xFF]]).all()
    lower = np.arange(126, dtype=np.uint8)
    middles = (FP8_VALUES[lower] + FP8_VALUES[lower + 1]) / np.float32(2)
    np.testing.assert_array_equal(encode_fp8(middles), lower + (lower & 1))
    np.testing.assert_array_equal(encode_fp8(np.nextafter(middles, np.float32(0))), lower)
    np.testing.assert_array_equal(encode_fp8(np.nextafter(-middles, np.float32(-500))), lower + 1 | 0x80)
    assert encode_fp8(np.array([1e9, -449, -0.0], np.float32)).tolist() == [0x7E, 0xFE, 0x80]


def test_fp8_agrees_with_a_search_of_all_values() -> None:
    draw = np.random.default_rng(5)
    values = (draw.standard_normal(3000) * 10.0 ** draw.integers(-4, 3, 3000)).astype(np.float32)
    np.testing.assert_array_equal(decode_fp8(encode_fp8(values)), nearest_fp8(values.astype(np.float64)))


def test_bf16_rounds_to_nearest_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF807FFF, 0x00000000], np.uint32)
    assert encode_bf16(bits.view(np.float32)).tolist() == [0x3F80, 0x3F82, 0x3F81, 0xBF80, 0]
    assert decode_bf16(np.array([0x3F80, 0xC000], np.uint16)).tolist() == [1.0, -2.0]


def test_a_packed_row_is_656_bytes_and_made_by_itself() -> None:
    """Values, scales, rotated key; the same bytes whatever rows stand beside it."""
    draw = np.random.default_rng(6)
    latent, rope_key = draw.standard_normal((9, 512), np.float32), draw.standard_normal((9, 64), np.float32)
    latent[3, 128:256] = 0
    rows = pack_latent(latent, rope_key)
    assert rows.shape == (9, packed_width(512, 64)) == (9, 656)
    np.testing.assert_array_equal(rows[4:5], pack_latent(latent[4:5], rope_key[4:5]))
    scales = rows[:, 512:528].copy().view(np.float32)
    np.testing.assert_array_equal(
        scales[0], np.abs(latent[0].reshape(4, 128)).max(axis=1).astype(np.float32) / np.float32(448)
    )
    assert scales[3, 1] == np.finfo(np.float32).tiny
    read = unpack_latent(rows, 512)
    np.testing.assert_array_equal(read[:, 512:], decode_bf16(encode_bf16(rope_key)))
    assert np.abs(read[:, :512] - latent).max() < np.abs(latent).max() / 16
    np.testing.assert_array_equal(read[0, :128], decode_fp8(rows[0, :128]) * scales[0, 0])
    assert not unpack_latent(np.zeros((2, 656), np.uint8), 512).any()


def test_an_index_key_has_one_scale_a_row() -> None:
    keys = np.array([[0, 896, -448], [0, 0, 1e-9]], np.float32)
    codes, scales = pack_index_key(keys)
    np.testing.assert_array_equal(scales, np.array([[2], [1e-4 / 448]], np.float32))
    assert decode_fp8(codes)[0].tolist() == [0, 448, -224]


def test_the_best_keys_are_visible_ones_and_of_equals_the_first() -> None:
    scores = np.array([[5, 1, 3, 3, 9], [0, 0, 0, 0, 9]], np.float32)
    hidden = np.array([[False, False, False, False, True]] * 2)
    assert best_keys(scores, hidden, 2).tolist() == [[True, False, True, False, False], [True, True] + [False] * 3]
    assert best_keys(scores, hidden, 9).all()
