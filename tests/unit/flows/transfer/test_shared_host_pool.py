"""A host pool that groups share: blocks before windows and states, states with their blocks or after them."""

from __future__ import annotations

import random
from contextlib import suppress
from functools import partial

import pytest

from cachesvc.flows.allocate import allocate, refill_stock, swap_in, swap_out
from cachesvc.flows.core import tidy_all
from cachesvc.flows.loads import back_up, back_up_copies
from cachesvc.flows.match import match
from cachesvc.flows.publish import Publishing, publish
from cachesvc.flows.recycle import recycle, release
from cachesvc.flows.transfers import carry_out, store_pairs, submit
from cachesvc.ledger.planner import Evictor
from cachesvc.ledger.tier_copies import NO_ROW
from cachesvc.model.answers import GroupCells
from cachesvc.model.errors import PoolExhausted
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.words import ABSENT, KEY_BYTES, NO_PAGE, READY, Direction, Urgency, WritePolicy
from cachesvc.policy.eviction import WriteRule
from tests.conservation import audit
from tests.long_cases import looped
from tests.unit.rigs.ledger_rig import BLOCK_TOKENS, Rig, chain, prefill, rig_of, windowed
from tests.unit.rigs.ledger_rig import serve as plain_serve
from tests.unit.rigs.shared_rig import FULL, STATE, WINDOW, Ends, begin, compute, copies, hit, sequence_of, serve


def test_blocks_are_copied_to_the_host_before_windows_and_states_take_its_pages() -> None:
    ends = begin(40, host=7, policy=WritePolicy.WRITE_THROUGH)
    compute(ends, 1, "abcd", states=(1, 3))
    ends.rig.settle()
    on_host = [sum(state == READY for state in states) for states in ends.rig.host.states]
    assert (on_host[FULL], sum(on_host)) == (4, 7)


def test_a_state_goes_to_the_host_with_its_block_or_after_it() -> None:
    ends = begin(40, host=40, policy=WritePolicy.WRITE_THROUGH)
    rig, lease = ends
    sequence = compute(ends, 1, "abcd", states=(1,))
    assert len(rig.mover.transfers) == 1, "one transfer takes block and state"
    rig.run(partial(allocate, positions={STATE: [4, 5]}), lease, 1, 6)
    late, later = sequence.tables[STATE][4:6]
    rig.run(publish, lease, 1, 4, b"", 0, None, (GroupCells(STATE, 3, (late,)),))
    row = sequence.anchor
    assert rig.host.states[STATE][row] == ABSENT
    rig.settle()
    tidy_all(rig.core)
    rig.settle()
    assert rig.host.states[STATE][row] == READY
    rig.run(publish, lease, 1, 4, b"", 0, None, (GroupCells(STATE, 2, (later,)),))
    rig.settle()
    assert sum(state == READY for state in rig.host.states[STATE]) == 3
    rig.run(release, lease, 1)


def test_copies_on_the_host_that_no_hit_has_used_go_before_its_blocks() -> None:
    ends = begin(60, host=14, policy=WritePolicy.WRITE_THROUGH)
    for number, prompt in enumerate(("abcd", "wxyz"), start=1):
        serve(ends, number, prompt, states=(3,))
        ends.rig.settle()
    assert sum(state == READY for state in ends.rig.host.states[FULL]) == 8


def test_host_hits_bring_the_window_and_the_state_and_nothing_else() -> None:
    ends = begin(14, host=60)
    serve(ends, 1, "abcdef", states=(1, 5))
    serve(ends, 2, "uvwxyz")
    rig, lease = ends
    keys = chain(*"abcdef")
    found = rig.run(match, lease, 3, keys, 0)
    assert found.device_blocks + found.host_blocks == 6
    rig.run(allocate, lease, 3, 6)
    loaded = {pairs.group: len(pairs.device_pages) for pairs in rig.mover.all[-1].pages}
    assert loaded[FULL] == found.host_blocks
    assert loaded.get(WINDOW, 0) <= 2
    assert loaded.get(STATE, 0) <= 1
    rig.settle()
    assert sequence_of(ends, 3).tables[STATE][5] != NO_PAGE
    rig.run(release, lease, 3)


def test_states_of_several_groups_that_follow_share_what_is_free_on_the_host() -> None:
    names = ("full", "one", "other")
    planes = tuple(Plane("k", layer, name, (8,), "uint8") for layer, name in enumerate(names))
    groups = tuple(PlaneGroup(name, pool="kv", is_state=name != "full") for name in names)
    layout = Layout(BLOCK_TOKENS, 1, groups, planes)
    rig = rig_of(layout, device=(40,) * 3, host=(5,) * 3, policy=WritePolicy.WRITE_THROUGH)
    lease = rig.lease()
    rig.run(match, lease, 1, chain(*"abcd"), 0)
    rig.run(partial(allocate, positions={1: [3], 2: [3]}), lease, 1, 4)
    rig.run(publish, lease, 1, 0, b"", 4)
    rig.settle()
    tables = rig.core.ledger.leases[lease].sequences[1].tables
    cells = tuple(GroupCells(group, 3, (tables[group][3],)) for group in (1, 2))
    rig.run(publish, lease, 1, 4, b"", 0, None, cells)
    rig.settle()
    assert [sum(state == READY for state in states) for states in rig.host.states] == [4, 1, 0]


def test_a_state_of_a_block_that_leaves_the_device_is_not_copied_from_there() -> None:
    ends = begin(8, host=40)
    rig, lease = ends
    keys = chain(*"ab")
    rig.run(match, lease, 1, keys, 0)
    rig.run(partial(allocate, positions={WINDOW: [], STATE: [0]}), lease, 1, 2)
    rig.run(publish, lease, 1, 0, b"", 2)
    replica, index = rig.model.any_replica(0), rig.model.blocks.index
    row = index.rows[keys[:KEY_BYTES]]
    back_up(rig.core, rig.model, replica, [row])
    rig.settle()
    (late,) = (page for page in sequence_of(ends, 1).tables[STATE] if page != NO_PAGE)
    rig.run(publish, lease, 1, 2, b"", 0, None, (GroupCells(STATE, 0, (late,)),))
    rig.run(release, lease, 1)
    rig.settle()
    rig.model.blocks.drop_window(rig.host, STATE, row)
    plan, _ = rig.model.evictor.plan_device(rig.place(), 2, to_host=True)
    assert [drain.copied for drain in plan.drains] == [True, False]
    ticket = rig.core.ledger.tickets.open(rig.model.id, replica.id, Direction.STORE, Urgency.AWAITED)
    ticket.drains = plan.drains
    coming = carry_out(rig.core, rig.model, plan, ticket.id)
    submit(rig.core, rig.model, ticket, store_pairs(rig.place(), coming), layered=False)
    back_up_copies(rig.core, rig.model, replica, [(STATE, row)])
    assert list(rig.mover.transfers) == [ticket.id], "its page is freed with the block, and may be another's by then"
    rig.settle()
    assert rig.free() == [8] * 3


# -- parts of a prompt that come, age and go together ------------------------------------------------------------------


def on_host(ends: Ends, group: int, prompt: str) -> list[int]:
    """Positions of a prompt of which the host has a group's copy."""
    keys, index = chain(*prompt), ends.rig.model.blocks.index
    rows = [index.rows.get(keys[at : at + KEY_BYTES], NO_ROW) for at in range(0, len(keys), KEY_BYTES)]
    return [at for at, row in enumerate(rows) if row != NO_ROW and ends.rig.host.states[group][row] == READY]


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
def test_a_full_host_takes_new_prompts_with_their_ends_and_lets_old_ones_go_whole(policy: WritePolicy) -> None:
    ends = begin(14, host=21, policy=policy)
    prompts = ["abcd", "efgh", "ijkl", "mnop", "qrst"]
    for number, prompt in enumerate(prompts, start=1):
        serve(ends, number, prompt, states=(3,))
        ends.rig.settle()
    served = [hit(ends, 10 + number, prompt)[:2] for number, prompt in enumerate(prompts)]
    assert [sum(each) for each in served[-3:]] == [4, 4, 4]
    for prompt in prompts:
        full, state = on_host(ends, FULL, prompt), on_host(ends, STATE, prompt)
        is_elsewhere = policy is WritePolicy.WRITE_BACK  # the device has what it has not drained
        assert not state or is_elsewhere or full == [0, 1, 2, 3], "an end without its blocks is of no use"
    ends.rig.check()


def test_blocks_of_a_running_prompt_wait_on_the_host_for_their_state() -> None:
    """They are no worse than older prompts, though no prompt can go on behind them yet."""
    ends = begin(80, host=14, policy=WritePolicy.WRITE_THROUGH)
    rig, lease = ends
    for number, prompt in enumerate(("abcd", "efgh"), start=1):
        serve(ends, number, prompt, states=(3,))
        rig.settle()
    keys = chain(*"mnop")
    rig.run(match, lease, 3, keys, 0)
    rig.run(partial(allocate, positions={STATE: []}), lease, 3, 2)
    rig.run(publish, lease, 3, 0, keys[: 2 * KEY_BYTES], 2)
    rig.settle()
    serve(ends, 4, "wx", states=(1,))
    rig.settle()
    assert on_host(ends, FULL, "mnop") == [0, 1]
    rig.run(partial(allocate, positions={STATE: [3]}), lease, 3, 4)
    cells = (GroupCells(STATE, 3, (sequence_of(ends, 3).tables[STATE][3],)),)
    rig.run(publish, lease, 3, 2, keys[2 * KEY_BYTES :], 2, Publishing(), cells)
    rig.run(release, lease, 3)
    rig.settle()
    assert on_host(ends, FULL, "mnop") == [0, 1, 2, 3]
    assert on_host(ends, STATE, "mnop") == [3]
    assert on_host(ends, FULL, "abcd") == [], "the oldest has gone"
    rig.check()


def test_a_copy_that_a_hit_on_the_device_looks_back_to_follows_its_block_to_the_host() -> None:
    ends = begin(60, host=12, policy=WritePolicy.WRITE_THROUGH)
    compute(ends, 1, "abcd", states=(1, 3))
    rig, lease = ends
    rig.settle()
    blocks = rig.model.blocks
    row = blocks.index.rows[chain(*"ab")[-KEY_BYTES:]]
    rig.run(release, lease, 1)
    if rig.host.states[STATE][row] == READY:
        blocks.drop_window(rig.host, STATE, row)
    rig.run(match, lease, 2, chain(*"abxy"), 0)
    rig.settle()
    assert rig.host.states[STATE][row] == READY
    rig.run(release, lease, 2)
    rig.settle()
    rig.check()


@pytest.mark.parametrize("goes_on", [False, True])
def test_an_end_follows_blocks_that_the_host_had_without_it(goes_on: bool) -> None:
    ends = begin(60, host=40, policy=WritePolicy.WRITE_THROUGH)
    rig = ends.rig
    serve(ends, 1, "abcd")
    rig.settle()
    assert on_host(ends, FULL, "abcd") == [0, 1, 2, 3]
    assert on_host(ends, STATE, "abcd") == []
    rig.core.writing = WriteRule(WritePolicy.WRITE_BACK)
    serve(ends, 2, "abcd", states=(3,), goes_on=goes_on)
    rig.settle()
    assert on_host(ends, STATE, "abcd") == [3]
    rig.check()


def test_room_for_a_late_state_costs_no_block_that_it_belongs_to() -> None:
    ends = begin(40, host=4, policy=WritePolicy.WRITE_THROUGH)
    rig, lease = ends
    sequence = compute(ends, 1, "abcd")
    rig.settle()
    before = on_host(ends, FULL, "abcd")
    rig.run(partial(allocate, positions={STATE: [4]}), lease, 1, 5)
    rig.run(publish, lease, 1, 4, b"", 0, None, (GroupCells(STATE, 3, (sequence.tables[STATE][4],)),))
    rig.settle()
    assert on_host(ends, FULL, "abcd") == before
    rig.run(release, lease, 1)


def test_windows_with_a_host_pool_of_their_own_come_with_new_blocks() -> None:
    rig = rig_of(windowed(8), device=(32, 32), host=(40, 4), policy=WritePolicy.WRITE_THROUGH)
    ends = Ends(rig, rig.lease())
    for number, prompt in enumerate(("abcd", "efgh", "ijkl", "mnop"), start=1):
        plain_serve(rig, ends.lease, number, prompt)
        rig.settle()
    assert on_host(ends, WINDOW, "mnop")[-2:] == [2, 3]
    assert [on_host(ends, FULL, prompt) for prompt in ("abcd", "mnop")] == [[0, 1, 2, 3]] * 2
    rig.check()


def test_no_end_goes_for_pages_that_a_running_eviction_frees() -> None:
    """A stock asks again and again while write-backs run."""
    ends = begin(15, host=30)
    rig, lease = ends
    for number, prompt in enumerate(("ab", "cd", "ef"), start=1):
        serve(ends, number, prompt, states=(1,))
    before = copies(ends, STATE)
    for _ in range(3):
        rig.run(refill_stock, lease, (2, 1, 1), 0, 2)
    assert rig.mover.transfers, "a prompt is on its way to the host"
    assert copies(ends, STATE) == before
    rig.settle()
    assert [sum(hit(ends, 10, prompt)[:2]) for prompt in ("ab", "cd", "ef")] == [2, 2, 2]
    rig.check()


# Room on the host: whole blocks for full groups, windowed copies by themselves, and nothing that a hit relies on.


def backed_up(*prompts: str, device: tuple[int, int], host: tuple[int, int], window_tokens: int = 8) -> tuple[Rig, str]:
    """Prompts that were served and stored."""
    rig = rig_of(windowed(window_tokens), device=device, host=host, policy=WritePolicy.WRITE_THROUGH)
    lease = rig.lease()
    for number, prompt in enumerate(prompts, start=1):
        plain_serve(rig, lease, number, prompt)
        rig.settle()
    return rig, lease


def kept_on_host(rig: Rig, *prompt: object) -> list[tuple[bool, bool]]:
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
    assert kept_on_host(rig, *"abcd") == [(True, False), (True, False), (True, True), (True, True)]
    assert kept_on_host(rig, *"wxyz") == [(True, True)] * 4
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
    assert [window for _, window in kept_on_host(rig, *"abcd")] == [False, False, True, True]
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
    assert [window for _, window in kept_on_host(rig, *"abc")] == [False, True, False]
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
