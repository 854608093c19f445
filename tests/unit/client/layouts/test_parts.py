"""A group with smaller blocks than its layout's is a group for each part of a block, which hits need as it does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from cachesvc_client.layouts.families import Parts, part_group

from cachesvc.ledger.retention import window_positions
from cachesvc.model.errors import LayoutRejected
from cachesvc.model.layout import Layout, Plane, PlaneGroup

FULL, FULL_PLANE = PlaneGroup("full", pool="kv"), Plane("k", 0, "full", (64,), "uint8")


def parted(group: PlaneGroup, block_tokens: int, part_tokens: int) -> tuple[Layout, Parts]:
    """A full group, and one of parts behind it."""
    plane = Plane("k", 1, group.name, (64,), "uint8")
    groups, planes = part_group(group, [plane], block_tokens=block_tokens, part_tokens=part_tokens)
    layout = Layout(block_tokens, 1, (FULL, *groups), (FULL_PLANE, *planes))
    return layout, Parts(tuple(range(1, 1 + len(groups))))


def windows() -> Iterator[tuple[int, int, int, int]]:
    """Tokens of a layout's block and a part's, of a window and its sinks."""
    for block, part in ((8, 8), (8, 4), (12, 4), (16, 2)):
        for window in (1, 2, 3, 4, 5, 7, 8, 9, 12, 17, 30):
            for sinks in (0, 1, 4, 5, 13):
                yield block, part, window, sinks


def test_hits_need_the_pages_of_the_last_tokens_and_of_the_sinks() -> None:
    for block, part, window, sinks in windows():
        layout, parts = parted(PlaneGroup("w", window, sinks, pool="kv"), block, part)
        for blocks in range(6):
            end = blocks * block
            tokens = {*range(max(0, end - window), end), *range(min(sinks, end))}
            found = {
                position * parts.count + at
                for at, group in enumerate(parts.groups)
                for position in window_positions(layout, group, blocks)
            }
            needed = {token // part for token in tokens}
            assert needed <= found, (block, part, window, sinks, blocks)
            assert sinks or needed == found, "and no others"


def test_pages_that_no_window_reaches_are_scratch() -> None:
    layout, parts = parted(PlaneGroup("w", 8, pool="kv"), 16, 4)
    assert [group.name for group in layout.groups] == ["full", "w-p0", "w-p1", "w-p2", "w-p3"]
    assert [layout.window_of(group) for group in parts.groups] == [0, 0, 4, 8]
    assert layout.scratch_groups == (1, 2)
    assert [plane.group for plane in layout.planes] == ["full", "w-p0", "w-p1", "w-p2", "w-p3"]


def test_whole_sequences_keep_the_pages_of_all_parts() -> None:
    layout, parts = parted(PlaneGroup("f", replicated=True, pool="kv"), 16, 8)
    assert layout.full_groups == (0, *parts.groups)
    assert all(layout.groups[group].replicated for group in parts.groups)


def test_a_group_with_the_layouts_blocks_stays_as_it_is() -> None:
    group, plane = PlaneGroup("w", 8), Plane("k", 1, "w", (64,), "uint8")
    assert part_group(group, [plane], block_tokens=16, part_tokens=16) == ([group], [plane])


@pytest.mark.parametrize(
    ("group", "part_tokens", "words"),
    [
        (PlaneGroup("g", 8, pool="kv"), 6, "no divisor of the layout's 16: take the least common multiple"),
        (PlaneGroup("g", 8, pool="kv"), 32, "no divisor"),
        (PlaneGroup("g", 8, pool="kv"), 0, "no divisor"),
        (PlaneGroup("g", is_state=True, pool="kv"), 8, "valid at the end of a block alone"),
        (PlaneGroup("g", 8), 8, "has 2 pages a block and no pool"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(group: PlaneGroup, part_tokens: int, words: str) -> None:
    with pytest.raises(LayoutRejected, match=words):
        part_group(group, [], block_tokens=16, part_tokens=part_tokens)


def test_an_engines_table_has_the_parts_in_turn() -> None:
    parts = Parts((1, 2, 3))
    tables = [np.array([-1] * 4), np.arange(0, 40, 10), np.arange(1, 40, 10), np.arange(2, 40, 10)]
    whole = [0, 1, 2, 10, 11, 12, 20, 21, 22, 30, 31, 32]
    for first in range(13):
        assert parts.pages(tables, first) == whole[first:]
        for end in range(first, 13):
            assert parts.pages(tables, first, end) == whole[first:end]
        assert [group for group, _ in zip(parts.groups_at(first), range(3), strict=False)] == [
            parts.groups[(first + at) % 3] for at in range(3)
        ]


def test_what_is_dead_is_said_by_blocks_of_each_part() -> None:
    parts = Parts((4, 7, 2))
    for first in range(14):
        dead = parts.dead(first)
        pages = {position * 3 + at for at, group in enumerate(parts.groups) for position in range(dead[group])}
        assert pages == set(range(first))
        assert parts.dead_pages(dead) == first
    assert parts.dead_pages({}) == 0
