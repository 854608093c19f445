"""Room on the host: whole blocks for full groups, windowed copies by themselves, and nothing that a hit relies on."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from cachesvc.flows.allocate import allocate, swap_in, swap_out
from cachesvc.flows.match import match
from cachesvc.flows.recycle import recycle, release
from cachesvc.ledger.planner import Evictor
from cachesvc.model.errors import PoolExhausted
from cachesvc.model.words import ABSENT, KEY_BYTES, NO_PAGE, WritePolicy
from tests.conservation import audit
from tests.long_cases import looped
from tests.unit.rigs.ledger_rig import Rig, chain, prefill, rig_of, serve, windowed


def backed_up(*prompts: str, device: tuple[int, int], host: tuple[int, int], window_tokens: int = 8) -> tuple[Rig, str]:
    """Prompts that were served and stored."""
    rig = rig_of(windowed(window_tokens), device=device, host=host, policy=WritePolicy.WRITE_THROUGH)
    lease = rig.lease()
    for number, prompt in enumerate(prompts, start=1):
        serve(rig, lease, number, prompt)
        rig.settle()
    return rig, lease


def on_host(rig: Rig, *prompt: object) -> list[tuple[bool, bool]]:
    """Presence on the host of each block's full page, and of its windowed one."""
    keys, index = chain(*prompt), rig.model.blocks.index
    rows = [index.rows[keys[at : at + KEY_BYTES]] for at in range(0, len(keys), KEY_BYTES)]
    full, window = rig.host.states
    return [(full[row] != ABSENT, window[row] != ABSENT) for row in rows]


def take_and_keep(rig: Rig, lease: str, sequence: int, pages: int) -> None:
    """Private pages that push as many others out."""
    rig.run(match, lease, sequence, b"", 0)
    rig.run(allocate, lease, sequence, pages)


def test_where_windowed_pages_are_short_they_go_alone() -> None:
    """Found by measuring: whole blocks went, the oldest first, until ones with windowed pages had come."""
    rig, a = backed_up("abcd", "wxyz", device=(32, 32), host=(32, 8))
    take_and_keep(rig, a, 3, 4)
    rig.run(recycle, a, 3, 16, ())  # two windowed pages are left of four
    rig.run(swap_out, a, 3)
    rig.settle()
    assert on_host(rig, *"abcd") == [(True, False), (True, False), (True, True), (True, True)]
    assert on_host(rig, *"wxyz") == [(True, True)] * 4
    assert rig.core.counters.get("host_evictions", 0) == 0


def test_a_swap_that_cannot_have_its_windowed_pages_changes_nothing() -> None:
    rig, a = backed_up("ab", device=(32, 32), host=(32, 3))
    take_and_keep(rig, a, 3, 4)
    before = [bytes(states) for states in rig.host.states]
    with pytest.raises(PoolExhausted, match=r"window: wanted 4 pages, free 1, evictable 2"):
        rig.run(swap_out, a, 3)
    assert [bytes(states) for states in rig.host.states] == before


@looped("seed", range(12), range(60))
def test_a_plan_meets_the_demand_or_names_a_group_and_all_that_could_go(seed: int) -> None:
    rng = random.Random(seed)
    host = (rng.randint(4, 24), rng.randint(1, 12))
    rig, a = backed_up(
        *("".join(rng.choice("ab") for _ in range(rng.randint(1, 6))) for _ in range(8)), device=(64, 64), host=host
    )
    prefill(rig, a, 100, "abab")
    with suppress(PoolExhausted):
        rig.run(swap_out, a, 100)
    blocks, evictor = rig.model.blocks, Evictor(rig.model.blocks)
    wanted = [rng.randint(0, count + 2) for count in host]
    before = [bytes(states) for states in rig.host.states]
    orders = [list(order) for order in blocks.index.orders]
    plan, short = evictor.plan_host_room(wanted)
    assert [bytes(states) for states in rig.host.states] == before
    assert [list(order) for order in blocks.index.orders] == orders
    if short is None:
        evictor.carry_out(plan)
        assert all(pool.free >= count for pool, count in zip(rig.host.pools, wanted, strict=True))
    else:
        assert rig.host.pools[short].free + plan.freed(short) < wanted[short]
        everything, _ = evictor.plan_host(1000)
        most = len(everything.drops) if short == 0 else len(rig.host.window_leaves[1])
        assert plan.freed(short) == most
    blocks.dropped.clear()
    assert audit(rig.core.ledger).problems == []


# -- what a hit relies on until its loads begin ----------------------------------------------------------------------


def pages_of_all_loads(rig: Rig) -> list[int]:
    pairs = [pair for transfer in rig.mover.all for pair in transfer.pages]
    return [page for pair in pairs for page in (*pair.device_pages, *pair.host_pages)]


def test_windowed_copies_that_a_hit_will_load_stay_on_the_host() -> None:
    rig, a = backed_up("abcd", device=(4, 4), host=(16, 4))
    take_and_keep(rig, a, 2, 4)
    rig.run(release, a, 2)
    assert rig.device_keys() == set()
    assert rig.run(match, a, 3, chain(*"abcd"), 0).host_blocks == 4
    take_and_keep(rig, a, 4, 3)
    with pytest.raises(PoolExhausted, match="window: wanted 3 pages, free 0, evictable 2"):
        rig.run(swap_out, a, 4)
    rig.run(release, a, 4)
    take_and_keep(rig, a, 5, 2)
    rig.run(swap_out, a, 5)
    rig.settle()
    assert [window for _, window in on_host(rig, *"abcd")] == [False, False, True, True]
    answer = rig.run(allocate, a, 3, 4)
    rig.land(answer.tickets[0].id)
    assert NO_PAGE not in pages_of_all_loads(rig)
    rig.run(release, a, 3)
    rig.run(swap_in, a, 5)


def half_and_half() -> tuple[Rig, str]:
    """``abc`` with full pages everywhere; of its last window, the host alone has b's page and the device alone c's."""
    rig, a = backed_up("abc", device=(16, 3), host=(8, 2))
    take_and_keep(rig, a, 2, 2)
    index = rig.model.blocks.index
    rig.model.blocks.drop_window(rig.host, 1, index.rows[chain(*"abc")[-KEY_BYTES:]])
    device = [bool(rig.place().states[1][row]) for row in index.path(index.rows[chain(*"abc")[-KEY_BYTES:]])]
    assert device == [False, False, True]
    assert [window for _, window in on_host(rig, *"abc")] == [False, True, False]
    return rig, a


def test_a_windowed_copy_behind_what_is_in_place_stays_until_the_loads_begin() -> None:
    """Found by reading: nothing held it, so Allocate had the mover copy from page -1 of the host."""
    rig, a = half_and_half()
    found = rig.run(match, a, 3, chain(*"abc"), 0)
    assert (found.device_blocks, found.host_blocks) == (1, 2)
    rig.run(match, a, 4, b"", 0)
    with pytest.raises(PoolExhausted, match="window: wanted 1 pages, free 0, evictable 0"):
        rig.run(allocate, a, 4, 1)
    rig.run(release, a, 2)
    answer = rig.run(allocate, a, 3, 3)
    assert NO_PAGE not in pages_of_all_loads(rig)
    rig.land(answer.tickets[0].id)
    assert NO_PAGE not in rig.core.ledger.leases[a].sequences[3].tables[1][1:]


def test_a_hit_that_is_given_up_holds_nothing() -> None:
    rig, a = half_and_half()
    rig.run(match, a, 3, chain(*"abc"), 0)
    rig.run(release, a, 3)
    assert not any(rig.place().pins)
    assert not any(rig.host.window_pins[1])
    assert not any(rig.place().window_pins[1])
