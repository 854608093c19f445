"""Plane lists of the attention families that the client offers. The daemon never imports this file.

Every function returns a Layout whose planes are listed layer by layer, in the order in which an engine hands them to
its forward pass (``k, v``, then ``k_scale, v_scale``; ``latent``, then the indexer). Under tensor parallelism heads are
sharded, rank r holding the global heads ``[r * heads, (r + 1) * heads)``, and latents are the same on every rank.

A dtype is a name, short or long (``"bf16"``, ``"bfloat16"``), or a framework's own (``torch.bfloat16``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import cycle, islice
from typing import NamedTuple

import numpy as np

from cachesvc.model.errors import LayoutRejected
from cachesvc.model.layout import ITEM_BYTES, MAX_PLANES, Layout, Plane, PlaneGroup
from cachesvc_client.core.arguments import explains_arguments
from cachesvc_client.records.sequence_record import Pages

FULL = "full"
WINDOW = "window"
DRAFT_PREFIX = "draft_"
TILE_VALUES = 128
"""Values that share one scale in a packed row and in an indexer page."""
TILE_SCALE_BYTES = 4
ROPE_VALUE_BYTES = 2

# What an engine of FastDeploy's kind calls the tensors; a plane that has no name there is called `{name}_caches`.
TENSOR_STEMS = {
    "k": "key_caches",
    "v": "value_caches",
    "k_scale": "key_cache_scales",
    "v_scale": "value_cache_scales",
    "latent": "key_caches",
    "index": "indexer_caches",
}


class IndexPage(Enum):
    """Layout of an indexer's page on the device: all values of the block, then all their scales, in either case.

    SPLIT: planes ``index_key`` and ``index_scale``. FUSED: one plane ``index`` with both, for kernels that take one
    tensor; flat, because its rows are no tokens.
    """

    SPLIT = "split"
    FUSED = "fused"


class HeadSplit(NamedTuple):
    """Global kv heads of one layer on one rank, in the order in which the planes of each group hold them."""

    full: tuple[int, ...]
    window: tuple[int, ...]


class HeadPlace(NamedTuple):
    """Place of a head's bytes: the group, and the row in each of the layer's planes there (their first dimension)."""

    group: str
    row: int


class _Kind(NamedTuple):
    """A plane that has no layer and no group yet."""

    name: str
    page_shape: tuple[int, ...]
    dtype: str


@explains_arguments
def gqa(
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    block_tokens: int,
    dtype: object = "bfloat16",
    scale_dtype: object = None,
    tensor_parallel: int = 1,
) -> Layout:
    """Grouped-query attention: planes ``k`` and ``v`` of ``[kv_heads / tp, block_tokens, head_dim]`` in each layer.

    ``scale_dtype``: values of one byte with a scale for each head and token, in planes ``k_scale`` and ``v_scale`` of
    ``[kv_heads / tp, block_tokens]``. Raises LayoutRejected when ``kv_heads`` does not divide by ``tensor_parallel``.
    """
    kinds = _key_value(heads_per_rank(kv_heads, tensor_parallel), block_tokens, head_dim, dtype, scale_dtype)
    return _layout(block_tokens, tensor_parallel, (PlaneGroup(FULL),), _alike(layers, kinds))


@explains_arguments
def gqa_windowed(
    *,
    window_layers: Sequence[bool],
    kv_heads: int,
    head_dim: int,
    block_tokens: int,
    window_tokens: int,
    sink_tokens: int = 0,
    dtype: object = "bfloat16",
    scale_dtype: object = None,
    tensor_parallel: int = 1,
) -> Layout:
    """GQA where ``window_layers[i]`` says whether layer i attends to the last ``window_tokens`` (and sinks) only."""
    kinds = _key_value(heads_per_rank(kv_heads, tensor_parallel), block_tokens, head_dim, dtype, scale_dtype)
    groups = (PlaneGroup(FULL), PlaneGroup(WINDOW, window_tokens, sink_tokens))
    layers = [[(WINDOW if has_window else FULL, kinds)] for has_window in window_layers]
    return _layout(block_tokens, tensor_parallel, groups, layers)


@explains_arguments
def gqa_head_windows(
    *,
    window_heads: Sequence[Sequence[bool]],
    head_dim: int,
    block_tokens: int,
    window_tokens: int,
    sink_tokens: int = 0,
    dtype: object = "bfloat16",
    scale_dtype: object = None,
    tensor_parallel: int = 1,
) -> Layout:
    """GQA where ``window_heads[i][h]`` says whether global kv head h of layer i attends to its window (and sinks) only.

    A layer with heads of both sorts has its planes in both groups; ``head_places`` tells where a rank's heads are in
    them. Every rank's planes have one shape: as many rows as the rank with the most heads there needs, so where ranks
    differ some rows hold nothing (``padding_bytes``). ``even_window_heads`` trades those for heads that are kept whole,
    which is never more bytes. Raises LayoutRejected as ``gqa`` does.
    """
    layers: list[_Layer] = []
    for is_window in window_heads:
        splits = _splits(is_window, tensor_parallel)  # a plane has as many rows as a rank has heads there at most
        rows = {FULL: max(len(split.full) for split in splits), WINDOW: max(len(split.window) for split in splits)}
        kinds = {group: _key_value(count, block_tokens, head_dim, dtype, scale_dtype) for group, count in rows.items()}
        layers.append([(group, kinds[group]) for group, count in rows.items() if count])
    groups = (PlaneGroup(FULL), PlaneGroup(WINDOW, window_tokens, sink_tokens))
    return _layout(block_tokens, tensor_parallel, groups, layers)


@explains_arguments
def mla(
    *,
    layers: int,
    kv_lora_rank: int,
    rope_dim: int,
    block_tokens: int,
    dtype: object = "bfloat16",
    tensor_parallel: int = 1,
) -> Layout:
    """Multi-head latent attention: one plane ``latent`` of ``[1, block_tokens, kv_lora_rank + rope_dim]``, the same
    on every rank (DeepSeek-V3: 512 + 64, 73,728 bytes a block of 64 tokens in bf16)."""
    kinds = (_Kind("latent", (1, block_tokens, kv_lora_rank + rope_dim), dtype_name(dtype)),)
    return _layout(block_tokens, tensor_parallel, (PlaneGroup(FULL, replicated=True),), _alike(layers, kinds))


@explains_arguments
def mla_windowed(
    *,
    window_layers: Sequence[bool],
    kv_lora_rank: int,
    rope_dim: int,
    block_tokens: int,
    window_tokens: int,
    sink_tokens: int = 0,
    dtype: object = "bfloat16",
    tensor_parallel: int = 1,
) -> Layout:
    """MLA where the layers that ``window_layers`` marks attend to a window (and sinks) and keep packed rows.

    Their ``latent`` is ``[1, block_tokens, packed_row_bytes]`` of uint8; the other layers are as in ``mla``.
    """
    packed = _packed_rows(kv_lora_rank, rope_dim, block_tokens)
    plain = _Kind("latent", (1, block_tokens, kv_lora_rank + rope_dim), dtype_name(dtype))
    layers = [[(WINDOW, (packed,)) if has_window else (FULL, (plain,))] for has_window in window_layers]
    groups = (PlaneGroup(FULL, replicated=True), PlaneGroup(WINDOW, window_tokens, sink_tokens, replicated=True))
    return _layout(block_tokens, tensor_parallel, groups, layers)


@explains_arguments
def dsa(
    *,
    layers: int,
    kv_lora_rank: int,
    rope_dim: int,
    index_head_dim: int,
    block_tokens: int,
    index_page: IndexPage = IndexPage.SPLIT,
    tensor_parallel: int = 1,
) -> Layout:
    """DeepSeek sparse attention: packed rows as ``latent``, and an indexer's page; always uint8.

    All of it is the same on every rank. DeepSeek-V3.2: 656 bytes a token, and 8,192 of values and 256 of scales a
    block of 64 tokens.
    """
    tiles = _tiles("index_head_dim", index_head_dim)
    split = (
        _Kind("index_key", (block_tokens, index_head_dim), "uint8"),
        _Kind("index_scale", (block_tokens, tiles * TILE_SCALE_BYTES), "uint8"),
    )
    fused = (_Kind("index", (block_tokens * (index_head_dim + tiles * TILE_SCALE_BYTES),), "uint8"),)
    index = fused if index_page is IndexPage.FUSED else split
    kinds = (_packed_rows(kv_lora_rank, rope_dim, block_tokens), *index)
    return _layout(block_tokens, tensor_parallel, (PlaneGroup(FULL, replicated=True),), _alike(layers, kinds))


@explains_arguments
def with_draft(target: Layout, draft: Layout) -> Layout:
    """``target`` and, as further layers behind its last, those of a draft model or of MTP, of any family.

    The draft's groups keep their rules under names that begin with ``draft_``, so they have a page count of their own.
    Raises LayoutRejected where block size or ranks differ.
    """
    if (target.block_tokens, target.ranks) != (draft.block_tokens, draft.ranks):
        raise LayoutRejected(
            f"a draft shares its target's blocks and ranks: {draft.block_tokens} tokens on {draft.ranks} ranks "
            f"beside {target.block_tokens} tokens on {target.ranks} ranks"
        )
    groups = tuple(replace(group, name=DRAFT_PREFIX + group.name) for group in draft.own_groups)
    planes = tuple(
        replace(plane, layer=target.layers + plane.layer, group=DRAFT_PREFIX + plane.group)
        for plane in draft.own_planes
    )
    return Layout(target.block_tokens, target.ranks, target.own_groups + groups, target.own_planes + planes)


@explains_arguments
def opaque(*, block_bytes: int, block_tokens: int, layers: int = 1) -> Layout:
    """Pages of plain bytes: ``layers`` planes ``bytes`` that share ``block_bytes``; for replay and storage tests.

    Raises LayoutRejected when ``block_bytes`` does not divide by ``layers``.
    """
    if layers < 1 or block_bytes % layers:
        raise LayoutRejected(f"block_bytes {block_bytes} must be a multiple of layers {layers}")
    kinds = (_Kind("bytes", (block_bytes // layers,), "uint8"),)
    return _layout(block_tokens, 1, (PlaneGroup(FULL),), _alike(layers, kinds))


@explains_arguments
def heads_per_rank(kv_heads: int, tensor_parallel: int) -> int:
    """Key-value heads on each rank. Raises LayoutRejected where they do not divide."""
    if tensor_parallel < 1 or kv_heads < 1 or kv_heads % tensor_parallel:
        raise LayoutRejected(f"{kv_heads} kv heads do not divide over {tensor_parallel} ranks")
    return kv_heads // tensor_parallel


@explains_arguments
def split_heads(is_window: Sequence[bool], tensor_parallel: int, rank: int) -> HeadSplit:
    """The heads of one layer that a rank holds, by group, out of ``is_window`` for each global kv head.

    Raises LayoutRejected where heads do not divide over the ranks, or the rank is none of them.
    """
    heads = heads_per_rank(len(is_window), tensor_parallel)
    if not 0 <= rank < tensor_parallel:
        raise LayoutRejected(f"rank {rank} is none of {tensor_parallel}")
    mine = range(rank * heads, (rank + 1) * heads)
    return HeadSplit(
        tuple(head for head in mine if not is_window[head]), tuple(head for head in mine if is_window[head])
    )


@explains_arguments
def head_places(is_window: Sequence[bool], tensor_parallel: int, rank: int) -> tuple[HeadPlace, ...]:
    """Places of a rank's heads, in their own order: entry i is for global head ``rank * heads_per_rank + i``.

    Rows of a plane that no head has are padding: nothing reads them. Raises LayoutRejected as ``split_heads``.
    """
    split = split_heads(is_window, tensor_parallel, rank)
    places = {head: HeadPlace(FULL, row) for row, head in enumerate(split.full)}
    places |= {head: HeadPlace(WINDOW, row) for row, head in enumerate(split.window)}
    return tuple(places[head] for head in sorted(places))


@explains_arguments
def padding_bytes(layout: Layout, window_heads: Sequence[Sequence[bool]]) -> tuple[int, ...]:
    """Bytes of a page of each group that hold no head of rank r, summed over the ranks; of a ``gqa_head_windows``."""
    wasted = [0] * len(layout.groups)
    for plane in layout.own_planes:
        if plane.layer >= len(window_heads):  # a draft's
            continue
        splits = _splits(window_heads[plane.layer], layout.ranks)
        held = sum(len(split.window if plane.group == WINDOW else split.full) for split in splits)
        rows = plane.page_shape[0]
        wasted[layout.group_index[plane.group]] += (rows * layout.ranks - held) * (plane.page_bytes // rows)
    return tuple(wasted)


@explains_arguments
def even_window_heads(window_heads: Sequence[Sequence[bool]], tensor_parallel: int) -> tuple[tuple[bool, ...], ...]:
    """``window_heads`` with as many windowed heads on every rank: those above the least are kept whole instead.

    Attention over them stays what it was, for a head may have more in reach than it looks at. Full planes have as many
    rows as with padding, for the rank with the fewest windowed heads needs them, and windowed planes have fewer.
    """
    out: list[tuple[bool, ...]] = []
    for layer in window_heads:
        splits = _splits(layer, tensor_parallel)
        least = min(len(split.window) for split in splits)
        kept = {head for split in splits for head in split.window[:least]}
        out.append(tuple(head in kept for head in range(len(layer))))
    return tuple(out)


def _splits(is_window: Sequence[bool], tensor_parallel: int) -> list[HeadSplit]:
    heads_per_rank(len(is_window), tensor_parallel)
    return [split_heads(is_window, tensor_parallel, rank) for rank in range(tensor_parallel)]


def packed_row_bytes(kv_lora_rank: int, rope_dim: int) -> int:
    """Bytes of a packed row: fp8 latent, a 4-byte scale for each 128 of it, 16-bit rope values (656 for 512 + 64)."""
    return kv_lora_rank + TILE_SCALE_BYTES * _tiles("kv_lora_rank", kv_lora_rank) + ROPE_VALUE_BYTES * rope_dim


@explains_arguments
def tensor_names(layout: Layout, rank: int, device: int) -> dict[str, Plane]:
    """The one name of every plane's tensor on one rank, as ``key_caches_12_rank1.device5``, in the layout's order.

    The group stands behind the layer where a layer has the plane in two groups. ``rank``: within tensor parallelism.
    Raises LayoutRejected for a rank that the layout does not have.
    """
    if not 0 <= rank < layout.ranks:
        raise LayoutRejected(f"rank {rank} is none of {layout.ranks}; take the rank within tensor parallelism")
    homes = Counter((plane.name, plane.layer) for plane in layout.own_planes)
    names = {}
    for plane in layout.own_planes:
        stem = TENSOR_STEMS.get(plane.name, f"{plane.name}_caches")
        where = f"{plane.layer}_{plane.group}" if homes[plane.name, plane.layer] > 1 else f"{plane.layer}"
        names[f"{stem}_{where}_rank{rank}.device{device}"] = plane
    return names


def _key_value(heads: int, block_tokens: int, head_dim: int, dtype: object, scale_dtype: object) -> tuple[_Kind, ...]:
    shape, values = (heads, block_tokens, head_dim), dtype_name(dtype)
    kinds = (_Kind("k", shape, values), _Kind("v", shape, values))
    if scale_dtype is None:
        return kinds
    if ITEM_BYTES[values] != 1:
        raise LayoutRejected(f"scales of {scale_dtype} belong to values of one byte, not to {dtype}")
    scales, scale = (heads, block_tokens), dtype_name(scale_dtype)
    return (*kinds, _Kind("k_scale", scales, scale), _Kind("v_scale", scales, scale))


def _packed_rows(kv_lora_rank: int, rope_dim: int, block_tokens: int) -> _Kind:
    return _Kind("latent", (1, block_tokens, packed_row_bytes(kv_lora_rank, rope_dim)), "uint8")


def _tiles(name: str, values: int) -> int:
    if values < 1 or values % TILE_VALUES:
        raise LayoutRejected(f"{name} must be a multiple of {TILE_VALUES}, the values that share a scale, got {values}")
    return values // TILE_VALUES


_Layer = Sequence[tuple[str, Sequence[_Kind]]]
"""Groups of a layer, each with the planes that it has there."""


def _alike(layers: int, kinds: Sequence[_Kind]) -> list[_Layer]:
    _check_layers(layers)
    return [[(FULL, kinds)]] * layers


def _check_layers(layers: int) -> None:
    if not 1 <= layers <= MAX_PLANES:
        raise LayoutRejected(f"layers must be 1..{MAX_PLANES}, got {layers}")


def _layout(block_tokens: int, ranks: int, groups: Sequence[PlaneGroup], layers: Sequence[_Layer]) -> Layout:
    """Make a layout without the groups that no plane is in: a model whose layers are all full has no window group."""
    _check_layers(len(layers))
    planes = tuple(
        Plane(kind.name, layer, group, kind.page_shape, kind.dtype)
        for layer, there in enumerate(layers)
        for group, kinds in there
        for kind in kinds
    )
    used = {plane.group for plane in planes}
    return Layout(block_tokens, ranks, tuple(group for group in groups if group.name in used), planes)


SHORT_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "float8_e4m3": "float8_e4m3fn",
}


def dtype_name(dtype: object) -> str:
    """The layout's name of a dtype: ``bfloat16`` for ``"bf16"``, ``torch.bfloat16`` or a NumPy type of that name.

    Raises LayoutRejected, with the known ones, for any other.
    """
    spelled = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", dtype)
    bare = str(spelled).rpartition(".")[2].lower()
    name = SHORT_NAMES.get(bare, bare)
    if name not in ITEM_BYTES:
        shown = repr(dtype)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise LayoutRejected(f"unknown dtype {shown}; known are {', '.join(ITEM_BYTES)}, and {', '.join(SHORT_NAMES)}")
    return name


# Groups with smaller blocks than their layout's: a group for each part of a block, over one pool.
#
# A layout has one size of blocks, that of its keys: hits end at those. A group whose pages hold fewer tokens has
# several in each block, and they are groups of their own:
#
#     layout     |      block 0      |      block 1      |
#     window-p0  |  page 0           |  page 2           |
#     window-p1  |           page 1  |           page 3  |
#
# The page of an earlier part falls out of a window sooner, so its group has a shorter one. Where a window does not
# reach it from the end of its block, no hit needs it: its group is scratch.


@dataclass(frozen=True, slots=True)
class Parts:
    """One group of an engine as groups of a layout. ``groups``: their indices, in the order of the parts of a block.
    ``count``: pages of a block."""

    groups: tuple[int, ...]
    count: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", len(self.groups))

    def pages(self, tables: Sequence[Pages], first: int, end: int | None = None) -> list[int]:
        """Return the pages ``[first, end)`` of the engine's own table; up to its end without ``end``."""
        if self.count == 1:
            alone: list[int] = tables[self.groups[0]][first:end].tolist()
            return alone
        row = first // self.count
        end_row = None if end is None else -(-end // self.count)
        rows = [tables[group][row:end_row] for group in self.groups]
        last = None if end is None else end - row * self.count
        cells: list[int] = np.stack(rows, axis=1).ravel()[first - row * self.count : last].tolist()
        return cells

    def groups_at(self, first: int) -> Iterator[int]:
        """Return the groups of the pages from ``first`` on, without end."""
        return islice(cycle(self.groups), first % self.count, None)

    def dead(self, first: int) -> dict[int, int]:
        """Return by group the first block that is needed still, where ``first`` is the first such page of the engine's
        table: what ``Sequence.give_back`` takes."""
        return {group: -(-max(0, first - part) // self.count) for part, group in enumerate(self.groups)}

    def dead_pages(self, dead: Mapping[int, int]) -> int:
        """Return the first page that is needed still, of what ``dead`` returned."""
        return sum(dead.get(group, 0) for group in self.groups)


def part_group(
    group: PlaneGroup, planes: Sequence[Plane], *, block_tokens: int, part_tokens: int
) -> tuple[list[PlaneGroup], list[Plane]]:
    """Return the groups and planes of a group with blocks of ``part_tokens`` in a layout of ``block_tokens``.

    ``planes``: those of one page. Raises LayoutRejected where the sizes do not fit, for states within a block, and
    without a pool that the parts share.
    """
    if part_tokens < 1 or block_tokens % part_tokens:
        raise LayoutRejected(
            f"group {group.name!r} has blocks of {part_tokens} tokens, which is no divisor of the layout's "
            f"{block_tokens}: take the least common multiple of all groups' for the layout"
        )
    count = block_tokens // part_tokens
    if count == 1:
        return [group], list(planes)
    if group.is_state:
        raise LayoutRejected(
            f"group {group.name!r} has states each {part_tokens} tokens, and blocks of the layout have {block_tokens}: "
            "a state is valid at the end of a block alone; make them equal"
        )
    if not group.pool:
        raise LayoutRejected(f"group {group.name!r} has {count} pages a block and no pool: name one that they share")
    groups = [_part(group, part, count, part_tokens) for part in range(count)]
    return groups, [replace(plane, group=each.name) for each in groups for plane in planes]


def _part(group: PlaneGroup, part: int, count: int, part_tokens: int) -> PlaneGroup:
    """The pages of a part, which lie in their blocks as if they were the whole of them: so the window's last token is
    nearer, and so are the sinks."""
    window, sinks = group.window_tokens, max(0, group.sink_tokens - part * part_tokens)
    if window is not None:
        window = max(1 if sinks else 0, window - (count - 1 - part) * part_tokens)
    return replace(group, name=f"{group.name}-p{part}", window_tokens=window, sink_tokens=sinks)
