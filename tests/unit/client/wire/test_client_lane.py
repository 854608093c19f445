"""The client's ends of a lane, blocking and awaited, against a daemon's end that a test plays."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from cachesvc_client import CacheClient, DaemonUnavailable, Retries, Transport, opaque
from cachesvc_client.core.errors import DeadlineExceeded, error_of
from cachesvc_client.wire.methods import MATCH
from cachesvc_client.wire.transports import BlockingLane
from kvcache.v1 import cache_pb2
from kvcache.v1.lane_pb2 import LaneWelcome

from cachesvc.model.errors import ErrorCode
from cachesvc.wire.lane import CANCEL, ERROR, HELLO, METHODS, VERSION, Frame, encode
from tests.unit.rigs.client_rig import FakeDaemon, refuse
from tests.unit.rigs.lane_rig import DaemonEnd

LAYOUT = opaque(block_bytes=64, block_tokens=4)
REQUEST = cache_pb2.MatchRequest(lease_id="l", request_id=1)
NUMBER = METHODS["Match"]


@pytest.fixture
def ends() -> Iterator[tuple[BlockingLane, DaemonEnd]]:
    """A lane that was greeted, and its other end."""
    own, theirs = socket.socketpair()
    lane, daemon = BlockingLane(own), DaemonEnd(theirs)
    greeting = threading.Thread(target=daemon.greet)
    greeting.start()
    lane.greet((), 5)
    greeting.join()
    yield lane, daemon
    lane.close()
    theirs.close()


def blocks_of(lane: BlockingLane, timeout_s: float = 30) -> int:
    return lane.call(MATCH, REQUEST, timeout_s, ()).device_blocks


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


Ends = tuple[BlockingLane, DaemonEnd]


def test_whoever_reads_hands_out_what_is_others(ends: Ends) -> None:
    lane, daemon = ends
    got: dict[str, int] = {}
    first = in_thread(lambda: got.update(first=blocks_of(lane)))
    frame = daemon.take()
    second = in_thread(lambda: got.update(second=blocks_of(lane)))
    later = daemon.take()
    daemon.answer(later, 2)
    second.join()
    assert got == {"second": 2}, "its answer did not wait for that of the one who reads"
    third = in_thread(lambda: got.update(third=blocks_of(lane)))
    last = daemon.take()
    daemon.answer(frame, 1)
    first.join()
    daemon.answer(last, 3)
    third.join()
    assert got == {"first": 1, "second": 2, "third": 3}, "when the reader left, another one read on"


def test_closing_it_waits_until_nobody_reads(ends: Ends) -> None:
    lane, daemon = ends
    failures: list[grpc.RpcError] = []

    def ask() -> None:
        with pytest.raises(grpc.RpcError) as failed:
            blocks_of(lane)
        failures.append(failed.value)

    reading = in_thread(ask)
    daemon.take()
    lane.close()
    reading.join()
    assert isinstance(error_of(failures[0]), DaemonUnavailable)


def test_what_is_late_is_cancelled_and_its_answer_is_nobodys(ends: Ends) -> None:
    lane, daemon = ends
    with pytest.raises(grpc.RpcError) as failed:
        blocks_of(lane, 0.01)
    assert isinstance(error_of(failed.value), DeadlineExceeded)
    asked, cancelled = daemon.take(), daemon.take()
    assert (cancelled.method, cancelled.tag) == (CANCEL, asked.tag)
    assert 1 <= asked.deadline <= 2
    daemon.answer(asked, 9)
    calling = in_thread(lambda: daemon.answer(daemon.take(), 5))
    assert blocks_of(lane) == 5
    calling.join()


def test_a_daemon_that_ends_in_the_middle_of_an_answer_breaks_the_way(ends: Ends) -> None:
    lane, daemon = ends

    def die() -> None:
        frame = daemon.take()
        daemon.socket.sendall(encode(NUMBER, 0, 0, frame.tag, b"x" * 100)[:40])
        daemon.socket.close()

    dying = in_thread(die)
    with pytest.raises(grpc.RpcError) as failed:
        blocks_of(lane)
    dying.join()
    assert isinstance(error_of(failed.value), DaemonUnavailable)
    assert not lane.has_room
    with pytest.raises(grpc.RpcError):
        blocks_of(lane)


def test_a_daemon_that_writes_before_it_reads_is_read_meanwhile(ends: Ends) -> None:
    lane, daemon = ends
    noise = encode(NUMBER, 0, 0, 1 << 40, b"n" * 60_000)

    def write_first() -> None:
        frame = daemon.take()
        for _ in range(100):
            daemon.socket.sendall(noise)
        while frame.tag != 3:
            frame = daemon.take()
        daemon.answer(frame, 4)

    writing = in_thread(write_first)
    with pytest.raises(grpc.RpcError):
        blocks_of(lane, 0.01)
    large = cache_pb2.MatchRequest(lease_id="l", keys=b"k" * (4 << 20))
    assert lane.call(MATCH, large, 30, ()).device_blocks == 4
    writing.join()


def test_calls_beyond_what_the_lane_carries_at_a_time_find_no_room(ends: Ends) -> None:
    lane, daemon = ends
    callers = [in_thread(lambda: blocks_of(lane)) for _ in range(12)]
    frames = [daemon.take() for _ in callers]
    assert not lane.has_room, "what may wait leaves some frames to Steps"
    for frame in frames:
        daemon.answer(frame)
    for caller in callers:
        caller.join()
    assert lane.has_room


def test_an_error_at_hello_and_another_version_take_no_lane() -> None:
    for answer in (
        encode(0, ERROR, 0, 1, cache_pb2.OperationError(code="UNAUTHENTICATED", message="no").SerializeToString()),
        encode(HELLO, 0, 0, 1, LaneWelcome(version=VERSION + 1, methods=[*METHODS.values()]).SerializeToString()),
        encode(HELLO, 0, 0, 1, LaneWelcome(version=VERSION, methods=[1]).SerializeToString()),
    ):
        own, theirs = socket.socketpair()
        with theirs:
            theirs.sendall(answer)
            lane = BlockingLane(own)
            with pytest.raises(DaemonUnavailable):
                lane.greet((), 5)
            lane.close()


def test_a_child_keeps_no_end_of_the_lane_open(ends: Ends) -> None:
    lane, daemon = ends
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    lane.close()
    assert daemon.next() is None, "the child lives still, and its copy is closed"
    os.close(writing)
    os.waitpid(child, 0)


# -- which way a connection takes ------------------------------------------------------------------------------


class Breaking:
    """A daemon's lane that takes a number of calls and ends without an answer to the last."""

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.lanes = 0
        self.seen: list[Frame] = []
        self.tokens: list[str] = []

    def __call__(self, end: socket.socket) -> None:
        self.lanes += 1
        with end:
            daemon = DaemonEnd(end)
            self.tokens.append(daemon.greet().token)
            while (frame := daemon.next()) is not None:
                self.seen.append(frame)
                if len(self.seen) > self.answers:
                    return
                if frame.method == METHODS["Step"]:
                    request_id = cache_pb2.StepRequest.FromString(frame.body).request_id
                    body = cache_pb2.StepResponse(request_id=request_id).SerializeToString()
                    end.sendall(encode(frame.method, 0, 0, frame.tag, body))
                else:
                    daemon.answer(frame)


def connected(daemon: FakeDaemon, transport: Transport = Transport.AUTO) -> CacheClient:
    return CacheClient(daemon.path, retries=Retries(pause_s=0.001), transport=transport).connect()


def test_an_older_daemon_is_called_by_grpc(daemon: FakeDaemon) -> None:
    with connected(daemon) as client, client.open_lease(client.register("m", LAYOUT)) as lease:
        assert client.transport == "grpc"
        lease.match(b"").release()
    assert client.transport == ""
    assert len(daemon.seen["Match"]) == 1


def test_a_lane_may_be_turned_off(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon.lane = Breaking(100)
    with connected(daemon, Transport.GRPC) as client:
        assert client.transport == "grpc"
    monkeypatch.setenv("CACHESVC_TRANSPORT", "grpc")
    with CacheClient(daemon.path) as client:
        assert client.transport == "grpc"
    monkeypatch.delenv("CACHESVC_TRANSPORT")
    with CacheClient(daemon.path) as client:
        assert client.transport == "lane"


def test_a_retry_changes_ways_under_the_same_request_id(daemon: FakeDaemon) -> None:
    daemon.lane = lane = Breaking(0)
    with connected(daemon) as client, client.open_lease(client.register("m", LAYOUT)) as lease:
        assert client.transport == "lane"
        lease.match(b"k" * 64)
        assert client.transport == "grpc"
    [by_lane], [by_grpc] = lane.seen, daemon.seen["Match"]
    assert cache_pb2.MatchRequest.FromString(by_lane.body) == by_grpc


def test_steps_go_on_by_grpc_and_come_back_to_a_lane(daemon: FakeDaemon) -> None:
    daemon.lane = lane = Breaking(1)
    daemon.step_answers.extend(cache_pb2.StepResponse() for _ in range(1000))
    with connected(daemon) as client, client.open_lease(client.register("m", LAYOUT)) as lease, lease.step() as stream:
        stream.submit()
        stream.submit()
        assert (len(lane.seen), len(daemon.seen["Step"])) == (2, 1)
        sent = cache_pb2.StepRequest.FromString(lane.seen[1].body)
        assert daemon.seen["Step"] == [sent], "the one without an answer, under its own id"
        lane.answers = 100
        stream.submit()
        assert len(daemon.seen["Step"]) == 2, "a lane that broke is not asked for again at once"
        while client.transport != "lane":
            assert not client.wait_lost(0.05)
            stream.submit()
        by_grpc = len(daemon.seen["Step"])
        stream.submit()
        assert (lane.lanes, len(daemon.seen["Step"])) == (2, by_grpc)


def test_another_token_takes_another_lane(daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.lane = lane = Breaking(100)
    file = tmp_path / "token"
    file.write_text("first", encoding="utf-8")
    with CacheClient(daemon.path, token_file=str(file)) as client:
        registration = client.register("m", LAYOUT)
        with client.open_lease(registration) as lease:
            lease.match(b"").release()
            file.write_text("second", encoding="utf-8")
            daemon.faults["Register"].append(refuse(ErrorCode.UNAUTHENTICATED))
            client.register("m", LAYOUT)
            lease.match(b"").release()
            assert client.transport == "lane"
    assert lane.tokens == ["first", "second"]
    assert len(lane.seen) == 4


def test_the_end_of_the_daemon_ends_calls_on_the_lane_at_once(daemon: FakeDaemon) -> None:
    arrived = threading.Event()

    def hang(end: socket.socket) -> None:
        theirs = DaemonEnd(end)
        theirs.greet()
        theirs.take()
        arrived.set()
        with contextlib.suppress(OSError):
            theirs.next()

    daemon.lane = hang
    client = connected(daemon)
    lease = client.open_lease(client.register("m", LAYOUT))
    failed: list[Exception] = []

    def call() -> None:
        try:
            lease.match(b"k" * 64)
        except DaemonUnavailable as gone:
            failed.append(gone)

    calling = in_thread(call)
    arrived.wait(30)
    began = time.monotonic()
    daemon.close()
    calling.join()
    assert len(failed) == 1
    assert time.monotonic() - began < 2.0, "far before its deadline"
    client.close(quiesced=False)
