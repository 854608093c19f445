"""Sixteen-bit floats and fp8 e4m3 in NumPy, bit by bit as the kernels convert them.

Rounding is to nearest even. A NaN becomes 0x7FFF, or 0x7F in fp8; fp8 saturates at 448, which an infinity becomes too.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpu_ops.kernels.operands import Half

Floats = npt.NDArray[np.float32]
HalfBits = npt.NDArray[np.uint16]
Codes = npt.NDArray[np.uint8]

NAN_HALF = np.uint16(0x7FFF)
NAN_CODE, SIGN = 0x7F, 0x80
CODES_BELOW_NAN = 127
MAX_E4M3 = np.float32(448)


def widen(bits: HalfBits, half: Half) -> Floats:
    if half is Half.FP16:
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: Floats, half: Half) -> HalfBits:
    """fp32 as sixteen-bit floats, rounded to nearest even."""
    if half is Half.FP16:
        with np.errstate(over="ignore"):
            bits = values.astype(np.float16).view(np.uint16)
    else:
        words = values.view(np.uint32).astype(np.uint64)
        bits = ((words + np.uint64(0x7FFF) + (words >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)).astype(
            np.uint16
        )
    return np.where(np.isnan(values), NAN_HALF, bits)


def _sizes() -> npt.NDArray[np.float64]:
    """Values of the codes 0 to 0x7E."""
    code = np.arange(CODES_BELOW_NAN)
    exponent, fraction = code >> 3, code & 7
    return np.where(exponent, (8 + fraction) * 2.0 ** (exponent - 10), fraction * 2.0**-9)


SIZES = _sizes()
MIDDLES = (SIZES[:-1] + SIZES[1:]) / 2


def encode_e4m3(values: Floats) -> Codes:
    """fp8 codes: the nearest, of two the even one."""
    size = np.abs(values.astype(np.float64))
    code = np.searchsorted(MIDDLES, size, side="left")  # of two as near, the lower one
    is_middle = size == MIDDLES[np.minimum(code, len(MIDDLES) - 1)]
    code = code + (is_middle & (code % 2 == 1))
    signed = np.where(np.signbit(values), code | SIGN, code)
    return np.where(np.isnan(values), NAN_CODE, signed).astype(np.uint8)


def decode_e4m3(codes: Codes) -> Floats:
    """Values of codes; NaN for 0x7F and 0xFF."""
    size = codes & ~np.uint8(SIGN)
    meant = np.where(size == NAN_CODE, np.nan, SIZES[np.minimum(size, CODES_BELOW_NAN - 1)])
    return np.where(codes & SIGN, -meant, meant).astype(np.float32)


def largest_finite(tiles: Floats) -> Floats:
    """The largest size along the last axis, of what is finite; 0 where nothing is."""
    found: Floats = np.where(np.isfinite(tiles), np.abs(tiles), np.float32(0)).max(axis=-1)
    return found


def divided(values: Floats, scales: Floats) -> Floats:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        quotient: Floats = np.divide(values, scales, dtype=np.float32)
    return quotient


def scaled(codes: Codes, scales: Floats, half: Half) -> HalfBits:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return narrow(np.multiply(decode_e4m3(codes), scales, dtype=np.float32), half)
