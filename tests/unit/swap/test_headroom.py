"""Headroom: never more than there is, hardly less, and exactly what the pools then give."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.memory.host_pool import ALIGN_BYTES, FreeRanges, columns_of
from cachesvc.model.layout import Layout, Plane, PlaneGroup, device_bytes, host_bytes
from cachesvc.swap.movers import SHARE_PRECISION, Headroom, PoolSizes

WIDTHS = st.integers(1, 5000)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """One to three groups of planes of odd widths, on one to three ranks, some replicated, perhaps all with windows, or
    all in one slab."""
    count, pool = draw(st.integers(1, 3)), draw(st.sampled_from(("", "one")))
    groups = tuple(
        PlaneGroup(f"g{i}", draw(st.sampled_from((None, 8))), replicated=draw(st.booleans()), pool=pool)
        for i in range(count)
    )
    if pool:
        widths = sorted(draw(st.lists(WIDTHS, min_size=1, max_size=4)), reverse=True)
        layers = [range(draw(st.integers(1, len(widths)))) for _ in groups]
        over = [
            Plane("k", at, group.name, (widths[at],), "uint8")
            for group, few in zip(groups, layers, strict=True)
            for at in few
        ]
        return Layout(4, draw(st.integers(1, 3)), groups, tuple(over))
    planes = tuple(
        Plane("k", layer, f"g{group}", (draw(WIDTHS),), "uint8")
        for layer, group in enumerate([*range(count), *draw(st.lists(st.integers(0, count - 1), max_size=4))])
    )
    return Layout(4, draw(st.integers(1, 3)), groups, planes)


def headroom_of(host: FreeRanges, nodes: dict[str, int] | None = None) -> Headroom:
    return Headroom({"d0": 0, "d1": 0, "d2": 0}, host, 0, host.free_bytes, nodes or {})


DEVICES = ("d0", "d1", "d2")


@settings(max_examples=200, deadline=None)
@given(layout=layouts(), size_bytes=st.integers(0, 1 << 21), data=st.data())
def test_device_pages_are_the_most_that_fit(layout: Layout, size_bytes: int, data: st.DataObject) -> None:
    sizes = PoolSizes(layout)
    pages = sizes.device_pages(size_bytes)
    blocks = {count // unit for count, unit in zip(pages, layout.unit_pages, strict=True)}
    assert len(blocks) == 1
    assert not any(pages) or device_bytes(layout, pages) <= size_bytes
    more = tuple(count + unit for count, unit in zip(pages, layout.unit_pages, strict=True))
    assert device_bytes(layout, more) > size_bytes
    assert sizes.device_pages(device_bytes(layout, more)) >= more
    any_pages = tuple(data.draw(st.integers(0, 1 << 32)) for _ in layout.groups)
    assert sizes.device_bytes(any_pages) == device_bytes(layout, any_pages), "what is planned is what is made"
    assert sizes.host_bytes(any_pages) == host_bytes(layout, any_pages)


@settings(max_examples=150, deadline=None)
@given(
    layout=layouts(),
    chunks=st.lists(st.integers(1, 60), min_size=0, max_size=6),
    share=st.sampled_from((0.0, 0.1, 0.5, 1.0)),
    holes=st.lists(st.tuples(st.integers(1, 3 * ALIGN_BYTES), st.integers(1, 6)), max_size=5),
)
def test_host_blocks_fit_and_hardly_more_would(
    layout: Layout, chunks: list[int], share: float, holes: list[tuple[int, int]]
) -> None:
    """In a pool with holes, as other models leave them; on two nodes."""
    host = FreeRanges([count * ALIGN_BYTES for count in chunks], [index % 2 for index in range(len(chunks))])
    held = [host.take(*hole) for hole in holes]
    for pieces in held[::2]:
        host.give_back(columns_of(place for _, place in pieces or ()))
    left, sizes = headroom_of(host, {"d0": 1, "d1": 0}), PoolSizes(layout)
    free = host.free_bytes
    blocks = left.host_blocks(sizes, DEVICES, share)
    assert left.holds(sizes, DEVICES, sizes.host_pages(blocks))
    assert blocks * sizes.host_block_bytes <= free * share
    more = blocks + 1 + blocks // SHARE_PRECISION
    fits_more = left.holds(sizes, DEVICES, sizes.host_pages(more))
    assert not fits_more or more * sizes.host_block_bytes > int(free * share)
    assert host.free_bytes == free, "planning takes nothing"
    assert left.host_blocks(sizes, DEVICES, share, most=3) <= min(3, blocks)
    for group, rank, page_bytes in sizes.host_slabs:  # and the pool gives what was planned
        pages = sizes.host_pages(blocks)[group]
        assert host.take(page_bytes, pages, left.nodes.get(DEVICES[rank])) is not None, group


def test_a_block_has_a_page_in_every_group_and_on_the_host_of_every_rank_that_differs() -> None:
    groups = (PlaneGroup("full"), PlaneGroup("window", 8), PlaneGroup("same", 8, replicated=True))
    layout = Layout(4, 2, groups, tuple(Plane("k", i, g.name, (10 << i,), "uint8") for i, g in enumerate(groups)))
    sizes = PoolSizes(layout)
    assert (sizes.device_block_bytes, sizes.host_block_bytes) == (10 + 20 + 40, 2 * 10 + 2 * 20 + 40)
    assert [(group, rank) for group, rank, _ in sizes.host_slabs] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
