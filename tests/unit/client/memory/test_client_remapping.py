"""Memory that tensors point to can become other memory, without their knowing."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
from cachesvc_client.memory.mapping import map_over


def shared(fill: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Two pages of shared memory."""
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 2 * mmap.PAGESIZE)
    bytes_ = np.frombuffer(mmap.mmap(descriptor, 2 * mmap.PAGESIZE), np.uint8)
    os.close(descriptor)
    bytes_[:] = fill
    return bytes_


def test_what_pointed_to_the_old_memory_sees_and_writes_the_new() -> None:
    old, new = shared(1), shared(2)
    part = old[100:200]
    map_over(old.ctypes.data, new.ctypes.data, new.nbytes)
    assert set(part.tolist()) == {2}
    part[0] = 7
    assert new[100] == 7


def test_what_cannot_be_mapped_says_so() -> None:
    new = shared(2)
    with pytest.raises(OSError, match="mapping 8192 bytes"):
        map_over(1, new.ctypes.data, new.nbytes)
