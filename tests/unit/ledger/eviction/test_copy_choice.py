"""Bound of a search for cheap copies, whatever the distances between copies are."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cachesvc.ledger import drop
from cachesvc.ledger.drop import WORK, WORK_A_PAGE, cheap_copies, worth_of_oldest_end
from cachesvc.ledger.retention import ROWS_LOOKED, Retention
from cachesvc.ledger.tier_copies import NO_ROW
from cachesvc.simulation import Copies, SimulatedPools, Simulation

PROMPTS, BLOCKS, STATE_BLOCKS = 60, 620, 300


class CountedClimbs:
    """A ``Retention`` that counts the rows that are climbed for distances."""

    def __init__(self, retention: Retention) -> None:
        self._retention = retention
        self.rows = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._retention, name)

    def saved(self, *arguments: Any) -> int:
        found = self._retention.saved(*arguments)
        self.rows += found
        return found

    def saved_below(self, *arguments: Any) -> int:
        found = self._retention.saved_below(*arguments)
        self.rows += found
        return found


def test_a_search_climbs_no_more_rows_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(state_pages=1, state_blocks=STATE_BLOCKS, window_pages=0, window_blocks=1)
    simulation = Simulation(SimulatedPools("lru", "write_back", 2 * PROMPTS * BLOCKS, 0, copies=copies), 1)
    for now, number in enumerate([*range(PROMPTS), *range(PROMPTS)]):  # ends are worth something, middles little
        key = number.to_bytes(4, "big")
        simulation.serve(b"".join(key + at.to_bytes(28, "big") for at in range(BLOCKS)), float(now))
    (model,) = simulation.ledger.models.values()
    place = model.replicas[0].place
    counted: Any = CountedClimbs(model.blocks.retention)  # type: ignore[arg-type]
    model.blocks.retention = counted
    monkeypatch.setattr(drop, "worth_of_oldest_end", lambda *_: math.inf)  # every copy is cheap
    groups = [kin.lead for kin in place.kin]
    cheap_copies(model.blocks, place, groups, PROMPTS)
    assert counted.rows <= WORK + WORK_A_PAGE * PROMPTS + 3 * ROWS_LOOKED, "the last look may go beyond it"


@pytest.mark.parametrize(("blocks", "is_linked"), [(ROWS_LOOKED, True), (ROWS_LOOKED + 1, False)])
def test_positions_are_linked_across_as_many_rows_as_are_looked_at(blocks: int, is_linked: bool) -> None:
    """A request ends far behind another's end: the search for that one ends."""
    copies = Copies(state_pages=1, state_blocks=blocks, window_pages=0, window_blocks=1)
    simulation = Simulation(SimulatedPools("lru", "write_back", 4 * blocks, 0, copies=copies), 1)
    keys = b"".join(at.to_bytes(32, "big") for at in range(2 * blocks))
    for now, end in enumerate((len(keys) // 2, len(keys))):
        simulation.serve(keys[:end], float(now))
    (model,) = simulation.ledger.models.values()
    rows, retention = model.blocks.index.rows, model.blocks.retention
    assert retention is not None
    upper, lower = rows[keys[len(keys) // 2 - 32 : len(keys) // 2]], rows[keys[-32:]]
    assert retention.below[upper] == (lower if is_linked else NO_ROW)


def test_copies_are_held_against_the_same_worth_whichever_leaf_is_next() -> None:
    """A policy that learns takes other leaves than the oldest. What copies are worth beside blocks depends on what is
    cached alone: with the same contents it is the same under both policies."""
    found = []
    for policy in ("lru", "hazard"):
        copies = Copies(state_pages=1, state_blocks=4, window_pages=0, window_blocks=1)
        simulation = Simulation(SimulatedPools(policy, "write_back", 4096, 0, copies=copies), 1)
        for now, number in enumerate(at % 7 * 10 + at % 3 for at in range(400)):
            key = (number % 70).to_bytes(4, "big")
            simulation.serve(b"".join(key + at.to_bytes(28, "big") for at in range(8 + number % 5)), float(now))
        (model,) = simulation.ledger.models.values()
        place, retention = model.replicas[0].place, model.blocks.retention
        assert retention is not None
        assert retention.rule.has_learned
        found.append([worth_of_oldest_end(model.blocks, place, kin) for kin in place.kin])
    assert found[0] == found[1]
    assert min(found[0]) > 0
