"""The configuration file is read again, by SIGHUP or by call: applied whole and told, or refused whole by name."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from cachesvc_client import LimitExceeded
from kvcache.v1 import admin_pb2, inspect_pb2

from tests.e2e.engine import Engine, prompt
from tests.e2e.refusals import refusal_of
from tests.e2e.rig import Node, running_node, wait_until

BEFORE = 'log_level = "info"\nload_limit = "1GiB"\n'


@pytest.fixture
def file(folder: Path) -> Path:
    path = folder / "cachesvc.toml"
    path.write_text(BEFORE)
    return path


@pytest.fixture
def node(file: Path) -> Iterator[Node]:
    with running_node(["--config", str(file), "--host-pool", "0"]) as running:
        yield running


def reload(node: Node) -> dict[str, tuple[str, str]]:
    changes = node.admin.Reload(inspect_pb2.ReloadRequest()).changes
    return {change.name: (change.before, change.after) for change in changes}


def setting(node: Node, name: str) -> str:
    return node.admin.GetStatus(admin_pb2.GetStatusRequest()).config[name]


def events(node: Node, name: str) -> list[dict[str, object]]:
    return [found for line in node.log().splitlines() if (found := json.loads(line))["event"] == name]


def test_what_may_change_is_applied_and_told(node: Node, file: Path) -> None:
    assert reload(node) == {}
    with Engine(node.socket, device_pages=8) as engine:
        assert engine.serve(prompt(1, 6)).computed == 6
        file.write_text('log_level = "warning"\nblocks_per_sequence = 4\nstore_limit = "2GiB"\n')
        assert reload(node) == {
            "log_level": ("info", "warning"),
            "blocks_per_sequence": ("65536", "4"),
            "load_limit": (str(1 << 30), "0"),
            "store_limit": ("0", str(2 << 30)),
        }
        assert engine.serve(prompt(1, 6)).device == 6, "a lease keeps the limit that its engine was told"
    with Engine(node.socket, device_pages=8) as engine:
        with pytest.raises(LimitExceeded, match="4"):
            engine.serve(prompt(1, 6))
        assert engine.serve(prompt(1, 4)).device == 4
    assert (setting(node, "blocks_per_sequence"), setting(node, "log_level")) == ("4", "warning")
    assert len(events(node, "reloaded")) == 1, "the second is below the level that it set"


def test_a_signal_reloads_too(node: Node, file: Path) -> None:
    file.write_text('write_policy = "write_through"\nwrite_through_threshold = 3\ncalls_in_flight = 7\n')
    node.daemon.process.send_signal(signal.SIGHUP)
    wait_until(lambda: setting(node, "calls_in_flight") == "7", "the signal was heard")
    assert setting(node, "write_policy") == "write_through"
    file.write_text("no toml")
    node.daemon.process.send_signal(signal.SIGHUP)
    wait_until(lambda: bool(events(node, "reload_refused")), "the refusal is in the log")
    assert setting(node, "calls_in_flight") == "7"


@pytest.mark.parametrize(
    ("text", "status", "names"),
    [
        ('host_pool = "1GiB"\nleases = 3\n', grpc.StatusCode.FAILED_PRECONDITION, None),
        ('leases = 3\neviction = "lfu"\nlease_seconds = 3\n', grpc.StatusCode.FAILED_PRECONDITION, "eviction.*lease_s"),
        ("leases = 0\n", grpc.StatusCode.INVALID_ARGUMENT, "leases must be positive"),
        ("leases = 3\nlaeses = 3\n", grpc.StatusCode.INVALID_ARGUMENT, "unknown key 'laeses'"),
        ("fault_copies = 0.5\n", grpc.StatusCode.INVALID_ARGUMENT, "never in a file"),
        ("leases = ", grpc.StatusCode.INVALID_ARGUMENT, "cannot read"),
    ],
)
def test_one_setting_that_cannot_be_refuses_all(
    node: Node, file: Path, text: str, status: grpc.StatusCode, names: str | None
) -> None:
    before = dict(node.admin.GetStatus(admin_pb2.GetStatusRequest()).config)
    file.write_text(text)
    if names is None:  # a flag wins over the file, then as now
        assert reload(node) == {"leases": ("1024", "3"), "load_limit": (str(1 << 30), "0")}
        return
    refusal = refusal_of(lambda: reload(node))
    assert refusal.status is status
    assert re.search(names, str(refusal.error))
    assert dict(node.admin.GetStatus(admin_pb2.GetStatusRequest()).config) == before
    assert len(events(node, "reload_refused")) == 1


def test_without_a_file_there_is_nothing_to_read() -> None:
    with running_node() as node:
        with pytest.raises(grpc.RpcError, match="--config FILE"):
            reload(node)
        node.daemon.process.send_signal(signal.SIGHUP)
        wait_until(lambda: len(events(node, "reload_refused")) == 2, "the daemon got the signal, and ended no call")
