"""Layers of a step wait for their parts of its loads; a failed load ends the waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
from cachesvc_client import AttachedPool, CacheClient, LoadOutcome
from cachesvc_client.adapters.layer_waits import LayerWaits

from cachesvc.model.answers import TicketView
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.words import TimelineSlot
from tests.unit.rigs.client_rig import FakeDaemon

LAYERS, BASE, WORD, FAILED_WORD = 4, 10, 4, 5
LAYOUT = Layout(
    4, 1, (PlaneGroup("full"),), tuple(Plane("k", layer, "full", (64,), "uint8") for layer in range(LAYERS))
)
LOAD = TicketView(1, "running", "", TimelineSlot(WORD, FAILED_WORD, BASE, LAYERS), "load", 1, 64)


@pytest.fixture
def pool(daemon: FakeDaemon) -> Iterator[AttachedPool]:
    with CacheClient(daemon.path) as client:
        yield client.open_lease(client.register("m", LAYOUT)).attach()


def waits(pool: AttachedPool) -> LayerWaits:
    """Waits of a step that uses one load."""
    made = LayerWaits(lambda: pool, lambda: None)
    made.begin([LOAD])
    return made


@pytest.mark.parametrize("order", [range(LAYERS), (1, 0, 3, 2)])
def test_each_layer_reads_what_its_part_brought(daemon: FakeDaemon, pool: AttachedPool, order: Sequence[int]) -> None:
    step, read = waits(pool), dict[int, int]()

    def compute() -> None:
        for layer in order:
            step.wait(layer)
            read[layer] = int(pool.planes[layer, "k"][1, 0])

    engine = threading.Thread(target=compute)
    engine.start()
    for layer in range(LAYERS):
        pool.planes[layer, "k"][1] = layer + 1
        daemon.timeline.write(WORD, BASE + layer + 1)
    engine.join()
    assert read == {layer: layer + 1 for layer in range(LAYERS)}
    assert step.end(LOAD) is LoadOutcome.CAME


def test_a_step_that_cannot_wait_by_layers_waits_for_all(daemon: FakeDaemon, pool: AttachedPool) -> None:
    step, begun, read = waits(pool), threading.Event(), list[int]()

    def compute() -> None:
        begun.set()
        step.wait_all()
        read.extend(int(pool.planes[layer, "k"][1, 0]) for layer in range(LAYERS))

    engine = threading.Thread(target=compute)
    engine.start()
    assert begun.wait(60)
    for layer in range(LAYERS):
        pool.planes[layer, "k"][1] = layer + 1
        daemon.timeline.write(WORD, BASE + layer + 1)
    engine.join()
    assert read == [layer + 1 for layer in range(LAYERS)]
    assert not step.is_waiting
    step.wait(0)  # returns at once


def test_a_failed_load_ends_the_waits_and_is_known(daemon: FakeDaemon, pool: AttachedPool) -> None:
    step = waits(pool)
    daemon.timeline.write(FAILED_WORD, BASE + LAYERS)
    daemon.timeline.write(WORD, BASE + LAYERS)
    for layer in range(LAYERS):
        step.wait(layer)
    assert step.end(LOAD) is LoadOutcome.FAILED
    assert not step.is_sound


def test_a_wait_that_is_refused_makes_the_step_unsound_though_the_load_comes(
    daemon: FakeDaemon, pool: AttachedPool
) -> None:
    step = waits(pool)
    daemon.timeline.write(WORD, BASE + LAYERS)
    step.wait(LAYERS)  # there is no such layer
    assert step.end(LOAD) is LoadOutcome.CAME
    assert not step.is_sound
    step.begin([LOAD])
    step.wait(LAYERS - 1)
    assert step.is_sound
