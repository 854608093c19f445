"""The stream for what comes from other devices: it waits for no load from the host, and is expedited as they are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cachesvc.model.words import Urgency
from tests.contracts.test_backend import KINDS, Bench, flat, host, make, step


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = make(request.param)
    yield made
    made.backend.close()


def test_copies_from_other_devices_wait_for_no_load(bench: Bench) -> None:
    """They come by links of their own."""
    if bench.backend.name == "stepped":
        pytest.skip("its devices have one way in")
    region, _ = host(bench, 64)
    source, target = (bench.backend.create_slab(bench.device, 64) for _ in range(2))
    gate, begun = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        gate.wait()

    bench.load(bench.job(1, [step(flat(region, 0, source.region, 0, 64))], then=hold))
    begun.wait()  # the thread that loads is busy
    bench.load(bench.job(2, [step(flat(region, 0, source.region, 0, 64))], word=2))
    copy = step(flat(source.region, 0, target.region, 0, 64), value=9)
    bench.backend.peer_stream(bench.device).submit(bench.job(3, [copy], word=4))
    bench.waits[-1].wait()
    assert bench.ended == {1: None, 3: None}
    assert bench.backend.read(target.region, 0, 64) == bench.backend.read(region, 0, 64)
    assert bench.backend.timeline(bench.device).read(4) == 9
    gate.set()
    bench.settle()
    assert bench.order == [1, 3, 2]


def test_what_waits_for_another_device_is_expedited_too(bench: Bench) -> None:
    source, target = (bench.backend.create_slab(bench.device, 64) for _ in range(2))
    copy = step(flat(source.region, 0, target.region, 0, 64))
    background = replace(bench.job(1, [copy]), urgency=Urgency.BACKGROUND)
    bench.backend.pause_background(bench.device, 1e6)  # of stores alone
    bench.backend.peer_stream(bench.device).submit(background)
    bench.backend.expedite(bench.device, 1)
    bench.settle()
    assert bench.ended == {1: None}
