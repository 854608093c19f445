"""fp8, bf16 and the rows made of them, against a search of all codes and against the kernels' oracle."""

from __future__ import annotations

import numpy as np

from examples.tiny_transformer.arrays import FP8_VALUES, NUMPY
from examples.tiny_transformer.packed import best_keys
from examples.tiny_transformer.packing import pack_index_key, pack_latent, packed_width, scale_fp8, unpack_latent
from examples.tiny_transformer.reference import nearest_fp8
from gpu_ops.kernels.operands import Half
from gpu_ops.kernels.reference_keys import pack_index_keys, pack_rows, unpack_rows
from gpu_ops.kernels.reference_numbers import narrow, widen

BF16 = Half.BF16


def test_every_fp8_value_and_every_middle_between_two_is_encoded_to_nearest_even() -> None:
    codes = np.setdiff1d(np.arange(256), [0x7F, 0xFF]).astype(np.uint8)
    np.testing.assert_array_equal(NUMPY.to_fp8(NUMPY.from_fp8(codes)), codes)
    assert (FP8_VALUES[0x7E], FP8_VALUES[0x08], FP8_VALUES[0x01]) == (448, 2**-6, 2**-9)
    assert np.isnan(FP8_VALUES[[0x7F, 0xFF]]).all()
    lower = np.arange(126, dtype=np.uint8)
    middles = (FP8_VALUES[lower] + FP8_VALUES[lower + 1]) / np.float32(2)
    np.testing.assert_array_equal(NUMPY.to_fp8(middles), lower + (lower & 1))
    np.testing.assert_array_equal(NUMPY.to_fp8(np.nextafter(middles, np.float32(0))), lower)
    np.testing.assert_array_equal(NUMPY.to_fp8(np.nextafter(-middles, np.float32(-500))), lower + 1 | 0x80)
    assert NUMPY.to_fp8(np.array([1e9, -449, -0.0], np.float32)).tolist() == [0x7E, 0xFE, 0x80]


def test_fp8_agrees_with_a_search_of_all_values() -> None:
    draw = np.random.default_rng(5)
    values = (draw.standard_normal(3000) * 10.0 ** draw.integers(-4, 3, 3000)).astype(np.float32)
    np.testing.assert_array_equal(NUMPY.from_fp8(NUMPY.to_fp8(values)), nearest_fp8(values.astype(np.float64)))


def test_bf16_rounds_to_nearest_even() -> None:
    bits = np.array([[0x3F808000, 0x3F818000, 0x3F808001, 0xBF807FFF, 0x00000000]], np.uint32)
    raw = NUMPY.to_bf16(bits.view(np.float32))
    assert raw.view(np.uint16).tolist() == [[0x3F80, 0x3F82, 0x3F81, 0xBF80, 0]]
    assert NUMPY.from_bf16(np.array([[0x80, 0x3F, 0x00, 0xC0]], np.uint8)).tolist() == [[1.0, -2.0]]


def test_rows_are_those_of_the_kernels() -> None:
    """Latents in bf16 from the start, as the kernels take them: the same bytes, and the same numbers back."""
    draw = np.random.default_rng(8)
    values = draw.standard_normal((40, 576)) * 10.0 ** draw.integers(-3, 3, (40, 1))
    bits = narrow(values.astype(np.float32), BF16)
    latent, rope_key = widen(bits[:, :512], BF16), widen(bits[:, 512:], BF16)
    rows = pack_latent(NUMPY, latent, rope_key)
    np.testing.assert_array_equal(rows, pack_rows(bits[:, :512], bits[:, 512:], BF16))
    latent_bits, rope_bits = unpack_rows(rows, 512, BF16)
    read = unpack_latent(NUMPY, rows, 512)
    np.testing.assert_array_equal(narrow(read[:, :512], BF16), latent_bits)
    np.testing.assert_array_equal(narrow(read[:, 512:], BF16), rope_bits)
    codes, scales = pack_index_key(NUMPY, widen(bits[:, :128], BF16))
    expected_codes, expected_scales = pack_index_keys(bits[:, :128], BF16, power_of_two=False)
    np.testing.assert_array_equal(codes, expected_codes)
    np.testing.assert_array_equal(scales[:, 0], expected_scales)


def test_a_packed_row_is_656_bytes_and_made_by_itself() -> None:
    """Values, scales, rotated key; the same bytes whatever rows stand beside it."""
    draw = np.random.default_rng(6)
    latent, rope_key = draw.standard_normal((9, 512), np.float32), draw.standard_normal((9, 64), np.float32)
    latent[3, 128:256] = 0
    rows = pack_latent(NUMPY, latent, rope_key)
    assert rows.shape == (9, packed_width(512, 64)) == (9, 656)
    np.testing.assert_array_equal(rows[4:5], pack_latent(NUMPY, latent[4:5], rope_key[4:5]))
    scales = rows[:, 512:528].copy().view(np.float32)
    np.testing.assert_array_equal(
        scales[0], np.abs(latent[0].reshape(4, 128)).max(axis=1).astype(np.float32) / np.float32(448)
    )
    assert scales[3, 1] == np.finfo(np.float32).tiny
    read = unpack_latent(NUMPY, rows, 512)
    np.testing.assert_array_equal(read[:, 512:], NUMPY.from_bf16(NUMPY.to_bf16(rope_key)))
    assert np.abs(read[:, :512] - latent).max() < np.abs(latent).max() / 16
    np.testing.assert_array_equal(read[0, :128], NUMPY.from_fp8(rows[0, :128]) * scales[0, 0])
    assert not unpack_latent(NUMPY, np.zeros((2, 656), np.uint8), 512).any()


def test_an_index_key_has_one_scale_a_row() -> None:
    keys = np.array([[0, 896, -448], [0, 0, 1e-9]], np.float32)
    codes, scales = pack_index_key(NUMPY, keys)
    np.testing.assert_array_equal(scales, np.array([[2], [1e-4 / 448]], np.float32))
    assert NUMPY.from_fp8(codes)[0].tolist() == [0, 448, -224]


def test_a_row_of_zeros_has_the_least_scale() -> None:
    codes, scales = scale_fp8(NUMPY, np.array([[0, 0], [448, -1]], np.float32))
    assert codes.tolist() == [[0, 0], [0x7E, 0xB8]]
    np.testing.assert_array_equal(scales, np.array([[np.finfo(np.float32).tiny], [1]], np.float32))


def test_the_best_keys_are_visible_ones_and_of_equals_the_first() -> None:
    scores = np.array([[[5, 1, 3, 3, 9], [0, 0, 0, 0, 9]]], np.float32)
    hidden = np.array([[[False, False, False, False, True]] * 2])
    best = best_keys(NUMPY, scores, hidden, 2)
    assert best.tolist() == [[[True, False, True, False, False], [True, True] + [False] * 3]]
    assert best_keys(NUMPY, scores, hidden, 9).all()
