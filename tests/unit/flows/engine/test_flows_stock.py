"""The stock: it starves no engine on a full cache, evicts nothing for an engine that does not grow, and costs next to
nothing where nothing can be had."""

from __future__ import annotations

import pytest

from cachesvc.flows.allocate import allocate, extend, refill_stock
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import recycle, release
from cachesvc.ledger.pins import Pin
from cachesvc.model.answers import GroupCells
from cachesvc.model.layout import Layout
from cachesvc.model.words import KEY_BYTES, PageState
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, rig_of, serve, windowed
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
