"""Swap: a sequence leaves the device and comes back whole; failures and losses on the way; recycle by the window."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cachesvc.flows import pinning
from cachesvc.flows.allocate import allocate, swap_in, swap_out
from cachesvc.flows.core import TURN, Turns
from cachesvc.flows.leases import close_lease, process_gone
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import recycle, release
from cachesvc.model.answers import GroupCells, Wait
from cachesvc.model.errors import Conflict, InvalidRequest, LeaseLost, NotFound, NotOwned, PoolExhausted
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.words import KEY_BYTES, NO_PAGE, Direction, PageState, WritePolicy
from tests.unit.rigs.ledger_rig import TOKEN, Rig, chain, one_group, prefill, rig_of, serve, windowed


def half_published(device: int = 8, host: int = 8, *, layout: Layout | None = None) -> tuple[Rig, str]:
    """Sequence 1 of four blocks, two of them sealed."""
    layout = layout or one_group()
    groups = len(layout.groups)
    rig = rig_of(layout, device=(device,) * groups, host=(host,) * groups)
    a = rig.lease()
    rig.run(match, a, 1, chain(*"abcd"), 0)
    rig.run(allocate, a, 1, 4)
    rig.run(publish, a, 1, 0, b"", 2)
    return rig, a


def test_out_and_in_moves_every_own_page_there_and_back() -> None:
    rig, a = half_published()
    rig.run(swap_out, a, 1)
    [out] = rig.mover.transfers.values()
    assert len(out.pages[0].device_pages) == 4
    assert rig.free() == [4], "a page is free when its bytes are on the host"
    rig.settle()
    assert rig.free() == [6], "the sealed blocks stay until their pages are needed"
    own = dict(zip(out.pages[0].device_pages, out.pages[0].host_pages, strict=True))
    serve(rig, rig.lease("b"), 1, "wxyz")  # takes the pages that became free
    answer = rig.run(swap_in, a, 1)
    [back] = rig.mover.transfers.values()
    assert back.direction is Direction.LOAD
    assert set(back.pages[0].host_pages) == set(list(own.values())[:2])
    assert len(answer.tables[0].pages) == 4
    assert isinstance(rig.once(publish, a, 1, 2, b"", 2), Wait)
    rig.settle()
    assert rig.run(publish, a, 1, 2, b"", 2).sealed_blocks == 4
    rig.run(release, a, 1)
    assert rig.host.pools[0].counts[PageState.PRIVATE] == 0


def test_nothing_works_on_what_is_swapped_out() -> None:
    rig, a = half_published()
    rig.run(swap_out, a, 1)
    rig.settle()
    calls: list[Callable[[], object]] = [
        lambda: rig.run(allocate, a, 1, 5),
        lambda: rig.run(publish, a, 1, 2, b"", 1),
        lambda: rig.run(recycle, a, 1, 4, ()),
        lambda: rig.run(swap_out, a, 1),
    ]
    for call in calls:
        with pytest.raises(Conflict, match="swapped out"):
            call()
    rig.run(swap_in, a, 1)
    with pytest.raises(Conflict, match="being swapped"):
        rig.once(swap_in, a, 1)


def test_a_failed_swap_out_leaves_the_sequence_in_place() -> None:
    rig, a = half_published()
    rig.run(swap_out, a, 1)
    rig.land(1, "broken")
    assert rig.host.pools[0].free == 8
    assert rig.free() == [4]
    assert rig.run(publish, a, 1, 2, b"", 2).sealed_blocks == 4
    with pytest.raises(Conflict, match="on the device"):
        rig.run(swap_in, a, 1)


def test_a_failed_swap_in_can_be_tried_again() -> None:
    rig, a = half_published()
    rig.run(swap_out, a, 1)
    rig.settle()
    rig.run(swap_in, a, 1)
    rig.land(2, "broken")
    assert rig.host.pools[0].counts[PageState.PRIVATE] == 2
    rig.run(swap_in, a, 1)
    rig.settle()
    assert rig.run(publish, a, 1, 2, b"", 2).sealed_blocks == 4


@pytest.mark.parametrize("end", ["asked again", "released", "lease lost", "process gone"])
def test_pages_of_a_swap_in_that_failed_stay_their_sequences_until_it_is_heard_of(end: str) -> None:
    """The failure releases launches that waited for it, and these write behind what was to come."""
    rig, a = half_published(device=6)
    rig.run(swap_out, a, 1)
    rig.settle()
    pinning.evict(rig.core, 1, "device", 0)
    tables = rig.run(swap_in, a, 1).tables[0].pages
    [ticket] = rig.mover.transfers
    rig.land(ticket, "broken")
    pool = rig.place().pools[0]
    assert [pool.states[page] for page in tables[2:]] == [PageState.PRIVATE] * 2, "no other sequence may have them"
    assert pool.counts[PageState.FREE] == 4
    if end == "asked again":
        rig.run(swap_in, a, 1)
        assert pool.counts[PageState.FREE] == 2, "they were free, and as many are taken"
        rig.settle()
        rig.run(release, a, 1)
    elif end == "released":
        rig.run(release, a, 1)
    else:
        if end == "lease lost":
            close_lease(rig.core, a, quiesced=False)
            assert pool.counts[PageState.QUARANTINED] == 2
        process_gone(rig.core, TOKEN + b"a")
    assert pool.counts[PageState.FREE] + pool.counts[PageState.SEALED] == pool.usable
    assert rig.host.pools[0].counts[PageState.PRIVATE] == 0


def test_a_host_without_room_refuses_and_evicts_nothing() -> None:
    rig = rig_of(one_group(), device=(8,), host=(4,), policy=WritePolicy.WRITE_THROUGH)
    a = rig.lease()
    serve(rig, a, 2, "xy")
    rig.settle()
    rig.run(match, a, 1, chain(*"abcde"), 0)
    rig.run(allocate, a, 1, 5)
    with pytest.raises(PoolExhausted):
        rig.run(swap_out, a, 1)
    assert len(rig.host_keys()) == 2
    assert rig.free() == [1]


def test_the_host_copies_of_the_path_stay_while_it_goes_out() -> None:
    """Found by reading: room for the own pages was made by dropping host copies of the very path."""
    rig = rig_of(one_group(), device=(8,), host=(3,), policy=WritePolicy.WRITE_THROUGH)
    a = rig.lease()
    prefill(rig, a, 1, "ab")
    rig.settle()
    rig.run(allocate, a, 1, 4)
    with pytest.raises(PoolExhausted):
        rig.run(swap_out, a, 1)
    rig.run(release, a, 1)
    rig.run(match, a, 1, chain(*"ab"), 0)
    rig.run(allocate, a, 1, 3)
    rig.run(swap_out, a, 1)
    serve(rig, a, 2, "xy")  # wants host pages: none of the path's may go
    assert rig.host_keys() == {chain("a"), chain(*"ab")[KEY_BYTES:]}
    rig.settle()
    rig.run(swap_in, a, 1)
    rig.settle()


def test_spare_pages_are_not_lost_on_the_way_out() -> None:
    """Found by reading: pages that a sequence kept as spares leaked when it was swapped out."""
    rig = rig_of(one_group(), device=(8,), host=(8,))
    a = rig.lease()
    rig.run(match, a, 1, chain(*"ab"), 0)
    rig.run(allocate, a, 1, 3)
    serve(rig, a, 2, "ab")
    rig.run(publish, a, 1, 0, b"", 2)
    rig.run(swap_out, a, 1)
    rig.settle()
    rig.run(release, a, 1)
    assert rig.free() == [6]


def test_a_hit_that_is_not_allocated_yet_cannot_be_swapped() -> None:
    """Found by reading: the pin on the host was overwritten and stayed for good."""
    rig, a = half_published()
    rig.run(swap_out, a, 1)
    rig.settle()
    rig.run(release, a, 1)
    serve(rig, rig.lease("b"), 1, "stuvwxyz")
    rig.settle()
    assert rig.run(match, a, 2, chain(*"ab"), 0).host_blocks == 2
    with pytest.raises(Conflict, match="not allocated"):
        rig.run(swap_out, a, 2)
    rig.run(release, a, 2)


@pytest.mark.parametrize("direction", ["out", "in"])
@pytest.mark.parametrize("error", ["", "broken"])
@pytest.mark.parametrize("end", ["release", "lease lost", "process gone"])
def test_whoever_leaves_during_a_swap_leaves_nothing_behind(direction: str, error: str, end: str) -> None:
    rig, a = half_published(layout=windowed(window_tokens=8))
    rig.run(swap_out, a, 1)
    if direction == "in":
        rig.settle()
        rig.run(swap_in, a, 1)
    if end == "release":
        rig.run(release, a, 1)
    elif end == "lease lost":
        close_lease(rig.core, a, quiesced=False)
    else:
        process_gone(rig.core, TOKEN + b"a")
    rig.check()
    for ticket in list(rig.mover.transfers):
        rig.land(ticket, error)
    quarantined = [pool.counts[PageState.QUARANTINED] for pool in rig.place().pools]
    assert (sum(quarantined) > 0) == (end == "lease lost")
    process_gone(rig.core, TOKEN + b"a")
    rig.check()
    for pool in (*rig.place().pools, *rig.host.pools):
        assert pool.counts[PageState.FREE] + pool.counts[PageState.SEALED] == pool.usable


def test_a_swap_in_that_fails_while_its_sequence_is_ending_leaves_nothing_pinned() -> None:
    """Found by simulation: the pin of blocks that never came stayed until the last turn of the release."""
    rig, a = half_published()
    rig.run(swap_out, a, 1)
    rig.settle()
    pinning.evict(rig.core, rig.model.id, "device", 0)
    rig.run(swap_in, a, 1)
    [back] = rig.mover.transfers
    rig.core.turns = Turns(pages=1)
    assert rig.once(release, a, 1) == TURN
    rig.land(back, "broken")
    rig.run(release, a, 1)
    assert rig.free() == [8]
    assert not any(rig.place().pins)


def test_shared_windowed_pages_come_back_as_own_ones() -> None:
    rig = rig_of(windowed(window_tokens=8), device=(8, 8), host=(8, 8))
    a = rig.lease()
    prefill(rig, a, 1, "abcd")
    rig.run(recycle, a, 1, 16, ())
    rig.run(swap_out, a, 1)
    rig.settle()
    answer = rig.run(swap_in, a, 1)
    rig.settle()
    assert [page == NO_PAGE for page in answer.tables[1].pages] == [True, True, False, False]
    assert rig.run(recycle, a, 1, 16, ()).pages == 0
    rig.run(allocate, a, 1, 8)
    assert rig.run(recycle, a, 1, 32, ()).pages == 4
    rig.run(release, a, 1)


# -- recycle -------------------------------------------------------------------------------------------------------


def layout_of(window: int, sinks: int, block: int) -> Layout:
    planes = (Plane("k", 0, "full", (8,), "uint8"), Plane("k", 1, "window", (8,), "uint8"))
    return Layout(block, 1, (PlaneGroup("full"), PlaneGroup("window", window, sinks)), planes)


def test_the_vector_of_the_specification() -> None:
    rig = rig_of(layout_of(64, 32, 16), device=(40, 40))
    a = rig.lease()
    rig.run(match, a, 1, b"", 0)
    rig.run(allocate, a, 1, 32)
    answer = rig.run(recycle, a, 1, 512, ())
    assert (answer.pages, answer.cursors) == (26, (28,))
    assert rig.free() == [8, 34]
    table = rig.core.ledger.leases[a].sequences[1].tables
    assert NO_PAGE not in table[0]
    assert [page == NO_PAGE for page in table[1]] == [False] * 2 + [True] * 26 + [False] * 4


@pytest.mark.parametrize("window", [1, 4, 7, 8, 9, 13])
@pytest.mark.parametrize("sinks", [0, 3, 4])
def test_what_is_given_back_is_exactly_what_no_query_reaches(window: int, sinks: int) -> None:
    """Token by token: block j is dead once every later query's window begins behind it; sinks never die."""
    rig = rig_of(layout_of(window, sinks, 4), device=(16, 16))
    a = rig.lease()
    rig.run(match, a, 1, b"", 0)
    rig.run(allocate, a, 1, 16)
    last: tuple[int, ...] = (0,)
    for tokens in (1, 3, 4, 5, 9, 17, 18, 33, 48, 64, 63, 2):
        answer = rig.run(recycle, a, 1, tokens, ())
        assert answer.cursors >= last, "a cursor never goes back"
        last = answer.cursors
        reached = max(tokens, {2: 64, 63: 64}.get(tokens, 0))
        needed = {t // 4 for t in range(max(0, reached - window + 1), 64)} | {t // 4 for t in range(sinks)}
        table = rig.core.ledger.leases[a].sequences[1].tables[1]
        assert {block for block, page in enumerate(table) if page != NO_PAGE} == needed


def test_a_bad_recycle_frees_nothing() -> None:
    """Found by reading: the named pages were freed before the tokens were looked at."""
    rig = rig_of(windowed(), device=(8, 8))
    a = rig.lease()
    rig.run(match, a, 1, chain("a"), 0)
    rig.run(allocate, a, 1, 2)
    serve(rig, a, 2, "a")
    spares = rig.run(publish, a, 1, 0, b"", 1).spares
    free = rig.free()
    with pytest.raises(InvalidRequest, match="beyond"):
        rig.run(recycle, a, 1, 99, spares)
    with pytest.raises(InvalidRequest, match="twice"):
        rig.run(recycle, a, 1, 0, (*spares, *spares))
    in_table = rig.core.ledger.leases[a].sequences[1].tables[0][1]
    with pytest.raises(InvalidRequest, match="still in the block table"):
        rig.run(recycle, a, 1, 0, (*spares, GroupCells(0, 0, (in_table,))))
    with pytest.raises(NotOwned):
        rig.run(recycle, a, 1, 0, (*spares, GroupCells(0, 0, (7,))))
    with pytest.raises(InvalidRequest, match="no group"):
        rig.run(recycle, a, 1, 0, (GroupCells(5, 0, (0,)),))
    with pytest.raises(NotFound):
        rig.run(recycle, a, 77, 4, spares)
    assert rig.free() == free
    assert rig.run(recycle, a, 1, 4, spares).pages == 2
    close_lease(rig.core, a, quiesced=True)
    with pytest.raises(LeaseLost):
        rig.run(recycle, a, 1, 0, spares)


def test_a_recycled_prefix_is_hit_where_its_window_ends() -> None:
    """The windowed pages that recycle leaves are enough for a hit of everything that was computed."""
    rig = rig_of(windowed(window_tokens=8), device=(16, 6))
    a = rig.lease()
    prefill(rig, a, 1, "abcdef")
    rig.run(recycle, a, 1, 24, ())
    serve(rig, a, 2, "wxyz")  # takes what was let go of
    rig.run(release, a, 1)
    assert rig.run(match, a, 3, chain(*"abcdef"), 0).device_blocks == 6
    assert rig.run(match, a, 4, chain(*"abcd"), 0).device_blocks == 0, "its own window is gone"
