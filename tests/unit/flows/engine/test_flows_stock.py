"""The stock: it starves no engine on a full cache, evicts nothing for an engine that does not grow, and costs next to
nothing where nothing can be had."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cachesvc.flows import pinning
from cachesvc.flows.allocate import allocate, extend, refill_stock, swap_in, swap_out
from cachesvc.flows.core import Limits
from cachesvc.flows.loads import Sharing
from cachesvc.flows.match import match, prefetch
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import recycle, release
from cachesvc.ledger.pins import Pin
from cachesvc.model.answers import GroupCells, Matched
from cachesvc.model.errors import LimitExceeded, LoadFailed, PoolExhausted
from cachesvc.model.layout import Layout
from cachesvc.model.words import ABSENT, KEY_BYTES, NO_PAGE, READY, PageState, WritePolicy
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, prefill, rig_of, serve, windowed
from tests.unit.rigs.peers_rig import asking, hit, shared
from tests.work import steps_of


def full_of_cache(pages: int, *, host: int = 0, layout: Layout | None = None) -> tuple[Rig, str]:
    """A pool full of unpinned sealed blocks: key "0" is the coldest."""
    layout = layout or one_group()
    groups = len(layout.groups)
    rig = rig_of(layout, device=(pages,) * groups, host=(host,) * groups)
    a = rig.lease()
    with rig.unaudited():
        for number in range(pages):
            serve(rig, a, number + 1, [str(number)])
    rig.core.ledger.leases[a].grown = 0  # what it grew by while there was room
    assert rig.free()[0] == 0
    return rig, a


def refill(rig: Rig, lease: str, target: int) -> list[GroupCells]:
    return list(rig.run(refill_stock, lease, (target,) * len(rig.place().pools)))


def stock(rig: Rig, lease: str) -> list[int]:
    return [len(pages) for pages in rig.core.ledger.leases[lease].stock]


def grow(rig: Rig, lease: str, sequence: int) -> bool:
    """One block more, as an engine's step does it: from the stock, or else by Allocate; True from the stock."""
    record = rig.core.ledger.leases[lease]
    pools = rig.place().pools
    if all(record.stock):
        taken = [min(pages) for pages in record.stock]
        cells = [GroupCells(g, 0, (page,), (pools[g].generations[page],)) for g, page in enumerate(taken)]
        rig.run(extend, lease, sequence, tuple(cells))
        return True
    rig.run(allocate, lease, sequence, record.sequences[sequence].blocks + 1)
    return False


def test_an_engine_that_does_not_grow_evicts_nothing() -> None:
    """Every step of every idle engine threw cached blocks away, to have pages that it never used."""
    rig, a = full_of_cache(8)
    rig.run(match, a, 99, chain("7"), 0)
    for _ in range(5):
        assert refill(rig, a, 4) == []
    assert len(rig.device_keys()) == 8
    assert rig.core.counters["stock_short"] == 5


def test_an_engine_that_grows_on_a_full_cache_gets_its_stock_from_what_is_coldest() -> None:
    rig, a = full_of_cache(32)
    sequences = (101, 102, 103)
    for sequence in sequences:
        rig.run(match, a, sequence, b"", 0)
    steps = [[grow(rig, a, sequence) for sequence in sequences] for _ in range(6) if [refill(rig, a, 8)]]
    assert steps[0] == [False] * 3, "nothing was there for an engine that had not grown yet"
    assert steps[1:] == [[True] * 3] * 5, "and from then on growth needs no round trip"
    refill(rig, a, 8)
    gone = 32 - len(rig.device_keys())
    assert gone == 6 * 3 + 3, "what it has grown by, and a step's worth in stock"
    assert rig.device_keys() == {chain(str(number)) for number in range(gone, 32)}, "the coldest went"


def test_what_an_engine_is_about_to_take_is_there_before_it_has_grown() -> None:
    rig, a = full_of_cache(64)
    rig.run(match, a, 99, b"", 0)
    [cells] = rig.run(refill_stock, a, (3,), 0, 2)
    assert (len(cells.pages), len(rig.device_keys())) == (2, 62), "what it takes next, and no more"
    assert not rig.run(refill_stock, a, (2,), 0, 2)
    assert len(rig.device_keys()) == 62


def test_what_engines_are_about_to_take_is_a_16th_of_the_pool_together() -> None:
    """Each engine had its own part of the pool in stock: of eight, nothing was left for cached blocks."""
    rig, a = full_of_cache(256)
    leases = [a, *(rig.lease() for _ in range(7))]
    for lease in leases * 3:
        rig.run(refill_stock, lease, (32,), 0, 32)
        held = [sum(stock(rig, each)) for each in leases]
        assert sum(held) <= 16 + len(leases), "one page at least is granted to each"
    assert all(sum(stock(rig, each)) for each in leases), "one that comes later has its share too"


def test_what_growth_used_is_replaced_once() -> None:
    rig, a = full_of_cache(16)
    rig.run(match, a, 99, b"", 0)
    grow(rig, a, 99)
    for _ in range(4):
        refill(rig, a, 8)
    assert (stock(rig, a), len(rig.device_keys())) == ([1], 14)
    grow(rig, a, 99)
    refill(rig, a, 8)
    assert (stock(rig, a), len(rig.device_keys())) == ([1], 13)


def test_free_pages_fill_the_stock_whether_it_grows_or_not() -> None:
    rig = rig_of(one_group(), device=(8,))
    a = rig.lease()
    [cells] = refill(rig, a, 6)
    assert (len(cells.pages), len(cells.generations), rig.free()) == (6, 6, [2])
    assert refill(rig, a, 6) == []
    assert "stock_short" not in rig.core.counters


def test_growth_while_there_was_room_is_no_reason_to_evict_later() -> None:
    rig = rig_of(one_group(), device=(8,))
    a = rig.lease()
    rig.run(match, a, 1, chain(*"abcd"), 0)
    rig.run(allocate, a, 1, 4)
    refill(rig, a, 1)
    rig.run(publish, a, 1, 0, b"", 4)
    rig.run(release, a, 1)
    serve(rig, rig.lease("b"), 1, "xyz")
    assert rig.free() == [0]
    refill(rig, a, 3)
    assert (stock(rig, a), len(rig.device_keys())) == ([1], 7)


def test_what_is_saved_first_comes_to_the_stock_once_it_is_saved() -> None:
    rig, a = full_of_cache(8, host=16)
    rig.run(match, a, 99, b"", 0)
    grow(rig, a, 99)
    rig.settle()
    before = len(rig.mover.all)
    for _ in range(3):
        assert refill(rig, a, 4) == []
    assert len(rig.mover.all) == before + 1, "one write-back, however often it asks"
    rig.settle()
    assert refill(rig, a, 4) != []
    assert stock(rig, a) == [1]


def test_every_group_of_a_windowed_model_gets_its_pages() -> None:
    rig, a = full_of_cache(16, layout=windowed(window_tokens=8))
    rig.run(match, a, 99, b"", 0)
    for step in range(8):
        assert grow(rig, a, 99) == (step > 0)
        refill(rig, a, 4)
    assert stock(rig, a) == [1, 1]
    rig.run(recycle, a, 99, 8 * 4, ())
    refill(rig, a, 4)
    assert stock(rig, a)[1] == 4, "its own window gave them back"


def pinned(pages: int, chains: int) -> tuple[Rig, str]:
    """A pool that is full of blocks in use."""
    rig = rig_of(one_group(), device=(pages,))
    check, rig.check = rig.check, lambda: None  # type: ignore[method-assign]
    a = rig.lease()
    each = pages // chains
    for number in range(chains):
        keys = chain(*((number, at) for at in range(each)))
        rig.run(match, a, number + 1, keys, 0)
        rig.run(allocate, a, number + 1, each)
        rig.run(publish, a, number + 1, 0, keys[: each * KEY_BYTES], 0)
    rig.check = check  # type: ignore[method-assign]
    assert rig.free() == [0]
    return rig, a


@pytest.mark.parametrize("grown", [0, 8])
def test_where_all_is_in_use_a_refill_is_no_more_work_in_a_larger_pool(grown: int) -> None:
    """It walked the pool for the numbers of a refusal that was never shown: 44 ms a step with 96,000 pages in use."""

    def work(pages: int) -> int:
        rig, a = pinned(pages, 4)
        lease = rig.core.ledger.leases[a]
        lease.grown = grown
        rig.check = lambda: None  # type: ignore[method-assign]
        return steps_of(lambda: refill(rig, a, 8))

    assert work(2048) <= work(64) + 16


def test_where_little_can_go_a_refill_is_no_more_work_in_a_larger_pool() -> None:
    """Blocks whose children are on the host alone cannot be dropped; a refill does not pass all of them over."""

    def work(chains: int) -> int:
        rig = rig_of(one_group(), device=(2 * chains,), host=(chains,))
        check, rig.check = rig.check, lambda: None  # type: ignore[method-assign]
        a = rig.lease()
        for number in range(chains):
            serve(rig, a, number + 1, [number, "child"])
        for number in range(chains):  # so that the children are colder
            serve(rig, a, number + 1, [number])
        rig.run(match, a, 9001, b"", 0)
        rig.run(allocate, a, 9001, chains)
        rig.settle()
        pins = [Pin(rig.model.blocks, rig.host, row) for row in list(rig.model.blocks.index.rows.values())[1::2]]
        assert (len(rig.host_keys()), len(rig.device_keys()), rig.free()) == (chains, chains, [0])
        rig.core.ledger.leases[a].grown = 8
        count = steps_of(lambda: refill(rig, a, 8))
        for pin in pins:
            pin.let_go()
        check()
        return count

    assert work(400) <= 1.1 * work(100)


def test_a_stock_short_of_pages_holds_none_of_another_lease() -> None:
    rig, a = full_of_cache(6)
    b = rig.lease("b")
    for lease in (a, b):
        rig.run(match, lease, 99, b"", 0)
        grow(rig, lease, 99)
        refill(rig, lease, 4)
    assert (stock(rig, a), stock(rig, b)) == ([1], [1])
    pool = rig.place().pools[0]
    assert (pool.counts[PageState.PRIVATE], pool.counts[PageState.SEALED]) == (4, 2)


# Transfers that cannot begin: flows refuse before they change anything, and no dead ticket is reported as running.


def hosted(prompt: str, *, device: int = 8, policy: WritePolicy = WritePolicy.WRITE_THROUGH) -> tuple[Rig, str]:
    """A rig whose host alone has ``prompt``."""
    rig = rig_of(one_group(), device=(device,), host=(32,), policy=policy)
    a = rig.lease()
    serve(rig, a, 99, prompt)
    rig.settle()
    pinning.evict(rig.core, 1, "device", 0)
    rig.mover.all.clear()
    return rig, a


def state(rig: Rig) -> object:
    pools = [(list(pool.counts), pool.reserved) for pool in (*rig.place().pools, *rig.host.pools)]
    return pools, rig.device_keys(), rig.host_keys(), set(rig.core.ledger.tickets.running), len(rig.mover.all)


def no_slots(rig: Rig) -> None:
    rig.mover.slots = len(rig.mover.transfers)


def no_tickets(rig: Rig) -> None:
    rig.core.limits = Limits(running_tickets=len(rig.core.ledger.tickets.running))


def to_load() -> tuple[Rig, Callable[[], object]]:
    rig, a = hosted("ab")
    rig.run(match, a, 1, chain(*"abc"), 0)
    return rig, lambda: rig.once(allocate, a, 1, 3)


def to_prefetch() -> tuple[Rig, Callable[[], object]]:
    rig, a = hosted("ab")
    return rig, lambda: rig.once(prefetch, a, chain(*"ab"))


def to_go_out() -> tuple[Rig, Callable[[], object]]:
    rig = rig_of(one_group(), device=(8,), host=(8,))
    a = rig.lease()
    prefill(rig, a, 1, "ab")
    return rig, lambda: rig.once(swap_out, a, 1)


def to_come_in() -> tuple[Rig, Callable[[], object]]:
    rig, out = to_go_out()
    out()
    rig.settle()
    pinning.evict(rig.core, 1, "device", 0)
    [lease] = rig.core.ledger.leases
    return rig, lambda: rig.once(swap_in, lease, 1)


@pytest.mark.parametrize("take_away", [no_slots, no_tickets])
@pytest.mark.parametrize("made", [to_load, to_prefetch, to_go_out, to_come_in])
def test_a_flow_that_needs_a_transfer_is_refused_with_nothing_changed(
    made: Callable[[], tuple[Rig, Callable[[], object]]], take_away: Callable[[Rig], None]
) -> None:
    """Told OK, an engine waited on a ticket that ran nowhere and had no words, and took that for a bug of its own."""
    rig, call = made()
    take_away(rig)
    before = state(rig)
    for _ in range(3):
        with pytest.raises(LimitExceeded, match="transfers under way"):
            call()
        assert state(rig) == before
    rig.mover.slots, rig.core.limits = 1 << 20, Limits()
    call()
    assert len(rig.mover.transfers) == 1
    rig.settle()


def test_what_moves_nothing_needs_no_slot() -> None:
    rig, a = hosted("ab", policy=WritePolicy.WRITE_THROUGH)
    no_slots(rig)
    serve(rig, a, 1, "xyz")  # and is not backed up, since no mover can
    assert rig.mover.all == []
    rig.run(match, a, 2, chain(*"xyz"), 0)
    rig.run(allocate, a, 2, 8)
    rig.run(release, a, 2)


def test_without_a_slot_evictions_save_nothing_and_keep_nobody_up() -> None:
    rig = rig_of(one_group(), device=(4,), host=(32,))
    a = rig.lease()
    serve(rig, a, 1, "abcd")
    no_slots(rig)
    rig.run(match, a, 2, b"", 0)
    rig.run(allocate, a, 2, 3)
    assert (rig.mover.all, rig.host_keys(), len(rig.device_keys())) == ([], set(), 1)


def test_a_peer_is_done_without_where_no_transfer_can_begin() -> None:
    rig, _, b = shared("abcd")
    no_slots(rig)
    assert hit(asking(rig, b, 1, "abcd")()) == (0, 0)
    rig.mover.slots = 1 << 20
    rig, _, b = shared("abcd", host=16, near=False)
    no_tickets(rig)
    assert hit(asking(rig, b, 1, "abcd")()) == (0, 0)
    answer = rig.run(match, b, 2, chain(*"abcd"), 0, Sharing())
    assert isinstance(answer, Matched)


def refusing(rig: Rig) -> list[tuple[int, str]]:
    """Make the mover break its word from now on; the errors that callers get."""
    told: list[tuple[int, str]] = []
    rig.core.on_refused = lambda ticket, reason: told.append((ticket, reason))
    rig.mover.refusing = True
    return told


def test_a_load_that_the_mover_refuses_is_told_as_failed_at_once() -> None:
    rig, call = to_load()
    told = refusing(rig)
    answer = call()
    [ticket] = answer.tickets  # type: ignore[attr-defined]
    assert (ticket.state, ticket.reason, ticket.slot) == ("failed", "the mover refuses by order", None)
    assert told == [(ticket.id, "the mover refuses by order")]
    assert rig.core.counters["tickets_failed"] == 1
    assert rig.place().pools[0].counts[PageState.IN_FLIGHT] == 0
    [lease] = rig.core.ledger.leases
    with pytest.raises(LoadFailed, match="refuses by order"):
        rig.run(publish, lease, 1, 2, b"", 0)
    rig.run(release, lease, 1)
    assert rig.free() == [8]


def test_a_prefetch_that_the_mover_refuses_is_told_as_failed_and_holds_nothing() -> None:
    rig, call = to_prefetch()
    refusing(rig)
    answer = call()
    assert [ticket.state for ticket in answer.tickets] == ["failed"]  # type: ignore[attr-defined]
    [lease] = rig.core.ledger.leases.values()
    assert (lease.prefetches, rig.free()) == ({}, [8])


@pytest.mark.parametrize("made", [to_go_out, to_come_in])
def test_a_swap_that_the_mover_refuses_leaves_the_sequence_where_it_was(
    made: Callable[[], tuple[Rig, Callable[[], object]]],
) -> None:
    rig, call = made()
    refusing(rig)
    before = rig.free(), rig.host_keys()
    answer = call()
    assert [ticket.state for ticket in answer.tickets] == ["failed"]  # type: ignore[attr-defined]
    assert (rig.free(), rig.host_keys()) == before
    rig.mover.refusing = False
    call()
    rig.settle()


def test_a_write_back_that_the_mover_refuses_is_tried_again_and_then_done_without() -> None:
    rig = rig_of(one_group(), device=(4,), host=(32,))
    a = rig.lease()
    serve(rig, a, 1, "abcd")
    refusing(rig)
    rig.run(match, a, 2, b"", 0)
    tries = 0
    while not hasattr(rig.once(allocate, a, 2, 4), "tables"):
        tries += 1
    assert tries == 3
    assert rig.host_keys() == set()


def test_a_prompt_that_can_never_fit_is_too_large_also_behind_a_hit_of_its_own() -> None:
    """An engine that queues what is only ``full`` would never go on."""
    rig = rig_of(one_group(), device=(8,), host=(0,))
    a = rig.lease()
    serve(rig, a, 1, "abc")
    rig.run(match, a, 2, chain(*"abcdefghi"), 0)
    with pytest.raises(PoolExhausted, match="too large") as refused:
        rig.once(allocate, a, 2, 9)
    assert (refused.value.wanted, refused.value.own, refused.value.capacity) == (6, 3, 8)
    assert refused.value.can_never_fit
    assert PoolExhausted.from_message(str(refused.value), refused.value.facts()).can_never_fit
    rig.run(allocate, a, 2, 8)
    with pytest.raises(PoolExhausted, match="too large") as refused:
        rig.once(allocate, a, 2, 9)
    assert (refused.value.wanted, refused.value.own) == (1, 8)
    rig.run(match, a, 3, chain(*"xyz"), 0)
    with pytest.raises(PoolExhausted, match="full now") as refused:
        rig.once(allocate, a, 3, 3)
    assert not refused.value.can_never_fit


# Blocks that a sequence needs and has on its device stay there while room is made for the rest of it.


def test_what_stayed_on_the_device_is_not_evicted_to_make_room_for_the_rest() -> None:
    """Block a is the oldest that could go, and the sequence that comes back has a table that begins with it."""
    rig = rig_of(one_group(), device=(5,), host=(16,), policy=WritePolicy.WRITE_THROUGH)
    a, b = rig.lease(), rig.lease("b")
    prefill(rig, a, 1, "ab")
    rig.run(allocate, a, 1, 3)
    rig.settle()
    rig.run(swap_out, a, 1)
    rig.settle()
    pinning.evict(rig.core, 1, "device", 1)
    assert rig.device_keys() == {chain("a")}
    serve(rig, b, 1, "xyz")
    rig.settle()
    assert rig.free() == [1]
    answer = rig.run(swap_in, a, 1)
    assert rig.device_keys() >= {chain("a")}, "younger blocks went instead"
    assert NO_PAGE not in answer.tables[0].pages
    row = rig.model.blocks.index.rows[chain("a")]
    assert answer.tables[0].pages[0] == rig.place().pages[0][row]
    rig.settle()
    rig.run(release, a, 1)


def test_where_only_what_stayed_could_make_room_a_swap_in_is_refused() -> None:
    rig = rig_of(one_group(), device=(4,), host=(16,), policy=WritePolicy.WRITE_THROUGH)
    a, b = rig.lease(), rig.lease("b")
    prefill(rig, a, 1, "ab")
    rig.run(allocate, a, 1, 3)
    rig.settle()
    rig.run(swap_out, a, 1)
    rig.settle()
    pinning.evict(rig.core, 1, "device", 1)
    prefill(rig, b, 1, "xy")  # stays open: a alone could go
    with pytest.raises(PoolExhausted):
        rig.run(swap_in, a, 1)
    assert chain("a") in rig.device_keys()
    rig.run(release, b, 1)
    assert NO_PAGE not in rig.run(swap_in, a, 1).tables[0].pages


def beside_a_window(held: bool) -> Rig:
    """abcd is on the host whole and on the device but for the windows of a, b and c; d's is the oldest that could go.

    With ``held`` the other prompt, xyz, is still in use, so that d's window is the only one that could.
    """
    rig = rig_of(windowed(window_tokens=8), device=(16, 4), host=(16, 16), policy=WritePolicy.WRITE_THROUGH)
    serve(rig, rig.lease("first"), 1, "abcd")
    rig.settle()
    prefill(rig, rig.lease("other"), 1, "xyz")
    rig.settle()
    windows = rig.place().states[1]
    rows = [rig.model.blocks.index.rows[chain(*"abcd"[: i + 1])[-KEY_BYTES:]] for i in range(4)]
    assert [windows[row] for row in rows] == [ABSENT, ABSENT, ABSENT, READY]
    if not held:
        lease = next(lease for lease in rig.core.ledger.leases.values() if lease.engine == "other").id
        rig.run(recycle, lease, 1, 12, ())
        rig.run(release, lease, 1)
    return rig


def test_a_window_in_place_is_not_evicted_to_make_room_for_the_rest_of_it() -> None:
    rig = beside_a_window(held=False)
    a = rig.lease()
    hit = rig.run(match, a, 1, chain(*"abcd"), 0)
    assert (hit.device_blocks, hit.host_blocks) == (2, 2)
    answer = rig.run(allocate, a, 1, 5)
    windows = answer.tables[1]
    assert [page == NO_PAGE for page in windows.pages] == [False] * 3, "c comes, d is there, and a fresh one"
    [transfer] = rig.mover.transfers.values()
    assert [(pair.group, len(pair.device_pages)) for pair in transfer.pages] == [(1, 1)], "c's window alone is copied"
    rig.settle()
    rig.run(release, a, 1)


def test_where_only_a_window_of_the_hit_could_make_room_for_the_rest_of_it_the_call_is_refused() -> None:
    rig = beside_a_window(held=True)
    a = rig.lease()
    rig.run(match, a, 1, chain(*"abcd"), 0)
    with pytest.raises(PoolExhausted):
        rig.run(allocate, a, 1, 4)
    row = rig.model.blocks.index.rows[chain(*"abcd")[-KEY_BYTES:]]
    assert rig.place().states[1][row] == READY, "nothing was evicted"
    rig.run(release, a, 1)


def test_blocks_that_came_since_match_are_not_evicted_to_make_room_for_the_rest() -> None:
    """a and b come to the device after Match for another sequence, which has gone: nothing that could go is older."""
    rig = rig_of(one_group(), device=(5,), host=(16,), policy=WritePolicy.WRITE_THROUGH)
    a, b = rig.lease(), rig.lease("b")
    serve(rig, b, 9, "abcd")
    rig.settle()
    pinning.evict(rig.core, 1, "device", 0)
    assert rig.run(match, a, 1, chain(*"abcd"), 0).host_blocks == 4
    serve(rig, b, 1, "ab")
    serve(rig, b, 2, "xyz")
    rig.settle()
    assert rig.free() == [0]
    answer = rig.run(allocate, a, 1, 4)
    assert NO_PAGE not in answer.tables[0].pages
    assert {chain("a"), chain(*"ab")[KEY_BYTES:]} <= rig.device_keys()
    [transfer] = rig.mover.transfers.values()
    assert len(transfer.pages[0].device_pages) == 2, "c and d alone are copied"
    rig.settle()
    rig.run(release, a, 1)
