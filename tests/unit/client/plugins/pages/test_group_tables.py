"""Tables of windows and states: taken in order, freed from their beginning, given back below what is still read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from cachesvc_client.layouts.families import Parts
from cachesvc_client.plugins.page_book import PrivatePages
from cachesvc_client.plugins.request_pages import GroupTable, RequestPages, engine_groups
from cachesvc_vllm.plain import blocks_wanted

from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.words import NO_PAGE

BLOCK = 16

LAYOUT = Layout(
    4,
    1,
    (PlaneGroup("w", 8, pool="kv"), PlaneGroup("f", pool="kv"), PlaneGroup("s", pool="kv", is_state=True)),
    tuple(Plane("kv", 0, group, (64,), "uint8") for group in "wfs"),
)


def test_a_request_has_a_table_for_each_group_beside_the_leading_one() -> None:
    request = RequestPages("r", 0, lead=LAYOUT.full_groups[0], others=engine_groups(LAYOUT).other_tables())
    assert [(each.parts.groups, each.is_state) for each in request.others] == [((0,), False), ((2,), True)]
    assert [request.table_of(group).parts.groups for group in (0, 2)] == [(0,), (2,)]
    assert request.row_pages() == 2
    assert request.missing_pages(request.growth(3, {2: [2]})) == 7


def test_what_a_window_has_left_is_known_by_what_vllm_frees() -> None:
    table = GroupTable(Parts((0,)), is_state=False, pages=[NO_PAGE, 5, 6, 7, 8])
    table.hold(1, 2)
    assert (table.first, table.taken, table.spare) == (1, 3, 2)
    assert table.take(3, 2) == [7, 8]
    table.free(1)
    table.free(2)
    assert (table.first, table.held, table.spare) == (3, 2, 0)


def test_cells_stay_where_another_engine_was_faster_to_publish() -> None:
    table = GroupTable(Parts((0,)), is_state=False, pages=[5, 6])
    table.read([np.array([9, 6, 7], np.int32)], 0)
    assert table.pages == [5, 6, 7], "kernels have the table"


def states(*pages: int, loaded_blocks: int = 0) -> GroupTable:
    """A table of states."""
    table = GroupTable(Parts((0,)), is_state=True)
    table.read([np.array(pages, np.int32)], loaded_blocks)
    return table


def test_a_state_that_was_granted_for_a_longer_chunk_does_for_a_shorter_one() -> None:
    table = states(NO_PAGE, NO_PAGE, NO_PAGE, 6)
    assert table.lacking([1], 0) == []
    assert table.take(1, 1) == [6]
    assert table.pages == [NO_PAGE, 6, NO_PAGE, NO_PAGE]
    assert table.lacking([3], 0) == [3]


def test_a_state_of_an_earlier_block_is_not_used_for_a_later_one() -> None:
    """The daemon takes it back with the cells before the first one that is needed."""
    assert states(NO_PAGE, 5, NO_PAGE).lacking([2], 0) == [2]


def test_a_state_that_is_loaded_is_no_page_for_others() -> None:
    table = states(NO_PAGE, 5, NO_PAGE, 6, loaded_blocks=2)
    assert table.lacking([1, 3], 2) == []
    assert table.take(1, 1) == [5]
    assert table.states == {}, "it is sealed"


def test_states_are_sealed_once_their_blocks_are_computed_whether_they_were_freed_or_not() -> None:
    """Their pages go back after that."""
    table = states(NO_PAGE, 5, NO_PAGE, 6, 7)
    for position in (1, 3, 4):
        table.take(position, 1)
    assert table.take_states(1) == {}
    assert table.take_states(3) == {1: 5}
    table.free(1)
    assert table.unread == 2
    table.free(3)
    assert table.unread == 3, "the step that wrote it may be under way"
    assert table.take_states(9) == {3: 6, 4: 7}
    assert table.unread == 4


def test_a_table_grows_by_a_block_where_a_state_is_wanted_in_a_hole() -> None:
    request = RequestPages("r", 0, lead=1, others=engine_groups(LAYOUT).other_tables(), pages=[1, 2, 3])
    request.others[1].add([NO_PAGE] * 3)
    assert request.growth(3, {2: [2]}) == (4, {2: [3]})
    assert request.growth(5, {2: [2, 4]}) == (5, {2: [3, 4]})
    assert request.growth(5, {2: [4]}) == (5, {2: [4]})
    assert request.missing_pages(request.growth(3, {2: [2]})) == 3


def test_a_hit_that_is_loaded_comes_before_what_the_table_grows_by() -> None:
    request = RequestPages(
        "r", 0, lead=1, others=engine_groups(LAYOUT).other_tables(), pages=[1], hit_blocks=1, host_blocks=2
    )
    assert request.growth(2, {2: [2]}) == (3, {2: []})
    assert request.growth(4, {2: [3]}) == (4, {2: [3]})


def test_pages_of_a_request_that_no_other_engine_knows_are_private() -> None:
    request = RequestPages("r", 0, lead=1, others=engine_groups(LAYOUT).other_tables(), pages=[1, 2, 3], hit_blocks=1)
    request.others[0].pages = [NO_PAGE, 4, 5]
    request.others[1].pages = [6, NO_PAGE, 7]
    assert request.private_pages() == [2, 3, 4, 5, 7]
    assert request.others[0].drop_pages(1, 2) == [4]
    assert request.private_pages() == [2, 3, 5, 7]


def test_pages_that_were_given_back_are_not_private_where_nothing_was_sealed() -> None:
    request = RequestPages(
        "r", 0, lead=1, others=engine_groups(LAYOUT).other_tables(), pages=[1, 2, 3], is_foreign=True
    )
    request.others[0].pages = [4, 5, 6]
    request.others[0].told = 2
    assert request.private_pages() == [1, 2, 3, 6], "pages 4 and 5 may be another engine's by now"


def test_without_the_daemon_a_request_grows_by_pages_that_no_other_engine_knows() -> None:
    request, private = RequestPages("r", 0, lead=1, others=engine_groups(LAYOUT).other_tables()), PrivatePages()
    private.add(range(1, 6))
    assert not private.lengthen(request, 3, {2: [2]})
    assert private.lengthen(request, 2, {2: [1]})
    assert request.pages == [1, 2]
    assert [each.pages for each in request.others] == [[3, 4], [NO_PAGE, 5]]


APART = Layout(
    4, 1, (PlaneGroup("f"), PlaneGroup("w", 8)), tuple(Plane("kv", 0, group, (64,), "uint8") for group in "fw")
)
"""Groups of which each has a pool of its own."""


def apart(*pages: int) -> RequestPages:
    return RequestPages("r", 0, others=engine_groups(APART).other_tables(), pages=[*pages])


def test_pages_are_counted_by_the_pool_that_they_are_of() -> None:
    assert (engine_groups(LAYOUT).pools, engine_groups(APART).pools) == ((0,), (0, 1))
    request = apart(1, 2, 3)
    request.others[0].pages, request.others[0].taken, request.taken = [NO_PAGE, 4, 5], 2, 2
    assert [request.spare_pages(pool) for pool in request.pools] == [1, 1]
    assert [request.missing_pages(request.growth(5, {}), pool) for pool in request.pools] == [2, 2]
    assert [request.row_pages(pool) for pool in request.pools] == [1, 1]
    assert [request.private_pages(pool) for pool in request.pools] == [[1, 2, 3], [4, 5]]
    request.others[0].told = 2
    assert [request.private_pages(pool) for pool in request.pools] == [[1, 2, 3], [5]]


def test_without_the_daemon_a_pool_that_is_short_keeps_a_request_from_growing() -> None:
    request, private = apart(), PrivatePages(2)
    private.add([1, 2, 3])
    private.add([7], pool=1)
    assert not private.lengthen(request, 2, {})
    private.take_ended([apart(), replace(apart(4), others=[replace(request.others[0], pages=[8])])])
    assert [private.count(pool) for pool in (0, 1)] == [4, 2]
    assert private.lengthen(request, 2, {})
    assert (request.pages, request.others[0].pages) == ([1, 2], [7, 8])


def test_a_loaded_request_waits_with_the_pages_of_a_step_where_windows_give_back_the_rest() -> None:
    class Request:
        num_tokens, num_computed_tokens = 1000, 0

    common: dict[str, Any] = {"external_tokens": 100, "lookahead_tokens": 0, "longest_tokens": 2000, "block_tokens": 4}
    assert blocks_wanted(Request(), 0, **common) == (1000 + 4) // 4
    assert blocks_wanted(Request(), 0, **common, step_tokens=64) == (100 + 64 + 4) // 4
    assert blocks_wanted(Request(), 8, **common, step_tokens=64) == (108 + 64 + 4) // 4


# -- blocks of several sizes -----------------------------------------------------------------------------------------

PARTED = Layout(
    8,
    1,
    tuple(PlaneGroup(name, window, pool="kv") for name, window in (("w0", 4), ("w1", 8), ("f0", None), ("f1", None))),
    tuple(Plane("kv", 0, group, (64,), "uint8") for group in ("w0", "w1", "f0", "f1")),
)
GROUPS = engine_groups(PARTED, (Parts((0, 1)), Parts((2, 3))))


class Cells:
    """The daemon's tables of a request, as a sequence has them."""

    def __init__(self, *tables: list[int]) -> None:
        self.tables = [np.array(table, np.int32) for table in tables]
        self.blocks = len(tables[0])


def parted(hit_blocks: int, *tables: list[int]) -> RequestPages:
    """A request with these tables."""
    request = RequestPages.begin(GROUPS, "r", 0)
    request.sequence = cast("Any", Cells(*tables))
    request.hit_blocks = hit_blocks
    request.take_cells()
    return request


def test_an_engine_has_two_groups_of_two_parts_each() -> None:
    assert (GROUPS.lead, GROUPS.states, GROUPS.row_pages) == (1, frozenset(), 4)
    request = parted(1, [NO_PAGE, 3], [4, 5], [6, 7], [8, 9])
    assert request.pages == [6, 8, 7, 9]
    assert request.table_of(0).pages == [NO_PAGE, 4, 3, 5]
    assert (request.rows, request.row_pages(), request.hit_pages) == (2, 4, 2)
    assert request.has_pages(2, {})
    assert not request.has_pages(3, {})
    assert request.missing_pages(request.growth(3, {})) == 4


def test_a_hit_is_taken_with_all_of_its_pages() -> None:
    request = parted(1, [NO_PAGE, 3], [4, 5], [6, 7], [8, 9])
    assert request.take_hits() == 2
    assert (request.taken, request.taken_blocks, request.full_blocks, request.held) == (2, 1, 1, 2)
    assert request.take(1) == [7]
    assert request.taken_blocks == 1, "a half of the next block"
    assert request.take(1) == [9]
    assert request.taken_blocks == 2


def test_pages_of_another_engine_take_the_place_of_dead_ones_of_each_part() -> None:
    request = parted(0, [1, 2], [3, 4], [5, 6], [7, 8])
    request.sequence = cast("Any", Cells([1, 9], [10, 4], [5, 6], [7, 8]))
    window = request.table_of(0)
    assert request.take_replaced(window.parts.dead(1)) == []
    assert request.take_replaced(window.parts.dead(3)) == [(1, 3), (0, 2)]
    assert request.take_replaced(window.parts.dead(4)) == []


def test_blocks_that_are_others_too_have_no_private_page() -> None:
    request = parted(0, [1, 2], [3, 4], [5, 6], [7, 8])
    request.wanted = 1
    assert request.private_pages() == [6, 8, 2, 4]
    window = request.table_of(0)
    assert window.drop_pages(request.first_private_of(window), 3) == [2]


def test_without_the_daemon_a_request_grows_by_the_pages_of_a_whole_block() -> None:
    request, private = parted(0, [1], [3], [5], [7]), PrivatePages()
    private.add(range(10, 17))
    assert private.lengthen(request, 2, {})
    assert request.pages == [5, 7, 10, 11]
    assert request.table_of(0).pages == [1, 3, 12, 13]
    assert not private.lengthen(request, 3, {}), "three pages are left, and four are needed"


def test_a_hit_whose_window_is_on_the_host_is_loaded_with_what_is_in_place() -> None:
    """vLLM finds nothing in place where the window before the end of it is not, and must not lose the hit by that."""

    def made(hit_blocks: int, host_blocks: int) -> RequestPages:
        return RequestPages(
            "r",
            0,
            lead=1,
            others=engine_groups(LAYOUT).other_tables(),
            pages=[7, 8, 9, 10, 11, 12],
            hit_blocks=hit_blocks,
            host_blocks=host_blocks,
        )

    request = made(2, 3)
    assert (request.offer(2 * BLOCK, BLOCK), request.outside_blocks, request.is_whole_load) == (3 * BLOCK, 3, False)
    assert (request.offer(BLOCK, BLOCK), request.is_whole_load) == (0, False), "it leaves out a part of the hit"
    assert (request.offer(0, BLOCK), request.outside_blocks, request.is_whole_load) == (5 * BLOCK, 5, True)
    assert (request.take(5), request.held) == ([7, 8, 9, 10, 11], 5)
    assert [made(0, 3).offer(0, BLOCK), made(2, 0).offer(0, BLOCK)] == [3 * BLOCK, 0]
    with pytest.raises(AssertionError):
        made(2, 0).take(1)
