"""Callers that never read, never finish, never stop or never begin: the others are served, and the daemon does not
grow."""

from __future__ import annotations

import itertools
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
from cachesvc_client import DaemonUnavailable, NotFound
from cachesvc_client.wire.life import LifeConnection
from cachesvc_client.wire.transports import encode_hello
from kvcache.v1 import cache_pb2, cache_pb2_grpc, lease_pb2, lease_pb2_grpc

from benchmarks.chaos.proc import MIB, bytes_beside_pools
from cachesvc.wire.lane import PING, encode
from tests.chaos.rude import half_message, idle
from tests.e2e.engine import WAIT_SECONDS, Engine, prompt
from tests.e2e.remote import RemoteEngine
from tests.e2e.rig import Node, running_node, wait_until

HOST_BYTES = 64 << 20
"""Host pool that ``running_node`` asks for."""
GROWTH_BYTES = 64 * MIB
"""Allowed for gRPC's windows and for remembered answers, some 7 MiB a stream; a leak of these floods is gigabytes."""
STEP = b"/kvcache.v1.CacheService/Step"


@pytest.fixture
def node() -> Iterator[Node]:
    with running_node() as running:
        yield running


@pytest.fixture(autouse=True)
def _descriptors() -> Iterator[None]:
    """Allow as many descriptors as the machine lets this process have."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def bounded(node: Node) -> Iterator[Engine]:
    """An engine that must be served all the time, beside a daemon that may not grow."""
    with Engine(node.socket, name="polite", device_pages=16) as engine:
        engine.serve(prompt(1, 8))
        pid = node.daemon.process.pid
        before = bytes_beside_pools(pid, HOST_BYTES)
        yield engine
        engine.serve(prompt(1, 8))
        for _ in range(50):
            served = engine.serve(prompt(1, 8))
            assert (served.device, served.bad) == (8, [])
        assert bytes_beside_pools(pid, HOST_BYTES) - before < GROWTH_BYTES


def own_channel(node: Node) -> grpc.Channel:
    return grpc.insecure_channel(f"unix:{node.socket}", options=[("grpc.use_local_subchannel_pool", 1)])


def test_a_stream_whose_answers_nobody_reads(node: Node) -> None:
    sent = itertools.count()
    last = 0

    def steps(lease: str) -> Iterator[cache_pb2.StepRequest]:
        nonlocal last
        for number in range(1, 100_000):
            last = next(sent)
            yield cache_pb2.StepRequest(
                lease_id=lease, request_id=number, operations=[cache_pb2.StepOperation()] * 1000
            )  # each operation is answered by an error of some hundred bytes

    with bounded(node) as engine, ExitStack() as open_streams:
        calls = []
        for which in range(4):
            rude = open_streams.enter_context(Engine(node.socket, name=f"rude {which}", device_pages=16))
            channel = open_streams.enter_context(own_channel(node))
            calls.append(cache_pb2_grpc.CacheServiceStub(channel).Step(steps(rude.lease.id)))
        for call in calls:
            assert next(iter(call)).results, "it was answered, and now the client stops reading"

        def is_stuck() -> bool:
            before = last
            for number in range(2, 40):
                assert engine.serve(prompt(number, 4)).bad == []
            return last == before

        wait_until(is_stuck, "the daemon takes no more than its answers find room for")
        assert last < 20_000
        for call in calls:
            call.cancel()


def test_messages_that_never_end(node: Node) -> None:
    with bounded(node) as engine, ExitStack() as halves:
        for _ in range(300):
            halves.enter_context(half_message(node.socket, STEP, 4 << 20, b"x" * 8000))
        assert engine.serve(prompt(2, 8)).computed == 8


def test_a_flood_of_beats(node: Node) -> None:
    stop = threading.Event()
    with bounded(node) as engine, ExitStack() as floods:
        lease = engine.lease.id
        answered = [0] * 4

        def flood(which: int, answers: Any) -> None:
            for _ in answers:
                answered[which] += 1

        threads = []
        for which in range(len(answered)):
            stub = lease_pb2_grpc.LeaseServiceStub(floods.enter_context(own_channel(node)))
            beats = stub.KeepAlive(lease_pb2.KeepAliveRequest(lease_id=lease) for _ in iter(stop.is_set, True))
            threads.append(threading.Thread(target=flood, args=(which, beats)))
            threads[-1].start()
        try:
            wait_until(lambda: min(answered) > 1000, "the flood is on")
            for number in range(2, 12):
                assert engine.serve(prompt(number, 4)).bad == []
        finally:
            stop.set()
            for thread in threads:
                thread.join()


@pytest.mark.parametrize("suffix", ["", ".life"])
def test_a_thousand_connections_that_say_nothing(node: Node, suffix: str) -> None:
    kind = socket.SOCK_SEQPACKET if suffix else socket.SOCK_STREAM
    with ExitStack() as silent, bounded(node) as engine:
        for _ in range(1500):
            silent.enter_context(idle(node.socket + suffix, kind))
        with RemoteEngine(node.socket, name="late", device_pages=16) as late:  # this process has its share
            late.ask("start")
            assert late.ask("serve", tokens=prompt(1, 8))["bad"] == []
        assert engine.serve(prompt(2, 8)).computed == 8


def test_a_daemon_without_descriptors_serves_on_and_takes_engines_again(node: Node) -> None:
    pid = node.daemon.process.pid
    with bounded(node) as engine, ExitStack() as silent:
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (100, before[1]))
        for _ in range(100):
            silent.enter_context(idle(node.socket + ".life", socket.SOCK_SEQPACKET))
        wait_until(lambda: "life_not_accepting" in node.log(), "descriptors have run out")
        for number in range(2, 12):
            assert engine.serve(prompt(number, 4)).bad == []
        assert node.log().count("life_not_accepting") < 20, "it does not spin"
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        silent.close()

        def comes() -> bool:
            try:
                with Engine(node.socket, name="late", device_pages=16) as late:
                    return late.serve(prompt(1, 8)).bad == []
            except DaemonUnavailable:
                return False

        wait_until(comes, f"engines come again within {WAIT_SECONDS} s")


def test_lanes_whose_answers_nobody_reads(node: Node) -> None:
    with bounded(node), ExitStack() as stack:
        for _ in range(4):
            life = LifeConnection(node.socket, WAIT_SECONDS, lambda: None)
            life.start()
            stack.callback(life.close)
            for _ in range(8):
                flood(stack.enter_context(life.fetch_lane()))
            with pytest.raises(NotFound, match="lanes of this process"):
                life.fetch_lane()


def flood(lane: socket.socket) -> None:
    """Pings until the daemon reads no further."""
    lane.setblocking(True)
    lane.sendall(encode_hello(1, ()))
    lane.settimeout(0.2)
    try:
        for tag in itertools.count(2):
            lane.sendall(encode(PING, 0, 0, tag, b""))
    except TimeoutError:
        return
