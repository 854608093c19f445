"""States of a sequence: what it goes through, what is refused meanwhile, and that no other move exists."""

from __future__ import annotations

from itertools import product

import pytest

from cachesvc.flows.allocate import allocate, extend, extend_many, refill_stock, swap_in, swap_out
from cachesvc.flows.core import Turns, refusal_of, require_active
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish, publish_many
from cachesvc.flows.recycle import recycle_many, release
from cachesvc.ledger.sequence_state import (
    ACTIVE,
    AWAY,
    ENDED,
    FAILED,
    LEAVING,
    LOADING,
    MOVES,
    ON_DEVICE,
    RETURNING,
    SequenceState,
    move,
)
from cachesvc.ledger.sequences import OpenSequence
from cachesvc.model.answers import Growth, Publishes, Wait
from cachesvc.model.errors import Conflict, LedgerBroken, LoadFailed, NotFound
from tests.unit.flows.engine.test_flows_stock import hosted
from tests.unit.flows.engine.test_flows_swap import half_published
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, rig_of

ILLEGAL = [pair for pair in product(SequenceState, repeat=2) if pair not in MOVES]
REFUSALS = {LEAVING: Conflict, AWAY: Conflict, RETURNING: Conflict, FAILED: LoadFailed, ENDED: NotFound}


@pytest.mark.parametrize(("source", "target"), ILLEGAL)
def test_a_move_that_the_table_lacks_is_a_defect(source: SequenceState, target: SequenceState) -> None:
    with pytest.raises(LedgerBroken, match=f"{source.value} cannot become {target.value}"):
        move(source, target)


def sequence_of(rig: Rig, lease: str) -> OpenSequence:
    return rig.core.ledger.leases[lease].sequences[1]


def end_all(rig: Rig, *, fails: bool) -> None:
    """End every transfer, with its bytes or without."""
    for ticket in list(rig.mover.transfers):
        rig.land(ticket, "no bytes" if fails else "")


@pytest.mark.parametrize("fails", [False, True])
def test_a_swap_ends_where_its_outcome_says(fails: bool) -> None:
    rig, a = half_published()
    sequence = sequence_of(rig, a)
    seen = [sequence.state]
    for flow in (swap_out, swap_in):
        if flow is swap_in and fails:
            rig.run(swap_out, a, 1)
            rig.settle()
        rig.run(flow, a, 1)
        seen.append(sequence.state)
        end_all(rig, fails=fails)
        seen.append(sequence.state)
    rig.run(release, a, 1)
    there_and_back = [ACTIVE, LEAVING, ACTIVE, RETURNING, AWAY] if fails else [ACTIVE, LEAVING, AWAY, RETURNING, ACTIVE]
    assert [*seen, sequence.state] == [*there_and_back, ENDED]


@pytest.mark.parametrize("fails", [False, True])
def test_a_load_ends_where_its_outcome_says(fails: bool) -> None:
    rig, a = hosted("ab")
    rig.run(match, a, 1, chain(*"abc"), 0)
    sequence = sequence_of(rig, a)
    assert sequence.state is ACTIVE
    rig.run(allocate, a, 1, 3)
    assert sequence.state is LOADING
    end_all(rig, fails=fails)
    if fails:
        with pytest.raises(LoadFailed):
            rig.run(publish, a, 1, 2, b"", 1)
    assert sequence.state is (FAILED if fails else ACTIVE)


def test_each_state_has_its_refusal() -> None:
    rig, a = half_published()
    sequence = sequence_of(rig, a)
    for state in SequenceState:
        sequence.state = state
        if state in ON_DEVICE:
            require_active(sequence)
            assert isinstance(refusal_of(sequence), Conflict)
        else:
            with pytest.raises(REFUSALS[state]):
                require_active(sequence)


def test_a_sequence_that_has_begun_to_end_serves_no_batch_any_more() -> None:
    rig = rig_of(one_group(), device=(64,))
    a = rig.lease()
    rig.run(match, a, 1, chain(*range(16)), 0)
    rig.run(allocate, a, 1, 16)
    [stock] = rig.run(refill_stock, a, (1,))
    rig.core.turns = Turns(pages=4)
    assert isinstance(rig.once(release, a, 1), Wait), "a slice of it; the lease has the sequence still"
    assert sequence_of(rig, a).state is ENDED
    told: list[int] = []
    rig.once(publish_many, a, Publishes((1,), (0,), (0, 1), b""), range(1), told)
    growth = Growth((1,), (0, 1), [list(stock.pages)], [list(stock.generations)])
    rig.once(extend_many, a, growth, range(1), told)
    rig.once(recycle_many, a, ((1,), (4,)), range(1), told)
    assert told == []
    with pytest.raises(NotFound):
        rig.run(publish, a, 1, 0, b"", 1)
    with pytest.raises(NotFound):
        rig.run(extend, a, 1, (stock,))
    assert rig.run(release, a, 1) == 16
