"""What a refusal costs does not grow with the transfers that others have under way."""

from __future__ import annotations

import pytest

from cachesvc.flows.allocate import allocate
from cachesvc.flows.call import resolve
from cachesvc.flows.match import match
from cachesvc.model.errors import PoolExhausted
from cachesvc.model.words import WritePolicy
from tests.unit.ledger_rig import one_group, rig_of, serve
from tests.unit.turns_rig import own
from tests.work import steps_of


def refused(backups: int) -> tuple[int, PoolExhausted]:
    """Steps of an Allocate on a full and pinned pool, beside so many backups of another replica; and its refusal."""
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
