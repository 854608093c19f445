"""A hostile caller's cost falls on that caller: an engine of another tenant goes on, and the daemon stays small."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from cachesvc_client import CacheClient, LimitExceeded, NotFound, QuotaExceeded, Unauthenticated
from cachesvc_client.core.errors import error_of
from cachesvc_client.wire.life import LifeConnection
from kvcache.v1 import admin_pb2, cache_pb2

from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.service.host.life import MAX_OF_PROCESS
from cachesvc.wire.status import LIFE_GREETING, LIFE_SUFFIX, MAX_MESSAGE_BYTES
from tests.e2e.access.test_access import guarded, port_of
from tests.e2e.access.test_tenants import TOKENS, TWO_TENANTS, channel_of, engine_of
from tests.e2e.engine import WAIT_SECONDS, prompt
from tests.e2e.remote import RemoteEngine, RemoteRefused
from tests.e2e.rig import short_folder, wait_until

MIB = 1 << 20
FILES = 1024
QUOTAS = '[quota.tenants.a]\ndevice_bytes = "1MiB"\nmodels = 1\nleases = 4\npages = 4096\nbytes_per_second = "4MiB"\n'
MAX_GROWTH_BYTES = 96 * MIB
"""Limit of the daemon's growth, whatever is sent to it."""
BOMB = b"\x1a\x00" * (MAX_MESSAGE_BYTES // 2 - 64)
"""A Step of four million operations that say nothing."""
TINY = Layout(1, 1, (PlaneGroup("full"),), (Plane("k", 0, "full", (1,), "uint8"),))


class Stage:
    """A daemon that may open few files, and an engine of tenant b that must not notice what happens to it."""

    def __init__(self, socket_path: str, pid: int, port: int, victim: RemoteEngine) -> None:
        self.socket = socket_path
        self.pid = pid
        self.port = port
        self.victim = victim
        self._seed = 0
        self._before = self.resident_bytes

    @property
    def resident_bytes(self) -> int:
        """Resident memory of the daemon."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * resource.getpagesize()

    def newcomer(self) -> RemoteEngine:
        """One more engine of tenant b, to be told to start."""
        return RemoteEngine(self.socket, name="newcomer", device_pages=64)

    def lets_in(self) -> bool:
        """True where one more engine can start and serve."""
        self._seed += 1
        with self.newcomer() as other:
            try:
                other.ask("start")
            except RemoteRefused:
                return False
            return bool(other.ask("serve", tokens=prompt(self._seed, 2))["computed"] == 2)

    def check(self) -> None:
        """The victim serves a prompt twice: nothing is refused, the second time it is a hit. The daemon is small."""
        self._seed += 1
        tokens = prompt(self._seed, 2)
        self.victim.ask("serve", tokens=tokens)
        assert self.victim.ask("serve", tokens=tokens)["device"] == 2
        assert self.resident_bytes - self._before < MAX_GROWTH_BYTES


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    limited = ("sh", "-c", f'ulimit -n {FILES}; exec "$@"', "sh")
    with ExitStack() as stack:
        folder = stack.enter_context(short_folder())
        daemon = stack.enter_context(guarded(folder, TWO_TENANTS + QUOTAS, "--listen", "127.0.0.1:0", under=limited))
        monkeypatch.setenv("CACHESVC_TOKEN", TOKENS["b"])
        victim = stack.enter_context(RemoteEngine(daemon.socket, name="b", device_pages=64))
        victim.ask("start")
        made = Stage(daemon.socket, daemon.process.pid, port_of(daemon), victim)
        made.check()
        yield made
        made.check()
        assert "Traceback" not in daemon.log.read_text(encoding="utf-8")


def refused(call: Callable[[], object]) -> Exception:
    """The typed error of a call by bare gRPC."""
    with pytest.raises(grpc.RpcError) as error:
        call()
    return error_of(error.value)


@contextmanager
def connections(path: str, kind: socket.SocketKind, count: int) -> Iterator[list[socket.socket]]:
    """Connections that say nothing; fewer where the daemon takes no more."""
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            each = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            each.settimeout(WAIT_SECONDS)
            with contextlib.suppress(OSError):
                each.connect(path)
                made.append(each)
        yield made


@contextmanager
def life_connections(path: str, count: int) -> Iterator[list[socket.socket]]:
    """Life connections of this process that were greeted."""

    def is_greeted(connection: socket.socket) -> bool:
        try:
            return connection.recv(256).startswith(LIFE_GREETING)
        except ConnectionError:
            return False

    with connections(path + LIFE_SUFFIX, socket.SOCK_SEQPACKET, count) as made:
        yield [each for each in made if is_greeted(each)]


# -- messages ----------------------------------------------------------------------------------------------------------


def test_a_message_of_four_million_entries_is_refused_before_they_are_objects(stage: Stage) -> None:
    with engine_of(stage.socket, "a") as a, channel_of(stage.socket, "a") as engine:
        step: Any = engine.stream_stream("/kvcache.v1.CacheService/Step")
        head = cache_pb2.StepRequest(lease_id=a.lease.id, request_id=10**6).SerializeToString()
        kinds = set()
        for _ in range(6):
            with contextlib.suppress(grpc.RpcError):
                kinds.add(type(refused(lambda: next(step(iter([head + BOMB]))))))
            stage.check()
        assert kinds <= {LimitExceeded, QuotaExceeded}
        assert LimitExceeded in kinds, "operations of a step"
    with channel_of(stage.socket, "viewer of a") as reader:
        asked: Any = reader.unary_unary("/kvcache.v1.AdminService/ListBlocks")
        junk = admin_pb2.ListBlocksRequest(key_hex=[""]).SerializeToString() * 100_000
        for _ in range(8):
            assert isinstance(refused(lambda: asked(junk)), LimitExceeded | QuotaExceeded)
        stage.check()


def test_bytes_are_charged_to_the_tenant_that_sends_them(stage: Stage) -> None:
    with engine_of(stage.socket, "a") as a:
        keys = os.urandom(65536 * 32)

        def send_often() -> None:
            for _ in range(16):
                with a.lease.match(keys):
                    pass

        with pytest.raises(QuotaExceeded, match="bytes_per_second of tenant 'a'"):
            send_often()
        stage.check()


def test_nothing_is_read_of_whoever_shows_no_token(stage: Stage) -> None:
    """Answered before its message has come, so nothing of it is held."""
    never = threading.Event()

    def silence() -> Iterator[bytes]:
        never.wait(WAIT_SECONDS)
        yield from ()

    with grpc.insecure_channel(f"127.0.0.1:{stage.port}") as tcp, grpc.insecure_channel(f"unix:{stage.socket}") as unix:
        for channel in (tcp, unix):
            for method in (
                "/grpc.health.v1.Health/Check",
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                "/kvcache.v1.AdminService/GetStatus",
                "/kvcache.v1.CacheService/Match",
            ):
                call: Any = channel.stream_unary(method)
                assert isinstance(refused(partial(call, silence())), Unauthenticated)
    never.set()


def test_readers_from_elsewhere_send_small_messages(stage: Stage) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{stage.port}") as tcp:
        call: Any = tcp.unary_unary("/kvcache.v1.AdminService/ListBlocks")
        proof = (("authorization", f"Bearer {TOKENS['viewer of a']}"),)
        with pytest.raises(grpc.RpcError, match="larger than max"):
            call(bytes(MIB), metadata=proof)


def test_a_pool_of_tiny_pages_is_refused_at_once(stage: Stage) -> None:
    with CacheClient(stage.socket, token=TOKENS["a"]) as client:
        with pytest.raises(QuotaExceeded, match="quota pages of tenant 'a'"):
            client.register("tiny", TINY, device_pages=[65536], host_pages=[0])
        assert client.register("tiny", TINY, host_pages=[0]).device_pages == (4096,), "a share is what the quota leaves"


# -- connections -------------------------------------------------------------------------------------------------------


def test_silent_connections_take_no_descriptor_that_others_need(stage: Stage) -> None:
    with connections(stage.socket, socket.SOCK_STREAM, 2 * FILES):
        stage.check()
        wait_until(stage.lets_in, "they are hung up on, and others get in")


def test_a_process_that_floods_the_life_socket_keeps_no_other_out(stage: Stage) -> None:
    with life_connections(stage.socket, FILES) as held:
        assert len(held) <= MAX_OF_PROCESS
        stage.check()
        assert stage.lets_in()


def test_whoever_asks_for_descriptors_and_reads_none_is_hung_up_on_alone(stage: Stage) -> None:
    with life_connections(stage.socket, 40) as held:
        for connection in held:
            with contextlib.suppress(OSError):
                for _ in range(200):
                    connection.send(b"LN", socket.MSG_DONTWAIT)
        stage.check()
        for connection in held:
            with contextlib.suppress(ConnectionError):
                while connection.recv(256):
                    pass
        assert stage.lets_in()


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_is_given_to_the_process_that_attached_it_and_to_nobody_else(stage: Stage) -> None:
    with engine_of(stage.socket, "a") as a:
        attached = a.pool._attached  # noqa: SLF001 - what Attach answered
        tokens = [attached.timeline.token, *(slab.handle.token for slab in attached.slabs)]
        other = LifeConnection(stage.socket, WAIT_SECONDS, lambda: None)
        other.start()
        try:
            for token in tokens:
                with pytest.raises(NotFound, match="has attached no memory"):
                    other.fetch_fd(token)
        finally:
            other.close()


def test_an_engine_gets_the_words_of_its_own_model_alone(stage: Stage) -> None:
    """Though both are attached to one device. On a GPU they could be written."""
    with engine_of(stage.socket, "a") as a, engine_of(stage.socket, "b") as b:
        wanted = b.pool._attached.timeline  # noqa: SLF001
        assert a.pool.device == b.pool.device
        with pytest.raises(NotFound, match="has attached no memory"):
            a.pool._life.fetch_fd(wanted.token)  # noqa: SLF001
        files = set()
        for engine in (a, b):
            attached = engine.pool._attached  # noqa: SLF001
            descriptor = engine.pool._life.fetch_fd(attached.timeline.token)  # noqa: SLF001
            known = os.fstat(descriptor)
            assert known.st_size == attached.timeline.size_bytes
            files.add(known.st_ino)
            os.close(descriptor)
        assert len(files) == 2
        stage.check()


def test_no_other_process_can_write_a_word_of_the_timeline(stage: Stage) -> None:
    with engine_of(stage.socket, "a") as a:
        attached = a.pool._attached  # noqa: SLF001
        descriptor = a.pool._life.fetch_fd(attached.timeline.token)  # noqa: SLF001
        try:
            size = attached.timeline.size_bytes
            with pytest.raises(PermissionError):
                mmap.mmap(descriptor, size)
            with pytest.raises(PermissionError):
                os.pwrite(descriptor, b"\xff" * 4, 0)
            again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
            with pytest.raises(PermissionError):
                mmap.mmap(again, size)
            os.close(again)
            mmap.mmap(descriptor, size, prot=mmap.PROT_READ).close()
        finally:
            os.close(descriptor)
