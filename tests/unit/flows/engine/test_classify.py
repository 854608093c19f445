"""Rules of a publish, written once: a batch stops where a single call is refused, and for the same reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from cachesvc.flows.allocate import allocate, swap_out
from cachesvc.flows.core import resolve
from cachesvc.flows.match import match
from cachesvc.flows.publish import Blocked, Known, classify, publish, publish_many
from cachesvc.model.answers import Published, Publishes, Wait
from cachesvc.model.errors import CacheError, Conflict, InvalidRequest, KeyMisplaced, LoadFailed, NotFound, NotOwned
from cachesvc.model.words import KEY_BYTES
from tests.unit.flows.engine.test_flows_refused import hosted
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, rig_of


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
