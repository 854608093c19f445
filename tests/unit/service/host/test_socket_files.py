"""One daemon a socket, from its start until nothing of it is left."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachesvc.model.errors import Unavailable
from cachesvc.service.host.socket_files import LOCK_SUFFIX, SocketClaim, open_to_group
from cachesvc.wire.status import LIFE_SUFFIX
from tests.e2e.rig import short_folder
from tests.other_user import as_user


@pytest.fixture
def path() -> Iterator[str]:
    with short_folder() as folder:
        yield str(folder / "s")


def files_beside(path: str) -> list[str]:
    return sorted(each.name for each in Path(path).parent.iterdir())


def leave(path: str, text: str = "") -> None:
    Path(path).write_text(text, encoding="utf-8")


def listen(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(path)
    made.listen()
    return made


async def test_the_next_daemon_waits_until_the_last_one_has_let_go(path: str) -> None:
    last, following = SocketClaim(path), SocketClaim(path)
    await last.take()
    waiting = asyncio.ensure_future(following.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    last.release()
    await waiting
    last.release()
    assert files_beside(path) == ["s" + LOCK_SUFFIX], "who has let go removes nothing of the next one's"
    third = SocketClaim(path, wait_seconds=0.0)
    with pytest.raises(Unavailable, match=rf"held for more than 0 s by process {os.getpid()} \(.*end it"):
        await third.take()
    following.release()
    assert files_beside(path) == []
    await third.take()
    third.release()


class Listener(logging.Handler):
    """Events of the daemon's log."""

    def __init__(self) -> None:
        super().__init__()
        self.records = asyncio.Queue[logging.LogRecord]()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.put_nowait(record)


async def test_the_next_daemon_says_what_holds_the_lock_of_one_that_is_gone_and_waits_for_it(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachesvc.service.host.socket_files.TELL_SECONDS", 0.0)
    last, following, listener = SocketClaim(path), SocketClaim(path), Listener()
    await last.take()
    (descriptor,) = last.held()
    mover = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE, pass_fds=[descriptor])
    last.release()
    assert last.held() == ()
    assert files_beside(path) == ["s" + LOCK_SUFFIX], "by which the next daemon finds it"
    logging.getLogger("cachesvc").addHandler(listener)
    waiting = asyncio.ensure_future(following.take())
    record = await listener.records.get()
    assert record.getMessage() == "start_waits"
    assert f"process {mover.pid} (cat)" in vars(record)["fields"]["holders"]
    assert not waiting.done()
    await mover.communicate(b"")
    await waiting
    logging.getLogger("cachesvc").removeHandler(listener)
    following.release()
    assert files_beside(path) == []
    assert listener.records.empty(), "it is said once"


async def test_a_mover_that_hangs_does_not_stop_the_next_daemon(path: str) -> None:
    """Only where the process that took the lock has ended is it taken away from those that hold it still."""
    source = (
        "import asyncio, os, subprocess, sys\n"
        "from cachesvc.service.host.socket_files import SocketClaim\n"
        "claim = SocketClaim(sys.argv[1])\n"
        "asyncio.run(claim.take())\n"
        "mover = subprocess.Popen(['sleep', '600'], pass_fds=claim.held(), stdout=subprocess.DEVNULL)\n"
        "print(mover.pid, flush=True)\n"
        "sys.stdin.read()\n"
        "os._exit(9)\n"
    )
    command = (sys.executable, "-c", source, path)
    daemon = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert daemon.stdin is not None
    assert daemon.stdout is not None
    mover = int(await daemon.stdout.readline())
    try:
        with pytest.raises(Unavailable, match=rf"held for more than 0 s by .*process {daemon.pid} "):
            await SocketClaim(path, wait_seconds=0.0, movers_seconds=0.0).take()
        daemon.stdin.close()
        await daemon.wait()
        following = SocketClaim(path, movers_seconds=0.0)
        await following.take()
        with pytest.raises(Unavailable, match=rf"held for more than 0 s by process {os.getpid()} "):
            await SocketClaim(path, wait_seconds=0.0, movers_seconds=0.0).take()
        following.release()
        assert files_beside(path) == []
    finally:
        os.kill(mover, signal.SIGKILL)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_a_lock_of_another_user_is_told_with_whose_it_is_and_what_to_do(path: str) -> None:
    leave(path + LOCK_SUFFIX)
    Path(path + LOCK_SUFFIX).chmod(0o600)
    Path(path).parent.chmod(0o777)
    told = as_user(65534, lambda: asyncio.run(SocketClaim(path).take()))
    assert "it belongs to user 0, and this daemon is user 65534" in told
    assert "was killed and has left it" in told
    assert "remove the file as that user or root" in told
    Path(path + LOCK_SUFFIX).unlink()
    assert as_user(65534, lambda: asyncio.run(SocketClaim(path).take())) == ""
    assert Path(path + LOCK_SUFFIX).stat().st_uid == 65534, "a killed daemon of that user"
    as_root = SocketClaim(path)
    asyncio.run(as_root.take())
    as_root.release()


async def test_a_lock_whose_folder_has_gone_is_released(path: str) -> None:
    folder = Path(path).parent / "run"
    folder.mkdir()
    claim = SocketClaim(str(folder / "s"))
    await claim.take()
    (folder / ("s" + LOCK_SUFFIX)).unlink()
    folder.rmdir()
    claim.release()
    assert claim.held() == ()


async def test_a_daemon_that_serves_is_not_waited_for(path: str) -> None:
    serving = SocketClaim(path)
    await serving.take()
    with listen(path), pytest.raises(Unavailable, match="in use by a running daemon"):
        await SocketClaim(path).take()
    serving.release()


async def test_what_a_killed_daemon_left_is_removed(path: str) -> None:
    listen(path).close()
    listen(path + LIFE_SUFFIX).close()
    leave(path + LOCK_SUFFIX)
    claim = SocketClaim(path)
    await claim.take()
    assert files_beside(path) == ["s" + LOCK_SUFFIX]
    claim.release()


async def test_a_daemon_of_another_release_is_not_driven_out(path: str) -> None:
    """One that knows of no lock."""
    with listen(path):
        with pytest.raises(Unavailable, match="in use by a running daemon"):
            await SocketClaim(path).take()
        assert files_beside(path) == ["s"]


@pytest.mark.parametrize("suffix", ["", LIFE_SUFFIX])
async def test_a_file_in_a_sockets_place_is_left_alone_and_the_lock_is_free(path: str, suffix: str) -> None:
    leave(path + suffix, "mine")
    with pytest.raises(Unavailable, match="is not a socket; move it away"):
        await SocketClaim(path).take()
    assert files_beside(path) == ["s" + suffix]


async def test_a_folder_that_is_missing_is_named(path: str) -> None:
    with pytest.raises(Unavailable, match=r"the folder of the socket .* does not exist; make it"):
        await SocketClaim(path + "/deeper").take()


def test_a_group_that_is_not_there_is_named(path: str) -> None:
    leave(path)
    with pytest.raises(Unavailable, match="there is no group 'of no user'"):
        open_to_group(path, "of no user")
