"""Pages that fall out of windows, and those of a released prompt's windows, go in turns."""

from __future__ import annotations

import pytest

from cachesvc.flows.core import Turns
from cachesvc.flows.recycle import Recycling, recycle, release
from cachesvc.model.answers import Recycled, Wait
from tests.unit.rigs.ledger_rig import prefill, rig_of, windowed
from tests.unit.rigs.turns_rig import SMALL, own


def test_windows_are_let_go_of_in_turns() -> None:
    """A released prompt's windows become candidates some at a time, and none is dropped or held for good."""
    rig = rig_of(windowed(8), device=(32, 32))
    a = rig.lease("a")
    prefill(rig, a, 1, "abcdefghi")
    held = len(rig.core.ledger.leases[a].sequences[1].window_rows[1])
    rig.core.turns = SMALL
    runs = 0
    while isinstance(rig.once(release, a, 1), Wait):
        runs += 1
    assert runs >= held - 1
    assert not any(rig.place().window_pins[1])
    assert len(rig.place().window_leaves[1]) == held


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_recycle_in_turns_answers_as_one_in_one_go(is_shared: bool) -> None:
    answers = []
    for sizes in (Turns(), SMALL):
        rig = rig_of(windowed(8), device=(32, 32))
        a = rig.lease("a")
        if is_shared:
            prefill(rig, a, 1, "abcdefghi")
        else:
            own(rig, a, 1, 9)
        rig.core.turns = sizes
        recycling, runs = Recycling(), 1
        while isinstance(answer := rig.once(recycle, a, 1, 36, (), recycling), Wait):
            runs += 1
        answers.append((answer, rig.free()))
        assert (runs > 1) == (sizes is SMALL)
    assert answers[0] == answers[1]


def test_a_sequence_that_is_released_between_the_turns_of_a_recycle() -> None:
    rig = rig_of(windowed(8), device=(32, 32))
    a = rig.lease("a")
    own(rig, a, 1, 9)
    rig.core.turns = SMALL
    recycling = Recycling()
    assert isinstance(rig.once(recycle, a, 1, 36, (), recycling), Wait)
    rig.run(release, a, 1)
    assert isinstance(rig.once(recycle, a, 1, 36, (), recycling), Recycled)
    assert rig.free() == [32, 32]
