"""Daemons that are killed while they are replayed to: SIGKILL, and a new one on the same socket and storage."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import grpc
from kvcache.v1 import admin_pb2, admin_pb2_grpc

from cachesvc_ctl.core.daemon_process import DaemonProcess

ANSWER_SECONDS = 10.0
"""A channel finds the next daemon at its socket within that."""


class Lives:
    """The daemons of one replay, one after another. ``count`` changes before one dies and after the next one serves:
    while it stays the same, no daemon has ended. ``daemon``: None where the replay did not start it."""

    def __init__(self, daemon: DaemonProcess | None) -> None:
        self.count = 0
        self.restarts = 0
        self._daemon = daemon
        self._lost: Counter[str] = Counter()

    def restart(self, admin: admin_pb2_grpc.AdminServiceStub, kill_engines: Callable[[], None]) -> None:
        """Kill the daemon and its engines, and start the next one. Raises DaemonFailed."""
        assert self._daemon is not None, "a replay kills the daemon that it started"
        self._lost.update(status_counters(admin))
        self.count += 1
        self._daemon.kill()
        kill_engines()
        self._daemon.start()
        self.restarts += 1
        self.count += 1

    def counters(self, admin: admin_pb2_grpc.AdminServiceStub) -> dict[str, int]:
        """Counters of this daemon, and of earlier ones as last read."""
        return dict(self._lost + Counter(status_counters(admin)))


class Restarter(threading.Thread):
    """Restarts every ``seconds`` until it is ``over``. ``error``: why it ended before."""

    def __init__(
        self,
        lives: Lives,
        seconds: float,
        over: threading.Event,
        admin: admin_pb2_grpc.AdminServiceStub,
        kill_engines: Callable[[], None],
    ) -> None:
        super().__init__(name="restarts", daemon=True)
        self.error: Exception | None = None
        self._lives = lives
        self._seconds = seconds
        self._over = over
        self._admin = admin
        self._kill_engines = kill_engines

    def run(self) -> None:
        """Restart until the replay is over."""
        try:
            while not self._over.wait(self._seconds):
                self._lives.restart(self._admin, self._kill_engines)
        except Exception as error:  # noqa: BLE001 - the root of this thread; the run reports it
            self.error = error


def status_counters(admin: admin_pb2_grpc.AdminServiceStub) -> dict[str, int]:
    """The daemon's counters. Raises grpc.RpcError where the daemon stays unreachable."""
    status = admin.GetStatus(admin_pb2.GetStatusRequest(), wait_for_ready=True, timeout=ANSWER_SECONDS)
    return dict(status.counters)


def counters_now(admin: admin_pb2_grpc.AdminServiceStub) -> dict[str, int] | None:
    """The daemon's counters; None while there is no daemon."""
    try:
        return dict(admin.GetStatus(admin_pb2.GetStatusRequest()).counters)
    except grpc.RpcError:
        return None
