"""The work of a call does not grow faster than its request, whatever is resident: counted in steps, not in time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import pytest

from cachesvc.ledger.block_ledger import BlockLedger
from cachesvc.ledger.page_pool import PagePool
from cachesvc.ledger.planner import Evictor, evictable_pages
from cachesvc.ledger.retention import RankRule
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.words import KEY_BYTES, NO_PAGE, PageState
from cachesvc.policy.eviction import lru
from tests.unit.rigs.ledger_rig import one_group
from tests.work import steps_of

FEW, MANY = 1_024, 102_400
PROMPT = 16
YOUNG = 64
LAYOUT = Layout(
    4,
    1,
    (PlaneGroup("full"), PlaneGroup("window", 12, 4)),
    (Plane("k", 0, "full", (8,), "uint8"), Plane("k", 1, "window", (8,), "uint8")),
)


@dataclass
class Node:
    """One model's blocks on one replica and, if wanted, on the host, filled by hand."""

    blocks: BlockLedger
    place: Place
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def publish(self, length: int, stamp: int, host: Sequence[int] = (), *, held: bool = False) -> tuple[bytes, int]:
        """A prompt of ``length`` blocks with all groups on the device and these on the host; its keys, its last row."""
        keys = self.rng.randbytes(length * KEY_BYTES)
        tip = NO_ROW
        for at in range(0, len(keys), KEY_BYTES):
            tip = self.blocks.index.insert(keys[at : at + KEY_BYTES], tip, stamp)
            for place, groups in ((self.place, range(len(self.place.pools))), (self.blocks.host, host)):
                pages = [NO_PAGE] * len(place.pools)
                for group in groups:
                    pages[group] = place.pools[group].take(1, PageState.PRIVATE)[0]
                if groups:
                    self.blocks.seal(place, tip, pages)
                    self.blocks.offer(place, tip)
        if held:
            self.blocks.pin(self.place, tip)
        return keys, tip


def node_of(layout: Layout, device: Sequence[int], host: Sequence[int], rule: RankRule = lru) -> Node:
    def pools(pages: Sequence[int]) -> tuple[PagePool, ...]:
        made = tuple(PagePool(group.name, count) for group, count in zip(layout.groups, pages, strict=True))
        for pool in made:
            if pool.capacity:
                pool.add(0, pool.capacity)
        return made

    blocks = BlockLedger(layout, pools(host), rule)
    return Node(blocks, blocks.add_replica("replica", pools(device)))


@cache
def full_node(size: int) -> Node:
    """Device and host are full of short prompts; the host has windowed copies of the youngest only."""
    node = node_of(LAYOUT, (size, size), (size, YOUNG))
    for prompt in range(size // PROMPT):
        node.publish(PROMPT, prompt + 1, (0, 1) if prompt >= (size - YOUNG) // PROMPT else (0,))
    return node


def evict_some(node: Node) -> None:
    evictor = Evictor(node.blocks)
    plan, met = evictor.plan_device(node.place, 32, to_host=False)
    assert met
    evictor.carry_out(plan)


def make_room_on_the_host(node: Node) -> None:
    """Found by measuring: only the youngest have windowed pages, so all others went before them, planned anew each
    time that one more was missing."""
    evictor = Evictor(node.blocks)
    plan, short = evictor.plan_host_room([4, 4])
    assert short is None
    evictor.carry_out(plan)


@pytest.mark.parametrize("call", [evict_some, make_room_on_the_host], ids=lambda call: call.__name__)
def test_making_room_costs_the_same_beside_many_blocks(call: Callable[[Node], None]) -> None:
    few, many = (steps_of(partial(call, node)) for node in (full_node(FEW), full_node(MANY)))
    assert many < 2 * few, f"{many} steps beside {MANY} blocks, {few} beside {FEW}"


@pytest.mark.parametrize("in_place", [False, True])
def test_a_windowed_match_costs_the_same_for_long_prompts(in_place: bool) -> None:
    """Found by measuring: every block of the prompt was looked at for every windowed group."""
    node = node_of(LAYOUT, (4096, 4096), (0, 0))
    steps = []
    for length in (32, 2048):
        keys, _ = node.publish(length, length)
        look_up = node.blocks.find_in_place if in_place else node.blocks.find
        assert length in look_up(keys, node.place)
        steps.append(steps_of(partial(look_up, keys, node.place)))
    short, long = steps
    assert long < 2 * short, f"{long} steps for 2,048 blocks, {short} for 32"


def test_the_numbers_of_a_refusal_cost_the_same_for_a_full_pool() -> None:
    """Found by measuring: each page that was pinned was walked for every refusal, 18 ms of them at 100,000."""
    steps = []
    for pages in (256, 8192):
        node = node_of(one_group(), (pages + 4,), (0,))
        for turn in range(4):
            node.publish(pages // 4, turn, held=True)
        node.publish(4, 9)
        assert evictable_pages(node.blocks, node.place) == 4
        steps.append(steps_of(partial(evictable_pages, node.blocks, node.place)))
    assert steps[1] == steps[0]


class CountedRule:
    """``lru`` that knows how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, stamp: int, hits: int, depth: int) -> int:
        self.calls += 1
        return lru(stamp, hits, depth)


def test_no_single_call_puts_all_candidates_in_order() -> None:
    """Found by measuring: now and then one unpin rebuilt the whole order, and one eviction threw away all that was
    stale: 271 ms at 100,000 leaves."""
    rule = CountedRule()
    node = node_of(one_group(), (4000,), (0,), rule)
    tips = [node.publish(1, stamp)[1] for stamp in range(1, 4001)]
    most = 0

    def watch(call: Callable[[], object]) -> None:
        nonlocal most
        before = rule.calls
        call()
        most = max(most, rule.calls - before)

    for turn in range(2):
        for at, tip in enumerate(tips):
            watch(partial(node.blocks.pin, node.place, tip))
            watch(partial(node.blocks.index.touch, tip, 4001 + 4000 * turn + at))
            watch(partial(node.blocks.unpin, node.place, tip))
    for tip in tips[:-1]:
        watch(partial(node.blocks.pin, node.place, tip))
    watch(partial(evict_one, node))
    assert not node.place.is_present(tips[-1])
    assert most <= 8, "a few, whatever the number of candidates"


def evict_one(node: Node) -> None:
    evictor = Evictor(node.blocks)
    plan, met = evictor.plan_device(node.place, 1, to_host=False)
    assert met
    evictor.carry_out(plan)
