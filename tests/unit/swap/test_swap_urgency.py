"""Urgency of transfers in the swap engine: background ones stand back, are expedited, and can be paused; and movers are
awake when a job comes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cachesvc.model.errors import NotFound
from cachesvc.model.words import Direction, PagePairs, Transfer, Urgency
from tests.sim.stepped_backend import SteppedBackend, SteppedStream
from tests.unit.rigs.swap_rig import MODEL, REPLICA, Rig, mixed_layout, rig_of

LOAD, STORE = Direction
DEVICES = ("step-0", "step-1")


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


def test_what_is_expedited_before_it_is_queued_is_awaited(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(rig)
    stream_of = backend.store_stream

    def expedite_first(device: str) -> SteppedStream:
        rig.engine.expedite(2)  # as another thread may
        return stream_of(device)

    monkeypatch.setattr(backend, "store_stream", expedite_first)
    rig.engine.submit(transfer(1, LOAD, Urgency.AWAITED))
    rig.engine.submit(transfer(2, STORE, Urgency.BACKGROUND))
    assert {(device, STORE, 2) for device in DEVICES} <= set(streams(rig))
    rig.settle(2)
