"""The window rules against brute force: what a query reads is there, what none will read is free, whatever the steps.

Every page has a tag that says whose block was written to it last; a step reads the tags of all that its queries attend
to, token by token, so a page that was given away too early, or a hole read as page 0, is another block's tag.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from cachesvc.flows.allocate import allocate, swap_in, swap_out
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import recycle, release
from cachesvc.ledger.sequences import OpenSequence
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.words import NO_PAGE, Direction
from tests.long_cases import looped
from tests.unit.rigs.ledger_rig import Rig, chain, rig_of

FULL, WINDOW = 0, 1
Tag = tuple[int, int]


def layout_of(window: int, sinks: int, block: int) -> Layout:
    planes = (Plane("k", 0, "full", (8,), "uint8"), Plane("k", 1, "window", (8,), "uint8"))
    return Layout(block, 1, (PlaneGroup("full"), PlaneGroup("window", window, sinks)), planes)


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
