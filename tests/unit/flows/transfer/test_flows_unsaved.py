"""Write-backs that keep failing: room is made without them, and they are tried again now and then."""

from __future__ import annotations

from cachesvc.flows.allocate import allocate
from cachesvc.flows.make_room import DRAIN_FAILURES, TRY_AGAIN_EVERY
from cachesvc.flows.match import match
from cachesvc.flows.recycle import release
from cachesvc.model.answers import Wait
from cachesvc.model.words import Direction
from tests.unit.rigs.ledger_rig import Rig, one_group, rig_of, serve

PAGES = 4


def allocate_all(rig: Rig, lease: str, number: int, error: str) -> int:
    """Open a sequence on nothing, take the whole pool, landing every store with ``error``; how many there were."""
    stores = 0
    rig.run(match, lease, number, b"", 0)
    while isinstance(rig.once(allocate, lease, number, PAGES), Wait):
        for ticket in list(rig.mover.transfers):
            assert rig.core.ledger.tickets.running[ticket].direction is Direction.STORE
            rig.land(ticket, error)
            stores += 1
    rig.run(release, lease, number)
    return stores


def test_a_caller_waits_for_a_bounded_number_of_failures_and_then_has_room() -> None:
    rig = rig_of(one_group(), device=(PAGES,), host=(64,))
    lease = rig.lease()
    serve(rig, lease, 1, "abcd")
    assert allocate_all(rig, lease, 2, "the link broke") == DRAIN_FAILURES
    assert rig.host_keys() == set()
    serve(rig, lease, 3, "efgh")
    assert allocate_all(rig, lease, 4, "the link broke") == 0, "what cannot be saved is dropped at once"


def test_what_works_again_is_saved_again() -> None:
    rig = rig_of(one_group(), device=(PAGES,), host=(64,))
    lease = rig.lease()
    serve(rig, lease, 1, "abcd")
    allocate_all(rig, lease, 2, "the link broke")
    tries = 0
    while not rig.host_keys():
        tries += 1
        serve(rig, lease, 2 * tries + 1, "abcd")
        allocate_all(rig, lease, 2 * tries + 2, "")
        assert tries <= TRY_AGAIN_EVERY
    serve(rig, lease, 1001, "wxyz")
    assert allocate_all(rig, lease, 1002, "") == 1, "and from then on at once"
    assert len(rig.host_keys()) == 2 * PAGES
