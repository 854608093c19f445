"""Two nodes on one machine: a network namespace each, a cable between them, and what an operator gives to each."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType

import grpc
import pytest
from cachesvc_ctl.core.daemon_process import DaemonProcess
from kvcache.v1 import admin_pb2_grpc

from tests.e2e.access.test_access import Authority
from tests.e2e.engine import Engine, Served, prompt
from tests.e2e.rig import FLAGS, Node, wait_until
from tests.e2e.storage.far_link import FarLink, open_device

PORT = 7100
BLOCKS, LONG = 8, 64
"""Blocks of a prompt, and of one whose transfer takes a while."""
CLONE_NEWNET = 0x40000000
"""Flag of setns(2); Python has it from 3.12 on."""
TOKEN = "a-token-that-only-nodes-know-0123456789"


@cache
def why_not() -> str:
    """Reason why there can be no namespaces here; empty where there can."""
    for program in ("ip", "tc", "openssl"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    name = f"cs-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not permitted here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class Network:
    """Sides 0 and 1, at ``address(side)``. Skips the test, in words, where it cannot be made.

    ``far``: the link after a ``delay``, in place of the cable."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = [f"cs{os.getpid()}-{side}" for side in range(2)]
        self.far: FarLink | None = None
        self._files: list[tuple[str, str]] = []

    def __enter__(self) -> Network:
        if why := why_not():
            pytest.skip(why)
        for name in self.names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", "v0", "netns", self.names[0], "type", "veth", "peer", "v1", "netns", self.names[1])
        self._plug()
        authority = Authority(self.folder)
        self._files = [authority.sign(f"n{side}", side + 2, f"IP:{self.address(side)}") for side in range(2)]
        (self.folder / "tokens").write_text(f"{TOKEN}\n", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.far is not None:
            self.far.close()
        for name in self.names:
            _run("ip", "netns", "del", name)

    @staticmethod
    def address(side: int) -> str:
        return f"10.77.0.{side + 1}"

    def flags(self, side: int, wait: str) -> list[str]:
        """Flags of a daemon that lends to the other side and borrows from it."""
        return [
            *("--peer-listen", f"{self.address(side)}:{PORT}", "--peer-data-port", str(PORT + 1)),
            *("--peers", f"{self.address(1 - side)}:{PORT}{wait}", "--peer-lease-seconds", "2"),
            *self.trust(side),
        ]

    def trust(self, side: int) -> list[str]:
        """Flags of a daemon by which it and the other one know each other."""
        certificate, key = self._files[side]
        return [
            *("--peer-tokens", str(self.folder / "tokens")),
            *("--peer-tls-certificate", certificate, "--peer-tls-key", key),
            *("--peer-tls-ca", str(self.folder / "root.pem")),
        ]

    def cut(self) -> None:
        """Drop all packets, without a report to either side."""
        _run("ip", "-n", self.names[0], "link", "set", "v0", "down")

    def mend(self) -> None:
        _run("ip", "-n", self.names[0], "link", "set", "v0", "up")

    def slow_down(self, rate: str = "1mbit") -> None:
        """Limit the rate at which side 0 sends."""
        shape = ("root", "tbf", "rate", rate, "burst", "16kbit", "latency", "200ms")
        _run("tc", "-n", self.names[0], "qdisc", "replace", "dev", "v0", *shape)

    def delay(self, seconds: float, loss: float) -> FarLink:
        """Delay what either side sends from now on, and lose that share of the packets: a link in user space takes the
        cable's place, at the same addresses. Skips the test where the kernel has no tun devices."""
        devices: list[int] = []
        _run("ip", "-n", self.names[0], "link", "del", "v0")  # the other end goes with it
        try:
            for side in range(2):
                with self.inside(side):
                    devices.append(open_device(f"v{side}"))
        except OSError as error:
            for each in devices:
                os.close(each)
            pytest.skip(f"tun devices are not permitted here: {error}")
        self.far = FarLink(devices, seconds, loss)
        self._plug()
        return self.far

    def _plug(self) -> None:
        """Give both ends their addresses, and begin."""
        for side, name in enumerate(self.names):
            _run("ip", "-n", name, "addr", "add", f"{self.address(side)}/24", "dev", f"v{side}")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", f"v{side}", "up")

    def speed_up(self) -> None:
        _run("tc", "-n", self.names[0], "qdisc", "del", "dev", "v0", "root")

    @contextmanager
    def inside(self, side: int) -> Iterator[None]:
        """This thread, and each process that it starts meanwhile, is on that side."""
        with (
            Path("/proc/thread-self/ns/net").open("rb") as home,
            Path("/run/netns", self.names[side]).open("rb") as there,
        ):
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())

    @contextmanager
    def node(self, side: int, wait: str = "?wait=5s&deadline=20s", extra: Sequence[str] = ()) -> Iterator[Node]:
        """A daemon on one side that lends, and borrows of the other one."""
        with self.daemon(side, [*self.flags(side, wait), *extra]) as node:
            yield node

    @contextmanager
    def daemon(self, side: int, flags: Sequence[str]) -> Iterator[Node]:
        """A daemon on one side. Its socket is reached from all sides."""
        under = ["ip", "netns", "exec", self.names[side]]
        daemon = DaemonProcess([*FLAGS, *flags], under=under)
        with ExitStack() as stack:
            daemon.start()
            stack.callback(daemon.stop)
            channel = stack.enter_context(grpc.insecure_channel(f"unix:{daemon.socket}"))
            node = Node(daemon, admin_pb2_grpc.AdminServiceStub(channel), channel)
            wait_until(node.has_host_pool, "the host pool is populated")
            yield node


def engine_on(node: Node) -> Engine:
    """With room for two long prompts."""
    return Engine(node.socket, device_pages=2 * LONG, host_pages=512)


def serve(engine: Engine, seed: int, blocks: int = BLOCKS) -> Served:
    """Answer a prompt; it fails the test unless every byte is right."""
    served = engine.serve(prompt(seed, blocks))
    assert served.bad == [], "every byte that is served is right"
    assert served.device + served.host + served.computed == blocks
    return served


def _enter(namespace: int) -> None:
    """Enter a network's namespace, by the file that stands for it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
