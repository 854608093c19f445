"""A few device pages are kept free: of what goes next, while the host has it, and at no cost but those pages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cachesvc.flows.allocate import allocate, refill_stock
from cachesvc.flows.core import Turns, tidy, tidy_all
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import release
from cachesvc.flows.transfers import note_load
from cachesvc.model.answers import Allocated, Wait
from cachesvc.model.errors import IllegalMove, PoolExhausted
from cachesvc.model.words import KEY_BYTES, PageState, WritePolicy
from tests.long_cases import looped
from tests.oracle import lru_hits
from tests.unit.flows.transfer.test_flows_evict import trace
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, rig_of, serve, windowed

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
