"""Savings of windows: sequences that fit beside the arithmetic, which windowed copies stay, and the capacity engine."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.windows.capacity_engine import Engine, Outcome, Rules
from benchmarks.windows.capacity_node import Node
from benchmarks.windows.capacity_plan import (
    ERNIE_A800,
    FULL,
    WINDOW,
    Machine,
    held_blocks,
    layout_of,
    pools_shared,
    pools_split,
    requests_of,
)
from cachesvc.flows.allocate import allocate, swap_in, swap_out
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import recycle, release
from cachesvc.model.errors import PoolExhausted
from cachesvc.model.words import KEY_BYTES, WritePolicy
from tests.unit.rigs.ledger_rig import Rig, chain, prefill, rig_of, serve, windowed

TOKENS, WINDOW_TOKENS, CHUNK = 65_536, 4096, 8192
EIGHT_HEADS = Machine("eight heads", 1, 8, 1, 1, 1, 1, 1, 0, "a token of a head has 4 bytes")


def fill_until_full(node: Node, *, recycles: bool, publishes: bool) -> int:
    """Prefill sequences of TOKENS in chunks of CHUNK, and keep them all; how many fitted."""
    bs, count = node.model.layout.block_tokens, 0
    while True:
        keys = chain(*((count, i) for i in range(TOKENS // bs))) if publishes else b""
        node.run(match, count, keys, 0)
        for end in range(CHUNK, TOKENS + 1, CHUNK):
            try:
                node.run(allocate, count, end // bs)
            except PoolExhausted:
                node.run(release, count)
                return count
            if publishes:
                node.run(publish, count, (end - CHUNK) // bs, b"", CHUNK // bs)
            if recycles:
                node.run(recycle, count, end, ())
        count += 1


@pytest.mark.parametrize(("block", "publishes"), [(16, False), (32, False), (64, False), (64, True), (128, True)])
def test_an_eighth_of_full_heads_holds_what_the_arithmetic_allows(block: int, publishes: bool) -> None:
    """64k tokens, a window of 4k: the optimum keeps TOKENS of one head and WINDOW_TOKENS of seven."""
    layout = layout_of(EIGHT_HEADS, 7, WINDOW_TOKENS, 0, block)
    token = EIGHT_HEADS.head_token_bytes
    size = 12 * TOKENS * 8 * token + 512  # planes are aligned
    shared = Node(layout, pools_shared(layout, size), size)
    assert fill_until_full(shared, recycles=False, publishes=publishes) == 12
    split = pools_split(layout, size, TOKENS, CHUNK)
    assert split[FULL] * layout.page_bytes(FULL) + split[WINDOW] * layout.page_bytes(WINDOW) <= size
    node = Node(layout, split, size)
    fitted = fill_until_full(node, recycles=True, publishes=publishes)
    optimum = size / (token * (TOKENS + 7 * WINDOW_TOKENS))
    assert optimum / 12 > 5
    assert 0.95 * optimum <= fitted <= optimum
    assert node.problems() == []
    assert shared.problems() == []


# -- what stays ----------------------------------------------------------------------------------------------------


def in_window(rig: Rig, *prompt: object) -> list[bool]:
    """Blocks of a prompt that have their windowed copy on the device."""
    keys, index = chain(*prompt), rig.model.blocks.index
    rows = [index.rows[keys[at : at + KEY_BYTES]] for at in range(0, len(keys), KEY_BYTES)]
    return [bool(rig.place().states[1][row]) for row in rows]


def take_and_keep(rig: Rig, lease: str, sequence: int, pages: int) -> None:
    """Private pages that push as many windowed copies out."""
    rig.run(match, lease, sequence, b"", 0)
    rig.run(allocate, lease, sequence, pages)


def test_copies_behind_a_window_go_before_windows_that_a_next_turn_needs() -> None:
    """Found by counting hits: what a running sequence had left behind was younger than the end of a prompt."""
    rig = rig_of(windowed(window_tokens=8), device=(32, 8))
    a = rig.lease()
    serve(rig, a, 1, "abcd")
    prefill(rig, a, 2, "wxyz")
    rig.run(recycle, a, 2, 16, ())
    take_and_keep(rig, a, 3, 4)
    assert in_window(rig, *"abcd") == [False, False, True, True]
    assert in_window(rig, *"wxyz") == [False, False, True, True]
    assert rig.run(match, a, 4, chain(*"abcd"), 0).device_blocks == 4


def test_a_shared_prefix_that_is_hit_stays_though_long_prompts_pass() -> None:
    """Found by counting hits: only the deepest block of a hit was young, so the rest of its window went first."""
    rig = rig_of(windowed(window_tokens=8), device=(400, 12))
    a = rig.lease()
    serve(rig, a, 1, "sys")
    for i in range(2, 30):
        prompt = [*"sys", *((i, j) for j in range(9))]
        found = rig.run(match, a, i, chain(*prompt), 0)
        assert found.device_blocks == 3
        for blocks in range(4, 13):
            rig.run(allocate, a, i, blocks)
            rig.run(publish, a, i, blocks - 1, chain(*prompt)[(blocks - 1) * KEY_BYTES : blocks * KEY_BYTES], 0)
            rig.run(recycle, a, i, blocks * 4, ())
        rig.run(release, a, i)


def test_sinks_stay_as_long_as_their_window() -> None:
    """Found by reading: a sink is the front of its prompt, so it went first, and no window was worth anything then."""
    rig = rig_of(windowed(window_tokens=8, sink_tokens=4), device=(32, 8))
    a = rig.lease()
    serve(rig, a, 1, "abcdef")
    take_and_keep(rig, a, 2, 5)
    assert in_window(rig, *"abcdef") == [True, False, False, False, True, True]
    assert rig.run(match, a, 3, chain(*"abcdef"), 0).device_blocks == 6
    rig.run(release, a, 3)
    take_and_keep(rig, a, 4, 1)
    assert in_window(rig, *"abcdef") == [True, False, False, False, False, True]


def test_backups_take_what_there_is_and_no_hole() -> None:
    rig = rig_of(windowed(window_tokens=8), device=(16, 16), host=(16, 16), policy=WritePolicy.WRITE_THROUGH)
    a = rig.lease()
    rig.run(match, a, 1, chain(*"abcdef"), 0)
    rig.run(allocate, a, 1, 6)
    rig.run(recycle, a, 1, 24, ())
    rig.run(publish, a, 1, 0, b"", 6)
    [store] = rig.mover.transfers.values()
    assert [len(pair.device_pages) for pair in store.pages] == [6, 2]
    rig.settle()
    rig.run(release, a, 1)
    assert rig.host.pools[1].free == 14


def test_backups_give_way_to_a_swap_in_windowed_groups_too() -> None:
    """Found by reading: a swap was refused for want of windowed host pages that evicting blocks would have freed."""
    rig = rig_of(windowed(window_tokens=8), device=(16, 16), host=(8, 8), policy=WritePolicy.WRITE_THROUGH)
    a = rig.lease()
    serve(rig, a, 1, "abcdefgh")
    rig.settle()
    assert [pool.free for pool in rig.host.pools] == [0, 0]
    rig.run(match, a, 2, b"", 0)
    rig.run(allocate, a, 2, 4)
    rig.run(recycle, a, 2, 16, ())
    rig.run(swap_out, a, 2)
    rig.settle()
    assert [pool.counts[1] for pool in rig.host.pools] == [4, 2]
    rig.run(swap_in, a, 2)
    rig.settle()
    rig.run(match, a, 3, b"", 0)
    rig.run(allocate, a, 3, 9)
    before = rig.host_keys()
    with pytest.raises(PoolExhausted, match="evictable 4"):
        rig.run(swap_out, a, 3)
    assert rig.host_keys() == before, "a refusal evicts nothing"


# -- the capacity engine -------------------------------------------------------------------------------------------


def served(share: float, *, recycles: bool) -> Outcome:
    machine = dataclasses.replace(ERNIE_A800, pool_bytes=ERNIE_A800.pool_bytes // 8)
    heads = round(share * machine.kv_heads)
    layout = layout_of(machine, heads, 1024, 64, 64)
    tokens = 4000 + 800 // 2
    size = machine.pool_bytes
    pages = pools_split(layout, size, tokens, 2048) if recycles else pools_shared(layout, size)
    node = Node(layout, pages, size)
    requests = requests_of(60, 8.0, 42, 4000.0, 800.0)
    assert sum(request.prompt_tokens for request in requests) == 240_000
    outcome = Engine(machine, node, Rules(recycles, 2048, 512, 400), requests).run()
    assert node.problems() == []
    assert not node.model.computing
    assert all(pool.counts[1] == 0 for pool in node.place.pools), "no private page is left"
    return outcome


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_the_engine_serves_the_same_totals_with_and_without_recycling(share: float) -> None:
    off, on = served(share, recycles=False), served(share, recycles=True)
    for outcome in (off, on):
        assert outcome.done == len(outcome.first_token_s) == 60
        assert outcome.output_tokens == 48_000
        assert outcome.prefill_tokens + outcome.hit_tokens >= 240_000
    assert on.seconds < off.seconds
    assert on.running_seconds / on.seconds > off.running_seconds / off.seconds


def test_pools_of_one_size_hold_the_bytes_they_are_given() -> None:
    layout = layout_of(ERNIE_A800, 2, WINDOW_TOKENS, 128, 64)
    assert held_blocks(layout) == 64 + 1 + 2
    assert layout_of(ERNIE_A800, 4, WINDOW_TOKENS, 0, 64).page_bytes(FULL) == 1
    for pages in (pools_shared(layout, 1 << 34), pools_split(layout, 1 << 34, 12_000, 8192)):
        size = sum(count * layout.page_bytes(group) for group, count in enumerate(pages))
        assert 0.99 * (1 << 34) < size <= 1 << 34
