"""Blocks on their way between the device and the host: evicted, loaded, prefetched, swapped, with their bytes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from cachesvc_client import PoolExhausted

from tests.e2e.engine import BLOCK_TOKENS, LAYERS, PLAIN, WAIT_SECONDS, WINDOWED, Engine, prompt
from tests.e2e.remote import RemoteEngine
from tests.e2e.rig import Node, running_node, wait_until

pytestmark = pytest.mark.usefixtures("each_way")

TINY = 8
"""Device pages: two prompts of four blocks."""


def stores_ended(node: Node) -> bool:
    return node.pages("in_flight") == 0


@pytest.mark.parametrize("policy", ["write_back", "write_through", "write_through_selective"])
def test_what_was_evicted_comes_back_from_the_host(policy: str) -> None:
    with (
        running_node(["--write-policy", policy]) as node,
        Engine(node.socket, device_pages=TINY, host_pages=64) as engine,
        RemoteEngine(node.socket, device_pages=TINY, host_pages=64) as other,
    ):
        other.ask("start")
        repeats = 3 if policy == "write_through_selective" else 1  # a block is stored at its second reuse
        for seed in range(6):
            for _ in range(repeats):
                engine.serve(prompt(seed, 4))
            wait_until(lambda: stores_ended(node), "stores have ended")
        assert node.counters()["evictions"] >= 4 * 4
        for seed in range(6):
            served = other.ask("serve", tokens=prompt(seed, 4))
            assert (served["device"] + served["host"], served["computed"], served["bad"]) == (4, 0, [])
        assert node.counters()["hit_blocks_host"] >= 4 * 4
        assert node.counters()["h2d_bytes"] >= 16 * PLAIN.page_bytes(0)


def test_without_a_host_pool_evicted_blocks_are_gone(node: Node) -> None:
    with Engine(node.socket, device_pages=TINY, host_pages=0) as engine:
        for seed in range(3):
            engine.serve(prompt(seed, 4))
        assert engine.serve(prompt(0, 4)).computed == 4
    assert node.pages("capacity", "host") == 0


def evict_to_host(node: Node, engine: Engine, tokens: Sequence[int]) -> None:
    """Serve it, and push it off the device with other prompts."""
    engine.serve(tokens)
    for seed in (901, 902, 903):
        engine.serve(prompt(seed, 4))
    wait_until(lambda: stores_ended(node), "stores have ended")
    with engine.lease.match(engine.keys(tokens)) as sequence:
        assert sequence.device_blocks == 0
        assert sequence.host_blocks == len(tokens) // BLOCK_TOKENS


def test_a_load_is_followed_layer_by_layer(node: Node) -> None:
    with Engine(node.socket, device_pages=TINY, host_pages=64) as engine:
        tokens = prompt(11, 4)
        keys = engine.keys(tokens)
        evict_to_host(node, engine, tokens)
        with engine.lease.match(keys) as sequence:
            allocated = sequence.allocate(5)
            assert allocated.loading_blocks == 4
            assert len(allocated.tickets) == 1
            for layer in range(LAYERS):
                for ticket in sequence.tickets:
                    engine.pool.wait_layer(ticket, layer, WAIT_SECONDS)
                assert engine.bad(sequence, keys, range(4), [layer]) == []
            views = engine.lease.wait_tickets([ticket.id for ticket in sequence.tickets])
            assert {(view.state, view.direction, view.blocks) for view in views} == {("done", "load", 4)}
            assert views[0].size_bytes == 4 * PLAIN.page_bytes(0)
            assert int(engine.pool.timeline[views[0].slot.word]) >= 0 if views[0].slot else True


def test_two_engines_that_want_the_same_load_share_it(node: Node) -> None:
    with (
        Engine(node.socket, name="a", device_pages=TINY, host_pages=64) as a,
        Engine(node.socket, name="b", device_pages=TINY, host_pages=64) as b,
    ):
        tokens = prompt(12, 4)
        keys = a.keys(tokens)
        evict_to_host(node, a, tokens)
        before = node.counters().get("h2d_bytes", 0)
        with a.lease.match(keys) as of_a, b.lease.match(keys) as of_b:
            of_a.allocate(4)
            of_b.allocate(4)
            for engine, sequence in ((a, of_a), (b, of_b)):
                sequence.wait_loaded(WAIT_SECONDS)
                assert engine.bad(sequence, keys, range(4)) == []
            assert of_a.tables[0].tolist() == of_b.tables[0].tolist()
        assert node.counters()["h2d_bytes"] - before == 4 * PLAIN.page_bytes(0)


def test_prefetch_brings_a_prefix_to_the_device_and_holds_nothing(node: Node) -> None:
    with Engine(node.socket, device_pages=TINY, host_pages=64) as engine:
        tokens = prompt(13, 4)
        keys = engine.keys(tokens)
        evict_to_host(node, engine, tokens)
        fetched = engine.lease.prefetch(keys)
        assert fetched.device_blocks == 4
        engine.lease.wait_tickets([ticket.id for ticket in fetched.tickets])
        with engine.lease.match(keys) as sequence:
            assert sequence.device_blocks == 4
            assert engine.bad(sequence, keys, range(4)) == []
        assert not any(node.held().values())
        assert engine.lease.prefetch(keys).tickets == ()
        assert engine.lease.prefetch(engine.keys(prompt(14, 3))) == (0, ())


def test_a_preempted_sequence_keeps_its_bytes(node: Node) -> None:
    with (
        Engine(node.socket, device_pages=TINY, host_pages=64) as engine,
        RemoteEngine(node.socket, device_pages=TINY, host_pages=64) as other,
    ):
        other.ask("start")
        keys = engine.keys(prompt(15, 6))
        sequence = engine.lease.match(keys)
        sequence.allocate(6)
        engine.fill(sequence, keys, range(6))
        sequence.publish(3)
        sequence.swap_out()
        sequence.wait_swapped(WAIT_SECONDS)
        assert sequence.is_swapped_out
        assert node.pages("private", "replica 0") == 0
        assert node.pages("private", "host") == 3

        for seed in (16, 17):  # the device is another model's in the meantime
            assert other.ask("serve", tokens=prompt(seed, TINY))["bad"] == []
        sequence.swap_in()
        sequence.wait_swapped(WAIT_SECONDS)
        assert engine.bad(sequence, keys, range(6)) == []
        assert sequence.sealed_blocks == 3
        assert node.pages("private", "host") == 0
        sequence.publish(6)
        sequence.release()
        assert other.ask("serve", tokens=prompt(15, 6))["computed"] == 0


@pytest.mark.parametrize("short_suffix", [False, True])
def test_a_preempted_sequence_with_a_window_keeps_its_bytes(node: Node, short_suffix: bool) -> None:
    with Engine(node.socket, layout=WINDOWED, device_pages=16, host_pages=64) as engine:
        keys = engine.keys(prompt(18, 10))
        with engine.lease.match(keys) as sequence:
            sequence.allocate(10)
            engine.fill(sequence, keys, range(10))
            sequence.publish(7)
            sequence.recycle(9 * BLOCK_TOKENS)
            held = (sequence.tables[1] >= 0).tolist()
            sequence.swap_out()
            sequence.wait_swapped(WAIT_SECONDS)
            engine.serve(prompt(19, 14))
            sequence.swap_in(short_suffix=short_suffix)
            sequence.wait_swapped(WAIT_SECONDS)
            assert engine.bad(sequence, keys, range(10)) == []
            assert (sequence.tables[1] >= 0).tolist() == held
            sequence.publish(10)


def test_a_window_hit_comes_back_from_the_host(node: Node) -> None:
    with Engine(node.socket, layout=WINDOWED, device_pages=12, host_pages=64) as engine:
        assert engine.serve(prompt(20, 8)).bad == []
        for seed in (21, 22):
            engine.serve(prompt(seed, 8))
        wait_until(lambda: stores_ended(node), "stores have ended")
        served = engine.serve(prompt(20, 9))
        assert (served.device + served.host, served.computed, served.bad) == (8, 1, [])
        assert served.host > 0


def test_swap_out_is_refused_with_numbers_where_the_host_cannot_hold_it(node: Node) -> None:
    with Engine(node.socket, device_pages=TINY, host_pages=2) as engine:
        keys = engine.keys(prompt(23, 4))
        with engine.lease.match(keys) as sequence:
            sequence.allocate(4)
            engine.fill(sequence, keys, range(4))
            with pytest.raises(PoolExhausted, match=r"host pool.*wanted 4 pages, free 2.*capacity 2"):
                sequence.swap_out()
            assert not sequence.is_swapped_out
            assert engine.bad(sequence, keys, range(4)) == []
            sequence.publish(4)


def test_more_prompts_than_fit_anywhere_stay_right(node: Node) -> None:
    with Engine(node.socket, device_pages=TINY, host_pages=12) as engine:
        for seed in [*range(30, 40), *range(39, 29, -1), *range(30, 40)]:
            assert engine.serve(prompt(seed, 1 + seed % 7)).bad == []
        assert node.counters()["host_evictions"] > 0
