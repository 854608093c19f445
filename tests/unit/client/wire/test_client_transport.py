"""Deadlines, retries under one id, and the loss of the daemon, over real sockets against a daemon that misbehaves."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from pathlib import Path

import pytest
from cachesvc_client import (
    CacheClient,
    CacheClientError,
    DaemonUnavailable,
    DeadlineExceeded,
    Lease,
    LeaseLost,
    PoolExhausted,
    Retries,
    Timeouts,
)
from cachesvc_client.core.errors import BY_CODE, AlreadyClosed
from cachesvc_client.layouts.families import opaque

from cachesvc.model.errors import ErrorCode
from cachesvc.wire.status import LIFE_SUFFIX
from tests.unit.rigs.client_rig import EPOCH, LEASE_ID, TOKEN, FakeDaemon, break_way, hang_until, lose_answer, refuse

LAYOUT = opaque(block_bytes=64, block_tokens=4)
PROMPT_S = 2.0
"""Far less than any deadline below, far more than a loaded machine needs."""


def connected(daemon: FakeDaemon, *, timeouts: Timeouts | None = None, retries: Retries | None = None) -> CacheClient:
    return CacheClient(
        daemon.path,
        timeouts=timeouts if timeouts is not None else Timeouts(),
        retries=retries if retries is not None else Retries(pause_s=0.001),
    ).connect()


def leased(client: CacheClient) -> Lease:
    return client.open_lease(client.register("m", LAYOUT))


def test_a_life_from_connect_to_close(daemon: FakeDaemon) -> None:
    with connected(daemon) as client, leased(client) as lease:
        assert (client.connected, client.epoch, lease.id) == (True, EPOCH, LEASE_ID)
        assert daemon.seen["Open"][0].process_token == TOKEN
        with lease.match(b"k" * 64, max_blocks=1) as sequence:
            sequence.allocate(2)
            assert [table.tolist() for table in sequence.tables] == [[0, 1]]
            assert sequence.publish(2).sealed_blocks == 2
            assert sequence.release() == 2
        assert lease.prefetch(b"k" * 32).device_blocks == 3
    ids = [daemon.seen[rpc][0].request_id for rpc in ("Match", "Allocate", "Publish", "Release", "Prefetch")]
    assert ids == sorted(set(ids))
    assert [request.quiesced for request in daemon.seen["Close"]] == [True]
    assert not client.connected


def test_an_exception_in_the_engine_claims_no_quiet(daemon: FakeDaemon) -> None:
    def break_down() -> None:
        with connected(daemon) as client, leased(client):
            raise KeyError("the engine's own")

    with pytest.raises(KeyError):
        break_down()
    assert [request.quiesced for request in daemon.seen["Close"]] == [False]


@pytest.mark.parametrize("code", list(ErrorCode))
def test_a_refusal_keeps_its_kind_and_is_never_sent_again(daemon: FakeDaemon, code: ErrorCode) -> None:
    with connected(daemon) as client:
        lease = leased(client)
        daemon.faults["Prefetch"].append(refuse(code, "what to do"))
        with pytest.raises(BY_CODE[code], match="what to do") as caught:
            lease.prefetch(b"")
        assert caught.value.code is code
        assert len(daemon.seen["Prefetch"]) == 1


def test_a_broken_way_is_tried_again_with_the_same_request(daemon: FakeDaemon) -> None:
    with connected(daemon) as client:
        lease = leased(client)
        daemon.faults["Prefetch"] += [break_way, break_way]
        lease.prefetch(b"k" * 32)
        first, *others = daemon.seen["Prefetch"]
        assert others == [first, first]


def test_a_daemon_that_is_slow_to_shake_hands_is_no_broken_way(daemon: FakeDaemon, tmp_path: Path) -> None:
    """A busy node: gRPC gave an attempt to connect no longer than the first pause between two, 50 ms."""
    front = str(tmp_path / "front.sock")
    Path(front + LIFE_SUFFIX).symlink_to(daemon.path + LIFE_SUFFIX)
    busy = threading.Event()

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)

    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as behind:
        listener.bind(front)
        listener.listen()
        client = CacheClient(front, retries=Retries(attempts=1))
        registering = threading.Thread(target=lambda: client.connect().register("m", LAYOUT), daemon=True)
        registering.start()
        taken, _ = listener.accept()
        busy.wait(0.3)
        behind.connect(daemon.path)
        for way in ((taken, behind), (behind, taken)):
            threading.Thread(target=pass_on, args=way, daemon=True).start()
        registering.join(30)
        assert len(daemon.seen["Register"]) == 1
        client.close()
        taken.close()


def test_retries_end(daemon: FakeDaemon) -> None:
    with connected(daemon, retries=Retries(attempts=2, pause_s=0.001)) as client:
        lease = leased(client)
        daemon.faults["Prefetch"] += [break_way, break_way, break_way]
        with pytest.raises(DaemonUnavailable, match="connection reset") as caught:
            lease.prefetch(b"")
        assert not caught.value.is_draining
        assert len(daemon.seen["Prefetch"]) == 2


def test_a_daemon_that_hangs_costs_a_deadline_and_no_more(daemon: FakeDaemon) -> None:
    answered = threading.Event()
    with connected(daemon, timeouts=Timeouts(attach_s=0.05)) as client:
        lease = leased(client)
        daemon.faults["Attach"].append(hang_until(answered))
        with pytest.raises(DeadlineExceeded) as caught:
            lease.attach()
        assert not caught.value.was_answered
        answered.set()


def test_after_a_deadline_the_next_call_first_learns_what_became_of_the_last(daemon: FakeDaemon) -> None:
    with connected(daemon) as client:
        sequence = leased(client).match(b"")
        daemon.faults["Allocate"].append(lose_answer)
        with pytest.raises(DeadlineExceeded) as caught:
            sequence.allocate(3)
        assert not caught.value.was_answered
        assert sequence.blocks == 0
        sequence.publish(2, b"k" * 64)
        assert sequence.blocks == 3
        late, again = daemon.seen["Allocate"]
        assert late == again
        assert daemon.seen["Publish"][0].request_id > again.request_id


def test_a_lost_answer_is_asked_for_until_it_comes_and_a_refusal_leaves_the_next_call_free(daemon: FakeDaemon) -> None:
    with connected(daemon) as client:
        sequence = leased(client).match(b"")
        daemon.faults["Allocate"] += [lose_answer, lose_answer, refuse(ErrorCode.EXHAUSTED)]
        for _ in range(2):
            with pytest.raises(DeadlineExceeded):
                sequence.allocate(3)
        sequence.allocate(2)
        assert sequence.blocks == 2
        first, again, last, fresh = daemon.seen["Allocate"]
        assert first == again == last
        assert (fresh.blocks, fresh.request_id > first.request_id) == (2, True)


def test_a_match_without_an_answer_is_found_and_released_before_the_next(daemon: FakeDaemon) -> None:
    with connected(daemon) as client:
        lease = leased(client)
        daemon.faults["Match"].append(lose_answer)
        with pytest.raises(DeadlineExceeded):
            lease.match(b"k" * 32)
        lease.match(b"k" * 32)
        lost, again, fresh = daemon.seen["Match"]
        assert lost == again
        assert fresh.sequence_id != lost.sequence_id
        assert [request.sequence_id for request in daemon.seen["Release"]] == [lost.sequence_id]


def test_a_release_whose_answer_was_lost_is_asked_for_again_by_the_caller_or_the_next_match(
    daemon: FakeDaemon,
) -> None:
    with connected(daemon) as client:
        lease = leased(client)
        first, second = lease.match(b""), lease.match(b"")
        for sequence in (first, second):
            daemon.faults["Release"].append(lose_answer)
            with pytest.raises(DeadlineExceeded):
                sequence.release()
        assert first.release() == 2
        with pytest.raises(AlreadyClosed):
            first.release()
        lease.match(b"")
        assert [request.sequence_id for request in daemon.seen["Release"]] == [1, 2, 1, 2]
        assert second.is_released


@pytest.mark.parametrize("end", ["close", "hang_up"])
def test_a_call_under_way_ends_with_the_daemon_and_later_ones_end_at_once(daemon: FakeDaemon, end: str) -> None:
    never = threading.Event()
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    with connected(daemon, timeouts=Timeouts(call_s=60, close_s=1)) as client:
        client.on_lost(lambda: lost.put("client"))
        lease = leased(client)
        lease.on_lost(lambda error: lost.put(type(error).__name__))
        sequence = lease.match(b"")
        arrived = threading.Event()
        daemon.faults["Allocate"].append(hang_until(never, arrived))
        killer = threading.Thread(target=lambda: arrived.wait(30) and getattr(daemon, end)())
        killer.start()
        began = time.monotonic()
        with pytest.raises(DaemonUnavailable):
            sequence.allocate(1)
        assert time.monotonic() - began < PROMPT_S
        never.set()
        killer.join()
        assert {lost.get(timeout=PROMPT_S), lost.get(timeout=PROMPT_S)} == {"DaemonUnavailable", "client"}
        assert lost.empty()
        assert not client.connected
        assert lease.is_lost
        for call in (lambda: sequence.allocate(1), lambda: lease.match(b""), lambda: client.register("m", LAYOUT)):
            with pytest.raises(DaemonUnavailable, match="recompute"):
                call()


def test_connecting_to_nobody_or_to_a_stranger_says_so(tmp_path: Path) -> None:
    path = str(tmp_path / "kv.sock")
    with pytest.raises(DaemonUnavailable, match="no daemon at"):
        CacheClient(path).connect()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.bind(path + LIFE_SUFFIX)
        stranger.listen()
        greeter = threading.Thread(target=lambda: stranger.accept()[0].send(b"HELLO"))
        greeter.start()
        with pytest.raises(DaemonUnavailable, match="greets like no daemon"):
            CacheClient(path).connect()
        greeter.join()


def test_a_daemon_that_accepts_and_says_nothing_is_given_up(tmp_path: Path) -> None:
    path = str(tmp_path / "kv.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
        mute.bind(path + LIFE_SUFFIX)
        mute.listen()
        with pytest.raises(DaemonUnavailable, match="timed out"):
            CacheClient(path, timeouts=Timeouts(connect_s=0.05)).connect()


def test_beats_come_several_times_within_the_silence_limit(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path, silence_limit_ms=300)
    daemon.start()
    with connected(daemon) as client:
        lease = leased(client)
        for _ in range(4):
            assert daemon.beats.acquire(timeout=PROMPT_S)
        daemon.draining = True
        assert any(daemon.beats.acquire(timeout=PROMPT_S) and lease.is_draining for _ in range(100))
    daemon.close()


def test_a_beat_that_is_refused_loses_the_lease_and_a_broken_stream_does_not(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path, silence_limit_ms=300)
    daemon.faults["KeepAlive"].append(break_way)
    daemon.start()
    with connected(daemon) as client:
        lease = leased(client)
        told: queue.SimpleQueue[CacheClientError] = queue.SimpleQueue()
        for _ in range(3):
            assert daemon.beats.acquire(timeout=PROMPT_S)
        lease.on_lost(told.put)
        assert not lease.is_lost
        daemon.faults["KeepAlive"].append(refuse(ErrorCode.LEASE_LOST, "it fell silent"))
        assert isinstance(told.get(timeout=PROMPT_S), LeaseLost)
        with pytest.raises(LeaseLost, match="it fell silent"):
            lease.match(b"")
        assert client.connected
    daemon.close()


def test_a_call_that_hears_of_the_loss_tells_the_callbacks_too(daemon: FakeDaemon) -> None:
    with connected(daemon) as client:
        lease = leased(client)
        told: list[CacheClientError] = []
        lease.on_lost(told.append)
        daemon.faults["Match"].append(refuse(ErrorCode.LEASE_LOST, "its process ended"))
        with pytest.raises(LeaseLost):
            lease.match(b"")
        assert len(told) == 1
        lease.on_lost(told.append)
        assert told[0] is told[1]


def test_a_sequence_whose_daemon_went_leaves_its_block_in_peace(daemon: FakeDaemon) -> None:
    with connected(daemon) as client, leased(client) as lease, lease.match(b"") as sequence:
        daemon.hang_up()
        assert client.wait_lost(PROMPT_S)
    assert sequence.is_released


def test_reconnect_registers_anew_and_opens_what_was_open(daemon: FakeDaemon, tmp_path: Path) -> None:
    with connected(daemon) as client:
        kept, closed = leased(client), leased(client)
        closed.close()
        assert client.reconnect() == (kept,), "while the daemon is there: the live leases, unchanged"
        daemon.close()
        assert client.wait_lost(PROMPT_S)
        with pytest.raises(DaemonUnavailable):
            client.reconnect()
        second = FakeDaemon(tmp_path)
        second.start()
        second.faults["Register"].append(refuse(ErrorCode.EXHAUSTED, "came back smaller"))
        with pytest.raises(PoolExhausted):
            client.reconnect()
        with pytest.raises(DaemonUnavailable):
            client.register("m", LAYOUT)
        (fresh,) = client.reconnect()
        assert client.connected
        assert second.seen["Register"][-1] == daemon.seen["Register"][0]
        fresh.match(b"")
        with pytest.raises(DaemonUnavailable):
            kept.match(b"")
        client.close()
        second.close()


def test_a_lost_lease_may_be_closed_after_its_client(daemon: FakeDaemon) -> None:
    with connected(daemon) as client:
        lease = leased(client)
        daemon.hang_up()
        assert client.wait_lost(PROMPT_S)
        client.reconnect()
    lease.close()
    with pytest.raises(AlreadyClosed):
        lease.match(b"")


def test_a_closed_client_and_a_closed_lease_say_so(daemon: FakeDaemon) -> None:
    client = connected(daemon)
    lease = leased(client)
    lease.close()
    lease.close()
    with pytest.raises(AlreadyClosed, match="was closed"):
        lease.match(b"")
    client.close()
    client.close()
    for call in (client.connect, lambda: client.register("m", LAYOUT), client.reconnect):
        with pytest.raises(AlreadyClosed, match="client was closed"):
            call()
    assert len(daemon.seen["Close"]) == 1
