"""A call's cost does not grow with what others do at the time: their transfers, computing, a full list."""

from __future__ import annotations

from functools import partial

import pytest

from cachesvc.flows.context.call import resolve
from cachesvc.flows.engine.allocate import allocate
from cachesvc.flows.engine.match import match
from cachesvc.flows.transfer.pending_writes import MOST_WANTED, want
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
