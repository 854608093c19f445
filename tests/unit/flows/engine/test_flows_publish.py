"""Match and publish: turns, owners, duplicates, contradicting keys, and blocks that are being computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest

from cachesvc.flows import pinning
from cachesvc.flows.allocate import allocate, extend, refill_stock, swap_out
from cachesvc.flows.core import Limits, resolve
from cachesvc.flows.leases import close_lease
from cachesvc.flows.match import match, prefetch
from cachesvc.flows.publish import Blocked, Known, classify, publish, publish_many
from cachesvc.flows.recycle import recycle, release
from cachesvc.flows.registration import PoolRequest, RegisterRequest, register
from cachesvc.model.answers import GroupCells, Matched, Published, Publishes, Wait
from cachesvc.model.errors import (
    CacheError,
    Conflict,
    InvalidRequest,
    KeyMisplaced,
    LeaseLost,
    LimitExceeded,
    LoadFailed,
    NotFound,
    NotOwned,
    Unavailable,
)
from cachesvc.model.words import KEY_BYTES, Direction, WritePolicy
from cachesvc.policy.eviction import RequestHint, hinted, retention_of
from tests.unit.flows.engine.test_flows_stock import hosted
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, prefill, rig_of, serve, windowed


@pytest.fixture
def rig() -> Rig:
    return rig_of(one_group(), device=(16,))


def open_with(rig: Rig, lease: str, sequence: int, prompt: str, blocks: int | None = None) -> list[int]:
    rig.run(match, lease, sequence, chain(*prompt), 0)
    return list(rig.run(allocate, lease, sequence, blocks or len(prompt)).tables[0].pages)


def test_a_published_prefix_is_hit_in_place(rig: Rig) -> None:
    a, b = rig.lease("a"), rig.lease("b")
    pages = open_with(rig, a, 1, "abcd")
    assert rig.run(match, b, 1, chain(*"abcd"), 0).device_blocks == 0, "not before it is published"
    rig.run(publish, a, 1, 0, b"", 3)
    hit = rig.run(match, b, 2, chain(*"abcx"), 0)
    assert (hit.device_blocks, hit.host_blocks, hit.computing_blocks) == (3, 0, 0)
    assert list(hit.tables[0].pages) == pages[:3]
    assert rig.run(match, b, 3, chain(*"abcd"), 2).device_blocks == 2


def test_a_publish_comes_in_turn_and_once(rig: Rig) -> None:
    lease = rig.lease()
    open_with(rig, lease, 1, "abc")
    with pytest.raises(Conflict, match="comes next"):
        rig.run(publish, lease, 1, 1, b"", 1)
    rig.run(publish, lease, 1, 0, b"", 2)
    with pytest.raises(Conflict, match="sealed already"):
        rig.run(publish, lease, 1, 0, b"", 2)
    with pytest.raises(NotOwned, match="allocate first"):
        rig.run(publish, lease, 1, 2, chain(*"abcd")[2 * KEY_BYTES :], 2)
    assert len(rig.device_keys()) == 2


def test_keys_must_agree_with_match_and_be_complete(rig: Rig) -> None:
    lease = rig.lease()
    open_with(rig, lease, 1, "ab", blocks=4)
    with pytest.raises(InvalidRequest, match="contradict"):
        rig.run(publish, lease, 1, 0, chain(*"xy"), 0)
    with pytest.raises(InvalidRequest, match="not known"):
        rig.run(publish, lease, 1, 0, b"", 3)
    with pytest.raises(InvalidRequest, match="keys were sent"):
        rig.run(publish, lease, 1, 0, chain(*"ab"), 3)
    with pytest.raises(InvalidRequest, match="not a multiple"):
        rig.run(publish, lease, 1, 0, b"short", 0)
    assert rig.run(publish, lease, 1, 0, chain(*"abcd"), 0).sealed_blocks == 4


@pytest.mark.parametrize("bad", ["below another prefix", "below none", "below another block", "named twice"])
def test_a_broken_chain_seals_nothing(rig: Rig, bad: str) -> None:
    """Found by reading: the blocks before the broken one were sealed but never pinned."""
    a, b = rig.lease("a"), rig.lease("b")
    prefill(rig, a, 1, "xy")
    rig.run(match, b, 1, b"", 0)
    rig.run(allocate, b, 1, 3)
    y = chain(*"xy")[KEY_BYTES:]
    keys = {
        "below another prefix": chain("a") + y,
        "below none": y + chain("a"),
        "below another block": chain("x") + chain("x"),
        "named twice": chain("a") + chain("a"),
    }[bad]
    with pytest.raises(KeyMisplaced, match="chain the keys"):
        rig.run(publish, b, 1, 0, keys, 0)
    assert chain("a") not in rig.device_keys()
    assert rig.run(publish, b, 1, 0, chain(*"abc"), 0).sealed_blocks == 3


@pytest.mark.parametrize("limit", [0, 1, 3, 9])
def test_a_hit_is_as_long_as_the_caller_wants_it(rig: Rig, limit: int) -> None:
    a = rig.lease("a")
    prefill(rig, a, 1, "abcd")
    answer = rig.run(match, a, 2, chain(*"abcde"), limit)
    assert answer.device_blocks == len(answer.tables[0].pages) == min(limit or 4, 4)
    rig.run(allocate, a, 2, 4)
    rig.run(release, a, 2)


def test_the_first_to_publish_wins(rig: Rig) -> None:
    a, b = rig.lease("a"), rig.lease("b")
    mine, theirs = open_with(rig, a, 1, "abc"), open_with(rig, b, 7, "abc")
    rig.run(publish, a, 1, 0, b"", 2)
    answer = rig.run(publish, b, 7, 0, b"", 3)
    assert answer.duplicate_positions == (0, 1)
    assert list(answer.duplicates[0].pages) == mine[:2]
    assert list(answer.spares[0].pages) == theirs[:2]
    assert list(rig.run(match, a, 2, chain(*"abc"), 0).tables[0].pages) == [*mine[:2], theirs[2]]
    free = rig.free()[0]
    rig.run(recycle, b, 7, 0, (GroupCells(0, 0, tuple(theirs[:2])),))
    assert rig.free()[0] == free + 2
    for lease, sequence in ((a, 1), (a, 2), (b, 7)):
        rig.run(release, lease, sequence)
    assert rig.free()[0] == 16 - 3


def test_match_tells_what_others_compute_and_counts_stay_exact(rig: Rig) -> None:
    """Found by reading: publishing keys that were never declared took away another sequence's declaration."""
    a, b, c = rig.lease("a"), rig.lease("b"), rig.lease("c")
    open_with(rig, a, 1, "abc")
    rig.run(match, b, 1, b"", 0)
    rig.run(allocate, b, 1, 3)
    assert rig.run(match, c, 1, chain(*"abcd"), 0).computing_blocks == 3
    rig.run(publish, b, 1, 0, chain(*"a"), 0)
    hit = rig.run(match, c, 2, chain(*"abcd"), 0)
    assert (hit.device_blocks, hit.computing_blocks) == (1, 2)
    rig.run(release, b, 1)
    assert rig.run(match, c, 3, chain(*"abcd"), 0).computing_blocks == 2
    rig.run(release, a, 1)
    assert rig.run(match, c, 4, chain(*"abcd"), 0).computing_blocks == 0
    assert rig.model.computing == {}


def test_blocks_out_of_the_stock_are_computed_too(rig: Rig) -> None:
    lease = rig.lease()
    rig.run(match, lease, 1, chain(*"ab"), 0)
    stock = rig.run(refill_stock, lease, (2,))
    assert rig.run(extend, lease, 1, stock) == 2
    assert rig.run(match, lease, 2, chain(*"abc"), 0).computing_blocks == 2
    with pytest.raises(NotOwned):
        rig.run(extend, lease, 1, stock)
    rig.run(release, lease, 1)
    assert rig.free() == [16]


def test_a_stock_page_of_an_older_generation_is_refused(rig: Rig) -> None:
    lease = rig.lease()
    rig.run(match, lease, 1, b"", 0)
    [old] = rig.run(refill_stock, lease, (1,))
    rig.run(recycle, lease, 0, 0, (old,))
    [new] = rig.run(refill_stock, lease, (1,))
    assert (old.pages, old.generations) != (new.pages, new.generations)
    stale = GroupCells(0, 0, new.pages, (new.generations[0] - 1,))
    for pages in (stale, GroupCells(0, 0, (15,), (1,)), old):
        with pytest.raises(NotOwned):
            rig.run(extend, lease, 1, (pages,))
    for pages in (GroupCells(0, 0, (*new.pages, *new.pages), new.generations * 2), GroupCells(0, 0, new.pages, ())):
        with pytest.raises(InvalidRequest):
            rig.run(extend, lease, 1, (pages,))
    assert rig.run(extend, lease, 1, (new,)) == 1


def test_requests_that_cannot_be(rig: Rig) -> None:
    lease = rig.lease()
    open_with(rig, lease, 1, "ab")
    with pytest.raises(Conflict, match="open already"):
        rig.run(match, lease, 1, b"", 0)
    with pytest.raises(InvalidRequest, match="at least"):
        rig.run(allocate, lease, 1, 1)
    with pytest.raises(LimitExceeded):
        rig.run(allocate, lease, 1, 1 << 20)
    with pytest.raises(NotFound):
        rig.run(release, lease, 2)
    rig.run(release, lease, 1)
    with pytest.raises(NotFound):
        rig.run(release, lease, 1)
    with pytest.raises(NotFound):
        rig.run(match, "unknown", 1, b"", 0)
    close_lease(rig.core, lease, quiesced=True)
    with pytest.raises(LeaseLost):
        rig.run(publish, lease, 1, 0, chain("a"), 0)
    other = rig.lease("b")
    rig.core.ledger.draining = True
    with pytest.raises(Unavailable):
        rig.run(match, other, 1, b"", 0)


def test_replicas_share_keys_but_not_pages() -> None:
    rig = rig_of(one_group(), device=(4,), replicas=2)
    a, b = rig.lease("a", 0), rig.lease("b", 1)
    prefill(rig, a, 1, "ab")
    assert rig.run(match, b, 1, chain(*"ab"), 0).device_blocks == 0
    rig.run(release, b, 1)
    prefill(rig, b, 2, "ab")
    assert rig.device_keys(0) == rig.device_keys(1)
    assert len(rig.model.blocks.index) == 2


def test_a_block_used_through_another_replica_can_still_be_evicted_here() -> None:
    """Found by reading: its entry went stale and the block never came back to this replica's heap."""
    rig = rig_of(one_group(), device=(2,), replicas=2)
    a, b = rig.lease("a", 0), rig.lease("b", 1)
    serve(rig, a, 1, "ab")
    serve(rig, b, 1, "ab")
    serve(rig, b, 2, "ab")
    serve(rig, a, 3, "xy")
    assert rig.device_keys(0) == {chain("x"), chain(*"xy")[KEY_BYTES:]}


def test_a_windowed_page_that_is_gone_is_sealed_anew() -> None:
    rig = rig_of(windowed(window_tokens=8), device=(16, 4))
    a = rig.lease()
    serve(rig, a, 1, "abcd")
    serve(rig, a, 2, "xyz")  # takes windowed pages of the first prompt, its full pages stay
    assert rig.run(match, a, 3, chain(*"abcd"), 0).device_blocks < 4
    rig.run(release, a, 3)
    assert len(rig.device_keys()) == 7
    serve(rig, a, 4, "abcd")
    assert rig.run(match, a, 5, chain(*"abcd"), 0).device_blocks == 4


def test_write_through_stores_what_many_sequences_publish_in_one_transfer() -> None:
    rig = rig_of(one_group(), device=(16,), host=(4,), policy=WritePolicy.WRITE_THROUGH)
    a = rig.lease()
    for number, prompt in enumerate(("ab", "cd", "e"), 1):
        rig.run(match, a, number, chain(*prompt), 0)
        rig.run(allocate, a, number, len(prompt))
    told: list[int] = []
    rig.run(publish_many, a, Publishes((1, 2, 3), (0, 0, 0), (0, 2, 4, 5), b""), range(3), told)
    assert told == [2, 2, 1]
    (transfer,) = rig.mover.all
    assert transfer.direction is Direction.STORE
    assert len(transfer.pages[0].device_pages) == 4, "as many as the host has room for"
    rig.settle()
    assert len(rig.host_keys()) == 4


# Rules of a publish, written once: a batch stops where a single call is refused, and for the same reason.


class Entry(NamedTuple):
    """One publish: the sequence, its first block, the blocks, and their keys (empty: those of Match)."""

    rig: Rig
    lease: str
    sequence: int
    first: int
    blocks: int
    keys: bytes = b""


def opened(prompt: str = "abcd", other: str = "wxyz") -> tuple[Rig, str]:
    """Sequences 1 and 2 with pages for all their blocks but the last of sequence 1."""
    rig = rig_of(one_group(), device=(16,), host=(16,))
    a = rig.lease()
    for number, keys, blocks in ((1, prompt, len(prompt) - 1), (2, other, len(other))):
        rig.run(match, a, number, chain(*keys), 0)
        rig.run(allocate, a, number, blocks)
    return rig, a


def of_no_sequence() -> Entry:
    return Entry(*opened(), 7, 0, 1)


def sealed_before() -> Entry:
    rig, a = opened()
    rig.run(publish, a, 1, 0, b"", 1)
    return Entry(rig, a, 1, 0, 1)


def out_of_order() -> Entry:
    return Entry(*opened(), 1, 1, 1)


def without_pages() -> Entry:
    return Entry(*opened(), 1, 0, 4)


def against_match() -> Entry:
    return Entry(*opened(), 1, 0, 2, chain(*"ax"))


def without_keys() -> Entry:
    rig, a = opened()
    rig.run(allocate, a, 2, 5)
    return Entry(rig, a, 2, 0, 5)


def below_another() -> Entry:
    rig, a = opened("abcd", "wbyz")
    rig.run(publish, a, 2, 0, b"", 1)
    rig.run(match, a, 3, b"", 0)
    rig.run(allocate, a, 3, 2)
    return Entry(rig, a, 3, 0, 2, chain(*"ab")[:KEY_BYTES] + chain("w"))


def named_twice() -> Entry:
    rig, a = opened()
    rig.run(match, a, 3, b"", 0)
    rig.run(allocate, a, 3, 2)
    return Entry(rig, a, 3, 0, 2, chain("n") * 2)


def after_a_failed_load() -> Entry:
    rig, a = hosted("ab")
    rig.run(match, a, 1, chain(*"abc"), 0)
    rig.run(allocate, a, 1, 3)
    for ticket in list(rig.mover.transfers):
        rig.land(ticket, "no bytes")
    return Entry(rig, a, 1, 2, 1)


REFUSED: list[tuple[Callable[[], Entry], type[CacheError]]] = [
    (of_no_sequence, NotFound),
    (sealed_before, Conflict),
    (out_of_order, Conflict),
    (without_pages, NotOwned),
    (against_match, InvalidRequest),
    (without_keys, InvalidRequest),
    (below_another, KeyMisplaced),
    (named_twice, KeyMisplaced),
    (after_a_failed_load, LoadFailed),
]


def batch(entry: Entry) -> Publishes:
    return Publishes((entry.sequence,), (entry.first,), (0, entry.blocks), entry.keys)


@pytest.mark.parametrize(("make", "error"), REFUSED)
def test_a_batch_stops_where_a_single_call_is_refused(make: Callable[[], Entry], error: type[CacheError]) -> None:
    entry = make()
    rig, lease = entry.rig, entry.lease
    call = resolve(rig.core.ledger, lease, rig.now)
    fresh, stop = classify(call, batch(entry), range(1))
    assert (list(fresh.keys), type(stop)) == ([], error)
    told: list[int] = []
    rig.run(publish_many, lease, batch(entry), range(1), told)
    assert told == []
    with pytest.raises(error) as refused:
        rig.run(publish, lease, entry.sequence, entry.first, entry.keys, entry.blocks)
    assert str(refused.value) == str(stop)
    rig.check()


def test_one_that_waits_stops_a_batch_and_a_single_call_waits() -> None:
    rig, a = opened()
    rig.run(swap_out, a, 1)
    call = resolve(rig.core.ledger, a, rig.now)
    _, stop = classify(call, Publishes((1,), (0,), (0, 1), b""), range(1))
    waits = rig.once(publish, a, 1, 0, b"", 1)
    assert isinstance(stop, Blocked)
    assert isinstance(waits, Wait)
    assert stop.tickets == waits.tickets


def test_what_the_index_has_goes_by_itself_behind_what_is_new() -> None:
    rig, a = opened("abcd", "axyz")
    rig.run(publish, a, 1, 0, b"", 1)
    call = resolve(rig.core.ledger, a, rig.now)
    both = Publishes((1, 2), (1, 0), (0, 2, 4), b"")
    fresh, stop = classify(call, both, range(2))
    assert (len(fresh.tables), fresh.keys) == (1, [chain(*"ab")[KEY_BYTES:], chain(*"abc")[2 * KEY_BYTES :]])
    assert isinstance(stop, Known), "its first block was published by the other sequence"
    told: list[int] = []
    rig.run(publish_many, a, both, range(2), told)
    assert told == [3]
    published = rig.run(publish, a, 2, 0, b"", 2)
    assert isinstance(published, Published)
    assert published.duplicate_positions == (0,)


@pytest.mark.parametrize("held", [(), (2,)])
def test_an_entry_behind_its_own_sequence_or_beside_a_waiting_one_is_left_for_later(held: tuple[int, ...]) -> None:
    rig, a = opened()
    named = Publishes((1, 2 if held else 1), (0, 0 if held else 1), (0, 1, 2), b"")
    fresh, stop = classify(resolve(rig.core.ledger, a, rig.now), named, range(2), held)
    assert (len(fresh.keys), stop) == (1, None)


def test_two_entries_with_one_new_key_are_not_both_new() -> None:
    rig, a = opened("abcd", "abyz")
    fresh, stop = classify(resolve(rig.core.ledger, a, rig.now), Publishes((1, 2), (0, 0), (0, 1, 2), b""), range(2))
    assert (len(fresh.keys), stop) == (1, None)
    fresh, stop = classify(resolve(rig.core.ledger, a, rig.now), Publishes((1, 2), (0, 0), (0, 2, 4), b""), range(2))
    assert (len(fresh.keys), stop) == (2, None)


# Hints of engines: they move blocks within the order of their own model, and a false one costs its model alone.

BLOCKS = 8
DEFAULT, ONCE, KEEP = RequestHint


def serve_as(
    rig: Rig, lease: str, number: int, names: str, hint: RequestHint = DEFAULT, *, apart: bool = False
) -> Matched:
    """A request for a prompt; ``apart``: its blocks are published one by one."""
    keys = chain(*names)
    hit = rig.run(match, lease, number, keys, 0, None, 0.0, None, hint)
    assert isinstance(hit, Matched)
    rig.run(allocate, lease, number, len(names))
    for first in range(hit.device_blocks, len(names)) if apart else ():
        rig.run(publish, lease, number, first, b"", 1)
    if not apart and hit.device_blocks < len(names):
        rig.run(publish, lease, number, hit.device_blocks, b"", len(names) - hit.device_blocks)
    rig.run(release, lease, number)
    rig.check()
    return hit


def hits(rig: Rig, lease: str, number: int, names: str) -> int:
    """Blocks of a prompt that are there, without a trace in the order."""
    hit = rig.run(match, lease, number, chain(*names), 0, None, 0.0, None, ONCE)
    rig.run(release, lease, number)
    assert isinstance(hit, Matched)
    return hit.device_blocks + hit.host_blocks


@pytest.mark.parametrize("apart", [False, True])
def test_blocks_that_will_not_return_go_before_older_ones(apart: bool) -> None:
    rig = rig_of(one_group(), device=(BLOCKS,))
    lease = rig.lease()
    serve_as(rig, lease, 1, "abc")
    serve_as(rig, lease, 2, "xyz", ONCE, apart=apart)
    serve_as(rig, lease, 3, "mnopq")
    assert (hits(rig, lease, 4, "abc"), hits(rig, lease, 5, "xyz")) == (3, 0), "LRU would have dropped abc"


def test_a_use_without_a_hint_makes_them_blocks_like_others() -> None:
    rig = rig_of(one_group(), device=(BLOCKS,))
    lease = rig.lease()
    serve_as(rig, lease, 1, "xyz", ONCE)
    serve_as(rig, lease, 2, "abc")
    serve_as(rig, lease, 3, "xyz")
    serve_as(rig, lease, 4, "mnopq")
    assert (hits(rig, lease, 5, "xyz"), hits(rig, lease, 6, "abc")) == (3, 0)


def test_a_request_that_will_not_return_refreshes_nothing_that_it_hits() -> None:
    rig = rig_of(one_group(), device=(BLOCKS,))
    lease = rig.lease()
    serve_as(rig, lease, 1, "abc")
    serve_as(rig, lease, 2, "xyz")
    serve_as(rig, lease, 3, "abc", ONCE)
    serve_as(rig, lease, 4, "mnopq")
    assert (hits(rig, lease, 5, "abc"), hits(rig, lease, 6, "xyz")) == (0, 3)


def test_blocks_that_are_kept_stay_for_one_more_turn_and_no_longer() -> None:
    rig = rig_of(one_group(), device=(BLOCKS,))
    lease = rig.lease()
    serve_as(rig, lease, 1, "abc", KEEP)
    serve_as(rig, lease, 2, "mnopq")
    serve_as(rig, lease, 3, "rs")
    assert hits(rig, lease, 4, "abc") == 3, "LRU would have dropped it for rs"
    for number in range(5, 9):
        serve_as(rig, lease, number, "".join(chr(number * 40 + at) for at in range(5)))
    assert hits(rig, lease, 9, "abc") < 3, "a hint that proves false ends"


def test_the_same_hint_on_all_is_none() -> None:
    left = []
    for hint in RequestHint:
        rig = rig_of(one_group(), device=(BLOCKS,))
        lease = rig.lease()
        for number, names in enumerate(("abc", "xyz", "abq", "mno"), start=1):
            serve_as(rig, lease, number, names, hint if hint is KEEP else DEFAULT)
        left.append([hits(rig, lease, 9 + at, names) for at, names in enumerate(("abc", "xyz", "abq", "mno"))])
    assert left[0] == left[2]


def test_blocks_that_will_not_return_are_not_copied_when_they_are_sealed() -> None:
    for hint, copies in ((ONCE, 0), (DEFAULT, 3), (KEEP, 3)):
        rig = rig_of(one_group(), device=(BLOCKS,), host=(BLOCKS,), policy=WritePolicy.WRITE_THROUGH)
        lease = rig.lease()
        serve_as(rig, lease, 1, "abc", hint)
        host = rig.model.blocks.host.pools[0]
        assert host.usable - host.free == copies, hint


@pytest.mark.parametrize("apart", [False, True])
def test_blocks_that_will_not_return_are_no_measure_of_how_long_blocks_stay(apart: bool) -> None:
    rig = rig_of(one_group(), device=(BLOCKS,))
    lease, counts = rig.lease(), rig.model.replicas[0].place.counts
    rig.core.ledger.mark_time(0.0)
    serve_as(rig, lease, 1, "abc")
    rig.core.ledger.mark_time(1e6)
    serve_as(rig, lease, 2, "xyz", ONCE, apart=apart)
    serve_as(rig, lease, 3, "mnopq")
    assert (counts.left, counts.ages.count) == (3, 0), "they would say that blocks stay for weeks"
    serve_as(rig, lease, 4, "rstuv")
    assert counts.left - counts.ages.count == 3, "others are counted"


def test_what_a_tenant_says_of_its_requests_changes_no_hit_of_another() -> None:
    def served(hint_of: Callable[[int], RequestHint]) -> tuple[list[int], list[int]]:
        ours = rig_of(one_group(), device=(BLOCKS,))
        request = RegisterRequest("other", one_group(), b"", ("gpu-0",), PoolRequest((BLOCKS,)), PoolRequest((0,)))
        register(ours.core, ours.vault, request, 0.0)
        theirs = replace(ours, model=ours.core.ledger.models[2])
        leases, dice = (ours.lease("a"), theirs.lease("b")), random.Random(3)
        found: tuple[list[int], list[int]] = ([], [])
        for number in range(1, 40):
            prompt = f"{dice.randrange(4)}x{dice.randrange(6)}"
            for at, (rig, lease, hint) in enumerate(zip((ours, theirs), leases, (KEEP, hint_of(number)), strict=True)):
                found[at].append(serve_as(rig, lease, number, prompt, hint).device_blocks)
        return found

    plain, kept = served(lambda _: DEFAULT), served(lambda _: KEEP)
    mixed = served(lambda number: ONCE if number % 2 else KEEP)
    assert plain[0] == kept[0] == mixed[0]
    assert plain[1] == kept[1] != mixed[1]


def test_a_number_that_is_no_hint_is_refused() -> None:
    assert [retention_of(number) for number in range(3)] == list(RequestHint)
    with pytest.raises(InvalidRequest, match="retention is 3; it is 0"):
        retention_of(3)
    assert [hinted(5, hint, 100) for hint in RequestHint] == [5, 0, 105]


# A prefetch is no sequence: it has a record of its own, which holds the prefix until its loads have ended.


def with_host_copies(*prompts: str) -> tuple[Rig, str]:
    """A rig whose host alone has the prompts."""
    rig = rig_of(one_group(), device=(16,), host=(32,), policy=WritePolicy.WRITE_THROUGH)
    a = rig.lease()
    for prompt in prompts:
        serve(rig, a, 1, prompt)
    rig.settle()
    pinning.evict(rig.core, 1, "device", 0)
    return rig, a


def test_it_takes_no_sequence_of_the_lease_and_holds_its_prefix_while_it_loads() -> None:
    rig, a = with_host_copies("abcd")
    rig.core.limits = Limits(sequences_per_lease=1)
    rig.run(match, a, 1, b"", 0)
    answer = rig.run(prefetch, a, chain(*"abcd"))
    assert [ticket.blocks for ticket in answer.tickets] == [4]
    lease = rig.core.ledger.leases[a]
    assert (list(lease.sequences), len(lease.prefetches)) == ([1], 1)
    assert rig.host.counts.pinned == 4
    rig.settle()
    assert lease.prefetches == {}
    assert (rig.host.counts.pinned, rig.place().counts.pinned, len(rig.device_keys())) == (0, 0, 4)
    place = rig.place()
    assert not any(place.used[row] for row in rig.model.blocks.index.rows.values()), "no request has used it yet"


@pytest.mark.parametrize("error", ["", "broken"])
@pytest.mark.parametrize("lose", [False, True])
def test_however_its_load_ends_it_holds_nothing_afterwards(error: str, lose: bool) -> None:
    rig, a = with_host_copies("abcd")
    [ticket] = rig.run(prefetch, a, chain(*"abcd")).tickets
    if lose:
        close_lease(rig.core, a, quiesced=False)
        rig.check()
        assert (rig.host.counts.pinned, rig.place().counts.pinned) == (0, 0)
    rig.land(ticket.id, error)
    assert len(rig.device_keys()) == (0 if error else 4)
    assert (rig.host.counts.pinned, rig.place().counts.pinned) == (0, 0)
    assert all(lease.prefetches == {} for lease in rig.core.ledger.leases.values())


def test_what_is_in_place_or_nowhere_is_answered_at_once() -> None:
    rig, a = with_host_copies("ab")
    rig.run(prefetch, a, chain(*"ab"))
    rig.settle()
    for prompt, blocks in (("ab", 2), ("xy", 0)):
        answer = rig.run(prefetch, a, chain(*prompt))
        assert (answer.device_blocks, answer.tickets) == (blocks, ())
    assert rig.core.ledger.leases[a].prefetches == {}


def test_a_lease_has_so_many_prefetches_under_way_and_no_more() -> None:
    rig, a = with_host_copies("ab", "cd", "ef")
    rig.core.limits = Limits(prefetches_per_lease=2)
    for prompt in ("ab", "cd"):
        rig.run(prefetch, a, chain(*prompt))
    before = rig.free(), len(rig.mover.all)
    with pytest.raises(LimitExceeded, match="prefetches of this lease under way: 3"):
        rig.run(prefetch, a, chain(*"ef"))
    assert (rig.free(), len(rig.mover.all)) == before
    rig.settle()
    assert rig.run(prefetch, a, chain(*"ef")).device_blocks == 2
    rig.settle()
