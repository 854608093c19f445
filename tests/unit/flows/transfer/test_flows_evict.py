"""Room on the device: exact LRU against an oracle that shares no line with it, all or nothing, leaves first."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from cachesvc.flows import pinning
from cachesvc.flows.allocate import allocate
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import recycle, release
from cachesvc.ledger.planner import evictable_pages
from cachesvc.model.answers import Wait
from cachesvc.model.errors import PoolExhausted
from cachesvc.model.words import KEY_BYTES, WritePolicy
from tests.conservation import audit
from tests.long_cases import looped
from tests.oracle import lru_hits
from tests.unit.rigs.ledger_rig import chain, one_group, prefill, rig_of, serve, windowed


@dataclass(frozen=True)
class Prompt:
    """A request of the synthetic trace: node numbers of a tree, root to leaf."""

    block_ids: tuple[int, ...]


def trace(seed: int, requests: int) -> list[Prompt]:
    """Prompts that share prefixes, by popularity."""
    rng = random.Random(seed)
    nodes: dict[tuple[int, ...], int] = {}
    out: list[Prompt] = []
    for _ in range(requests):
        path: tuple[int, ...] = ()
        ids = []
        for _ in range(rng.randint(1, 9)):
            path = (*path, min(int(rng.expovariate(1.0)), 3))
            ids.append(nodes.setdefault(path, len(nodes)))
        out.append(Prompt(tuple(ids)))
    return out


@pytest.mark.parametrize("capacity", [3, 9, 24, 60])
@looped("seed", range(2), range(12))
def test_hits_and_evictions_are_those_of_the_oracle(seed: int, capacity: int) -> None:
    requests = trace(seed, 120)
    expected = lru_hits(requests, capacity)
    rig = rig_of(one_group(), device=(capacity,))
    lease = rig.lease()
    hits = 0
    for number, request in enumerate(requests, start=1):
        keys = chain(*request.block_ids)
        hit = rig.run(match, lease, number, keys, 0).device_blocks
        total = min(len(request.block_ids), capacity)
        rig.run(allocate, lease, number, max(total, hit))
        rig.run(publish, lease, number, hit, keys[hit * KEY_BYTES : total * KEY_BYTES], 0)
        rig.run(release, lease, number)
        hits += hit
    assert hits == expected.hits
    assert rig.model.blocks.evicted_blocks == expected.evictions
    assert rig.core.counters.get("evictions", 0) == expected.evictions


def test_a_refusal_tells_the_numbers_and_evicts_nothing() -> None:
    rig = rig_of(one_group(), device=(6,))
    a = rig.lease()
    prefill(rig, a, 1, "ab")
    serve(rig, a, 2, "xyz")
    rig.run(match, a, 3, b"", 0)
    before = rig.device_keys()
    with pytest.raises(PoolExhausted) as refused:
        rig.run(allocate, a, 3, 5)
    error = refused.value
    facts = (error.wanted, error.free, error.evictable, error.pinned, error.quarantined, error.capacity)
    assert facts == (5, 1, 3, 2, 0, 6)
    assert rig.device_keys() == before
    rig.run(allocate, a, 3, 4)
    assert rig.device_keys() == {chain("a"), chain(*"ab")[KEY_BYTES:]}


def test_nothing_is_evicted_where_only_the_window_is_short() -> None:
    """Found by reading: full blocks were evicted before the windowed group refused."""
    rig = rig_of(windowed(window_tokens=8), device=(4, 3))
    a = rig.lease()
    serve(rig, a, 1, "ab")
    prefill(rig, a, 2, "x")
    before = rig.device_keys(), rig.free()
    rig.run(match, a, 3, b"", 0)
    with pytest.raises(PoolExhausted, match="window"):
        rig.run(allocate, a, 3, 3)
    assert (rig.device_keys(), rig.free()) == before


def test_leaves_go_first_and_shared_prefixes_last() -> None:
    rig = rig_of(one_group(), device=(6,))
    a = rig.lease()
    serve(rig, a, 1, "rab")
    serve(rig, a, 2, "rxy")
    serve(rig, a, 3, "q")  # the pool is full now
    serve(rig, a, 4, "zz")
    keys = rig.device_keys()
    assert chain("r") in keys, "its other child is still there"
    assert {chain(*"rab")[2 * KEY_BYTES :], chain(*"rab")[KEY_BYTES : 2 * KEY_BYTES]} & keys == set()


def test_a_prefix_that_lies_twice_on_a_path_goes_by_its_last_use() -> None:
    rig = rig_of(one_group(), device=(4,))
    a = rig.lease()
    serve(rig, a, 1, "ab")
    serve(rig, a, 2, "cd")
    serve(rig, a, 3, "a")  # stamps the parent alone: its child is older than it
    serve(rig, a, 4, "x")
    assert chain(*"ab")[KEY_BYTES:] not in rig.device_keys()
    serve(rig, a, 5, "y")
    assert rig.device_keys() == {chain("a"), chain("c"), chain("x"), chain("y")}


def test_write_back_frees_the_page_when_the_bytes_are_on_the_host() -> None:
    rig = rig_of(one_group(), device=(3,), host=(8,))
    a = rig.lease()
    serve(rig, a, 1, "abc")
    rig.run(match, a, 2, b"", 0)
    waits = rig.once(allocate, a, 2, 2)
    assert isinstance(waits, Wait)
    assert rig.free() == [0]
    assert rig.once(allocate, a, 2, 2) == waits, "nothing more is evicted while it waits"
    rig.land(waits.tickets[0])
    assert rig.free() == [2]
    rig.run(allocate, a, 2, 2)
    assert rig.host_keys() == {chain(*"abc")[KEY_BYTES : 2 * KEY_BYTES], chain(*"abc")[2 * KEY_BYTES :]}
    hit = rig.run(match, a, 3, chain(*"abc"), 0)
    assert (hit.device_blocks, hit.host_blocks) == (1, 2)


@pytest.mark.parametrize("error", ["", "broken"])
def test_a_hit_while_it_drains_keeps_the_block(error: str) -> None:
    rig = rig_of(one_group(), device=(2,), host=(8,))
    a = rig.lease()
    serve(rig, a, 1, "ab")
    rig.run(match, a, 2, b"", 0)
    waits = rig.once(allocate, a, 2, 2)
    assert isinstance(waits, Wait)
    assert rig.run(match, a, 3, chain(*"ab"), 0).device_blocks == 2
    rig.land(waits.tickets[0], error)
    assert len(rig.device_keys()) == 2
    assert len(rig.host_keys()) == (0 if error else 2)


def test_a_failed_write_back_loses_nothing() -> None:
    rig = rig_of(one_group(), device=(2,), host=(2,))
    a = rig.lease()
    serve(rig, a, 1, "ab")
    rig.run(match, a, 2, b"", 0)
    waits = rig.once(allocate, a, 2, 1)
    assert isinstance(waits, Wait)
    rig.land(waits.tickets[0], "broken")
    assert len(rig.device_keys()) == 2
    assert rig.host_keys() == set()
    assert rig.host.pools[0].free == 2


def test_an_operators_eviction_leaves_what_lies_under_blocks_of_the_host() -> None:
    """Found by simulation: it planned as if a backup made room for another, kept it, and dropped what was above it."""
    rig = rig_of(one_group(), device=(5,), host=(2,))
    a = rig.lease()
    for number, prompt in enumerate(("xy", "ab"), start=1):
        serve(rig, a, number, prompt)
    for number, prompt in ((10, "xy"), (20, "ab")):  # their last blocks get backups, and stay
        rig.run(match, a, number, b"", 0)
        waits = rig.once(allocate, a, number, 2)
        assert isinstance(waits, Wait)
        rig.run(match, a, number + 1, chain(*prompt), 0)
        rig.land(waits.tickets[0])
        for sequence in (number, number + 1):
            rig.run(release, a, sequence)
    for number, prompt in ((30, "xyz"), (31, "ab"), (32, "xyz")):
        serve(rig, a, number, prompt)
    assert (len(rig.device_keys()), len(rig.host_keys())) == (5, 2)
    assert pinning.evict(rig.core, rig.model.id, "device", 0) == 3
    assert rig.device_keys() == {chain(*"a"), chain(*"x")}
    assert audit(rig.core.ledger).problems == []


def test_blocks_on_their_way_to_the_host_are_worth_waiting_for() -> None:
    """Found by reading: a pool full of unpinned blocks whose backup ran was refused as exhausted."""
    rig = rig_of(one_group(), device=(2,), host=(8,), policy=WritePolicy.WRITE_THROUGH)
    a = rig.lease()
    serve(rig, a, 1, "ab")
    rig.run(match, a, 2, b"", 0)
    assert isinstance(rig.once(allocate, a, 2, 2), Wait)
    rig.run(allocate, a, 2, 2)
    rig.run(match, a, 3, b"", 0)
    with pytest.raises(PoolExhausted):
        rig.once(allocate, a, 3, 1)


def test_blocks_that_another_replica_sends_to_the_host_are_worth_waiting_for() -> None:
    """Their keys are in flight here too; an engine without a transfer of its own was refused."""
    rig = rig_of(one_group(), device=(2,), host=(8,), policy=WritePolicy.WRITE_THROUGH, replicas=2)
    a, b = rig.lease("a", 0), rig.lease("b", 1)
    rig.run(match, b, 1, b"", 0)
    rig.run(allocate, b, 1, 2)
    serve(rig, a, 1, "ab")
    [backup] = rig.mover.all
    rig.run(publish, b, 1, 0, chain(*"ab"), 0)
    rig.run(release, b, 1)
    rig.run(match, b, 2, b"", 0)
    waits = rig.once(allocate, b, 2, 2)
    assert isinstance(waits, Wait)
    assert backup.ticket in waits.tickets
    rig.run(allocate, b, 2, 2)


def test_a_swap_in_frees_nothing_so_nobody_waits_for_it() -> None:
    rig = rig_of(one_group(), device=(2,), host=(2,))
    a = rig.lease()
    rig.run(match, a, 1, b"", 0)
    rig.run(allocate, a, 1, 2)
    rig.run(match, a, 2, b"", 0)
    with pytest.raises(PoolExhausted):
        rig.once(allocate, a, 2, 1)


def test_windowed_pages_go_oldest_first_and_never_a_held_one() -> None:
    rig = rig_of(windowed(window_tokens=8), device=(32, 6))
    a = rig.lease()
    serve(rig, a, 1, "abc")
    prefill(rig, a, 2, "xyz")
    rig.run(match, a, 3, b"", 0)
    rig.run(allocate, a, 3, 2)
    index = rig.model.blocks.index
    held = {key for key, row in index.rows.items() if rig.place().states[1][row]}
    assert held == {chain(*"xyz")[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in range(3)} | {
        chain(*"abc")[2 * KEY_BYTES :]
    }
    rig.run(recycle, a, 2, 12, ())
    rig.run(match, a, 4, b"", 0)
    rig.run(allocate, a, 4, 2)
    with pytest.raises(PoolExhausted):
        rig.run(allocate, a, 4, 3)


def test_reuse_counts_of_dropped_blocks_do_not_pile_up() -> None:
    """Found by reading: with no ticket ever landing, the list of dropped blocks grew without end."""
    rig = rig_of(one_group(), device=(2,))
    a = rig.lease()
    for number in range(1, 50):
        serve(rig, a, number, [number, -number])
    assert rig.model.blocks.dropped == []


@looped("seed", range(10))
def test_evictable_counts_what_can_really_go(seed: int) -> None:
    rng = random.Random(seed)
    rig = rig_of(one_group(), device=(24,), host=(6,), policy=rng.choice(list(WritePolicy)))
    a = rig.lease()
    for number in range(1, 8):
        prompt = [rng.choice("ab") for _ in range(rng.randint(1, 5))]
        prefill(rig, a, number, prompt)
        if rng.random() < 0.6:
            rig.run(release, a, number)
    rig.settle()
    expected = evictable_pages(rig.model.blocks, rig.place())
    plan, _ = rig.model.evictor.plan_device(rig.place(), 24, to_host=False)
    assert plan.found == expected


def test_evicting_order_by_other_rules() -> None:
    for name, survivor in (("lfu", "often"), ("deepest_first", "late")):
        rig = rig_of(one_group(), device=(3,), eviction=name)
        a = rig.lease()
        prompts: dict[str, list[object]] = {"often": ["often", 1], "late": ["late"]}
        serve(rig, a, 1, prompts["often"])
        for number in range(2, 6):
            serve(rig, a, number, prompts["often"])
        serve(rig, a, 6, prompts["late"])
        serve(rig, a, 7, ["new"])
        assert chain(*prompts[survivor])[-KEY_BYTES:] in rig.device_keys(), name
