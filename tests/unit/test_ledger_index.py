"""Match by bisection against a walk, the move table of copies, and the leaves' heap."""

from __future__ import annotations

import random

import pytest

from cachesvc.ledger.blocks import BlockLedger
from cachesvc.ledger.leaves import LeafHeap, Rank
from cachesvc.ledger.pages import PagePool
from cachesvc.ledger.place import NO_ROW, Place
from cachesvc.model.errors import IllegalMove, LedgerBroken
from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.layout import Layout
from cachesvc.model.words import ABSENT, DRAINING, FILLING, LEGAL_MOVES, NO_PAGE, READY, CopyState, PageState
from cachesvc.policy.eviction import lru
from tests.unit.ledger_rig import chain, one_group, windowed

PAGES = 64


def pools(layout: Layout) -> tuple[PagePool, ...]:
    made = tuple(PagePool(group.name, PAGES) for group in layout.groups)
    for pool in made:
        pool.add(0, PAGES)
    return made


def ledger_of(layout: Layout) -> tuple[BlockLedger, Place]:
    ledger = BlockLedger(layout, pools(layout), lru)
    return ledger, ledger.add_replica("replica", pools(layout))


def put(ledger: BlockLedger, place: Place, row: int, state: CopyState, groups: tuple[int, ...]) -> None:
    page_state = PageState.SEALED if state == READY else PageState.IN_FLIGHT
    pages = [place.pools[g].take(1, page_state)[0] if g in groups else NO_PAGE for g in range(len(place.pools))]
    ledger.add_copy(place, row, pages, READY if state == DRAINING else state)
    if state == DRAINING:
        for group in place.full_groups:
            place.move(group, row, DRAINING)


def walk(ledger: BlockLedger, place: Place, keys: bytes) -> tuple[int, int]:
    """Device blocks, then blocks in all: one look-up a block, as the rule says it."""
    rows = [ledger.index.rows.get(keys[at : at + KEY_BYTES], NO_ROW) for at in range(0, len(keys), KEY_BYTES)]
    device = 0
    while device < len(rows) and rows[device] != NO_ROW and place.state(rows[device]) in (READY, DRAINING):
        device += 1
    total = device
    while total < len(rows) and rows[total] != NO_ROW and ledger.host.state(rows[total]) == READY:
        total += 1
    return device, total


@pytest.mark.parametrize("seed", range(40))
def test_bisection_finds_what_a_walk_finds(seed: int) -> None:
    rng = random.Random(seed)
    ledger, place = ledger_of(one_group())
    prompts = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 12))) for _ in range(4)]
    for prompt in prompts:
        keys, parent = chain(*prompt), NO_ROW
        device_until = rng.randint(0, len(prompt))
        filling_from = rng.randint(0, device_until)
        for i in range(len(prompt)):
            key = keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
            row = ledger.index.rows.get(key, NO_ROW)
            if row == NO_ROW:
                row = ledger.index.insert(key, parent, 1)
                above = place.state(parent) if parent != NO_ROW else READY
                on_device = i < device_until and above != ABSENT
                if on_device:
                    late = i >= filling_from or above == FILLING
                    put(ledger, place, row, FILLING if late else rng.choice((READY, DRAINING)), (0,))
                if not on_device or rng.random() < 0.5:
                    put(ledger, ledger.host, row, rng.choice((READY, READY, FILLING)), (0,))
            parent = row
    for prompt in [*prompts, "abba", "zz"]:
        keys = chain(*prompt, "more")
        hit = ledger.find(keys, place)
        assert (hit.device_blocks, hit.blocks) == walk(ledger, place, keys)
        if hit.blocks:
            assert ledger.index.keys[hit.row] == keys[(hit.blocks - 1) * KEY_BYTES : hit.blocks * KEY_BYTES]
        limited = ledger.find(keys, place, 2)
        assert limited.blocks == min(2, hit.blocks)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("sinks", [0, 4])
def test_a_windowed_hit_is_the_longest_that_has_its_window(seed: int, sinks: int) -> None:
    """Every n is tried by the rule's own words, device and host copies drawn at random."""
    rng = random.Random(seed)
    layout = windowed(window_tokens=rng.choice((4, 8, 12)), sink_tokens=sinks)
    window = layout.groups[1].window_tokens or 0
    ledger, place = ledger_of(layout)
    length = rng.randint(1, 9)
    device = rng.randint(0, length)
    host_from = rng.randint(0, device)
    keys = chain(*range(length))
    rows: list[int] = []
    for i in range(length):
        row = ledger.index.insert(keys[i * KEY_BYTES : (i + 1) * KEY_BYTES], rows[-1] if rows else NO_ROW, 1)
        rows.append(row)
        if i < device:
            put(ledger, place, row, READY, (0, 1) if rng.random() < 0.7 else (0,))
        if i >= host_from:
            put(ledger, ledger.host, row, READY, (0, 1) if rng.random() < 0.8 else (0,))

    def works(blocks: int, in_place: int) -> bool:
        first = max(0, blocks * layout.block_tokens - window)
        needed = {t // layout.block_tokens for t in range(first, blocks * layout.block_tokens)}
        needed |= {t // layout.block_tokens for t in range(min(sinks, blocks * layout.block_tokens))}
        loaded = range(in_place, blocks)
        if in_place > device or any(ledger.host.state(rows[i]) != READY for i in loaded):
            return False
        return all(
            place.states[1][rows[i]] == READY
            if i < in_place
            else ledger.host.states[1][rows[i]] == READY or (i < device and place.states[1][rows[i]] == READY)
            for i in needed
        )

    best = max((n for n in range(length + 1) if any(works(n, d) for d in range(n + 1))), default=0)
    hit = ledger.find(keys, place)
    assert hit.blocks == best
    assert works(hit.blocks, hit.device_blocks)


@pytest.mark.parametrize("source", list(CopyState))
@pytest.mark.parametrize("target", list(CopyState))
def test_copies_move_by_the_table_alone(source: CopyState, target: CopyState) -> None:
    ledger, place = ledger_of(one_group())
    row = ledger.index.insert(b"k" * KEY_BYTES, NO_ROW, 1)
    if source != ABSENT:
        put(ledger, place, row, source, (0,))
    if (source, target) in LEGAL_MOVES:
        place.move(0, row, target, 5)
        assert place.state(row) == target
        if target == ABSENT:
            assert place.pages[0][row] == NO_PAGE
    else:
        with pytest.raises(IllegalMove):
            place.move(0, row, target, 5)
        assert place.state(row) == source


def test_a_pin_is_given_back_once() -> None:
    ledger, place = ledger_of(windowed())
    row = ledger.index.insert(b"k" * KEY_BYTES, NO_ROW, 1)
    put(ledger, place, row, READY, (0, 1))
    ledger.pin(place, row)
    ledger.unpin(place, row)
    with pytest.raises(LedgerBroken):
        ledger.unpin(place, row)
    with pytest.raises(LedgerBroken):
        ledger.unpin_window(place, 1, row)


def test_a_used_row_comes_up_later_not_never() -> None:
    """Found by reading: a row stamped through another replica had only a stale entry, so it could never be evicted."""
    ranks: dict[int, Rank | None] = {1: (1,), 2: (2,)}
    heap = LeafHeap()
    for row, rank in ranks.items():
        assert rank is not None
        heap.push(rank, row, ranks.__getitem__)
    ranks[1] = (3,)
    assert heap.pop(ranks.__getitem__) == ((2,), 2)
    assert heap.pop(ranks.__getitem__) == ((3,), 1)
    assert heap.pop(ranks.__getitem__) is None


def test_the_heap_forgets_what_may_not_go_and_stays_small() -> None:
    ranks: dict[int, Rank | None] = {row: (row,) for row in range(10)}
    heap = LeafHeap()
    for turn in range(5000):
        row = turn % 10
        ranks[row] = (turn,)
        heap.push((turn,), row, ranks.__getitem__)
    assert len(heap) <= 1025
    ranks[0] = None
    popped = []
    while (entry := heap.pop(ranks.__getitem__)) is not None:
        popped.append(entry[1])
    assert list(dict.fromkeys(popped)) == list(range(1, 10))
