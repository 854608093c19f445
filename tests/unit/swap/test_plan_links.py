"""Plans for links as they were measured: pitched copies or single rows, and in how many steps."""

from __future__ import annotations

import numpy as np
import pytest
from cachesvc_client.layouts.families import gqa

from cachesvc.model.words import Direction
from cachesvc.swap.planner import LinkCosts, plan
from tests.unit.swap.test_planner import planned, whole_pools

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
