"""Two daemons in network namespaces over one Mooncake Store, which lies on the first one's side with its master.

Whatever becomes of the store and of the link, every byte that is served is right, every prompt is answered, and no page
stays held.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.contracts.mooncake_rig import Store, require
from tests.e2e.engine import Engine
from tests.e2e.rig import Node, short_folder, wait_until
from tests.e2e.storage.network import BLOCKS, LONG, Network, engine_on, serve

BEHIND = 4
"""Prompts that the first node is ahead of the second: what it computes takes a moment to be stored."""
HASTY = "wait=200ms&deadline=2s"


@pytest.fixture
def network() -> Iterator[Network]:
    require()
    with short_folder() as folder, Network(folder) as made:
        yield made


@pytest.fixture
def store(network: Network) -> Iterator[Store]:
    with network.inside(0):
        made = Store(network.folder, host=network.address(0))
        made.wait_for_server()
    yield made
    made.close()


@contextmanager
def node_on(network: Network, side: int, store: Store, wait: str = "wait=5s&deadline=20s") -> Iterator[Node]:
    options = f"host={network.address(side)}&write=through&{wait}&discard={store.discard}s"
    flags = ["--storage", f"mooncake:{store.address}?{options}", "--write-policy", "write_through"]
    with network.daemon(side, flags) as node:
        wait_until(lambda: "storage_connected" in node.log(), "the master was found")
        yield node


def keep(node: Node, engine: Engine, seed: int, blocks: int = BLOCKS) -> None:
    """Compute a prompt, and wait until the store has it."""
    before = kept(node)
    assert serve(engine, seed, blocks).computed == blocks
    wait_until(lambda: kept(node) >= before + blocks, "all is stored")


def kept(node: Node) -> int:
    return node.counters().get("storage_kept_blocks", 0)


def wait_until_it_comes_over(first: Engine, second: Engine) -> None:
    """Wait until the first node's blocks are a hit on the second, as soon as the store has them."""
    seeds = itertools.count(1000)

    def comes_over() -> bool:
        seed = next(seeds)
        serve(first, seed)
        return serve(second, seed - BEHIND).host == BLOCKS if seed >= 1000 + BEHIND else False

    wait_until(comes_over, "the second node hits what the first one computes")


def check(*nodes: Node) -> None:
    """Check that no page is held any more, and that all adds up."""
    for node in nodes:
        wait_until(lambda node=node: not any(node.held().values()), "no page is held")  # type: ignore[misc]
        assert node.problems() == []
        assert "Traceback" not in node.log()


def test_the_second_node_hits_what_the_first_has_computed(network: Network, store: Store) -> None:
    with node_on(network, 0, store) as one, engine_on(one) as first:
        for seed in range(4):
            keep(one, first, seed)
        with node_on(network, 1, store) as two, engine_on(two) as second:
            for seed in range(4):
                served = serve(second, seed)
                assert (served.host, served.computed) == (BLOCKS, 0)
            assert two.counters()["hit_blocks_storage"] == 4 * BLOCKS
            keep(two, second, 10)
            assert serve(first, 10).host == BLOCKS, "and the other way round"
            check(one, two)


@pytest.mark.parametrize("victim", ["master", "server"])
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_its_store_is_done_without_and_used_again(network: Network, store: Store, victim: str, how: str) -> None:
    with (
        node_on(network, 0, store, HASTY) as one,
        node_on(network, 1, store, HASTY) as two,
        engine_on(one) as first,
        engine_on(two) as second,
    ):
        for seed in range(4):
            keep(one, first, seed)
        getattr(getattr(store, victim), how)()
        for seed in range(4):
            serve(second, seed)
        for seed in range(20, 24):
            assert serve(second, seed).computed == BLOCKS
            assert serve(first, seed - 20).computed == 0, "what is on the node is"
        if how == "freeze":
            getattr(store, victim).thaw()
        else:
            with network.inside(0):
                setattr(store, victim, getattr(store, f"start_{victim}")())
        wait_until_it_comes_over(first, second)
        check(one, two)


def test_a_cut_link_holds_nobody_up_and_is_used_again_once_mended(network: Network, store: Store) -> None:
    with (
        node_on(network, 0, store, HASTY) as one,
        node_on(network, 1, store, HASTY) as two,
        engine_on(one) as first,
        engine_on(two) as second,
    ):
        wait_until_it_comes_over(first, second)
        for seed in range(4):
            keep(one, first, seed)
        network.cut()
        for seed in (0, 1, 20, 21):
            assert serve(second, seed).computed == BLOCKS
        network.mend()
        wait_until_it_comes_over(first, second)
        check(one, two)


def test_a_node_that_is_cut_off_ends_in_time(network: Network, store: Store) -> None:
    """A call that hangs in the library is left behind."""
    with node_on(network, 0, store) as one, engine_on(one) as first:
        keep(one, first, 1)
        with node_on(network, 1, store, HASTY) as two, engine_on(two) as second:
            network.cut()
            assert serve(second, 1).computed == BLOCKS
            two.daemon.process.terminate()
            assert two.daemon.process.wait() == 0
        check(one)


def test_a_slow_link_costs_the_wait_and_no_more(network: Network, store: Store) -> None:
    with (
        node_on(network, 0, store, HASTY) as one,
        node_on(network, 1, store, HASTY) as two,
        engine_on(one) as first,
        engine_on(two) as second,
    ):
        keep(one, first, 1, LONG)
        network.slow_down()
        assert serve(second, 1, LONG).computed > 0, "a MiB does not come in time"
        for seed in range(30, 34):
            serve(second, seed)
        network.speed_up()
        wait_until_it_comes_over(first, second)
        check(one, two)
