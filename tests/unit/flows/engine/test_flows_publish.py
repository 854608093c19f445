"""Match and publish: turns, owners, duplicates, contradicting keys, and blocks that are being computed."""

from __future__ import annotations

import pytest

from cachesvc.flows.allocate import allocate, extend, refill_stock
from cachesvc.flows.leases import close_lease
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish, publish_many
from cachesvc.flows.recycle import recycle, release
from cachesvc.model.answers import GroupCells, Publishes
from cachesvc.model.errors import (
    Conflict,
    InvalidRequest,
    KeyMisplaced,
    LeaseLost,
    LimitExceeded,
    NotFound,
    NotOwned,
    Unavailable,
)
from cachesvc.model.words import KEY_BYTES, Direction, WritePolicy
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
