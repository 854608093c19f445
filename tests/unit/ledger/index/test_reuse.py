"""Counts of the ledger for operators: causes of misses, the reuse ceiling, what left unused, and ages."""

from __future__ import annotations

import random

from cachesvc.flows import pinning
from cachesvc.flows.allocate import allocate
from cachesvc.flows.match import match, prefetch
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import release
from cachesvc.ledger.candidates import MARKS_KEPT, Ages
from cachesvc.ledger.reuse_stats import LEAST_REMEMBERED, Miss, Reuse
from cachesvc.model.words import ABSENT, KEY_BYTES, READY, CopyState, WritePolicy
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, prefill, rig_of, serve, windowed


def missed(rig: Rig) -> dict[str, int]:
    """Causes that were counted."""
    return {cause.value: count for cause, count in rig.model.reuse.missed.items() if count}


def recomputed(rig: Rig) -> dict[tuple[str, str], int]:
    return {(tier, cause.value): count for (tier, cause), count in rig.model.reuse.recomputed.items()}


def test_the_ceiling_is_what_a_cache_without_end_would_hit() -> None:
    """Random conversations in a pool of a few blocks, against a set of everything that was ever published."""
    rng = random.Random(11)
    rig = rig_of(one_group(), device=(12,))
    lease = rig.lease()
    known: set[bytes] = set()
    expected = again = 0
    for turn in range(300):
        names = [rng.randrange(3), *(rng.randrange(2) for _ in range(rng.randrange(1, 8)))]
        keys = chain(*names)
        split = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        expected += sum(key in known for key in split)
        again += sum(key in known and key not in rig.model.blocks.index.rows for key in split)
        serve(rig, lease, turn, names)
        known.update(split)
    reuse = rig.model.reuse
    assert reuse.ceiling == expected
    assert rig.model.hit_blocks["device"] < expected, "the pool is too small for all"
    assert reuse.requested == rig.model.hit_blocks["device"] + sum(reuse.missed.values())
    assert sum(reuse.recomputed.values()) == again
    assert missed(rig).keys() == {"new", "evicted"}
    assert recomputed(rig).keys() == {("device", "evicted")}


def test_a_limit_of_the_caller_is_no_miss() -> None:
    rig = rig_of(one_group(), device=(8,))
    lease = rig.lease()
    serve(rig, lease, 1, "abcd")
    rig.run(match, lease, 2, chain(*"abcd"), 3)
    assert missed(rig) == {"new": 4}
    assert rig.model.reuse.requested == 4 + 3
    assert rig.model.reuse.ceiling == 3


def test_what_an_operator_evicted_is_told_apart() -> None:
    rig = rig_of(one_group(), device=(8,))
    lease = rig.lease()
    serve(rig, lease, 1, "abcd")
    pinning.evict(rig.core, 1, "device", 2)
    serve(rig, lease, 2, "abcd")
    assert missed(rig) == {"new": 4, "operator": 2}
    assert recomputed(rig) == {("device", "operator"): 2}


def test_what_lies_on_another_replica_alone_is_elsewhere() -> None:
    rig = rig_of(one_group(), device=(8,), replicas=2)
    serve(rig, rig.lease("a", 0), 1, "abc")
    serve(rig, rig.lease("b", 1), 1, "abcd")
    assert missed(rig) == {"new": 3 + 1, "elsewhere": 3}
    assert recomputed(rig) == {("device", "elsewhere"): 3}


def test_two_at_the_same_time_are_duplicates() -> None:
    rig = rig_of(one_group(), device=(16,))
    first, second = rig.lease("a"), rig.lease("b")
    rig.run(match, first, 1, chain(*"ab"), 0)
    rig.run(allocate, first, 1, 2)
    serve(rig, second, 1, "ab")
    rig.run(publish, first, 1, 0, chain(*"ab"), 0)
    assert recomputed(rig) == {("device", "duplicate"): 2}
    assert rig.model.reuse.published == 4


def test_a_hit_that_a_window_cuts_short_is_partly_there() -> None:
    rig = rig_of(windowed(8), device=(16, 4))
    lease = rig.lease()
    serve(rig, lease, 1, "ab")
    serve(rig, lease, 2, "wxyz")  # takes all pages of the windowed group
    rig.run(match, lease, 3, chain(*"ab"), 0)
    assert missed(rig) == {"new": 6, "partly": 2}
    assert rig.place().counts.windows_left == 2


def test_a_hit_whose_load_failed_is_counted_apart_from_misses() -> None:
    rig = rig_of(one_group(), device=(8,), host=(8,), policy=WritePolicy.WRITE_THROUGH)
    lease = rig.lease()
    serve(rig, lease, 1, "abc")
    rig.settle()
    pinning.evict(rig.core, 1, "device", 0)
    rig.run(match, lease, 2, chain(*"abc"), 0)
    rig.run(allocate, lease, 2, 3)
    rig.land(next(iter(rig.mover.transfers)), "broken link")
    assert missed(rig) == {"new": 3}
    reuse = rig.model.reuse
    assert reuse.unloaded == 3
    assert reuse.requested == sum(rig.model.hit_blocks.values()) + sum(reuse.missed.values())


def test_host_copies_that_nobody_loaded_are_told() -> None:
    rig = rig_of(one_group(), device=(8,), host=(8,), policy=WritePolicy.WRITE_THROUGH)
    lease = rig.lease()
    serve(rig, lease, 1, "abc")
    serve(rig, lease, 2, "xyz")
    rig.settle()
    pinning.evict(rig.core, 1, "device", 0)
    rig.run(match, lease, 3, chain(*"abc"), 0)
    rig.run(allocate, lease, 3, 3)
    rig.settle()
    rig.run(release, lease, 3)
    pinning.evict(rig.core, 1, "host", 0)
    assert (rig.host.counts.left, rig.host.counts.left_unused) == (6, 3)


def test_a_hit_uses_all_blocks_above_it() -> None:
    rig = rig_of(one_group(), device=(8,))
    lease = rig.lease()
    serve(rig, lease, 1, "abcdef")
    rig.run(match, lease, 2, chain(*"abcx"), 0)
    rig.run(release, lease, 2)
    pinning.evict(rig.core, 1, "device", 0)
    assert (rig.place().counts.left, rig.place().counts.left_unused) == (6, 3)


def test_what_a_prefetch_brought_is_used_once_it_is_hit() -> None:
    rig = rig_of(one_group(), device=(8,), host=(8,), policy=WritePolicy.WRITE_THROUGH)
    lease = rig.lease()
    serve(rig, lease, 1, "ab")
    rig.settle()
    counts = rig.place().counts
    pinning.evict(rig.core, 1, "device", 0)
    assert counts.left_unused == 2
    for is_hit in (False, True):
        rig.run(prefetch, lease, chain(*"ab"))
        rig.settle()
        if is_hit:
            serve(rig, lease, 2, "ab")
        before = counts.left_unused
        pinning.evict(rig.core, 1, "device", 0)
        assert counts.left_unused - before == (0 if is_hit else 2)


def test_pins_and_states_are_counted_as_they_are() -> None:
    rig = rig_of(one_group(), device=(8,))
    lease = rig.lease()
    prefill(rig, lease, 1, "abc")
    rig.run(match, lease, 2, chain(*"ab"), 0)
    counts = rig.place().counts
    assert counts.pinned == 3 + 2
    assert counts.states[READY] == 3
    for sequence in (1, 2):
        rig.run(release, lease, sequence)
    pinning.evict(rig.core, 1, "device", 0)
    assert counts.pinned == 0
    assert [counts.states[state] for state in CopyState if state != ABSENT] == [0, 0, 0]


def test_age_at_eviction_is_since_the_last_access() -> None:
    rig = rig_of(one_group(), device=(8,))
    lease = rig.lease()
    ledger = rig.core.ledger
    serve(rig, lease, 1, "a")
    ledger.mark_time(100.0)
    serve(rig, lease, 2, "b")
    ledger.mark_time(200.0)
    ledger.mark_time(4000.0)
    pinning.evict(rig.core, 1, "device", 0)
    ages = rig.place().counts.ages
    assert ages.total == (4000 - 100) + (4000 - 200)
    assert ages.count == 2


def test_ages_stay_right_when_marks_are_thinned_out() -> None:
    ages = Ages()
    for second in range(3 * MARKS_KEPT):
        ages.mark(10 * second, float(second))
    last = 3 * MARKS_KEPT - 1
    assert ages.age(10 * last + 5) == 0.0, "since the last mark"
    for second in (last - 5, last - 1000, 700, 3):
        told = ages.age(10 * second)
        late = (last - second) - told
        assert 0 <= late <= max(1, 0.03 * (last - second)), "the older, the coarser"
    assert ages.age(10 * last) == 0.0


def test_memory_is_bounded_and_the_newest_stay() -> None:
    reuse = Reuse()
    keys = [bytes([1]) + number.to_bytes(31, "big") for number in range(5 * LEAST_REMEMBERED)]
    for key in keys:
        reuse.dropped([(key, "device")], Miss.EVICTED, LEAST_REMEMBERED)
        assert reuse.remembered <= LEAST_REMEMBERED
    reuse.computed(keys[-1])
    reuse.computed(keys[0])
    assert reuse.recomputed == {("device", Miss.EVICTED): 1}
