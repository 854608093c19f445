"""The daemon above a storage that does everything wrong: accounting holds after every step, and no byte is wrong."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.sim_storage import FAULTS
from tests.sim.storage_world import run_twice

SEEDS = 64
STEPS = 700
BATCHES = 4
SEEN = (
    "blocks_promoted",
    *(fault for fault in FAULTS if fault != "invent"),
    "breaker_opened",
    "storage_fetched_blocks",
    "storage_fetches",
    "storage_frozen",
    "storage_hits",
    "storage_kept_blocks",
    "storage_landed_late",
    "storage_lost",
    "storage_not_kept_blocks",
)

_seen: Counter[str] = Counter()


@pytest.mark.parametrize("batch", range(BATCHES))
def test_nothing_breaks_under_any_seed(batch: int) -> None:
    for seed in range(batch, SEEDS, BATCHES):
        for world in run_twice(seed, STEPS, looks=0.08):
            _seen.update(world.faults)
            _seen.update(world.node.events)


def test_every_kind_of_fault_was_seen() -> None:
    if not _seen:
        pytest.skip("the simulations ran in another process")
    print(dict(sorted(_seen.items())))
    assert [name for name in SEEN if not _seen[name]] == []
