"""The whole daemon but its sockets, under one seed after another, with faults at every seam."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.long_cases import IS_LONG
from tests.sim.meetings import MEETINGS
from tests.sim.world import FAULTS, SHARED, World, run

SEEDS = 360 if IS_LONG else 200
RARE = (253, 273, 325)
"""Seeds beyond these that meet what one in fifty does: a write-back below another one."""
STEPS = 400
BATCHES = 4
EVENTS = (
    "device_hits",
    "duplicates",
    "follower_cut_off",
    "follower_resumed",
    "host_hits",
    "loads",
    "loads_found_done",
    "loads_joined",
    "mirror_compared",
    "model_evicted",
    "lost_to_windows",
    "published",
    "state_hits",
    "states_kept",
    "states_published",
    "swap_out_failed",
    "swapped_in",
    "told_to_wait",
)
"""Events that must have happened too, or the run has shown little."""

_seen: Counter[str] = Counter()


@pytest.mark.parametrize("batch", range(BATCHES))
def test_nothing_breaks_under_any_seed(batch: int) -> None:
    for seed in (*range(batch, SEEDS, BATCHES), *RARE[batch : batch + 1]):
        world = run(seed, STEPS)
        _seen.update(world.faults)
        _seen.update(world.node.events)
        _seen.update(world.node.meetings.seen)
        _seen["steps"] += world.steps


def test_every_kind_of_fault_and_of_meeting_was_seen() -> None:
    if not _seen:
        pytest.skip("the simulations ran in another process")
    print(dict(sorted(_seen.items())))
    assert _seen["steps"] >= 10_000
    assert [name for name in (*FAULTS, *EVENTS, *SHARED, *MEETINGS) if not _seen[name]] == []


def test_a_seed_always_tells_the_same_story() -> None:
    first, second = run(7, 120), run(7, 120)
    assert first.faults == second.faults
    assert first.node.events == second.node.events
    assert first.node.now == second.node.now


def test_the_checks_see_a_corrupt_page() -> None:
    for seed in range(50):
        world = World(seed)
        for _ in range(150):
            world.step()
        for model in world.node.core.ledger.models.values():
            replica = next(iter(model.replicas), None)
            if replica is None:
                continue
            place = replica.place
            for row in model.blocks.index.rows.values():
                if place.is_hittable(row):
                    page = place.pages[place.lead][row]
                    world.node.write_page(model, replica.id, place.lead, page, [b"\0"])
                    assert world.node.corrupt()
                    return
    raise AssertionError("no seed left a sealed page on a device")


def test_a_failing_run_names_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(self: World) -> None:
        raise AssertionError("broken")

    monkeypatch.setattr(World, "check", breaks)
    with pytest.raises(AssertionError) as caught:
        run(3, 10)
    assert "python -m tests.sim 3 " in caught.value.__notes__[0]
