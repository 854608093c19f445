"""Turns on the event loop: short calls come between, what is given up keeps nothing, chores are carried through."""

from __future__ import annotations

import asyncio

import pytest
from kvcache.v1 import cache_pb2, lease_pb2

from cachesvc.flows.allocate import allocate
from cachesvc.flows.core import tidy
from cachesvc.flows.leases import open_lease, process_arrived, process_gone
from cachesvc.flows.match import match
from tests.unit.rigs.dispatch_rig import Desk, turns
from tests.unit.rigs.dispatch_rig import allocate as allocating
from tests.unit.rigs.dispatch_rig import match as matching
from tests.unit.rigs.ledger_rig import TOKEN, one_group, rig_of
from tests.unit.rigs.turns_rig import SMALL, full, own


def desk_of(pages: int) -> Desk:
    rig, _, _ = full(pages)
    return Desk(rig)


def test_a_short_call_is_served_between_any_two_turns() -> None:
    async def main() -> None:
        async with desk_of(16) as desk:
            a = desk.lease("a")
            beat = lease_pb2.KeepAliveRequest(lease_id=a)
            for number in (901, 902):
                desk.ask(desk.cache.match, cache_pb2.MatchRequest(lease_id=a, sequence_id=number))
            long = [
                desk.ask(desk.cache.allocate, cache_pb2.AllocateRequest(lease_id=a, sequence_id=number, blocks=8))
                for number in (901, 902)
            ]
            assert all(isinstance(each, asyncio.Future) for each in long)
            index, before = desk.rig.model.blocks.index, len(desk.rig.model.blocks.index)
            while not all(each.done() for each in long):
                await asyncio.sleep(0)
                assert before - len(index) <= SMALL.evicted, "one turn a round, however many want one"
                before = len(index)
                assert isinstance(desk.ask(desk.leases.keep_alive, beat), lease_pb2.KeepAliveResponse)
            assert all(isinstance(each.result(), cache_pb2.AllocateResponse) for each in long)

    asyncio.run(main())


def test_a_call_that_is_cancelled_between_turns_keeps_nothing_from_others() -> None:
    async def main() -> None:
        async with desk_of(8) as desk:
            a = desk.lease("a")
            desk.ask(desk.cache.match, cache_pb2.MatchRequest(lease_id=a, sequence_id=901))
            request = cache_pb2.AllocateRequest(lease_id=a, sequence_id=901, blocks=6)
            long = desk.ask(desk.cache.allocate, request)
            await turns(2)
            long.cancel()
            await turns()
            desk.rig.check()
            assert not desk.rig.place().reservations

    asyncio.run(main())


@pytest.mark.parametrize("waiting", [0, 64])
def test_a_step_that_may_not_wait_goes_on_in_turns(waiting: int) -> None:
    async def main() -> None:
        rig, _, _ = full(8)
        async with Desk(rig, waiting=waiting) as desk:
            a = desk.lease("a")
            step = desk.steps(a, matching(901, ""), allocating(901, 6), no_wait=True)
            response = await step
            assert [result.WhichOneof("result") for result in response.results] == ["match", "allocate"]

    asyncio.run(main())


def test_a_close_is_answered_when_the_pages_have_come_back() -> None:
    async def main() -> None:
        rig = rig_of(one_group(), device=(16,))
        async with Desk(rig) as desk:
            a = desk.lease("a")
            own(rig, a, 1, 16)
            rig.core.turns = SMALL
            closing = desk.ask(desk.leases.close, lease_pb2.CloseRequest(lease_id=a, quiesced=True))
            assert isinstance(await closing, lease_pb2.CloseResponse)
            assert rig.free() == [16]

    asyncio.run(main())


def test_a_chore_that_breaks_takes_its_model_out_of_service_and_the_next_one_goes_on() -> None:
    async def main() -> None:
        rig = rig_of(one_group(), device=(16,))
        async with Desk(rig) as desk:
            a, b = desk.lease("a"), desk.lease("b")
            own(rig, a, 1, 8)
            own(rig, b, 1, 8)
            rig.core.turns = SMALL
            rig.core.ledger.leases[a].stock[0].add(1 << 20)
            desk.node.run(process_gone, rig.core, TOKEN + b"a")
            desk.node.run(process_gone, rig.core, TOKEN + b"b")
            for _ in range(64):
                await asyncio.sleep(0)
            assert rig.model.suspect
            assert b not in rig.core.ledger.leases

    asyncio.run(main())


def test_background_work_of_a_process_is_not_behind_the_end_of_another_one_with_many_leases() -> None:
    """It has every second turn, however many leases end."""
    rig = rig_of(one_group(), device=(1024,))
    rig.core.turns = rig.core.turns._replace(pages=4, holds=1)
    dead = TOKEN + b"dead"
    process_arrived(rig.core, dead, 2, 1)
    for number in range(40):
        lease = open_lease(rig.core, rig.model.id, 0, "e", dead, number + 1, rig.now).id
        rig.run(match, lease, 1, b"", 0)
        rig.run(allocate, lease, 1, 12)
    chores, done = rig.core.chores, list[int]()

    def land_some() -> bool:
        done.append(len(done))
        return len(done) == 4

    process_gone(rig.core, dead)
    for _ in range(4):
        tidy(chores)
    assert len(chores) > 16, "its leases end, in turns"
    rig.core.begin(rig.model.id, land_some, at_once=False, party=(7, 7))
    for _ in range(8):
        tidy(chores)
    assert len(done) == 4
    while chores:
        tidy(chores)
    rig.check()
    assert not rig.core.ledger.leases
    assert rig.place().pools[0].free == 1024
