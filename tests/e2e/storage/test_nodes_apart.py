"""Two daemons in network namespaces of their own: the link is cut, slow, and a node dies or freezes.

Whatever comes of it, every byte that is served is right, every prompt is answered, and no page stays held.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from cachesvc_client import Expected

from tests.e2e.engine import Engine, prompt
from tests.e2e.rig import Node, short_folder, wait_until
from tests.e2e.storage.network import BLOCKS, LONG, PORT, Network, engine_on, serve

PATIENT = "?wait=5s&deadline=20s"
HASTY = "?wait=200ms&deadline=2s"


@pytest.fixture
def network() -> Iterator[Network]:
    with short_folder() as folder, Network(folder) as made:
        yield made


def check(*nodes: Node) -> None:
    """Check that no page is held any more, and that all adds up."""
    for node in nodes:
        wait_until(lambda node=node: not any(node.held().values()), "no page is held")  # type: ignore[misc]
        wait_until(lambda node=node: is_all_back(node), "nothing is lent")  # type: ignore[misc]
        assert node.problems() == []
        assert "Traceback" not in node.log()


def is_all_back(node: Node) -> bool:
    counters = node.counters()
    return counters.get("lent_blocks", 0) == counters.get("lent_blocks_back", 0)


def test_each_has_what_the_other_has_computed(network: Network) -> None:
    with network.node(0) as one, network.node(1) as two, engine_on(one) as first, engine_on(two) as second:
        for seed in range(4):
            assert serve(first, seed).computed == BLOCKS
        for seed in range(4):
            assert serve(second, seed).host == BLOCKS
        for seed in range(10, 14):
            assert serve(second, seed).computed == BLOCKS
        for seed in range(10, 14):
            assert serve(first, seed).host == BLOCKS
        check(one, two)


def test_a_node_without_the_token_is_not_served(network: Network) -> None:
    with network.node(0) as one, engine_on(one) as first:
        serve(first, 1)
        (network.folder / "strange").write_text("a-token-that-nobody-else-has-9876543210\n", encoding="utf-8")
        strange = ("--peer-tokens", str(network.folder / "strange"))
        with network.node(1, extra=strange) as two, engine_on(two) as second:
            assert serve(second, 1).computed == BLOCKS
        assert "peer_refused" in one.log()
        check(one)


def test_a_cut_link_holds_nobody_up_and_is_used_again_once_mended(network: Network) -> None:
    with network.node(0) as one, network.node(1, HASTY) as two, engine_on(one) as first, engine_on(two) as second:
        for seed in range(4):
            serve(first, seed)
        wait_until(lambda: serve(second, 0).computed == 0, "the link is there")
        network.cut()
        for seed in range(20, 24):
            assert serve(second, seed).computed == BLOCKS
        assert serve(second, 1).bad == []
        network.mend()
        seeds = iter(range(100, 1000))

        def comes_over() -> bool:
            seed = next(seeds)
            serve(first, seed)
            return serve(second, seed).host == BLOCKS

        wait_until(comes_over, "it is used again")
        check(one, two)


def test_a_slow_link_costs_the_wait_and_no_more(network: Network) -> None:
    with network.node(0) as one, network.node(1, HASTY) as two, engine_on(one) as first, engine_on(two) as second:
        serve(first, 1, LONG)
        network.slow_down()
        served = serve(second, 1, LONG)
        assert served.computed > 0, "a MiB does not come in time"
        for seed in range(30, 34):
            serve(second, seed)
        network.speed_up()
        check(one, two)


def test_a_frozen_lender_is_done_without(network: Network) -> None:
    with network.node(0) as one, network.node(1, HASTY) as two, engine_on(one) as first, engine_on(two) as second:
        for seed in range(4):
            serve(first, seed)
        one.daemon.process.send_signal(signal.SIGSTOP)
        try:
            for seed in range(4):
                assert serve(second, seed).computed == BLOCKS
        finally:
            one.daemon.process.send_signal(signal.SIGCONT)
        check(one, two)


def test_a_frozen_borrower_loses_its_leases_and_goes_on(network: Network) -> None:
    with network.node(0) as one, network.node(1, PATIENT) as two, engine_on(one) as first, engine_on(two) as second:
        serve(first, 1, LONG)
        network.slow_down()
        serving = threading.Thread(target=serve, args=(second, 1, LONG))
        serving.start()
        wait_until(lambda: one.counters().get("lent_blocks", 0) > 0, "it borrows")
        two.daemon.process.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: is_all_back(one), "its leases have lapsed")
        finally:
            two.daemon.process.send_signal(signal.SIGCONT)
        network.speed_up()
        serving.join()
        check(one, two)


KILLS = 3


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_lender_killed_at_any_point(network: Network, seed: int) -> None:
    """While pages come, over a link slow enough to be in the middle."""
    rng = random.Random(seed)
    with network.node(0) as one, network.node(1, PATIENT) as two, engine_on(two) as second:
        with engine_on(one) as first:
            serve(first, 1, LONG)
            serve(first, 2, LONG)
            network.slow_down("20mbit")
            killer = threading.Timer(rng.uniform(0, 0.5), one.daemon.process.kill)
            killer.start()
            for prompt_seed in (1, 2):
                serve(second, prompt_seed, LONG)
            killer.join()
            one.daemon.process.wait()
        serve(second, 3)
        check(two)


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_borrower_killed_at_any_point(network: Network, seed: int) -> None:
    rng = random.Random(seed)
    with network.node(0) as one, engine_on(one) as first:
        serve(first, 1, LONG)
        with network.node(1, PATIENT) as two, engine_on(two) as second:
            network.slow_down("20mbit")
            began = time.monotonic()
            killer = threading.Timer(rng.uniform(0, 0.5), two.daemon.process.kill)
            killer.start()
            try:
                serve(second, 1, LONG)
            except Exception:  # noqa: BLE001 - its daemon was killed under it, at any point: any error of the client's
                assert time.monotonic() > began
            killer.join()
            two.daemon.process.wait()
        serve(first, 2)
        check(one)


def test_a_new_life_of_the_lender_knows_nothing_of_the_last_ones_leases(network: Network) -> None:
    with network.node(1, HASTY) as two, engine_on(two) as second:
        for life in range(2):
            with network.node(0) as one, engine_on(one) as first:
                seeds = iter(range(1000 * life + 500, 1000 * life + 999))

                def comes_over(first: Engine = first, seeds: Iterator[int] = seeds) -> bool:
                    seed = next(seeds)
                    serve(first, seed)
                    return serve(second, seed).host == BLOCKS

                wait_until(comes_over, "it borrows of this life")
                check(one)
                one.daemon.process.kill()
                one.daemon.process.wait()
        check(two)


def test_a_prefill_is_followed_over_a_slow_and_lossy_link_and_a_cut_one_is_given_up(network: Network) -> None:
    """The decoder's daemon has only the permitted network; a request names the prefiller."""
    named = ("--peers", "", "--peer-allow", "10.77.0.0/24")
    lends = ("--peer-lease-seconds", "10")  # longer than packets that are lost twice take
    with (
        network.node(0, extra=lends) as one,
        network.node(1, extra=named) as two,
        engine_on(one) as first,
        engine_on(two) as second,
    ):
        far = network.delay(0.02, 0.01)
        far.lose_opening.add(PORT + 1)
        at = f"{network.address(0)}:{PORT}"
        keys = second.keys(prompt(1, LONG))

        def look(patience: float = 10.0) -> tuple[int, int]:
            with second.lease.match(keys, expected=Expected(at, patience=patience, waits=False)) as sequence:
                return sequence.hit_blocks, sequence.coming_blocks

        with first.lease.match(keys) as prefill:
            prefill.allocate(LONG)
            for upto in range(BLOCKS, LONG - BLOCKS + 1, BLOCKS):
                first.fill(prefill, keys, range(prefill.sealed_blocks, upto))
                prefill.publish(upto)
                wait_until(lambda upto=upto: look()[0] >= upto, "the chunk has come")  # type: ignore[misc]
            assert not far.lose_opening, "the first stream's first packet was lost, and sent again"
            assert "peer_failed" not in two.log()
            network.cut()
            wait_until(lambda: look()[1] == 0, "the rest is not expected any more")
        assert serve(second, 1, LONG).computed == BLOCKS
        network.mend()
        check(one, two)
