"""Planes as tensors of the engine's framework, over the same bytes. Frameworks are imported where they are used."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from cachesvc_client.core.errors import NotSupported

NUMPY_DTYPES: dict[str, type[np.generic]] = {
    "uint8": np.uint8,
    "int8": np.int8,
    "float8_e4m3fn": np.uint8,
    "float8_e5m2": np.uint8,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "uint16": np.uint16,
    "float32": np.float32,
    "int32": np.int32,
    "uint32": np.uint32,
}
"""The layout's dtypes as NumPy has them: what NumPy lacks is plain bits of the same width."""

_CARRIERS: dict[int, type[np.generic]] = {1: np.uint8, 2: np.int16, 4: np.int32}
"""Types that every release of every framework takes over DLPack; the right name is given afterwards."""


PADDLE_LACKS = frozenset({"uint16", "uint32"})
"""Paddle takes uint16 for bfloat16, and has no uint32."""


def as_carrier(plane: Any) -> Any:
    """View of the same bytes under a type of that width that every framework takes."""
    return plane.view(_CARRIERS[plane.dtype.itemsize])


def to_torch(plane: Any, dtype: str) -> Any:
    """A torch tensor over the plane's bytes, of the layout's dtype. Raises ImportError without torch, NotSupported
    where the plane is on a GPU and torch has no CUDA.

    ``plane``: a NumPy array, or a ``DevicePlane``, which torch takes by the CUDA array interface: that needs no CuPy,
    and makes no stream wait for another.
    """
    import torch

    carrier = as_carrier(plane)
    if hasattr(carrier, "__cuda_array_interface__"):
        if not torch.cuda.is_available():
            raise NotSupported(
                f"the plane is on a GPU, which torch {torch.__version__} here cannot use: install a CUDA build"
            )
        return torch.as_tensor(carrier, device=f"cuda:{carrier.ordinal}").view(getattr(torch, dtype))
    return torch.from_dlpack(carrier).view(getattr(torch, dtype))


def to_paddle(plane: Any, dtype: str) -> Any:
    """A paddle tensor over the plane's bytes, of the layout's dtype. Raises NotSupported, or ImportError as torch's.

    ``plane``: a NumPy or a CuPy array.
    """
    if dtype in PADDLE_LACKS:
        raise NotSupported(f"paddle has no {dtype}; use the array in AttachedPool.planes")
    import paddle

    with _device_of(plane):
        return paddle.from_dlpack(as_carrier(plane)).view(dtype)


def to_bfloat16(values: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """Bits of numbers as bfloat16, rounded to the nearest even: what a bfloat16 plane takes, since NumPy has no such
    type and would store 0.7 as 0."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    is_nan = np.isnan(np.asarray(values, np.float32))
    return np.where(is_nan, np.uint64(0x7FC0), rounded).astype(np.uint16)


def from_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Numbers of a bfloat16 plane, or of pages of one."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _device_of(plane: Any) -> AbstractContextManager[Any]:
    """CuPy exports an array on the device that is current; a NumPy array has none."""
    device = getattr(plane, "device", None)
    return device if isinstance(device, AbstractContextManager) else nullcontext()
