"""Lets vLLM's one KV allocation be the daemon's slab: nothing is zeroed, rounded, or seen by torch's allocator."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cachesvc_vllm.errors import ConnectorRefused

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2


class SlabMode(TorchFunctionMode):  # type: ignore[misc]
    """While it is entered, ``torch.zeros`` of exactly the slab's size gives ``slab`` (int8 ``[bytes]``)."""

    def __init__(self, slab: Any) -> None:
        super().__init__()
        self.slab = slab
        self.given = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.zeros and _size(args) == self.slab.numel():
            self.given += 1
            return self.slab
        return func(*args, **(kwargs or {}))


def _size(args: tuple[Any, ...]) -> int | None:
    """The size of a tensor that is to have one dimension."""
    first = args[0] if len(args) == 1 else None
    if isinstance(first, tuple | list | torch.Size) and len(first) == 1:
        first = first[0]
    return first if isinstance(first, int) else None


def require_on_slab(kv_caches: dict[str, Any], slab: Any, given: int) -> None:
    """Raises ConnectorRefused unless vLLM took the slab, once, and every layer lies on it."""
    elsewhere = [
        name for name, tensor in kv_caches.items() if tensor.untyped_storage().data_ptr() != slab.untyped_storage().data_ptr()
    ]
    if given != 1 or elsewhere:
        raise ConnectorRefused(
            f"vLLM asked {given} times for the daemon's {slab.numel()} bytes, and {len(elsewhere)} of {len(kv_caches)} "
            "layers lie elsewhere: this release allocates in a way that the connector does not know"
        )


def map_over(address: int, source: int, size_bytes: int) -> None:
    """Map the shared memory at ``source`` at ``address`` too, in place of what was there. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mremap.restype = ctypes.c_void_p
    libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
    if libc.mremap(source, 0, size_bytes, flags, address) != address:  # of length 0: the old mapping stays too
        raise OSError(ctypes.get_errno(), f"mapping {size_bytes} bytes of {source:#x} at {address:#x}")
