"""A model's KV cache as data: planes, groups, ranks. Nothing here knows an attention family.

Sizes follow the public definition of each plane: bytes of a page = product(page_shape) x item size.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

from cachesvc.model.errors import LayoutRejected

ITEM_BYTES = {
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "uint16": 2,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
}
MAX_GROUPS = 128
MAX_PLANES = 4096
MAX_RANKS = 64
MAX_BLOCK_TOKENS = 4096
MAX_DIMS = 6
MAX_NAME_BYTES = 64
MAX_PAGE_BYTES = 1 << 30
MARKER = "prefix"
MARKER_PAGES = 64
"""Markers on a device for each page of its largest group where the caller gives no number: while a window holds w
blocks, its sequence may be 64 * w blocks long. They take a byte each; what the daemon keeps of every page bounds them.
The host has as many as pages: markers run out first there, and take the pages of their blocks along."""


@dataclass(frozen=True, slots=True)
class Plane:
    """One kind of bytes that every token leaves in a layer, as one rank holds them.

    ``page_shape``: shape of one block's page, e.g. ``(kv_heads, block_tokens, head_dim)``.
    """

    name: str
    layer: int
    group: str
    page_shape: tuple[int, ...]
    dtype: str

    @property
    def page_bytes(self) -> int:
        """Bytes that one block takes in this plane."""
        return prod(self.page_shape) * ITEM_BYTES[self.dtype]

    @property
    def label(self) -> str:
        """The one name of this plane, e.g. ``k.12`` or ``k.12.window``; unique in a layout."""
        return f"{self.name}.{self.layer}.{self.group}"


@dataclass(frozen=True, slots=True)
class PlaneGroup:
    """Planes that are kept and dropped together.

    ``window_tokens``: None where attention reaches back without bound; otherwise the window counts the query itself. 0:
    scratch, of which no hit needs anything: its pages stay the sequence's own, and go when the engine gives them back.
    ``replicated``: every rank holds the same bytes, so one copy serves all of them on the host. ``pool``: groups that
    name the same one draw their pages from one free list: a page has a group from its grant on until it is free again.
    Empty: a pool of its own. ``is_state``: a recurrent state, valid at the end of its block alone, and kept only at
    the positions that its engine publishes.
    """

    name: str
    window_tokens: int | None = None
    sink_tokens: int = 0
    replicated: bool = False
    pool: str = ""
    is_state: bool = False

    @property
    def is_full(self) -> bool:
        """True where a hit needs all of its blocks."""
        return self.window_tokens is None and not self.is_state

    @property
    def is_scratch(self) -> bool:
        """True where no copy outlives its sequence."""
        return self.window_tokens == 0


MARKER_GROUP = PlaneGroup(MARKER, replicated=True)
MARKER_PLANE = Plane(MARKER, 0, MARKER, (1,), "uint8")


@dataclass(frozen=True)
class Layout:
    """Every plane of every layer, the groups they belong to, and the number of ranks.

    A prefix is matched by its blocks in the groups without a window. Where each group has one, a last group ``prefix``
    is added here, which engines neither compute nor read: one byte a block, its marker. Raises LayoutRejected when the
    numbers contradict each other or exceed a limit.
    """

    block_tokens: int
    ranks: int
    groups: tuple[PlaneGroup, ...]
    planes: tuple[Plane, ...]

    def __post_init__(self) -> None:
        if self.groups and not any(group.is_full for group in self.groups):
            object.__setattr__(self, "groups", (*self.groups, MARKER_GROUP))
            object.__setattr__(self, "planes", (*self.planes, MARKER_PLANE))
        _check_numbers(self)
        _check_groups(self)
        _check_planes(self)

    def __repr__(self) -> str:
        return f"<Layout {self.layers} layers, groups {', '.join(self.group_index)}, block_tokens={self.block_tokens}>"

    @cached_property
    def group_index(self) -> dict[str, int]:
        return {group.name: index for index, group in enumerate(self.groups)}

    @cached_property
    def marker(self) -> int | None:
        """The group of markers, which is the last one, where every other group has a window."""
        index = len(self.groups) - 1
        alone = self.full_groups == (index,) and self.groups[index] == MARKER_GROUP
        return index if alone and self.planes_of(index) == (MARKER_PLANE,) else None

    @property
    def own_groups(self) -> tuple[PlaneGroup, ...]:
        """The groups without that of the markers."""
        return self.groups if self.marker is None else self.groups[: self.marker]

    @property
    def own_planes(self) -> tuple[Plane, ...]:
        """The planes without that of the markers: what a model computes."""
        return self.planes if self.marker is None else tuple(p for p in self.planes if p != MARKER_PLANE)

    @cached_property
    def unit_pages(self) -> tuple[int, ...]:
        """Device pages of each group's pool for a block of every group: one a group, and ``MARKER_PAGES`` of markers
        for each page of the largest pool."""
        units = self._units(self.pools)
        most = max(unit for index, unit in enumerate(units) if index != self.marker)
        return tuple(MARKER_PAGES * most if index == self.marker else unit for index, unit in enumerate(units))

    @cached_property
    def host_unit_pages(self) -> tuple[int, ...]:
        """Host pages of each group's pool for a block of every group: one a group, and as many markers as pages of the
        largest pool."""
        units = self._units(self.host_pools)
        return tuple(max(units) if index == self.marker else unit for index, unit in enumerate(units))

    def _units(self, pools: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
        sizes = {group: len(pool) for pool in pools for group in pool}
        return tuple(sizes[group] for group in range(len(self.groups)))

    def fill_pages(self, pages: tuple[int, ...]) -> tuple[int, ...]:
        """Device pages of every group, of counts that may leave the markers out."""
        return self._filled(pages, MARKER_PAGES)

    def fill_host_pages(self, pages: tuple[int, ...]) -> tuple[int, ...]:
        """Host pages of every group, of counts that may leave the markers out."""
        return self._filled(pages, 1)

    def _filled(self, pages: tuple[int, ...], markers: int) -> tuple[int, ...]:
        if self.marker is None or len(pages) != self.marker:
            return pages
        return (*pages, markers * max(pages))

    @cached_property
    def full_groups(self) -> tuple[int, ...]:
        """Groups without a window: a hit needs all their blocks."""
        return tuple(i for i, group in enumerate(self.groups) if group.is_full)

    @cached_property
    def window_groups(self) -> tuple[int, ...]:
        """Groups with a window: a hit needs only the last window and the sinks. A state is a window of one block."""
        return tuple(i for i, group in enumerate(self.groups) if not group.is_full)

    @cached_property
    def state_groups(self) -> tuple[int, ...]:
        """Those of the windowed groups whose copies are states."""
        return tuple(i for i, group in enumerate(self.groups) if group.is_state)

    @cached_property
    def scratch_groups(self) -> tuple[int, ...]:
        """Those of the windowed groups that have no copies."""
        return tuple(i for i, group in enumerate(self.groups) if group.is_scratch)

    def window_of(self, group: int) -> int:
        """Tokens of a windowed group's window, the query itself included; 0 for scratch. Raises ValueError for a full
        group."""
        found = self.groups[group]
        window = self.block_tokens if found.is_state else found.window_tokens
        if window is None:
            raise ValueError(f"group {found.name} has no window")
        return window

    @cached_property
    def layers(self) -> int:
        """Number of layers, counted by the highest layer index."""
        return 1 + max(plane.layer for plane in self.planes)

    def group_of(self, layer: int) -> int:
        """The group whose block table a layer goes by. Raises LayoutRejected for a layer that is not there, or whose
        heads are split over several groups."""
        groups = self._groups_by_layer.get(layer, ())
        if len(groups) != 1:
            raise LayoutRejected(
                f"layer {layer} has planes in {len(groups)} groups: {', '.join(sorted(groups)) or 'none'}"
            )
        return self.group_index[next(iter(groups))]

    @cached_property
    def _groups_by_layer(self) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        for plane in self.own_planes:
            found.setdefault(plane.layer, set()).add(plane.group)
        return found

    def planes_of(self, group: int) -> tuple[Plane, ...]:
        """Planes of a group in copy order: equal widths together, then by layer and name."""
        name = self.groups[group].name
        mine = [plane for plane in self.planes if plane.group == name]
        return tuple(sorted(mine, key=lambda plane: (-plane.page_bytes, plane.layer, plane.name)))

    @cached_property
    def pools(self) -> tuple[tuple[int, ...], ...]:
        """The groups by the device pools that they draw pages from. The first of a pool stands for it."""
        return self._by_pool([group.pool for group in self.groups])

    @cached_property
    def host_pools(self) -> tuple[tuple[int, ...], ...]:
        """The groups by the host pools that they draw pages from: as on the device, but one for groups that are
        replicated and one for those that are not, because the host keeps another number of copies of them."""
        return self._by_pool([group.pool and f"{group.replicated:d}{group.pool}" for group in self.groups])

    def _by_pool(self, names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        found: dict[str, list[int]] = {}
        for index, name in enumerate(names):
            found.setdefault(name or f"#{index}", []).append(index)
        return tuple(tuple(groups) for groups in found.values())

    @cached_property
    def pool_leads(self) -> tuple[int, ...]:
        """The first group of each group's device pool: pages that have no group yet go by it."""
        leads = {group: pool[0] for pool in self.pools for group in pool}
        return tuple(leads[group] for group in range(len(self.groups)))

    @cached_property
    def has_shared_pools(self) -> bool:
        """True where groups draw from one pool."""
        return len(self.pools) < len(self.groups)

    def device_page_total(self, pages: Sequence[int]) -> int:
        """Pages of all device pools; ``pages``: of each group's pool."""
        return sum(pages[pool[0]] for pool in self.pools)

    def host_page_total(self, pages: Sequence[int]) -> int:
        """Pages of all host pools; ``pages``: of each group's pool."""
        return sum(pages[pool[0]] for pool in self.host_pools)

    def host_page_bytes(self, group: int) -> int:
        """Bytes of a page of a group's host pool: those of its widest group."""
        pool = next(pool for pool in self.host_pools if group in pool)
        return max(map(self.page_bytes, pool))

    def page_bytes(self, group: int) -> int:
        """Bytes of one block in one group on one rank."""
        return self._page_bytes[group]

    @cached_property
    def _page_bytes(self) -> tuple[int, ...]:
        return tuple(sum(plane.page_bytes for plane in self.planes_of(group)) for group in range(len(self.groups)))

    def host_ranks(self, group: int) -> int:
        """Number of copies of a block that the host keeps: one where all ranks hold the same bytes."""
        return 1 if self.groups[group].replicated else self.ranks

    def window_blocks(self, group: int) -> int:
        """Most blocks that the keys of a window can touch, the newest one included; of scratch, the newest one."""
        return -(-max(0, self.window_of(group) - 1) // self.block_tokens) + 1

    def sink_blocks(self, group: int) -> int:
        """Leading blocks that never fall out of reach."""
        return -(-self.groups[group].sink_tokens // self.block_tokens)

    def canonical_bytes(self) -> bytes:
        """A length-prefixed encoding of everything above; equal layouts give equal bytes."""
        out = [struct.pack("<BIII", 1, self.block_tokens, self.ranks, len(self.groups))]
        for group in self.groups:
            window = 0 if group.window_tokens is None else group.window_tokens
            out.append(_prefixed(group.name))
            out.append(struct.pack("<IIB", window, group.sink_tokens, group.replicated))
        out.append(struct.pack("<I", len(self.planes)))
        for plane in self.planes:
            out += [_prefixed(plane.name), struct.pack("<I", plane.layer), _prefixed(plane.group)]
            out.append(struct.pack(f"<B{len(plane.page_shape)}Q", len(plane.page_shape), *plane.page_shape))
            out.append(_prefixed(plane.dtype))
        if any(group.pool for group in self.groups):
            out += [_prefixed(group.pool) for group in self.groups]
        if self.state_groups:
            out.append(b"state" + bytes(group.is_state for group in self.groups))
        if self.scratch_groups:
            out.append(b"scratch" + bytes(group.is_scratch for group in self.groups))
        return b"".join(out)

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes that are equal exactly where layouts are."""
        return hashlib.blake2b(self.canonical_bytes(), digest_size=32, person=b"kv-layout").digest()


def _prefixed(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<I", len(raw)) + raw


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise LayoutRejected(message)


def _check_numbers(layout: Layout) -> None:
    _require(
        1 <= layout.block_tokens <= MAX_BLOCK_TOKENS,
        f"block_tokens must be in 1..{MAX_BLOCK_TOKENS}, got {layout.block_tokens}",
    )
    _require(1 <= layout.ranks <= MAX_RANKS, f"ranks must be in 1..{MAX_RANKS}, got {layout.ranks}")
    _require(1 <= len(layout.groups) <= MAX_GROUPS, f"groups must be 1..{MAX_GROUPS}, got {len(layout.groups)}")
    _require(1 <= len(layout.planes) <= MAX_PLANES, f"planes must be 1..{MAX_PLANES}, got {len(layout.planes)}")


def _check_name(what: str, name: str) -> None:
    ok = bool(name) and len(name.encode()) <= MAX_NAME_BYTES and name.replace("_", "a").replace("-", "a").isalnum()
    _require(ok, f"{what} name {name!r} must be letters, digits, '_' or '-', at most {MAX_NAME_BYTES} bytes")


def _check_groups(layout: Layout) -> None:
    seen: set[str] = set()
    for group in layout.groups:
        _check_name("group", group.name)
        _require(group.name not in seen, f"group {group.name!r} is listed twice")
        seen.add(group.name)
        if group.pool:
            _check_name("pool", group.pool)
        window = group.window_tokens
        is_sane = window is None or 0 <= window < 1 << 31
        _require(is_sane, f"group {group.name!r}: window_tokens {window} out of range")
        is_sane = 0 <= group.sink_tokens < 1 << 31
        _require(is_sane, f"group {group.name!r}: sink_tokens {group.sink_tokens} out of range")
        _require(
            bool(window) or group.sink_tokens == 0,
            f"group {group.name!r}: sink_tokens mean nothing without a window",
        )
        _require(
            window is None or not group.is_state,
            f"group {group.name!r}: a state has no window_tokens; it is valid at the end of its block alone",
        )


def _check_planes(layout: Layout) -> None:
    names = {group.name for group in layout.groups}
    used: set[str] = set()
    labels: set[str] = set()
    for plane in layout.planes:
        _check_name("plane", plane.name)
        _require(plane.group in names, f"plane {plane.label}: unknown group {plane.group!r}")
        _require(plane.dtype in ITEM_BYTES, f"plane {plane.label}: unknown dtype {plane.dtype!r}")
        _require(0 <= plane.layer < 1 << 16, f"plane {plane.label}: layer {plane.layer} out of range")
        _require(_good_shape(plane.page_shape), f"plane {plane.label}: bad page_shape {plane.page_shape}")
        _require(
            plane.page_bytes <= MAX_PAGE_BYTES,
            f"plane {plane.label}: a page of {plane.page_bytes} bytes is too large",
        )
        _require(plane.label not in labels, f"plane {plane.label} is listed twice")
        labels.add(plane.label)
        used.add(plane.group)
    _require(used == names, f"groups without planes: {sorted(names - used)}")


def widths_match(widths: Sequence[Sequence[int]]) -> bool:
    """True where the planes of each group are as wide as the first ones of the group with most of them."""
    longest = max(widths, key=len)
    return all(list(mine) == list(longest[: len(mine)]) for mine in widths)


def _good_shape(shape: Iterable[int]) -> bool:
    dims = tuple(shape)
    return 1 <= len(dims) <= MAX_DIMS and all(1 <= dim < 1 << 31 for dim in dims)


# Places of a page's bytes on a tier: offsets and strides as data, so that movers never know a layout.
#
# Device slabs are plane-major (each plane one tensor ``[pages, *page_shape]``; planes of equal width lie at one
# constant stride), but for pools whose groups have planes of other widths: there a page lies in a row, so that the page
# of one group never touches that of another. Host pages are block-major (all planes of a block one after another, in
# the same order).

PLANE_ALIGN_BYTES = 256
ROW_ALIGN_BYTES = 16
"""Alignment of each plane within a page that lies in a row."""


@dataclass(frozen=True, slots=True)
class PlaneSpan:
    """One plane's bytes on one tier: page p's first byte is at ``offset + p * page_stride``."""

    plane: Plane
    offset: int
    page_stride: int

    @property
    def width(self) -> int:
        """Contiguous bytes of one page in this plane."""
        return self.plane.page_bytes


@dataclass(frozen=True)
class Geometry:
    """The spans of one group's planes in copy order, and the bytes that ``pages`` pages take.

    Neighbouring spans of equal width lie at a constant pitch, so that they can be one pitched copy.
    """

    spans: tuple[PlaneSpan, ...]
    pages: int
    total_bytes: int

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a page in all planes."""
        return sum(span.width for span in self.spans)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers that have a plane here, in order."""
        return tuple(sorted({span.plane.layer for span in self.spans}))


def device_geometry(layout: Layout, group: int, pages: int) -> Geometry:
    """Placement of one group in a slab of ``pages`` pages that starts at offset 0."""
    pool = next(pool for pool in layout.pools if group in pool)
    planes = layout.planes_of(group)
    if _is_plane_major(layout, pool):
        offsets = accumulate((_aligned(pages * plane.page_bytes) for plane in planes[:-1]), initial=0)
        spans = [PlaneSpan(plane, offset, plane.page_bytes) for plane, offset in zip(planes, offsets, strict=True)]
        return Geometry(tuple(spans), pages, sum(_aligned(pages * plane.page_bytes) for plane in planes))
    (stride,) = slab_strides(layout, pool)
    offsets = accumulate((_in_row(plane.page_bytes) for plane in planes[:-1]), initial=0)
    spans = [PlaneSpan(plane, offset, stride) for plane, offset in zip(planes, offsets, strict=True)]
    return Geometry(tuple(spans), pages, _aligned(pages * stride))


def slab_strides(layout: Layout, pool: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes of a page in each part of a pool's slab: of its planes, or of the whole page where that lies in a row."""
    if _is_plane_major(layout, pool):
        return max((tuple(plane.page_bytes for plane in layout.planes_of(group)) for group in pool), key=len)
    rows = (sum(_in_row(plane.page_bytes) for plane in layout.planes_of(group)) for group in pool)
    return (_aligned(max(rows)),)


def _is_plane_major(layout: Layout, pool: tuple[int, ...]) -> bool:
    return widths_match([[plane.page_bytes for plane in layout.planes_of(group)] for group in pool])


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // PLANE_ALIGN_BYTES) * PLANE_ALIGN_BYTES


def _in_row(size_bytes: int) -> int:
    return -(-size_bytes // ROW_ALIGN_BYTES) * ROW_ALIGN_BYTES


def host_geometry(layout: Layout, group: int, pages: int) -> Geometry:
    """Block-major placement: a page holds all planes of its block one after another."""
    stride = layout.host_page_bytes(group)
    spans: list[PlaneSpan] = []
    offset = 0
    for plane in layout.planes_of(group):
        spans.append(PlaneSpan(plane, offset, stride))
        offset += plane.page_bytes
    return Geometry(tuple(spans), pages, stride * pages)


def device_bytes(layout: Layout, pages: tuple[int, ...]) -> int:
    """Bytes that one rank's device slabs take for ``pages[g]`` pages of each group's pool: exactly what is allocated.

    Counts may leave out a layout's markers (``Layout.fill_pages``), which are in the sum all the same.
    """
    filled = layout.fill_pages(pages)
    return sum(slab_bytes(layout, pool, filled[pool[0]]) for pool in layout.pools)


def slab_bytes(layout: Layout, pool: tuple[int, ...], pages: int) -> int:
    """Bytes of the slab of ``pages`` pages that the groups of ``pool`` lie in on one rank."""
    return sum(_aligned(pages * stride) for stride in slab_strides(layout, pool))


def host_bytes(layout: Layout, pages: tuple[int, ...]) -> int:
    """Bytes that the host slabs of all stored ranks take for ``pages[g]`` pages of each group's pool, as
    ``device_bytes``."""
    filled = layout.fill_host_pages(pages)
    return sum(
        filled[pool[0]] * layout.host_page_bytes(pool[0]) * layout.host_ranks(pool[0]) for pool in layout.host_pools
    )
