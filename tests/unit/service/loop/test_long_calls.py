"""Long calls of a process: one at a time, in order; none works for a caller whose deadline has passed."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from kvcache.v1 import cache_pb2
from kvcache.v1.cache_pb2 import OperationError, PublishResponse

from cachesvc.model.errors import ErrorCode
from tests.unit.rigs.dispatch_rig import Desk
from tests.unit.rigs.ledger_rig import chain, one_group, rig_of
from tests.unit.rigs.turns_rig import SMALL

BLOCKS = 16
"""Blocks of a long publish: eight turns of ``SMALL``."""


def fill(desk: Desk, lease: str, sequence: int, blocks: int = BLOCKS) -> None:
    """Open a sequence with pages for blocks that no other sequence computes."""
    keys = chain(*(f"{lease} {sequence} {block}" for block in range(blocks)))
    desk.ask(desk.cache.match, cache_pb2.MatchRequest(lease_id=lease, sequence_id=sequence, keys=keys))
    desk.ask(desk.cache.allocate, cache_pb2.AllocateRequest(lease_id=lease, sequence_id=sequence, blocks=blocks))


def publish(desk: Desk, lease: str, sequence: int, blocks: int = BLOCKS, **about: Any) -> Any:
    request = cache_pb2.PublishRequest(lease_id=lease, request_id=sequence, sequence_id=sequence, blocks=blocks)
    return desk.ask(desk.cache.publish, request, **about)


def sealed(desk: Desk, lease: str) -> list[int]:
    """Sealed blocks of each sequence."""
    return [each.sealed for each in desk.rig.core.ledger.leases[lease].sequences.values()]


def desk_with(count: int, blocks: int = BLOCKS, *, names: str = "a") -> tuple[Desk, list[str]]:
    """A desk, and leases with ``count`` sequences each."""
    desk = Desk(rig_of(one_group(), device=(len(names) * count * blocks,)))
    leases = [desk.lease(name) for name in names]
    for lease, number in itertools.product(leases, range(1, count + 1)):
        fill(desk, lease, number, blocks)
    desk.rig.core.turns = SMALL
    return desk, leases


async def test_long_calls_of_a_process_end_in_the_order_in_which_they_came() -> None:
    desk, [a] = desk_with(6)
    async with desk:
        long = [publish(desk, a, number) for number in range(1, 7)]
        assert sealed(desk, a) == [0] * 6, "none has begun before its turn"
        while not all(each.done() for each in long):
            await asyncio.sleep(0)
            assert sum(0 < each < BLOCKS for each in sealed(desk, a)) <= 1, "one is under way"
            ended = [each.done() for each in long]
            assert ended == sorted(ended, reverse=True)
        assert all(isinstance(each.result(), PublishResponse) for each in long)
        desk.rig.check()


async def test_long_calls_of_two_processes_share_the_turns() -> None:
    desk, [a, b] = desk_with(4, names="ab")
    async with desk:
        long = [publish(desk, lease, number) for lease in (a, b) for number in range(1, 5)]
        await long[4]
        assert sum(sealed(desk, a)) <= BLOCKS + 4, "the other has had as many turns"
        await asyncio.gather(*long)


async def test_a_short_call_does_not_wait_for_the_long_ones_of_its_process() -> None:
    desk, [a] = desk_with(6)
    async with desk:
        for number in range(1, 6):
            publish(desk, a, number)
        assert isinstance(await publish(desk, a, 6, blocks=6), PublishResponse)
        assert sum(sealed(desk, a)[:5]) < BLOCKS


async def test_a_call_whose_deadline_passes_before_its_turn_does_no_work() -> None:
    desk, [a] = desk_with(3)
    async with desk:
        first = publish(desk, a, 1)
        late = publish(desk, a, 2, seconds=0.0)
        outcome = await late
        assert isinstance(outcome, OperationError)
        assert outcome.code == ErrorCode.DEADLINE.value
        assert "send fewer long calls" in outcome.message
        await first
        assert sealed(desk, a) == [BLOCKS, 0, 0]
        assert isinstance(await publish(desk, a, 2), PublishResponse), "the same again"


async def test_a_call_that_is_cancelled_before_its_turn_does_no_work_and_the_next_goes_on() -> None:
    desk, [a] = desk_with(3)
    async with desk:
        first, second, third = (publish(desk, a, number) for number in range(1, 4))
        await asyncio.sleep(0)
        assert second.cancel()
        await asyncio.gather(first, third)
        assert sealed(desk, a) == [BLOCKS, 0, BLOCKS]


async def test_calls_that_cannot_end_in_time_are_refused_before_they_begin() -> None:
    blocks = 128
    desk, [a] = desk_with(8, blocks)
    async with desk:
        clock = itertools.count()
        desk.node.now = lambda: next(clock) * 0.01  # each look at it is 10 ms later
        long = [publish(desk, a, number, blocks, seconds=12.0) for number in range(1, 9)]
        outcomes = await asyncio.gather(*long)
        refused = [isinstance(each, OperationError) for each in outcomes]
        assert not refused[0]
        assert refused[-1]
        assert refused == sorted(refused), "the last ones"
        error = outcomes[-1]
        assert error.code == ErrorCode.LIMIT.value
        facts = {fact.name: fact.number for fact in error.facts}
        assert facts["got"] > facts["limit"]
        assert set(sealed(desk, a)) == {0, blocks}, "no work for a call that was refused"
