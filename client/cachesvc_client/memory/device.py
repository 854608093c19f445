"""A GPU as the client uses it: the seam at which a test puts one of its own. The real one is in ``cuda_device``, which
is imported when the first pool on a GPU is attached: nothing else of the client needs a driver.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
from kvcache.v1 import engine_pb2

from cachesvc.model.layout import ITEM_BYTES, Plane
from cachesvc_client.core.errors import DaemonFault
from cachesvc_client.memory import tensors


class DevicePlane:
    """A plane at its address on a GPU, ``[pages, *page_shape]``: what CuPy and torch take without a copy.

    ``owner`` is held for as long as this plane, or an array made of it, is there.
    """

    def __init__(self, address: int, size_bytes: int, view: PlaneView, ordinal: int, owner: object) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.placed = view
        self.ordinal = ordinal
        self.owner = owner

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.placed.dtype)

    def view(self, dtype: type[np.generic]) -> DevicePlane:
        """View of the same bytes under another type of the same width."""
        view = self.placed._replace(dtype=dtype)
        return DevicePlane(self.address, self.size_bytes, view, self.ordinal, self.owner)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Array interface, version 3, without a stream: no write is pending that a reader would have to wait for."""
        return {
            "shape": self.placed.shape,
            "strides": self.placed.strides,
            "typestr": self.dtype.str,
            "data": (self.address + self.placed.offset, False),
            "version": 3,
            "stream": None,
        }


class Device(Protocol):
    """One GPU in this process. Where nothing else is said, calls raise GpuFailed."""

    @property
    def ordinal(self) -> int:
        """Number of the GPU in this process."""

    def start(self) -> None:
        """Join the context that the engine's frameworks use."""

    def close(self) -> None:
        """Leave it. Idempotent."""

    def open_ipc(self, handle: bytes) -> int:
        """Map memory by its handle; the address. Raises NotSupported that says what to do."""

    def close_ipc(self, address: int) -> None:
        """Unmap what ``open_ipc`` mapped."""

    def map_fd(self, descriptor: int, size_bytes: int) -> int:
        """Map memory by its descriptor; the address. Raises NotSupported that says what to do."""

    def map_fd_over(self, descriptor: int, address: int, size_bytes: int) -> None:
        """Map memory by its descriptor at ``address``, where ``map_fd`` mapped as much that nothing uses any more.
        Raises NotSupported that says what to do."""

    def unmap(self, address: int, size_bytes: int) -> None:
        """Unmap what ``map_fd`` mapped."""

    def array(self, plane: DevicePlane) -> Any:
        """The plane as an array that indexes and computes. Raises NotSupported where the library for it is missing."""

    def wait_word(self, stream: int, address: int, target: int) -> None:
        """Have a stream wait until the word is at or past ``target``, cyclically. Raises InvalidRequest (stream)."""

    def pin(self, address: int, size_bytes: int) -> int:
        """Let streams reach host memory of this process; the address at which they do."""

    def unpin(self, address: int) -> None:
        """Undo ``pin``; no stream waits there any more."""


DeviceOpener = Callable[[str], Device]
"""Finds a GPU by its UUID. Raises NotSupported that says what to do."""


class PlaneView(NamedTuple):
    """``[pages, *page_shape]`` from byte ``offset`` of a slab on; strides in bytes."""

    shape: tuple[int, ...]
    dtype: type[np.generic]
    offset: int
    strides: tuple[int, ...]


def view_of(spec: Plane, pages: int, placement: engine_pb2.PlanePlacement, slab_bytes: int) -> PlaneView:
    """A plane as the daemon placed it. Raises DaemonFault where it would reach beyond the slab, or lie askew in it."""
    item_bytes = ITEM_BYTES[spec.dtype]
    end = placement.offset + max(pages - 1, 0) * placement.page_stride + spec.page_bytes
    if end > slab_bytes:
        raise DaemonFault(f"plane {spec.label} does not fit its slab: it ends at byte {end} of {slab_bytes}")
    if placement.offset % item_bytes or placement.page_stride % item_bytes:
        raise DaemonFault(
            f"plane {spec.label} does not fit its slab: offset {placement.offset} and stride {placement.page_stride} "
            f"are no multiples of its {item_bytes}-byte items"
        )
    inner = tuple(item_bytes * prod(spec.page_shape[axis + 1 :]) for axis in range(len(spec.page_shape)))
    return PlaneView(
        (pages, *spec.page_shape),
        tensors.NUMPY_DTYPES[spec.dtype],
        placement.offset,
        (placement.page_stride, *inner),
    )
