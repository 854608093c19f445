"""The oracle of the kernels' number formats, against exhaustive search and NumPy's own types."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops.kernels.operands import Half
from gpu_ops.kernels.reference_numbers import SIZES, decode_e4m3, encode_e4m3, narrow, scaled, widen

ALL_HALVES = np.arange(1 << 16, dtype=np.uint16)


def floats(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array(values, np.float32)


def test_e4m3_is_the_published_table() -> None:
    """OCP 8-bit floating point: bias 7, no infinities, one NaN for each sign."""
    want = {0x00: 0.0, 0x01: 2.0**-9, 0x07: 7 * 2.0**-9, 0x08: 2.0**-6, 0x38: 1.0, 0x40: 2.0, 0x7E: 448.0, 0xFE: -448.0}
    for code, value in want.items():
        assert decode_e4m3(np.array([code], np.uint8))[0] == value
    codes = np.arange(256, dtype=np.uint8)
    assert np.flatnonzero(np.isnan(decode_e4m3(codes))).tolist() == [0x7F, 0xFF]
    assert (np.diff(SIZES) > 0).all()


def test_every_code_survives_a_round_trip() -> None:
    codes = np.delete(np.arange(256, dtype=np.uint8), 0xFF)
    np.testing.assert_array_equal(encode_e4m3(decode_e4m3(codes)), codes)


@pytest.mark.parametrize("half", Half)
def test_rounding_takes_the_nearest_and_of_two_the_even(half: Half) -> None:
    """Every sixteen-bit float whose distance to a code is exact in fp64, against a search through all codes."""
    values = widen(ALL_HALVES, half)
    values = values[np.abs(values) < 2.0**20]
    distance = np.abs(np.abs(values.astype(np.float64))[:, None] - SIZES)
    nearest = distance == distance.min(axis=1, keepdims=True)
    even = nearest & (np.arange(len(SIZES)) % 2 == 0)
    want = np.where(even.any(axis=1), even.argmax(axis=1), nearest.argmax(axis=1))
    np.testing.assert_array_equal(encode_e4m3(values), want | (np.signbit(values) * 0x80))


def test_what_is_no_number_or_too_large() -> None:
    given = floats(np.nan, -np.nan, np.inf, -np.inf, 449, 464, 465, -1e30, -0.0)
    assert encode_e4m3(given).tolist() == [0x7F, 0x7F, 0x7E, 0xFE, 0x7E, 0x7E, 0x7E, 0xFE, 0x80]


@pytest.mark.parametrize("half", Half)
def test_every_half_survives_a_round_trip(half: Half) -> None:
    values = widen(ALL_HALVES, half)
    back = narrow(values, half)
    np.testing.assert_array_equal(back[~np.isnan(values)], ALL_HALVES[~np.isnan(values)])
    assert (back[np.isnan(values)] == 0x7FFF).all()


def test_bf16_rounds_to_nearest_even() -> None:
    one_up = np.nextafter(np.float32(1), np.float32(2))
    given = floats(1 + 2**-8, 1 + 3 * 2**-8, one_up, 1 + 2**-8 + 2**-20, 3.4e38, -(2.0**-133))
    want = [0x3F80, 0x3F82, 0x3F80, 0x3F81, 0x7F80, 0x8001]
    assert narrow(given, Half.BF16).tolist() == want


def test_scaled_rounds_once_behind_the_product() -> None:
    codes = np.array([0x7E, 0x01, 0x7F, 0x80], np.uint8)
    scale = np.float32(1 / 448)
    product = (floats(448, 2**-9, np.nan, -0.0) * scale).astype(np.float32)
    for half in Half:
        np.testing.assert_array_equal(scaled(codes, np.full(4, scale), half), narrow(product, half))
