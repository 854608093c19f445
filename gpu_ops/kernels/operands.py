"""Kernel operands: arrays of any framework as address, shape and strides, checked by name before a launch.

Takes CuPy arrays and whatever else has ``__cuda_array_interface__``; where that cannot name a type, DLPack by CuPy.
NumPy knows no bf16, so sixteen-bit floats may come as integers or as raw bytes of that width too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any, Protocol

import numpy as np

VECTOR_BYTES = 16
"""Unit of the kernels' reads and writes, bytes: rows begin at multiples of it."""


class Array(Protocol):
    """An array of CuPy, torch or paddle on a device, as ``operand`` reads it."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        """Address, shape, strides and type."""


class Kind(Enum):
    """Element type of an operand: the bytes of an element, and the kinds of NumPy's types that may hold it."""

    BYTE = ("a byte", 1, "uiVf")
    HALF = ("a sixteen-bit float", 2, "uiVf")
    BF16 = ("bf16", 2, "uiV")
    FP16 = ("fp16", 2, "uif")
    INT32 = ("int32", 4, "i")
    INT64 = ("int64", 8, "i")
    FLOAT32 = ("float32", 4, "f")

    def __init__(self, title: str, size_bytes: int, kinds: str) -> None:
        self.title = title
        self.size_bytes = size_bytes
        self.kinds = kinds


class Half(Enum):
    """A sixteen-bit float; the value ends the names of its kernels."""

    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def kind(self) -> Kind:
        return Kind[self.name]


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """An array on a device. ``strides`` are in bytes; ``owner`` keeps the memory while this lives."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size_bytes: int
    owner: Any

    @property
    def count(self) -> int:
        return prod(self.shape)

    def dense(self, axis: int = 0) -> Operand:
        """Itself, where the axes from ``axis`` on leave no gap. Raises ValueError."""
        want = tuple(self.size_bytes * prod(self.shape[at + 1 :]) for at in range(axis, len(self.shape)))
        gaps = any(
            stride != step
            for stride, step, size in zip(self.strides[axis:], want, self.shape[axis:], strict=True)
            if size > 1
        )
        require(not gaps or not self.count, f"{self.name}: strides {self.strides}; no gaps from axis {axis} on")
        return self

    def spaced(self, axis: int = 0) -> Operand:
        """Itself, where the elements of ``axis`` do not overlap: for axes before dense ones. Raises ValueError."""
        inner = self.size_bytes * prod(self.shape[axis + 1 :])
        fits = self.strides[axis] >= inner or self.shape[axis] < 2
        require(fits, f"{self.name}: stride {self.strides[axis]} between {inner} bytes at axis {axis}")
        return self

    def aligned(self, axes: int = 0) -> Operand:
        """Itself, where it begins at a multiple of 16 bytes, and so does every element of the first ``axes`` axes.
        Raises ValueError."""
        require(self.address % VECTOR_BYTES == 0, f"{self.name}: address {self.address:#x}, not a multiple of 16")
        for stride, size in zip(self.strides[:axes], self.shape[:axes], strict=True):
            require(size < 2 or stride % VECTOR_BYTES == 0, f"{self.name}: strides {self.strides}, not multiples of 16")
        return self


def operand(name: str, array: Array | None, kind: Kind, shape: tuple[int | None, ...]) -> Operand:
    """An array as an operand; ``None`` in ``shape`` stands for any size. Raises ValueError by what is wrong."""
    read, found = _read(name, array)
    holds = found.itemsize == kind.size_bytes and found.kind in kind.kinds
    require(holds, f"{name}: dtype {found}, not {kind.title}")
    sizes = read.shape
    fits = len(sizes) == len(shape) and all(want in (None, size) for size, want in zip(sizes, shape, strict=True))
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    require(fits, f"{name}: shape {sizes}, not ({wanted})")
    return read


def bytes_operand(name: str, array: Array) -> Operand:
    """An array of any type and shape, for what moves bytes. Raises ValueError."""
    return _read(name, array)[0]


def same_device(*operands: Operand) -> int:
    """The device that all of them lie on. Raises ValueError."""
    from cupy.cuda.runtime import pointerGetAttributes

    where = [(one, pointerGetAttributes(one.address).device) for one in operands if one.count]
    first, device = where[0]
    for one, other in where:
        require(device == other, f"{one.name}: on device {other}, {first.name} on device {device}")
    return int(device)


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _read(name: str, array: Any) -> tuple[Operand, np.dtype[Any]]:
    try:
        given = array.__cuda_array_interface__
    except (AttributeError, KeyError):  # torch has it for some types only
        require(hasattr(array, "__dlpack__"), f"{name}: {type(array).__name__} is no array on a device")
        import cupy

        array = cupy.from_dlpack(array)
        given = array.__cuda_array_interface__
    is_bf16 = str(getattr(array, "dtype", "")).endswith("bfloat16")  # some releases of torch call it fp16
    found = np.dtype("V2" if is_bf16 else given["typestr"])
    sizes = tuple(int(size) for size in given["shape"])
    strides = given.get("strides")
    if strides is None:
        strides = (found.itemsize * prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
    return Operand(name, int(given["data"][0]), sizes, tuple(map(int, strides)), found.itemsize, array), found
