"""Engines and the daemon die, hang and come back; no engine gets a page that another may still write."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from cachesvc_client import DaemonUnavailable, LeaseLost, PoolExhausted, Reattacher, TicketView, Timeouts
from cachesvc_client.core.errors import error_of
from kvcache.v1 import cache_pb2, cache_pb2_grpc

from cachesvc.model.words import TimelineSlot
from tests.e2e.engine import WAIT_SECONDS, Engine, is_full, prompt
from tests.e2e.remote import RemoteEngine, RemoteRefused
from tests.e2e.rig import Node, running_node, wait_until

pytestmark = pytest.mark.usefixtures("each_way")

DEVICE_PAGES = 12
NOBODY = 65534
HUNG = ("--lease-seconds", "0.5")


def serve_and_write(engine: RemoteEngine) -> None:
    """Four sealed blocks, and four that are being written when this returns."""
    assert engine.ask("serve", tokens=prompt(1, 4))["computed"] == 4
    engine.ask("match", name="open", tokens=prompt(2, 4))
    engine.ask("allocate", name="open", blocks=4)
    engine.ask("fill_forever", name="open", first=0, last=4)


def test_a_killed_engine_leaves_its_sealed_blocks_and_nothing_else(node: Node) -> None:
    with RemoteEngine(node.socket, device_pages=DEVICE_PAGES) as engine:
        engine.ask("start")
        serve_and_write(engine)
        assert node.pages("private") == 4
        engine.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(node.held().values()), "its private pages are free")
    assert node.pages("sealed") == 4
    with Engine(node.socket, device_pages=DEVICE_PAGES) as successor:
        served = successor.serve(prompt(1, 6))
        assert (served.device, served.computed, served.bad) == (4, 2, [])
        assert successor.serve(prompt(2, 4)).device == 0


def test_a_dead_engines_pages_wait_for_its_last_worker(node: Node) -> None:
    with RemoteEngine(node.socket, device_pages=DEVICE_PAGES) as engine:
        granted = engine.ask("start")
        with RemoteEngine(node.socket, worker=granted) as worker:
            assert worker.ask("start") == 4
            serve_and_write(engine)
            engine.send_signal(signal.SIGKILL)
            wait_until(lambda: node.pages("quarantined") == 4, "its private pages are quarantined")
            assert node.pages("private") == 0
            assert node.pages("sealed") == 4
            assert node.lease_states() == {granted["lease"]: "quarantined"}
            with Engine(node.socket, device_pages=DEVICE_PAGES) as other:
                assert other.serve(prompt(1, 4)).device == 4
                with (
                    other.lease.match(b"") as sequence,
                    pytest.raises(PoolExhausted, match=r"wanted 9 pages.*quarantined 4, capacity 12"),
                ):
                    sequence.allocate(9)
            worker.send_signal(signal.SIGKILL)
        wait_until(lambda: node.pages("quarantined") == 0, "no process can write them any more")
    assert node.lease_states() == {}


@contextmanager
def hung_engine(node: Node) -> Iterator[RemoteEngine]:
    """An engine with four sealed blocks and four open ones that was stopped until its lease was lost."""
    with RemoteEngine(node.socket, device_pages=DEVICE_PAGES) as engine:
        lease = engine.ask("start")["lease"]
        engine.ask("serve", tokens=prompt(1, 4))
        engine.ask("match", name="open", tokens=prompt(2, 4))
        engine.ask("allocate", name="open", blocks=4)
        engine.ask("fill", name="open", first=0, last=4)
        engine.send_signal(signal.SIGSTOP)
        wait_until(lambda: node.lease_states() == {lease: "quarantined"}, "the silent lease is lost")
        assert node.pages("quarantined") == 4
        yield engine


def test_a_hung_engines_pages_are_nobodys_until_it_says_that_it_is_quiet() -> None:
    with running_node(HUNG) as node, hung_engine(node) as engine:
        with Engine(node.socket, device_pages=DEVICE_PAGES) as other:
            assert other.serve(prompt(1, 4)).device == 4
            with (
                other.lease.match(b"") as sequence,
                pytest.raises(PoolExhausted, match=r"wanted 9 pages, free 4, evictable 4.*quarantined 4, capacity 12"),
            ):
                sequence.allocate(9)
            assert not is_full(other, 8)
        assert node.pages("quarantined") == 4

        engine.send_signal(signal.SIGCONT)
        with pytest.raises(RemoteRefused) as refused:
            engine.ask("publish", name="open", blocks=4)
        assert refused.value.kind == "LeaseLost"
        assert node.pages("quarantined") == 4
        engine.ask("close", quiesced=True)
        assert node.pages("quarantined") == 0
        with Engine(node.socket, device_pages=DEVICE_PAGES) as other:
            assert other.serve(prompt(2, 4)).device == 0, "what it wanted to publish must not be a hit"


def test_the_daemon_itself_refuses_a_lost_lease() -> None:
    with running_node(HUNG) as node, hung_engine(node):
        (lease,) = node.lease_states()
        publish = cache_pb2.PublishRequest(lease_id=lease, request_id=99, sequence_id=2, blocks=4)
        with pytest.raises(grpc.RpcError) as refused:
            cache_pb2_grpc.CacheServiceStub(node.channel).Publish(publish)
        error = error_of(refused.value)
        assert isinstance(error, LeaseLost)
        assert "silent for more than 0.5 s" in str(error)
        assert node.pages("quarantined") == 4


def test_a_hung_engines_pages_are_free_once_it_is_killed() -> None:
    with running_node(HUNG) as node, hung_engine(node) as engine:
        engine.send_signal(signal.SIGKILL)
        wait_until(lambda: node.pages("quarantined") == 0, "the process is gone")
        with Engine(node.socket, device_pages=DEVICE_PAGES) as other:
            assert not is_full(other, DEVICE_PAGES)


def test_an_engine_that_is_not_sure_leaves_its_pages_quarantined_until_it_ends(node: Node) -> None:
    with RemoteEngine(node.socket, device_pages=DEVICE_PAGES) as engine:
        engine.ask("start")
        engine.ask("match", name="open", tokens=prompt(1, 4))
        engine.ask("allocate", name="open", blocks=4)
        engine.ask("close", quiesced=False)
        assert node.pages("quarantined") == 4
    wait_until(lambda: node.pages("quarantined") == 0, "the process has ended")


def test_engines_go_on_when_the_daemon_dies_and_come_back_when_it_does(folder: Path) -> None:
    long = Timeouts(call_s=10 * WAIT_SECONDS, wait_s=10 * WAIT_SECONDS)
    with running_node(folder=folder) as node:
        engine = Engine(node.socket, timeouts=long).start()
        keys = engine.keys(prompt(1, 6))
        sequence = engine.lease.match(keys)
        sequence.allocate(6)
        engine.fill(sequence, keys, range(6))
        losses: list[str] = []
        engine.lease.on_lost(lambda error: losses.append(type(error).__name__))
        end = (int(engine.pool.timeline[0]) + 100) & 0xFFFFFFFF
        never = TicketView(1, "running", "", TimelineSlot(0, 1, end - 1, 1), "load", 1, 1)
        with ThreadPoolExecutor() as threads:
            waits = [
                threads.submit(engine.pool.wait_layer, never, 0, 10 * WAIT_SECONDS),
                threads.submit(engine.pool.wait_ticket, never, 10 * WAIT_SECONDS),
            ]
            node.daemon.process.send_signal(signal.SIGKILL)
            node.daemon.process.wait()
            assert engine.client.wait_lost(WAIT_SECONDS)
            for wait in waits:
                assert isinstance(wait.exception(WAIT_SECONDS), DaemonUnavailable)
        for call in (lambda: sequence.publish(6), lambda: engine.lease.match(keys), engine.client.reconnect):
            with pytest.raises(DaemonUnavailable):
                call()
        wait_until(lambda: losses == ["DaemonUnavailable"], "the lease's owner was told")
        assert engine.bad(sequence, keys, range(6)) == [], "the mapping outlives the daemon"

    with running_node(folder=folder) as again:
        before = engine.registration.epoch
        (lease,) = engine.client.reconnect()
        engine.take(lease)
        assert engine.registration.epoch != before
        served = engine.serve(prompt(1, 6))
        assert (served.device, served.computed) == (0, 6)
        assert engine.serve(prompt(1, 6)).device == 6
        engine.close()
        assert again.lease_states() == {}


def test_a_reattacher_comes_back_by_itself(folder: Path) -> None:
    with running_node(folder=folder) as node:
        engine = Engine(node.socket).start()
        back: list[int] = []
        with Reattacher(engine.client, lambda leases: back.append(len(leases))):
            node.daemon.process.send_signal(signal.SIGKILL)
            node.daemon.process.wait()
            with running_node(folder=folder) as again:
                wait_until(lambda: back == [1], "the client has come back")
                assert list(again.lease_states().values()) == ["live"]
                engine.close()


def test_both_sockets_are_for_their_owner_alone(node: Node) -> None:
    for path in (Path(node.socket), Path(node.socket + ".life")):
        assert path.is_socket()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


CONNECT_AS = """
import os, socket, sys
os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
kind = socket.SOCK_SEQPACKET if sys.argv[2].endswith(".life") else socket.SOCK_STREAM
peer = socket.socket(socket.AF_UNIX, kind)
try:
    peer.connect(sys.argv[2])
    print("greeted" if peer.recv(64) else "turned away")
except PermissionError:
    print("no permission")
except ConnectionResetError:
    print("turned away")
"""


def connect_as(uid: int, path: str) -> str:
    """Result of a process of that user at a socket."""
    command = [sys.executable, "-c", CONNECT_AS, str(uid), path]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try as another user")
def test_another_user_is_turned_away(folder: Path) -> None:
    folder.chmod(0o755)
    with running_node(folder=folder) as node:
        life = node.socket + ".life"
        assert connect_as(NOBODY, node.socket) == "no permission"
        assert connect_as(NOBODY, life) == "no permission"
        Path(life).chmod(0o666)  # the file's mode is the first line of defence, the peer's uid the second
        assert connect_as(NOBODY, life) == "turned away"
        assert connect_as(0, life) == "greeted"
        assert f'"uid": {NOBODY}' in node.log()
        assert '"life_connection_refused"' in node.log()


def test_who_connects_again_and_again_takes_no_descriptors(node: Node) -> None:
    """Like an engine whose daemon was away; each time the daemon watches its process anew."""
    descriptors = Path(f"/proc/{node.daemon.process.pid}/fd")

    def greet() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as life:
            life.connect(f"{node.socket}.life")
            assert life.recv(64).startswith(b"KVL1")

    greet()
    before = len(list(descriptors.iterdir()))
    for _ in range(64):
        greet()
    with Engine(node.socket, host_pages=0) as engine:
        engine.serve(prompt(1, 2))
        for _ in range(64):
            greet()
        assert engine.serve(prompt(1, 2)).device == 2, "who is connected stays"
    greet()
    wait_until(lambda: len(list(descriptors.iterdir())) < before + 16, "those who hung up are forgotten")
