"""Page pools: runs, coalescing, legal moves, and random operations against a set for each state."""

from __future__ import annotations

import random
from array import array

import pytest

from cachesvc.ledger.page_pool import LEGAL_PAGE_MOVES, PagePool
from cachesvc.model.errors import IllegalMove, LedgerBroken
from cachesvc.model.words import NO_PAGE, PageState, Run, runs_of
from tests.long_cases import looped
from tests.work import steps_of

FREE, PRIVATE, SEALED, IN_FLIGHT, QUARANTINED = PageState


def pool_of(pages: int) -> PagePool:
    pool = PagePool("pool", pages)
    pool.add(0, pages)
    return pool


def test_taking_nothing_takes_nothing() -> None:
    pool = pool_of(4)
    assert not pool.take(0, PRIVATE)
    assert pool.free == 4
    assert not PagePool("empty", 0).take(0, PRIVATE)


def test_a_pool_hands_out_one_run_where_it_can() -> None:
    pool = pool_of(16)
    first = pool.take(4, PRIVATE)
    second = pool.take(8, PRIVATE)
    pool.move_all(first, FREE)
    assert len(runs_of(pool.take(4, PRIVATE))) == 1
    pool.move_all(second, FREE)
    assert len(runs_of(pool.take(12, PRIVATE))) == 1
    assert pool.problems() == []


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_neighbours_become_one_run(order: tuple[int, ...]) -> None:
    pool = pool_of(3)
    pages = pool.take(3, PRIVATE)
    for index in order:
        pool.move(pages[index], FREE)
        assert pool.problems() == []
    assert runs_of(pool.take(3, SEALED)) == [Run(0, 3)]


def test_memory_that_arrives_in_pieces_becomes_one_run() -> None:
    pool = PagePool("pool", 12)
    for first in (8, 0, 4):
        pool.add(first, 4)
    assert pool.problems() == []
    assert runs_of(pool.take(12, PRIVATE)) == [Run(0, 12)]


@pytest.mark.parametrize(("first", "count"), [(0, 1), (3, 2), (-1, 1), (7, 2), (6, 0)])
def test_pages_arrive_once_and_inside_the_pool(first: int, count: int) -> None:
    pool = PagePool("pool", 8)
    pool.add(0, 4)
    with pytest.raises(LedgerBroken, match="not new pages"):
        pool.add(first, count)


def test_more_than_is_free_is_refused_whole() -> None:
    pool = pool_of(4)
    pool.take(3, PRIVATE)
    with pytest.raises(LedgerBroken, match="2 pages wanted, 1 free"):
        pool.take(2, PRIVATE)
    assert pool.free == 1


@pytest.mark.parametrize("source", list(PageState))
@pytest.mark.parametrize("target", list(PageState))
def test_moves_follow_the_table(source: PageState, target: PageState) -> None:
    pool = pool_of(2)
    page = 0
    if source != FREE:
        [page] = pool.take(1, source)
    if (source, target) in LEGAL_PAGE_MOVES:
        pool.move(page, target)
        assert pool.states[page] == target
    else:
        with pytest.raises(IllegalMove):
            pool.move(page, target)
        assert pool.states[page] == source
    assert pool.problems() == []


def test_a_page_that_has_not_arrived_moves_nowhere() -> None:
    with pytest.raises(IllegalMove):
        PagePool("pool", 2).move(0, FREE)


@pytest.mark.parametrize(("count", "spare"), [(2, 0), (40, 0), (40, 4000)])
@pytest.mark.parametrize("wrong", [[NO_PAGE], [0]])
def test_what_are_not_distinct_pages_move_nowhere(count: int, spare: int, wrong: list[int]) -> None:
    """A missing page is -1 in a table, which is not the last page of the pool."""
    pool = pool_of(count + 1 + spare)
    pages = pool.take(count + 1, PRIVATE)
    with pytest.raises(IllegalMove):
        pool.move_all([*pages[:-1], *wrong], FREE)
    assert pool.free == spare
    assert pool.problems() == []


def test_a_page_given_again_is_of_another_generation() -> None:
    pool = pool_of(1)
    [page] = pool.take(1, PRIVATE)
    before = pool.generations[page]
    assert pool.owns(page, before)
    pool.move(page, FREE)
    assert not pool.owns(page, before)
    pool.take(1, PRIVATE)
    assert not pool.owns(page, before)
    assert pool.owns(page, before + 1)
    assert not pool.owns(-1, 0)
    assert not pool.owns(1, 0)


@looped("seed", range(20))
def test_random_operations_agree_with_sets(seed: int) -> None:
    rng = random.Random(seed)
    count, withheld = rng.randint(4, 40), rng.choice((0, 0, 1, 3))
    pool = PagePool("pool", count, withheld)
    absent = set(range(withheld, count))
    sets: dict[PageState, set[int]] = {state: set() for state in PageState}
    for _ in range(400):
        if absent and rng.random() < 0.1:
            run = rng.choice(runs_of(sorted(absent)))
            count = rng.randint(1, run.count)
            pool.add(run.first, count)
            new = set(range(run.first, run.first + count))
            absent -= new
            sets[FREE] |= new
        elif rng.random() < 0.5:
            state = rng.choice([PRIVATE, SEALED, IN_FLIGHT])
            count = rng.randint(0, len(sets[FREE]))
            pages = pool.take(count, state)
            assert len(set(pages)) == count
            assert set(pages) <= sets[FREE]
            sets[FREE] -= set(pages)
            sets[state] |= set(pages)
        else:
            source, target = rng.choice(sorted(LEGAL_PAGE_MOVES))
            for page in rng.sample(sorted(sets[source]), rng.randint(0, len(sets[source]))):
                pool.move(page, target)
                sets[source].remove(page)
                sets[target].add(page)
        assert pool.problems() == []
        assert {state: pool.counts[state] for state in PageState} == {s: len(pages) for s, pages in sets.items()}
        assert pool.usable == pool.capacity - len(absent)
    with pytest.raises(LedgerBroken, match="not new pages"):
        PagePool("pool", 4, 2).add(1, 2)


def test_pages_that_lie_one_by_one_take_no_steps_each() -> None:
    """A long load's pages were taken and given back run by run, and held the loop for tens of milliseconds."""
    steps = {}
    for count in (4096, 16384):
        pool = pool_of(2 * count)
        pool.take(2 * count, PRIVATE)
        pool.move_all(array("i", range(0, 2 * count, 2)), FREE)
        taken: list[array[int]] = []

        def take(pool: PagePool = pool, count: int = count, taken: list[array[int]] = taken) -> None:
            taken.append(pool.take(count, IN_FLIGHT))

        def give_back(pool: PagePool = pool, taken: list[array[int]] = taken) -> None:
            pool.move_all(taken.pop(), FREE)

        steps[count] = [steps_of(take), steps_of(give_back)]
        assert pool.problems() == []
    assert max(steps[16384]) < 4096, "less than one a page"


@pytest.mark.parametrize("wanted", [32, 100, 500])
def test_many_pages_come_in_the_longest_runs(wanted: int) -> None:
    pool = pool_of(4096)
    pool.take(4096, PRIVATE)
    for first, count in ((0, 8), (100, 300), (500, 40), (700, 250), (1000, 1), (1100, 1)):
        pool.move_all(range(first, first + count), FREE)
    for page in range(2000, 4000, 2):
        pool.move(page, FREE)
    runs = runs_of(sorted(pool.take(wanted, SEALED)))
    assert [run.first for run in runs] == {32: [500], 100: [700], 500: [100, 700]}[wanted]
    assert pool.problems() == []


def test_random_takes_of_many_agree_with_sets() -> None:
    rng = random.Random(7)
    pool = pool_of(10_000)
    free, held = set(range(10_000)), list[int]()
    for _ in range(300):
        if rng.random() < 0.5:
            pages = pool.take(rng.randint(0, min(len(free), rng.choice((10, 300, 3000)))), PRIVATE)
            assert len(set(pages)) == len(pages)
            assert set(pages) <= free
            free -= set(pages)
            held += pages
        else:
            rng.shuffle(held)
            back = [held.pop() for _ in range(rng.randint(0, min(len(held), rng.choice((10, 300, 3000)))))]
            pool.move_all(back, FREE)
            free |= set(back)
        assert pool.problems() == []
        assert pool.free == len(free)
