"""Background transfers in the swap engine: they stand back, are expedited, planned or not, and can be paused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from cachesvc_client.layouts.families import gqa

from cachesvc.model.errors import NotFound
from cachesvc.model.transfer import Direction, PagePairs, Transfer, Urgency
from cachesvc.swap.engine import SwapEngine
from cachesvc.swap.movers import Inside
from cachesvc.swap.planner_threads import Devices, Work
from tests.sim.inline_planning import InlinePlanning
from tests.sim.stepped_backend import SteppedBackend
from tests.unit.swap_rig import MODEL, REPLICA, Rig, mixed_layout, rig_of

LOAD, STORE = Direction
DEVICES = ("step-0", "step-1")


class HeldPlanning(InlinePlanning):
    """Plans when told to. ``expedited``: what it was told."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[Exception | None], None]] = []
        self.expedited: list[tuple[Direction, int]] = []

    def submit(self, direction: Direction, urgency: Urgency, devices: Devices, ticket: int, work: Work) -> None:
        self.waiting.append(work)

    def expedite(self, direction: Direction, ticket: int) -> None:
        self.expedited.append((direction, ticket))


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = rig_of("stepped", mixed_layout(2))
    yield made
    made.close()


def backend_of(rig: Rig) -> SteppedBackend:
    assert isinstance(rig.backend, SteppedBackend)
    return rig.backend


def transfer(ticket: int, direction: Direction, urgency: Urgency) -> Transfer:
    return Transfer(ticket, MODEL, REPLICA, direction, (PagePairs(0, (0, 1), (0, 1)),), layered=False, urgency=urgency)


def streams(rig: Rig) -> list[tuple[str, Direction, int]]:
    return [(one.device, one.direction, one.ticket) for one in backend_of(rig).pending()]


def test_an_expedited_transfer_goes_on_on_every_device(rig: Rig) -> None:
    rig.engine.submit(transfer(1, LOAD, Urgency.AWAITED))
    rig.engine.submit(transfer(2, STORE, Urgency.BACKGROUND))
    loads = [(device, LOAD, 1) for device in DEVICES]
    assert streams(rig) == loads
    rig.engine.expedite(2)
    rig.engine.expedite(2)
    rig.engine.expedite(99)
    assert {(device, STORE, 2) for device in DEVICES} <= set(streams(rig))
    rig.settle(2)


def test_write_backs_are_paused_on_the_named_devices_alone(rig: Rig) -> None:
    rig.engine.pause_write_backs(DEVICES[:1], 0.5)
    rig.engine.submit(transfer(1, STORE, Urgency.BACKGROUND))
    assert streams(rig) == [(DEVICES[1], STORE, 1)]
    with pytest.raises(NotFound):
        rig.engine.pause_write_backs(["nowhere"], 0.5)
    rig.settle()
    assert backend_of(rig).now >= 0.5


def test_what_is_expedited_before_it_is_planned_is_awaited() -> None:
    planning = HeldPlanning()
    rig = rig_of("stepped", gqa(layers=1, kv_heads=1, head_dim=8, block_tokens=4))
    engine = SwapEngine(Inside(backend_of(rig), planning=planning), rig.done)
    engine.start()
    old, rig.engine = rig.engine, engine
    old.close()
    old.detach_model(MODEL)
    rig.engine.attach_model(MODEL, rig.layout, rig.hosts)
    rig.engine.attach_replica(
        MODEL, REPLICA, DEVICES[:1], [[rig.backend.create_slab(DEVICES[0], 24 * rig.layout.page_bytes(0))]], [24]
    )
    rig.engine.submit(transfer(1, STORE, Urgency.BACKGROUND))
    rig.engine.submit(transfer(2, LOAD, Urgency.AWAITED))
    rig.engine.expedite(1)
    assert planning.expedited == [(STORE, 1)]
    for work in planning.waiting:
        work(None)
    assert set(streams(rig)) == {(DEVICES[0], LOAD, 2), (DEVICES[0], STORE, 1)}
    rig.settle(2)
    rig.close()
