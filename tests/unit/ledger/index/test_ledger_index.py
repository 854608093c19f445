"""Match by bisection against a walk, and the move table of copies."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest

from cachesvc.ledger.block_ledger import BlockLedger
from cachesvc.ledger.page_pool import PagePool
from cachesvc.ledger.tier_copies import MOVES, NO_ROW, Place
from cachesvc.model.errors import IllegalMove, LedgerBroken
from cachesvc.model.layout import Layout
from cachesvc.model.words import ABSENT, DRAINING, FILLING, KEY_BYTES, NO_PAGE, READY, CopyState, PageState
from cachesvc.policy.eviction import lru
from tests.long_cases import looped
from tests.unit.rigs.ledger_rig import chain, one_group, windowed

PAGES = 64


def pools(layout: Layout) -> tuple[PagePool, ...]:
    made = tuple(PagePool(group.name, PAGES) for group in layout.groups)
    for pool in made:
        pool.add(0, PAGES)
    return made


def ledger_of(layout: Layout) -> tuple[BlockLedger, Place]:
    ledger = BlockLedger(layout, pools(layout), lru)
    return ledger, ledger.add_replica("replica", pools(layout))


def put(ledger: BlockLedger, place: Place, row: int, state: int, groups: tuple[int, ...]) -> None:
    if state == FILLING:
        ledger.start_fill(place, [array("i", [row] if g in groups else []) for g in range(len(place.pools))], 1)
        return
    private = PageState.PRIVATE
    pages = [pool.take(1, private)[0] if g in groups else NO_PAGE for g, pool in enumerate(place.pools)]
    ledger.seal(place, row, pages)
    if state == DRAINING:
        ledger.begin_flight(row)
        ledger.start_drain(place, row, 1)


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


@looped("seed", range(40))
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


@pytest.mark.parametrize("sinks", [0, 4])
@looped("seed", range(60))
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
    pool = place.pools[0]
    [private] = pool.take(1, PageState.PRIVATE)
    moves: dict[int, list[Callable[[], object]]] = {
        ABSENT: [lambda: place.fail(0, row), lambda: place.drop(0, row)],
        FILLING: [lambda: place.fill(0, array("i", [row]))],
        READY: [lambda: place.seal(0, row, private), lambda: place.arrive(0, row), lambda: place.keep(0, row)],
        DRAINING: [lambda: place.drain(0, row)],
    }
    before = list(pool.counts)
    done = 0
    for move in moves[target]:
        if place.state(row) == target and done:
            break
        try:
            move()
            done += 1
        except IllegalMove:
            assert (place.state(row), pool.counts) == (source, before)
    assert done == ((source, target) in MOVES)
    assert place.state(row) == (target if done else source)
    if done:
        page = place.pages[0][row]
        assert (page == NO_PAGE) == (target == ABSENT)
        page_source, page_target = MOVES[source, target]
        before[page_source] -= 1
        before[page_target] += 1
        assert pool.counts == before, "its page has moved with it, and nothing else"
        assert target == ABSENT or pool.states[page] == page_target


def test_a_pin_is_given_back_once() -> None:
    ledger, place = ledger_of(windowed())
    row = ledger.index.insert(b"k" * KEY_BYTES, NO_ROW, 1)
    put(ledger, place, row, READY, (0, 1))
    ledger.pin(place, row)
    ledger.unpin(place, row)
    with pytest.raises(LedgerBroken):
        ledger.unpin(place, row)
    with pytest.raises(LedgerBroken):
        ledger.unpin_windows(place, 1, [row])
