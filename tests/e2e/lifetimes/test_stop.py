"""An orderly stop: engines learn that the daemon goes before another one can answer in its place."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
from cachesvc_client import CacheClient, CacheClientError, DaemonUnavailable, Lease
from kvcache.v1 import admin_pb2, admin_pb2_grpc

from tests.e2e.engine import PLAIN, Engine, prompt
from tests.e2e.remote import ROOT
from tests.e2e.rig import LOOK_SECONDS, Node, running_node, wait_until

ENGINES = 12


@contextmanager
def waiting_daemon(path: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another daemon, which takes the socket over as soon as it can."""
    command = [sys.executable, "-m", "tests.e2e.waiting_daemon", path]
    with log.open("wb") as out, subprocess.Popen(command, cwd=ROOT, stderr=out) as process:
        try:
            yield process
        finally:
            process.terminate()


class Caller:
    """An engine that matches one prompt again and again until the daemon refuses; its answers, and when they came."""

    def __init__(self, path: str) -> None:
        self.client = CacheClient(path).connect()
        self.lease: Lease = self.client.open_lease(self.client.register("model@1", PLAIN, device_pages=[16]))
        self.lease.on_lost(self._lose)
        self.lost = threading.Event()
        self.lost_at = self.refused_at = 0.0
        self.calls = 0
        self.refusal: CacheClientError | None = None

    def _lose(self, _: CacheClientError) -> None:
        self.lost_at = time.monotonic()
        self.lost.set()

    def call_until_refused(self) -> None:
        """Returns at the first refusal; that the daemon drains, and opens nothing new, is not one yet."""
        while self.refusal is None:
            try:
                with self.lease.match(b""):
                    self.calls += 1
            except CacheClientError as refusal:
                if "draining" not in str(refusal):
                    self.refused_at = time.monotonic()
                    self.refusal = refusal


def test_no_call_reaches_the_next_daemon_under_a_lease_of_the_last(folder: Path) -> None:
    log = folder / "next.log"
    with (
        ExitStack() as stack,
        running_node(["--drain-seconds", "1"], folder=folder) as node,
        waiting_daemon(node.socket, log) as following,
        ThreadPoolExecutor(ENGINES) as threads,
    ):
        callers = [Caller(node.socket) for _ in range(ENGINES)]
        for caller in callers:
            stack.callback(caller.client.close)
        ends = [threads.submit(caller.call_until_refused) for caller in callers]
        wait_until(lambda: all(caller.calls > 8 for caller in callers), "everybody calls")
        node.daemon.process.terminate()
        for end in ends:
            end.result()
        for caller in callers:
            caller.lost.wait()
        late = max(caller.lost_at - caller.refused_at for caller in callers)
        print(f"told of the loss at most {late * 1e3:.1f} ms after the first refused call")
        assert [type(caller.refusal) for caller in callers] == [DaemonUnavailable] * ENGINES
        wait_until(lambda: b'"ready"' in log.read_bytes(), "the next daemon serves")
        assert node.daemon.process.wait() == 0, "which waits until the last one has ended"
        with Engine(node.socket) as engine:
            assert engine.serve(prompt(1, 2)).bad == [], "its files are its own"
        assert following.poll() is None


def test_the_life_connection_ends_before_the_daemon_lets_go_of_its_socket() -> None:
    with running_node(["--drain-seconds", "1"]) as node, Engine(node.socket) as engine:
        engine.serve(prompt(1, 2))  # its lease's stream keeps a call under way
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as life:
            life.connect(f"{node.socket}.life")
            assert life.recv(64)
            node.daemon.process.terminate()
            while is_answered(node):
                select.select([], [], [], LOOK_SECONDS / 20)
            assert select.select([life], [], [], 0)[0], "who is refused can know by then that the daemon is gone"
            assert life.recv(64) == b""
        assert node.daemon.process.wait() == 0


def is_answered(node: Node) -> bool:
    """True while a new connection is served."""
    with grpc.insecure_channel(f"unix:{node.socket}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(brief=True))
        except grpc.RpcError:
            return False
    return True
