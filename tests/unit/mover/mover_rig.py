"""Waits for tests of movers."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from cachesvc import __version__
from cachesvc.memory.host_pool import Neighbours
from cachesvc.memory.shm import ShmBackend
from cachesvc.model.errors import Unavailable
from cachesvc.mover.life import MoverProcess
from cachesvc.mover.processes import MoverProcesses
from cachesvc.mover.records import Settings
from cachesvc.mover.server import Equipment, MoverServer
from cachesvc.swap.planner import LinkCosts


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
        ours, theirs = socket.socketpair()

        def equip(settings: Settings, neighbours: Neighbours) -> Equipment:
            views = {settings.device: neighbours}
            backend = ShmBackend(1, settings.device_bytes, names=(settings.device,), neighbours=views)

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

            return Equipment(backend, dict, measure, stores_at_once=store)

        threading.Thread(target=MoverServer(theirs, __version__, equip).serve, daemon=True).start()
        return ours, None

    settings = [Settings("shm", f"shm-{place}", 1 << 20) for place in range(len(rates))]
    return MoverProcesses(settings, __version__, begins=[partial(begin, rate) for rate in rates], **limits)
