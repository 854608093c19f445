"""A turn is as short for a long request as for a short one, and what a whole flow costs grows with its request."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from cachesvc.flows.allocate import allocate, swap_in, swap_out
from cachesvc.flows.core import Turns, resolve, tidy, tidy_all
from cachesvc.flows.leases import close_lease
from cachesvc.flows.make_room import MOST_AWAITED
from cachesvc.flows.match import match, prefetch
from cachesvc.flows.pinning import evict
from cachesvc.flows.publish import Publishing, publish
from cachesvc.flows.recycle import recycle, release
from cachesvc.flows.stored import MOST_WANTED, want
from cachesvc.flows.transfers import land
from cachesvc.model.answers import GroupCells, Matched, Wait
from cachesvc.model.errors import PoolExhausted
from cachesvc.model.words import DONE, Failed, WritePolicy
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, rig_of, serve
from tests.unit.rigs.turns_rig import own
from tests.work import counted, steps_of


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


# A call's cost does not grow with what others do at the time: their transfers, computing, a full list.


def refused(backups: int) -> tuple[int, PoolExhausted]:
    """Steps of an Allocate on a full and pinned pool, beside ``backups`` backups of another one, and its refusal."""
    rig = rig_of(one_group(), device=(256,), host=(512,), policy=WritePolicy.WRITE_THROUGH, replicas=2)
    a, b = rig.lease("a", 0), rig.lease("b", 1)
    own(rig, b, 1, 256)
    rig.run(match, b, 2, b"", 0)
    for number in range(backups):
        serve(rig, a, number + 1, [number, "x"])
    assert len(rig.core.ledger.tickets.running) == backups
    told: list[PoolExhausted] = []

    def ask() -> None:
        with pytest.raises(PoolExhausted) as refusal:
            allocate(rig.core, resolve(rig.core.ledger, b, 0.0), 2, 4)
        told.append(refusal.value)

    ask()
    return steps_of(ask), told[0]


def test_a_refused_allocate_does_not_look_at_every_transfer_of_other_replicas() -> None:
    (few, first), (many, last) = refused(8), refused(120)
    assert many - few < 8 * 10
    assert str(first) == str(last)


def beside_loads(loads: int, blocks: int) -> tuple[int, Wait | PoolExhausted]:
    """Steps of an Allocate of ``blocks`` on a full pool, beside ``loads`` prefetches of another lease of its replica;
    and its answer."""
    rig = rig_of(one_group(), device=(512,), host=(512,), policy=WritePolicy.WRITE_THROUGH)
    a, b = rig.lease("a"), rig.lease("b")
    call = partial(resolve, rig.core.ledger)
    for number in range(loads):  # without the audit of each step
        match(rig.core, call(a, 0.0), 1, chain(number), 0)
        allocate(rig.core, call(a, 0.0), 1, 1)
        publish(rig.core, call(a, 0.0), 1, 0, b"", 1)
        release(rig.core, call(a, 0.0), 1)
    for ticket in list(rig.mover.transfers):
        del rig.mover.transfers[ticket]
        rig.land_unchecked(ticket)
    tidy_all(rig.core)
    evict(rig.core, rig.model.id, "device", 0)
    for number in range(loads):
        prefetch(rig.core, call(a, 0.0), chain(number))
    assert len(rig.core.ledger.tickets.running) == loads
    own(rig, b, 1, rig.place().pools[0].free)
    rig.run(match, b, 2, b"", 0)
    told: list[Wait | PoolExhausted] = []

    def ask() -> None:
        try:
            answer = allocate(rig.core, call(b, 0.0), 2, blocks)
            assert isinstance(answer, Wait)
            told.append(answer)
        except PoolExhausted as refusal:
            told.append(refusal)

    ask()
    return steps_of(ask), told[0]


def test_a_refused_allocate_does_not_look_at_each_load_of_its_replica() -> None:
    """Each prefetch of another engine cost each refusal 140 steps: 5 ms of the loop beside 1,500 of them."""
    (few, first), (many, last) = beside_loads(8, 1000), beside_loads(128, 1000)
    assert isinstance(first, PoolExhausted)
    assert isinstance(last, PoolExhausted)
    assert many - few < 4 * 120


def test_a_call_waits_for_some_of_the_transfers_that_may_help_it() -> None:
    _, answer = beside_loads(MOST_AWAITED + 40, 4)
    assert isinstance(answer, Wait)
    assert len(answer.tickets) == MOST_AWAITED
    assert answer.tickets == tuple(sorted(answer.tickets)), "the oldest"


def test_what_others_compute_is_not_looked_at_block_by_block() -> None:
    steps: dict[int, int] = {}
    for blocks in (128, 2048):
        rig = rig_of(one_group(), device=(2048,))
        a, b = rig.lease("a"), rig.lease("b")
        keys = chain(*range(blocks))
        match(rig.core, resolve(rig.core.ledger, a, 0.0), 1, keys, 0)
        while isinstance(allocate(rig.core, resolve(rig.core.ledger, a, 0.0), 1, blocks), Wait):
            pass
        call = resolve(rig.core.ledger, b, 0.0)
        steps[blocks] = steps_of(partial(match, rig.core, call, 1, keys, 0))
        again = match(rig.core, call, 2, keys, 0)
        assert isinstance(again, Matched)
        assert again.computing_blocks == blocks
    assert steps[2048] - steps[128] < 2048 - 128, "less than one a block"


def test_a_full_list_of_wanted_blocks_costs_a_landing_nothing() -> None:
    rig = rig_of(one_group(), device=(64,))
    serve(rig, rig.lease("a"), 1, range(64))
    rows = list(rig.model.blocks.index.rows.values())
    rig.model.stored.wanted.extend(number.to_bytes(32, "big") for number in range(MOST_WANTED))
    assert steps_of(partial(want, rig.core, rig.model, rows)) < 100
    assert len(rig.model.stored.wanted) == MOST_WANTED


# Calls that begin work for thousands of blocks take as many interpreter steps as for hundreds: a swap, a load, and the
# answer of a large allocation go by columns, not block by block.


def rig_with(blocks: int) -> tuple[Rig, str]:
    rig = rig_of(one_group(), device=(2 * blocks,), host=(2 * blocks,))
    rig.core.turns = Turns(*[1 << 20] * len(Turns()))
    return rig, rig.lease("a")


def steps_at_start(run: Callable[[], object]) -> int:
    with counted() as work:
        answer = run()
    assert not isinstance(answer, Wait)
    return work.steps


def begun_alone(rig: Rig, lease: str, blocks: int) -> None:
    bare(rig, match, lease, 1, b"", 0)()
    bare(rig, allocate, lease, 1, blocks)()


def shared(rig: Rig, lease: str, blocks: int) -> bytes:
    keys = chain(*range(blocks))
    bare(rig, match, lease, 1, keys, 0)()
    bare(rig, allocate, lease, 1, blocks)()
    bare(rig, publish, lease, 1, 0, b"", blocks)()
    return keys


def out_of_own(blocks: int) -> int:
    rig, a = rig_with(blocks)
    begun_alone(rig, a, blocks)
    return steps_at_start(bare(rig, swap_out, a, 1))


def in_of_own(blocks: int) -> int:
    rig, a = rig_with(blocks)
    begun_alone(rig, a, blocks)
    bare(rig, swap_out, a, 1)()
    rig.settle()
    return steps_at_start(bare(rig, swap_in, a, 1))


def out_of_shared(blocks: int) -> int:
    rig, a = rig_with(blocks)
    shared(rig, a, blocks)
    return steps_at_start(bare(rig, swap_out, a, 1))


def on_host(blocks: int) -> tuple[Rig, str, bytes]:
    rig, a = rig_with(blocks)
    keys = shared(rig, a, blocks)
    bare(rig, swap_out, a, 1)()
    rig.settle()
    evict(rig.core, rig.model.id, "device", 0)
    return rig, a, keys


def in_of_shared(blocks: int) -> int:
    rig, a, _ = on_host(blocks)
    return steps_at_start(bare(rig, swap_in, a, 1))


def match_on_host(blocks: int) -> int:
    rig, a, keys = on_host(blocks)
    return steps_at_start(bare(rig, match, a, 2, keys, 0))


def load(blocks: int) -> int:
    rig, a, keys = on_host(blocks)
    bare(rig, match, a, 2, keys, 0)()
    return steps_at_start(bare(rig, allocate, a, 2, blocks))


def fetch(blocks: int) -> int:
    rig, a, keys = on_host(blocks)
    return steps_at_start(bare(rig, prefetch, a, keys))


def stock_back(blocks: int) -> int:
    rig, a = rig_with(blocks)
    lease = rig.core.ledger.leases[a]
    pages = lease.grant(0, rig.place().pools[0], blocks)
    return steps_at_start(bare(rig, recycle, a, 0, 0, (GroupCells(0, 0, pages),)))


STARTS: dict[str, Callable[[int], int]] = {
    "swap out, begun_alone": out_of_own,
    "swap in, begun_alone": in_of_own,
    "swap out, shared": out_of_shared,
    "swap in, shared": in_of_shared,
    "match on the host": match_on_host,
    "load": load,
    "prefetch": fetch,
    "stock given back": stock_back,
}


@pytest.mark.parametrize("start", STARTS)
def test_a_start_takes_no_step_a_block(start: str) -> None:
    small, large = STARTS[start](512), STARTS[start](2048)
    assert large - small < 512, f"{small} steps for 512 blocks, {large} for 2,048"
