"""A defect of the daemon's own half-way through a change: the model is out of service, and the others go on."""

from __future__ import annotations

import pytest

from cachesvc.flows.allocate import allocate
from cachesvc.flows.core import tidy_all
from cachesvc.flows.leases import lose_silent, open_lease, process_gone
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import release
from cachesvc.flows.registration import RegisterRequest, register
from cachesvc.ledger.ledger import LeaseState
from cachesvc.model.errors import LedgerBroken, Unavailable
from tests.unit.rigs.ledger_rig import TOKEN, Rig, chain, one_group, prefill, rig_of


def test_nothing_is_served_of_a_model_out_of_service_until_it_is_trusted() -> None:
    rig = rig_of(one_group(), device=(8,))
    a = rig.lease()
    prefill(rig, a, 1, "ab")
    rig.model.distrust("row 7 is not pinned")
    rig.model.distrust("and another thing")
    says = r"model 1 is out of service until it is verified: row 7 is not pinned; go on without the cache"
    calls = ((match, a, 2, chain("a"), 0), (allocate, a, 1, 3), (publish, a, 1, 2, b"", 0), (release, a, 1))
    for flow, *arguments in calls:
        with pytest.raises(Unavailable, match=says):
            rig.run(flow, *arguments)
    with pytest.raises(Unavailable, match=says):
        open_lease(rig.core, 1, 0, "b", TOKEN + b"a", 0, 0.0)
    with pytest.raises(Unavailable, match=says):
        register(rig.core, rig.vault, RegisterRequest("m", one_group()), 0.0)
    rig.model.suspect = ""
    assert rig.run(match, a, 2, chain(*"ab"), 0).device_blocks == 2


def broken(rig: Rig, lease: str) -> None:
    """The daemon has lost a pin that a sequence of the lease has."""
    rig.model.blocks.unpin(rig.place(), rig.core.ledger.leases[lease].sequences[1].anchor)


def test_a_lease_whose_end_breaks_is_lost_and_takes_its_model_out_of_service_and_nobody_with_it() -> None:
    """The first broken lease ended the sweep, so no silent engine of the node was lost any more."""
    rig = rig_of(one_group(), device=(16,))
    a, b = rig.lease("a"), rig.lease("b")
    prefill(rig, a, 1, "ab")
    prefill(rig, b, 1, "xy")
    broken(rig, a)
    assert set(lose_silent(rig.core, 10.0, 60.0)) == {a, b}
    leases = rig.core.ledger.leases
    assert [leases[lease].state for lease in (a, b)] == [LeaseState.QUARANTINED] * 2
    tidy_all(rig.core)
    assert "is not pinned" in rig.model.suspect
    assert leases[b].sequences == {}
    process_gone(rig.core, TOKEN + b"a")
    process_gone(rig.core, TOKEN + b"b")
    assert leases == {}


def test_a_page_that_is_not_there_is_a_defect_and_not_somebody_elses_page() -> None:
    rig = rig_of(one_group(), device=(4,))
    row = rig.model.blocks.index.insert(b"k" * 32, -1, 1)
    for page in (-1, 0):
        with pytest.raises(LedgerBroken):
            rig.place().seal(0, row, page)
    assert (rig.free(), rig.place().pages[0][row]) == ([4], -1)
