"""Copies that land many at a time end as they do one by one, and walk through few files."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from cachesvc.flows import pinning
from cachesvc.flows.allocate import allocate, swap_out
from cachesvc.flows.match import match
from cachesvc.ledger.tier_copies import Place
from cachesvc.model.errors import IllegalMove, LedgerBroken
from cachesvc.model.layout import Layout
from cachesvc.model.numbers import column
from cachesvc.model.words import FILLING, READY, WritePolicy
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, prefill, rig_of, serve, windowed
from tests.unit.rigs.walks import walk

BLOCKS = 40
Land = Callable[[Rig, Place, "array[int]"], None]


def at_once(rig: Rig, place: Place, rows: array[int]) -> None:
    rig.model.blocks.finish_fills(place, rows, arrived=True)


def one_by_one(rig: Rig, place: Place, rows: array[int]) -> None:
    for row in rows:
        rig.model.blocks.finish_fill(place, row, arrived=True)


def leaving(layout: Layout) -> tuple[Rig, Place, array[int]]:
    """Forty sealed blocks on their way to the host, a part of them below another sequence's."""
    rig = rig_of(layout, device=(128,) * len(layout.groups), host=(128,) * len(layout.groups))
    a = rig.lease()
    prefill(rig, a, 2, range(BLOCKS // 2))
    prefill(rig, a, 1, range(BLOCKS))
    rig.run(swap_out, a, 1)
    (ticket,) = rig.mover.transfers
    return rig, rig.host, rig.core.ledger.tickets.running[ticket].rows


def coming(layout: Layout) -> tuple[Rig, Place, array[int]]:
    """Forty blocks on their way from the host to the device."""
    groups = len(layout.groups)
    rig = rig_of(layout, device=(128,) * groups, host=(128,) * groups, policy=WritePolicy.WRITE_THROUGH)
    a = rig.lease()
    serve(rig, a, 1, range(BLOCKS))
    rig.settle()
    pinning.evict(rig.core, 1, "device", 0)
    rig.run(match, a, 2, chain(*range(BLOCKS)), 0)
    rig.run(allocate, a, 2, BLOCKS)
    (ticket,) = rig.mover.transfers
    return rig, rig.place(), rig.core.ledger.tickets.running[ticket].rows


def outcome(rig: Rig, rows: array[int]) -> object:
    blocks = rig.model.blocks
    journal, index = blocks.journal, blocks.index
    told = [event._replace(number=0, seconds=0.0) for event in journal.read(journal.first, 1 << 16)]
    return (
        [[event for event in told if event.group == group] for group in range(len(rig.host.states))],
        [[bytes(states) for states in place.states] for place in index.places],
        [sorted(place.leaves) for place in index.places],
        [sorted(order) for place in index.places for order in place.window_leaves.values()],
        [(list(pool.states), pool.counts) for place in index.places for pool in place.pools],
        [place.counts.states for place in index.places],
        ([index.flights[row] for row in rows], sorted(index.flying)),
        [list(place.filling) for place in index.places],
    )


@pytest.mark.parametrize("layout", [one_group(), windowed(8), windowed(256, 8)])
@pytest.mark.parametrize("begin", [leaving, coming])
def test_many_at_a_time_end_as_one_by_one(
    begin: Callable[[Layout], tuple[Rig, Place, array[int]]], layout: Layout
) -> None:
    ends = []
    for land in (at_once, one_by_one):
        rig, place, rows = begin(layout)
        assert len(rows) == BLOCKS
        assert set(place.states_of(0, rows).tolist()) == {FILLING}
        land(rig, place, rows)
        assert set(place.states_of(0, rows).tolist()) == {READY}
        ends.append(outcome(rig, rows))
    assert ends[0] == ends[1]


def test_a_row_that_no_ticket_brings_lands_nothing() -> None:
    rig, place, rows = leaving(one_group())
    at_once(rig, place, rows)
    before = outcome(rig, rows)
    with pytest.raises(LedgerBroken, match="by no ticket"):
        at_once(rig, place, rows)
    with pytest.raises(LedgerBroken, match="in no flight"):
        rig.model.blocks.index.end_flights(rows)
    with pytest.raises(IllegalMove):
        place.arrive_all(0, column(rows))
    assert outcome(rig, rows) == before


def test_forty_blocks_land_in_few_moves_from_file_to_file() -> None:
    rig, _, _ = leaving(one_group())
    (ticket,) = rig.mover.transfers
    assert walk(lambda: rig.land_unchecked(ticket)).moves <= 60
