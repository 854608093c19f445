"""Lets vLLM's one KV allocation be the daemon's slab: nothing is zeroed, rounded, or seen by torch's allocator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from cachesvc_client.plugins.daemon.errors import ConnectorRefused
from torch.overrides import TorchFunctionMode


class SlabMode(TorchFunctionMode):  # type: ignore[misc]
    """Mode in which ``torch.zeros`` of exactly the slab's size gives ``slab`` (int8 ``[bytes]``)."""

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


def require_on_slab(kv_caches: Mapping[str, Any], slab: Any, given: int) -> None:
    """Raises ConnectorRefused unless vLLM took the slab, once, and every layer lies on it."""
    storage = slab.untyped_storage().data_ptr()
    elsewhere = [
        name
        for name, tensors in kv_caches.items()
        for tensor in (tensors if isinstance(tensors, list | tuple) else [tensors])  # a state has several
        if tensor.untyped_storage().data_ptr() != storage
    ]
    if given != 1 or elsewhere:
        raise ConnectorRefused(
            f"vLLM asked {given} times for the daemon's {slab.numel()} bytes, and {len(elsewhere)} of {len(kv_caches)} "
            "layers lie elsewhere: this release allocates in a way that the connector does not know"
        )
