"""Awaited transfers: backups and prefetches are background until a flow waits for them."""

from __future__ import annotations

import pytest

from cachesvc.flows import pinning
from cachesvc.flows.allocate import allocate, swap_in, swap_out
from cachesvc.flows.leases import close_lease, pause_write_backs
from cachesvc.flows.match import match, prefetch
from cachesvc.flows.transfers import expedite
from cachesvc.model.answers import Wait
from cachesvc.model.errors import InvalidRequest, LeaseLost, NotFound
from cachesvc.model.words import Direction, Urgency, WritePolicy
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, prefill, rig_of, serve

LOAD, STORE = Direction
AWAITED, BACKGROUND = Urgency


def hosted(prompt: str, *, device: int = 16) -> Rig:
    """A rig whose host alone holds ``prompt``, with nothing under way."""
    rig = rig_of(one_group(), device=(device,), host=(32,), policy=WritePolicy.WRITE_THROUGH)
    serve(rig, rig.lease("first"), 1, prompt)
    rig.settle()
    pinning.evict(rig.core, 1, "device", 0)
    rig.mover.all.clear()
    return rig


def sent(rig: Rig) -> list[tuple[Direction, Urgency]]:
    return [(transfer.direction, transfer.urgency) for transfer in rig.mover.all]


def test_backups_are_background_and_loads_of_an_allocate_are_awaited() -> None:
    rig = rig_of(one_group(), device=(16,), host=(32,), policy=WritePolicy.WRITE_THROUGH)
    serve(rig, rig.lease(), 1, "ab")
    assert sent(rig) == [(STORE, BACKGROUND)]
    rig = hosted("ab")
    a = rig.lease()
    rig.run(match, a, 1, chain(*"abc"), 0)
    rig.run(allocate, a, 1, 3)
    assert sent(rig) == [(LOAD, AWAITED)]
    assert rig.mover.expedited == []


def test_swaps_and_evictions_are_awaited() -> None:
    rig = rig_of(one_group(), device=(4,), host=(32,))
    a = rig.lease()
    prefill(rig, a, 1, "ab")
    rig.run(allocate, a, 1, 3)
    rig.run(swap_out, a, 1)
    rig.settle()
    rig.run(swap_in, a, 1)
    rig.settle()
    assert sent(rig) == [(STORE, AWAITED), (LOAD, AWAITED)]
    rig = rig_of(one_group(), device=(4,), host=(32,))
    a = rig.lease()
    serve(rig, a, 1, "abcd")
    rig.run(match, a, 2, chain(*"xyz"), 0)
    assert isinstance(rig.once(allocate, a, 2, 3), Wait)
    assert sent(rig) == [(STORE, AWAITED)]


def test_who_joins_a_prefetch_expedites_it_once_and_another_prefetch_does_not() -> None:
    rig = hosted("abcd")
    a = rig.lease()
    rig.run(prefetch, a, chain(*"ab"))
    rig.run(prefetch, a, chain(*"abc"))
    assert sent(rig) == [(LOAD, BACKGROUND)] * 2
    first, second = (transfer.ticket for transfer in rig.mover.all)
    assert rig.mover.expedited == []
    rig.run(match, a, 1, chain(*"abcd"), 0)
    rig.run(allocate, a, 1, 4)
    assert rig.mover.expedited == [first, second]
    assert sent(rig)[2:] == [(LOAD, AWAITED)]
    rig.run(match, a, 2, chain(*"abcd"), 0)
    rig.run(allocate, a, 2, 4)
    assert rig.mover.expedited == [first, second]


def test_who_waits_for_a_ticket_waits_for_those_above_it() -> None:
    rig = hosted("abc")
    a = rig.lease()
    rig.run(prefetch, a, chain(*"ab"))
    rig.run(prefetch, a, chain(*"abc"))
    first, second = (transfer.ticket for transfer in rig.mover.all)
    expedite(rig.core, [second, 999])
    assert rig.mover.expedited == [second, first]


def test_an_allocate_that_waits_for_a_backup_expedites_it() -> None:
    rig = rig_of(one_group(), device=(4,), host=(32,), policy=WritePolicy.WRITE_THROUGH)
    a = rig.lease()
    serve(rig, a, 1, "abcd")
    [backup] = rig.mover.all
    rig.run(match, a, 2, chain(*"xyz"), 0)
    assert isinstance(rig.once(allocate, a, 2, 3), Wait)
    assert rig.mover.expedited == [backup.ticket]
    assert rig.core.ledger.tickets.running[backup.ticket].urgency is AWAITED


def test_a_swap_that_waits_for_a_backup_expedites_it() -> None:
    rig = rig_of(one_group(), device=(8,), host=(32,), policy=WritePolicy.WRITE_THROUGH)
    a = rig.lease()
    prefill(rig, a, 1, "abcd")
    [backup] = rig.mover.all
    assert isinstance(rig.once(swap_out, a, 1), Wait)
    assert rig.mover.expedited == [backup.ticket]


def test_a_pause_is_for_the_devices_of_the_lease_alone_and_never_long() -> None:
    rig = rig_of(one_group(), device=(4,), replicas=2)
    a = rig.lease("a", replica=1)
    rig.once(pause_write_backs, a, 1000)
    assert rig.mover.pauses == [(("gpu-1",), 1.0)]
    with pytest.raises(InvalidRequest, match="at most 1000 ms at a time, not 1001"):
        rig.once(pause_write_backs, a, 1001)
    with pytest.raises(NotFound):
        rig.once(pause_write_backs, "unknown", 10)
    close_lease(rig.core, a, quiesced=False)
    with pytest.raises(LeaseLost):
        rig.once(pause_write_backs, a, 10)
    assert len(rig.mover.pauses) == 1
