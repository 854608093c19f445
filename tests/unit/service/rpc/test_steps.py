"""A Step: the order of its operations when some have to wait, its deadline, what a defect leaves, and how
it loads."""

from __future__ import annotations

import asyncio

import pytest
from kvcache.v1 import cache_pb2, lease_pb2

from cachesvc.flows import pinning
from cachesvc.model.words import Direction, WritePolicy
from cachesvc.service.calls.dispatcher import INTERNAL
from cachesvc.service.loop.line import KEPT_S
from tests.unit.flows.transfer.test_flows_load import hosted
from tests.unit.rigs.dispatch_rig import (
    Desk,
    allocate,
    extend,
    kinds,
    match,
    release,
    step,
    swap_in,
    turns,
)
from tests.unit.rigs.ledger_rig import one_group, rig_of, serve


async def test_a_step_that_does_not_wait_is_answered_at_once() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        answer = desk.steps(lease, match(1, "ab"), allocate(1, 2), match(2, "c"), release(1), release(2))
        assert kinds(answer) == ["match", "allocate", "match", "release", "release"]
        assert answer.results[3].release.freed_pages == 2
        assert desk.admission.work.held == 0


async def test_an_operation_that_waits_holds_up_its_own_sequence_alone() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        desk.fill(lease, 2, "cd")
        ticket = desk.swap_out(lease, 1)
        served = desk.steps(lease, allocate(1, 3), release(1), allocate(2, 3), match(3, "e"), release(2))
        assert isinstance(served, asyncio.Future)
        await turns()
        assert not served.done()
        sequences = desk.rig.core.ledger.leases[lease].sequences
        assert sorted(sequences) == [1, 3], "2 was released, 3 opened, and 1 keeps its order: its release has to wait"
        await desk.land(ticket)
        assert served.done(), "woken by the end of its transfer, not by its deadline"
        answer = served.result()
        assert kinds(answer) == ["CONFLICT", "release", "allocate", "match", "release"]
        assert sorted(sequences) == [3]


async def test_operations_behind_one_that_waits_keep_their_order_and_may_wait_again() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        out = desk.swap_out(lease, 1)
        # Both allocates wait: for the swap out, then for the swap in.
        served = desk.steps(lease, allocate(1, 2), swap_in(1), allocate(1, 3), release(1))
        await desk.land(out)
        [back] = desk.rig.mover.transfers
        assert not served.done()
        await desk.land(back)
        assert kinds(await served) == ["CONFLICT", "swap", "allocate", "release"]


async def test_a_match_that_waits_keeps_back_what_needs_its_sequence() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        ticket = desk.swap_out(lease, 1)
        served = desk.steps(lease, allocate(1, 3), match(1, "x"), match(2, "y"), allocate(2, 1))
        await turns()
        assert desk.pages(lease, 2), "2 goes on"
        await desk.land(ticket)
        assert kinds(await served) == ["CONFLICT", "CONFLICT", "match", "allocate"]


async def test_the_stock_is_filled_when_all_have_ended() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        desk.fill(lease, 2, "cd")
        granted = desk.steps(lease, stock_pages=[2]).stock[0]
        pages, generations = memoryview(granted.pages).cast("i"), memoryview(granted.generations).cast("I")
        ticket = desk.swap_out(lease, 1)
        served = desk.steps(lease, allocate(1, 3), extend(2, pages[0], generations[0]), stock_pages=[2])
        await turns()
        stock = desk.rig.core.ledger.leases[lease].stock[0]
        assert stock == {pages[1]}, "taken at once, and filled up later"
        await desk.land(ticket)
        answer = await served
        assert kinds(answer) == ["CONFLICT", "extend"]
        assert len(answer.stock[0].pages) == 4
        assert len(stock) == 2


async def test_long_steps_give_others_a_turn_and_keep_their_order() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        served = desk.steps(lease, *[match(1, "a"), allocate(1, 1), release(1)] * 40)
        assert isinstance(served, asyncio.Future)
        assert desk.admission.work.held == 1
        assert kinds(await served) == ["match", "allocate", "release"] * 40
        assert desk.admission.work.held == 0


async def test_a_waiting_step_gives_its_place_back_and_is_counted_apart() -> None:
    async with Desk(calls=1) as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        ticket = desk.swap_out(lease, 1)
        served = desk.steps(lease, *[match(2, "c"), release(2)] * 10, allocate(1, 3))
        await turns()
        assert desk.admission.work.held == 0
        assert (desk.admission.waits.held, served.done()) == (1, False)
        await desk.land(ticket)
        assert kinds(await served)[-1] == "CONFLICT"
        assert desk.admission.waits.held == 0


async def test_where_no_more_may_wait_operations_are_refused_and_the_others_count() -> None:
    async with Desk(waiting=1) as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        ticket = desk.swap_out(lease, 1)
        first = desk.steps(lease, allocate(1, 3))
        second = desk.steps(lease, allocate(1, 3), match(2, "c"), release(1))
        assert isinstance(first, asyncio.Future)
        assert kinds(second)[:2] == ["LIMIT", "match"], "and what comes behind in its sequence has its turn"
        await desk.land(ticket)
        await first


async def test_a_step_waits_no_longer_than_its_own_deadline() -> None:
    async with Desk(wait_seconds=0.02) as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        desk.fill(lease, 2, "cd")
        first, second = desk.swap_out(lease, 1), desk.swap_out(lease, 2)
        answer = await desk.steps(lease, allocate(1, 3), allocate(2, 3), allocate(1, 4), match(3, "e"))
        assert kinds(answer) == ["DEADLINE", "DEADLINE", "DEADLINE", "match"]
        await desk.land(first)
        await desk.land(second)


async def test_a_step_that_does_not_want_to_wait_is_answered_at_once() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        ticket = desk.swap_out(lease, 1)
        answer = desk.steps(lease, allocate(1, 3), match(2, "c"), no_wait=True)
        assert kinds(answer) == ["DEADLINE", "match"]
        assert "they go on" in answer.results[0].error.message
        await desk.land(ticket)
        assert kinds(desk.steps(lease, swap_in(1), no_wait=True)) == ["swap"], "the swap has ended"


async def test_pages_that_are_freed_for_an_operation_that_did_not_wait_are_kept_for_it() -> None:
    """Whatever engine asked first had them: the one for which blocks were saved found none, and saved others."""
    rig = rig_of(one_group(), device=(4,), host=(32,))
    async with Desk(rig) as desk:
        a, b = desk.lease("a"), desk.lease("b")
        serve(rig, a, 90, "wxyz")
        desk.steps(a, match(1, ""))
        assert kinds(desk.steps(a, allocate(1, 4), no_wait=True)) == ["DEADLINE"]
        for ticket in [*rig.mover.transfers]:
            await desk.land(ticket)
        assert rig.free() == [4]
        greedy = desk.steps(b, match(1, ""), allocate(1, 2), stock_pages=[2], stock_due=2, no_wait=True)
        assert (kinds(greedy), len(greedy.stock)) == (["match", "EXHAUSTED"], 0)
        assert kinds(desk.steps(a, allocate(1, 4), no_wait=True)) == ["allocate"]


async def test_what_an_operation_kept_before_it_had_to_wait_is_kept_no_longer_either() -> None:
    """Its first turn kept pages for a minute, and a caller that never asked again left them to none."""
    rig = rig_of(one_group(), device=(8,), host=(32,), policy=WritePolicy.WRITE_THROUGH)
    async with Desk(rig) as desk:
        a = desk.lease("a")
        serve(rig, a, 90, "abcdefgh")
        rig.settle()
        pinning.evict(rig.core, 1, "device", 0)
        rig.core.turns, rig.mover.slots = rig.core.turns._replace(loaded=3), 2
        desk.steps(a, match(1, "abcdefgh"))
        answer = await desk.steps(a, allocate(1, 8), no_wait=True)
        assert kinds(answer) == ["DEADLINE"]
        (room,) = rig.place().reservations
        assert room.until <= desk.node.now() + KEPT_S
        rig.mover.slots = 8
        desk.steps(a, release(1))


async def test_a_defect_ends_its_step_and_a_retry_applies_nothing_twice() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        desk.break_ledger(lease, 1)
        request = step(lease, 1, match(2, "c"), match(4, "d"), release(1), match(3, "d"), release(2), stock_pages=[4])
        answer = desk.ask(desk.cache.step, request)
        assert kinds(answer) == ["match", "match", INTERNAL, "UNAVAILABLE", "UNAVAILABLE"]
        assert all("not carried out" in result.error.message for result in answer.results[3:])
        assert not answer.stock
        assert 3 not in desk.rig.core.ledger.leases[lease].sequences
        before = desk.rig.core.counters["match_requests"]
        assert desk.ask(desk.cache.step, request) == answer
        assert desk.rig.core.counters["match_requests"] == before
        assert desk.rig.core.counters["calls_broken"] == 1


async def test_a_defect_is_told_to_what_waits_meanwhile() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        desk.fill(lease, 2, "cd")
        ticket = desk.swap_out(lease, 1)
        waiting = desk.steps(lease, allocate(1, 3), release(1))
        desk.break_ledger(lease, 2)
        broken = desk.steps(lease, release(2))
        assert kinds(broken) == [INTERNAL]
        await desk.land(ticket)
        assert kinds(await waiting) == ["UNAVAILABLE", "UNAVAILABLE"], "its model is out of service"


async def test_what_was_applied_is_told_where_the_lease_is_lost_meanwhile() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        ticket = desk.swap_out(lease, 1)
        served = desk.steps(lease, match(2, "c"), allocate(1, 3), stock_pages=[1])
        desk.ask(desk.leases.close, lease_pb2.CloseRequest(lease_id=lease))
        await desk.land(ticket)
        answer = await served
        assert kinds(answer) == ["match", "LEASE_LOST"]


async def test_an_empty_operation_and_one_too_many_are_refused_by_name() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        assert kinds(desk.steps(lease, cache_pb2.StepOperation(), match(1, "a"))) == ["INVALID", "match"]
        desk.cache.operations_per_step = 1
        assert desk.steps(lease, match(2, "a"), match(3, "a")).code == "LIMIT"
        assert desk.steps(lease, stock_pages=[1, 1]).code == "INVALID"
        assert desk.ask(desk.cache.step, step(lease, 0, match(2, "a"))).code == "INVALID"
        assert sorted(desk.rig.core.ledger.leases[lease].sequences) == [1]


@pytest.mark.parametrize("short_suffix", [False, True])
async def test_a_load_is_as_long_behind_its_first_layer_as_the_caller_says(short_suffix: bool) -> None:
    async with Desk(hosted("abcd")) as desk:
        lease, transfers = desk.lease(), desk.rig.mover.transfers
        desk.steps(lease, match(1, "abcd"), allocate(1, 5, short_suffix=short_suffix))
        [(ticket, load)] = transfers.items()
        assert (load.layered, load.short_suffix) == (True, short_suffix)
        await desk.land(ticket)
        await desk.land(desk.swap_out(lease, 1))
        desk.steps(lease, swap_in(1, short_suffix=short_suffix))
        [(ticket, load)] = transfers.items()
        assert (load.direction, load.layered, load.short_suffix) == (Direction.LOAD, True, short_suffix)
        await desk.land(ticket)
