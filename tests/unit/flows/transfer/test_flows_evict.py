"""Room on the device: exact LRU against an oracle that shares no line with it, all or nothing, leaves first."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from cachesvc.flows import pinning
from cachesvc.flows.allocate import allocate, refill_stock, swap_in, swap_out
from cachesvc.flows.core import Turns, tidy, tidy_all
from cachesvc.flows.make_room import DRAIN_FAILURES, TRY_AGAIN_EVERY
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import recycle, release
from cachesvc.flows.transfers import note_load
from cachesvc.ledger.planner import evictable_pages
from cachesvc.model.answers import Allocated, Wait
from cachesvc.model.errors import IllegalMove, LoadFailed, PoolExhausted
from cachesvc.model.words import KEY_BYTES, Direction, PageState, WritePolicy
from tests.conservation import audit
from tests.long_cases import looped
from tests.oracle import lru_hits
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, prefill, rig_of, serve, windowed


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


# A few device pages are kept free: of what goes next, while the host has it, and at no cost but those pages.

PAGES, AHEAD = 16, 4
THROUGH, BACK = WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK


def rig_with_room(policy: WritePolicy = THROUGH, host: int = 200, pages: int = PAGES, ahead: int = AHEAD) -> Rig:
    rig = rig_of(one_group(), device=(pages,), host=(host,), policy=policy)
    rig.core.limits = replace(rig.core.limits, ahead_pages=ahead, ahead_part=1)
    return rig


def rest(rig: Rig) -> None:
    """Wait without calls until all that is under way has ended."""
    while rig.core.chores or rig.mover.transfers:
        rig.settle()
        while rig.core.chores:
            tidy(rig.core.chores)
            rig.check()


def served(rig: Rig, lease: str, *prompts: str) -> None:
    for number, prompt in enumerate(prompts):
        serve(rig, lease, 1000 + number, prompt)
        rest(rig)


def test_pages_are_free_before_somebody_wants_them() -> None:
    rig = rig_with_room()
    a = rig.lease()
    served(rig, a, "abcdefgh", "ijklmnop")
    assert rig.free() == [AHEAD]
    assert rig.device_keys() >= {chain(*"ijklmnop")[at : at + KEY_BYTES] for at in range(0, 8 * KEY_BYTES, KEY_BYTES)}
    assert rig.host_keys() >= {chain(*"abcdefgh")[at : at + KEY_BYTES] for at in range(0, 8 * KEY_BYTES, KEY_BYTES)}
    before = rig.model.blocks.evicted_blocks
    rig.run(match, a, 1, b"", 0)
    assert isinstance(rig.once(allocate, a, 1, AHEAD), Allocated), "at once"
    assert rig.model.blocks.evicted_blocks == before
    rest(rig)
    assert rig.free() == [AHEAD], "and again"
    rig.run(release, a, 1)
    rest(rig)
    assert rig.free() == [2 * AHEAD]


def test_as_many_pages_as_the_last_loads_took_are_free_before_the_next() -> None:
    """A long prompt's load would evict while its request waits."""
    rig = rig_with_room(pages=256, host=600, ahead=4)
    rig.core.limits = replace(rig.core.limits, ahead_part=32)
    a = rig.lease()
    prompts = ["".join(map(chr, range(first, first + 12))) for first in range(200, 200 + 12 * 24, 12)]
    served(rig, a, *prompts)
    assert rig.free()[0] <= 4
    for number in (0, 1):
        load(rig, a, prompts[number], 2000 + number)
    assert rig.free()[0] >= 12
    before = rig.model.blocks.evicted_blocks
    load(rig, a, prompts[2], 2002, is_free=True)
    assert rig.model.blocks.evicted_blocks > before, "and again"
    assert rig.free()[0] >= 12


def load(rig: Rig, lease: str, prompt: str, sequence: int, *, is_free: bool = False) -> None:
    """Load a prompt of the host's; ``is_free``: its pages are there."""
    rig.run(match, lease, sequence, chain(*prompt), 0)
    before = rig.model.blocks.evicted_blocks
    assert rig.run(allocate, lease, sequence, len(prompt)).tickets
    assert rig.model.blocks.evicted_blocks == before or not is_free
    rest(rig)
    rig.run(release, lease, sequence)
    rest(rig)


def test_loads_that_have_become_rare_are_forgotten() -> None:
    rig = rig_with_room(pages=256, host=600, ahead=4)
    place = rig.place()
    note_load(place, 12)
    for _ in range(6):
        note_load(place, 1)
    assert place.recent_load < 12
    for _ in range(12):
        note_load(place, 0)
    assert place.recent_load == 0


def test_it_is_made_in_one_go_once_half_is_used_and_in_short_turns() -> None:
    rig = rig_with_room(pages=64, ahead=32)
    a = rig.lease()
    rig.core.turns = Turns(evicted=4)
    served(rig, a, "".join(map(chr, range(100, 164))))
    assert rig.free() == [32]
    rig.run(match, a, 1, b"", 0)
    rig.run(allocate, a, 1, 16)
    assert not rig.core.chores
    rig.run(allocate, a, 1, 17)
    turns = 0
    while rig.core.chores:
        free = rig.free()[0]
        tidy(rig.core.chores)
        rig.check()
        assert rig.free()[0] > free
        turns += 1
    assert turns > 1
    assert rig.free() == [32]


@pytest.mark.parametrize(("policy", "host"), [(BACK, 200), (THROUGH, 0)])
def test_what_nobody_else_has_does_not_go_ahead(policy: WritePolicy, host: int) -> None:
    rig = rig_with_room(policy, host)
    a = rig.lease()
    served(rig, a, "abcdefgh", "ijklmnop")
    assert (rig.free(), rig.model.blocks.evicted_blocks) == ([0], 0)


def test_nothing_goes_out_of_its_order() -> None:
    """The oldest block has lost its copy on the host: what is younger stays too."""
    rig = rig_with_room()
    a = rig.lease()
    served(rig, a, "abcdefgh")
    index = rig.model.blocks.index
    rig.model.blocks.drop_copy(rig.host, index.rows[chain(*"abcdefgh")[-KEY_BYTES:]])
    served(rig, a, "ijklmnop")
    assert (rig.free(), rig.model.blocks.evicted_blocks) == ([0], 0)


def test_pools_that_are_small_or_have_windows_keep_none() -> None:
    rig = rig_with_room(pages=7)
    a = rig.lease()
    served(rig, a, "abcdefg")
    assert rig.free() == [0]
    rig = rig_of(windowed(), device=(PAGES, PAGES), host=(200, 200), policy=THROUGH)
    rig.core.limits = replace(rig.core.limits, ahead_pages=AHEAD, ahead_part=1)
    a = rig.lease()
    served(rig, a, "abcdefgh", "ijklmnop")
    assert rig.free() == [0, 0]


def test_a_model_that_goes_ends_it() -> None:
    rig = rig_with_room()
    a = rig.lease()
    serve(rig, a, 1, "abcdefgh")
    serve(rig, a, 2, "ijklmnop")
    rig.settle()
    rig.model.suspect = "broken"
    tidy_all(rig.core)
    assert rig.free() == [0]
    assert not rig.core.busy


def test_it_is_begun_again_once_the_model_that_broke_is_sound() -> None:
    rig = rig_with_room()
    a = rig.lease()
    serve(rig, a, 1, "abcdefgh")
    serve(rig, a, 2, "ijklmnop")
    rig.settle()
    pool = rig.place().pools[0]
    page = rig.place().pages[0][rig.model.blocks.index.rows[chain(*"abcdefgh")[-KEY_BYTES:]]]
    state, pool.states[page] = pool.states[page], PageState.QUARANTINED
    with pytest.raises(IllegalMove):
        tidy(rig.core.chores)
    pool.states[page] = state
    rig.run(match, a, 3, b"", 0)
    rig.run(release, a, 3)
    rest(rig)
    assert rig.free() == [AHEAD]


def test_an_engine_that_does_not_grow_takes_none_of_it_for_its_stock() -> None:
    rig = rig_with_room(pages=64)
    a, b = rig.lease("a"), rig.lease("b")
    served(rig, a, *("".join(chr(100 + number) for number in range(first, first + 16)) for first in (0, 16, 32, 48)))
    rig.core.ledger.leases[a].grown = 0
    assert rig.free() == [AHEAD]
    before = rig.model.blocks.evicted_blocks
    for _ in range(5):
        assert rig.run(refill_stock, b, (16,)) == ()
        rest(rig)
    assert rig.model.blocks.evicted_blocks == before
    rig.run(match, b, 1, b"", 0)
    rig.run(allocate, b, 1, 3)
    [cells] = rig.run(refill_stock, b, (16,))
    assert len(cells.pages) == 3, "as many as it has grown by"


def test_who_can_have_no_pages_is_refused_at_once_whatever_is_still_to_be_looked_for() -> None:
    rig = rig_with_room(host=0)
    a, b = rig.lease("a"), rig.lease("b")
    for lease in (a, b):
        rig.run(match, lease, 1, b"", 0)
    rig.run(allocate, a, 1, PAGES)
    rig.run(refill_stock, a, (1,))
    assert rig.core.chores
    with pytest.raises(PoolExhausted):
        rig.once(allocate, b, 1, 1)


@pytest.mark.parametrize("capacity", [12, 24])
@looped("seed", range(1), range(4))
def test_it_costs_no_hits_but_those_of_a_pool_that_is_so_much_smaller(seed: int, capacity: int) -> None:
    requests = trace(seed, 120)
    rig = rig_with_room(pages=capacity)
    lease = rig.lease()
    hits = 0
    for number, request in enumerate(requests, start=1):
        keys = chain(*request.block_ids)
        hit = rig.run(match, lease, number, keys, 0)
        total = len(request.block_ids)
        while isinstance(rig.once(allocate, lease, number, total), Wait):
            rest(rig)
        rest(rig)
        known = hit.device_blocks + hit.host_blocks
        rig.run(publish, lease, number, known, keys[known * KEY_BYTES :], 0)
        rig.run(release, lease, number)
        rest(rig)
        hits += hit.device_blocks
    assert lru_hits(requests, capacity - AHEAD).hits <= hits <= lru_hits(requests, capacity).hits


# Write-backs that keep failing: room is made without them, and they are tried again now and then.

UNSAVED_PAGES = 4


def allocate_all(rig: Rig, lease: str, number: int, error: str) -> int:
    """Open a sequence on nothing, take the whole pool, landing every store with ``error``; how many there were."""
    stores = 0
    rig.run(match, lease, number, b"", 0)
    while isinstance(rig.once(allocate, lease, number, UNSAVED_PAGES), Wait):
        for ticket in list(rig.mover.transfers):
            assert rig.core.ledger.tickets.running[ticket].direction is Direction.STORE
            rig.land(ticket, error)
            stores += 1
    rig.run(release, lease, number)
    return stores


def test_a_caller_waits_for_a_bounded_number_of_failures_and_then_has_room() -> None:
    rig = rig_of(one_group(), device=(UNSAVED_PAGES,), host=(64,))
    lease = rig.lease()
    serve(rig, lease, 1, "abcd")
    assert allocate_all(rig, lease, 2, "the link broke") == DRAIN_FAILURES
    assert rig.host_keys() == set()
    serve(rig, lease, 3, "efgh")
    assert allocate_all(rig, lease, 4, "the link broke") == 0, "what cannot be saved is dropped at once"


def test_what_works_again_is_saved_again() -> None:
    rig = rig_of(one_group(), device=(UNSAVED_PAGES,), host=(64,))
    lease = rig.lease()
    serve(rig, lease, 1, "abcd")
    allocate_all(rig, lease, 2, "the link broke")
    tries = 0
    while not rig.host_keys():
        tries += 1
        serve(rig, lease, 2 * tries + 1, "abcd")
        allocate_all(rig, lease, 2 * tries + 2, "")
        assert tries <= TRY_AGAIN_EVERY
    serve(rig, lease, 1001, "wxyz")
    assert allocate_all(rig, lease, 1002, "") == 1, "and from then on at once"
    assert len(rig.host_keys()) == 2 * UNSAVED_PAGES


# Tickets whose copies never ended: they fail like others, but the pages to which bytes may still come are not
# granted.

STUCK = PageState.QUARANTINED


def hang(rig: Rig) -> None:
    """The only transfer under way does not end."""
    [ticket] = rig.mover.transfers
    rig.land(ticket, "hangs", may_write=True)
    rig.check()


def test_a_load_keeps_its_device_pages_back() -> None:
    rig = rig_of(one_group(), device=(16,), host=(32,), policy=WritePolicy.WRITE_THROUGH)
    serve(rig, rig.lease("first"), 1, "abcd")
    rig.settle()
    pinning.evict(rig.core, 1, "device", 0)
    a = rig.lease()
    rig.run(match, a, 1, chain(*"abcde"), 0)
    written = rig.run(allocate, a, 1, 5).tables[0].pages[:4]
    hang(rig)
    with pytest.raises(LoadFailed, match="hangs"):
        rig.run(publish, a, 1, 4, b"", 1)
    rig.run(release, a, 1)
    pool = rig.place().pools[0]
    assert rig.free() == [12]
    assert sorted(pool.stuck) == sorted(written)
    assert len(rig.host_keys()) == 4, "it is read there at most"
    rig.run(match, a, 2, chain(*"abcde"), 0)
    again = rig.run(allocate, a, 2, 5).tables[0].pages
    assert not set(again) & set(written)
    rig.settle()
    assert rig.run(publish, a, 2, 4, b"", 1).sealed_blocks == 5
    rig.check()


def test_a_backup_keeps_its_host_pages_back() -> None:
    rig = rig_of(one_group(), device=(16,), host=(32,), policy=WritePolicy.WRITE_THROUGH)
    serve(rig, rig.lease(), 1, "abcd")
    hang(rig)
    pool = rig.host.pools[0]
    assert (pool.counts[STUCK], pool.counts[PageState.FREE]) == (4, 28)
    assert len(rig.device_keys()) == 4
    assert not rig.host_keys()


def test_an_eviction_that_writes_back_keeps_its_host_pages_back() -> None:
    rig = rig_of(one_group(), device=(4,), host=(32,), policy=WritePolicy.WRITE_BACK)
    a = rig.lease()
    serve(rig, a, 1, "abcd")
    rig.run(match, a, 2, b"", 0)
    assert isinstance(rig.once(allocate, a, 2, 4), Wait)
    hang(rig)
    assert rig.host.pools[0].counts[STUCK] == 4
    assert len(rig.device_keys()) == 4


def private(rig: Rig) -> str:
    """A lease with a sequence of four pages of its own."""
    a = rig.lease()
    rig.run(match, a, 1, b"", 0)
    rig.run(allocate, a, 1, 4)
    return a


@pytest.mark.parametrize("is_open", [True, False])
def test_a_swap_out_keeps_its_host_pages_back(is_open: bool) -> None:
    rig = rig_of(one_group(), device=(8,), host=(8,))
    a = private(rig)
    rig.run(swap_out, a, 1)
    if not is_open:
        rig.run(release, a, 1)
    hang(rig)
    assert rig.host.pools[0].counts[STUCK] == 4
    assert rig.free() == [4 if is_open else 8]
    if is_open:
        rig.run(swap_out, a, 1)
        rig.settle()
        assert rig.host.pools[0].counts[PageState.PRIVATE] == 4
        assert rig.free() == [8]
    rig.check()


@pytest.mark.parametrize("is_open", [True, False])
def test_a_swap_in_keeps_its_device_pages_back(is_open: bool) -> None:
    rig = rig_of(one_group(), device=(8,), host=(8,))
    a = private(rig)
    rig.run(swap_out, a, 1)
    rig.settle()
    rig.run(swap_in, a, 1)
    if not is_open:
        rig.run(release, a, 1)
    hang(rig)
    pool = rig.place().pools[0]
    assert (pool.counts[STUCK], pool.counts[PageState.FREE]) == (4, 4)
    assert rig.host.pools[0].counts[PageState.PRIVATE] == (4 if is_open else 0)
    if is_open:
        rig.run(swap_in, a, 1)
        rig.settle()
        rig.run(release, a, 1)
    assert rig.free() == [4]
    rig.check()
