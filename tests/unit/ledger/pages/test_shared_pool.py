"""Groups that share a pool: one free list, the group of each page, and counts that hold under any order of moves."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest

from cachesvc.ledger.change_log import Journal, Moment
from cachesvc.ledger.page_pool import LEGAL_PAGE_MOVES, MOVED_AT_ONCE, PagePool
from cachesvc.ledger.shared_pool import NO_OWNER, GroupPool, change_group, group_pools
from cachesvc.ledger.tier_copies import Place
from cachesvc.model.errors import IllegalMove, LedgerBroken
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.words import PageState
from tests.long_cases import looped

FREE, PRIVATE, SEALED, IN_FLIGHT, QUARANTINED = PageState


def shared(pages: int = 200, withheld: int = 0, groups: int = 3) -> tuple[GroupPool, ...]:
    made = group_pools("pool", [f"g{number}" for number in range(groups)], pages, withheld)
    made[0].add(withheld, pages - withheld)
    assert all(isinstance(pool, GroupPool) for pool in made)
    return tuple(pool for pool in made if isinstance(pool, GroupPool))


def check(pools: tuple[GroupPool, ...], owned: dict[int, tuple[int, PageState]]) -> None:
    """Compare everything that the pools say with a naive book of ``page -> (group, state)``."""
    assert [problem for pool in pools for problem in pool.problems()] == []
    for number, pool in enumerate(pools):
        mine = [state for group, state in owned.values() if group == number]
        expected = [mine.count(state) for state in PageState]
        expected[FREE] = pool.capacity - len(owned)
        assert pool.own_counts == expected
        assert (pool.free, pool.usable) == (pool.capacity - len(owned), pool.capacity)
        assert [page for page, owner in enumerate(pool.owners) if owner == pool.mark] == sorted(
            page for page, (group, _) in owned.items() if group == number
        )


@looped("seed", range(10), range(30))
def test_pages_have_a_group_from_grant_to_free(seed: int) -> None:
    rng = random.Random(seed)
    pools = shared(withheld=rng.choice((0, 1, 5)))
    owned: dict[int, tuple[int, PageState]] = {}
    for _ in range(60):
        group = rng.randrange(3)
        pool = pools[group]
        most = min(pool.unreserved, rng.choice((1, 3, MOVED_AT_ONCE + 8)))
        if rng.random() < 0.5 and most:
            state = rng.choice((PRIVATE, IN_FLIGHT))
            pages = pool.take(rng.randint(1, most), state)
            assert not owned.keys() & set(pages)
            owned.update(dict.fromkeys(pages, (group, state)))
        source = rng.choice((PRIVATE, SEALED, IN_FLIGHT, QUARANTINED))
        target = rng.choice([after for before, after in LEGAL_PAGE_MOVES if before == source])
        some = [page for page, (each, state) in owned.items() if (each, state) == (group, source)]
        some = rng.sample(some, rng.randint(0, len(some)))
        how = rng.randrange(3)
        if how == 0 and some:
            pool.shift(some[0], source, target)
            some = some[:1]
        elif how == 1 and target != FREE:
            pool.shift_all(some, source, target)
        else:
            pool.move_all(some if rng.random() < 0.5 else array("i", some), target)
        for page in some:
            owned[page] = (group, target)
            if target == FREE:
                del owned[page]
        if rng.random() < 0.3:
            mine = [page for page, held in owned.items() if held == (group, PRIVATE)]
            other = rng.randrange(3)
            change_group(pool, pools[other], mine)
            owned.update(dict.fromkeys(mine, (other, PRIVATE)))
        check(pools, owned)


@pytest.mark.parametrize("count", [2, MOVED_AT_ONCE + 2])
def test_a_page_of_another_group_is_not_moved(count: int) -> None:
    one, other, _ = shared()
    pages = one.take(count, PRIVATE)
    book = dict.fromkeys(pages, (0, PRIVATE))
    wrongs: list[Callable[[], object]] = [
        lambda: other.shift(pages[0], PRIVATE, SEALED),
        lambda: other.shift_all(pages, PRIVATE, SEALED),
        lambda: other.move_all(pages, FREE),
        lambda: other.move_all([*pages, 199], FREE),
        lambda: one.move_all([*pages, 5000], FREE),
        lambda: one.move_all([*pages, -1], FREE),
        lambda: one.shift(-1, PRIVATE, FREE),
        lambda: one.shift(5000, PRIVATE, FREE),
        lambda: change_group(other, one, pages),
    ]
    for wrong in wrongs:
        with pytest.raises(IllegalMove):
            wrong()
        check((one, other, _), book)
    generation = one.generations[pages[0]]
    assert one.owns(pages[0], generation)
    assert not other.owns(pages[0], generation)
    assert not one.owns(pages[0], generation + 1)


def test_reserved_pages_are_reserved_for_all_groups() -> None:
    one, other, _ = shared(10)
    one.reserved += 7
    assert (other.reserved, other.unreserved) == (7, 3)
    with pytest.raises(LedgerBroken):
        other.take(4, PRIVATE)
    other.reserved -= 7
    assert one.unreserved == 10


def test_problems_are_found_in_each_column() -> None:
    one, other, third = shared(10)
    page = one.take(1, PRIVATE)[0]
    assert one.problems() == other.problems() == []
    one.mine[PRIVATE] += 1
    assert any("of this group are PRIVATE" in problem for problem in one.problems())
    one.mine[PRIVATE] -= 1
    one.owners[page] = NO_OWNER
    assert any("or neither" in problem for problem in third.problems())
    one.owners[page] = other.mark
    assert one.problems()
    assert other.problems()


def test_blocks_are_counted_by_the_full_groups_of_each_pool() -> None:
    groups = (PlaneGroup("a", pool="kv"), PlaneGroup("b", pool="kv"), PlaneGroup("c"))
    planes = tuple(Plane("k", 0, group.name, (8,), "uint8") for group in groups)
    layout = Layout(4, 1, groups, planes)
    both = group_pools("shared", ["a", "b"], 9)
    (alone,) = group_pools("alone", ["c"], 20)
    both[0].add(0, 9)
    alone.add(0, 20)
    place = Place("place", layout, (*both, alone), Journal([], array("i"), Moment()), 1, [], [])
    assert (place.free_blocks, place.usable_blocks) == (4, 4)
    assert place.short_of((3, 3, 30)) == [-3, 10]
    assert place.lacks((3, 3, 30))
    assert not place.lacks((4, 5, 20))
    assert place.lacks((5, 5, 0))
    alone.take(18, PRIVATE)
    assert (place.free_blocks, place.usable_blocks) == (2, 4)


def test_a_group_alone_has_a_plain_pool() -> None:
    (pool,) = group_pools("where", ["full"], 4, 1)
    assert type(pool) is PagePool
    assert (pool.name, pool.pages, pool.capacity, pool.first) == ("where, group full", 4, 3, 1)
