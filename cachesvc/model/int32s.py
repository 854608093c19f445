"""Rows and pages by the thousand: arrays of 32-bit numbers, no object a number, which NumPy sees without a copy."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.int32]


def column(numbers: array[int]) -> Column:
    """An array as NumPy sees it. Keep it no longer than for a moment: meanwhile the array cannot change its length."""
    return np.frombuffer(numbers, np.int32)


def array_of(numbers: npt.NDArray[Any]) -> array[int]:
    """A copy of a column as an array."""
    out = array("i")
    out.frombytes(numbers.astype(np.int32, copy=False).tobytes())
    return out
