"""Swap: a sequence leaves the device and comes back whole; failures and losses on the way; recycle by the window."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from cachesvc.flows import pinning
from cachesvc.flows.allocate import allocate, swap_in, swap_out
from cachesvc.flows.core import TURN, Turns
from cachesvc.flows.leases import close_lease, process_gone
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import recycle, release
from cachesvc.ledger.sequences import OpenSequence
from cachesvc.model.answers import GroupCells, Wait
from cachesvc.model.errors import Conflict, InvalidRequest, LeaseLost, NotFound, NotOwned, PoolExhausted
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.words import KEY_BYTES, NO_PAGE, Direction, PageState, WritePolicy
from cachesvc.questions.audit import verify_at_once
from cachesvc.wire.convert import layout_from_proto, layout_to_proto
from tests.conservation import audit
from tests.long_cases import looped
from tests.unit.rigs.ledger_rig import BLOCK_TOKENS, TOKEN, Rig, chain, one_group, prefill, rig_of, serve, windowed


def half_published(device: int = 8, host: int = 8, *, layout: Layout | None = None) -> tuple[Rig, str]:
    """Sequence 1 of four blocks, two of them sealed."""
    layout = layout or one_group()
    groups = len(layout.groups)
    rig = rig_of(layout, device=(device,) * groups, host=(host,) * groups)
    a = rig.lease()
    rig.run(match, a, 1, chain(*"abcd"), 0)
    rig.run(allocate, a, 1, 4)
    rig.run(publish, a, 1, 0, b"", 2)
    return rig, a


def test_out_and_in_moves_every_own_page_there_and_back() -> None:
    rig, a = half_published()
    rig.run(swap_out, a, 1)
    [out] = rig.mover.transfers.values()
    assert len(out.pages[0].device_pages) == 4
    assert rig.free() == [4], "a page is free when its bytes are on the host"
    rig.settle()
    assert rig.free() == [6], "the sealed blocks stay until their pages are needed"
    own = dict(zip(out.pages[0].device_pages, out.pages[0].host_pages, strict=True))
    serve(rig, rig.lease("b"), 1, "wxyz")  # takes the pages that became free
    answer = rig.run(swap_in, a, 1)
    [back] = rig.mover.transfers.values()
    assert back.direction is Direction.LOAD
    assert set(back.pages[0].host_pages) == set(list(own.values())[:2])
    assert len(answer.tables[0].pages) == 4
    assert isinstance(rig.once(publish, a, 1, 2, b"", 2), Wait)
    rig.settle()
    assert rig.run(publish, a, 1, 2, b"", 2).sealed_blocks == 4
    rig.run(release, a, 1)
    assert rig.host.pools[0].counts[PageState.PRIVATE] == 0


def test_nothing_works_on_what_is_swapped_out() -> None:
    rig, a = half_published()
    rig.run(swap_out, a, 1)
    rig.settle()
    calls: list[Callable[[], object]] = [
        lambda: rig.run(allocate, a, 1, 5),
        lambda: rig.run(publish, a, 1, 2, b"", 1),
        lambda: rig.run(recycle, a, 1, 4, ()),
        lambda: rig.run(swap_out, a, 1),
    ]
    for call in calls:
        with pytest.raises(Conflict, match="swapped out"):
            call()
    rig.run(swap_in, a, 1)
    with pytest.raises(Conflict, match="being swapped"):
        rig.once(swap_in, a, 1)


def test_a_failed_swap_out_leaves_the_sequence_in_place() -> None:
    rig, a = half_published()
    rig.run(swap_out, a, 1)
    rig.land(1, "broken")
    assert rig.host.pools[0].free == 8
    assert rig.free() == [4]
    assert rig.run(publish, a, 1, 2, b"", 2).sealed_blocks == 4
    with pytest.raises(Conflict, match="on the device"):
        rig.run(swap_in, a, 1)


def test_a_failed_swap_in_can_be_tried_again() -> None:
    rig, a = half_published()
    rig.run(swap_out, a, 1)
    rig.settle()
    rig.run(swap_in, a, 1)
    rig.land(2, "broken")
    assert rig.host.pools[0].counts[PageState.PRIVATE] == 2
    rig.run(swap_in, a, 1)
    rig.settle()
    assert rig.run(publish, a, 1, 2, b"", 2).sealed_blocks == 4


@pytest.mark.parametrize("end", ["asked again", "released", "lease lost", "process gone"])
def test_pages_of_a_swap_in_that_failed_stay_their_sequences_until_it_is_heard_of(end: str) -> None:
    """The failure releases launches that waited for it, and these write behind what was to come."""
    rig, a = half_published(device=6)
    rig.run(swap_out, a, 1)
    rig.settle()
    pinning.evict(rig.core, 1, "device", 0)
    tables = rig.run(swap_in, a, 1).tables[0].pages
    [ticket] = rig.mover.transfers
    rig.land(ticket, "broken")
    pool = rig.place().pools[0]
    assert [pool.states[page] for page in tables[2:]] == [PageState.PRIVATE] * 2, "no other sequence may have them"
    assert pool.counts[PageState.FREE] == 4
    if end == "asked again":
        rig.run(swap_in, a, 1)
        assert pool.counts[PageState.FREE] == 2, "they were free, and as many are taken"
        rig.settle()
        rig.run(release, a, 1)
    elif end == "released":
        rig.run(release, a, 1)
    else:
        if end == "lease lost":
            close_lease(rig.core, a, quiesced=False)
            assert pool.counts[PageState.QUARANTINED] == 2
        process_gone(rig.core, TOKEN + b"a")
    assert pool.counts[PageState.FREE] + pool.counts[PageState.SEALED] == pool.usable
    assert rig.host.pools[0].counts[PageState.PRIVATE] == 0


def test_a_host_without_room_refuses_and_evicts_nothing() -> None:
    rig = rig_of(one_group(), device=(8,), host=(4,), policy=WritePolicy.WRITE_THROUGH)
    a = rig.lease()
    serve(rig, a, 2, "xy")
    rig.settle()
    rig.run(match, a, 1, chain(*"abcde"), 0)
    rig.run(allocate, a, 1, 5)
    with pytest.raises(PoolExhausted):
        rig.run(swap_out, a, 1)
    assert len(rig.host_keys()) == 2
    assert rig.free() == [1]


def test_the_host_copies_of_the_path_stay_while_it_goes_out() -> None:
    """Found by reading: room for the own pages was made by dropping host copies of the very path."""
    rig = rig_of(one_group(), device=(8,), host=(3,), policy=WritePolicy.WRITE_THROUGH)
    a = rig.lease()
    prefill(rig, a, 1, "ab")
    rig.settle()
    rig.run(allocate, a, 1, 4)
    with pytest.raises(PoolExhausted):
        rig.run(swap_out, a, 1)
    rig.run(release, a, 1)
    rig.run(match, a, 1, chain(*"ab"), 0)
    rig.run(allocate, a, 1, 3)
    rig.run(swap_out, a, 1)
    serve(rig, a, 2, "xy")  # wants host pages: none of the path's may go
    assert rig.host_keys() == {chain("a"), chain(*"ab")[KEY_BYTES:]}
    rig.settle()
    rig.run(swap_in, a, 1)
    rig.settle()


def test_spare_pages_are_not_lost_on_the_way_out() -> None:
    """Found by reading: pages that a sequence kept as spares leaked when it was swapped out."""
    rig = rig_of(one_group(), device=(8,), host=(8,))
    a = rig.lease()
    rig.run(match, a, 1, chain(*"ab"), 0)
    rig.run(allocate, a, 1, 3)
    serve(rig, a, 2, "ab")
    rig.run(publish, a, 1, 0, b"", 2)
    rig.run(swap_out, a, 1)
    rig.settle()
    rig.run(release, a, 1)
    assert rig.free() == [6]


def test_a_hit_that_is_not_allocated_yet_cannot_be_swapped() -> None:
    """Found by reading: the pin on the host was overwritten and stayed for good."""
    rig, a = half_published()
    rig.run(swap_out, a, 1)
    rig.settle()
    rig.run(release, a, 1)
    serve(rig, rig.lease("b"), 1, "stuvwxyz")
    rig.settle()
    assert rig.run(match, a, 2, chain(*"ab"), 0).host_blocks == 2
    with pytest.raises(Conflict, match="not allocated"):
        rig.run(swap_out, a, 2)
    rig.run(release, a, 2)


@pytest.mark.parametrize("direction", ["out", "in"])
@pytest.mark.parametrize("error", ["", "broken"])
@pytest.mark.parametrize("end", ["release", "lease lost", "process gone"])
def test_whoever_leaves_during_a_swap_leaves_nothing_behind(direction: str, error: str, end: str) -> None:
    rig, a = half_published(layout=windowed(window_tokens=8))
    rig.run(swap_out, a, 1)
    if direction == "in":
        rig.settle()
        rig.run(swap_in, a, 1)
    if end == "release":
        rig.run(release, a, 1)
    elif end == "lease lost":
        close_lease(rig.core, a, quiesced=False)
    else:
        process_gone(rig.core, TOKEN + b"a")
    rig.check()
    for ticket in list(rig.mover.transfers):
        rig.land(ticket, error)
    quarantined = [pool.counts[PageState.QUARANTINED] for pool in rig.place().pools]
    assert (sum(quarantined) > 0) == (end == "lease lost")
    process_gone(rig.core, TOKEN + b"a")
    rig.check()
    for pool in (*rig.place().pools, *rig.host.pools):
        assert pool.counts[PageState.FREE] + pool.counts[PageState.SEALED] == pool.usable


def test_a_swap_in_that_fails_while_its_sequence_is_ending_leaves_nothing_pinned() -> None:
    """Found by simulation: the pin of blocks that never came stayed until the last turn of the release."""
    rig, a = half_published()
    rig.run(swap_out, a, 1)
    rig.settle()
    pinning.evict(rig.core, rig.model.id, "device", 0)
    rig.run(swap_in, a, 1)
    [back] = rig.mover.transfers
    rig.core.turns = Turns(pages=1)
    assert rig.once(release, a, 1) == TURN
    rig.land(back, "broken")
    rig.run(release, a, 1)
    assert rig.free() == [8]
    assert not any(rig.place().pins)


def test_shared_windowed_pages_come_back_as_own_ones() -> None:
    rig = rig_of(windowed(window_tokens=8), device=(8, 8), host=(8, 8))
    a = rig.lease()
    prefill(rig, a, 1, "abcd")
    rig.run(recycle, a, 1, 16, ())
    rig.run(swap_out, a, 1)
    rig.settle()
    answer = rig.run(swap_in, a, 1)
    rig.settle()
    assert [page == NO_PAGE for page in answer.tables[1].pages] == [True, True, False, False]
    assert rig.run(recycle, a, 1, 16, ()).pages == 0
    rig.run(allocate, a, 1, 8)
    assert rig.run(recycle, a, 1, 32, ()).pages == 4
    rig.run(release, a, 1)


# -- recycle -------------------------------------------------------------------------------------------------------


def layout_of(window: int, sinks: int, block: int) -> Layout:
    planes = (Plane("k", 0, "full", (8,), "uint8"), Plane("k", 1, "window", (8,), "uint8"))
    return Layout(block, 1, (PlaneGroup("full"), PlaneGroup("window", window, sinks)), planes)


def test_the_vector_of_the_specification() -> None:
    rig = rig_of(layout_of(64, 32, 16), device=(40, 40))
    a = rig.lease()
    rig.run(match, a, 1, b"", 0)
    rig.run(allocate, a, 1, 32)
    answer = rig.run(recycle, a, 1, 512, ())
    assert (answer.pages, answer.cursors) == (26, (28,))
    assert rig.free() == [8, 34]
    table = rig.core.ledger.leases[a].sequences[1].tables
    assert NO_PAGE not in table[0]
    assert [page == NO_PAGE for page in table[1]] == [False] * 2 + [True] * 26 + [False] * 4


@pytest.mark.parametrize("window", [1, 4, 7, 8, 9, 13])
@pytest.mark.parametrize("sinks", [0, 3, 4])
def test_what_is_given_back_is_exactly_what_no_query_reaches(window: int, sinks: int) -> None:
    """Token by token: block j is dead once every later query's window begins behind it; sinks never die."""
    rig = rig_of(layout_of(window, sinks, 4), device=(16, 16))
    a = rig.lease()
    rig.run(match, a, 1, b"", 0)
    rig.run(allocate, a, 1, 16)
    last: tuple[int, ...] = (0,)
    for tokens in (1, 3, 4, 5, 9, 17, 18, 33, 48, 64, 63, 2):
        answer = rig.run(recycle, a, 1, tokens, ())
        assert answer.cursors >= last, "a cursor never goes back"
        last = answer.cursors
        reached = max(tokens, {2: 64, 63: 64}.get(tokens, 0))
        needed = {t // 4 for t in range(max(0, reached - window + 1), 64)} | {t // 4 for t in range(sinks)}
        table = rig.core.ledger.leases[a].sequences[1].tables[1]
        assert {block for block, page in enumerate(table) if page != NO_PAGE} == needed


def test_a_bad_recycle_frees_nothing() -> None:
    """Found by reading: the named pages were freed before the tokens were looked at."""
    rig = rig_of(windowed(), device=(8, 8))
    a = rig.lease()
    rig.run(match, a, 1, chain("a"), 0)
    rig.run(allocate, a, 1, 2)
    serve(rig, a, 2, "a")
    spares = rig.run(publish, a, 1, 0, b"", 1).spares
    free = rig.free()
    with pytest.raises(InvalidRequest, match="beyond"):
        rig.run(recycle, a, 1, 99, spares)
    with pytest.raises(InvalidRequest, match="twice"):
        rig.run(recycle, a, 1, 0, (*spares, *spares))
    in_table = rig.core.ledger.leases[a].sequences[1].tables[0][1]
    with pytest.raises(InvalidRequest, match="still in the block table"):
        rig.run(recycle, a, 1, 0, (*spares, GroupCells(0, 0, (in_table,))))
    with pytest.raises(NotOwned):
        rig.run(recycle, a, 1, 0, (*spares, GroupCells(0, 0, (7,))))
    with pytest.raises(InvalidRequest, match="no group"):
        rig.run(recycle, a, 1, 0, (GroupCells(5, 0, (0,)),))
    with pytest.raises(NotFound):
        rig.run(recycle, a, 77, 4, spares)
    assert rig.free() == free
    assert rig.run(recycle, a, 1, 4, spares).pages == 2
    close_lease(rig.core, a, quiesced=True)
    with pytest.raises(LeaseLost):
        rig.run(recycle, a, 1, 0, spares)


def test_a_recycled_prefix_is_hit_where_its_window_ends() -> None:
    """The windowed pages that recycle leaves are enough for a hit of everything that was computed."""
    rig = rig_of(windowed(window_tokens=8), device=(16, 6))
    a = rig.lease()
    prefill(rig, a, 1, "abcdef")
    rig.run(recycle, a, 1, 24, ())
    serve(rig, a, 2, "wxyz")  # takes what was let go of
    rig.run(release, a, 1)
    assert rig.run(match, a, 3, chain(*"abcdef"), 0).device_blocks == 6
    assert rig.run(match, a, 4, chain(*"abcd"), 0).device_blocks == 0, "its own window is gone"


# Groups of scratch: granted and given back with a sequence, never shared, and of no use to a hit.

SCRATCH = 1
LAYOUT = Layout(
    BLOCK_TOKENS,
    1,
    (PlaneGroup("full", pool="kv"), PlaneGroup("ring", 0, pool="kv")),
    tuple(Plane("k", 0, group, (8,), "uint8") for group in ("full", "ring")),
)


@pytest.fixture
def rig() -> Rig:
    return rig_of(LAYOUT, device=(10, 10), host=(0, 0))


def serve_scratch(rig: Rig, lease: str, number: int, prompt: str) -> OpenSequence:
    """Match, allocate, publish."""
    keys = chain(*prompt)
    rig.run(match, lease, number, keys, 0)
    rig.run(allocate, lease, number, len(prompt))
    sequence = rig.core.ledger.leases[lease].sequences[number]
    first = sequence.sealed
    rig.run(publish, lease, number, first, keys[first * KEY_BYTES :], len(prompt) - first)
    return sequence


def test_its_pages_stay_the_sequences_own_and_no_hit_needs_them(rig: Rig) -> None:
    lease = rig.lease()
    sequence = serve_scratch(rig, lease, 1, "abc")
    assert NO_PAGE not in sequence.tables[SCRATCH]
    assert sequence.own == [set(), set(sequence.tables[SCRATCH])]
    other = serve_scratch(rig, lease, 2, "abcd")
    assert other.hit_blocks == 3
    assert list(other.tables[SCRATCH][:3]) == [NO_PAGE] * 3
    assert len(other.own[SCRATCH]) == 1
    assert rig.free()[0] == 10 - 4 - 4
    rig.run(release, lease, 1)
    rig.run(release, lease, 2)
    assert rig.free()[0] == 10 - 4
    assert not any(rig.place().states[SCRATCH])
    assert not audit(rig.core.ledger).problems
    assert not verify_at_once(rig.core)


def test_a_sequence_that_lost_the_race_to_seal_keeps_its_own(rig: Rig) -> None:
    lease = rig.lease()
    for number in (1, 2):
        rig.run(match, lease, number, chain(*"ab"), 0)
        rig.run(allocate, lease, number, 2)
    rig.run(publish, lease, 1, 0, chain(*"ab"), 2)
    told = rig.run(publish, lease, 2, 0, chain(*"ab"), 2)
    assert told.duplicate_positions == (0, 1)
    assert [len(cells.pages) for cells in told.spares] == [2, 0]
    sequence = rig.core.ledger.leases[lease].sequences[2]
    assert set(sequence.tables[SCRATCH]) <= sequence.own[SCRATCH]
    assert not audit(rig.core.ledger).problems


def test_only_its_engine_says_how_long_it_is_used(rig: Rig) -> None:
    lease = rig.lease()
    sequence = serve_scratch(rig, lease, 1, "abc")
    rig.run(recycle, lease, 1, 3 * BLOCK_TOKENS, ())
    assert NO_PAGE not in sequence.tables[SCRATCH], "computed tokens say nothing of it"
    rig.run(partial(recycle, dead_blocks=(2,)), lease, 1, 0, ())
    assert [page == NO_PAGE for page in sequence.tables[SCRATCH]] == [True, True, False]
    assert rig.free()[0] == 10 - 3 - 1
    assert not audit(rig.core.ledger).problems


def test_a_layout_says_which_groups_are_scratch() -> None:
    assert layout_from_proto(layout_to_proto(LAYOUT)) == LAYOUT
    full = Layout(BLOCK_TOKENS, 1, (LAYOUT.groups[0], PlaneGroup("ring", pool="kv")), LAYOUT.planes)
    assert full.fingerprint != LAYOUT.fingerprint
    assert (LAYOUT.scratch_groups, full.scratch_groups) == ((SCRATCH,), ())


def test_a_policy_for_copies_has_none_of_scratch() -> None:
    groups = (*LAYOUT.groups, PlaneGroup("state", pool="kv", is_state=True))
    planes = (*LAYOUT.planes, Plane("k", 0, "state", (8,), "uint8"))
    rig = rig_of(Layout(BLOCK_TOKENS, 1, groups, planes), device=(12,) * 3, host=(0,) * 3)
    assert [kin.groups for kin in rig.place().kin] == [(2,)]


# The window rules against brute force: what a query reads is there, what none will read is free, whatever the steps.
#
# Every page has a tag that says whose block was written to it last; a step reads the tags of all that its queries
# attend to, token by token, so a page that was given away too early, or a hole read as page 0, is another block's
# tag.

FULL, WINDOW = 0, 1
Tag = tuple[int, int]


def bound_of(layout: Layout) -> int:
    """Pages of the windowed group in decode: ceil(W / bs) + 1 + ceil(S / bs)."""
    group = layout.groups[WINDOW]
    blocks = [-(-tokens // layout.block_tokens) for tokens in (group.window_tokens or 0, group.sink_tokens)]
    return sum(blocks) + 1


@dataclass
class Tape:
    """Last write to each page, on the device and on the host."""

    rig: Rig
    device: dict[Tag, Tag] = field(default_factory=dict)
    host: dict[Tag, Tag] = field(default_factory=dict)

    def settle(self) -> None:
        """Land all transfers, and their bytes."""
        for ticket, transfer in list(self.rig.mover.transfers.items()):
            for pair in transfer.pages:
                assert NO_PAGE not in (*pair.device_pages, *pair.host_pages), "a hole is never moved"
                for device, host in zip(pair.device_pages, pair.host_pages, strict=True):
                    if transfer.direction is Direction.LOAD:
                        self.device[pair.group, device] = self.host[pair.group, host]
                    else:
                        self.host[pair.group, host] = self.device[pair.group, device]
            self.rig.land(ticket)


@dataclass
class Decoder:
    """One sequence of an engine. ``computed``: tokens whose KV is there and verified; ``last``: its cursor."""

    tape: Tape
    lease: str
    id: int
    blocks: int
    computed: int = 0
    sealed: int = 0
    last: int = 0
    most: int = 0

    def __post_init__(self) -> None:
        self.rig = self.tape.rig
        self.layout = self.rig.model.layout
        self.keys = chain(*((self.id, i) for i in range(self.blocks)))
        self.rig.run(match, self.lease, self.id, self.keys, 0)

    @property
    def record(self) -> OpenSequence:
        return self.rig.core.ledger.leases[self.lease].sequences[self.id]

    def table(self, group: int) -> list[int]:
        return self.record.tables[group].tolist()

    def held(self) -> set[int]:
        return {block for block, page in enumerate(self.table(WINDOW)) if page != NO_PAGE}

    def needed_from(self, token: int) -> set[int]:
        """Blocks that a query at ``token`` or later attends to, of those in the table: p - W + 1 .. p, and sinks."""
        group, bs = self.layout.groups[WINDOW], self.layout.block_tokens
        end = self.record.blocks * bs
        reached = {t // bs for t in range(max(0, token - (group.window_tokens or 0) + 1), end)}
        return reached | {t // bs for t in range(min(group.sink_tokens, end))}

    def grow(self, tokens: int) -> None:
        blocks = -(-tokens // self.layout.block_tokens)
        if blocks > self.record.blocks:  # an engine asks for none that it has, and each call recounts the pool
            self.rig.run(allocate, self.lease, self.id, blocks)

    def write(self, count: int) -> None:
        """The KV of ``count`` more tokens, accepted or not. Only a page of its own is written to."""
        for block in {t // self.layout.block_tokens for t in range(self.computed, self.computed + count)}:
            for group in (FULL, WINDOW):
                page = self.table(group)[block]
                assert page in self.record.own[group]
                self.tape.device[group, page] = (self.id, block)

    def reads(self, count: int) -> list[tuple[Tag, Tag]]:
        """Every page that the queries of the next ``count`` tokens attend to, with what must stand there."""
        group, bs = self.layout.groups[WINDOW], self.layout.block_tokens
        windowed: set[int] = set()
        for query in range(self.computed, self.computed + count):
            windowed |= {t // bs for t in range(max(0, query - (group.window_tokens or 0) + 1), query + 1)}
            windowed |= {t // bs for t in range(min(group.sink_tokens, query + 1))}
        out = [((WINDOW, self.table(WINDOW)[block]), (self.id, block)) for block in sorted(windowed)]
        last = (self.computed + count - 1) // bs
        return out + [((FULL, self.table(FULL)[block]), (self.id, block)) for block in range(last + 1)]

    def check(self, reads: list[tuple[Tag, Tag]]) -> None:
        for page, tag in reads:
            assert page[1] != NO_PAGE, f"a query reads a hole at block {tag[1]}"
            assert self.tape.device[page] == tag

    def publish(self) -> None:
        count = self.computed // self.layout.block_tokens - self.sealed
        if count > 0:
            self.sealed = self.rig.run(publish, self.lease, self.id, self.sealed, b"", count).sealed_blocks

    def recycle(self) -> None:
        """The rule: exactly what no later query reaches is gone, and the cursor never goes back."""
        before, free = self.held(), self.rig.free()[WINDOW]
        answer = self.rig.run(recycle, self.lease, self.id, self.computed, ())
        assert self.held() == before & self.needed_from(self.computed)
        assert self.needed_from(self.computed) <= self.held()
        assert answer.cursors[0] >= self.last
        assert self.rig.free()[WINDOW] == free + answer.pages
        assert NO_PAGE not in self.table(FULL)
        self.last = answer.cursors[0]
        self.most = max(self.most, len(self.held()))


def decoders(layout: Layout, count: int, blocks: int, spare: int, *, host: bool = False) -> list[Decoder]:
    """Sequences of one lease over a windowed pool of ``count`` bounds and ``spare`` pages."""
    device = (count * blocks, count * bound_of(layout) + spare)
    rig = rig_of(layout, device=device, host=(4 * blocks, 4 * blocks) if host else None)
    tape, lease = Tape(rig), rig.lease()
    return [Decoder(tape, lease, i, blocks) for i in range(1, count + 1)]


def step(one: Decoder, count: int, accepted: int) -> None:
    """One step of ``count`` tokens, of which the first ``accepted`` stay."""
    one.grow(one.computed + count)
    one.write(count)
    one.check(one.reads(count))
    one.computed += accepted


def whole(ones: list[Decoder]) -> None:
    """Release all: nothing is left but what is cached."""
    rig = ones[0].rig
    for one in ones:
        rig.run(release, one.lease, one.id)
    for pool in rig.place().pools:
        assert pool.counts[1] == 0
        assert pool.free + pool.counts[2] == pool.usable


@looped("block", [32], [16, 32, 64, 128])
@pytest.mark.parametrize(("window", "sinks"), [(128, 0), (200, 32), (129, 1), (64, 100), (1, 0)])
def test_prefill_in_chunks_and_decode_with_rejected_tokens(block: int, window: int, sinks: int) -> None:
    """Chunks smaller and larger than the window; drafts of up to 5 tokens; published late, early or not at all."""
    rng = random.Random(block * window + sinks)
    tokens, largest = 8 * block + 3 * window, window + block
    layout = layout_of(window, sinks, block)
    ones = decoders(layout, 2, tokens // block + 2, 2 * (largest // block + 2))
    for one in ones:
        prompt = tokens - rng.randrange(2 * block + window)
        while one.computed < prompt:
            count = min(prompt - one.computed, rng.choice((1, block, max(1, window // 3), largest)))
            step(one, count, count)
            if rng.random() < 0.7:
                one.publish()
            one.recycle()
        one.most = 0
        while one.computed < tokens:
            drafted = rng.randint(1, 5)
            step(one, drafted, rng.randint(1, drafted))
            if rng.random() < 0.1:
                one.publish()
            one.recycle()
        drafts = -(-4 // block)  # a page that drafted tokens have begun
        assert one.most <= bound_of(layout) + drafts
    whole(ones)


@looped("block", [32], [16, 32, 64, 128])
@pytest.mark.parametrize(("window", "sinks"), [(256, 0), (256, 64), (100, 30), (17, 1)])
def test_decode_never_holds_more_than_its_bound(block: int, window: int, sinks: int) -> None:
    """The pool has just the bound for each sequence: the next one would find no page."""
    layout = layout_of(window, sinks, block)
    tokens = 2 * window + 6 * block
    ones = decoders(layout, 3, tokens // block + 1, 0)
    while ones[0].computed < tokens:
        for one in ones:
            step(one, 1, 1)
            if one.id > 1:
                one.publish()
            if one.computed % 7 == 0 or one.computed % block == 0:
                one.recycle()
    assert all(one.most <= bound_of(layout) for one in ones)
    whole(ones)


@pytest.mark.parametrize("counted", ["retired", "launched"])
def test_steps_in_flight_keep_their_pages_where_only_retired_tokens_are_told(counted: str) -> None:
    """``computed_tokens`` is how an overlapped engine says what is in flight: it counts steps that have ended."""
    layout = layout_of(8, 4, 4)
    [one, other] = decoders(layout, 2, 20, 8)
    width = 5
    flying: list[list[tuple[Tag, Tag]]] = []
    lost = 0
    for _ in range(12):
        one.grow(one.computed + width)
        one.write(width)
        flying.append(one.reads(width))
        one.computed += width
        told = one.computed - len(flying) * width if counted == "retired" else one.computed
        one.rig.run(recycle, one.lease, one.id, told, ())
        step(other, 4, 4)  # takes and overwrites what has come back
        other.recycle()
        lost += sum(one.tape.device[page] != tag for reads in flying for page, tag in reads)
        if len(flying) == 2:
            flying.pop(0)
    assert (lost == 0) == (counted == "retired")


@looped("block", [16], [16, 64])
@pytest.mark.parametrize(("window", "sinks"), [(128, 0), (100, 40), (130, 64)])
def test_a_sequence_with_holes_leaves_and_comes_back(block: int, window: int, sinks: int) -> None:
    """Only live pages travel; the holes are where they were, and decoding goes on with the right bytes."""
    rng = random.Random(window)
    layout = layout_of(window, sinks, block)
    tokens = 3 * window + 6 * block
    ones = decoders(layout, 2, tokens // block + 1, 4, host=True)
    while any(one.computed < tokens for one in ones):
        one = rng.choice([one for one in ones if one.computed < tokens])
        for _ in range(rng.randint(1, block)):
            if one.computed < tokens:
                step(one, 1, 1)
        if rng.random() < 0.5:
            one.publish()
        one.recycle()
        if rng.random() < 0.2:
            held, host = one.held(), one.rig.host.pools[WINDOW]
            one.rig.run(swap_out, one.lease, one.id)
            one.tape.settle()
            assert host.counts[1] == len(held), "live pages alone are on the host"
            one.rig.run(swap_in, one.lease, one.id)
            one.tape.settle()
            assert one.held() == held
            one.check(one.reads(0))
            one.check([((WINDOW, one.table(WINDOW)[at]), (one.id, at)) for at in held if at * block < one.computed])
    whole(ones)
    assert ones[0].rig.host.pools[WINDOW].counts[1] == 0


@looped("window", [1, 3, 4, 5, 7, 8, 9, 13])
@looped("sinks", [0, 3, 4])
@looped("block", [4], [4, 16])
def test_a_hit_has_its_last_window_and_its_sinks_and_holes_between(window: int, sinks: int, block: int) -> None:
    """Full pages of [0, n), windowed ones of [n - W, n), since its last token may be computed again, and sinks."""
    layout = layout_of(window, sinks, block)
    [one, _] = decoders(layout, 2, 10, 40)
    for _ in range(10):
        step(one, block, block)
    one.publish()
    for n in range(1, 11):
        found = one.rig.run(match, one.lease, 100 + n, one.keys, n)
        assert found.device_blocks == n
        needed = {t // block for t in range(max(0, n * block - window), n * block)}
        needed |= {t // block for t in range(min(sinks, n * block))}
        assert list(found.tables[FULL].pages) == one.table(FULL)[:n]
        expected = [page if at in needed else NO_PAGE for at, page in enumerate(one.table(WINDOW)[:n])]
        assert list(found.tables[WINDOW].pages) == expected
        again = one.rig.run(recycle, one.lease, 100 + n, n * block, ())
        assert again.pages == 0, "shared pages are let go of, not freed"
        one.rig.run(release, one.lease, 100 + n)


def test_what_was_recycled_before_it_was_published_is_published_as_a_hole() -> None:
    layout = layout_of(8, 4, 4)
    [one, other] = decoders(layout, 2, 8, 8)
    for _ in range(8):
        step(one, 4, 4)
        one.recycle()
    one.publish()
    index, states = one.rig.model.blocks.index, one.rig.place().states[WINDOW]
    rows = index.path(one.record.anchor)
    assert [states[row] != 0 for row in rows] == [True] + [False] * 5 + [True] * 2
    hits = [other.rig.run(match, other.lease, 50 + n, one.keys, n).device_blocks for n in range(1, 9)]
    assert hits == [1] * 7 + [8], "a hit ends where its window is whole"
