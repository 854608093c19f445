"""The line of long work: one turn in each round of the loop, round robin by party."""

from __future__ import annotations

import asyncio
from functools import partial

from kvcache.v1 import cache_pb2

from cachesvc.flows.core import resolve, tidy
from cachesvc.flows.leases import LEASES_A_TURN, SEQUENCES_A_TURN, lose_silent, process_gone
from cachesvc.flows.match import match
from cachesvc.ledger.ledger import LeaseState
from cachesvc.ledger.page_pool import Reservation
from cachesvc.model.words import PageState
from cachesvc.service.loop.line import BACKGROUND, Line, Sleeper
from cachesvc.service.loop.node import LANDINGS
from tests.unit.rigs.dispatch_rig import Desk, turns
from tests.unit.rigs.ledger_rig import TOKEN, chain, one_group, rig_of
from tests.unit.rigs.turns_rig import SMALL, own


def test_a_party_with_one_turn_waits_for_one_of_another_with_many() -> None:
    async def main() -> None:
        line, taken = Line(), list[str]()
        for number in range(100):
            line.add("a", partial(taken.append, f"a{number}"))
        line.add("b", partial(taken.append, "b0"))
        line.add(BACKGROUND, partial(taken.append, "chore"))
        line.add("b", partial(taken.append, "b1"))
        rounds = 0
        while not line.is_empty:
            await asyncio.sleep(0)
            rounds += 1
            assert len(taken) <= rounds, "one turn a round"
        assert taken[:6] == ["a0", "b0", "chore", "a1", "b1", "a2"]
        assert len(taken) == 103

    asyncio.run(main())


def test_the_first_turn_of_a_round_is_taken_at_once_and_the_next_lines_up() -> None:
    async def main() -> None:
        line, taken = Line(), list[int]()
        for number in range(3):
            line.take("a", partial(taken.append, number))
        assert taken == [0]
        await asyncio.sleep(0)
        assert taken == [0, 1]
        await asyncio.sleep(0)
        line.take("a", partial(taken.append, 3))
        assert taken == [0, 1, 2], "the round has had its turn"
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        line.take("a", partial(taken.append, 4))
        assert taken == [0, 1, 2, 3, 4]

    asyncio.run(main())


def test_a_call_that_many_things_rouse_takes_one_turn() -> None:
    async def main() -> None:
        line, taken = Line(), list[int]()
        line.take("b", lambda: None)
        sleeper = Sleeper(line, "a")
        for _ in range(1000):
            sleeper.rouse()
        line.add("a", partial(taken.append, 1))
        await asyncio.sleep(0)
        assert sleeper.future.done()
        await asyncio.sleep(0)
        assert taken == [1]

    asyncio.run(main())


def test_a_long_call_comes_to_its_turns_beside_many_long_ones_of_another_process() -> None:
    async def main() -> None:
        rig = rig_of(one_group(), device=(400,))
        async with Desk(rig, calls=64) as desk:
            a, b = desk.lease("a"), desk.lease("b")
            for number in range(30):
                keys = chain(*(f"{number} {block}" for block in range(8)))
                match = cache_pb2.MatchRequest(lease_id=a, sequence_id=number + 1, keys=keys)
                desk.ask(desk.cache.match, match)
                own_blocks = cache_pb2.AllocateRequest(lease_id=a, sequence_id=number + 1, blocks=8)
                desk.ask(desk.cache.allocate, own_blocks)
            desk.ask(desk.cache.match, cache_pb2.MatchRequest(lease_id=b, sequence_id=1, keys=chain(*"stuvwxyz")))
            desk.ask(desk.cache.allocate, cache_pb2.AllocateRequest(lease_id=b, sequence_id=1, blocks=8))
            rig.core.turns = SMALL
            asks = [(a, number + 1) for number in range(30)] + [(b, 1)]
            long = [
                desk.ask(
                    desk.cache.publish,
                    cache_pb2.PublishRequest(lease_id=lease, sequence_id=number, blocks=8),
                )
                for lease, number in asks
            ]
            assert desk.admission.work.held == len(long), "each has a place among those that work"
            await long[-1]
            assert sum(each.done() for each in long[:-1]) <= 2
            await asyncio.gather(*long)

    asyncio.run(main())


def test_transfers_that_end_together_land_in_turns_and_wake_their_calls_one_by_one() -> None:
    async def main() -> None:
        rig = rig_of(one_group(), device=(64,), host=(64,))
        async with Desk(rig) as desk:
            a = desk.lease("a")
            for number in range(24):
                desk.fill(a, number + 1, "", blocks=1)
            tickets = [desk.swap_out(a, number + 1) for number in range(24)]
            first = cache_pb2.WaitTicketsRequest(lease_id=a, tickets=tickets[:1], wait_ms=60_000)
            waiting = [desk.ask(desk.cache.wait_tickets, first) for _ in range(6)]
            await asyncio.sleep(0)
            running, left = rig.core.ledger.tickets.running, len(tickets)
            for ticket in tickets:
                del rig.mover.transfers[ticket]
                desk.node.on_transfer_done(ticket, None)
            answered = 0
            while running or answered < len(waiting):
                await asyncio.sleep(0)
                assert left - len(running) <= LANDINGS, "no more than a turn's in one round"
                left = len(running)
                now = sum(each.done() for each in waiting)
                assert now - answered <= 1, "one call wakes up a round"
                answered = now
            rig.check()

    asyncio.run(main())


def test_leases_that_end_together_are_torn_down_in_turns() -> None:
    for is_silent in (False, True):
        rig = rig_of(one_group(), device=(64,))
        names = [rig.lease("a") for _ in range(16)]
        for name in names:
            own(rig, name, 1, 4)
        rig.core.turns = SMALL._replace(pages=4, holds=4)
        if is_silent:
            lose_silent(rig.core, 1.0, 1e9)
        else:
            process_gone(rig.core, TOKEN + b"a")
        assert rig.place().pools[0].counts[PageState.PRIVATE] >= 60, "one lease has had a turn"
        while rig.core.chores:
            tidy(rig.core.chores)
            rig.check()


def test_pages_that_are_kept_for_a_lost_lease_are_free_at_once() -> None:
    rig = rig_of(one_group(), device=(64,))
    for _ in range(3):
        lease = rig.core.ledger.leases[rig.lease("a")]
        own(rig, lease.id, 1, 4)
        lease.room = Reservation(rig.place().reservations, rig.place().pools)
        lease.room.keep([4], 60.0)
    process_gone(rig.core, TOKEN + b"a")
    assert not rig.place().reservations
    rig.check()


def test_many_leases_of_a_process_are_lost_some_in_each_turn() -> None:
    rig = rig_of(one_group(), device=(64,))
    count = 3 * LEASES_A_TURN
    for _ in range(count):
        rig.lease("a")
    leases = rig.core.ledger.leases
    process_gone(rig.core, TOKEN + b"a")
    before = sum(lease.state is LeaseState.LIVE for lease in leases.values())
    assert before == count - LEASES_A_TURN
    while rig.core.chores:
        tidy(rig.core.chores)
        now = sum(lease.state is LeaseState.LIVE for lease in leases.values())
        assert before - now <= LEASES_A_TURN
        before = now
        rig.check()
    assert not leases
    assert rig.free() == [64]


def test_many_leases_that_fell_silent_are_lost_some_in_each_turn() -> None:
    rig = rig_of(one_group(), device=(64,))
    for _ in range(LEASES_A_TURN + 1):
        rig.lease("a")
    assert len(lose_silent(rig.core, 1.0, 1e9)) == LEASES_A_TURN
    assert len(lose_silent(rig.core, 1.0, 1e9)) == 1
    assert lose_silent(rig.core, 1.0, 1e9) == []


def test_a_turn_tells_what_a_killed_process_held_of_the_leases_that_it_ends() -> None:
    """All of them in one go were 512 lines of the log, and a look at each sequence, before any other call."""
    rig = rig_of(one_group(), device=(64,))
    told: list[int] = []
    rig.core.on_left = lambda lease: told.append(len(lease.sequences))
    for _ in range(2 * LEASES_A_TURN):
        own(rig, rig.lease("a"), 1, 1)
    process_gone(rig.core, TOKEN + b"a")
    while rig.core.chores:
        before = len(told)
        tidy(rig.core.chores)
        assert len(told) - before <= LEASES_A_TURN
    assert told == [1] * 2 * LEASES_A_TURN, "each while it holds what the process held"


def test_leases_with_many_sequences_are_fewer_to_a_turn() -> None:
    rig = rig_of(one_group(), device=(64,))
    told: list[str] = []
    rig.core.on_left = lambda lease: told.append(lease.id)
    for _ in range(3):
        lease = rig.lease("a")
        for number in range(SEQUENCES_A_TURN + 1):
            match(rig.core, resolve(rig.core.ledger, lease, 0.0), number + 1, b"", 0)
    process_gone(rig.core, TOKEN + b"a")
    assert len(told) == 1


async def test_the_sweep_loses_all_leases_that_fell_silent() -> None:
    rig = rig_of(one_group(), device=(64,))
    names = [rig.lease("a") for _ in range(2 * LEASES_A_TURN + 1)]
    async with Desk(rig) as desk:
        desk.node.now = lambda: 1e9
        while any(rig.core.ledger.leases[name].state is LeaseState.LIVE for name in names):
            await turns(1)
