"""Flows over one pool of three groups: room by pool, what goes first, the pool's stock, and states."""

from __future__ import annotations

from functools import partial

import pytest

from cachesvc.flows.allocate import allocate, extend, refill_stock, swap_in, swap_out
from cachesvc.flows.make_room import room_left
from cachesvc.flows.match import match
from cachesvc.flows.publish import Publishing, publish
from cachesvc.flows.recycle import recycle, release
from cachesvc.ledger.planner import PoolDemand, demand_of, drop_idle_copies, idle_copies
from cachesvc.ledger.shared_pool import NO_OWNER, GroupPool
from cachesvc.model.answers import GroupCells, Published, Wait
from cachesvc.model.errors import InvalidRequest, NotOwned, PoolExhausted
from cachesvc.model.words import KEY_BYTES, NO_PAGE, PageState
from cachesvc.questions.audit import verify_at_once
from tests.conservation import audit
from tests.unit.rigs.ledger_rig import BLOCK_TOKENS, chain
from tests.unit.rigs.shared_rig import FULL, STATE, WINDOW, begin, compute, copies, hit, sequence_of, serve

# -- room ------------------------------------------------------------------------------------------------------------


def test_a_pool_serves_whichever_group_asks() -> None:
    ends = begin(10)
    rig, lease = ends
    rig.run(match, lease, 1, chain(*"abcdefgh"), 0)
    rig.run(partial(allocate, positions={WINDOW: [], STATE: []}), lease, 1, 8)
    assert rig.free() == [2, 2, 2]
    assert [pool.own_counts[1] for pool in rig.place().pools] == [8, 0, 0]
    rig.run(match, lease, 2, chain(*"xy"), 0)
    with pytest.raises(PoolExhausted) as refused:
        rig.run(allocate, lease, 2, 1)  # a page of each group
    assert (refused.value.wanted, refused.value.free, refused.value.evictable, refused.value.capacity) == (3, 2, 0, 10)
    rig.run(partial(allocate, positions={WINDOW: [0], STATE: []}), lease, 2, 1)
    assert rig.free() == [0, 0, 0]


def test_copies_that_no_hit_has_used_go_before_any_block() -> None:
    ends = begin(24)
    serve(ends, 1, "abcdef", states=(1, 5))  # windows 4 and 5 and state 5 are where a next turn goes on
    assert [copies(ends, group) for group in range(3)] == [6, 6, 2]
    assert sorted(idle_copies(ends.rig.place(), (0, 1, 2), cheap=True)) == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 1)]
    compute(ends, 2, "uvwxy", states=(4,))  # takes the 10 free pages and one more
    assert [copies(ends, group) for group in range(3)] == [11, 10, 3]
    assert hit(ends, 3, "abcdef") == (6, 0, 6)
    compute(ends, 4, "z", states=(0,))
    assert [copies(ends, group) for group in range(3)] == [12, 9, 3], "two windows and the middle state went"
    assert hit(ends, 5, "abcdef") == (6, 0, 6)
    assert hit(ends, 6, "abcd") == (0, 0, 4)


def test_blocks_go_leaf_first_once_nothing_cheap_is_left_and_take_their_copies_along() -> None:
    ends = begin(12)
    serve(ends, 1, "abcd", states=(3,))
    drop_idle_copies(ends.rig.model.blocks, ends.rig.place(), (12, 0, 0), 9, cheap=True)
    assert [copies(ends, group) for group in range(3)] == [4, 2, 1]
    compute(ends, 2, "wx", states=(1,))  # wants 5 pages, of which 5 are free
    compute(ends, 3, "y", states=(0,))  # its 3 pages are those of block d: full, window, state
    assert [copies(ends, group) for group in range(3)] == [6, 4, 2]
    assert hit(ends, 4, "abcd") == (0, 0, 3)


def test_copies_that_hits_have_used_go_once_no_block_can() -> None:
    ends = begin(24)
    serve(ends, 1, "abcd", states=(3,))  # windows 2 and 3 and state 3 are of use to a next turn
    compute(ends, 2, "abcdef", states=(5,))  # which comes, and pins all of it
    assert [copies(ends, group) for group in range(3)] == [6, 6, 2]
    ends.rig.run(recycle, ends.lease, 2, 6 * BLOCK_TOKENS, ())
    depth = ends.rig.model.blocks.index.depth
    idle = [(group, depth[row]) for group, row in idle_copies(ends.rig.place(), (0, 1, 2))]
    assert idle[:2] == [(WINDOW, 0), (WINDOW, 1)]
    assert sorted(idle[2:]) == [(WINDOW, 2), (WINDOW, 3), (STATE, 3)]
    compute(ends, 3, "vwxyz")  # the 10 free pages
    compute(ends, 4, "q", states=(0,))
    assert copies(ends, FULL) == 12
    assert len(list(idle_copies(ends.rig.place(), (0, 1, 2)))) == 2


def test_what_cannot_be_met_evicts_nothing() -> None:
    ends = begin(12)
    held = compute(ends, 1, "abcd", states=(3,))
    before = [bytes(states) for states in ends.rig.place().states]
    rig, lease = ends
    rig.run(match, lease, 2, chain(*"wxyz"), 0)
    with pytest.raises(PoolExhausted) as refused:
        rig.run(allocate, lease, 2, 4)
    assert [bytes(states) for states in rig.place().states] == before
    assert (refused.value.wanted, refused.value.free, refused.value.evictable) == (9, 3, 0)
    assert held.sealed == 4


def test_room_is_told_by_pool() -> None:
    ends = begin(20)
    serve(ends, 1, "abcd", states=(3,))
    assert room_left(ends.rig.place()) == ([11] * 3, [9] * 3)
    compute(ends, 2, "ab")
    free, evictable = room_left(ends.rig.place())
    assert (len(set(free)), len(set(evictable))) == (1, 1)


def test_demand_counts_the_pages_that_each_block_frees() -> None:
    ends = begin(24)
    serve(ends, 1, "abcdef", states=(5,))
    place, index = ends.rig.place(), ends.rig.model.blocks.index
    rows = [index.rows[chain(*"abcdef"[:length])[-KEY_BYTES:]] for length in range(6, 0, -1)]
    demand = demand_of(place, (place.pools[0].unreserved + 5, 0, 0))
    assert isinstance(demand, PoolDemand)
    assert demand.left == 2
    before = demand.copy()
    demand.take(rows[:1])  # full, window, state
    assert demand.left == 1
    demand.take(rows[1:2])  # full and window
    assert demand.left == 0
    demand.go_back(before)
    assert demand.left == 2
    assert demand_of(place, (place.pools[0].unreserved, 0, 0)).left <= 0


def test_a_call_that_waits_keeps_pages_of_the_pool_from_all_groups() -> None:
    ends = begin(13, host=13)
    serve(ends, 1, "abcdef", states=(5,))
    rig, lease = ends
    rig.run(match, lease, 2, chain(*"uvwxyz"), 0)
    waiting = rig.once(partial(allocate, positions={STATE: []}), lease, 2, 6)
    assert isinstance(waiting, Wait)
    assert rig.place().pools[WINDOW].reserved == rig.place().pools[FULL].reserved > 0
    other = rig.lease("b")
    rig.run(match, other, 9, chain("other"), 0)
    with pytest.raises(PoolExhausted):
        rig.once(allocate, other, 9, 4)
    rig.run(partial(allocate, positions={STATE: []}), lease, 2, 6)
    assert rig.place().pools[WINDOW].reserved == 0


# -- growth ----------------------------------------------------------------------------------------------------------


def test_allocate_gives_pages_at_the_positions_that_are_named() -> None:
    ends = begin(32)
    rig, lease = ends
    rig.run(match, lease, 1, chain(*"abcd"), 0)
    rig.run(partial(allocate, positions={WINDOW: [1], STATE: [0, 2]}), lease, 1, 3)
    tables = sequence_of(ends, 1).tables
    assert [[page != NO_PAGE for page in table] for table in tables] == [
        [True] * 3,
        [False, True, False],
        [True, False, True],
    ]
    rig.run(allocate, lease, 1, 5)
    assert [page != NO_PAGE for page in tables[STATE]] == [True, False, True, False, True], "the last new one"
    for wrong in ({FULL: [5]}, {STATE: [4]}, {STATE: [6]}, {STATE: [5, 5]}, {WINDOW: [5, 4]}):
        with pytest.raises(InvalidRequest):
            rig.run(partial(allocate, positions=wrong), lease, 1, 6)
    assert sequence_of(ends, 1).blocks == 5


def test_the_stock_is_the_pools_and_its_pages_serve_any_group() -> None:
    ends = begin(32)
    rig, lease = ends
    (granted,) = rig.run(refill_stock, lease, (1, 1, 2), 0)
    assert (granted.group, len(granted.pages)) == (FULL, 4)
    assert not rig.run(refill_stock, lease, (1, 1, 2), 0)
    rig.run(match, lease, 1, chain(*"ab"), 0)
    pages, generations = list(granted.pages), list(granted.generations)

    def cells(*chosen: int) -> tuple[GroupCells, ...]:
        return tuple(
            GroupCells(group, 0, (NO_PAGE if at < 0 else pages[at],), (0 if at < 0 else generations[at],))
            for group, at in enumerate(chosen)
        )

    for wrong, error in ((cells(0, 0, -1), InvalidRequest), (cells(-1, 0, 1), InvalidRequest)):
        with pytest.raises(error):
            rig.run(extend, lease, 1, wrong)
    generations[0] += 1
    with pytest.raises(NotOwned):
        rig.run(extend, lease, 1, cells(1, 0, -1))
    generations[0] -= 1
    assert rig.run(extend, lease, 1, cells(2, -1, 0)) == 1
    assert sequence_of(ends, 1).own == [{pages[2]}, set(), {pages[0]}]
    assert [pool.own_counts[1] for pool in rig.place().pools] == [3, 0, 1]
    with pytest.raises(NotOwned):
        rig.run(extend, lease, 1, cells(2, -1, -1))
    twice = tuple(GroupCells(group, 0, (pages[1],)) for group in (FULL, STATE))
    with pytest.raises(InvalidRequest, match="twice"):
        rig.run(recycle, lease, 0, 0, twice)
    rig.run(recycle, lease, 0, 0, (GroupCells(FULL, 0, (pages[1],)),))
    rig.run(recycle, lease, 0, 0, (GroupCells(STATE, 0, (pages[3],)),))
    assert rig.free() == [30] * 3


# -- states ----------------------------------------------------------------------------------------------------------


def test_a_state_is_sealed_once_and_by_name_alone() -> None:
    ends = begin(40)
    rig, lease = ends
    first, second = (compute(ends, number, "abcd") for number in (1, 2))
    assert hit(ends, 3, "abcd") == (0, 0, 4)
    assert rig.model.lost_blocks == {"window": 0, "state": 8}
    rig.run(partial(allocate, positions={STATE: [4, 5]}), lease, 1, 6)
    own = first.tables[STATE][4]
    answer = rig.run(publish, lease, 1, 4, b"", 0, None, (GroupCells(STATE, 1, (own,)),))
    assert isinstance(answer, Published)
    assert not answer.kept
    assert (first.tables[STATE][1], first.tables[STATE][4]) == (own, NO_PAGE)
    assert hit(ends, 3, "abcd") == (2, 0, 4)
    rig.run(partial(allocate, positions={STATE: [4]}), lease, 2, 5)
    mine = second.tables[STATE][4]
    answer = rig.run(publish, lease, 2, 4, b"", 0, None, (GroupCells(STATE, 1, (mine,)),))
    assert answer.kept == (GroupCells(STATE, 1, (mine,)),)
    assert mine in second.own[STATE]
    answer = rig.run(publish, lease, 2, 4, b"", 0, None, (GroupCells(STATE, 2, (NO_PAGE, mine)),))
    assert not answer.kept
    assert hit(ends, 3, "abcd") == (4, 0, 4)


def test_an_unnamed_state_stays_private_where_others_sealed_some_of_the_blocks() -> None:
    ends = begin(40)
    rig, lease = ends
    keys = chain(*"abcd")
    rig.run(match, lease, 2, keys, 0)
    rig.run(partial(allocate, positions={STATE: [0, 3]}), lease, 2, 4)
    serve(ends, 1, "ab")
    answer = rig.run(publish, lease, 2, 0, keys, 4)
    assert isinstance(answer, Published)
    assert list(answer.duplicate_positions) == [0, 1]
    sequence = sequence_of(ends, 2)
    assert sequence.own[STATE] == {sequence.tables[STATE][0], sequence.tables[STATE][3]}
    assert copies(ends, STATE) == 0


@pytest.mark.parametrize(
    ("cells", "error"),
    [
        ((GroupCells(WINDOW, 0, (0,)),), InvalidRequest),
        ((GroupCells(STATE, 4, (0,)),), InvalidRequest),
        ((GroupCells(STATE, 0, (39,)),), NotOwned),
        ((GroupCells(STATE, 0, (0, 0)),), InvalidRequest),
    ],
)
def test_states_that_cannot_be_are_refused_before_anything_is_sealed(
    cells: tuple[GroupCells, ...], error: type[Exception]
) -> None:
    ends = begin(40)
    rig, lease = ends
    keys = chain(*"abcd")
    rig.run(match, lease, 1, keys, 0)
    rig.run(partial(allocate, positions={STATE: [1]}), lease, 1, 4)
    own = sequence_of(ends, 1).tables[STATE][1]
    named = tuple(each._replace(pages=tuple(own if page == 0 else page for page in each.pages)) for each in cells)
    with pytest.raises(error):
        rig.run(publish, lease, 1, 0, keys, 4, Publishing(), named)
    assert sequence_of(ends, 1).sealed == 0


def test_a_page_that_was_taken_ahead_for_a_call_that_waits_is_no_state() -> None:
    """Its sequence gets it with that call, to write it."""
    ends = begin(40)
    rig, lease = ends
    rig.run(match, lease, 1, chain(*"abcd"), 0)
    rig.run(partial(allocate, positions={STATE: [1, 3]}), lease, 1, 4)
    sequence = sequence_of(ends, 1)
    granted = list(sequence.own[STATE])
    sequence.reserve().take_ahead([0, 0, 1], 8)
    (ahead,) = sequence.own[STATE].difference(granted)
    with pytest.raises(NotOwned):
        rig.run(publish, lease, 1, 0, b"", 4, Publishing(), (GroupCells(STATE, 1, (ahead,)),))
    (first,) = (page for page in sequence.tables[STATE][:2] if page != NO_PAGE)
    answer = rig.run(publish, lease, 1, 0, b"", 4, Publishing(), (GroupCells(STATE, 1, (first,)),))
    assert isinstance(answer, Published)
    assert answer.kept == ()
    rig.run(release, lease, 1)


def test_recycle_gives_back_states_and_windows_as_told() -> None:
    ends = begin(40)
    rig, lease = ends
    sequence = compute(ends, 1, "abcdef", states=(1, 3, 5))
    rig.run(partial(allocate, positions={STATE: [6]}), lease, 1, 7)
    private = sequence.tables[STATE][6]
    with pytest.raises(InvalidRequest):
        rig.run(recycle, lease, 1, 0, (GroupCells(FULL, 0, (sequence.tables[FULL][6],)),))
    rig.run(recycle, lease, 1, 0, (GroupCells(STATE, 0, (private,)),))
    assert sequence.tables[STATE][6] == NO_PAGE
    for wrong in ((3,), (1, 8)):
        with pytest.raises(InvalidRequest):
            rig.run(recycle, lease, 1, 0, (), None, wrong)
    rig.run(recycle, lease, 1, 0, (), None, (1, 4))
    assert sequence.cursors == {WINDOW: 1, STATE: 4}
    assert [page != NO_PAGE for page in sequence.tables[STATE]] == [False] * 5 + [True, False]
    rig.run(recycle, lease, 1, 6 * BLOCK_TOKENS, (), None, (0, 6))
    assert sequence.cursors == {WINDOW: 4, STATE: 6}, "a number of 0 goes by the tokens"
    late = rig.run(publish, lease, 1, 6, b"", 0, None, ())
    assert isinstance(late, Published)


def test_the_deepest_state_of_an_ended_request_is_no_cheap_copy() -> None:
    ends = begin(40)
    serve(ends, 1, "abcdef", states=(1, 3))
    depth = ends.rig.model.blocks.index.depth
    cheap = [(group, depth[row]) for group, row in idle_copies(ends.rig.place(), (0, 1, 2), cheap=True)]
    assert (STATE, 1) in cheap
    assert (STATE, 3) not in cheap


def test_states_go_out_and_come_back_with_a_swap() -> None:
    ends = begin(24, host=24)
    rig, lease = ends
    sequence = compute(ends, 1, "abcd", states=(1, 3))
    rig.run(partial(allocate, positions={STATE: [4]}), lease, 1, 5)
    rig.run(swap_out, lease, 1)
    rig.settle()
    assert sum(map(len, sequence.own)) == 0
    rig.run(swap_in, lease, 1)
    rig.settle()
    assert [page != NO_PAGE for page in sequence.tables[STATE]] == [False, True, False, True, True]
    rig.run(release, lease, 1)
    assert rig.place().pools[0].own_counts[1] == 0


@pytest.mark.parametrize("what", ["owner", "counts", "free"])
def test_verify_and_the_audit_find_a_page_that_is_counted_to_the_wrong_group(what: str) -> None:
    ends = begin(20)
    sequence = compute(ends, 1, "abcd", states=(3,))
    full, window, _ = ends.rig.place().pools
    assert isinstance(full, GroupPool)
    assert isinstance(window, GroupPool)
    page = sequence.tables[FULL][2]
    if what == "owner":
        full.owners[page] = window.mark
    elif what == "counts":
        full.mine[PageState.SEALED] += 1
    else:
        full.owners[page] = NO_OWNER
    assert verify_at_once(ends.rig.core)
    assert audit(ends.rig.core.ledger).problems
