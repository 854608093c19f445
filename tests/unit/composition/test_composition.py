"""The composition root: making starts nothing, starting goes in order, and whatever was started is closed."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from cachesvc.config import Config
from cachesvc.daemon import Daemon, Step, started
from cachesvc.model.errors import CacheError, Unavailable
from tests.e2e.rig import short_folder

POOL_BYTES = 4 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def config_in(folder: Path, **settings: object) -> Config:
    """A small daemon's, with everything that can listen."""
    wanted = {
        "socket": str(folder / "s"),
        "backend": "shm",
        "device_pool": POOL_BYTES,
        "host_pool": POOL_BYTES,
        "drain_seconds": 0.0,
        "listen": "127.0.0.1:0",
        "health_listen": "127.0.0.1:0",
        "metrics_listen": "127.0.0.1:0",
        "web_listen": "127.0.0.1:0",
        "checksums": "all",
    }
    return Config(**{**wanted, **settings})  # type: ignore[arg-type]


def held() -> tuple[set[threading.Thread], set[str]]:
    """Threads of this process, and what its descriptors are of."""
    descriptors = set()
    for each in Path("/proc/self/fd").iterdir():
        try:
            descriptors.add(str(each.readlink()))
        except FileNotFoundError:  # the one of this listing
            continue
    return set(threading.enumerate()), descriptors


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_making_a_daemon_starts_nothing(folder: Path) -> None:
    before = held()
    Daemon(config_in(folder))
    assert held() == before
    assert files_in(folder) == []


def test_a_daemon_that_was_stopped_has_left_nothing_and_another_can_follow(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def live() -> list[str]:
        parts = Daemon(config_in(folder))
        running = asyncio.create_task(parts.run())
        parts.stopping.set()  # ends it once it has come up
        await running
        return files_in(folder)

    with caplog.at_level(logging.INFO):
        assert [asyncio.run(live()) for _ in range(2)] == [[], []]
    told = [record.getMessage() for record in caplog.records]
    assert [name for name in told if name in ("ready", "draining", "serving", "stopped")] == [
        *("ready", "serving", "draining", "stopped"),
        *("ready", "serving", "draining", "stopped"),
    ]
    ready = next(record for record in caplog.records if record.getMessage() == "ready")
    fields = json.loads(json.dumps(vars(ready)["fields"]))
    assert fields["pid"] == os.getpid()
    assert all(fields[port] for port in ("port", "metrics_port", "web_port"))


@pytest.mark.parametrize("setting", ["listen", "health_listen", "metrics_listen", "web_listen"])
def test_a_start_that_fails_late_leaves_nothing(folder: Path, setting: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = config_in(folder, **{setting: f"127.0.0.1:{taken.getsockname()[1]}"})
        threads, _ = held()
        with pytest.raises(CacheError):
            asyncio.run(Daemon(config).run())
    assert files_in(folder) == []
    left = {thread.name for thread in set(threading.enumerate()) - threads}
    assert not {name for name in left if not name.startswith("asyncio") and "_poll_wrapper" not in name}, "but gRPC's"


class Log:
    """Starts and closes in order; a part that is in ``broken`` raises instead."""

    def __init__(self, *broken: str) -> None:
        self.lines: list[str] = []
        self._broken = broken

    def step(self, name: str, *, is_async: bool) -> Step:
        """A part that writes itself down."""
        return Step(self._call(f"start {name}", is_async), self._call(f"close {name}", is_async))

    def _call(self, line: str, is_async: bool) -> Callable[[], object]:
        return partial(self._later, line) if is_async else partial(self._note, line)

    def _note(self, line: str) -> None:
        if line in self._broken:
            raise Unavailable(line)
        self.lines.append(line)

    async def _later(self, line: str) -> None:
        await asyncio.sleep(0)
        self._note(line)


async def go_through(log: Log) -> None:
    async with started([log.step("a", is_async=False), log.step("b", is_async=True), log.step("c", is_async=False)]):
        log.lines.append("serve")


async def test_parts_are_closed_in_the_reverse_order_of_their_start() -> None:
    log = Log()
    await go_through(log)
    assert log.lines == ["start a", "start b", "start c", "serve", "close c", "close b", "close a"]


@pytest.mark.parametrize("broken", ["start b", "start c"])
async def test_a_part_that_cannot_be_started_ends_those_before_it(broken: str) -> None:
    log = Log(broken)
    with pytest.raises(Unavailable, match=broken):
        await go_through(log)
    begun = [line.removeprefix("start ") for line in log.lines if line.startswith("start")]
    assert log.lines == [f"start {name}" for name in begun] + [f"close {name}" for name in reversed(begun)]


async def test_a_part_that_cannot_be_closed_does_not_keep_the_others() -> None:
    log = Log("close c", "close b")
    with pytest.raises(Unavailable):
        await go_through(log)
    assert log.lines[-1] == "close a"
