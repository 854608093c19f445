"""The lane between real processes: deaths in the middle of frames, retries that change ways, and peers that stop."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from cachesvc_client import CacheClient, DaemonUnavailable, LeaseLost, Transport
from cachesvc_client.wire.life import LifeConnection
from cachesvc_client.wire.methods import MATCH, RELEASE
from cachesvc_client.wire.transports import BlockingLane
from kvcache.v1 import admin_pb2, cache_pb2, cache_pb2_grpc

from cachesvc.wire.lane import METHODS, encode
from tests.e2e.engine import Engine, prompt
from tests.e2e.rig import Node, running_node, wait_until
from tests.e2e.scraping import scrape, total
from tests.forked_command import run_forked

DIES = """
import os, signal, sys
from cachesvc.wire.lane import METHODS, encode
from cachesvc_client.wire.life import LifeConnection
from cachesvc_client.wire.transports import encode_hello

life = LifeConnection(sys.argv[1], 5.0, lambda: None)
life.start()
lane = life.fetch_lane()
frame = encode(METHODS["Match"], 0, 0, 2, b"k" * 100_000)
lane.sendall(encode_hello(1, ()) + frame[: int(sys.argv[2])])
print("sent", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
STOPS = """
import os, signal, sys
from cachesvc.wire.lane import PING, encode
from cachesvc_client.wire.life import LifeConnection
from cachesvc_client.wire.transports import encode_hello

life = LifeConnection(sys.argv[1], 5.0, lambda: None)
life.start()
lane = life.fetch_lane()
lane.sendall(encode_hello(1, ()))
lane.settimeout(0.5)
body = b"p" * 60_000
try:
    while True:
        lane.sendall(encode(PING, 0, 0, 2, body))
except TimeoutError:
    print("full", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@contextmanager
def raw_lane(node: Node) -> Iterator[BlockingLane]:
    """A lane as an engine of another language has it: no client around it."""
    life = LifeConnection(node.socket, 5.0, lambda: None)
    life.start()
    lane = BlockingLane(life.fetch_lane())
    try:
        lane.greet((), 5.0)
        yield lane
    finally:
        lane.close()
        life.close()


def script(text: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", text, *arguments], stdout=subprocess.PIPE, text=True)


def lanes(node: Node) -> int:
    return transports(node)[0]


def transports(node: Node) -> tuple[int, int, int]:
    told = node.admin.GetStatus(admin_pb2.GetStatusRequest(brief=True)).transports
    return told.lanes, told.lane_calls, told.grpc_calls


def test_calls_go_by_the_lane_and_everybody_is_told_which_way() -> None:
    with running_node(["--metrics-listen", "127.0.0.1:0"]) as node, Engine(node.socket) as engine:
        assert engine.client.transport == "lane"
        before = transports(node)
        with engine.lease.match(engine.keys(prompt(1, 4))) as sequence:
            sequence.allocate(4)
        after = transports(node)
        assert (before[0], after[0]) == (1, 1)
        assert after[1] - before[1] == 3
        page = scrape(node)
        assert total(page, "lanes") == 1
        assert total(page, "transport_calls_total", transport="lane") == after[1]
        status = run_forked("cachesvc_ctl", "status", "--socket", node.socket)
        assert f"calls: {after[1]} by lanes (1 open now)" in status.stdout
        assert '"event": "lane_opened"' in node.log()


def test_a_daemon_without_lanes_is_called_by_grpc() -> None:
    with running_node(["--lanes-per-process", "0"]) as node, Engine(node.socket) as engine:
        assert engine.client.transport == "grpc"
        assert engine.serve(prompt(1, 4)).bad == []
        assert transports(node)[:2] == (0, 0)


@pytest.mark.parametrize("sent", [5, 16, 50_000])
def test_a_client_killed_in_the_middle_of_a_frame_costs_its_lane(node: Node, sent: int) -> None:
    with Engine(node.socket) as engine, script(DIES, node.socket, str(sent)) as dying:
        assert dying.stdout is not None
        assert dying.stdout.readline() == "sent\n"
        assert dying.wait() == -signal.SIGKILL
        wait_until(lambda: lanes(node) == 1, "the dead process's lane is gone")
        assert engine.serve(prompt(1, 4)).bad == []


def test_a_daemon_killed_in_the_middle_of_answers_is_told_at_once(node: Node) -> None:
    engine = Engine(node.socket).__enter__()
    assert engine.client.transport == "lane"
    with pytest.raises((DaemonUnavailable, LeaseLost)):
        call_until_lost(engine, node)
    assert engine.client.wait_lost(5.0)
    assert engine.client.transport == ""
    engine.client.close(quiesced=True)


def call_until_lost(engine: Engine, node: Node) -> None:
    """Call without a pause; the daemon is killed meanwhile."""
    keys = engine.keys(prompt(1, 64))
    killing = threading.Timer(0.05, node.daemon.process.kill)
    killing.start()
    try:
        while True:
            engine.lease.match(keys).release()
    finally:
        killing.join()
        node.daemon.process.wait()


def test_what_a_lane_lost_the_answer_of_is_carried_out_once(node: Node) -> None:
    with Engine(node.socket, device_pages=16) as engine:
        request = cache_pb2.MatchRequest(
            lease_id=engine.lease.id, sequence_id=900, keys=engine.keys(prompt(1, 4)), request_id=90_000
        )
        with raw_lane(node) as lane, grpc.insecure_channel(f"unix:{node.socket}") as channel:
            by_lane = lane.call(MATCH, request, 5.0, ())
            stub = cache_pb2_grpc.CacheServiceStub(channel)
            assert stub.Match(request) == by_lane, "the same answer, where a second Match would be a CONFLICT"
            allocate = cache_pb2.AllocateRequest(lease_id=engine.lease.id, sequence_id=900, blocks=4, request_id=90_001)
            by_grpc = stub.Allocate(allocate)
            lane._socket.sendall(encode(METHODS["Allocate"], 0, 0, 50, allocate.SerializeToString()))  # noqa: SLF001
            lane.end("before its answer")
            assert stub.Allocate(allocate) == by_grpc
            assert node.pages("private") == 4
            stub.Release(cache_pb2.ReleaseRequest(lease_id=engine.lease.id, sequence_id=900, request_id=90_002))


def test_a_process_that_is_stopped_with_its_answers_unread_costs_nobody(node: Node) -> None:
    with Engine(node.socket) as engine, script(STOPS, node.socket) as stopped:
        assert stopped.stdout is not None
        assert stopped.stdout.readline() == "full\n"
        began = time.monotonic()
        for seed in range(20):
            assert engine.serve(prompt(seed, 4)).bad == []
        assert time.monotonic() - began < 20.0
        assert lanes(node) == 2, "it is silent, not gone"
        stopped.send_signal(signal.SIGKILL)
        stopped.wait()
        wait_until(lambda: lanes(node) == 1, "the kernel says that it is gone")


def test_a_lane_ends_with_its_life_connection(node: Node) -> None:
    life = LifeConnection(node.socket, 5.0, lambda: None)
    life.start()
    lane = BlockingLane(life.fetch_lane())
    lane.greet((), 5.0)
    life.close()
    wait_until(lambda: lanes(node) == 0, "the lane has ended")
    with pytest.raises(grpc.RpcError):
        lane.call(RELEASE, cache_pb2.ReleaseRequest(lease_id="x"), 5.0, ())
    lane.close()


def test_threads_of_one_client_share_its_lane(node: Node) -> None:
    with Engine(node.socket, device_pages=512) as engine:
        bad: list[str] = []

        def serve(first: int) -> None:
            for seed in range(first, first + 20):
                with engine.lease.match(engine.keys(prompt(seed, 4))) as sequence:
                    sequence.allocate(4)
                    if sequence.blocks != 4:
                        bad.append(f"{seed}: {sequence.blocks}")

        threads = [threading.Thread(target=serve, args=(100 * number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert bad == []
        assert engine.client.transport == "lane"
    with CacheClient(node.socket, transport=Transport.GRPC) as client:
        assert client.transport == "grpc"
