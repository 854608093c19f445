"""Restarts with default options, small host pools, and folders that go while the daemon runs: real daemons."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvcache.v1 import admin_pb2

from tests.e2e.engine import Engine, prompt
from tests.e2e.rig import Node, running_node, wait_until

BLOCKS = 12
PROMPTS = 6


@contextmanager
def storing(folder: Path, *flags: str, options: str = "", drain: int = 30) -> Iterator[Node]:
    """A daemon with the options that it has by default, but for a bound that a loaded machine needs."""
    spec = f"file:{folder}/cache?capacity=64MiB&floor=0&wait=5s{options}"
    with running_node(["--storage", spec, "--drain-seconds", str(drain), *flags]) as node:
        yield node


def lines(node: Node, event: str) -> list[dict[str, object]]:
    found = [json.loads(line) for line in node.log().splitlines() if line.startswith("{")]
    return [line for line in found if line["event"] == event]


def stop(node: Node) -> None:
    """End it in order; its log stays."""
    node.daemon.process.terminate()
    assert node.daemon.process.wait() == 0


def attention(node: Node) -> str:
    return "\n".join(node.admin.GetStatus(admin_pb2.GetStatusRequest()).attention)


@pytest.mark.parametrize(
    ("asked", "options", "policy"),
    [
        (3, "", "write_back"),
        (2, "", "write_back"),
        (3, "", "write_through"),
        (3, "", "write_through_selective"),
        (1, "&write=through", "write_back"),
    ],
)
def test_what_was_asked_for_again_is_a_hit_after_an_orderly_restart(
    asked: int, options: str, policy: str, tmp_path: Path
) -> None:
    with storing(tmp_path, "--write-policy", policy, options=options) as node:
        with Engine(node.socket, device_pages=256, host_pages=256) as engine:
            for _ in range(asked):
                for seed in range(PROMPTS):
                    engine.serve(prompt(seed, BLOCKS))
            engine.serve(prompt(99, BLOCKS))
        stop(node)
        for line in lines(node, "storage_flushed"):
            assert line["left"] == 0
    with storing(tmp_path) as node, Engine(node.socket, device_pages=256, host_pages=256) as engine:
        for seed in range(PROMPTS):
            served = engine.serve(prompt(seed, BLOCKS))
            assert (served.host, served.computed, served.bad) == (BLOCKS, 0, [])
        once = engine.serve(prompt(99, BLOCKS))
        assert once.computed == (0 if options else BLOCKS), "what was used once is not worth a write by default"


def test_a_prompt_that_is_asked_for_three_times_needs_no_stop(tmp_path: Path) -> None:
    with storing(tmp_path, drain=0) as node, Engine(node.socket, device_pages=256, host_pages=256) as engine:
        for _ in range(3):
            engine.serve(prompt(1, BLOCKS))
        wait_until(lambda: node.counters().get("storage_kept_blocks", 0) == BLOCKS, "it is written")
        wait_until(lambda: node.pages("sealed", "host") == 0, "its copies on the host are gone")
        node.daemon.process.kill()
        node.daemon.process.wait()
    with storing(tmp_path) as node, Engine(node.socket, device_pages=256, host_pages=256) as engine:
        assert engine.serve(prompt(1, BLOCKS)).host == BLOCKS


def test_a_stop_keeps_to_its_time_and_writes_the_best_first(tmp_path: Path) -> None:
    with storing(tmp_path, drain=30) as node:
        with Engine(node.socket, device_pages=256, host_pages=256) as engine:
            for seed in (1, 2, 1, 2, 2):
                engine.serve(prompt(seed, BLOCKS))
        stop(node)
        [began] = lines(node, "storage_flush_began")
        [ended] = lines(node, "storage_flushed")
        assert began["seconds"] == 30
        assert (ended["blocks"], ended["left"]) == (began["blocks"], 0)


@pytest.mark.parametrize("host_pages", [2 * BLOCKS, BLOCKS, BLOCKS // 2, 4])
def test_a_prompt_on_disk_that_is_larger_than_the_host_pool_is_a_hit(host_pages: int, tmp_path: Path) -> None:
    with storing(tmp_path, options="&write=through") as node:
        with Engine(node.socket, device_pages=64, host_pages=64) as engine:
            engine.serve(prompt(1, BLOCKS))
        stop(node)
    with storing(tmp_path) as node, Engine(node.socket, device_pages=64, host_pages=host_pages) as engine:
        served = engine.serve(prompt(1, BLOCKS))
        assert (served.device + served.host, served.computed, served.bad) == (BLOCKS, 0, [])
        assert node.counters()["hit_blocks_storage"] == BLOCKS
        again = engine.serve(prompt(1, BLOCKS))
        assert (again.device, again.computed, again.bad) == (BLOCKS, 0, [])
        if host_pages < BLOCKS:
            wait_until(lambda: node.pages("sealed", "host") == 0, "the host has its pages back")


def test_a_folder_that_goes_while_the_daemon_runs_is_told_and_used_again_when_it_is_back(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with storing(tmp_path, options="&write=through&rescan=100ms") as node:
        with Engine(node.socket, device_pages=256, host_pages=256) as engine:
            engine.serve(prompt(1, BLOCKS))
            wait_until(lambda: node.counters().get("storage_kept_blocks", 0) == BLOCKS, "it is written")
            shutil.rmtree(folder)
            wait_until(lambda: "is not used now" in attention(node), "the breaker has opened, and says so")
            assert str(folder) in attention(node)
            assert engine.serve(prompt(2, BLOCKS)).computed == BLOCKS
            folder.mkdir()
            wait_until(lambda: "is not used now" not in attention(node), "it is used again")
            engine.serve(prompt(1, BLOCKS))
            wait_until(lambda: node.counters().get("storage_kept_blocks", 0) >= 2 * BLOCKS, "what was lost is written")
        assert len(lines(node, "storage_folder_gone")) == 1
        stop(node)
    with storing(tmp_path) as node, Engine(node.socket, device_pages=256, host_pages=256) as engine:
        assert engine.serve(prompt(1, BLOCKS)).host == BLOCKS


@pytest.mark.parametrize(
    ("options", "flag"), [("&write=never", "write=never"), ("&write_rate=0", "write_rate=0"), ("", "")]
)
def test_flags_that_keep_nothing_are_named_at_the_start(options: str, flag: str, tmp_path: Path) -> None:
    with storing(tmp_path, options=options) as node:
        told = [str(line["flag"]) for line in lines(node, "storage_keeps_nothing")]
    assert told == [f"--storage ...&{flag}"] * bool(flag)
