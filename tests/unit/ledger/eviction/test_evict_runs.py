"""Runs of blocks that the host has too leave a device at once: what comes of it is what comes of going one by one."""

from __future__ import annotations

import random
from functools import partial

import pytest

from cachesvc.flows.allocate import allocate
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish as publish_blocks
from cachesvc.flows.recycle import release
from cachesvc.ledger.block_ledger import BlockLedger
from cachesvc.ledger.change_log import NO_ROW, Cause
from cachesvc.ledger.page_pool import PagePool
from cachesvc.ledger.planner import Evictor, walk_of
from cachesvc.ledger.tier_copies import Place
from cachesvc.model.words import FILLING, KEY_BYTES, PageState, WritePolicy
from cachesvc.policy.eviction import EVICTION_POLICIES, eviction_policy
from tests.long_cases import looped
from tests.unit.rigs.ledger_rig import chain, one_group, rig_of, serve, windowed
from tests.work import steps_of

PAGES = 200


def ledger_of(policy: str) -> tuple[BlockLedger, Place]:
    pools = [PagePool(name, PAGES) for name in ("host", "device")]
    for pool in pools:
        pool.add(0, PAGES)
    chosen = eviction_policy(policy)
    ledger = BlockLedger(one_group(), (pools[0],), chosen.rank, chooser=chosen.new_history(4))
    return ledger, ledger.add_replica("replica", (pools[1],))


def publish(ledger: BlockLedger, place: Place, name: str, parent: int, stamp: int) -> int:
    row = ledger.index.insert(name.encode().ljust(KEY_BYTES), parent, stamp)
    ledger.seal(place, row, place.pools[0].take(1, PageState.PRIVATE))
    ledger.offer(place, row)
    return row


def back_up(ledger: BlockLedger, row: int) -> None:
    ledger.seal(ledger.host, row, ledger.host.pools[0].take(1, PageState.PRIVATE))
    ledger.offer(ledger.host, row)


def grown(policy: str, seed: int) -> tuple[BlockLedger, Place]:
    """Long branches, most of whose blocks the host has; some blocks used, some pinned."""
    rng = random.Random(seed)
    ledger, place = ledger_of(policy)
    rows: list[int] = []
    share = rng.choice([0.9, 0.97, 1.0])
    while len(rows) < 120:
        parent = rng.choice([NO_ROW, *rows[-40:]])
        for _ in range(rng.randint(1, 30)):
            parent = publish(ledger, place, str(len(rows)), parent, rng.randint(1, 60))
            rows.append(parent)
            place.used[parent] = rng.random() < 0.2
    for row in rows:
        above = ledger.index.parent[row]
        if rng.random() < share and (above == NO_ROW or ledger.host.is_present(above)):  # so nothing must be saved
            back_up(ledger, row)
    for _ in range(20):
        ledger.index.touch(rng.choice(rows), rng.randint(60, 90))
    for row in rng.sample(rows, rng.randint(0, 2)):
        ledger.pin(place, row)
    return ledger, place


def told(ledger: BlockLedger, place: Place) -> object:
    """All that anybody can tell of what is there and of what has gone."""
    index = ledger.index
    blocks = {
        key: (index.stamp[row], [each.states[0][row] for each in index.places]) for key, row in index.rows.items()
    }
    here = {key: (place.children[row], place.used[row]) for key, row in index.rows.items() if place.is_present(row)}
    counts = [
        (each.counts.states, each.counts.left, each.counts.left_unused, each.counts.ages.counts)
        for each in index.places
    ]
    filed = [sorted(each.leaves) for each in index.places]
    journal = [event[2:7] + event[8:9] for event in ledger.journal.read(1, 10_000)]
    assert [problem for each in index.places for problem in each.pools[0].problems()] == []
    return blocks, here, counts, filed, journal, sorted(ledger.dropped), ledger.evicted_blocks


@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
@looped("seed", range(5), range(25))
def test_what_leaves_at_once_leaves_the_same_behind_as_block_by_block(policy: str, seed: int) -> None:
    (ledger, place), (other, other_place) = grown(policy, seed), grown(policy, seed)
    assert told(ledger, place) == told(other, other_place)
    count = random.Random(seed).randint(1, 120)
    plan, _ = Evictor(ledger).plan_device(place, count, to_host=False)
    Evictor(ledger).carry_out(plan)
    for row in plan.drops:
        other.drop_copy(other_place, row, Cause.EVICTED)
        other.evicted_blocks += 1
    assert told(ledger, place) == told(other, other_place)


@pytest.mark.parametrize("policy", ["deepest_first", "lfu", "lru"])
@looped("seed", range(5), range(25))
def test_a_plan_of_many_has_them_in_the_order_of_plans_of_one(policy: str, seed: int) -> None:
    (ledger, place), (other, other_place) = grown(policy, seed), grown(policy, seed)
    plan, _ = Evictor(ledger).plan_device(place, PAGES, to_host=False)
    one_by_one: list[int] = []
    while (step := Evictor(other).plan_device(other_place, 1, to_host=False)[0]).found:
        Evictor(other).carry_out(step)
        one_by_one += step.drops
    assert plan.drops == one_by_one


def chain_of(blocks: int) -> tuple[BlockLedger, Place, list[int]]:
    ledger, place = ledger_of("lru")
    rows: list[int] = []
    for number in range(blocks):
        rows.append(publish(ledger, place, str(number), rows[-1] if rows else NO_ROW, number + 1))
        back_up(ledger, rows[-1])
    return ledger, place, rows


def test_a_run_ends_where_a_block_is_held_or_shared_or_nowhere_else() -> None:
    ledger, place, rows = chain_of(40)
    walk = walk_of(ledger, place)
    assert walk.next() == rows[-1]
    assert walk.backed_run(rows[-1], 100) == rows[::-1]
    assert walk.backed_run(rows[-1], 7) == rows[:-8:-1]
    ledger.drop_copy(ledger.host, rows[30])
    assert walk.backed_run(rows[-1], 100) == rows[:30:-1], "the only copy of a block"
    ledger.pin(place, rows[32])
    assert walk.backed_run(rows[-1], 100) == rows[:32:-1], "a pinned block"
    publish(ledger, place, "young", rows[35], 90)
    assert walk.backed_run(rows[-1], 100) == rows[:35:-1], "a block with another child here"
    ledger.begin_flight(rows[37])
    assert walk.backed_run(rows[-1], 100) == rows[:37:-1], "a block that a transfer reads"


def test_blocks_that_the_host_has_are_little_work() -> None:
    ledger, place, rows = chain_of(PAGES)
    plan, met = Evictor(ledger).plan_device(place, PAGES, to_host=False, most_work=24)
    assert (plan.drops, met) == (rows[::-1][:PAGES][: len(plan.drops)], True)
    assert len(plan.drops) >= 100
    other, _ = ledger_of("lru")
    alone = other.index.places[1]
    for number in range(PAGES):
        publish(other, alone, str(number), NO_ROW, number + 1)
    plan, met = Evictor(other).plan_device(alone, PAGES, to_host=False, most_work=12)
    assert (len(plan.drops), met) == (12, True)
    assert FILLING not in alone.states[0]


def test_blocks_of_windowed_layouts_are_as_much_work_as_others() -> None:
    """They leave one by one, whatever the host has."""
    rig = rig_of(windowed(), device=(64, 64), host=(64, 64), policy=WritePolicy.WRITE_THROUGH)
    serve(rig, rig.lease(), 1, range(48))
    rig.settle()
    plan, met = rig.model.evictor.plan_device(rig.place(), 48, to_host=False, most_work=12)
    assert (len(plan.drops), met) == (12, True)


def test_short_branches_that_the_host_has_are_planned_as_cheaply_as_those_that_it_has_not() -> None:
    work = []
    for is_backed in (False, True):
        ledger, place, rows = chain_of(8)
        for number in range(32):
            leaf = publish(ledger, place, f"leaf {number}", rows[-1], 100 + number)
            if is_backed:
                back_up(ledger, leaf)
        work.append(steps_of(partial(Evictor(ledger).plan_device, place, 32, to_host=False)))
    alone, backed = work
    assert backed <= 1.3 * alone


@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
def test_blocks_that_no_prompt_can_go_on_behind_go_before_all_others(policy: str) -> None:
    """Prompts whose last blocks have no windows, below blocks of the same segment that have."""
    rig = rig_of(windowed(pool="kv"), device=(64, 64), eviction=policy)
    lease, place, spent = rig.lease(), rig.place(), set()
    for number in range(3):
        prompt = [f"{number} {at}" for at in range(6)]
        rig.run(match, lease, number, chain(*prompt), 0)
        rig.run(partial(allocate, positions={1: range(4)}), lease, number, 6)
        rig.run(publish_blocks, lease, number, 0, chain(*prompt), 0)
        rig.run(release, lease, number)
        rows = rig.model.blocks.index.rows
        spent |= {rows[chain(*prompt[: at + 1])[-KEY_BYTES:]] for at in (4, 5)}
    walks = {only: walk_of(rig.model.blocks, place, spent_only=only) for only in (True, False)}
    for walk in walks.values():
        found: list[int] = []
        while len(found) < len(spent) and (row := walk.next()) is not None:
            found.append(row)
            walk.take(row)
        assert set(found) == spent
    assert walks[True].next() is None
    assert walks[False].next() is not None
