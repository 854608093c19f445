"""Findings on a machine for a daemon, each with its remedy."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cachesvc.config import LIVE, MIN_SLICE_BYTES, SETTINGS, Config, load_config
from cachesvc.hardware import port_trouble
from cachesvc.machine import MISSING, OK, WARNING, Finding, is_ready, look
from cachesvc.memory.shm import ShmBackend
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.text import module_command
from cachesvc.policy.eviction import EVICTION_POLICIES
from cachesvc.service.access.admission import Admission
from cachesvc.service.admin.admin_service import Administration
from cachesvc.service.calls.dispatcher import Dispatcher
from cachesvc.service.host.device_health import DeviceHealth
from cachesvc.service.host.health import Serving
from cachesvc.service.host.reload import live_settings
from cachesvc.service.lane import Lanes
from cachesvc.service.loop.node import Node
from cachesvc.service.rpc.edge import Edge
from cachesvc.service.rpc.services import CacheService
from tests.style.tree import ROOT
from tests.unit.rigs.ledger_rig import one_group, rig_of

GIB = 1 << 30


def found(config: Config, subject: str, root: Path | None = None) -> list[Finding]:
    """Findings of one subject."""
    every = look(config) if root is None else look(config, root)
    return [finding for finding in every if finding.subject == subject]


def machine(folder: Path, *, free_kib: int, huge: str) -> Path:
    """Files that tell of a machine."""
    for name, text in {
        "proc/meminfo": f"MemTotal: {free_kib} kB\nMemAvailable: {free_kib} kB\n",
        "proc/self/cgroup": "0::/\n",
        "sys/kernel/mm/transparent_hugepage/enabled": huge,
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def test_memory_that_the_pools_do_not_fit_into_is_missing(tmp_path: Path) -> None:
    root = machine(tmp_path, free_kib=3 << 20, huge="always [madvise] never")
    fits = Config(backend="shm", device_pool=GIB, host_pool=GIB)
    (memory,) = found(fits, "memory", root)
    assert (memory.state, memory.found) == (OK, "3.00 GiB left by MemAvailable, pools take 2.00 GiB")
    (memory,) = found(Config(backend="shm", device_pool=GIB, host_pool=3 * GIB), "memory", root)
    assert (memory.state, memory.remedy) == (MISSING, "take a smaller --host-pool, or raise the limit")
    assert found(fits, "huge pages", root)[0].state == OK
    (huge,) = found(fits, "huge pages", machine(tmp_path, free_kib=1, huge="always madvise [never]"))
    assert (huge.state, "three to ten times slower" in huge.remedy) == (WARNING, True)


def test_the_sockets_folder_must_exist_and_be_free(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "kv.sock"
    (absent,) = found(Config(backend="shm", socket=str(path)), "socket")
    assert (absent.state, f"sudo install -d -m 0750 -o {os.geteuid()} {path.parent}" in absent.remedy) == (
        MISSING,
        True,
    )
    path.parent.mkdir()
    assert found(Config(backend="shm", socket=str(path)), "socket")[0].state == OK
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(1)
        assert found(Config(backend="shm", socket=str(path)), "socket")[0].state == WARNING
    (group,) = found(Config(backend="shm", socket=str(path), socket_group="no-such-group"), "socket group")
    assert group.state == MISSING


def test_taken_ports_and_bad_storage_are_missing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = Config(backend="shm", metrics_listen=address, storage=(f"file:{tmp_path}?capacity=0",))
        (port,) = found(config, "port")
        assert (port.state, port.remedy) == (MISSING, "choose another --metrics-listen; ss -ltnp shows who has a port")
        assert found(config, "storage")[0].state == MISSING
        assert not is_ready(look(config))


@pytest.mark.parametrize(("backend", "state"), [("shm", OK), ("auto", WARNING), ("cuda", MISSING)])
def test_a_gpu_that_is_not_there_is_missing_only_where_one_is_wanted(backend: str, state: str) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    (gpu,) = found(Config(backend=backend), "GPU")
    assert (gpu.state, "driver" in gpu.remedy) == (state, state != OK)


def test_the_command_answers_scripts_by_its_exit_code(tmp_path: Path) -> None:
    command = module_command(
        *("cachesvc_ctl", "check", "--json", "--backend", "shm", "--device-pool", "1MiB", "--host-pool", "1MiB"),
    )
    around = os.environ | {"CACHESVC_SOCKET": str(tmp_path / "kv.sock")}  # as for all commands
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=around)
    states = {each["subject"]: each["state"] for each in json.loads(ended.stdout)}
    assert (ended.returncode, states["socket"], states["GPU"]) == (0, OK, OK), ended.stdout
    ended = subprocess.run([*command, "--device-pool", "10"], capture_output=True, text=True, check=False)
    assert (ended.returncode, "did you mean 10GiB?" in ended.stderr) == (2, True)


def test_a_name_may_stand_for_an_address_that_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = (socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("2001:db8::1", 0, 0, 0))
    near = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))
    addresses = [absent, near]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
    assert port_trouble("localhost", 0) == ""
    addresses.remove(near)
    assert port_trouble("localhost", 0) in {os.strerror(errno.EADDRNOTAVAIL), os.strerror(errno.EAFNOSUPPORT)}


# Refused configurations: slices too small to copy, one port for two listeners, a key given twice.


def test_slices_have_a_least_size() -> None:
    assert Config(slice_bytes=MIN_SLICE_BYTES).slice_bytes == 1 << 20
    for size_bytes in (MIN_SLICE_BYTES - 1, 1, 0, -1):
        with pytest.raises(InvalidRequest, match=f"slice_bytes must be at least 1048576 .*, got {size_bytes}"):
            Config(slice_bytes=size_bytes)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"metrics_listen": "127.0.0.1:9464"}, {"web_listen": "localhost:9464"}),
        ({"listen": "127.0.0.1:9464"}, {"metrics_listen": "0.0.0.0:9464"}),
        ({"health_listen": "10.0.0.1:9464"}, {"metrics_listen": "10.0.0.1:9464"}),
    ],
)
def test_two_listeners_have_two_ports(one: dict[str, Any], other: dict[str, Any]) -> None:
    Config(**one)
    Config(**other)
    with pytest.raises(InvalidRequest, match="are both port 9464; give each a port of its own"):
        Config(**one, **other)


def test_any_port_and_one_port_of_two_addresses_are_no_conflict() -> None:
    Config(metrics_listen="127.0.0.1:0", web_listen="127.0.0.1:0")
    Config(health_listen="10.0.0.1:9464", metrics_listen="127.0.0.1:9464")
    Config(metrics_listen="127.0.0.1:9464", web_listen="127.0.1.1:9464")


@pytest.mark.parametrize("text", ['host_pool = "1GiB"\nhost_pool = "2GiB"\n', "[token]\n[token]\n"])
def test_what_is_given_twice_is_said_to_be(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidRequest, match=r"line 2.*given twice: keep one") as refused:
        load_config(str(tmp_path / "config.toml"), {})
    assert "quotes" not in str(refused.value)


def test_a_size_without_quotes_is_told_of_quotes(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("host_pool = 1GiB\n", encoding="utf-8")
    with pytest.raises(InvalidRequest, match="stand in quotes"):
        load_config(str(tmp_path / "config.toml"), {})


# Live settings: exactly those that the table names change live, and each of them is a setting.

DOCS = ROOT / "docs"


async def tell_nobody(_: Serving) -> None:
    """No health checks are answered here."""


def test_the_help_and_the_reload_know_the_same_settings() -> None:
    node = Node(rig_of(one_group(), device=[8]).core, epoch=1, wait_seconds=30.0, lease_seconds=10.0)
    admission = Admission(1024, 4096, 256)
    dispatcher = Dispatcher(node, admission)
    cache = CacheService(Edge(dispatcher), 4096)
    lanes = Lanes(dispatcher, cache, None, None, 8, 64)
    backend = ShmBackend(1, 1 << 20)
    operator = Administration(node, DeviceHealth(backend, node, tell_nobody), 5.0)
    applied = live_settings(node, admission, cache, lanes, backend, operator)
    assert applied.keys() == LIVE
    assert {field.name for field in fields(Config)} >= LIVE


def test_the_page_names_what_changes_live_and_nothing_else() -> None:
    """A table says from when each counts."""
    table = (
        (DOCS / "staying-up.md").read_text(encoding="utf-8").partition("| live | from when |")[2].partition("\n\n")[0]
    )
    assert set(re.findall(r"`(\w+)`", table)) == LIVE


def test_the_settings_name_every_eviction_policy() -> None:
    assert SETTINGS["eviction"].choices == tuple(sorted(EVICTION_POLICIES))
