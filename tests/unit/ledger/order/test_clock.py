"""The time by which eviction goes: the daemon's, until a replay tells that of its trace."""

from __future__ import annotations

import math

import pytest

from cachesvc.flows.core import resolve
from cachesvc.flows.leases import close_lease
from cachesvc.flows.match import MOST_WAITED_SECONDS, match
from cachesvc.flows.recycle import ended, release
from cachesvc.ledger.candidates import Clock
from cachesvc.ledger.change_log import Moment
from cachesvc.model.answers import Ended
from cachesvc.model.errors import InvalidRequest
from cachesvc.policy.hazard import ENDS_AT_ONCE, REMEMBERED, History
from tests.unit.rigs.ledger_rig import chain, one_group, rig_of


class NoPath:
    """Path of a prompt that fills no block."""

    blocks = known = resident = 0

    def key(self, position: int) -> bytes:
        raise IndexError(position)

    def segment(self, position: int) -> int:
        raise IndexError(position)


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


def test_nobody_tells_another_time_once_somebody_goes_by_the_daemons() -> None:
    """An engine that lies about the time would make all blocks of the others old."""
    rig = rig_of(one_group(), device=[4], eviction="hazard")
    honest, other = rig.lease(), rig.lease()
    clock = rig.model.blocks.clock
    rig.run(match, other, 1, chain("a"), 0, None, 0.0, 50.0)
    assert clock.seconds == 50.0
    rig.run(match, honest, 1, chain("b"), 0)
    rig.core.ledger.moment.seconds += 3.0
    assert clock.seconds == 53.0, "it goes on from there, and not back"
    with pytest.raises(InvalidRequest, match="daemon's time"):
        rig.run(match, other, 2, chain("c"), 0, None, 0.0, 1e9)
    assert clock.seconds == 53.0
    assert 2 not in rig.core.ledger.leases[other].sequences
    call = resolve(rig.core.ledger, other, 0.0)
    assert ended(call, 7, 0.5, 1e9) == Ended(7, 52.5), "nor of the end"


def test_whoever_is_alone_with_a_model_may_tell_the_time_anew() -> None:
    rig = rig_of(one_group(), device=[4], eviction="hazard")
    before = rig.lease()
    rig.run(match, before, 1, chain("a"), 0)
    beside = rig.lease()
    with pytest.raises(InvalidRequest, match="daemon's time"):
        rig.run(match, beside, 1, chain("b"), 0, None, 0.0, 5.0)
    for lease in (before, beside):
        close_lease(rig.core, lease, quiesced=True)
    rig.run(match, rig.lease(), 1, chain("c"), 0, None, 0.0, 5.0)
    assert rig.model.blocks.clock.seconds == 5.0


def test_a_request_has_waited_ten_minutes_at_most_and_ends_after_it_came() -> None:
    rig = rig_of(one_group(), device=[4], eviction="hazard")
    history, lease = rig.model.blocks.chooser, rig.lease()
    assert isinstance(history, History)
    rig.core.ledger.moment.seconds = 10_000.0
    rig.run(match, lease, 1, chain("a"), 0, None, 4e6)
    [parts] = history.running
    assert history.segments.arrived[parts.own] == 10_000.0 - MOST_WAITED_SECONDS
    rig.run(release, lease, 1, Ended(3, -4e6))
    assert history.segments.ended[parts.own] == 10_000.0 - MOST_WAITED_SECONDS


def test_ends_that_lie_ahead_are_waited_for_within_bounds() -> None:
    """An engine that says that its requests never end is forgotten in the end."""
    history = History(16)
    for number in range(REMEMBERED + 100):
        parts = history.arrived(NoPath(), float(number), 0.0)
        history.ended(parts, 0, b"", Ended(1, 1e9), float(number))
    assert len(history.running) == REMEMBERED
    history.advance(2e9)
    assert len(history.running) == REMEMBERED - ENDS_AT_ONCE, "and no call does the work of all of them"
    while history.running:
        history.advance(2e9)
    assert len(history.segments) <= REMEMBERED


def test_a_match_tells_it() -> None:
    rig = rig_of(one_group(), device=[4], eviction="hazard")
    rig.run(match, rig.lease(), 1, chain("a"), 0, None, 0.0, 12.5)
    assert rig.model.blocks.clock.seconds == 12.5


@pytest.mark.parametrize("seconds", [-1.0, 1e11, math.inf, math.nan])
def test_what_is_no_time_is_refused_and_nothing_is_opened(seconds: float) -> None:
    rig = rig_of(one_group(), device=[4], eviction="hazard")
    lease = rig.lease()
    with pytest.raises(InvalidRequest, match="clock_seconds is"):
        rig.run(match, lease, 1, chain("a"), 0, None, 0.0, seconds)
    assert not rig.core.ledger.leases[lease].sequences
    assert rig.model.blocks.clock.seconds == 0.0
