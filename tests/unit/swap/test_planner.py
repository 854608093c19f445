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

from cachesvc.memory.arbiter import SLICE_BYTES
from cachesvc.memory.extents import Extent, ExtentTable, Int64s
from cachesvc.memory.interface import CopyStep
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.layout import Geometry, Layout, Plane, PlaneGroup, PlaneSpan, device_geometry, host_geometry
from cachesvc.model.words import Direction
from cachesvc.swap.planner import (
    ALL_BUT_FIRST,
    FIRST_PART_BYTES,
    FIRST_PART_COPIES,
    PART_COPIES,
    GroupMove,
    LinkCosts,
    Pool,
    plan,
)

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


# Plans for links as they were measured: pitched copies or single rows, and in how many steps.

QUIET = LinkCosts(
    per_copy_us=2.52,
    per_row_ns=31.9,
    bytes_per_us=53_900.0,
    per_step_us=5.8,
    per_single_us=1.24,
    singles_us=((32 << 10, 0.65), (64 << 10, 1.24)),
)
BUSY = LinkCosts(
    per_copy_us=2.51,
    per_row_ns=38.5,
    bytes_per_us=53_870.0,
    per_step_us=20.0,
    per_single_us=1.3,
    singles_us=((32 << 10, 0.7), (64 << 10, 1.3)),
)
"""Two H200s, 2026-11; other processes kept the second one's processors busy. What copies really took there:"""
PITCHED_US, SINGLE_US, STEP_US = 2.9, 0.05, 12.0


@pytest.mark.parametrize("costs", [QUIET, BUSY])
@pytest.mark.parametrize(("heads", "blocks"), [(8, 2048), (16, 1024), (32, 512)])
def test_a_prefix_of_single_pages_is_loaded_layer_by_layer_at_the_speed_of_the_link(
    costs: LinkCosts, heads: int, blocks: int
) -> None:
    """4 GiB in planes of 32, 64, and 128 KiB. Copies of a few rows are the slowest: two of 32 KiB reach 0.28 of it."""
    layout = gqa(layers=32, kv_heads=heads, head_dim=128, block_tokens=16)
    pages = [int(page) for page in np.random.default_rng(3).permutation(2 * blocks)[:blocks]]
    move = whole_pools(layout, pages, list(range(0, 2 * blocks, 2)))
    steps = list(plan([move], Direction.LOAD, layers=32, base=0, layers_per_step=None, costs=costs))
    copies = np.concatenate([step.copies for step in steps])
    heights = copies[:, 5]
    assert not ((heights > 1) & (heights < 32)).any()
    ideal_us = float((copies[:, 4] * heights).sum()) / costs.bytes_per_us
    lost_us = np.where(heights == 1, SINGLE_US, PITCHED_US).sum() + STEP_US * len(steps)
    assert ideal_us / (ideal_us + lost_us) > 0.85
    assert len({step.word_value for step in steps} - {None}) == 32


def test_narrow_planes_are_followed_layer_by_layer_where_single_rows_are_cheap() -> None:
    """vLLM's default pages: 16 tokens of one plane, scattered. As pitched copies their layers would cost the link."""
    layout = gqa(layers=32, kv_heads=8, head_dim=128, block_tokens=16)
    scattered = [int(p) for p in np.random.default_rng(3).permutation(4000)[:1024]]
    move = whole_pools(layout, scattered, list(range(0, 2048, 2)))
    assert 1 < len(planned(move, 32, None)) < 32
    steps = planned(move, 32, None, LinkCosts(per_single_us=0.65))
    assert len(steps) == 32
    assert {int(height) for step in steps for height in step.copies[:, 5]} == {1}
    assert sum(len(step.copies) for step in steps) == 1024 * 64


@pytest.mark.parametrize("costs", [QUIET, BUSY])
def test_narrow_rows_never_go_alone_and_cost_layered_loads_little(costs: LinkCosts) -> None:
    """16 KiB a row, alone, reach a quarter of an H200's link over 16 GiB; in one tall copy a block, three quarters."""
    layout = gqa(layers=32, kv_heads=4, head_dim=128, block_tokens=16)
    pages = [int(p) for p in np.random.default_rng(3).permutation(8192)[:4096]]
    steps = planned(whole_pools(layout, pages, list(range(0, 8192, 2))), 32, None, costs)
    by_word = [step.word_value for step in steps if step.word_value is not None]
    assert (by_word[0], by_word[-1]) == (1, 32)
    heights = np.concatenate([step.copies[:, 5] for step in steps])
    assert int((heights == 2).sum()) <= 4096  # of the first layer, which is one whatever that costs
    assert int((heights > 8).sum()) >= 4096


def test_large_whole_tickets_begin_with_the_fewest_copies_and_go_on_as_what_the_link_likes_best() -> None:
    """Single rows of 64 KiB lose nothing of an H200's link, but 64 of them take the processor longer than a copy."""
    costs = LinkCosts(per_copy_us=2.5, per_single_us=1.24, singles_us=((32 << 10, 0.65), (64 << 10, 1.2)))
    pages = [int(p) for p in np.random.default_rng(3).permutation(4000)[:256]]
    for heads, later in ((32, 1), (16, 1), (8, 64)):  # 128, 64, and 32 KiB, which the processor could not keep up with
        layout = gqa(layers=32, kv_heads=heads, head_dim=128, block_tokens=16)
        first, *rest = plan(
            [whole_pools(layout, pages, list(range(0, 512, 2)))],
            Direction.LOAD,
            layers=32,
            base=0,
            layers_per_step=0,
            costs=costs,
        )
        assert set(first.copies[:, 5].tolist()) == {64}
        assert {int(height) for step in rest for height in step.copies[:, 5]} == {later}


def test_whole_blocks_of_narrow_planes_stay_pitched() -> None:
    layout = gqa(layers=32, kv_heads=1, head_dim=128, block_tokens=16)  # 4 KiB
    (step,) = planned(whole_pools(layout, [5, 1, 9], [0, 2, 4]), 32, 0, LinkCosts(per_single_us=0.65))
    assert step.copies[:, 5].tolist() == [64, 64, 64]


# A plan comes in parts: the first is small, none is long, and none is made before it is asked for.


def scattered_move(count: int, block_tokens: int = 16) -> GroupMove:
    layout = gqa(layers=32, kv_heads=8, head_dim=128, block_tokens=block_tokens)
    pages = [int(p) for p in np.random.default_rng(3).permutation(2 * count)[:count]]
    return whole_pools(layout, pages, list(range(0, 2 * count, 2)))


@pytest.mark.parametrize("layers_per_step", [0, 1, None, ALL_BUT_FIRST])
@pytest.mark.parametrize("costs", [LinkCosts(), LinkCosts(per_single_us=0.65)])
def test_the_first_part_is_small_and_every_other_one_limited(layers_per_step: int | None, costs: LinkCosts) -> None:
    move = scattered_move(4096)
    steps = list(plan([move], Direction.LOAD, layers=32, base=0, layers_per_step=layers_per_step, costs=costs))
    sizes = [int((step.copies[:, 4] * step.copies[:, 5]).sum()) for step in steps]
    assert sizes[0] > FIRST_PART_BYTES // 2
    assert sizes[0] <= FIRST_PART_BYTES or len(steps[0].copies) <= FIRST_PART_COPIES
    assert sizes[0] <= SLICE_BYTES
    assert [step.size_bytes for step in steps] == sizes
    assert max(len(step.copies) for step in steps) <= PART_COPIES
    assert sum(sizes) == 4096 * move.page_bytes
    parts = [step.word_value for step in steps]
    assert parts[0] is None
    assert len(parts) <= 2 + sum(word is not None for word in parts) + 4096 * 64 // PART_COPIES


def test_all_layers_but_the_first_come_together() -> None:
    move = scattered_move(4096)
    steps = plan([move], Direction.LOAD, layers=32, base=5, layers_per_step=ALL_BUT_FIRST, costs=LinkCosts())
    assert [step.word_value for step in steps if step.word_value is not None] == [6, 37]


@pytest.mark.parametrize(("block_tokens", "copies"), [(16, [16, 16]), (32, [8, 8]), (64, [4, 4])])
def test_a_small_whole_ticket_is_planned_in_the_slices_that_it_is_copied_in(
    block_tokens: int, copies: list[int]
) -> None:
    """64 MiB in planes of 32, 64, and 128 KiB."""
    move = scattered_move(512 // block_tokens, block_tokens)
    steps = list(plan([move], Direction.LOAD, layers=32, base=0, layers_per_step=0, costs=LinkCosts()))
    assert [len(step.copies) for step in steps] == copies
    assert [step.size_bytes for step in steps] == [SLICE_BYTES, SLICE_BYTES]
    assert [step.word_value for step in steps] == [None, 32]


def test_a_part_takes_what_several_groups_have() -> None:
    layout = gqa_windowed(window_layers=[False, True], kv_heads=1, head_dim=8, block_tokens=4, window_tokens=8)
    moves = [whole_pools(layout, [0, 3], [1, 2], group=group) for group in range(2)]
    steps = list(plan(moves, Direction.LOAD, layers=2, base=0, layers_per_step=0, costs=CHEAP_LINK))
    assert [step.word_value for step in steps] == [2]


def test_nothing_is_planned_before_it_is_asked_for() -> None:
    move = scattered_move(4096)
    rest = list(range(4096))
    rest[4095] = 1 << 40
    wrong = GroupMove(move.device, move.host, move.device_pages, np.array(rest))
    steps = plan([wrong], Direction.LOAD, layers=32, base=0, layers_per_step=0, costs=CHEAP_LINK)
    with pytest.raises(InvalidRequest):
        next(steps)


def test_a_row_costs_what_the_next_width_was_measured_to_cost() -> None:
    costs = LinkCosts(per_row_ns=30.0, row_ns=((4096, 60.0), (8448, 150.0), (32768, 20.0)))
    assert [costs.row_us(width) for width in (1, 4096, 8192, 30_000, 1 << 20)] == [0.06, 0.06, 0.15, 0.02, 0.02]
    assert LinkCosts(per_row_ns=30.0).row_us(4096) == 0.03


@pytest.mark.parametrize(("pages", "least", "most"), [(32, 8, 12), (512, 32, 33)])
def test_a_short_load_takes_no_more_steps_than_the_processor_can_make(pages: int, least: int, most: int) -> None:
    move = scattered_move(pages)
    costs = LinkCosts(per_single_us=0.65)
    steps = list(plan([move], Direction.LOAD, layers=32, base=0, layers_per_step=None, costs=costs))
    words = [step.word_value for step in steps if step.word_value is not None]
    assert words[0] == 1
    assert least <= len(words) <= most
