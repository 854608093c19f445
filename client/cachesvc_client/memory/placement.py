"""Place of a plane in its slab, checked before anything is made of it."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np
from kvcache.v1 import engine_pb2

from cachesvc.model.layout import ITEM_BYTES, Plane
from cachesvc_client.core.errors import DaemonFault
from cachesvc_client.memory import tensors


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
