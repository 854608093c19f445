"""Puts one mapping of shared memory in the place of another, so that what points there sees the new one."""

from __future__ import annotations

import ctypes

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2


def map_over(address: int, source: int, size_bytes: int) -> None:
    """Map the shared memory at ``source`` at ``address`` too, in place of what was there. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mremap.restype = ctypes.c_void_p
    libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
    if libc.mremap(source, 0, size_bytes, flags, address) != address:  # of length 0: the old mapping stays too
        raise OSError(ctypes.get_errno(), f"mapping {size_bytes} bytes of {source:#x} at {address:#x}")
