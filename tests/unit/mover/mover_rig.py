"""Movers in threads of this process, engines on movers, and waits for what they log."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from cachesvc import __version__
from cachesvc.memory.host_pool import Neighbours
from cachesvc.memory.shm import ShmBackend
from cachesvc.model.errors import Unavailable
from cachesvc.model.layout import device_geometry
from cachesvc.mover.life import MoverProcess
from cachesvc.mover.processes import MoverProcesses
from cachesvc.mover.records import Settings
from cachesvc.mover.server import Equipment, MoverServer
from cachesvc.swap.engine import SwapEngine
from cachesvc.swap.planner import LinkCosts
from tests.unit.rigs.swap_rig import DEVICE_PAGES, MODEL, Rig, mixed_layout


class Heard(logging.Handler):
    """Waits for what the daemon's side logs."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            self._said.append(record.getMessage())
            self._changed.notify_all()

    def wait(self, name: str, count: int = 1) -> None:
        with self._changed:
            self._changed.wait_for(lambda: sum(said.startswith(name) for said in self._said) >= count)


@contextmanager
def heard_from(name: str) -> Iterator[Heard]:
    """Listener of a logger, for a while."""
    handler, log = Heard(), logging.getLogger(name)
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


def freeze(pid: int) -> None:
    """Stop a child, and wait until it has stopped: one of its threads may answer until then."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def in_thread(
    equip: Callable[[Settings, Neighbours], Equipment], process: MoverProcess | None = None
) -> tuple[socket.socket, MoverProcess | None]:
    """A mover in a thread of this process, and the daemon's end of its connection."""
    ours, theirs = socket.socketpair()
    threading.Thread(target=MoverServer(theirs, __version__, equip).serve, daemon=True).start()
    return ours, process


def shm_of(settings: Settings, neighbours: Neighbours) -> ShmBackend:
    return ShmBackend(
        1,
        settings.device_bytes,
        timeline_words=settings.timeline_words,
        names=(settings.device,),
        neighbours={settings.device: neighbours},
    )


def shm_settings(*devices: str) -> list[Settings]:
    return [Settings("shm", device, 1 << 20, timeline_words=64) for device in devices]


def engine_on(movers: MoverProcesses, layers_per_step: int | None = None) -> Rig:
    """An engine on movers that have started, with host pages and no replica yet."""
    rig = Rig(mixed_layout(1), movers)
    rig.engine = SwapEngine(movers, rig.done, layers_per_step=layers_per_step)
    rig.engine.start()
    rig.add_hosts()
    return rig


def attach_on(rig: Rig, replica: int, device: str) -> None:
    """Attach a replica of the rig's model on one device."""
    sizes = [device_geometry(rig.layout, group, DEVICE_PAGES).total_bytes for group in range(2)]
    slabs = [[rig.backend.create_slab(device, size) for size in sizes]]
    rig.engine.attach_replica(MODEL, replica, (device,), slabs, [DEVICE_PAGES] * 2)


def measured_movers(
    figures: dict[str, Any],
    rates: Sequence[float],
    begins: list[float],
    hangs: Mapping[str, threading.Event] | None = None,
    refuses: Collection[tuple[str, str]] = (),
    **limits: Any,
) -> MoverProcesses:
    """Movers in threads, a device each, that measure these figures, and one of the rates when all store at once;
    ``begins``: the times at which they were to begin. ``hangs``: devices whose measuring does not end before an
    event. ``refuses``: pairs of a device and a measurement that it refuses."""

    def begin(rate: float) -> tuple[socket.socket, MoverProcess | None]:
        def equip(settings: Settings, neighbours: Neighbours) -> Equipment:
            def check(name: str) -> None:
                if (settings.device, name) in refuses:
                    raise Unavailable(f"{settings.device} cannot be measured")

            def store(at: float, seconds: float) -> float:
                check("stores_at_once")
                assert seconds > 0
                begins.append(at)
                return rate

            def measure() -> tuple[dict[str, Any], LinkCosts]:
                check("measure")
                if hangs and settings.device in hangs:
                    hangs[settings.device].wait()
                return figures, LinkCosts()

            return Equipment(shm_of(settings, neighbours), dict, measure, stores_at_once=store)

        return in_thread(equip)

    settings = [Settings("shm", f"shm-{place}", 1 << 20) for place in range(len(rates))]
    return MoverProcesses(settings, __version__, begins=[partial(begin, rate) for rate in rates], **limits)
