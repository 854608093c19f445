"""Two daemons over one Mooncake Store: what one has computed is a hit on the other, and outlives it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.contracts.mooncake_rig import Cluster, require
from tests.e2e.engine import Engine, prompt
from tests.e2e.rig import Node, running_node, wait_until

BLOCKS = 8
PROMPTS = 4


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    require()
    made = Cluster(tmp_path)
    yield made
    made.close()


@contextmanager
def on_store(cluster: Cluster, wait: str = "5s") -> Iterator[tuple[Node, Engine]]:
    spec = f"mooncake:127.0.0.1:{cluster.port}?write=through&wait={wait}&discard={cluster.discard}s"
    with running_node(["--storage", spec, "--write-policy", "write_through"]) as node:
        wait_until(lambda: "storage_connected" in node.log(), "the master was found")
        with Engine(node.socket, device_pages=64, host_pages=256) as engine:
            yield node, engine


def kept(node: Node) -> int:
    return node.counters().get("storage_kept_blocks", 0)


def test_what_one_node_has_written_is_a_hit_on_another_also_once_it_is_gone(cluster: Cluster) -> None:
    with on_store(cluster) as (one, first):
        for seed in range(PROMPTS):
            assert first.serve(prompt(seed, BLOCKS)).computed == BLOCKS
        wait_until(lambda: kept(one) >= PROMPTS * BLOCKS, "all is stored")
        with on_store(cluster) as (_, second):
            served = second.serve(prompt(0, BLOCKS))
            assert (served.host, served.computed, served.bad) == (BLOCKS, 0, [])
    with on_store(cluster) as (third, engine):
        for seed in range(PROMPTS):
            served = engine.serve(prompt(seed, BLOCKS))
            assert (served.host, served.computed, served.bad) == (BLOCKS, 0, [])
        assert third.counters()["hit_blocks_storage"] == PROMPTS * BLOCKS
        assert third.problems() == []


@pytest.mark.parametrize("victim", ["master", "server"])
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_without_its_store_a_node_goes_on(cluster: Cluster, victim: str, how: str) -> None:
    program = getattr(cluster, victim)
    with on_store(cluster, wait="200ms") as (node, engine):
        engine.serve(prompt(0, BLOCKS))
        wait_until(lambda: kept(node) >= BLOCKS, "it is stored")
        getattr(program, how)()
        for seed in range(20, 26):
            served = engine.serve(prompt(seed, BLOCKS))
            assert (served.computed, served.bad) == (BLOCKS, [])
        again = engine.serve(prompt(0, BLOCKS))
        assert (again.computed, again.bad) == (0, []), "what is on the node is"
        if how == "freeze":
            program.thaw()
        wait_until(lambda: not any(node.held().values()), "what hung is back")
        assert node.problems() == []
