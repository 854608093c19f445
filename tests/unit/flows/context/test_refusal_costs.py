"""A call's cost does not grow with what others do at the time: their transfers, computing, a full list."""

from __future__ import annotations

from functools import partial

import pytest

from cachesvc.flows.allocate import allocate
from cachesvc.flows.core import resolve, tidy_all
from cachesvc.flows.make_room import MOST_AWAITED
from cachesvc.flows.match import match, prefetch
from cachesvc.flows.pinning import evict
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import release
from cachesvc.flows.stored import MOST_WANTED, want
from cachesvc.model.answers import Matched, Wait
from cachesvc.model.errors import PoolExhausted
from cachesvc.model.words import WritePolicy
from tests.unit.rigs.ledger_rig import chain, one_group, rig_of, serve
from tests.unit.rigs.turns_rig import own
from tests.work import steps_of


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
