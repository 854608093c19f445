"""Turns of a Step by columns: as short where entries are not straight, or make room on the host, as anywhere."""

from __future__ import annotations

import asyncio
from typing import Any

from kvcache.v1 import cache_pb2

from cachesvc.flows.core import Count
from cachesvc.model.words import WritePolicy
from cachesvc.service.calls.dispatcher import INTERNAL
from cachesvc.service.rpc.steps import TURN_BLOCKS
from cachesvc.wire.columns import ODD
from tests.unit.rigs.dispatch_rig import Desk
from tests.unit.rigs.ledger_rig import chain, one_group, rig_of
from tests.unit.service.rpc.test_step_columns import GROW, granted, longs, odd, publish, told
from tests.work import counted


def prompts_of(count: int, first: int = 1) -> dict[int, str]:
    return {number: chr(0x100 + number) for number in range(first, first + count)}


async def first_turn_of_duplicates(count: int) -> int:
    """Interpreter steps until others have their turn, where another engine was faster with each block."""
    async with Desk(rig_of(one_group(), device=(2 * count,), host=(0,))) as desk:
        a, b = desk.lease("a"), desk.lease("b")
        prompts = prompts_of(count)
        for lease in (a, b):
            for number, prompt in prompts.items():
                desk.fill(lease, number, prompt)
        first = desk.steps(b, columns=publish(prompts))
        if isinstance(first, asyncio.Future):
            await first
        with counted() as work:
            served = desk.steps(a, columns=publish(prompts))
        answer = await served
        assert len(odd(answer)) == count
        desk.rig.check()
        return work.steps


async def test_what_is_not_straight_costs_the_same_however_many_are_behind_it() -> None:
    """But for reading them out of the message: 1.26 times as much for 256 as for 80, and it was 1.52."""
    few, many = await first_turn_of_duplicates(80), await first_turn_of_duplicates(256)
    assert many <= 1.4 * few


async def test_blocks_that_a_step_seals_are_backed_up_by_one_transfer() -> None:
    async with Desk(rig_of(one_group(), device=(64,), host=(64,), policy=WritePolicy.WRITE_THROUGH)) as desk:
        lease, prompts = desk.lease(), prompts_of(24)
        for number, prompt in prompts.items():
            desk.fill(lease, number, prompt)
        assert odd(desk.steps(lease, columns=publish(prompts))) == []
        [ticket] = desk.rig.mover.transfers
        await desk.land(ticket)
        assert len(desk.rig.host_keys()) == 24
        desk.rig.check()


async def test_a_turn_evicts_no_more_on_the_host_than_any_other() -> None:
    count = 96
    async with Desk(rig_of(one_group(), device=(200,), host=(count,), policy=WritePolicy.WRITE_THROUGH)) as desk:
        lease, evicted = desk.lease(), []
        for prompts in (prompts_of(count), prompts_of(count, count + 1)):
            for number, prompt in prompts.items():
                desk.fill(lease, number, prompt)
            served = desk.steps(lease, columns=publish(prompts))
            evicted.append(desk.rig.core.counters.get(Count.HOST_EVICTIONS.value, 0))
            answer = await served if isinstance(served, asyncio.Future) else served
            assert odd(answer) == []
            for ticket in list(desk.rig.mover.transfers):
                await desk.land(ticket)
        assert evicted == [0, desk.rig.core.turns.evicted]
        assert desk.rig.host_keys() == {chain(*prompt) for prompt in prompts.values()}
        desk.rig.check()


async def test_steps_of_many_engines_take_one_turn_each_time_round_the_loop() -> None:
    count = 3 * TURN_BLOCKS
    async with Desk(rig_of(one_group(), device=(2 * count,), host=(0,))) as desk:
        index, served = desk.rig.model.blocks.index, []
        for first in (1, count + 1):
            lease, prompts = desk.lease(str(first)), prompts_of(count, first)
            for number, prompt in prompts.items():
                desk.fill(lease, number, prompt)
            served.append(desk.steps(lease, columns=publish(prompts)))
        while not all(step.done() for step in served):
            before = len(index)
            await asyncio.sleep(0)
            assert len(index) - before <= TURN_BLOCKS
        assert len(index) == 2 * count


async def test_a_defect_in_growth_is_told_of_entries_that_there_are() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        for number in (1, 2):
            desk.fill(lease, number, "ab")
        columns = cache_pb2.StepColumns(grow_sequences=longs(1, 2), grow=granted(desk, lease, 2))
        held: Any = desk.rig.core.ledger.leases[lease].sequences[2]
        held.own = [None]
        answer = desk.steps(lease, columns=columns)
        assert told(answer.columns.grown_blocks) == [ODD, ODD]
        assert odd(answer) == [(GROW, 0, INTERNAL), (GROW, 1, "UNAVAILABLE")]
