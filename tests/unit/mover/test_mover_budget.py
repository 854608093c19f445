"""The node's budget between real movers: who is held, who passes, and how it is measured."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from cachesvc import __version__
from cachesvc.model.errors import Unavailable
from cachesvc.model.words import PagePairs, Transfer, Urgency
from cachesvc.mover.processes import MoverProcesses
from tests.unit.mover.mover_rig import attach_on, engine_on, measured_movers, shm_settings
from tests.unit.rigs.swap_rig import MODEL, REPLICA, STORE, Rig

DEVICES = ("shm-0", "shm-1")
AHEAD_S = 9.0
"""Longer than this test takes, and within the times that count."""


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Two movers, and a replica on the second one's device."""
    movers = MoverProcesses(shm_settings(*DEVICES), __version__)
    movers.start()
    made = engine_on(movers)
    attach_on(made, REPLICA, DEVICES[1])
    yield made
    made.close()


def store(rig: Rig, ticket: int, urgency: Urgency) -> None:
    pairs = (PagePairs(0, [ticket], [ticket]),)
    rig.engine.submit(Transfer(ticket, MODEL, REPLICA, STORE, pairs, layered=False, urgency=urgency))


def test_a_mover_holds_its_background_copies_while_another_ones_awaited_run_and_goes_on_after_them(rig: Rig) -> None:
    assert isinstance(rig.backend, MoverProcesses)
    budget = rig.backend.budget
    budget.set(1)  # byte a second: after the first slice none has room
    other = budget.of(0)
    other.begin_awaited(time.monotonic() + AHEAD_S)
    for ticket in (1, 2):
        store(rig, ticket, Urgency.BACKGROUND)
    store(rig, 3, Urgency.AWAITED)
    rig.settle(2)
    other.begin_awaited(time.monotonic() + AHEAD_S)
    store(rig, 4, Urgency.AWAITED)
    rig.settle()
    assert {ticket for ticket, _ in rig.ended} == {1, 3, 4}
    other.end_awaited()
    rig.settle()
    assert rig.ended[-1] == (2, None)
    assert not other.have_awaited(time.monotonic()), "a mover without awaited copies says so"


@pytest.mark.parametrize(("rates", "budget"), [((1e9, 1e9), 500e6), ((20e9, 20e9), 0)])
def test_all_movers_are_measured_at_once_and_the_budget_is_a_share_of_that(
    rates: tuple[float, ...], budget: float
) -> None:
    begins: list[float] = []
    movers = measured_movers({"store_bytes_per_us": 20e3}, rates, begins)
    movers.start()
    assert movers.budget.bytes_per_second == 0
    assert len(movers.measure()) == len(rates)
    assert movers.budget.bytes_per_second == budget
    assert len(begins) == len(rates)
    assert len(set(begins)) == 1
    movers.close()


def test_a_device_whose_measuring_hangs_is_left_out_and_the_others_have_figures_and_a_budget() -> None:
    figures, begins, goes_on = {"store_bytes_per_us": 20e3}, list[float](), threading.Event()
    movers = measured_movers(figures, (1e9, 1e9, 1e9), begins, {"shm-1": goes_on}, start_seconds=0.2)
    movers.start()
    assert movers.measure() == {"shm-0": figures, "shm-2": figures}
    assert movers.budget.bytes_per_second == 500e6
    assert len(begins) == 2
    goes_on.set()
    movers.close()


@pytest.mark.parametrize("name", ["measure", "stores_at_once"])
def test_a_device_that_refuses_to_be_measured_keeps_no_other_from_serving(name: str) -> None:
    figures, begins = {"store_bytes_per_us": 20e3}, list[float]()
    movers = measured_movers(figures, (1e9, 1e9, 1e9), begins, refuses=[("shm-1", name)])
    movers.start()
    assert list(movers.measure()) == [f"shm-{place}" for place in (0, 1, 2) if name != "measure" or place != 1]
    assert movers.budget.bytes_per_second == 500e6
    assert len(begins) == 2
    assert movers.fault("shm-1") == ""
    movers.close()


def test_a_start_at_which_no_device_can_be_measured_is_refused() -> None:
    refuses = [(device, "measure") for device in DEVICES]
    movers = measured_movers({}, (1e9, 1e9), [], refuses=refuses)
    movers.start()
    with pytest.raises(Unavailable, match="cannot be measured"):
        movers.measure()
    movers.close()
