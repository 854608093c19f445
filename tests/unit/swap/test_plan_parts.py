"""A plan comes in parts: the first is small, none is long, and none is made before it is asked for."""

from __future__ import annotations

import numpy as np
import pytest
from cachesvc_client.layouts.families import gqa, gqa_windowed

from cachesvc.memory.arbiter import SLICE_BYTES
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.words import Direction
from cachesvc.swap.planner import (
    ALL_BUT_FIRST,
    FIRST_PART_BYTES,
    FIRST_PART_COPIES,
    PART_COPIES,
    GroupMove,
    LinkCosts,
    plan,
)
from tests.unit.swap.test_planner import CHEAP_LINK, whole_pools


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
