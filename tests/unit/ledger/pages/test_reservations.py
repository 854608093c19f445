"""Pages that come free for a waiting call are kept for it, whichever call comes between, until it has them or has
ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cachesvc.flows.allocate import allocate, refill_stock, swap_in, swap_out
from cachesvc.flows.core import Limits, resolve, tidy, tidy_all
from cachesvc.flows.leases import close_lease
from cachesvc.flows.match import match
from cachesvc.flows.recycle import release
from cachesvc.ledger.page_pool import PagePool, Reservation, expire
from cachesvc.model.answers import Allocated, Wait
from cachesvc.model.errors import DeadlineExceeded, LedgerBroken, PoolExhausted
from cachesvc.model.words import PageState
from cachesvc.service.loop.node import Node
from tests.unit.rigs.ledger_rig import Rig, one_group, prefill, rig_of, serve
from tests.unit.rigs.turns_rig import SMALL, full


def waiting(pages: int = 8, wanted: int = 8, *, host: int = 64) -> tuple[Rig, str, str, Wait]:
    """A pool full of cold blocks that are saved before they go, and a lease whose Allocate waits for them."""
    rig = rig_of(one_group(), device=(pages,), host=(host,))
    a, b = rig.lease("a"), rig.lease("b")
    for number in range(pages):
        serve(rig, b, number + 1, [number])
    rig.run(match, a, 1, b"", 0)
    waits = rig.once(allocate, a, 1, wanted)
    assert isinstance(waits, Wait)
    return rig, a, b, waits


def reserved(rig: Rig) -> int:
    return rig.place().pools[0].reserved


def test_pages_that_drain_for_a_call_are_not_taken_by_who_comes_between() -> None:
    """A call for 2,000 blocks beside steps that took each page as it came free ended at its deadline."""
    rig, a, b, waits = waiting()
    rig.run(match, b, 99, b"", 0)
    rig.core.ledger.leases[b].grown = 4
    for ticket in waits.tickets:
        rig.land(ticket)
        assert rig.once(refill_stock, b, (4,)) == ()
        with pytest.raises(PoolExhausted, match="free 0"):
            rig.once(allocate, b, 99, 1)
    assert (rig.free(), reserved(rig)) == ([8], 8)
    assert isinstance(rig.once(allocate, a, 1, 8), Allocated)
    assert (rig.free(), reserved(rig)) == ([0], 0)


def test_what_was_kept_for_a_call_that_never_came_back_goes_to_the_next_stock() -> None:
    """Engines that take their pages from their stock alone found none: only an Allocate looked whose time was over."""
    rig, _, b, waits = waiting()
    assert waits.reserved is not None
    waits.reserved.shorten(0.25)
    rig.settle()
    assert (rig.free(), reserved(rig)) == ([8], 8)
    rig.now = 0.5
    (granted,) = rig.run(refill_stock, b, (4,))
    assert (len(granted.pages), reserved(rig)) == (4, 0)


def test_who_comes_between_evicts_for_itself_and_waits_for_its_own() -> None:
    rig, a, b, waits = waiting(pages=12, wanted=8)
    rig.run(match, b, 99, b"", 0)
    theirs = rig.once(allocate, b, 99, 3)
    assert isinstance(theirs, Wait)
    assert not set(theirs.tickets) & set(waits.tickets)
    for ticket in theirs.tickets:
        rig.land(ticket)
    assert isinstance(rig.once(allocate, b, 99, 3), Allocated)
    for ticket in waits.tickets:
        rig.land(ticket)
    assert isinstance(rig.once(allocate, a, 1, 8), Allocated)


def test_what_is_free_already_is_kept_too_and_no_more_than_is_wanted() -> None:
    rig = rig_of(one_group(), device=(12,), host=(64,))
    a, b = rig.lease("a"), rig.lease("b")
    for number in range(6):
        serve(rig, b, number + 1, [number])
    rig.run(match, a, 1, b"", 0)
    waits = rig.once(allocate, a, 1, 8)
    assert isinstance(waits, Wait)
    assert reserved(rig) == 6
    rig.settle()
    assert (reserved(rig), rig.free()) == (8, [8])
    serve(rig, b, 99, "xy")  # what is cold and not for the other one
    assert isinstance(rig.once(allocate, a, 1, 8), Allocated)


def test_a_write_back_that_fails_is_begun_anew_and_what_came_meanwhile_is_kept() -> None:
    rig, a, _, waits = waiting()
    rig.land(waits.tickets[0], "broken")
    assert reserved(rig) == 0
    again = rig.once(allocate, a, 1, 8)
    assert isinstance(again, Wait)
    rig.settle()
    assert reserved(rig) == 8
    assert isinstance(rig.once(allocate, a, 1, 8), Allocated)


def test_two_calls_that_wait_never_hold_each_other_up() -> None:
    """Each holds what the other one wants: one is refused and gives it back, the other one then has it."""
    rig = rig_of(one_group(), device=(8,), host=(64,))
    a, b = rig.lease("a"), rig.lease("b")
    for number in range(8):
        serve(rig, b, number + 1, [number])
    for lease, blocks in ((a, 4), (b, 4)):
        rig.run(match, lease, 99, b"", 0)
        assert isinstance(rig.once(allocate, lease, 99, blocks), Wait)
    rig.settle()
    assert reserved(rig) == 8
    for ask in ((a, 6), (b, 6)):  # and now they want more than that
        lease, blocks = ask
        try:
            assert isinstance(rig.once(allocate, lease, 99, blocks), Allocated)
        except PoolExhausted:
            assert rig.core.ledger.leases[lease].sequences[99].reserve().held == [0]
            continue
        break
    assert [len(lease.sequences[99].tables[0]) for lease in rig.core.ledger.leases.values()] == [0, 6]


def end_the_call(rig: Rig, lease: str, waits: Wait) -> None:
    assert waits.reserved is not None
    waits.reserved.release()
    waits.reserved.release()


def end_the_sequence(rig: Rig, lease: str, waits: Wait) -> None:
    rig.run(release, lease, 1)


def lose_the_lease(rig: Rig, lease: str, waits: Wait) -> None:
    close_lease(rig.core, lease, quiesced=False)


def want_less(rig: Rig, lease: str, waits: Wait) -> None:
    assert isinstance(rig.once(allocate, lease, 1, 2), Allocated)


def let_it_expire(rig: Rig, lease: str, waits: Wait) -> None:
    rig.now = rig.core.limits.reservation_seconds + 1.0


@pytest.mark.parametrize("end", [end_the_call, end_the_sequence, lose_the_lease, want_less, let_it_expire])
@pytest.mark.parametrize("landed_before", [True, False])
def test_what_was_kept_is_free_for_all_once_the_call_needs_it_no_more(end: Any, landed_before: bool) -> None:
    rig, a, b, waits = waiting()
    if landed_before or end is want_less:
        rig.settle()
        assert reserved(rig) == 8
    end(rig, a, waits)
    rig.settle()
    rig.run(match, b, 99, b"", 0)
    wanted = 6 if end is want_less else 8
    assert isinstance(rig.run(allocate, b, 99, wanted), Allocated)
    assert (reserved(rig), rig.place().reservations) == (0, {})


def test_a_refused_call_keeps_nothing() -> None:
    rig, a, _, _ = waiting()
    rig.settle()
    assert reserved(rig) == 8
    with pytest.raises(PoolExhausted):
        rig.once(allocate, a, 1, 9)
    assert reserved(rig) == 0


def test_a_swap_in_that_waits_has_its_pages_kept() -> None:
    rig = rig_of(one_group(), device=(4,), host=(64,))
    a, b = rig.lease("a"), rig.lease("b")
    prefill(rig, a, 1, "ab")
    rig.run(allocate, a, 1, 3)
    rig.run(swap_out, a, 1)
    rig.settle()
    for number in range(4):
        serve(rig, b, number + 1, [number])
    waits = rig.once(swap_in, a, 1)
    while isinstance(waits, Wait):
        rig.settle()
        rig.run(match, b, 99, b"", 0)
        with pytest.raises(PoolExhausted):
            rig.once(allocate, b, 99, 4)
        rig.run(release, b, 99)
        waits = rig.once(swap_in, a, 1)
    rig.settle()
    assert reserved(rig) == 0


def test_a_call_that_ends_at_its_deadline_gives_back_what_was_kept_for_it() -> None:
    rig, a, _, _ = waiting()
    rig.settle()
    record = rig.core.ledger.leases[a].sequences[1]

    async def call() -> None:
        node = Node(rig.core, epoch=1, wait_seconds=0.01, lease_seconds=60.0)
        vault: Any = None
        node.start(vault)
        try:
            waits = Wait((1,), None, record.room)
            await node.wait_out(lambda: waits, waits, node.now() + 0.01, "a")
        finally:
            await node.close()

    assert reserved(rig) == 8
    with pytest.raises(DeadlineExceeded):
        asyncio.run(call())
    assert reserved(rig) == 0


def test_reserved_pages_are_free_and_cannot_be_taken() -> None:
    pool = PagePool("pool", 4)
    pool.add(0, 4)
    line: dict[Reservation, None] = {}
    first, second = Reservation(line, (pool,)), Reservation(line, (pool,))
    first.keep([3], until=10.0)
    second.keep([3], until=20.0)
    assert (pool.free, pool.unreserved, first.held, second.held) == (4, 0, [3], [1])
    with pytest.raises(LedgerBroken, match="1 pages wanted, 4 free, 4 of them reserved"):
        pool.take(1, PageState.PRIVATE)
    first.release()
    assert second.held == [1], "it takes more when pages come free for it"
    second.top_up()
    assert (second.held, first.is_open, list(line)) == ([3], False, [second])
    first.top_up()
    assert first.held == [0], "it is over"
    expire(line, 20.0)
    assert second.is_open
    expire(line, 20.5)
    assert (line, pool.reserved) == ({}, 0)
    pool.take(4, PageState.PRIVATE)
    assert pool.problems() == []


def test_a_call_beside_many_that_wait_asks_none_of_them() -> None:
    """Limits hold the line: each sequence of a lease waits once at most."""
    rig, a, b, _ = waiting(pages=4, wanted=4)
    rig.core.limits = Limits(sequences_per_lease=3)
    rig.run(match, b, 98, b"", 0)
    for _ in range(3):
        with pytest.raises(PoolExhausted):
            rig.once(allocate, b, 98, 4)
    call = resolve(rig.core.ledger, a, 0.0)
    assert list(call.replica.place.reservations) == [call.lease.sequences[1].room]


def test_what_growth_has_evicted_is_not_taken_by_the_stock_of_another_lease() -> None:
    """Engines that step on a full cache took each other's pages, and one of them went without for a second."""
    rig, a, b = full(24)
    for lease in (a, b):
        rig.run(match, lease, 1, b"", 0)
        rig.core.ledger.leases[lease].grown = 0
    rig.core.ledger.leases[a].grown = 6
    rig.once(refill_stock, a, (6,))
    while rig.core.chores:
        tidy(rig.core.chores)
        assert rig.once(refill_stock, b, (8,)) == ()
    assert (reserved(rig), rig.free()) == (6 - SMALL.evicted, [6 - SMALL.evicted])
    rig.once(refill_stock, a, (6,))
    assert (len(rig.core.ledger.leases[a].stock[0]), reserved(rig)) == (6, 0)


def test_what_is_kept_for_a_stock_is_free_once_its_lease_ends() -> None:
    rig, a, b = full(24)
    rig.core.ledger.leases[a].grown = 6
    rig.once(refill_stock, a, (6,))
    tidy_all(rig.core)
    assert reserved(rig) == 6 - SMALL.evicted
    rig.core.ledger.leases[b].grown = 0
    close_lease(rig.core, a, quiesced=True)
    while rig.core.chores:
        tidy(rig.core.chores)
        rig.check()
    assert reserved(rig) == 0
    rig.once(refill_stock, b, (6,))
    assert len(rig.core.ledger.leases[b].stock[0]) == 6
