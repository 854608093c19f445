"""Real daemons for the end-to-end tests, and what is asked of them from outside."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
from cachesvc_ctl.core.daemon_process import DaemonProcess
from kvcache.v1 import admin_pb2, admin_pb2_grpc

from tests.forked_daemon import ForkedDaemon

LOOK_SECONDS = 0.02
BOUND_SECONDS = 60.0
FLAGS = ("--backend", "shm", "--device-pool", "64MiB", "--host-pool", "64MiB", "--drain-seconds", "0")


class Node:
    """One daemon process, and its AdminService."""

    def __init__(self, daemon: DaemonProcess, admin: admin_pb2_grpc.AdminServiceStub, channel: grpc.Channel) -> None:
        self.daemon = daemon
        self.admin = admin
        self.channel = channel

    @property
    def socket(self) -> str:
        """Path of the gRPC socket."""
        return self.daemon.socket

    def counters(self) -> dict[str, int]:
        """Counters by name; those that never counted are missing."""
        return dict(self.admin.GetStatus(admin_pb2.GetStatusRequest()).counters)

    def pages(self, state: str, place: str = "") -> int:
        """Pages in a state, over all models and groups; ``place`` is "host", "replica 0" or empty for both."""
        pools = self.admin.GetStatus(admin_pb2.GetStatusRequest()).pools
        return sum(getattr(pool, state) for pool in pools if place in ("", pool.place))

    def held(self) -> dict[str, int]:
        """Pages held or in flight, by state: all zero once no engine holds any."""
        return {state: self.pages(state) for state in ("private", "in_flight", "quarantined")}

    def has_host_pool(self) -> bool:
        """True once the whole host pool has come: a test that wants its pages shall not race its threads."""
        status = self.admin.GetStatus(admin_pb2.GetStatusRequest())
        return status.host_pool_ready_bytes == status.host_pool_bytes

    def lease_states(self) -> dict[str, str]:
        """State of every lease that is known, by id."""
        leases = self.admin.ListLeases(admin_pb2.ListLeasesRequest()).leases
        return {lease.lease_id: lease.state for lease in leases}

    def problems(self) -> list[str]:
        """Problems that Verify finds."""
        return list(self.admin.Verify(admin_pb2.VerifyRequest()).problems)

    def log(self) -> str:
        """Whole lines of the daemon's log so far: the last one may be half written."""
        whole, end, _ = self.daemon.log.read_text(encoding="utf-8", errors="replace").rpartition("\n")
        return whole + end


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Look again and again until ``holds``; fails the test after a bound that no sound run comes near."""
    until = time.monotonic() + BOUND_SECONDS
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < until, f"still not so: {what}"
        pause.wait(LOOK_SECONDS)


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name (pytest's own are too long for that)."""
    with tempfile.TemporaryDirectory(prefix="e2e-") as folder:
        yield Path(folder)


@contextmanager
def running_node(flags: Sequence[str] = (), folder: Path | None = None) -> Iterator[Node]:
    """A daemon; at the end its books are checked and it must stop with exit code 0, unless it was ended before."""
    daemon = ForkedDaemon([*FLAGS, *flags], folder=None if folder is None else str(folder))
    daemon.start()
    try:
        with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
            node = Node(daemon, admin_pb2_grpc.AdminServiceStub(channel), channel)
            wait_until(node.has_host_pool, "the host pool is populated")
            yield node
            if daemon.process.poll() is None:
                check_books(node)
                assert not [line for line in node.log().splitlines() if "Traceback" in line], node.log()
    finally:
        was_ended = daemon.process.poll() is not None
        code = daemon.stop()
    assert was_ended or code == os.EX_OK


def check_books(node: Node) -> None:
    """Check that no page is held, and that every page is in exactly one place."""
    wait_until(lambda: not any(node.held().values()), f"all pages came back: {node.held()}")
    assert node.problems() == []
