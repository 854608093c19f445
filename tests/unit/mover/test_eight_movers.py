"""Eight movers, one of which hangs: at the daemon's start, and under load. The other seven serve all the while."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from cachesvc import __version__
from cachesvc.model.errors import Unavailable
from cachesvc.model.words import PagePairs, Transfer, Urgency
from cachesvc.mover.life import Begin, MoverProcess, child
from cachesvc.mover.processes import MoverProcesses
from cachesvc.mover.server import Equipment
from tests.unit.mover.mover_rig import attach_on, engine_on, freeze, heard_from, in_thread, shm_of, shm_settings
from tests.unit.rigs.swap_rig import LOAD, MODEL, STORE, Rig

MOVERS = 8
NAMES = tuple(f"shm-{number}" for number in range(MOVERS))
HUNG = MOVERS - 1
TURNS = 4


def sound() -> tuple[socket.socket, MoverProcess | None]:
    return in_thread(lambda settings, neighbours: Equipment(shm_of(settings, neighbours), dict))


def movers_with(last: Begin, *, probe_seconds: float = 10.0, start_seconds: float = 10.0) -> MoverProcesses:
    """Seven movers in threads, and ``last``."""
    limits: dict[str, Any] = {"probe_seconds": probe_seconds, "start_seconds": start_seconds}
    return MoverProcesses(shm_settings(*NAMES), __version__, begins=[*[sound] * HUNG, last], **limits)


def rig_on(movers: MoverProcesses, places: Sequence[int]) -> Rig:
    """A model with a replica on each of these devices, of the device's number."""
    rig = engine_on(movers)
    for place in places:
        attach_on(rig, place, NAMES[place])
    return rig


def swap(rig: Rig, places: Sequence[int]) -> None:
    """A load and a backup on each device; all end well."""
    first = len(rig.ended)
    for place in places:
        for way, urgency in ((LOAD, Urgency.AWAITED), (STORE, Urgency.BACKGROUND)):
            pairs = (PagePairs(0, [place], [place]), PagePairs(1, [place], [20 + place]))
            rig.engine.submit(Transfer(next(rig.tickets), MODEL, place, way, pairs, layered=False, urgency=urgency))
    rig.settle(2 * len(places))
    assert all(error is None for _, error in rig.ended[first:])


@pytest.fixture
def hanging() -> Iterator[tuple[Begin, Callable[[], None]]]:
    """Beginning of a mover that does not answer until it is released."""
    released = threading.Event()

    def begin() -> tuple[socket.socket, MoverProcess | None]:
        if released.is_set():
            return sound()
        ours, theirs = socket.socketpair()

        def hang() -> None:
            released.wait()
            theirs.close()

        threading.Thread(target=hang, daemon=True).start()
        return ours, None

    yield begin, released.set
    released.set()


def test_a_mover_that_hangs_at_the_start_is_not_waited_for_and_serves_once_it_can(
    hanging: tuple[Begin, Callable[[], None]],
) -> None:
    begin, release = hanging
    movers = movers_with(begin, start_seconds=0.05)
    with heard_from("cachesvc.mover") as heard:
        movers.start()
        heard.wait("mover_start_not_waited_for device=shm-7")
        assert movers.fault(NAMES[HUNG]) == "its mover has not started yet"
        rig = rig_on(movers, range(HUNG))
        swap(rig, range(HUNG))
        with pytest.raises(Unavailable, match="does not work"):
            movers.create_slab(NAMES[HUNG], 4096)
        release()
        heard.wait("mover_started device=shm-7")
    assert movers.fault(NAMES[HUNG]) == ""
    attach_on(rig, HUNG, NAMES[HUNG])
    swap(rig, range(MOVERS))
    rig.close()


def test_a_mover_that_only_starts_late_tells_operators_that_it_has() -> None:
    released = threading.Event()

    def late() -> tuple[socket.socket, MoverProcess | None]:
        released.wait()
        return sound()

    movers = movers_with(late, start_seconds=0.05)
    with heard_from("cachesvc.mover") as heard:
        movers.start()
        released.set()
        heard.wait("mover_started device=shm-7")
    assert movers.fault(NAMES[HUNG]) == ""
    movers.close()


def test_a_mover_that_hangs_under_load_costs_the_seven_others_nothing() -> None:
    movers = movers_with(partial(child, NAMES[HUNG]), probe_seconds=0.2)
    lost: list[str] = []
    movers.tell_losses(lambda device, _: lost.append(device))
    movers.start()
    rig = rig_on(movers, range(MOVERS))
    movers.budget.set(1 << 40)
    swap(rig, range(MOVERS))
    freeze(movers.mover_pids()[NAMES[HUNG]])
    movers.budget.of(HUNG).begin_awaited(time.monotonic())  # it has stopped while an awaited load ran
    stuck = next(rig.tickets)
    rig.engine.submit(Transfer(stuck, MODEL, HUNG, LOAD, (PagePairs(0, [1], [1]),), layered=False))
    for _ in range(TURNS):
        swap(rig, range(HUNG))
    assert stuck not in dict(rig.ended)
    with heard_from("cachesvc.mover.device") as heard:
        movers.probe()
        heard.wait("mover_started")
    rig.settle()
    ticket, error = rig.ended[-1]
    assert ticket == stuck
    assert isinstance(error, Unavailable)
    assert lost == [NAMES[HUNG]]
    swap(rig, range(HUNG))
    rig.close()
