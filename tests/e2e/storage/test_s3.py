"""Blocks in a bucket outlive daemons and are shared by them: real daemons over a real S3-compatible store."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.contracts.s3_rig import Proxy, Server, as_it_is, dead, half, options_of, shared_server
from tests.contracts.test_s3_troubles import DENIED, NO_BUCKET, WELL, FakeStore, fake_store
from tests.e2e.engine import Engine, prompt
from tests.e2e.rig import Node, running_node, wait_until
from tests.forked_command import run_forked

BLOCKS = 8
PROMPTS = 5
FAR_SECONDS = 60.0
"""Far from the time that it takes, and far from endless."""


@contextmanager
def storing(store: Server | Proxy, prefix: str, more: str = "wait=5s") -> Iterator[Node]:
    spec = f"s3://tests/{prefix}?endpoint={store.endpoint}&write=through&absent=100ms&{more}"
    with running_node(["--storage", spec, "--write-policy", "write_through"]) as node:
        yield node


@pytest.fixture
def prefix() -> str:
    return options_of(shared_server()).prefix


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    yield from fake_store(monkeypatch)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    made = Proxy(shared_server().port)
    yield made
    made.close()


def stored(node: Node, blocks: int) -> bool:
    return node.counters().get("storage_kept_blocks", 0) >= blocks


def cachesvc(node: Node, *words: str, ask: str = "storage") -> str:
    return run_forked("cachesvc_ctl", ask, "--socket", node.socket, *words).stdout


def test_after_a_kill_and_on_another_node_every_stored_block_is_a_hit(prefix: str) -> None:
    store = shared_server()
    with (
        storing(store, prefix) as other,
        Engine(other.socket, device_pages=64, host_pages=256) as reader,
        storing(store, prefix) as node,
        Engine(node.socket, device_pages=64, host_pages=256) as engine,
    ):
        for seed in range(PROMPTS):
            assert engine.serve(prompt(seed, BLOCKS)).computed == BLOCKS
        wait_until(lambda: stored(node, PROMPTS * BLOCKS), "all is stored")
        node.daemon.process.kill()
        node.daemon.process.wait()
        for seed in range(PROMPTS):
            served = reader.serve(prompt(seed, BLOCKS))
            assert (served.host, served.computed, served.bad) == (BLOCKS, 0, []), "another node that ran already"
    with storing(store, prefix) as node, Engine(node.socket, device_pages=64, host_pages=256) as engine:
        for seed in range(PROMPTS):
            served = engine.serve(prompt(seed, BLOCKS))
            assert (served.device, served.host, served.computed, served.bad) == (0, BLOCKS, 0, [])
        assert node.counters()["hit_blocks_storage"] == PROMPTS * BLOCKS
        wait_until(lambda: json.loads(cachesvc(node, "--json"))["complete"], "the bucket has been listed")
        assert f"{PROMPTS * BLOCKS} objects" in cachesvc(node)
        assert cachesvc(node, "--verify").startswith(f"ok: {PROMPTS * BLOCKS} objects")
        assert cachesvc(node, "--purge-all") == f"removed {PROMPTS * BLOCKS} objects\n"


@pytest.mark.parametrize("harm", ["stalled", "dead", "cut"])
def test_a_store_that_fails_costs_bounded_waits_serves_nothing_wrong_and_is_used_again(
    prefix: str, proxy: Proxy, harm: str
) -> None:
    with (
        storing(proxy, prefix, "wait=200ms&deadline=1s&retries=0") as node,
        Engine(node.socket, device_pages=64, host_pages=256) as engine,
    ):
        engine.serve(prompt(0, BLOCKS))
        wait_until(lambda: stored(node, BLOCKS), "it is stored")
        if harm == "stalled":
            proxy.flowing.clear()
        else:
            proxy.harm = dead if harm == "dead" else half
        began = time.monotonic()
        for seed in range(1, 4 * PROMPTS):
            served = engine.serve(prompt(seed, BLOCKS))
            assert (served.computed, served.bad) == (BLOCKS, [])
        said = cachesvc(node)
        assert "NOT used" in said, said
        assert time.monotonic() - began < FAR_SECONDS
        proxy.harm = as_it_is
        proxy.flowing.set()
        wait_until(lambda: "used, given up" in cachesvc(node).replace("NOT used", ""), "a canary came back")
        before = node.counters().get("storage_kept_blocks", 0)
        engine.serve(prompt(99, BLOCKS))
        wait_until(lambda: stored(node, before + BLOCKS), "it writes again")


def test_a_daemon_ends_in_good_order_while_its_store_is_stalled(prefix: str, proxy: Proxy) -> None:
    with (
        storing(proxy, prefix, "wait=200ms&deadline=3s") as node,
        Engine(node.socket, device_pages=64, host_pages=256) as engine,
    ):
        proxy.flowing.clear()
        for seed in range(3):
            engine.serve(prompt(seed, BLOCKS))


@pytest.mark.parametrize("is_there_first", [True, False])
@pytest.mark.parametrize(
    ("answer", "said"), [(DENIED, "the store refuses the credentials"), (NO_BUCKET, "the store has no such bucket")]
)
def test_wrong_keys_and_a_deleted_bucket_cost_hits_alone_are_told_and_pass(
    answer: tuple[int, str], said: str, is_there_first: bool, store: FakeStore
) -> None:
    options = "write=through&wait=200ms&retries=0&absent=0s&rescan=100ms"
    spec = f"s3://blocks/p?endpoint={store.options.endpoint}&{options}"
    if not is_there_first:
        store.answer = answer
    with (
        running_node(["--storage", spec, "--write-policy", "write_through"]) as node,
        Engine(node.socket, device_pages=16, host_pages=16) as engine,
    ):
        if is_there_first:
            engine.serve(prompt(0, BLOCKS))
            wait_until(lambda: stored(node, BLOCKS), "it is stored")
            store.answer = answer
            store.objects.clear()
        for seed in range(1, 2 * PROMPTS):
            served = engine.serve(prompt(seed, BLOCKS))
            assert (served.computed, served.bad) == (BLOCKS, [])
        served = engine.serve(prompt(0, BLOCKS))
        assert (served.computed, served.bad) == (BLOCKS, []), "it was evicted, and its object cannot be read"
        wait_until(lambda: f"bucket blocks: {said}" in cachesvc(node, ask="status"), "status says why")
        wait_until(lambda: "storage_given_up" in node.log(), "the log says so")
        store.answer = WELL
        wait_until(lambda: "storage_used_again" in node.log(), "it is used again by itself")
        before = node.counters().get("storage_kept_blocks", 0)
        engine.serve(prompt(99, BLOCKS))
        wait_until(lambda: stored(node, before + BLOCKS), "it writes again")


def test_without_its_store_a_daemon_starts_and_says_why_it_is_not_used() -> None:
    spec = "s3://tests/nowhere?endpoint=http://127.0.0.1:1&write=through&wait=200ms&retries=0"
    with running_node(["--storage", spec]) as node, Engine(node.socket, device_pages=64, host_pages=256) as engine:
        for seed in range(3):
            assert engine.serve(prompt(seed, BLOCKS)).computed == BLOCKS
        wait_until(lambda: "NOT used" in cachesvc(node), "it was given up")
        assert "storage_not_listed" in node.log()
        assert "! storage s3 is not used now (" in cachesvc(node, ask="status")
