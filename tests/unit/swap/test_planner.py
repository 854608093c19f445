"""Plans are executed with NumPy and compared byte for byte with a naive copy; what no copy may touch stays
poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from cachesvc_client.layouts.families import gqa, gqa_windowed, mla
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.memory.extents import Extent, ExtentTable, Int64s
from cachesvc.memory.interface import CopyStep
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.layout import Geometry, Layout, Plane, PlaneGroup, PlaneSpan, device_geometry, host_geometry
from cachesvc.model.words import Direction
from cachesvc.swap.planner import ALL_BUT_FIRST, GroupMove, LinkCosts, Pool, plan

Bytes = npt.NDArray[np.uint8]
FREE_COPIES = LinkCosts(per_copy_us=0.0, per_row_ns=0.0, per_step_us=0.0)
CHEAP_LINK = LinkCosts()
POISON = 0xA5


@dataclass
class World:
    """Regions of random bytes on the source side and poison on the other, and the moves between them."""

    moves: list[GroupMove]
    layers: int
    sizes: dict[int, int]

    def filled(self, direction: Direction, seed: int) -> dict[int, Bytes]:
        rng = np.random.default_rng(seed)
        device_regions = {e.region for move in self.moves for e in move.device.table.extents}
        out: dict[int, Bytes] = {}
        for region, size in self.sizes.items():
            is_source = (region in device_regions) == (direction is Direction.STORE)
            out[region] = rng.integers(0, 256, size, np.uint8) if is_source else np.full(size, POISON, np.uint8)
        return out


def address(pool: Pool, span: int, page: int) -> tuple[int, int]:
    for e in pool.table.extents:
        if e.first_page <= page < e.first_page + e.pages:
            placed = pool.geometry.spans[span]
            return e.region, e.offset + placed.offset + (page - e.first_page) * placed.page_stride
    raise AssertionError(page)


def naive_copy(world: World, direction: Direction, memory: dict[int, Bytes], layers: set[int] | None = None) -> None:
    for move in world.moves:
        for device_page, host_page in zip(move.device_pages, move.host_pages, strict=True):
            for index, span in enumerate(move.device.geometry.spans):
                if layers is not None and span.plane.layer not in layers:
                    continue
                ends = [
                    address(move.device, index, int(device_page)),
                    address(move.host, index, int(host_page)),
                ]
                (src, src_at), (dst, dst_at) = ends if direction is Direction.STORE else ends[::-1]
                memory[dst][dst_at : dst_at + span.width] = memory[src][src_at : src_at + span.width]


def execute(steps: Sequence[CopyStep], memory: dict[int, Bytes]) -> None:
    for step in steps:
        for src, src_at, dst, dst_at, width, height, src_pitch, dst_pitch in step.copies.tolist():
            assert width > 0
            assert height > 0
            assert min(src_pitch, dst_pitch) >= width
            for row in range(height):
                a, b = src_at + row * src_pitch, dst_at + row * dst_pitch
                assert 0 <= a <= a + width <= len(memory[src])
                assert 0 <= b <= b + width <= len(memory[dst])
                memory[dst][b : b + width] = memory[src][a : a + width]


def check(
    world: World,
    direction: Direction,
    layers_per_step: int | None,
    costs: LinkCosts,
    seed: int = 0,
    part_copies: int | None = None,
) -> None:
    base = 0xFFFFFFF0
    parts = {} if part_copies is None else {"first_bytes": 1 + part_copies, "part_copies": part_copies}
    steps = tuple(
        plan(
            world.moves,
            direction,
            layers=world.layers,
            base=base,
            layers_per_step=layers_per_step,
            costs=costs,
            **parts,
        )
    )
    assert steps[-1].word_value == (base + world.layers) & 0xFFFFFFFF
    got, want = world.filled(direction, seed), world.filled(direction, seed)
    progress = 0
    for step in steps:
        execute([step], got)
        if step.word_value is None:
            continue
        covered = (step.word_value - base) & 0xFFFFFFFF
        assert progress < covered <= world.layers
        progress = covered
        partial = world.filled(direction, seed)
        naive_copy(world, direction, partial, set(range(covered)))
        for region in world.sizes:
            np.testing.assert_array_equal(got[region], partial[region])
    naive_copy(world, direction, want)
    for region in world.sizes:
        np.testing.assert_array_equal(got[region], want[region])


def block_major(layout: Layout, group: int, pages: int) -> Geometry:
    """A device pool whose pages hold all planes one after another: only other numbers."""
    return host_geometry(layout, group, pages)


def layout_of(rng: np.random.Generator) -> Layout:
    layers = int(rng.integers(1, 7))
    groups = int(rng.integers(1, 4))
    names = [f"g{i}" for i in range(groups)]
    windows = tuple(PlaneGroup(name, 64 if i else None) for i, name in enumerate(names))
    widths = rng.choice([1, 3, 16, 17, 64, 255, 256], size=(groups, 3))
    planes = []
    for i, name in enumerate(names):
        mine = sorted(set(rng.integers(0, layers, size=layers).tolist()))
        for layer in mine:
            kinds = range(int(rng.integers(1, 4)))
            planes += [Plane(f"p{kind}", layer, name, (int(widths[i, kind]),), "uint8") for kind in kinds]
    return Layout(16, 1, windows, tuple(planes))


def split(
    rng: np.random.Generator, pages: int, page_bytes: int, regions: list[int], sizes: dict[int, int]
) -> ExtentTable:
    """Cut ``pages`` into extents at random, odd offsets in shared regions, with poison between them."""
    extents, first = [], 0
    while first < pages:
        count = int(rng.integers(1, pages - first + 1))
        region = int(rng.choice(regions))
        offset = sizes.setdefault(region, 0) + int(rng.integers(0, 9))
        extents.append(Extent(first, count, region, offset))
        sizes[region] = offset + count * page_bytes + int(rng.integers(0, 9))
        first += count
    return ExtentTable(extents)


def pairs(rng: np.random.Generator, count: int, device_pages: int, host_pages: int) -> tuple[Int64s, Int64s]:
    """Distinct pages on both sides: stretches that run in parallel, broken up at random."""
    device = rng.permutation(device_pages)[:count]
    host = rng.permutation(host_pages)[:count]
    if rng.random() < 0.7:
        device, host = np.sort(device), np.sort(host)
    order = rng.permutation(count)
    return device[order].astype(np.int64), host[order].astype(np.int64)


def world_of(seed: int) -> World:
    rng = np.random.default_rng(seed)
    layout = layout_of(rng)
    sizes: dict[int, int] = {}
    moves = []
    for group in range(len(layout.groups)):
        device_pages, host_pages = int(rng.integers(1, 24)), int(rng.integers(1, 24))
        make = device_geometry if rng.random() < 0.8 else block_major
        geometry = make(layout, group, device_pages)
        region = 100 + group
        sizes[region] = geometry.total_bytes + 5
        host = host_geometry(layout, group, host_pages)
        table = split(rng, host_pages, layout.page_bytes(group), [1, 2, 3], sizes)
        device, theirs = pairs(rng, int(rng.integers(0, min(device_pages, host_pages) + 1)), device_pages, host_pages)
        moves.append(
            GroupMove(Pool(geometry, ExtentTable.whole(region, device_pages)), Pool(host, table), device, theirs)
        )
    return World(moves, layout.layers, sizes)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    direction=st.sampled_from(Direction),
    layers_per_step=st.sampled_from([0, 1, 2, 5, None, ALL_BUT_FIRST]),
    costs=st.sampled_from(
        [
            CHEAP_LINK,
            FREE_COPIES,
            LinkCosts(per_copy_us=900.0),
            LinkCosts(max_pitch_bytes=700),
            LinkCosts(per_row_ns=9e4),
            LinkCosts(per_single_us=0.01, narrowest_single=0),
        ]
    ),
    part_copies=st.sampled_from([None, 1, 3, 17]),
)
def test_a_plan_equals_the_naive_copy(
    seed: int, direction: Direction, layers_per_step: int | None, costs: LinkCosts, part_copies: int | None
) -> None:
    check(world_of(seed), direction, layers_per_step, costs, seed, part_copies)


def whole_pools(layout: Layout, device_pages: list[int], host_pages: list[int], group: int = 0) -> GroupMove:
    pages = 1 + max(device_pages + host_pages, default=0)
    device, host = device_geometry(layout, group, pages), host_geometry(layout, group, pages)
    return GroupMove(
        Pool(device, ExtentTable.whole(0, pages)),
        Pool(host, ExtentTable.whole(1, pages)),
        np.array(device_pages, np.int64),
        np.array(host_pages, np.int64),
    )


def planned(
    move: GroupMove, layers: int, layers_per_step: int | None = 0, costs: LinkCosts = CHEAP_LINK
) -> list[CopyStep]:
    """Its steps, each in one part."""
    steps = plan(
        [move],
        Direction.LOAD,
        layers=layers,
        base=0,
        layers_per_step=layers_per_step,
        costs=costs,
        first_bytes=1 << 40,
        part_copies=1 << 40,
    )
    return list(steps)


GQA = gqa(layers=8, kv_heads=2, head_dim=16, block_tokens=16)


def test_scattered_blocks_take_one_copy_each() -> None:
    (step,) = planned(whole_pools(GQA, [5, 1, 9], [0, 2, 4]), 8)
    assert step.copies[:, 5].tolist() == [16, 16, 16]


def test_a_long_run_takes_one_copy_for_each_plane() -> None:
    (step,) = planned(whole_pools(GQA, list(range(40, 80)), list(range(40))), 8)
    assert step.copies[:, 5].tolist() == [40] * 16


def test_each_run_goes_its_own_way() -> None:
    (step,) = planned(whole_pools(GQA, [*range(40, 80), 3], [*range(40), 90]), 8)
    assert sorted(step.copies[:, 5].tolist()) == [16] + [40] * 16


def test_where_copies_cost_nothing_each_block_stays_one_copy() -> None:
    (step,) = planned(whole_pools(GQA, list(range(40, 80)), list(range(40))), 8, costs=FREE_COPIES)
    assert step.copies[:, 5].tolist() == [16] * 40


def test_a_run_breaks_where_either_pool_does() -> None:
    move = whole_pools(mla(layers=1, kv_lora_rank=8, rope_dim=4, block_tokens=4), [0, 1, 2, 3, 4], [7, 8, 9, 3, 4])
    (step,) = planned(move, 1)
    assert len(step.copies) == 2


def test_a_run_breaks_at_the_border_of_an_extent() -> None:
    layout = mla(layers=1, kv_lora_rank=8, rope_dim=4, block_tokens=4)
    size = layout.page_bytes(0)
    touching = ExtentTable([Extent(0, 4, 1, 0), Extent(4, 4, 1, 4 * size)])
    move = whole_pools(layout, list(range(8)), list(range(8)))
    move = GroupMove(move.device, Pool(move.host.geometry, touching), move.device_pages, move.host_pages)
    (step,) = planned(move, 1)
    assert step.copies[:, 4].tolist() == [4 * size, 4 * size]


def test_a_block_major_device_takes_one_flat_copy_for_a_run() -> None:
    geometry = block_major(GQA, 0, 50)
    move = whole_pools(GQA, list(range(10, 20)), list(range(10)))
    move = GroupMove(Pool(geometry, ExtentTable.whole(0, 50)), move.host, move.device_pages, move.host_pages)
    (step,) = planned(move, 8)
    assert step.copies[:, 4:6].tolist() == [[10 * GQA.page_bytes(0), 1]]


def test_a_pitch_beyond_the_limit_is_never_planned() -> None:
    big = Plane("k", 0, "full", (1024,), "uint8"), Plane("v", 0, "full", (1024,), "uint8")
    layout = Layout(16, 1, (PlaneGroup("full"),), big)
    pages = (1 << 31) // 1024 + 10
    move = GroupMove(
        Pool(device_geometry(layout, 0, pages), ExtentTable.whole(0, pages)),
        Pool(host_geometry(layout, 0, pages), ExtentTable.whole(1, pages)),
        np.array([0, 5]),
        np.array([3, 9]),
    )
    (step,) = planned(move, 1)
    assert step.copies[:, 5].tolist() == [1, 1, 1, 1]


def test_layers_that_nothing_is_moved_for_are_covered() -> None:
    layout = gqa_windowed(
        window_layers=[False, True, True, False, True, False],
        kv_heads=1,
        head_dim=8,
        block_tokens=4,
        window_tokens=8,
    )
    steps = planned(whole_pools(layout, [0, 3], [1, 2], group=1), layout.layers, layers_per_step=1)
    assert [step.word_value for step in steps] == [1, 2, 4, 6]
    assert [len(step.copies) > 0 for step in steps] == [False, True, True, True]


def test_a_transfer_without_pages_still_reaches_its_end() -> None:
    (step,) = planned(whole_pools(GQA, [], []), 8)
    assert step.word_value == 8
    assert len(step.copies) == 0


def test_costs_choose_the_step() -> None:
    layout = gqa(layers=32, kv_heads=8, head_dim=128, block_tokens=64)
    scattered = [int(p) for p in np.random.default_rng(3).permutation(400)[:128]]
    move = whole_pools(layout, scattered, list(range(0, 256, 2)))
    fine = planned(move, 32, None, LinkCosts(per_copy_us=0.01, per_row_ns=1.0))
    coarse = planned(move, 32, None)
    whole = planned(move, 32, None, LinkCosts(per_copy_us=1e6))
    assert len(fine) == 32
    assert 1 < len(coarse) < 32
    assert [step.word_value for step in whole] == [1, 32], "the first layer comes alone, whatever steps cost"


def test_a_choice_that_was_made_is_made_again_for_about_as_many_pages() -> None:
    layout = gqa(layers=32, kv_heads=8, head_dim=128, block_tokens=64)
    sizes = []
    for count in (128, 200, 255):
        pages = [int(p) for p in np.random.default_rng(count).permutation(600)[:count]]
        steps = planned(whole_pools(layout, pages, list(range(0, 2 * count, 2))), 32, None)
        sizes.append([step.word_value for step in steps])
    assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize(
    ("device", "host", "direction"),
    [
        ([0, 9999], [0, 1], Direction.LOAD),
        ([0, 1], [0, -1], Direction.LOAD),
        ([0, 1], [0], Direction.LOAD),
        ([1, 1], [0, 1], Direction.LOAD),
        ([0, 1], [2, 2], Direction.STORE),
    ],
)
def test_pages_that_cannot_be_are_refused(device: list[int], host: list[int], direction: Direction) -> None:
    good = whole_pools(GQA, [0, 1], [0, 1])
    move = GroupMove(good.device, good.host, np.array(device), np.array(host))
    with pytest.raises(InvalidRequest):
        next(plan([move], direction, layers=8, base=0, layers_per_step=0, costs=CHEAP_LINK))


def test_spans_with_gaps_between_planes_are_cut_into_constant_pitches() -> None:
    layout = Layout(16, 1, (PlaneGroup("full"),), tuple(Plane("k", i, "full", (32,), "uint8") for i in range(5)))
    offsets = [0, 400, 800, 1300, 1800]
    spans = tuple(PlaneSpan(p, o, 32) for p, o in zip(layout.planes_of(0), offsets, strict=True))
    device = Pool(Geometry(spans, 10, 2200), ExtentTable.whole(0, 10))
    host = Pool(host_geometry(layout, 0, 10), ExtentTable.whole(1, 10))
    move = GroupMove(device, host, np.array([1, 7]), np.array([0, 5]))
    check(World([move], 5, {0: 2200, 1: 1600}), Direction.STORE, 0, CHEAP_LINK)
