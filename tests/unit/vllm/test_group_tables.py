"""Tables of windows and states: taken in order, freed from their beginning, given back below what is still read."""

from __future__ import annotations

import numpy as np
from cachesvc_vllm.pages.group_tables import GroupTable, other_tables
from cachesvc_vllm.pages.request_pages import RequestPages, blocks_wanted

from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.words import NO_PAGE

LAYOUT = Layout(
    4,
    1,
    (PlaneGroup("w", 8, pool="kv"), PlaneGroup("f", pool="kv"), PlaneGroup("s", pool="kv", is_state=True)),
    tuple(Plane("kv", 0, group, (64,), "uint8") for group in "wfs"),
)


def test_a_request_has_a_table_for_each_group_beside_the_leading_one() -> None:
    request = RequestPages("r", 0, lead=LAYOUT.full_groups[0], others=other_tables(LAYOUT))
    assert [(each.group, each.is_state) for each in request.others] == [(0, False), (2, True)]
    assert [request.table_of(group).group for group in (0, 2)] == [0, 2]
    assert request.row_pages == 2
    assert request.missing_pages(3, {2: [2]}) == 7


def test_what_a_window_has_left_is_known_by_what_vllm_frees() -> None:
    table = GroupTable(0, is_state=False, pages=[NO_PAGE, 5, 6, 7, 8])
    table.hold(1, 2)
    assert (table.first, table.taken, table.spare) == (1, 3, 2)
    assert table.take(3, 2) == [7, 8]
    table.free(1)
    table.free(2)
    assert (table.first, table.held, table.spare) == (3, 2, 0)


def test_holes_are_filled_and_other_cells_stay() -> None:
    """Kernels have the table: a cell keeps its page where another engine's was sealed."""
    table = GroupTable(2, is_state=True, pages=[NO_PAGE, 5, NO_PAGE])
    assert table.lacking([1, 2, 3]) == [2, 3]
    table.read(np.array([NO_PAGE, 9, 6, 7], np.int32), [2])
    assert table.pages == [NO_PAGE, 5, 6, 7]


def test_states_are_sealed_once_their_blocks_are_computed() -> None:
    table = GroupTable(2, is_state=True, pages=[NO_PAGE, 5, NO_PAGE, 6])
    table.take(1, 1)
    table.take(3, 1)
    assert table.take_states(1) == {}
    assert table.take_states(3) == {1: 5}
    assert table.take_states(4) == {3: 6}
    assert table.take_states(9) == {}


def test_pages_of_a_request_that_no_other_engine_knows_are_private() -> None:
    request = RequestPages("r", 0, lead=1, others=other_tables(LAYOUT), pages=[1, 2, 3], hit_blocks=1)
    request.others[0].pages = [NO_PAGE, 4, 5]
    request.others[1].pages = [6, NO_PAGE, 7]
    assert request.private_pages() == [2, 3, 4, 5, 7]
    assert request.others[0].drop_pages(1, 2) == [4]
    assert request.private_pages() == [2, 3, 5, 7]


def test_a_loaded_request_waits_with_the_pages_of_a_step_where_windows_give_back_the_rest() -> None:
    class Request:
        num_tokens, num_computed_tokens = 1000, 0

    common = {"external_tokens": 100, "lookahead_tokens": 0, "longest_tokens": 2000, "block_tokens": 4}
    assert blocks_wanted(Request(), 0, **common) == (1000 + 4) // 4
    assert blocks_wanted(Request(), 0, **common, step_tokens=64) == (100 + 64 + 4) // 4
    assert blocks_wanted(Request(), 8, **common, step_tokens=64) == (108 + 64 + 4) // 4
