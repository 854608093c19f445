"""Movers that were started by hand, and what becomes of one whose other end is no daemon, or died."""

from __future__ import annotations

import contextlib
import gc
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from cachesvc import __version__
from cachesvc.config import Config
from cachesvc.memory.cuda import CudaBackend
from cachesvc.memory.host_pool import HostBudget
from cachesvc.model.errors import InvalidRequest, Unavailable
from cachesvc.mover.life import found
from cachesvc.mover.processes import MoverProcesses
from cachesvc.mover.records import ENDS_BYTES, JOBS_BYTES, Channel, Message, MoverGone, Ring, Settings, Writer
from cachesvc.mover.server import Equipment, MoverServer
from tests.contracts.host_gpu import HostGpu
from tests.e2e.rig import wait_until
from tests.unit.mover.mover_rig import Heard, engine_on, freeze
from tests.unit.rigs.swap_rig import LOAD, REPLICA, attach_replica


def test_a_mover_that_was_started_by_hand_is_found_by_its_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "mover.sock")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(path)
    listening.listen(1)

    def serve() -> None:
        connection, _ = listening.accept()
        MoverServer(connection, __version__, lambda *_: Equipment(CudaBackend((HostGpu(),), 1 << 20), dict)).serve()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    movers = MoverProcesses([Settings("cuda", "GPU-host-0", 1 << 20)], __version__, begins=[lambda: found(path)])
    movers.start()
    movers.listen(lambda _: None)
    slab = movers.create_slab("GPU-host-0", 4096)
    assert movers.read(slab.region, 0, 8) == bytes(8)
    movers.close()
    thread.join()
    listening.close()


@contextlib.contextmanager
def by_hand(path: str) -> Iterator[subprocess.Popen[bytes]]:
    """A mover that was started by hand, and is ended at the end if it was not before."""
    mover = subprocess.Popen([sys.executable, "-m", "cachesvc.mover", "--socket", path], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: is_listening(path), "it listens")
        yield mover
    finally:
        mover.kill()
        mover.wait()


def is_listening(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        return connection.connect_ex(path) == 0


def test_a_mover_that_was_started_by_hand_and_hangs_is_ended(tmp_path: Path, heard: Heard) -> None:
    """Its hang delays nothing: what is under way ends, and so does the daemon."""
    path = str(tmp_path / "mover.sock")
    with by_hand(path) as mover:
        settings = Settings("shm", "shm-0", 1 << 20, timeline_words=64)
        movers = MoverProcesses([settings], __version__, begins=[lambda: found(path)], probe_seconds=0.2)
        movers.start()
        rig = engine_on(movers)
        attach_replica(rig, REPLICA)
        freeze(mover.pid)
        rig.move(LOAD, (0, [1], [1]))
        movers.probe()
        rig.settle()
        assert isinstance(rig.ended[-1][1], Unavailable)
        assert mover.wait() == -signal.SIGKILL
        heard.wait("mover_not_started")
        rig.close()


def test_a_mover_that_was_started_by_hand_and_refuses_is_left_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "mover.sock")
    with by_hand(path) as mover:
        movers = MoverProcesses([Settings("tape", "t", 1 << 20)], __version__, begins=[lambda: found(path)])
        with pytest.raises(InvalidRequest, match="tape"):
            movers.start()
        movers.close()
        movers = MoverProcesses([Settings("shm", "shm-0", 1 << 20)], __version__, begins=[lambda: found(path)])
        movers.start()
        assert list(movers.mover_pids().values()) == [mover.pid]
        movers.close()
        assert mover.poll() is None


def test_a_mover_takes_no_path_that_is_not_its_own(tmp_path: Path) -> None:
    kept, path = tmp_path / "notes.txt", tmp_path / "mover.sock"
    kept.write_text("kept")
    command = [sys.executable, "-m", "cachesvc.mover", "--socket"]
    with by_hand(str(path)) as first:
        for other in (kept, path):
            done = subprocess.run([*command, str(other)], capture_output=True, text=True, check=False)
            assert done.returncode == 2
            assert "choose another --socket" in done.stderr
        assert is_listening(str(path))
        first.kill()
        first.wait()
    assert kept.read_text() == "kept"
    with by_hand(str(path)):  # what a killed one has left does not disturb the next
        assert is_listening(str(path))


def serve_in_a_thread() -> tuple[socket.socket, threading.Thread]:
    """A mover in a thread, and a daemon's end of its connection."""
    ours, theirs = socket.socketpair()
    server = MoverServer(theirs, __version__, lambda *_: Equipment(CudaBackend((HostGpu(),), 1 << 20), dict))
    thread = threading.Thread(target=server.serve)
    thread.start()
    return ours, thread


def test_a_mover_outlives_no_daemon_that_died_in_the_middle_of_a_record() -> None:
    gc.collect()
    before, others = descriptors(), set(threading.enumerate())
    ours, thread = serve_in_a_thread()
    jobs, ends = Ring.make("jobs", JOBS_BYTES), Ring.make("ends", ENDS_BYTES)
    channel = Channel(ours, ours.close)
    channel.ask("hello", 60.0)
    page = HostBudget.make(1)
    settings = asdict(Settings("cuda", "GPU-host-0", 1 << 20))
    channel.ask("open", 60.0, Message(settings, descriptors=(jobs.fd, ends.fd, page.fd)))
    writer = Writer(jobs)
    writer.put([bytes(2 * JOBS_BYTES)])
    ours.close()
    thread.join()
    writer.close()
    for pump in set(threading.enumerate()) - others:
        if pump.name == "ring-pump":
            pump.join()
    for held in (jobs, ends, page):
        held.close()
    del jobs, ends, page, held, writer, channel
    gc.collect()
    wait_until(lambda: descriptors() <= before, "one that serves daemon after daemon keeps nothing of them")


@pytest.mark.parametrize("head", [b"{", b"7", b"\xff"])
def test_who_is_no_daemon_is_hung_up_on(head: bytes) -> None:
    ours, thread = serve_in_a_thread()
    ours.sendall(len(head).to_bytes(4, "little") + bytes(4) + head)
    assert ours.recv(1) == b""
    ours.close()
    thread.join()


def test_an_answer_that_never_ends_is_waited_for_no_longer_than_one_that_never_comes() -> None:
    ours, theirs = socket.socketpair()
    broken: list[bool] = []

    def dribble() -> None:
        with contextlib.suppress(OSError):
            theirs.sendall(struct.pack("<II", 2, 1 << 30) + b"{}")
            while True:
                theirs.send(b".")

    thread = threading.Thread(target=dribble, daemon=True)
    thread.start()
    with pytest.raises(MoverGone, match="timed out"):
        Channel(ours, lambda: broken.append(True)).ask("hello", 0.2)
    assert broken
    ours.close()
    thread.join()
    theirs.close()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_who_is_not_there_is_said(tmp_path: Path) -> None:
    path = str(tmp_path / "absent.sock")
    movers = MoverProcesses([Settings("shm", "shm-0", 1 << 20)], __version__, begins=[lambda: found(path)])
    with pytest.raises(Unavailable, match=r"no mover for shm-0: .*absent\.sock: No such file"):
        movers.start()
    movers.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as hangs:
        hangs.bind(path)
        hangs.listen(0)
        waiting, _ = found(path)
        with pytest.raises(OSError, match="others wait"):
            found(path)
        waiting.close()


def test_a_socket_of_a_mover_is_for_one_device() -> None:
    Config(movers="process", mover=("a", "b"))
    with pytest.raises(InvalidRequest, match="twice"):
        Config(movers="process", mover=("a", "b", "a"))


def test_a_daemon_that_stops_waits_for_no_mover_that_hangs() -> None:
    """SIGTERM took a minute beside a Register whose mover was stopped."""
    ours, theirs = socket.socketpair()
    is_asked = threading.Event()
    channel = Channel(ours, lambda: ours.shutdown(socket.SHUT_RDWR))
    outcome: list[Exception] = []

    def ask() -> None:
        try:
            channel.ask("open", 3600.0)
        except MoverGone as gone:
            outcome.append(gone)

    def hear() -> None:
        theirs.recv(1 << 16)
        is_asked.set()

    threads = [threading.Thread(target=each) for each in (ask, hear)]
    for thread in threads:
        thread.start()
    is_asked.wait()
    channel.hurry(0.01)
    for thread in threads:
        thread.join()
    assert len(outcome) == 1
    ours.close()
    theirs.close()


def test_what_a_stopping_daemon_asks_is_waited_for_no_longer_either() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours, lambda: None)
    channel.hurry(0.01)
    with pytest.raises(MoverGone, match="timed out"):
        channel.ask("close", 3600.0)
    ours.close()
    theirs.close()
