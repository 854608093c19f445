"""A turn is as short for a long request as for a short one, and what a whole flow costs grows with its request."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from cachesvc.flows.allocate import allocate, swap_out
from cachesvc.flows.core import Turns, resolve, tidy
from cachesvc.flows.leases import close_lease
from cachesvc.flows.match import match
from cachesvc.flows.publish import Publishing, publish
from cachesvc.flows.recycle import release
from cachesvc.flows.transfers import land
from cachesvc.model.answers import Wait
from cachesvc.model.words import DONE, Failed
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, rig_of
from tests.work import counted


def steps_by_turn(rig: Rig, run: Callable[[], object]) -> list[int]:
    """Interpreter steps of each turn of a flow, of landing what it waits for, and of the chores that either leaves."""
    out: list[int] = []

    def take_turn(turn: Callable[[], object]) -> object:
        with counted() as work:
            answer = turn()
        out.append(work.steps)
        while rig.core.chores:
            with counted() as work:
                tidy(rig.core.chores)
            out.append(work.steps)
        return answer

    answer: object = Wait(())
    while isinstance(answer, Wait):
        answer = take_turn(run)
        for ticket in list(rig.mover.transfers) if isinstance(answer, Wait) and answer.tickets else ():
            del rig.mover.transfers[ticket]
            take_turn(partial(land, rig.core, ticket, DONE))
    return out


def bare(rig: Rig, flow: Callable[..., Any], lease: str, *arguments: object) -> Callable[[], Any]:
    """A flow without the audit."""
    return lambda: flow(rig.core, resolve(rig.core.ledger, lease, 0.0), *arguments)


def evicting(blocks: int, host: int) -> list[int]:
    rig = rig_of(one_group(), device=(2 * blocks,), host=(host,))
    a = rig.lease("a")
    for number in range(2 * blocks // 64):
        keys = chain(*(f"{number} {at}" for at in range(64)))
        bare(rig, match, a, number + 1, keys, 0)()
        bare(rig, allocate, a, number + 1, 64)()
        bare(rig, publish, a, number + 1, 0, keys, 0)()
        bare(rig, release, a, number + 1)()
    bare(rig, match, a, 999, b"", 0)()
    return steps_by_turn(rig, bare(rig, allocate, a, 999, blocks))


def releasing(blocks: int) -> list[int]:
    rig = rig_of(one_group(), device=(blocks,))
    a = rig.lease("a")
    bare(rig, match, a, 1, b"", 0)()
    while isinstance(bare(rig, allocate, a, 1, blocks)(), Wait):
        pass
    return steps_by_turn(rig, bare(rig, release, a, 1))


def sealing(blocks: int) -> list[int]:
    rig = rig_of(one_group(), device=(blocks,))
    a, keys = rig.lease("a"), chain(*range(blocks))
    bare(rig, match, a, 1, keys, 0)()
    while isinstance(bare(rig, allocate, a, 1, blocks)(), Wait):
        pass
    return steps_by_turn(rig, bare(rig, publish, a, 1, 0, b"", blocks, Publishing()))


def losing(blocks: int) -> list[int]:
    rig = rig_of(one_group(), device=(blocks,))
    a = rig.lease("a")
    for number in range(blocks // 64):
        bare(rig, match, a, number + 1, b"", 0)()
        bare(rig, allocate, a, number + 1, 64)()
    return steps_by_turn(rig, lambda: close_lease(rig.core, a, quiesced=True))


def landing(outcome: Any) -> Callable[[int], list[int]]:
    def of(blocks: int) -> list[int]:
        rig = rig_of(one_group(), device=(blocks,), host=(blocks,))
        a, keys = rig.lease("a"), chain(*range(blocks))
        rig.core.turns = Turns(*[1 << 20] * len(Turns()))
        bare(rig, match, a, 1, keys, 0)()
        bare(rig, allocate, a, 1, blocks)()
        bare(rig, publish, a, 1, 0, b"", blocks)()
        bare(rig, swap_out, a, 1)()
        rig.core.turns = Turns()
        return steps_by_turn(rig, lambda: land(rig.core, rig.mover.transfers.popitem()[0], outcome))

    return of


FLOWS: dict[str, Callable[[int], list[int]]] = {
    "allocate evicts": lambda blocks: evicting(blocks, 0),
    "allocate drains": lambda blocks: evicting(blocks, 2 * blocks),
    "release": releasing,
    "publish": sealing,
    "lease closed": losing,
    "a backup lands": landing(DONE),
    "a backup failed": landing(Failed("broken")),
}


@pytest.mark.parametrize("flow", FLOWS)
def test_a_turn_is_as_short_for_a_long_request_and_the_whole_grows_with_it(flow: str) -> None:
    small, large = FLOWS[flow](512), FLOWS[flow](2048)
    assert len(large) > len(small) > 1, "both are cut"
    assert max(large) <= 1.35 * max(small), f"the longest turn: {max(small)} and {max(large)} steps"
    assert sum(large) <= 1.5 * 4 * sum(small), f"as a whole: {sum(small)} and {sum(large)} steps"
