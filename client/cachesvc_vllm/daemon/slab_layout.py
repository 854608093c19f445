"""The daemon's layout that is vLLM's, to the byte: where vLLM places layers in its one buffer, a slab has its planes.

Bytes are all that counts here: what a page means is vLLM's affair, and a part of the model's name (``naming``).
"""

from __future__ import annotations

from typing import Any

from cachesvc.model.geometry import device_geometry
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc_vllm.daemon.errors import ConnectorRefused

GROUP = "full"


def slab_layout(kv_cache_config: Any, ranks: int = 1) -> Layout:
    """The layout for a ``KVCacheConfig`` of one group, which each of ``ranks`` has. Raises ConnectorRefused where no
    layout has the same bytes."""
    tensors = kv_cache_config.kv_cache_tensors
    if not tensors:
        raise ConnectorRefused("this model has no KV cache; leave the connector out")
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    pages, size = kv_cache_config.num_blocks, tensors[0].size
    if any(tensor.host_resident for tensor in tensors):
        raise ConnectorRefused("KV tensors in host memory are not supported; leave the connector out for this model")
    starts = [
        (tensor.offset + at * tensor.layer_stride, tensor.block_stride)
        for tensor in tensors
        for at in range(len(tensor.layers))
    ]
    widths = {width for _, width in starts}
    if widths == {size // pages} and all(start < size // pages for start, _ in starts):
        planes = [Plane("block", 0, GROUP, (size // pages,), "uint8")]  # a block has all layers' bytes in a row
    else:
        planes = [Plane("kv", layer, GROUP, (width,), "uint8") for layer, (_, width) in enumerate(sorted(starts))]
    group = PlaneGroup(GROUP, replicated=ranks > 1 and _is_replicated(spec))
    layout = Layout(spec.block_size, ranks, (group,), tuple(planes))
    geometry = device_geometry(layout, 0, pages)
    placed = [(span.offset, span.page_stride) for span in geometry.spans]
    wanted = [(0, size // pages)] if len(planes) == 1 else sorted(starts)
    if placed != wanted or size > geometry.total_bytes:
        raise ConnectorRefused(
            f"vLLM lays {len(starts)} layers over {size} bytes in a way that a slab of {pages} pages cannot have "
            f"(layers at {wanted[:3]}, planes at {placed[:3]}): choose a number of blocks that is a multiple of 256"
        )
    return layout


def place_wider_first(kv_cache_config: Any) -> None:
    """Move vLLM's layers, before it allocates them, to where a slab has planes: wider ones lie first there.

    vLLM places layers of one kind after another, and a drafter's behind its target's, also where they are wider. The
    placement is data of its configuration alone, so each region moves as a whole. A placement of another form stays.
    """
    tensors, pages = kv_cache_config.kv_cache_tensors, kv_cache_config.num_blocks
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset != end or tensor.layer_stride != pages * tensor.block_stride:
            return
        end += _region_bytes(tensor)
    offset = 0
    for tensor in sorted(tensors, key=lambda tensor: (-tensor.block_stride, tensor.offset)):
        tensor.offset = offset
        offset += _region_bytes(tensor)


def _region_bytes(tensor: Any) -> int:
    return len(tensor.layers) * int(tensor.layer_stride)


def _is_replicated(spec: Any) -> bool:
    """True where each rank computes all of it, as latents are."""
    layers = getattr(spec, "kv_cache_specs", {"": spec}).values()
    return all(layer.max_tp_shards == 1 for layer in layers)
