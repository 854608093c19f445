"""A model between the Register of its engine and the Open: it is not idle, for a while."""

from __future__ import annotations

import pytest

from cachesvc.flows.core import Limits
from cachesvc.flows.leases import close_lease
from cachesvc.model.errors import PoolExhausted
from tests.unit.flows.models.test_flows_models import Desk


def test_a_registered_model_is_kept_until_its_engine_has_had_time_to_open() -> None:
    """Engines that started together evicted each other's pools in turns, and each Open was NOT_FOUND."""
    desk = Desk()
    desk.core.limits = Limits(open_seconds=30.0)
    desk.core.ledger.moment.seconds = 1000.0
    first = desk.register("first", 60)
    with pytest.raises(PoolExhausted):
        desk.register("second", 60)
    desk.core.ledger.moment.seconds = 1029.0
    assert desk.register("first", 60).existed, "another engine of it, or the same one again"
    desk.occupy(first)
    end_leases(desk)
    with pytest.raises(PoolExhausted):
        desk.register("second", 60)
    desk.core.ledger.moment.seconds = 1059.0
    desk.register("second", 60)
    assert desk.names == ["second"]


def test_a_model_is_idle_as_soon_as_the_leases_of_all_who_registered_have_ended() -> None:
    desk = Desk()
    desk.core.limits = Limits(open_seconds=30.0)
    desk.occupy(desk.register("first", 60))
    end_leases(desk)
    desk.register("second", 60)
    assert desk.names == ["second"]


def end_leases(desk: Desk) -> None:
    for lease in list(desk.core.ledger.leases):
        close_lease(desk.core, lease, quiesced=True)
