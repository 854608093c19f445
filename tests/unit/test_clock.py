"""The time by which eviction goes: the daemon's, until a replay tells that of its trace."""

from __future__ import annotations

import math

import pytest

from cachesvc.flows.match import match
from cachesvc.ledger.clock import Clock
from cachesvc.ledger.journal import Moment
from cachesvc.model.errors import InvalidRequest
from tests.unit.ledger_rig import chain, one_group, rig_of


def test_it_is_the_daemons_time_until_another_one_is_told_which_never_goes_back() -> None:
    moment = Moment()
    clock = Clock(moment)
    moment.seconds = 70.0
    assert clock.seconds == 70.0
    told = []
    for seconds in (5.0, 9.0, 7.0):
        clock.tell(seconds)
        told.append(clock.seconds)
    moment.seconds = 90.0
    assert (told, clock.seconds) == ([5.0, 9.0, 9.0], 9.0)


def test_a_match_tells_it() -> None:
    rig = rig_of(one_group(), device=[4], eviction="hazard")
    rig.run(match, rig.lease(), 1, chain("a"), 0, None, 0.0, 12.5)
    assert rig.model.blocks.clock.seconds == 12.5


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_what_is_no_time_is_refused_and_nothing_is_opened(seconds: float) -> None:
    rig = rig_of(one_group(), device=[4], eviction="hazard")
    lease = rig.lease()
    with pytest.raises(InvalidRequest, match="clock_seconds is"):
        rig.run(match, lease, 1, chain("a"), 0, None, 0.0, seconds)
    assert not rig.core.ledger.leases[lease].sequences
    assert rig.model.blocks.clock.seconds == 0.0
