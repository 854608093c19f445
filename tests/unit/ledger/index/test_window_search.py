"""The longest hit with its windows, against the walk over the whole prompt that a match once was."""

from __future__ import annotations

import random
from array import array
from math import ceil

import pytest

from cachesvc.ledger.block_ledger import BlockLedger, Hit
from cachesvc.ledger.page_pool import PagePool
from cachesvc.ledger.retention import Prefix, WindowSearch, window_needs
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.words import ABSENT, DRAINING, FILLING, KEY_BYTES, NO_PAGE, READY, PageState
from cachesvc.policy.eviction import lru
from tests.long_cases import looped
from tests.unit.rigs.ledger_rig import chain

BLOCK_TOKENS = 4
PAGES = 256


def layout_of(rng: random.Random) -> Layout:
    """A full group and up to three windowed ones, of any windows and sinks, and perhaps states."""
    windowed = [
        PlaneGroup(f"window-{number}", window, rng.choice((0, 0, 1, 4, 9)) if window else 0)
        for number, window in enumerate(rng.choice((0, *range(1, 31))) for _ in range(rng.randint(1, 3)))
    ]
    states = [PlaneGroup(f"state-{number}", is_state=True) for number in range(rng.choice((0, 0, 1, 2)))]
    groups = [PlaneGroup("full"), *rng.sample([*windowed, *states], len(windowed) + len(states))]
    planes = tuple(Plane("k", at, group.name, (8,), "uint8") for at, group in enumerate(groups))
    return Layout(BLOCK_TOKENS, 1, tuple(groups), planes)


def pools(layout: Layout) -> tuple[PagePool, ...]:
    made = tuple(PagePool(group.name, PAGES) for group in layout.groups)
    for pool in made:
        pool.add(0, PAGES)
    return made


def put(ledger: BlockLedger, place: Place, row: int, state: int, windows: list[int]) -> None:
    """A copy in ``state`` whose windowed groups are in the states ``windows``."""
    states = [state, *windows]
    for group, wanted in enumerate(states):
        if wanted == FILLING:
            place.fill(group, array("i", [row]))
        elif wanted != ABSENT:
            place.seal(group, row, place.pools[group].take(1, PageState.PRIVATE)[0])
    if state == DRAINING:
        place.drain(0, row)
    assert [place.states[group][row] for group in range(len(states))] == states


def needs(layout: Layout, group: int) -> tuple[int, int]:
    """Blocks of a group's window and of its sinks."""
    tokens = layout.groups[group]
    return ceil(layout.window_of(group) / BLOCK_TOKENS), ceil(tokens.sink_tokens / BLOCK_TOKENS)


def naive(ledger: BlockLedger, rows: list[int], place: Place, hit: Hit) -> Hit:
    """Look at every block of the prompt, front to end."""
    path, host = rows[: hit.blocks], ledger.host
    loadable = len(path)
    while loadable and host.state(path[loadable - 1]) == READY:
        loadable -= 1
    blocks = covered(ledger, path, loadable, hit.device_blocks, place)
    device = min(blocks, hit.device_blocks)
    for group in place.window_groups:
        states = place.states[group]
        window, sinks = needs(ledger.layout, group)
        needed = [position for position in range(blocks) if position < sinks or position >= blocks - window]
        device = min([device, *(position for position in needed if states[path[position]] != READY)])
    return Hit(device, path[device - 1] if device else NO_ROW, blocks, path[blocks - 1] if blocks else NO_ROW)


def covered(ledger: BlockLedger, path: list[int], loadable: int, device_blocks: int, place: Place) -> int:
    """Longest n <= len(path) such that each windowed group holds what a sequence of n blocks needs."""
    runs = dict.fromkeys(place.window_groups, 0)
    sinks_whole = dict.fromkeys(place.window_groups, True)
    best = 0
    for position, row in enumerate(path):
        whole = True
        for group in place.window_groups:
            there = position < device_blocks and place.states[group][row] == READY
            there = there or (position >= loadable and ledger.host.states[group][row] == READY)
            runs[group] = runs[group] + 1 if there else 0
            window, sinks = needs(ledger.layout, group)
            if position < sinks and not there:
                sinks_whole[group] = False
            whole = whole and sinks_whole[group] and runs[group] >= min(position + 1, window)
        if whole:
            best = position + 1
    return best


def walked(ledger: BlockLedger, rows: list[int], place: Place) -> Hit:
    """The hit of the full groups, one look-up a block."""
    device = 0
    while device < len(rows) and place.is_hittable(rows[device]):
        device += 1
    blocks = device
    while blocks < len(rows) and ledger.host.state(rows[blocks]) == READY:
        blocks += 1
    return Hit(device, rows[device - 1] if device else NO_ROW, blocks, rows[blocks - 1] if blocks else NO_ROW)


@looped("seed", range(100), range(400))
def test_the_search_finds_what_a_walk_over_the_whole_prompt_finds(seed: int) -> None:
    rng = random.Random(seed)
    layout = layout_of(rng)
    ledger = BlockLedger(layout, pools(layout), lru)
    place, other = (ledger.add_replica(name, pools(layout)) for name in ("one", "other"))
    length = rng.randint(1, 60)
    device = rng.choice((0, length, rng.randint(0, length)))
    draining_from = rng.randint(0, device)
    holes = rng.choice((0.0, 0.02, 0.1, 0.5, 0.9))
    elsewhere = rng.choice((0.0, 0.05))
    host_from = rng.choice((0, device, rng.randint(0, device)))
    keys = chain(*range(length))
    rows: list[int] = []

    def windows(missing: float) -> list[int]:
        wanted = (FILLING if rng.random() < 0.1 else ABSENT if rng.random() < missing else READY for _ in range(9))
        return [next(wanted) for _ in place.window_groups]

    for i in range(length):
        row = ledger.index.insert(keys[i * KEY_BYTES : (i + 1) * KEY_BYTES], rows[-1] if rows else NO_ROW, 1)
        rows.append(row)
        if i < device:
            draining = i >= draining_from and rng.random() < 0.5
            put(ledger, place, row, DRAINING if draining else READY, windows(holes))
        is_elsewhere = rng.random() < elsewhere
        if is_elsewhere or (i < host_from and i >= device):
            put(ledger, other, row, READY, windows(0.0))
        if not is_elsewhere and (i >= host_from or rng.random() < 0.5):
            put(ledger, ledger.host, row, READY, windows(holes / 2))

    in_full = walked(ledger, rows, place)
    found = ledger.find(keys, place)
    assert found[:4] == naive(ledger, rows, place, in_full)[:4]
    assert found.full_blocks == in_full.blocks
    assert all(blocks > 0 and group in place.window_groups for group, blocks in found.lost)
    limit = rng.randint(1, length)
    short = walked(ledger, rows[:limit], place)
    assert ledger.find(keys + chain("more"), place, limit)[:4] == naive(ledger, rows[:limit], place, short)[:4]
    alone = covered(ledger, rows[: in_full.device_blocks], in_full.device_blocks, in_full.device_blocks, place)
    assert ledger.find_in_place(keys, place) == (alone, rows[alone - 1] if alone else NO_ROW)


def test_a_gap_is_stepped_over_at_once() -> None:
    """The windowed copy of block 35 is missing: nothing that ends within a window behind it is tried."""
    layout = Layout(
        BLOCK_TOKENS,
        1,
        (PlaneGroup("full"), PlaneGroup("window", 8 * BLOCK_TOKENS)),
        (Plane("k", 0, "full", (8,), "uint8"), Plane("k", 1, "window", (8,), "uint8")),
    )
    ledger = BlockLedger(layout, pools(layout), lru)
    place = ledger.add_replica("one", pools(layout))
    keys = chain(*range(40))
    rows: list[int] = []
    for i in range(40):
        row = ledger.index.insert(keys[i * KEY_BYTES : (i + 1) * KEY_BYTES], rows[-1] if rows else NO_ROW, 1)
        rows.append(row)
        put(ledger, place, row, READY, [ABSENT if i == 35 else READY])
    assert ledger.find(keys, place) == Hit(35, rows[34], 35, rows[34], ((1, 5),))
    assert ledger.find_in_place(keys, place) == (35, rows[34])
    assert NO_PAGE not in [place.pages[1][row] for row in rows[27:35]]


@pytest.mark.parametrize("at", [0, 10, 150, 235, 236, 239])
def test_the_last_state_is_found_however_far_it_is_from_the_end(at: int) -> None:
    groups = (PlaneGroup("full"), PlaneGroup("state", is_state=True))
    planes = tuple(Plane("k", layer, group.name, (8,), "uint8") for layer, group in enumerate(groups))
    layout = Layout(BLOCK_TOKENS, 1, groups, planes)
    ledger = BlockLedger(layout, pools(layout), lru)
    place = ledger.add_replica("one", pools(layout))
    keys = chain(*range(240))
    rows: list[int] = []
    for i in range(240):
        rows.append(ledger.index.insert(keys[i * KEY_BYTES : (i + 1) * KEY_BYTES], rows[-1] if rows else NO_ROW, 1))
        put(ledger, place, rows[-1], READY, [READY if i == at else ABSENT])
    lost = ((1, 239 - at),) if at < 239 else ()
    assert ledger.find(keys, place) == Hit(at + 1, rows[at], at + 1, rows[at], lost)


class CountingPrefix(Prefix):
    """Counts look-ups."""

    looks = 0

    def row(self, position: int) -> int:
        self.looks += 1
        return super().row(position)


def test_states_of_groups_that_have_them_at_other_positions_are_looked_for_together() -> None:
    """A step back for each group in turn would go through a prompt block by block."""
    groups = (PlaneGroup("full"), *(PlaneGroup(f"state-{each}", is_state=True) for each in range(2)))
    planes = tuple(Plane("k", layer, group.name, (8,), "uint8") for layer, group in enumerate(groups))
    layout = Layout(BLOCK_TOKENS, 1, groups, planes)
    ledger = BlockLedger(layout, pools(layout), lru)
    place = ledger.add_replica("one", pools(layout))
    keys, rows = chain(*range(240)), list[int]()
    for i in range(240):
        rows.append(ledger.index.insert(keys[i * KEY_BYTES : (i + 1) * KEY_BYTES], rows[-1] if rows else NO_ROW, 1))
        put(ledger, place, rows[-1], READY, [ABSENT, READY] if i % 2 else [READY, ABSENT])
    prefix = CountingPrefix(ledger.index, keys, rows[-1])
    search = WindowSearch(window_needs(layout), prefix, place, None, 240, 240)
    assert search.longest() == 0
    assert search.lost == {1: 240}
    assert prefix.looks < 10


@pytest.mark.parametrize("windowed", [False, True])
@looped("seed", range(50), range(150))
def test_keys_that_are_not_chained_are_refused_or_find_what_is_there(seed: int, windowed: bool) -> None:
    """Whatever a caller sends as keys, a hit is a path of as many blocks, the device's at its front."""
    rng = random.Random(seed)
    groups = [PlaneGroup("full"), PlaneGroup("window", 8, 4), PlaneGroup("state", is_state=True)][: 1 + 2 * windowed]
    planes = tuple(Plane("k", at, group.name, (8,), "uint8") for at, group in enumerate(groups))
    layout = Layout(BLOCK_TOKENS, 1, tuple(groups), planes)
    ledger = BlockLedger(layout, pools(layout), lru)
    place = ledger.add_replica("one", pools(layout))
    known: list[bytes] = []
    for prompt in range(3):
        keys = chain(*(f"{prompt}-{i}" for i in range(12)))
        device, row = rng.randint(0, 12), NO_ROW
        for i in range(12):
            known.append(keys[i * KEY_BYTES : (i + 1) * KEY_BYTES])
            row = ledger.index.insert(known[-1], row, 1)
            for holder in (
                *([place] if i < device else []),
                *([ledger.host] if i >= device or rng.random() < 0.7 else []),
            ):
                put(ledger, holder, row, READY, [READY if rng.random() < 0.9 else ABSENT for _ in groups[1:]])
    for _ in range(40):
        at = rng.randrange(36)
        asked = known[at : at + 12] if rng.random() < 0.5 else rng.choices(known, k=rng.randint(1, 14))
        for _ in range(rng.randint(0, 3)):
            asked[rng.randrange(len(asked))] = rng.choice((rng.choice(known), rng.randbytes(KEY_BYTES)))
        try:
            hit = ledger.find(b"".join(asked), place)
        except InvalidRequest:
            continue
        path = [] if hit.row == NO_ROW else list(ledger.index.path(hit.row))
        assert len(path) == hit.blocks >= hit.device_blocks
        assert path[: hit.device_blocks][-1:] == ([] if hit.device_row == NO_ROW else [hit.device_row])


def test_a_key_from_another_prompt_is_refused_by_its_place() -> None:
    layout = Layout(BLOCK_TOKENS, 1, (PlaneGroup("full"),), (Plane("k", 0, "full", (8,), "uint8"),))
    ledger = BlockLedger(layout, pools(layout), lru)
    place = ledger.add_replica("one", pools(layout))
    row = NO_ROW
    keys = chain(*range(4))
    for i in range(4):
        row = ledger.index.insert(keys[i * KEY_BYTES : (i + 1) * KEY_BYTES], row, 1)
        put(ledger, place, row, READY, [])
    with pytest.raises(InvalidRequest, match=r"block 3: its key .* chain the keys"):
        ledger.find(chain("new") + keys[: 3 * KEY_BYTES], place)


def test_a_sink_of_another_prompt_is_none_of_this_one() -> None:
    """It is at the right depth, and its windowed copy is there; but nothing pinned for the hit would keep it."""
    groups = (PlaneGroup("full"), PlaneGroup("window", 8, 4))
    planes = tuple(Plane("k", at, group.name, (8,), "uint8") for at, group in enumerate(groups))
    layout = Layout(BLOCK_TOKENS, 1, groups, planes)
    ledger = BlockLedger(layout, pools(layout), lru)
    place = ledger.add_replica("one", pools(layout))
    prompts = {name: chain(*(f"{name}-{i}" for i in range(6))) for name in "ab"}
    for name, keys in prompts.items():
        row = NO_ROW
        for i in range(6):
            row = ledger.index.insert(keys[i * KEY_BYTES : (i + 1) * KEY_BYTES], row, 1)
            put(ledger, place, row, READY, [ABSENT if (name, i) == ("b", 0) else READY])
    with pytest.raises(InvalidRequest, match=r"block 0: its key .* chain the keys"):
        ledger.find(prompts["a"][:KEY_BYTES] + prompts["b"][KEY_BYTES:], place)
