"""Callers with a valid token and bad manners: the ways in which they try to take a daemon from others."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import grpc
from cachesvc_client import CacheClient, Credentials, Lease, opaque, open_remote
from cachesvc_client.wire.life import LifeConnection
from cachesvc_client.wire.transports import BlockingLane
from kvcache.v1 import admin_pb2, cache_pb2

from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.wire.lane import PING, encode
from cachesvc.wire.status import LIFE_SUFFIX, MAX_MESSAGE_BYTES

KEY_BYTES = 32
LAYOUT = opaque(block_bytes=4096, block_tokens=16)
TINY = Layout(1, 1, (PlaneGroup("full"),), (Plane("k", 0, "full", (1,), "uint8"),))
FROZEN = """
import os, signal, socket, sys
held = []
for _ in range(int(sys.argv[2])):
    each = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    each.setblocking(False)
    try:
        each.connect(sys.argv[1])
        each.send(b"LN")
    except OSError:
        pass
    held.append(each)
os.kill(os.getpid(), signal.SIGSTOP)
"""
"""A process that asks for lanes and then stops."""


def fill(lane: socket.socket) -> None:
    """Ask until nothing more goes out."""
    lane.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        for tag in range(1, 1_000_000):
            lane.send(encode(PING, 0, 0, tag, b""))


class Attacker:
    """A caller with a token and bad manners. Each attack takes a second or so; all may be refused."""

    def __init__(self, path: str, token: str, rng: random.Random) -> None:
        self.path = path
        self.token = token
        self.rng = rng
        self.connections: Counter[str] = Counter()
        self._client: CacheClient | None = None
        self._lease: Lease | None = None

    def lease(self) -> Lease:
        """A lease that lives."""
        if self._client is None:
            self._client = CacheClient(self.path, engine="hostile", token=self.token)
            self._client.connect()
        if self._lease is None or self._lease.is_lost:
            self._lease = self._client.open_lease(
                self._client.register("mine", LAYOUT, device_pages=[1024], host_pages=[0])
            )
        return self._lease

    def drop(self) -> None:
        """Give up what it has."""
        client, self._client, self._lease = self._client, None, None
        if client is not None:
            client.close()

    def bare(self) -> contextlib.AbstractContextManager[grpc.Channel]:
        """gRPC with its token."""
        return open_remote(self.path, Credentials(self.token))

    # -- messages ----------------------------------------------------------------------------------------------

    def empty_operations(self) -> None:
        head = cache_pb2.StepRequest(lease_id=self.lease().id, request_id=self.rng.getrandbits(40)).SerializeToString()
        self.stream("Step", [head + b"\x1a\x00" * (MAX_MESSAGE_BYTES // 2 - 100)])

    def unknown_fields(self) -> None:
        self.stream("Step", [b"\xf8\x3f\x00" * (MAX_MESSAGE_BYTES // 3 - 100)])

    def garbage(self) -> None:
        self.stream("Step", [self.rng.randbytes(self.rng.randrange(1 << 20))])

    def empty_keys(self) -> None:
        junk = admin_pb2.ListBlocksRequest(key_hex=[""]).SerializeToString() * 500_000
        with self.bare() as channel:
            call: Any = channel.unary_unary("/kvcache.v1.AdminService/ListBlocks")
            call(junk, timeout=5)

    def long_match(self) -> None:
        for _ in range(8):
            self.lease().match(os.urandom(65536 * KEY_BYTES)).release()

    def many_calls(self) -> None:
        lease = self.lease()
        until = time.monotonic() + 1
        while time.monotonic() < until:
            lease.match(b"").release()

    def large_answers(self) -> None:
        lease = self.lease()
        with lease.match(b"") as sequence:
            sequence.allocate(512)

    def tiny_pages(self) -> None:
        self.lease()
        assert self._client is not None
        self._client.register("tiny", TINY, host_pages=[0])

    def everything(self) -> None:
        """All that its quota gives."""
        lease = self.lease()
        held = [lease.match(b"") for _ in range(self.rng.randrange(200))]
        for each in held:
            each.allocate(8)
        if self.rng.random() < 0.5:
            self.drop()

    def prefetches(self) -> None:
        lease = self.lease()
        for _ in range(50):
            lease.prefetch(os.urandom(512 * KEY_BYTES))

    def stream(self, method: str, messages: list[bytes]) -> None:
        with self.bare() as channel:
            call: Any = channel.stream_stream(f"/kvcache.v1.CacheService/{method}")
            for _ in call(iter(messages), timeout=5):
                break

    # -- questions ---------------------------------------------------------------------------------------------

    def listings(self) -> None:
        with self.bare() as channel:
            for name in ("GetStatus", "ListModels", "ListLeases", "ListSequences", "ListTickets", "ListTenants"):
                call: Any = channel.unary_unary(f"/kvcache.v1.AdminService/{name}")
                for _ in range(20):
                    call(b"", timeout=5)

    # -- connections -------------------------------------------------------------------------------------------

    def silence(self) -> None:
        self.hold("silence", socket.SOCK_STREAM, self.path, 400, b"")

    def half_a_preface(self) -> None:
        self.hold("half_a_preface", socket.SOCK_STREAM, self.path, 200, b"PRI * HTTP/2.0\r\n")

    def life_flood(self) -> None:
        self.hold("life_flood", socket.SOCK_SEQPACKET, self.path + LIFE_SUFFIX, 400, b"")

    def unread_lanes(self) -> None:
        self.hold("unread_lanes", socket.SOCK_SEQPACKET, self.path + LIFE_SUFFIX, 100, b"LN", times=100)

    def unread_answers(self) -> None:
        """Lanes that ask until nothing more goes out, and read nothing."""
        for _ in range(3):
            life = LifeConnection(self.path, 5.0, lambda: None)
            life.start()
            with contextlib.closing(life), ExitStack() as stack:
                for _ in range(8):
                    self.connections["unread_answers"] += 1
                    lane = stack.enter_context(life.fetch_lane())
                    greeter = stack.enter_context(contextlib.closing(BlockingLane(lane.dup())))
                    greeter.greet((("authorization", f"Bearer {self.token}"),), 5.0)
                    fill(lane)
                time.sleep(self.rng.random() / 3)  # what is held is the attack

    def frozen(self) -> None:
        command = [sys.executable, "-c", FROZEN, self.path + LIFE_SUFFIX, "100"]
        with subprocess.Popen(command) as process:
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            self.connections["frozen"] += 100
            time.sleep(self.rng.random())  # what is held is the attack
            process.send_signal(signal.SIGKILL)

    def hold(self, name: str, kind: int, path: str, count: int, says: bytes, times: int = 1) -> None:
        self.connections[name] += count
        with ExitStack() as stack:
            for _ in range(count):
                each = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
                each.setblocking(False)
                with contextlib.suppress(OSError):
                    each.connect(path)
                    for _ in range(times if says else 0):
                        each.send(says)
            time.sleep(self.rng.random())  # what is held is the attack


ENGINES = (
    *("empty_operations", "unknown_fields", "garbage", "empty_keys", "long_match", "many_calls", "large_answers"),
    *("tiny_pages", "everything", "prefetches", "silence", "half_a_preface", "life_flood", "unread_lanes"),
    *("unread_answers", "frozen"),
)
READERS = (
    *("empty_operations", "empty_keys", "garbage", "listings", "silence", "life_flood", "unread_lanes"),
    *("unread_answers", "frozen"),
)
