"""Pages that a call takes ahead, in turns: what becomes of them where it is given up."""

from __future__ import annotations

import pytest

from cachesvc.flows.allocate import allocate
from cachesvc.flows.match import match
from cachesvc.flows.recycle import recycle, release
from cachesvc.model.answers import Allocated, GroupCells, Wait
from cachesvc.model.errors import NotOwned
from tests.unit.rigs.ledger_rig import chain, one_group, rig_of
from tests.unit.rigs.turns_rig import SMALL, full, reserved


def test_a_call_that_was_given_up_begins_with_the_pages_that_it_had() -> None:
    rig = rig_of(one_group(), device=(8,))
    a = rig.lease("a")
    rig.core.turns = SMALL
    rig.run(match, a, 1, b"", 0)
    wait = rig.once(allocate, a, 1, 6)
    assert isinstance(wait, Wait)
    assert wait.reserved is not None
    wait.reserved.release()
    rig.check()
    assert (rig.free(), reserved(rig)) == ([6], 0)
    answer = rig.run(allocate, a, 1, 1)
    assert isinstance(answer, Allocated)
    assert len(answer.tables[0].pages) == 1
    assert rig.free() == [7], "it wants no more than that now"
    rig.run(allocate, a, 1, 6)
    assert rig.free() == [2]
    rig.run(release, a, 1)
    assert rig.free() == [8]


def test_a_smaller_call_gives_back_what_a_larger_one_took_that_was_given_up() -> None:
    rig, a, _ = full(8)
    rig.run(match, a, 9, chain(*range(100, 108)), 0)
    sequence = rig.core.ledger.leases[a].sequences[9]
    while not sequence.pages_ahead or sequence.pages_ahead[0] < 6:
        assert isinstance(rig.once(allocate, a, 9, 8), Wait)
    assert len(rig.model.blocks.computing) == 6
    rig.run(allocate, a, 9, 1)
    assert (len(sequence.own[0]), sequence.pages_ahead) == (1, [])
    assert rig.free()[0] == 7
    assert len(rig.model.blocks.computing) == 1
    rig.run(allocate, a, 9, 3)
    assert (len(sequence.own[0]), len(rig.model.blocks.computing)) == (3, 3)
    rig.run(release, a, 9)
    assert (rig.free()[0], rig.model.blocks.computing) == (8, {})


def test_pages_that_a_call_has_taken_ahead_are_nobodys_to_recycle() -> None:
    rig = rig_of(one_group(), device=(8,))
    a = rig.lease("a")
    rig.core.turns = SMALL
    rig.run(match, a, 1, b"", 0)
    assert isinstance(rig.once(allocate, a, 1, 6), Wait)
    ahead = next(iter(rig.core.ledger.leases[a].sequences[1].own[0]))
    with pytest.raises(NotOwned):
        rig.once(recycle, a, 1, 0, (GroupCells(0, 0, (ahead,)),))
    rig.run(allocate, a, 1, 6)
