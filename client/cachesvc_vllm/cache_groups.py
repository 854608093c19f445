"""Groups of vLLM's KV cache as data: which blocks of a group the token behind a hit needs.

vLLM divides a model's layers into groups of equally many. A group has a block table of its own, and all groups draw
their blocks from one pool. The daemon knows three kinds of them (``Retention``); everything else is refused by name.
Pages of all groups are equally large, so blocks of one group may have more tokens than those of another. The daemon's
have the least common multiple of all: vLLM's hits end there too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from cachesvc_client.layouts.families import Parts, part_group
from cachesvc_client.plugins.keeper import ConnectorRefused

from cachesvc.model.errors import LayoutRejected
from cachesvc.model.layout import MAX_BLOCK_TOKENS, MAX_GROUPS, Layout, Plane, PlaneGroup, device_geometry, slab_bytes


class Retention(Enum):
    """FULL: all blocks, until the request ends. WINDOW: those of the last tokens. STATE: the last one alone."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"


FULL_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
WINDOW_SPECS = ("SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec")
STATE_SPECS = ("MambaSpec",)
UNIFORM_SPECS = "UniformTypeKVCacheSpecs"
"""A group whose layers have specs of one kind and pages of several sizes."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """``block_tokens``: of its own blocks. ``window_tokens``: of a WINDOW, the query's own included. ``replicated``:
    each rank computes all of it."""

    retention: Retention
    block_tokens: int
    window_tokens: int | None = None
    replicated: bool = False


def cache_groups(kv_cache_config: Any) -> tuple[CacheGroup, ...]:
    """Return vLLM's groups in its order. Raises ConnectorRefused for the first thing that cannot be served."""
    for why in _refusals(kv_cache_config):
        raise ConnectorRefused(f"cachesvc_vllm: {why}")
    return tuple(_group(each.kv_cache_spec) for each in kv_cache_config.kv_cache_groups)


def common_block_tokens(kv_cache_config: Any) -> int:
    """Return the tokens of a block in which each group has whole blocks."""
    return math.lcm(*(each.kv_cache_spec.block_size for each in kv_cache_config.kv_cache_groups))


def most_drafts(kv_cache_config: Any) -> int:
    """Return the cells for drafts that a request has in a group of states; 0 where no state is kept for drafts."""
    layers = (layer for each in kv_cache_config.kv_cache_groups for layer in layer_specs(each.kv_cache_spec))
    return max(int(getattr(layer, "num_speculative_blocks", 0)) for layer in layers)


def layer_specs(spec: Any) -> list[Any]:
    """Return the specs of a group's layers, each kind once."""
    return list(spec.kv_cache_specs.values()) if type(spec).__name__ == UNIFORM_SPECS else [spec]


def _group(spec: Any) -> CacheGroup:
    layers = layer_specs(spec)
    retention, replicated = _retention(layers[0]), all(map(_is_replicated, layers))
    assert retention is not None
    window = _window_tokens(layers[0]) if retention is Retention.WINDOW else None
    return CacheGroup(retention, int(spec.block_size), window, replicated)


def _retention(layer: Any) -> Retention | None:
    kinds = {Retention.FULL: FULL_SPECS, Retention.WINDOW: WINDOW_SPECS, Retention.STATE: STATE_SPECS}
    return next((kind for kind, names in kinds.items() if type(layer).__name__ in names), None)


def _window_tokens(layer: Any) -> int:
    """A chunk of local attention is a window as long as the chunk: it never reaches further back."""
    return int(layer.sliding_window if hasattr(layer, "sliding_window") else layer.attention_chunk_size)


def _is_replicated(layer: Any) -> bool:
    return getattr(layer, "max_tp_shards", None) == 1 or bool(getattr(layer, "tp_replicated", False))


def _refusals(kv_cache_config: Any) -> Iterable[str]:
    groups = [each.kv_cache_spec for each in kv_cache_config.kv_cache_groups]
    if not groups:
        yield "this model has no KV cache: leave the connector out"
    if len(groups) > MAX_GROUPS:
        yield f"this model has {len(groups)} KV cache groups, and {MAX_GROUPS} are supported: leave the connector out"
    for spec in groups:
        yield from _of_group(spec)
    if groups:
        yield from _of_sizes(groups, kv_cache_config.hash_block_size)


def _of_sizes(groups: list[Any], hashed: int | None) -> Iterable[str]:
    sizes = sorted({spec.block_size for spec in groups})
    if hashed is not None and any(size % hashed for size in sizes):
        yield f"keys are of {hashed} tokens and blocks of {sizes}: leave out --prefix-match-unit"
    if math.lcm(*sizes) > MAX_BLOCK_TOKENS:
        yield (
            f"KV cache groups with blocks of {sizes} tokens have {math.lcm(*sizes)} tokens in common, and at most "
            f"{MAX_BLOCK_TOKENS} are supported: take another --block-size"
        )
    has_states = any(_retention(layer) is Retention.STATE for spec in groups for layer in layer_specs(spec))
    if has_states and (len(sizes) > 1 or hashed not in (None, sizes[0])):
        yield (
            f"keys are of {hashed} tokens and blocks of {sizes}, and vLLM keeps states within a block then and goes on "
            "to write them: make all equal (--block-size, or leave out --prefix-match-unit)"
        )


def _of_group(spec: Any) -> Iterable[str]:
    layers, name = layer_specs(spec), type(spec).__name__
    kinds = {_retention(layer) for layer in layers}
    for layer in layers:
        if _retention(layer) is None:
            served = ", ".join((*FULL_SPECS, *WINDOW_SPECS, *STATE_SPECS))
            yield f"KV cache groups of {type(layer).__name__} are not supported; {served} are"
            return
    windows = {_window_tokens(layer) for layer in layers if _retention(layer) is Retention.WINDOW}
    if len(kinds) > 1 or len(windows) > 1:
        yield f"a KV cache group of {name} whose layers keep different blocks is not supported"
    if any(getattr(layer, "prefix_replay_tokens", 0) for layer in layers):
        yield f"KV cache groups of {name} that compute a part of each hit again are not supported"
    for layer in layers:
        if _retention(layer) is Retention.STATE:
            yield from _of_state(layer)


def _of_state(layer: Any) -> Iterable[str]:
    if layer.mamba_cache_mode != "align":
        yield (
            f"states in --mamba-cache-mode {layer.mamba_cache_mode} cannot be shared: leave that option out, so that "
            "vLLM keeps one at the end of each block (align)"
        )


# The daemon's layout that is vLLM's, to the byte: where vLLM places layers in its one buffer, a slab has its planes.
#
# Bytes are all that counts here: what a page means is vLLM's affair, and a part of the model's name (``naming``).
# vLLM's groups lie over each other from the buffer's first byte on, and a block is one group's at a time:
#
#     group 0    | layer 0 [ block 0 | block 1 | ... ] | layer 3 [ block 0 | block 1 | ... ] |
#     group 1    | layer 1 [ block 0 | block 1 | ... ] | layer 4 [ block 0 | block 1 | ... ] |
#
# So all groups share one pool of pages. A group with smaller blocks than others is several in the layout (``Parts``).
#
# Stages of a pipeline have layers of their own: plane i of a rank's slab is layer i of its stage. All slabs have as
# many planes as the stage with most layers needs. On other stages the last ones stay unused, behind what vLLM uses:
#
#     stage 0    | layer 0 | layer 1 | layer 2 |
#     stage 1    | layer 3 | layer 4 | unused  |

GROUP = "full"
"""Name of the group of a model that has one."""

POOL = "kv"


@dataclass(frozen=True, slots=True)
class Placement:
    """Places of one rank's layers. ``starts``: of each group's, in order, the first byte of block 0 and the bytes from
    block to block. ``block_bytes``: of all layers."""

    starts: tuple[tuple[tuple[int, int], ...], ...]
    block_bytes: int

    @property
    def is_row(self) -> bool:
        """True where a block has all layers' bytes in a row."""
        return all(stride == self.block_bytes and start < stride for places in self.starts for start, stride in places)


def placement_of(kv_cache_config: Any) -> Placement:
    tensors = kv_cache_config.kv_cache_tensors
    starts = (_starts(kv_cache_config, group) for group in kv_cache_config.kv_cache_groups)
    return Placement(tuple(starts), tensors[0].size // kv_cache_config.num_blocks if tensors else 0)


def slab_layout(kv_cache_config: Any, ranks: int = 1, stages: Sequence[Placement] = ()) -> Layout:
    """The layout for a ``KVCacheConfig``, which each of ``ranks`` has. ``stages``: of a pipeline, this rank's among
    them; none: there is one. Raises ConnectorRefused where no layout has the same bytes."""
    tensors = kv_cache_config.kv_cache_tensors
    if not tensors:
        raise ConnectorRefused("this model, or a stage of its pipeline, has no KV cache; leave the connector out")
    if any(tensor.host_resident for tensor in tensors):
        raise ConnectorRefused("KV tensors in host memory are not supported; leave the connector out for this model")
    kinds, mine = cache_groups(kv_cache_config), placement_of(kv_cache_config)
    stages = stages or (mine,)
    pages, size = kv_cache_config.num_blocks, tensors[0].size
    is_row = all(each.is_row for each in stages)
    if is_row and len({each.block_bytes for each in stages}) > 1:
        raise ConnectorRefused(
            f"stages of the pipeline have {', '.join(str(each.block_bytes) for each in stages)} bytes a block, which "
            "lie in a row: give all stages as many layers (VLLM_PP_LAYER_PARTITION)"
        )
    groups, planes = [], []
    tokens = common_block_tokens(kv_cache_config)
    for index, kind in enumerate(kinds):
        name = group_name(kind, index, len(kinds))
        is_replicated = kind.replicated and ranks > 1 and len(stages) == 1
        group = _plane_group(name, kind, POOL if len(kinds) > 1 else "", replicated=is_replicated)
        if is_row:
            wide = [Plane("block", 0, name, (mine.block_bytes,), "uint8")]
        else:
            longest = max((each.starts[index] for each in stages), key=len)
            wide = [Plane("kv", layer, name, (width,), "uint8") for layer, (_, width) in enumerate(longest)]
        try:
            more = part_group(group, wide, block_tokens=tokens, part_tokens=kind.block_tokens)
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
    for parts, places in zip(group_parts(kv_cache_config), mine.starts, strict=True):
        wanted = [(0, mine.block_bytes)] if is_row else list(places)
        _require_places(layout, parts.groups[0], wanted, pages, size)
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
    return kind.retention.value if count == 1 else f"{kind.retention.value}-{index}"


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


def _starts(kv_cache_config: Any, group: Any) -> tuple[tuple[int, int], ...]:
    """First byte of block 0 of each of a group's layers, in order, and the bytes from block to block."""
    is_alone = len(kv_cache_config.kv_cache_groups) == 1
    found = (
        (tensor.offset + at * tensor.layer_stride, tensor.block_stride)
        for tensor in kv_cache_config.kv_cache_tensors
        for at, layer in enumerate(tensor.layers)
        if is_alone or layer in group.layer_names
    )
    return tuple(sorted(found))


def _plane_group(name: str, kind: CacheGroup, pool: str, *, replicated: bool) -> PlaneGroup:
    return PlaneGroup(
        name,
        window_tokens=kind.window_tokens,
        replicated=replicated,
        pool=pool,
        is_state=kind.retention is Retention.STATE,
    )


def _require_places(layout: Layout, group: int, wanted: list[tuple[int, int]], pages: int, size: int) -> None:
    """Raises ConnectorRefused where a slab has the first planes of a group elsewhere than vLLM has its layers."""
    placed = [(span.offset, span.page_stride) for span in device_geometry(layout, group, pages).spans]
    if placed[: len(wanted)] != wanted or size > slab_bytes(layout, layout.pools[0], pages):
        raise ConnectorRefused(
            f"vLLM lays {len(wanted)} layers over {size} bytes in a way that a slab of {pages} pages cannot have "
            f"(layers at {wanted[:3]}, planes at {placed[:3]}): choose a number of blocks that is a multiple of 256, "
            "and as many layers for each stage of a pipeline (VLLM_PP_LAYER_PARTITION)"
        )


def _region_bytes(tensor: Any) -> int:
    return len(tensor.layers) * int(tensor.layer_stride)
