"""Evictable blocks, counted by chains, against a walk from every pinned block; and the order of their eviction."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from cachesvc.ledger.block_ledger import BlockLedger
from cachesvc.ledger.page_pool import PagePool
from cachesvc.ledger.planner import Evictor, evictable_pages, idle_windows, walk_of
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.errors import LedgerBroken
from cachesvc.model.layout import Layout
from cachesvc.model.words import ABSENT, FILLING, KEY_BYTES, READY, PageState
from cachesvc.policy.eviction import EVICTION_POLICIES, RankRule, lfu, lru
from tests.long_cases import looped
from tests.unit.rigs.ledger_rig import one_group, windowed
from tests.work import steps_of

PAGES = 400


def ledger_of(layout: Layout, rule: RankRule = lru) -> tuple[BlockLedger, Place]:
    pools = tuple(PagePool(group.name, PAGES) for group in layout.groups)
    for pool in pools:
        pool.add(0, PAGES)
    ledger = BlockLedger(layout, tuple(PagePool("host", 0) for _ in layout.groups), rule)
    return ledger, ledger.add_replica("replica", pools)


def publish(ledger: BlockLedger, place: Place, name: str, parent: int, stamp: int) -> int:
    key = name.encode().ljust(KEY_BYTES)
    row = ledger.index.insert(key, parent, stamp)
    pages = [pool.take(1, PageState.PRIVATE)[0] for pool in place.pools]
    ledger.seal(place, row, pages)
    ledger.offer(place, row)
    return row


def names(ledger: BlockLedger, rows: list[int]) -> list[str]:
    return [(ledger.index.keys[row] or b"").decode().strip() for row in rows]


def by_walking(ledger: BlockLedger, place: Place, unpinned: list[int], *, after_flights: bool) -> int:
    """All that are here, less the pinned ones and everything above."""
    index, protected = ledger.index, set[int]()
    for start in index.rows.values():
        row = start
        held = place.pins[row] - unpinned.count(row) > 0 or (index.flights[row] > 0 and not after_flights)
        while held and row != NO_ROW:
            protected.add(row)
            row = index.parent[row]
    return sum(place.is_present(row) for row in index.rows.values()) - len(protected)


@looped("seed", range(10), range(30))
def test_what_could_go_is_what_a_walk_counts(seed: int) -> None:
    rng = random.Random(seed)
    ledger, place = ledger_of(windowed())
    index = ledger.index
    pinned: list[int] = []
    held_windows: list[int] = []
    flying: list[int] = []
    for step in range(300):
        rows = list(index.rows.values())
        chance = rng.random()
        if chance < 0.4 and place.pools[0].free:
            publish(ledger, place, str(step), rng.choice([NO_ROW, *rows, *rows[-3:]]), step + 1)
        elif chance < 0.5 and rows:
            pinned.append(rng.choice(rows))
            ledger.pin(place, pinned[-1])
        elif chance < 0.6 and rows:
            flying.append(rng.choice(rows))
            ledger.begin_flight(flying[-1])
        elif chance < 0.65 and rows:
            held_windows.append(rng.choice(rows))
            ledger.pin_windows(place, 1, held_windows[-1:])
        elif chance < 0.7 and held_windows:
            ledger.unpin_windows(place, 1, [held_windows.pop(rng.randrange(len(held_windows)))])
        elif chance < 0.8 and pinned:
            ledger.unpin(place, pinned.pop(rng.randrange(len(pinned))))
        elif chance < 0.9 and flying:
            ledger.end_flight(flying.pop(rng.randrange(len(flying))))
        else:
            plan, _ = Evictor(ledger).plan_device(place, rng.randint(1, 3), to_host=False)
            if not any(place.window_pins[1][row] for row in plan.drops):  # a pin of the block goes with it
                Evictor(ledger).carry_out(plan)
        assert place.unprotected == by_walking(ledger, place, [], after_flights=True)
        unpinned = rng.sample(pinned, rng.randint(0, len(pinned)))
        for after in (False, True):
            expected = by_walking(ledger, place, unpinned, after_flights=after)
            assert evictable_pages(ledger, place, after_flights=after, unpinned=unpinned) == expected
            idle = [row for row in index.rows.values() if not place.window_pins[1][row] and place.states[1][row]]
            assert idle_windows(ledger, place, 1, after_flights=after) == len(idle)


def test_what_others_hold_makes_it_no_more_work_to_say_what_could_go() -> None:
    work = []
    for held in (10, 10, 200):  # what is looked up once for all is of the first
        ledger, place = ledger_of(one_group())
        for number in range(held):
            ledger.pin(place, publish(ledger, place, str(number), NO_ROW, number + 1))
        ledger.begin_flight(publish(ledger, place, "flying", NO_ROW, 500))
        work.append(steps_of(partial(evictable_pages, ledger, place)))
    assert work[1] == work[2]


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
def test_a_plan_takes_them_in_the_order_in_which_one_after_another_would_go(name: str) -> None:
    """The walk counts a victim as gone, with what its parent inherits; then they really go, one by one."""
    for seed in range(20):
        rng = random.Random(seed)
        ledger, place = ledger_of(one_group(), EVICTION_POLICIES[name].rank)
        for step in range(60):
            rows = list(ledger.index.rows.values())
            row = publish(ledger, place, str(step), rng.choice([NO_ROW, *rows]), rng.randint(1, 90))
            for _ in range(rng.randint(0, 2)):
                ledger.index.touch(rng.choice([row, *rows]), rng.randint(1, 90))
        ledger.pin(place, rng.choice(list(ledger.index.rows.values())))
        at_once, _ = Evictor(ledger).plan_device(place, 60, to_host=False)
        one_by_one: list[int] = []
        while (plan := Evictor(ledger).plan_device(place, 1, to_host=False)[0]).found:
            Evictor(ledger).carry_out(plan)
            one_by_one += plan.drops
        assert at_once.drops == one_by_one


def test_runs_of_blocks_go_together_up_to_where_others_share_them() -> None:
    ledger, place = ledger_of(one_group())
    tip, rows = NO_ROW, []
    for step in range(12):
        tip = publish(ledger, place, f"old {step}", tip, step + 1)
        rows.append(tip)
    shared = rows[3]
    young = publish(ledger, place, "young", shared, 50)
    walk = walk_of(ledger, place)
    assert walk.next() == tip
    assert walk.run(tip, 100) == rows[:3:-1], "down to the block that has another child"
    assert walk.run(tip, 5) == rows[:6:-1]
    plan, _ = Evictor(ledger).plan_device(place, 100, to_host=False)
    assert plan.drops == [*rows[:3:-1], young, *rows[3::-1]]


def test_a_parent_is_as_young_as_the_child_that_has_left_it() -> None:
    """Its other child is held, so that it cannot go in the same plan: its own columns must say so."""
    ledger, place = ledger_of(one_group())
    parent = publish(ledger, place, "parent", NO_ROW, 1)
    held = publish(ledger, place, "held", parent, 2)
    ledger.pin(place, held)
    young = publish(ledger, place, "young", parent, 30)
    publish(ledger, place, "other", NO_ROW, 20)
    ledger.drop_copy(place, young)
    ledger.unpin(place, held)
    plan, _ = Evictor(ledger).plan_device(place, 3, to_host=False)
    assert names(ledger, plan.drops) == ["held", "other", "parent"]


def test_a_parent_that_was_hit_as_often_goes_by_the_last_use_below_it() -> None:
    ledger, place = ledger_of(one_group(), lfu)
    parent = publish(ledger, place, "parent", NO_ROW, 1)
    child = publish(ledger, place, "child", parent, 30)
    publish(ledger, place, "other", NO_ROW, 20)
    ledger.drop_copy(place, child)
    plan, _ = Evictor(ledger).plan_device(place, 1, to_host=False)
    assert names(ledger, plan.drops) == ["other"]


def test_what_nobody_held_is_not_given_back() -> None:
    ledger, place = ledger_of(windowed())
    row = publish(ledger, place, "row", NO_ROW, 1)
    below = publish(ledger, place, "below", row, 1)
    misuses: tuple[Callable[[], None], ...] = (
        partial(ledger.unpin, place, row),
        partial(ledger.unpin_windows, place, 1, [row]),
        partial(ledger.end_flight, row),
        partial(ledger.index.remove, row),
        partial(ledger.finish_fill, place, row, arrived=True),
        partial(ledger.end_drain, place, row, needed=True),
    )
    for misuse in misuses:
        with pytest.raises(LedgerBroken):
            misuse()
    assert place.states[0][row] == READY
    assert FILLING not in place.states[0]
    ledger.drop_copy(place, below)
    ledger.drop_copy(place, row)
    assert place.states[0][row] == ABSENT
    with pytest.raises(LedgerBroken):
        ledger.index.remove(row)
