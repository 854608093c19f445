"""The composition root: making starts nothing, starting goes in order, and whatever was started is closed."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cachesvc_lab.replay import MOVED, Tally

from cachesvc.config import Config, load_config
from cachesvc.daemon import Daemon, Step, started
from cachesvc.flows.allocate import allocate
from cachesvc.flows.leases import open_lease, process_arrived, process_gone
from cachesvc.flows.match import match
from cachesvc.hardware import WAYS_IN, check_ports
from cachesvc.model.errors import CacheError, InvalidRequest, Unavailable
from cachesvc.model.text import module_command
from cachesvc.service.loop.node import tell_left
from cachesvc.storages import check_storage
from tests.e2e.rig import short_folder
from tests.unit.rigs.ledger_rig import chain, one_group, rig_of

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


# Refusals of a start, and lines of the log, that name cause, limit and remedy.


@pytest.mark.parametrize("name", [name for name, _ in WAYS_IN])
def test_a_taken_port_names_the_flag_and_who_has_it(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings: dict[str, Any] = {name: f"127.0.0.1:{port}", "peer_tokens": "tokens"}
        config = Config(**settings)
        with pytest.raises(Unavailable) as refused:
            check_ports(config)
    flag = "--" + name.replace("_", "-")
    assert f"127.0.0.1:{port}: Address already in use; choose another {flag} (ss -ltnp" in str(refused.value)
    check_ports(config)  # the port is free again, and left free
    check_ports(config)


def test_a_configuration_without_quotes_says_where_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("device_pool = 4GiB\n", encoding="utf-8")
    with pytest.raises(InvalidRequest, match=r'sizes stand in quotes, as in device_pool = "4GiB"'):
        load_config(str(path), {})


def test_the_log_says_what_a_killed_engine_held(caplog: pytest.LogCaptureFixture) -> None:
    rig = rig_of(one_group(), device=(8,))
    process_arrived(rig.core, b"token", 1, 1)
    lease = open_lease(rig.core, 1, 0, "engine-7", b"token", 5, 0.0).id
    rig.run(match, lease, 1, chain(*"abcd"), 0)
    rig.run(allocate, lease, 1, 4)
    rig.core.on_left = tell_left
    with caplog.at_level(logging.INFO):
        process_gone(rig.core, b"token")
        process_gone(rig.core, b"another")
    (line,) = caplog.records
    fields = {"lease": lease[:12], "engine": "engine-7", "sequences": 1, "private_pages": 4}
    assert (line.message, line.__dict__["fields"]) == ("lease_process_ended", fields)


def test_bytes_of_a_replay_by_the_second_add_up_to_its_totals() -> None:
    tally = Tally()
    tally.note_bytes(1, {"h2d_bytes": 10, "d2h_bytes": 5})
    tally.note_bytes(1, {"h2d_bytes": 12, "d2h_bytes": 5})
    tally.note_bytes(2, {"h2d_bytes": 3})  # the next daemon counts anew
    tally.note_bytes(3, {"h2d_bytes": 20, "d2h_bytes": 6})
    by_second = {second: tuple(getattr(each, name) for name in MOVED) for second, each in tally.samples.items()}
    assert by_second == {1: (12, 5), 2: (0, 0), 3: (8, 1)}


def test_a_refusal_is_text_on_a_terminal_and_a_json_line_elsewhere(tmp_path: Path) -> None:
    command = module_command("cachesvc", "--backend", "shm", "--socket", str(tmp_path / "absent" / "kv.sock"))
    reader, terminal = os.openpty()
    ended = subprocess.run(command, stderr=terminal, check=False)
    os.close(terminal)
    said = os.read(reader, 4096).decode()
    os.close(reader)
    assert (ended.returncode, said.startswith("cachesvcd: the folder of the socket")) == (2, True), said
    piped = subprocess.run(command, stderr=subprocess.PIPE, check=False)
    assert b'"event": "start_refused"' in piped.stderr


# Places of storage tiers: no two tiers have one place, however it is written.


def test_one_folder_is_no_two_tiers_however_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    for other in ("cache/", "./cache", "x/../cache", "link"):
        with pytest.raises(InvalidRequest, match="is given twice"):
            check_storage([f"file:{tmp_path}/{name}?capacity=1GiB" for name in ("cache", other)])
    with pytest.raises(InvalidRequest, match="is given twice"):
        check_storage(["s3://bucket/a", "s3://bucket/a/"])


def test_one_bucket_of_two_stores_is_two_places() -> None:
    texts = [f"s3://bucket?endpoint=https://{host}.example.com" for host in ("a", "b")]
    assert len(check_storage(texts)) == 2


def test_more_than_four_tiers_are_refused_with_their_number(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="5 tiers, and there are at most 4"):
        check_storage([f"file:{tmp_path}/{at}?capacity=1GiB" for at in range(5)])
