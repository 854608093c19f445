"""The daemon's layout that is vLLM's, to the byte: where vLLM places layers in its one buffer, a slab has its planes.

Bytes are all that counts here: what a page means is vLLM's affair, and a part of the model's name (``naming``). vLLM's
groups lie over each other from the buffer's first byte on, and a block is one group's at a time:

    group 0    | layer 0 [ block 0 | block 1 | ... ] | layer 3 [ block 0 | block 1 | ... ] |
    group 1    | layer 1 [ block 0 | block 1 | ... ] | layer 4 [ block 0 | block 1 | ... ] |

So all groups share one pool of pages. A group with smaller blocks than others is several in the layout (``Parts``).
"""

from __future__ import annotations

from typing import Any

from cachesvc_client.layouts.parts import Parts, part_group
from cachesvc_client.plugins.daemon.errors import ConnectorRefused

from cachesvc.model.errors import LayoutRejected
from cachesvc.model.geometry import device_geometry, slab_bytes
from cachesvc.model.layout import MAX_GROUPS, Layout, Plane, PlaneGroup
from cachesvc_vllm.daemon.cache_groups import CacheGroup, Retention, cache_groups, common_block_tokens

GROUP = "full"
"""Name of the group of a model that has one."""

POOL = "kv"


def slab_layout(kv_cache_config: Any, ranks: int = 1) -> Layout:
    """The layout for a ``KVCacheConfig``, which each of ``ranks`` has. Raises ConnectorRefused where no layout has the
    same bytes."""
    tensors = kv_cache_config.kv_cache_tensors
    if not tensors:
        raise ConnectorRefused("this model has no KV cache; leave the connector out")
    if any(tensor.host_resident for tensor in tensors):
        raise ConnectorRefused("KV tensors in host memory are not supported; leave the connector out for this model")
    kinds = cache_groups(kv_cache_config)
    starts = [_starts(kv_cache_config, group) for group in kv_cache_config.kv_cache_groups]
    pages, size = kv_cache_config.num_blocks, tensors[0].size
    is_row = all(stride == size // pages and start < stride for places in starts for start, stride in places)
    groups, planes = [], []
    tokens = common_block_tokens(kv_cache_config)
    for index, (kind, places) in enumerate(zip(kinds, starts, strict=True)):
        name = group_name(kind, index, len(kinds))
        group = _plane_group(name, kind, ranks, POOL if len(kinds) > 1 else "")
        if is_row:  # a block has all layers' bytes in a row
            mine = [Plane("block", 0, name, (size // pages,), "uint8")]
        else:
            mine = [Plane("kv", layer, name, (width,), "uint8") for layer, (_, width) in enumerate(places)]
        try:
            more = part_group(group, mine, block_tokens=tokens, part_tokens=kind.block_tokens)
        except LayoutRejected as why:
            raise ConnectorRefused(f"cachesvc_vllm: {why}") from why
        groups += more[0]
        planes += more[1]
    if len(groups) > MAX_GROUPS:
        raise ConnectorRefused(
            f"blocks of {sorted({kind.block_tokens for kind in kinds})} tokens make {len(groups)} groups, and "
            f"{MAX_GROUPS} are supported: leave the connector out for this model"
        )
    layout = Layout(tokens, ranks, tuple(groups), tuple(planes))
    for parts, places in zip(group_parts(kv_cache_config), starts, strict=True):
        _require_places(layout, parts.groups[0], [(0, size // pages)] if is_row else places, pages, size)
    return layout


def group_parts(kv_cache_config: Any) -> tuple[Parts, ...]:
    """Return the groups of ``slab_layout`` that each of vLLM's is."""
    tokens, first, found = common_block_tokens(kv_cache_config), 0, []
    for group in kv_cache_config.kv_cache_groups:
        count = tokens // group.kv_cache_spec.block_size
        found.append(Parts(tuple(range(first, first + count))))
        first += count
    return tuple(found)


def layers_in_order(kv_cache_config: Any) -> dict[str, int]:
    """Return the layer of ``slab_layout`` that each of vLLM's is, of a model with one group. Where a block has all
    layers' bytes in a row, they are one."""
    placed = sorted(
        (tensor.offset + at * tensor.layer_stride, tensor.block_stride, layer)
        for tensor in kv_cache_config.kv_cache_tensors
        for at, layer in enumerate(tensor.layers)
    )
    is_row = all(start < stride for start, stride, _ in placed)
    return {layer: 0 if is_row else at for at, (_, _, layer) in enumerate(placed)}


def group_name(kind: CacheGroup, index: int, count: int) -> str:
    """Return the name of vLLM's group ``index`` of ``count`` in the daemon's layout."""
    return GROUP if count == 1 else f"{kind.retention.value}-{index}"


def place_wider_first(kv_cache_config: Any) -> None:
    """Move vLLM's layers, before it allocates them, to where a slab has planes: wider ones lie first there.

    vLLM places layers of one kind after another, and a drafter's behind its target's, also where they are wider. The
    placement is data of its configuration alone, so each region moves as a whole. A placement of another form stays,
    and so do several groups: their layers are equally wide.
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


def _starts(kv_cache_config: Any, group: Any) -> list[tuple[int, int]]:
    """First byte of block 0 of each of a group's layers, in order, and the bytes from block to block."""
    is_alone = len(kv_cache_config.kv_cache_groups) == 1
    return sorted(
        (tensor.offset + at * tensor.layer_stride, tensor.block_stride)
        for tensor in kv_cache_config.kv_cache_tensors
        for at, layer in enumerate(tensor.layers)
        if is_alone or layer in group.layer_names
    )


def _plane_group(name: str, kind: CacheGroup, ranks: int, pool: str) -> PlaneGroup:
    return PlaneGroup(
        name,
        window_tokens=kind.window_tokens,
        replicated=ranks > 1 and kind.replicated,
        pool=pool,
        is_state=kind.retention is Retention.STATE,
    )


def _require_places(layout: Layout, group: int, wanted: list[tuple[int, int]], pages: int, size: int) -> None:
    """Raises ConnectorRefused where a slab has the planes of a group elsewhere than vLLM has its layers."""
    placed = [(span.offset, span.page_stride) for span in device_geometry(layout, group, pages).spans]
    if placed != wanted or size > slab_bytes(layout, layout.pools[0], pages):
        raise ConnectorRefused(
            f"vLLM lays {len(wanted)} layers over {size} bytes in a way that a slab of {pages} pages cannot have "
            f"(layers at {wanted[:3]}, planes at {placed[:3]}): choose a number of blocks that is a multiple of 256"
        )


def _region_bytes(tensor: Any) -> int:
    return len(tensor.layers) * int(tensor.layer_stride)
