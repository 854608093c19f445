"""Several daemons for one replay, as several nodes: each lends to the others, and borrows of them."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from cachesvc_client.wire.credentials import open_remote
from cachesvc_client.wire.settings import as_path
from kvcache.v1 import admin_pb2_grpc

from cachesvc_ctl.core.daemon_process import DaemonProcess
from cachesvc_ctl.lab.replay.restarts import status_counters

WAIT = "?wait=2s&deadline=10s"
"""Limits for a machine that both nodes share, where a replay shows what comes over."""

Admin = admin_pb2_grpc.AdminServiceStub


@contextmanager
def running_nodes(flags: Sequence[str], count: int, *, has_storage: bool) -> Iterator[list[DaemonProcess]]:
    """Run ``count`` daemons with these flags. With a storage, its options count for what is borrowed too."""
    with ExitStack() as stack:
        ports = _free_ports(count) if count > 1 else []
        daemons = []
        for number in range(count):
            others = ",".join(f"127.0.0.1:{port}" for at, port in enumerate(ports) if at != number)
            peers: tuple[str, ...] = ("--peer-listen", f"127.0.0.1:{ports[number]}") if ports else ()
            if others:
                peers += ("--peers", others if has_storage else others + WAIT)
            daemons.append(stack.enter_context(DaemonProcess([*flags, *peers])))
        yield daemons


class OtherNodes:
    """The nodes of a replay beside its first one."""

    def __init__(self, sockets: Sequence[str]) -> None:
        self.sockets = tuple(sockets)
        self._before: Counter[str] = Counter()
        self._admins: list[Admin] = []
        self._stack = ExitStack()

    def __enter__(self) -> OtherNodes:
        for path in self.sockets:
            channel = self._stack.enter_context(open_remote(as_path(path)))
            self._admins.append(admin_pb2_grpc.AdminServiceStub(channel))
        self._before = self._sum()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def counted(self) -> dict[str, int]:
        """Increase of their counters since the start."""
        now = self._sum()
        return {name: count - self._before[name] for name, count in now.items()}

    def settled(self, settle: Callable[[Admin], str]) -> str:
        """Combined result of ``settle``: "ok", or the problem of the first daemon that has one."""
        return next((said for said in map(settle, self._admins) if said != "ok"), "ok")

    def _sum(self) -> Counter[str]:
        out: Counter[str] = Counter()
        for admin in self._admins:
            out.update(status_counters(admin))
        return out


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
