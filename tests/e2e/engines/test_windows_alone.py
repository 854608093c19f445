"""A model whose layers all have a window: hits, recycling, the host and back, and pools of the size that was told."""

from __future__ import annotations

import pytest
from cachesvc_client import CacheClient, InvalidRequest, Lease

from cachesvc.model.layout import MARKER_PAGES, device_bytes, host_bytes
from tests.e2e.engine import ALL_WINDOWED, BLOCK_TOKENS, WAIT_SECONDS, Engine, prompt
from tests.e2e.remote import RemoteEngine
from tests.e2e.rig import Node, running_node, wait_until

HELD = ALL_WINDOWED.window_blocks(0)


def grow(engine: Engine, lease: Lease, seed: int, blocks: int) -> int:
    """Compute a prompt block by block, recycling as it goes; the most pages of the window that it held."""
    keys, most = engine.keys(prompt(seed, blocks)), 0
    with lease.match(keys) as sequence:
        for position in range(sequence.hit_blocks, blocks):
            sequence.allocate(position + 1)
            sequence.wait_loaded(WAIT_SECONDS)
            engine.fill(sequence, keys, [position])
            assert engine.bad(sequence, keys, range(position + 1)) == []
            most = max(most, int((sequence.tables[0] >= 0).sum()))
            sequence.publish(position + 1)
            sequence.recycle((position + 1) * BLOCK_TOKENS)
    return most


def test_a_long_sequence_takes_a_window_of_pages_and_is_hit_by_another_engine(node: Node) -> None:
    blocks = 40
    with (
        Engine(node.socket, layout=ALL_WINDOWED, device_pages=HELD + 2) as engine,
        RemoteEngine(node.socket, layout="all windowed", device_pages=HELD + 2) as other,
    ):
        other.ask("start")
        assert engine.registration.device_pages == (HELD + 2, MARKER_PAGES * (HELD + 2))
        assert {name for _, name in engine.pool.planes} == {"k", "v"}
        assert grow(engine, engine.lease, 1, blocks) <= HELD
        served = other.ask("serve", tokens=prompt(1, blocks + 1))
        assert (served["device"], served["computed"], served["bad"]) == (blocks, 1, [])


def test_it_goes_to_the_host_and_comes_back_by_eviction_and_by_swap() -> None:
    with (
        running_node(["--write-policy", "write_through"]) as node,
        Engine(node.socket, layout=ALL_WINDOWED, device_pages=12, host_pages=64) as engine,
    ):
        assert engine.serve(prompt(2, 8)).bad == []
        wait_until(lambda: node.pages("in_flight") == 0, "stores have ended")
        for seed in (3, 4):
            engine.serve(prompt(seed, 12))
        served = engine.serve(prompt(2, 9))
        assert (served.device + served.host, served.computed, served.bad) == (8, 1, [])
        assert served.host > 0

        keys = engine.keys(prompt(5, 10))
        with engine.lease.match(keys) as sequence:
            sequence.allocate(10)
            engine.fill(sequence, keys, range(10))
            sequence.publish(7)
            sequence.recycle(9 * BLOCK_TOKENS)
            held = (sequence.tables[0] >= 0).tolist()
            assert held.count(True) < 10
            sequence.swap_out()
            sequence.wait_swapped(WAIT_SECONDS)
            engine.serve(prompt(6, 12))
            sequence.swap_in()
            sequence.wait_swapped(WAIT_SECONDS)
            assert engine.bad(sequence, keys, range(10)) == []
            assert (sequence.tables[0] >= 0).tolist() == held


def test_pools_are_what_the_estimate_says_by_pages_and_by_share(node: Node) -> None:
    with CacheClient(node.socket) as client:
        by_pages = client.register("pages", ALL_WINDOWED, device_pages=[10], host_pages=[20])
        assert by_pages.device_pages == (10, 10 * MARKER_PAGES)
        assert by_pages.host_pages == (20, 20)
        named = client.register("named", ALL_WINDOWED, device_pages=[10, 33], host_pages=[0, 0])
        assert (named.device_pages, named.host_pages) == ((10, 33), (0, 0))
        with pytest.raises(InvalidRequest, match="3 page counts for 2 groups"):
            client.register("odd", ALL_WINDOWED, device_pages=[10, 33, 1])

        left = (64 << 20) - device_bytes(ALL_WINDOWED, (10,)) - device_bytes(ALL_WINDOWED, named.device_pages)
        host_left = (64 << 20) - host_bytes(ALL_WINDOWED, (20,))
        share = client.register("share", ALL_WINDOWED)
        pages, markers = share.device_pages
        assert markers == MARKER_PAGES * pages
        assert left * 0.99 < device_bytes(ALL_WINDOWED, share.device_pages) <= left
        assert host_left * 0.9 < host_bytes(ALL_WINDOWED, share.host_pages) <= host_left
