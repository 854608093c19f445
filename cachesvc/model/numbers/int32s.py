"""Rows and pages by the thousand: arrays of 32-bit numbers, no object a number, which NumPy sees without a copy."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.int32]
Number = TypeVar("Number", bound=np.integer[Any])


def column(numbers: array[int]) -> Column:
    """An array as NumPy sees it. Keep it no longer than for a moment: meanwhile the array cannot change its length."""
    return np.frombuffer(numbers, np.int32)


def array_of(numbers: npt.NDArray[Any]) -> array[int]:
    """A copy of a column as an array."""
    out = array("i")
    out.frombytes(numbers.astype(np.int32, copy=False).tobytes())
    return out


def union_of(arrays: Sequence[array[int]]) -> Column:
    """The distinct numbers of arrays of distinct numbers, which mostly are one and the same array."""
    parts = [each for each in arrays if each]
    if all(each is parts[0] for each in parts):
        return column(parts[0]) if parts else np.empty(0, np.int32)
    return distinct(np.concatenate([column(each) for each in parts]))


def distinct(numbers: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """The distinct numbers, rising. NumPy's own ``unique`` takes ten times as long, and loads half of NumPy first.
    Equal ones mostly stand side by side: few are left to sort."""
    return _without_repeats(np.sort(_without_repeats(numbers)))


def _without_repeats(numbers: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """The numbers but for those that equal the one before."""
    return numbers[np.append(True, numbers[1:] != numbers[:-1])] if len(numbers) else numbers


def among(numbers: Column, others: Column) -> npt.NDArray[np.bool_]:
    """Mask of the numbers that are among ``others``."""
    rising = np.append(np.sort(others), np.iinfo(np.int32).max)
    found: npt.NDArray[np.bool_] = rising[np.searchsorted(rising, numbers)] == numbers
    return found
