"""The tier over an engine that acts on command: shapes, hints, breaker, canary, budget, news."""

from __future__ import annotations

import pytest

from cachesvc.model.errors import InvalidRequest
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.words import NO_PAGE
from cachesvc.storage.seam import (
    LONGEST_PAUSE_SECONDS,
    SMALL_PAGE_BYTES,
    WHOLE,
    Caps,
    ObjectName,
    Outcome,
    Use,
    shapes_of,
)
from cachesvc.storage.spec import TierOptions, WriteWhen
from cachesvc.storage.tier import (
    BAD,
    LAST_OUTCOMES,
    TRY_ANYWAY,
    UNDER_WAY_BYTES,
    Blocks,
    Breaker,
    State,
    StateLog,
    Tier,
    objects_of,
)
from cachesvc.storage.tier import SCOPE as CANARY
from tests.sim.sim_storage import SimStorage
from tests.sim.storage_world import InboxWorkers
from tests.unit.rigs.ledger_rig import chain, one_group, windowed
from tests.unit.storage.storage_tier_rig import Facts, TierRig

OK, MISS, BUSY, FAILED, LATE = Outcome.OK, Outcome.MISS, Outcome.BUSY, Outcome.FAILED, Outcome.LATE


def test_what_was_kept_is_expected_and_comes_to_other_pages() -> None:
    rig = TierRig()
    rig.keep("abc")
    keys = chain(*"abcd")
    assert rig.tier.expects(rig.model, keys) == 3
    assert rig.fetch(7, keys[:96], [[10, 11, 12]]) == [1, 1, 1]
    rig.settle()
    assert [(news.ticket, news.block, news.outcome) for news in sorted(rig.told)] == [(7, at, OK) for at in range(3)]
    assert [bytes(rig.view(1, 0, 0, 10 + at)) for at in range(3)] == [b"a" * 8, b"b" * 8, b"c" * 8]


def test_what_an_engine_lets_go_of_is_told_by_model_and_block() -> None:
    rig = TierRig()
    rig.keep("abc")
    told: list[tuple[int, list[bytes]]] = []
    rig.tier.tell_gone = lambda model, keys: told.append((model, keys))
    names = list(rig.engine.objects)
    foreign = names[0]._replace(scope=names[0].scope._replace(namespace=bytes(32)))
    rig.engine.evict([names[0], foreign, names[0]._replace(part=(1, 0, 1)), names[2]])  # type: ignore[arg-type]
    assert told == [], "an eviction has no time for it"
    rig.settle()
    assert [key for _, keys in told for key in keys] == [names[0].key, names[2].key]
    assert {model for model, _ in told} == {1}, "of others' models nothing is known here"
    shapes = rig.tier.shapes(rig.model)
    assert rig.tier.has(shapes, names[1].key)
    assert not rig.tier.has(shapes, names[0].key)


def test_an_engine_that_has_to_be_asked_is_asked_before_it_is_read() -> None:
    rig = TierRig(engine=SimStorage(knows=False))
    rig.keep("ab")
    assert rig.tier.expects(rig.model, chain(*"abcd")) is None, "who knows"
    rig.fetch(7, chain(*"abcd"), [[10, 11, 12, 13]])
    rig.settle()
    assert {news.block: news.outcome for news in rig.told} == {0: OK, 1: OK, 2: BUSY, 3: BUSY}
    assert rig.tier.store.counts.items.total() == 4, "two were put and two got: what is not there was not read"


def test_what_an_engine_never_promised_says_nothing_against_it() -> None:
    """An engine without a catalogue is asked for every new prompt."""
    rig = TierRig(engine=SimStorage(knows=False))
    for at in range(2 * LAST_OUTCOMES):
        rig.fetch(7, chain(at), [[10]])
        rig.settle()
    rig.tier.breaker.note(1.0, "one error", rig.now)
    assert rig.tier.breaker.is_closed


def test_windows_come_where_there_are_pages_for_them() -> None:
    rig = TierRig(layout=windowed(8))
    rig.tier.keep(rig.model, chain("a"), [0, 0])
    rig.settle()
    assert rig.outcomes() == [OK, OK]
    assert rig.fetch(7, chain(*"ab"), [[1, 2], [NO_PAGE, 2]]) == [1, 2]
    rig.settle()
    assert sorted((news.block, news.shape.groups, news.outcome) for news in rig.told) == [
        (0, (0,), OK),
        (1, (0,), MISS),
        (1, (1,), MISS),
    ]
    assert rig.tier.keep(rig.model, chain("c"), [5, NO_PAGE]) == 1


def test_small_pages_of_all_groups_and_ranks_are_one_object() -> None:
    planes = tuple(Plane("k", 0, name, (8,), "uint8") for name in ("one", "two"))
    small = Layout(4, 2, (PlaneGroup("one"), PlaneGroup("two", replicated=True)), planes)
    shapes = shapes_of(Facts(small))
    assert [shape.part.group for shape in shapes.full] == [WHOLE]
    assert shapes.full[0].pieces == ((0, 0), (0, 1), (1, 0)), "what is the same on all ranks is there once"
    assert shapes.block_bytes == 24
    large = Layout(4, 2, (PlaneGroup("full"),), (Plane("k", 0, "full", (SMALL_PAGE_BYTES,), "uint8"),))
    assert [shape.part for shape in shapes_of(Facts(large)).full] == [(0, 0, 2), (0, 1, 2)]
    assert shapes_of(Facts(one_group())).full[0].part == (0, 0, 1)


def test_layouts_and_namespaces_are_apart() -> None:
    rig = TierRig()
    rig.keep("ab")
    other = Facts(windowed(8), id=2)
    assert rig.tier.expects(other, chain(*"ab")) == 0
    assert rig.tier.expects(Facts(one_group(), id=3, namespace=b"o" * 32), chain(*"ab")) == 0


def test_nothing_is_asked_once_somebody_has_waited_in_vain_until_a_canary_came_back() -> None:
    rig = TierRig(TierOptions(wait=0.25, deadline=2.0))
    rig.keep("ab")
    rig.engine.frozen = True
    rig.fetch(7, chain(*"ab"), [[10, 11]])
    rig.settle()
    rig.tier.lagged()
    assert rig.is_used(), "others have got something only now: it is slow"
    rig.now += 0.25
    rig.tier.lagged()
    assert (rig.tier.breaker.state, rig.tier.expects(rig.model, chain(*"ab")), rig.tier.room()) == (State.OPEN, 0, 0)
    for _ in range(40):
        rig.now += 0.2
        rig.tier.tick()
        rig.settle()
    assert rig.outcomes() == [LATE, LATE]
    assert not rig.is_used(), "canaries do not come back"
    rig.engine.frozen = False
    rig.engine.land_late()
    rig.settle()
    assert rig.outcomes() == [None, None], "the pages are free again"
    for _ in range(80):
        rig.now += 0.5
        rig.tier.tick()
        rig.settle()
    assert rig.is_used()
    assert rig.tier.expects(rig.model, chain(*"ab")) == 2
    assert not [name for name in rig.engine.objects if name.scope == CANARY], "canaries are not left behind"


def test_an_engine_that_loses_what_it_takes_is_not_taken_for_healthy() -> None:
    rig = TierRig()
    rig.tier.breaker.open("test", rig.now)
    rig.engine.odds = {"lose": 1.0}
    for _ in range(10):
        rig.now += 31
        rig.tier.tick()
        rig.settle()
    assert rig.tier.breaker.state is State.OPEN


def test_a_full_engine_is_read_on() -> None:
    rig = TierRig()
    rig.keep("ab")
    for _ in range(2 * LAST_OUTCOMES):
        rig.tier.breaker.note(BAD[Outcome.BUSY], "put: busy", rig.now)
    assert rig.is_used()
    rig.tier.breaker.open("test", rig.now)
    rig.now += 1
    rig.engine.is_open = False  # BUSY at once
    rig.tier.tick()
    rig.settle()
    assert rig.is_used()


def test_lies_open_the_breaker_and_a_few_misses_do_not() -> None:
    rig = TierRig(engine=SimStorage(odds={"invent": 1.0}))
    absent = "abcdefgh"
    for asked in range(1, 9):
        rig.fetch(asked, chain(*absent), [list(range(8))])
        rig.settle()
    assert rig.outcomes().count(MISS) == 64
    assert rig.tier.breaker.is_closed, "a store that is honest about it does little harm"
    rig.engine.odds = {"fail": 1.0}
    rig.fetch(99, chain(*absent), [list(range(8))])
    rig.settle()
    assert rig.tier.breaker.state is State.OPEN
    assert rig.tier.breaker.reason == "get: failed"


def test_a_store_that_is_slower_than_computing_is_not_used_but_now_and_then() -> None:
    rig = TierRig(TierOptions(recompute=1e6))
    rig.keep("abcd")
    rig.fetch(7, chain(*"abcd"), [[10, 11, 12, 13]])
    while rig.inbox:
        rig.inbox.popleft()()
    rig.now += 1
    rig.settle()
    assert set(rig.outcomes()) == {OK}
    asked = [rig.tier.expects(rig.model, chain(*"abcd")) for _ in range(TRY_ANYWAY)]
    assert asked.count(4) == 1
    assert asked.count(0) == TRY_ANYWAY - 1


def test_writing_is_bounded_by_bytes_a_second_and_under_way() -> None:
    rig = TierRig(TierOptions(write_rate=2 * UNDER_WAY_BYTES))
    tier, most = rig.tier, UNDER_WAY_BYTES
    assert tier.room() > 1000 * most, "one block may go however large it is"
    tier.rate.tokens -= 2 * most + 100
    tier.under_way = most // 2
    assert tier.room() == 0, "it has used up its second"
    rig.now += 0.125
    assert tier.room() == most // 4 - 100
    rig.now += 10.0
    assert tier.room() == most // 2, "this much is under way"
    tier.under_way = 0
    assert tier.room() > 1000 * most
    tier.under_way, tier.rate.tokens = 100, 0.0
    assert tier.room() == 0
    tier.lift_rate()
    rig.now += 1.0
    assert tier.room() == most - 100, "a rate that was lifted leaves the window"


def test_the_breaker_waits_longer_each_time() -> None:
    breaker = Breaker()
    for _ in range(LAST_OUTCOMES):
        breaker.note(0.0, "", 0.0)
    for _ in range(8):
        breaker.note(1.0, "get: failed", 1.0)
    assert breaker.is_closed
    breaker.note(1.0, "get: failed", 1.0)
    assert (breaker.state, breaker.opened) == (State.OPEN, 1)
    now, pauses = 1.0, []
    for _ in range(10):
        began = now
        while not breaker.wants_probe(now):
            now += 0.25
        pauses.append(now - began)
        breaker.probed(now, is_good=False)
    assert pauses[:4] == [0.25, 0.5, 1.0, 2.0]
    assert pauses[-1] == LONGEST_PAUSE_SECONDS
    now += LONGEST_PAUSE_SECONDS
    assert breaker.wants_probe(now)
    assert not breaker.wants_probe(now), "one at a time"
    breaker.probed(now, is_good=True)
    assert breaker.is_closed
    breaker.probed(now, is_good=False)
    assert breaker.is_closed, "an answer without a waiter"


@pytest.mark.parametrize("write", list(WriteWhen))
def test_what_is_written_is_as_configured(write: WriteWhen) -> None:
    tier = TierRig(TierOptions(write=write)).tier
    assert (tier.keeps_all, tier.keeps_used) == (write is WriteWhen.THROUGH, write is not WriteWhen.NEVER)


def test_pages_that_are_gone_end_a_call() -> None:
    rig = TierRig()
    rig.keep("ab")

    def gone(model: int, group: int, rank: int, page: int) -> memoryview:
        raise InvalidRequest("the host pool is closed")

    closed = Tier(
        rig.tier.store, rig.options, gone, rig.inbox.append, lambda: rig.now, lambda _: InboxWorkers(rig.inbox)
    )
    closed.tell = rig.tier.tell
    shapes = closed.shapes(rig.model)
    blocks = Blocks(rig.model, 7, chain(*"ab"), [[1, 2]], b"")
    closed.fetch(blocks, objects_of(shapes, blocks))
    closed.keep(rig.model, chain("c"), [3])
    rig.settle()
    assert rig.outcomes() == [Outcome.BUSY] * 3


def test_the_name_of_an_object_is_text_too() -> None:
    rig = TierRig()
    shapes = rig.tier.shapes(rig.model)
    name = ObjectName(shapes.scope, chain("a"), shapes.full[0].part)
    assert name.text == f"cs2/{'6e' * 32}/{one_group().fingerprint[:8].hex()}/{chain('a').hex()}/0.0of1"


def test_nothing_is_kept_of_models_that_are_gone() -> None:
    rig = TierRig()
    sizes = []
    for number in range(1, 20):
        model = Facts(one_group(), id=number)
        rig.tier.shapes(model)
        rig.tier.forget(number)
        sizes.append(sum(len(part) for part in vars(rig.tier).values() if isinstance(part, dict)))
    assert len(set(sizes)) == 1


def test_an_engine_that_cannot_work_is_given_up_at_once_and_tried_as_soon_as_it_can() -> None:
    """No call has to fail for it, and none waits for the longest pause afterwards."""
    rig = TierRig()
    rig.keep("abc")
    lost: list[int] = []
    rig.tier.tell_lost = lambda: lost.append(1)
    rig.engine.lose("the folder is gone")
    rig.tier.tick()
    assert not rig.is_used()
    assert rig.tier.breaker.reason == "the folder is gone"
    assert rig.tier.expects(rig.model, chain(*"abc")) == 0
    assert lost == [1], "hints of what it had are withdrawn, once"
    for _ in range(20):
        rig.now += LONGEST_PAUSE_SECONDS
        rig.tier.tick()
        rig.settle()
    assert not rig.is_used()
    rig.engine.away = ""
    rig.tier.tick()
    rig.settle()
    assert rig.is_used()
    assert lost == [1]


def test_uses_reach_an_engine_that_evicts_by_them_and_no_other() -> None:
    rig = TierRig()
    rig.tier.used(rig.model, [Use(chain("a"), 3)], None)
    rig.settle()
    assert rig.engine.uses == []
    rig = TierRig(engine=SimStorage(caps=Caps(is_shared=False, survives="daemon", follows_use=True)))
    rig.tier.used(rig.model, [Use(chain("a"), 3)], None)
    assert rig.engine.uses == [], "not on the loop"
    rig.settle()
    assert rig.engine.uses == [(rig.tier.shapes(rig.model).scope, Use(chain("a"), 3))]


def test_a_tier_that_is_given_up_and_used_again_is_a_line_each_and_one_that_flaps_a_line_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    breaker, now = Breaker(), 100.0
    log = StateLog("s3", breaker)
    for _ in range(20):
        breaker.open("nothing came", now)
        log.look(now, 0, "")
        assert breaker.wants_probe(now + 1.0)
        breaker.probed(now + 1.0, is_good=True)
        log.look(now + 1.0, 0, "")
        now += 2.0
    assert caplog.messages == ["storage_given_up", "storage_used_again"]
    breaker.open("nothing came", 170.0)
    log.look(170.0, 0, "the bucket is gone")
    assert caplog.messages[2:] == ["storage_given_up"]
    assert caplog.records[-1].__dict__["fields"]["times"] == 20
    assert caplog.records[-1].__dict__["fields"]["reason"] == "the bucket is gone"


def test_calls_that_hang_are_a_line_and_that_they_are_back_another(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log = StateLog("file", Breaker())
    for now in (1.0, 1.5, 3.5, 4.0, 9.0):
        log.look(now, 5, "")
    log.look(10.0, 0, "")
    log.look(11.0, 0, "")
    assert caplog.messages == ["storage_calls_hang", "storage_calls_back"]
