"""The journal, the feed that reads it, and the explanation of a key."""

from __future__ import annotations

from array import array

import pytest
from kvcache.v1 import event_pb2, inspect_pb2

from cachesvc.flows.allocate import allocate
from cachesvc.flows.loads import Sharing
from cachesvc.flows.match import match, prefetch
from cachesvc.flows.pinning import evict
from cachesvc.flows.recycle import release
from cachesvc.ledger.change_log import Cause, Event, Journal, Kind, Moment, packed
from cachesvc.model.errors import EventsForgotten, InvalidRequest, NotFound, NotOwned, SubscriberTooSlow
from cachesvc.model.words import KEY_BYTES, Urgency, WritePolicy
from cachesvc.questions.explanation import PREFETCH, Feed, explain, find_model, holders_of, runs_of
from cachesvc.questions.view import EVERYTHING, Sight, View, answer_at_once
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, prefill, rig_of, serve, windowed


def shown(holders: tuple[list[inspect_pb2.BlockHolder], bool]) -> list[tuple[int, str, int]]:
    return [(each.sequence_id, each.tier, each.blocks_below) for each in holders[0]]


def keys_of(*names: object) -> list[bytes]:
    packed_keys = chain(*names)
    return [packed_keys[at : at + KEY_BYTES] for at in range(0, len(packed_keys), KEY_BYTES)]


@pytest.mark.parametrize("sizes", [(3,), (5, 5), (8, 1), (2, 8, 7), (20,), (0, 9, 0)])
def test_changes_that_are_written_at_once_are_as_if_written_one_by_one(sizes: tuple[int, ...]) -> None:
    """However they lie on the ring, which has room for eight."""
    keys: list[bytes | None] = list(keys_of(*range(20)))
    parents, code = array("i", [-1, *range(19)]), packed(Kind.STORED, Cause.PUBLISHED, present=True)
    many, single = (Journal(keys, parents, Moment(), 8) for _ in range(2))
    for size in sizes:
        many.note_all(code, list(range(size)))
        for row in range(size):
            single.note(code, row)
        assert (many.first, many.last) == (single.first, single.last)
        assert many.read(many.first, 8) == single.read(single.first, 8)


def all_events(rig: Rig) -> list[Event]:
    journal = rig.model.blocks.journal
    return journal.read(journal.first, 1 << 20)


def told(rig: Rig, key: bytes) -> list[tuple[Kind, Cause, bool, int, int]]:
    return [(e.kind, e.cause, e.present, e.place, e.group) for e in all_events(rig) if e.key == key]


def test_many_changes_are_kept_as_each_by_itself_would_be() -> None:
    keys: list[bytes | None] = [bytes([i]) * KEY_BYTES for i in range(20)]
    parents = array("i", range(-1, 19))
    for before in range(12):
        for present in (True, False):
            code = packed(Kind.STORED, Cause.LOADED, present=present)
            at_once, one_by_one = (Journal(keys, parents, Moment(), keep=7) for _ in range(2))
            for journal in (at_once, one_by_one):
                for row in range(before):
                    journal.note(code, row)
            at_once.note_all(code, range(3, 20))
            for row in range(3, 20):
                one_by_one.note(code, row)
            first = one_by_one.first
            assert (at_once.first, at_once.last) == (first, one_by_one.last)
            assert at_once.read(first, 99) == one_by_one.read(first, 99)


def test_the_ring_keeps_the_last_and_says_what_it_forgot() -> None:
    moment = Moment()
    keys: list[bytes | None] = [bytes([i]) * KEY_BYTES for i in range(4)]
    journal = Journal(keys, array("i", [-1, 0, 1, 2]), moment, keep=3)
    assert (journal.first, journal.last) == (1, 0)
    assert journal.read(1, 10) == []
    for row in range(4):
        moment.seconds = float(row)
        journal.note(packed(Kind.STORED, Cause.LOADED, present=True, group=2, place=7), row)
    assert (journal.first, journal.last) == (2, 4)
    events = journal.read(2, 2)
    assert [(e.number, e.seconds, e.row) for e in events] == [(2, 1.0, 1), (3, 2.0, 2)]
    assert events[0] == Event(2, 1.0, Kind.STORED, Cause.LOADED, True, 2, 7, 1, keys[1] or b"", keys[0] or b"")
    with pytest.raises(EventsForgotten) as forgotten:
        journal.read(1, 10)
    assert (forgotten.value.wanted, forgotten.value.first) == (1, 2)
    assert [e.number for e in journal.about(b"\x03", range(100))] == [4]
    assert journal.seconds_of(journal.first) == 1.0


def test_a_removed_block_is_told_without_its_parent() -> None:
    journal = Journal([b"a" * KEY_BYTES, b"b" * KEY_BYTES], array("i", [-1, 0]), Moment())
    journal.note(packed(Kind.REMOVED, Cause.EVICTED, present=False), 1)
    assert journal.read(1, 1)[0].parent == b""


def test_a_published_block_is_stored_and_an_evicted_one_removed() -> None:
    rig = rig_of(one_group(), device=[4])
    lease = rig.lease()
    serve(rig, lease, 1, ["a", "b"])
    serve(rig, lease, 2, ["c", "d", "e"])
    a, b = keys_of("a", "b")
    assert told(rig, a) == [(Kind.STORED, Cause.PUBLISHED, True, 1, 0)]
    assert told(rig, b) == [(Kind.STORED, Cause.PUBLISHED, True, 1, 0), (Kind.REMOVED, Cause.EVICTED, False, 1, 0)]
    assert all_events(rig)[1].parent == a


def test_a_block_that_drains_to_the_host_changes_its_tier() -> None:
    rig = rig_of(one_group(), device=[2], host=[8])
    lease = rig.lease()
    serve(rig, lease, 1, ["a", "b"])
    serve(rig, lease, 2, ["c", "d"])
    (a,) = keys_of("a")
    assert told(rig, a) == [
        (Kind.STORED, Cause.PUBLISHED, True, 1, 0),
        (Kind.TIER_CHANGED, Cause.BACKED_UP, True, 0, 0),
        (Kind.TIER_CHANGED, Cause.DRAINED, False, 1, 0),
    ]
    serve(rig, lease, 3, ["a", "b"])
    assert told(rig, a)[3:] == [(Kind.TIER_CHANGED, Cause.LOADED, True, 1, 0)]


def test_a_load_that_failed_is_told_and_changes_nothing() -> None:
    rig = rig_of(one_group(), device=[2], host=[8])
    lease = rig.lease()
    serve(rig, lease, 1, ["a", "b"])
    serve(rig, lease, 2, ["c", "d"])
    rig.run(match, lease, 3, chain("a", "b"), 0)
    rig.run(allocate, lease, 3, 2)
    (ticket,) = rig.core.ledger.leases[lease].sequences[3].loads
    rig.land(ticket, "the link broke")
    (a,) = keys_of("a")
    assert told(rig, a)[-1] == (Kind.COPY_FAILED, Cause.COPY_FAILED, False, 1, 0)
    assert rig.model.blocks.index.rows[a] >= 0


def test_windowed_copies_go_by_themselves_and_an_operator_is_named() -> None:
    rig = rig_of(windowed(8), device=[16, 4])
    lease = rig.lease()
    serve(rig, lease, 1, ["a", "b", "c", "d"])
    serve(rig, lease, 2, ["e", "f"])
    gone = [e for e in all_events(rig) if not e.present]
    assert {(e.cause, e.group) for e in gone} == {(Cause.WINDOW_EVICTED, 1)}
    before = rig.model.blocks.journal.last
    evicted = evict(rig.core, rig.model.id, "device", 0)
    fresh = all_events(rig)[before:]
    assert {e.cause for e in fresh} == {Cause.OPERATOR}
    assert sum(e.group == 0 for e in fresh) == evicted == 6


def test_runs_join_what_is_alike_and_never_change_the_order_of_a_key() -> None:
    a, b, c = (bytes([i]) * KEY_BYTES for i in (1, 2, 3))

    def event(number: int, kind: Kind, group: int, key: bytes, parent: bytes = b"") -> Event:
        return Event(number, 0.0, kind, Cause.PUBLISHED, kind is Kind.STORED, group, 1, 0, key, parent)

    events = [
        event(1, Kind.STORED, 0, a),
        event(2, Kind.STORED, 1, a),
        event(3, Kind.STORED, 0, b, a),
        event(4, Kind.STORED, 1, b, a),
        event(5, Kind.STORED, 0, c),
        event(6, Kind.REMOVED, 0, a),
        event(7, Kind.STORED, 0, a),
    ]
    shown = [(Kind(run.kind), run.group, run.parent_key, run.keys) for run in runs_of(events)]
    assert shown == [
        (Kind.STORED, 0, b"", a + b),
        (Kind.STORED, 1, b"", a + b),
        (Kind.STORED, 0, b"", c),
        (Kind.REMOVED, 0, b"", a),
        (Kind.STORED, 0, b"", a),
    ]


def test_a_feed_without_a_snapshot_says_first_where_it_stands() -> None:
    rig = rig_of(one_group(), device=[8])
    lease = rig.lease()
    serve(rig, lease, 1, ["a"])
    feed = Feed(rig.model, snapshot=False)
    assert feed.next() == event_pb2.SubscribeResponse(model_id=rig.model.id, first_sequence_number=2, sequence_number=1)
    assert feed.next() is None
    serve(rig, lease, 2, ["b"])
    changes = feed.next()
    assert changes is not None
    assert (changes.first_sequence_number, changes.sequence_number) == (2, 2)
    with pytest.raises(InvalidRequest, match="has not happened yet"):
        Feed(rig.model, snapshot=False, after=3)


def test_a_feed_that_is_overrun_says_so_at_once() -> None:
    rig = rig_of(one_group(), device=[8])
    journal = rig.model.blocks.journal
    journal.keep = 4
    lease = rig.lease()
    feed = Feed(rig.model, snapshot=True)
    assert feed.next() is not None
    serve(rig, lease, 1, list("abcd"))
    assert feed.behind == 4
    serve(rig, lease, 2, ["e"])
    assert feed.is_overrun
    with pytest.raises(SubscriberTooSlow) as slow:
        feed.next()
    assert (slow.value.behind, slow.value.keep) == (5, 4)
    with pytest.raises(EventsForgotten):
        Feed(rig.model, snapshot=False, after=0)
    assert Feed(rig.model, snapshot=False, after=1).behind == 4


def test_a_namespace_opens_its_model_and_a_number_only_for_operators() -> None:
    rig = rig_of(one_group(), device=[8])
    engine = View(rig.core, Sight(tenant="", salted=False), float)
    operator = View(rig.core, EVERYTHING, float)
    assert find_model(engine, 0, rig.model.namespace) is rig.model
    assert find_model(operator, 1, b"") is rig.model
    for unproven in (engine, View(rig.core, Sight(salted=False), float)):
        with pytest.raises(NotOwned):
            find_model(unproven, 1, b"")
    with pytest.raises(NotFound):
        find_model(operator, 1, bytes(KEY_BYTES))
    with pytest.raises(InvalidRequest):
        find_model(operator, 2, rig.model.namespace)
    with pytest.raises(NotFound):
        find_model(View(rig.core, Sight(tenant="others"), float), 0, rig.model.namespace)


def test_holders_are_found_directly_through_descendants_and_on_the_host() -> None:
    rig = rig_of(one_group(), device=[8], host=[8], policy=WritePolicy.WRITE_THROUGH)
    lease = rig.lease("a")
    prefill(rig, lease, 1, ["a", "b", "c"])
    rig.settle()
    rig.run(match, lease, 2, chain("a"), 0)
    view = View(rig.core, EVERYTHING, float)
    index = rig.model.blocks.index
    a, b, _ = (index.rows[key] for key in keys_of("a", "b", "c"))
    assert shown(holders_of(view, rig.model, a)) == [(1, "device", 2), (2, "device", 0)]
    assert shown(holders_of(view, rig.model, b)) == [(1, "device", 1)]
    rig.run(release, lease, 1)
    assert shown(holders_of(view, rig.model, b)) == []
    rig.run(release, lease, 2)
    evict(rig.core, rig.model.id, "device", 0)
    rig.run(match, lease, 3, chain("a", "b"), 0)
    assert [each[:2] for each in shown(holders_of(view, rig.model, a))] == [(3, "host")]


def test_a_prefetch_holds_what_it_brings_until_it_has_come() -> None:
    rig = rig_of(one_group(), device=[8], host=[8], policy=WritePolicy.WRITE_THROUGH)
    lease = rig.lease("a")
    serve(rig, lease, 1, ["a", "b", "c"])
    serve(rig, lease, 2, ["d"])
    rig.settle()
    evict(rig.core, rig.model.id, "device", 0)
    rig.run(prefetch, lease, chain("a", "b", "c"), Sharing(Urgency.BACKGROUND))
    view = View(rig.core, EVERYTHING, float)
    index = rig.model.blocks.index

    def held(*names: str) -> list[tuple[int, str, int]]:
        return shown(holders_of(view, rig.model, index.rows[keys_of(*names)[-1]]))

    assert held("a") == [(PREFETCH, "host", 2)]
    assert held("a", "b", "c") == [(PREFETCH, "host", 0)]
    assert held("d") == []
    rig.settle()
    assert held("a") == []


def test_an_explanation_says_why_a_block_is_here_or_not() -> None:
    rig = rig_of(one_group(), device=[4])
    lease = rig.lease()
    prefill(rig, lease, 1, ["a", "b"])
    a, b = keys_of("a", "b")

    def conclusion(key: bytes) -> str:
        view = View(rig.core, EVERYTHING, lambda: 7.0)
        _, (story,) = (part.stories for part in answer_at_once(explain(view, rig.model.id, key)))
        return str(story.verdict)

    assert "1 pins on it, 0 on blocks below" in conclusion(b)
    assert "0 pins on it, 1 on blocks below" in conclusion(a)
    rig.run(release, lease, 1)
    assert "leaf first" in conclusion(a)
    assert "nothing keeps it" in conclusion(b)
    assert "never was" in conclusion(bytes(KEY_BYTES))
    rig.core.ledger.moment.seconds = 5.0
    evict(rig.core, rig.model.id, "device", 0)
    assert conclusion(b) == "it is not here: 2.0 s ago an operator evicted it"
