"""Tiers of storage one below the other: a disk of each daemon, and a bucket that daemons share."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.s3_rig import Proxy, options_of, shared_server
from tests.e2e.engine import Engine, prompt
from tests.e2e.rig import Node, running_node, wait_until
from tests.forked_command import run_forked

BLOCKS = 8
PROMPTS = 4
FAR_SECONDS = 60.0
"""Far from the time that it takes, and far from endless."""


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    made = Proxy(shared_server().port)
    yield made
    made.close()


@contextmanager
def tiered(
    folder: Path, proxy: Proxy, prefix: str, *, disk: str = "through", bucket: str = "through"
) -> Iterator[Node]:
    flags = [
        "--storage",
        f"file:{folder}/cache?capacity=64MiB&floor=0&write={disk}&wait=2s",
        "--storage",
        f"s3://tests/{prefix}?endpoint={proxy.endpoint}&write={bucket}&wait=2s&absent=100ms&retries=0&deadline=4s",
        "--write-policy",
        "write_through",
    ]
    with running_node(flags) as node:
        yield node


def tiers(node: Node) -> list[dict[str, Any]]:
    said = run_forked("cachesvc_ctl", "storage", "--socket", node.socket, "--json").stdout
    found: list[dict[str, Any]] = json.loads(said)["tiers"]
    return found


def objects(node: Node) -> list[int]:
    return [int(tier["objects"]) for tier in tiers(node)]


def test_a_disk_that_is_new_is_filled_from_the_bucket_by_what_is_hit(tmp_path: Path, proxy: Proxy) -> None:
    prefix = options_of(shared_server()).prefix
    with (
        tiered(tmp_path / "one", proxy, prefix) as node,
        Engine(node.socket, device_pages=64, host_pages=256) as engine,
    ):
        for seed in range(PROMPTS):
            assert engine.serve(prompt(seed, BLOCKS)).computed == BLOCKS
        wait_until(lambda: objects(node) == [PROMPTS * BLOCKS] * 2, "both tiers have it")
    with (
        tiered(tmp_path / "other", proxy, prefix) as node,
        Engine(node.socket, device_pages=64, host_pages=256) as engine,
    ):
        for seed in range(PROMPTS):
            served = engine.serve(prompt(seed, BLOCKS))
            assert (served.host, served.computed, served.bad) == (BLOCKS, 0, [])
        wait_until(lambda: objects(node)[0] == PROMPTS * BLOCKS, "what was hit is on the disk too")
        found = tiers(node)
        assert [tier["engine"] for tier in found] == ["file", "s3"]
        assert [int(tier["hits"]) for tier in found] == [0, PROMPTS * BLOCKS]
        assert found[1]["read_p99_seconds"] >= found[1]["read_p50_seconds"] > 0
    with (
        tiered(tmp_path / "other", proxy, prefix) as node,
        Engine(node.socket, device_pages=64, host_pages=256) as engine,
    ):
        for seed in range(PROMPTS):
            served = engine.serve(prompt(seed, BLOCKS))
            assert (served.host, served.computed, served.bad) == (BLOCKS, 0, [])
        assert [int(tier["hits"]) for tier in tiers(node)] == [PROMPTS * BLOCKS, 0], "the disk alone was read"


def test_a_bucket_that_takes_what_was_used_again_gets_that_alone(tmp_path: Path, proxy: Proxy) -> None:
    prefix = options_of(shared_server()).prefix
    with (
        tiered(tmp_path, proxy, prefix, bucket="selective") as node,
        Engine(node.socket, device_pages=64, host_pages=256) as engine,
    ):
        for seed in range(PROMPTS):
            engine.serve(prompt(seed, BLOCKS))
        wait_until(lambda: objects(node)[0] == PROMPTS * BLOCKS, "the disk has it all")
        assert objects(node)[1] == 0
        for _ in range(3):
            engine.serve(prompt(1, BLOCKS))
        wait_until(lambda: objects(node)[1] == BLOCKS, "what was used again is in the bucket")


def test_a_dead_bucket_slows_the_disk_by_one_bounded_wait(tmp_path: Path, proxy: Proxy) -> None:
    prefix = options_of(shared_server()).prefix
    with (
        tiered(tmp_path, proxy, prefix) as node,
        Engine(node.socket, device_pages=64, host_pages=256) as engine,
    ):
        engine.serve(prompt(0, BLOCKS))
        wait_until(lambda: objects(node) == [BLOCKS] * 2, "both tiers have it")
    with (
        tiered(tmp_path, proxy, prefix) as node,
        Engine(node.socket, device_pages=64, host_pages=256) as engine,
    ):
        proxy.flowing.clear()
        began = time.monotonic()
        for seed in range(1, 4 * PROMPTS):
            served = engine.serve(prompt(seed, BLOCKS))
            assert (served.computed, served.bad) == (BLOCKS, [])
        served = engine.serve(prompt(0, BLOCKS))
        assert (served.host, served.computed, served.bad) == (BLOCKS, 0, []), "the disk serves"
        wait_until(lambda: objects(node)[0] == 4 * PROMPTS * BLOCKS, "and is written")
        assert time.monotonic() - began < FAR_SECONDS
        assert [tier["breaker"] == "closed" for tier in tiers(node)] == [True, False]
        proxy.flowing.set()
        wait_until(lambda: tiers(node)[1]["breaker"] == "closed", "a canary came back")


def test_a_place_that_is_given_twice_is_refused() -> None:
    flags = ["--storage", "file:/tmp/c?capacity=1GiB", "--storage", "file:/tmp/c?capacity=2GiB"]
    with pytest.raises(Exception, match="is given twice"), running_node(flags):
        pass
