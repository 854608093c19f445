"""Processes at the other end of the life socket, and when they count as gone; with real sockets and processes."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachesvc.model.errors import NotSupported
from cachesvc.service.access.admission import ways_in
from cachesvc.service.host import life
from cachesvc.service.host.life import MAX_OF_PROCESS, PROC, LifeServer, PeerProcess, peer_process, pidfd_by_number
from cachesvc.wire.status import LIFE_BUSY, LIFE_GREETING
from tests.e2e.rig import short_folder
from tests.work import counted

GRACE_SECONDS = 0.05
MEMORY = b"m" * 16


def since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@contextmanager
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing until its standard input ends."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as made:
        try:
            yield made
        finally:
            made.kill()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection as the daemon has it, and as this process has it."""
    with short_folder() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(folder / "s"))
        listener.listen()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as own:
            own.connect(str(folder / "s"))
            accepted, _ = listener.accept()
            with accepted:
                yield accepted, own


def test_the_kernel_says_who_connected(ends: tuple[socket.socket, socket.socket]) -> None:
    found = peer_process(ends[0])
    assert (found.pid, found.uid) == (os.getpid(), os.getuid())
    assert os.getgid() in found.gids
    assert found.pidfd >= 0
    os.close(found.pidfd)


# -- kernels that tell a number alone ----------------------------------------------------------------------------------


def by_number(connection: socket.socket, pid: int, accepted: float, proc: Path = PROC) -> bool:
    """True where a process is taken for the one that connected."""
    pidfd = pidfd_by_number(connection, pid, accepted, proc)
    if pidfd >= 0:
        os.close(pidfd)
    return pidfd >= 0


def test_a_process_that_was_there_before_is_the_one_that_connected(ends: tuple[socket.socket, socket.socket]) -> None:
    assert by_number(ends[0], os.getpid(), since_boot())


def test_a_number_that_passed_to_a_later_process_is_of_nobody(ends: tuple[socket.socket, socket.socket]) -> None:
    accepted = since_boot()
    with process() as later:
        assert not by_number(ends[0], later.pid, accepted)


def test_a_process_that_has_hung_up_may_be_another_by_now(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].close()
    assert not by_number(ends[0], os.getpid(), since_boot())


def test_a_process_that_has_ended_is_unknown(ends: tuple[socket.socket, socket.socket]) -> None:
    with process() as ended:
        ended.kill()
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # its number is still its own
        assert not by_number(ends[0], ended.pid, since_boot())


@pytest.mark.parametrize("stat", [None, "", "1 (two) words)", "1 (a ) b) S 1 " + "x " * 20])
def test_a_process_of_which_nothing_can_be_read_is_unknown(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path, stat: str | None
) -> None:
    if stat is not None:
        (tmp_path / str(os.getpid())).mkdir()
        (tmp_path / str(os.getpid()) / "stat").write_text(stat, encoding="ascii")
    assert not by_number(ends[0], os.getpid(), since_boot(), tmp_path)


def test_a_name_with_brackets_hides_nothing(ends: tuple[socket.socket, socket.socket], tmp_path: Path) -> None:
    (tmp_path / str(os.getpid())).mkdir()
    own = (PROC / "self" / "stat").read_text(encoding="ascii")
    named = f"{os.getpid()} (a) 1 (b) S 2)" + own.rpartition(")")[2]
    (tmp_path / str(os.getpid()) / "stat").write_text(named, encoding="ascii")
    assert by_number(ends[0], os.getpid(), since_boot(), tmp_path)


def test_a_process_of_another_pid_namespace_has_no_number(ends: tuple[socket.socket, socket.socket]) -> None:
    assert not by_number(ends[0], 0, since_boot())


# -- when they are gone ------------------------------------------------------------------------------------------------


class Site:
    """A life server whose peers the test chooses. ``gone``: their tokens, as they go; ``ended``: those whose
    lanes are to end."""

    def __init__(self, path: str, connections: int = 64) -> None:
        self.next = PeerProcess(0, 0, frozenset(), -1, is_certain=False)
        self.idle: set[bytes] = set()
        self.gone: list[bytes] = []
        self.ended: list[bytes] = []
        self.went = asyncio.Event()
        self.server = LifeServer(
            path,
            epoch=7,
            allowed_uids=frozenset((0, 1, 2)),
            grace_seconds=GRACE_SECONDS,
            arrived=lambda *_: None,
            gone=self._gone,
            descriptor=lambda _process, token: 0 if token == MEMORY else None,
            holds=lambda token: token not in self.idle,
            lanes=self,
            identify=lambda _: self.next,
            connections=connections,
        )
        self._path = path

    def open(self, process: bytes) -> socket.socket:
        raise NotSupported("no lanes here")

    def end(self, process: bytes) -> None:
        self.ended.append(process)

    def _gone(self, token: bytes) -> None:
        self.gone.append(token)
        self.went.set()

    async def connect(
        self, pid: int = 0, pidfd: int = -1, *, is_certain: bool = False, uid: int = 0
    ) -> tuple[socket.socket, bytes]:
        """A connection, and its token; an empty one where it was turned away."""
        self.next = PeerProcess(pid, uid, frozenset(), pidfd, is_certain=is_certain)
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.setblocking(False)
        made.connect(self._path)
        greeting = await asyncio.get_running_loop().sock_recv(made, 64)
        return made, greeting[len(LIFE_GREETING) : len(LIFE_GREETING) + 16]

    async def next_gone(self) -> bytes:
        """Wait for the next one to go."""
        await self.went.wait()
        self.went.clear()
        return self.gone[-1]


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    with short_folder() as folder:
        made = Site(str(folder / "s.life"))
        made.server.start()
        yield made
        made.server.close()


@pytest.fixture
async def site_of_many() -> AsyncIterator[Site]:
    with short_folder() as folder:
        made = Site(str(folder / "s.life"), 4096)
        made.server.start()
        yield made
        made.server.close()


async def test_a_number_that_is_another_process_keeps_nothing_for_ever(site: Site) -> None:
    """Its process never ends; the end of the connection counts, after the grace."""
    connection, token = await site.connect(os.getpid(), os.pidfd_open(os.getpid()), is_certain=False)
    connection.close()
    assert await site.next_gone() == token


async def test_a_process_that_is_known_for_certain_is_there_until_it_ends(site: Site) -> None:
    with process() as engine:
        known, token = await site.connect(engine.pid, os.pidfd_open(engine.pid), is_certain=True)
        known.close()
        unknown, other = await site.connect()
        unknown.close()
        assert await site.next_gone() == other, "whose grace began later"
        assert site.gone == [other]
        engine.kill()
        assert await site.next_gone() == token


async def test_an_end_that_is_told_twice_is_one(site: Site) -> None:
    with process() as engine:
        connection, token = await site.connect(engine.pid, os.pidfd_open(engine.pid), is_certain=False)
        engine.kill()
        assert await site.next_gone() == token
        connection.close()
    other, last = await site.connect()
    other.close()
    assert await site.next_gone() == last
    assert site.gone == [token, last]


async def test_at_the_end_of_the_daemon_every_engine_is_told_at_once(site: Site) -> None:
    connections = [(await site.connect())[0] for _ in range(8)]
    site.server.close()
    assert all(select.select([each], [], [], 0)[0] for each in connections)
    assert [each.recv(64) for each in connections] == [b""] * 8
    site.server.close()
    assert site.gone == [], "no engine counts as gone: they live"


# -- greedy processes ----------------------------------------------------------------------------------------


async def test_one_user_leaves_room_for_the_next_and_each_has_its_part(site: Site) -> None:
    held = [await site.connect(uid=1) for _ in range(60)]
    assert sum(bool(token) for _, token in held) == 48, "three quarters alone"
    others = [await site.connect(uid=2) for _ in range(20)]
    assert sum(bool(token) for _, token in others) == 16, "all that is left"
    for connection, _ in held:
        connection.close()
    assert (await site.connect(uid=2))[1], "and more when there is more"


async def test_one_process_has_so_many_connections_and_no_more(site_of_many: Site) -> None:
    held = [await site_of_many.connect(os.getpid()) for _ in range(MAX_OF_PROCESS + 3)]
    assert sum(bool(token) for _, token in held) == MAX_OF_PROCESS
    assert (await site_of_many.connect(os.getppid()))[1]


async def test_a_connection_costs_the_same_however_many_there_are(site_of_many: Site) -> None:
    held, costs = [], []
    for count in (4, 400):
        held += [await site_of_many.connect() for _ in range(count)]
        steps = []
        for _ in range(5):  # the server may still see to connections before, beside one of them
            with counted() as work:
                held.append(await site_of_many.connect())
            steps.append(work.steps)
        costs.append(min(steps))
    assert costs[1] < 1.5 * costs[0]
    for connection, _ in held:
        connection.close()


async def test_whoever_does_nothing_for_long_gives_way_to_its_own_user(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [await site.connect(uid=1) for _ in range(48)]
    assert not (await site.connect(uid=1))[1]
    site.idle = {held[3][1], held[5][1]}
    assert not (await site.connect(uid=1))[1], "not at once"
    monkeypatch.setattr(life, "IDLE_SECONDS", 0.0)
    more = [await site.connect(uid=1)]
    assert held[3][0].recv(1) == b"", "the oldest of those"
    assert site.ended == [held[3][1]]
    more += [await site.connect(uid=1) for _ in range(2)]
    assert [bool(token) for _, token in more] == [True, True, False]


async def test_whoever_does_not_read_is_hung_up_on_and_nobody_else(site: Site) -> None:
    loop = asyncio.get_running_loop()
    rude, token = await site.connect()
    polite, _ = await site.connect()
    rude.send(b"FD" + MEMORY)
    rude.send(b"FD" + MEMORY)
    for _ in range(3):
        polite.send(b"FD" + MEMORY)
        message, (descriptor,), _, _ = await loop.run_in_executor(None, receive_one, polite)
        os.close(descriptor)
        assert message == b"OK"
    assert site.ended == [token]
    polite.send(b"FD" + bytes(16))
    assert (await loop.sock_recv(polite, 256)).startswith(b"NO: this process has attached no memory")


async def test_where_the_kernel_passes_no_more_descriptors_the_peer_may_ask_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, _ = await site.connect()

    def refuse(*_: object) -> int:
        raise OSError(errno.ETOOMANYREFS, "too many references")

    monkeypatch.setattr(socket, "send_fds", refuse)
    connection.send(b"FD" + MEMORY)
    assert await asyncio.get_running_loop().sock_recv(connection, 256) == LIFE_BUSY
    monkeypatch.undo()
    connection.send(b"FD" + MEMORY)
    message, (descriptor,), _, _ = await asyncio.get_running_loop().run_in_executor(None, receive_one, connection)
    os.close(descriptor)
    assert (message, site.ended) == (b"OK", [])


def receive_one(connection: socket.socket) -> tuple[bytes, list[int], int, object]:
    """One message with its descriptors; waits for it."""
    select.select([connection], [], [])
    return socket.recv_fds(connection, 256, 1)


def test_files_are_shared_out_and_some_are_kept() -> None:
    for files in (128, 1024, 524_288, 1 << 20):
        ways = ways_in(files)
        assert min(ways) >= 8
        assert 2 * ways.life + ways.lanes + ways.local + ways.tcp + ways.probes <= files * 14 // 16
