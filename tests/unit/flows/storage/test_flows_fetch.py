"""Blocks that storage has beyond a hit: fetched once, admitted in order of depth, and never waited for without end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from string import ascii_letters

import pytest

from cachesvc.flows import pinning
from cachesvc.flows.core import TURN, tidy
from cachesvc.flows.fetch import PEEKED_BLOCKS
from cachesvc.flows.leases import close_lease
from cachesvc.flows.loads import Sharing
from cachesvc.flows.match import match, prefetch
from cachesvc.flows.recycle import release
from cachesvc.flows.registration import evict_model, idle_models
from cachesvc.flows.stored import FORGOTTEN_A_TURN, forget, forget_all, want
from cachesvc.ledger.change_log import Cause, Kind
from cachesvc.model.answers import Matched, Wait
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.words import KEY_BYTES, PageState, WritePolicy
from cachesvc.questions.explanation import Feed, explain
from cachesvc.questions.view import EVERYTHING, View, answer_at_once
from tests.unit.rigs.ledger_rig import chain, hybrid, one_group, prefill, rig_of, serve, windowed
from tests.unit.rigs.storage_flows_rig import (
    BACK,
    GONE,
    LATE,
    LENT,
    WHOLE,
    StorageRig,
    hit,
    keys_of,
    packed,
    storing,
    waits,
)

IN_FLIGHT, QUARANTINED, SEALED = PageState.IN_FLIGHT, PageState.QUARANTINED, PageState.SEALED


def test_what_storage_has_comes_to_the_host_and_is_a_hit_from_storage() -> None:
    at = storing("abcd")
    ask = at.ask("abcde", 1)
    assert waits(ask()).tickets == (at.storage.fetches[0].ticket,)
    assert at.pages(IN_FLIGHT) == 4
    assert len(at.rig.model.blocks.index) == 0, "no block is there before it has verified"
    at.tell(range(4), WHOLE)
    assert at.pages(SEALED) == 4
    assert hit(ask()) == (0, 4, 4)
    assert at.rig.model.hit_blocks == {"device": 0, "host": 0, "storage": 4}
    causes = {event.cause for event in at.rig.model.blocks.journal.read(1, 100)}
    assert causes == {Cause.FETCHED, Cause.STORED}
    assert len(at.storage.fetches) == 1
    at.rig.run(release, at.lease, 1)
    assert hit(at.ask("abcd", 2)()) == (0, 4, 0), "the second time it is a hit on the host"


def test_what_is_remembered_as_stored_is_bounded_however_it_came() -> None:
    at = storing("abcde")
    at.rig.model.stored.most_written = 3
    at.storage.keeps_all = at.storage.keeps_used = False
    waits(at.ask("abcde", 1)())
    at.tell(range(5), WHOLE)
    assert len(at.rig.host_keys()) == 5
    assert list(at.rig.model.stored.written) == packed("abcde")[2:]


def test_what_another_node_lent_is_not_taken_for_stored() -> None:
    """Blocks below it were written, and it was not: they were of no use after a restart."""
    at = storing("abc")
    at.storage.keeps_all = False
    ask = at.ask("abcd", 1)
    waits(ask())
    at.tell([0], WHOLE)
    at.tell([1, 2], LENT)
    assert hit(ask()) == (0, 3, 3)
    model = at.rig.model
    assert list(model.stored.written) == packed("abc")[:1]
    assert not model.stored.wanted, "it was used once"
    want(at.rig.core, model, [model.blocks.index.rows[packed("abc")[2]]])
    at.settle()
    assert keys_of(at.storage.keeps) == packed("abc")[1:]


def test_what_another_node_lent_is_written_where_all_is() -> None:
    at = storing("abc")
    waits(at.ask("abc", 1)())
    at.tell([0], WHOLE)
    at.tell([1, 2], LENT)
    assert keys_of(at.storage.keeps) == packed("abc")[1:]


def test_a_hit_goes_on_where_memory_ends() -> None:
    at = storing("abcdef")
    serve(at.rig, at.lease, 1, "abc")
    ask = at.ask("abcdef", 2)
    waits(ask())
    [fetch] = at.storage.fetches
    assert fetch.keys == chain(*"abcdef")[3 * KEY_BYTES :]
    at.tell(range(3), WHOLE)
    assert hit(ask()) == (3, 3, 3)


def test_blocks_are_admitted_in_order_of_depth_however_they_come() -> None:
    at = storing("abcd")
    ask = at.ask("abcd", 1)
    waits(ask())
    for block, there in ((2, 0), (1, 0), (0, 3), (3, 4)):
        at.tell([block], WHOLE)
        assert len(at.rig.model.blocks.index) == there
    assert hit(ask()) == (0, 4, 4)


@pytest.mark.parametrize("hole", range(4))
def test_a_hole_ends_the_prefix_and_what_came_above_it_stays(hole: int) -> None:
    at = storing("abcd")
    ask = at.ask("abcd", 1)
    waits(ask())
    at.tell([hole], GONE)
    at.tell([block for block in range(4) if block != hole], WHOLE)
    assert hit(ask()) == (0, hole, hole)
    assert at.pages(SEALED) == hole
    assert at.pages(IN_FLIGHT) == at.pages(QUARANTINED) == 0


def test_a_frozen_storage_costs_a_bounded_wait_and_keeps_its_pages() -> None:
    at = storing("abcd")
    ask = at.ask("abcd", 1)
    assert waits(ask()).seconds == at.storage.wait_seconds
    at.rig.now += at.storage.wait_seconds
    assert hit(ask()) == (0, 0, 0), "the time is up: the hit that there is"
    assert at.storage.lags == 1
    at.tell(range(4), LATE)
    assert at.pages(QUARANTINED) == 4, "bytes may still land there"
    assert not at.rig.core.ledger.tickets.running
    assert idle_models(at.rig.core) == []
    at.rig.run(release, at.lease, 1)
    at.rig.run(partial(close_lease, quiesced=True), at.lease)
    assert idle_models(at.rig.core) == [], "nor is the memory anybody's when all have gone"
    at.tell(range(4), BACK)
    assert at.pages(QUARANTINED) == at.pages(SEALED) == 0
    assert idle_models(at.rig.core) == [at.rig.model]


def test_what_came_in_time_is_kept_and_what_is_late_is_not() -> None:
    at = storing("abcd")
    ask = at.ask("abcd", 1)
    waits(ask())
    at.tell([0, 1], WHOLE)
    assert hit(ask()) == (0, 2, 2), "the time is up, and two have come"
    assert at.storage.lags == 0, "it is slow, and not frozen"
    at.tell([2], WHOLE)
    at.tell([3], LATE)
    assert at.pages(SEALED) == 3
    assert at.pages(QUARANTINED) == 1
    at.tell([3], BACK)
    assert hit(at.ask("abc", 2)()) == (0, 3, 0)


def test_a_call_that_does_not_wait_says_nothing_of_the_storage() -> None:
    at = storing("abcd")
    ask = at.ask("abcd", 1)
    waits(ask())
    assert hit(ask()) == (0, 0, 0), "asked again at once"
    assert at.storage.lags == 0
    at.tell(range(4), WHOLE)
    assert hit(at.ask("abcd", 2)()) == (0, 4, 0), "the next one finds it on the host"


def test_many_who_want_one_prefix_wait_for_one_fetch() -> None:
    at = storing("abcd")
    asks = [at.ask("abcd" + str(number), number) for number in range(1, 9)]
    tickets = {waits(ask()).tickets for ask in asks}
    assert len(tickets) == len(at.storage.fetches) == 1
    at.tell(range(4), WHOLE)
    assert [hit(ask()) for ask in asks] == [(0, 4, 4)] * 8


def test_a_failed_fetch_is_not_asked_for_again_by_the_same_call() -> None:
    at = storing("abcd")
    ask = at.ask("abcd", 1)
    waits(ask())
    at.tell(range(4), GONE)
    assert hit(ask()) == (0, 0, 0)
    assert len(at.storage.fetches) == 1


def test_who_publishes_what_is_on_its_way_is_first() -> None:
    at = storing("abcd")
    waiting = at.ask("abcd", 1)
    waits(waiting())
    at.tell([0], WHOLE)
    prefill(at.rig, at.lease, 2, "abcd")
    at.tell([1, 2, 3], WHOLE)
    assert at.rig.host.counts.states[3] + at.rig.host.counts.states[2] == 4, "the host has them too"
    assert hit(waiting())[0] == 4
    assert at.pages(IN_FLIGHT) == 0


def test_the_block_that_the_next_comes_under_is_not_evicted_meanwhile() -> None:
    at = storing("abcd", host=8)
    ask = at.ask("abcd", 1)
    waits(ask())
    at.tell([0, 1], WHOLE)
    plan, _ = at.rig.model.evictor.plan_host(8)
    assert plan.drops == [], "the second is kept, and the first lies above it"
    at.tell([2, 3], WHOLE)
    plan, _ = at.rig.model.evictor.plan_host(8)
    assert len(plan.drops) == 4, "then they are unpinned"


def test_room_is_made_on_the_host_and_no_more_than_its_share() -> None:
    at = storing("abcdefghij", host=8, device=6, policy=WritePolicy.WRITE_THROUGH)
    at.storage.keeps_all = False
    serve(at.rig, at.lease, 1, "uvwxyz")
    at.rig.settle()
    assert at.rig.host.pools[0].free == 2
    answer = at.ask("abcdefghij", 2)
    ask = answer()
    while ask == TURN:
        ask = answer()
    waits(ask)
    assert len(at.storage.fetches[0].keys) // KEY_BYTES == 4, "half of the host at most"


def in_pieces(at: StorageRig, ask: Callable[[], object]) -> Matched:
    """Run a call until it ends: what it fetches comes, what it loads lands."""
    told = 0
    while isinstance(answer := ask(), Wait):
        if len(at.storage.fetches) > told:
            at.tell(range(len(at.storage.fetches[told].keys) // KEY_BYTES), WHOLE)
            told += 1
        at.rig.settle()
        at.settle()
    assert isinstance(answer, Matched)
    return answer


@pytest.mark.parametrize("host", [2, 4, 8, 16, 26])
def test_a_prefix_larger_than_the_host_comes_to_the_device_in_pieces(host: int) -> None:
    names = ascii_letters[:26]
    at = storing(names, host=host, device=40)
    answer = in_pieces(at, at.ask(names, 1))
    assert answer.device_blocks + answer.host_blocks == 26
    assert max(len(fetch.keys) for fetch in at.storage.fetches) // KEY_BYTES <= host // 2
    assert at.rig.model.hit_blocks == {"device": 0, "host": 0, "storage": 26}
    assert answer.storage_blocks == answer.host_blocks
    assert len(at.rig.host_keys()) == answer.host_blocks, "pieces leave the host once they are on the device"
    prefill(at.rig, at.lease, 2, names)
    at.rig.settle()
    at.settle()
    at.rig.run(release, at.lease, 1)
    at.rig.run(release, at.lease, 2)
    at.settle()
    assert hit(at.ask(names, 3)()) == (26, 0, 0)


def test_pieces_end_where_the_device_has_no_room_and_the_call_goes_on() -> None:
    names = ascii_letters[:26]
    at = storing(names, host=8, device=10)
    answer = in_pieces(at, at.ask(names, 1))
    assert answer.device_blocks + answer.host_blocks == 12
    assert at.pages(IN_FLIGHT) == at.pages(QUARANTINED) == 0


def test_pieces_end_with_the_time_that_a_call_waits_and_the_next_call_goes_on() -> None:
    names = ascii_letters[:26]
    at = storing(names, host=8, device=40)
    ask = at.ask(names, 1)
    waits(ask())
    at.tell(range(4), WHOLE)
    at.rig.now += at.storage.wait_seconds
    assert hit(ask()) == (0, 4, 4)
    prefill(at.rig, at.lease, 2, names[:4])
    at.rig.settle()
    at.settle()
    at.rig.run(release, at.lease, 1)
    at.rig.run(release, at.lease, 2)
    at.storage.fetches.clear()
    answer = in_pieces(at, at.ask(names, 3))
    assert answer.device_blocks + answer.host_blocks == 26


def test_where_nobody_knows_a_few_are_asked_for_and_then_all() -> None:
    """Absent blocks take, and evict, no more of the host than these few."""
    names = ascii_letters[:40]
    at = storing(names, host=128)
    at.storage.knows = False
    ask = at.ask(names, 1)
    waits(ask())
    assert at.pages(IN_FLIGHT) == len(at.storage.fetches[0].keys) // KEY_BYTES == PEEKED_BLOCKS
    at.tell(range(PEEKED_BLOCKS), WHOLE)
    waits(ask())
    assert len(at.storage.fetches[1].keys) // KEY_BYTES == len(names) - PEEKED_BLOCKS
    at.tell(range(len(names) - PEEKED_BLOCKS), WHOLE)
    assert hit(ask()) == (0, 40, 40)
    assert len(at.storage.fetches) == 2


def test_where_not_all_of_the_few_are_there_no_more_is_asked_for() -> None:
    names = ascii_letters[:40]
    at = storing(names, host=128)
    at.storage.knows = False
    ask = at.ask(names, 1)
    waits(ask())
    at.tell(range(PEEKED_BLOCKS - 1), WHOLE)
    at.tell([PEEKED_BLOCKS - 1], GONE)
    assert hit(ask()) == (0, PEEKED_BLOCKS - 1, PEEKED_BLOCKS - 1)
    assert len(at.storage.fetches) == 1


def test_without_a_host_pool_nothing_is_fetched() -> None:
    at = storing("abcd", host=0)
    assert hit(at.ask("abcd", 1)()) == (0, 0, 0)
    assert at.storage.fetches == []


def test_a_limit_of_the_match_limits_the_fetch() -> None:
    at = storing("abcd")
    ask = at.ask("abcd", 1, limit=2)
    waits(ask())
    assert len(at.storage.fetches[0].keys) // KEY_BYTES == 2
    at.tell(range(2), WHOLE)
    assert hit(ask()) == (0, 2, 2)


def test_who_shares_nothing_waits_for_nothing() -> None:
    at = storing("abcd")
    answer = at.rig.once(match, at.lease, 1, chain(*"abcd"), 0)
    assert isinstance(answer, Matched)
    assert at.storage.fetches == []


def test_a_prefetch_brings_it_from_storage_too() -> None:
    at = storing("abcd")
    flow = partial(prefetch, sharing=Sharing())
    waits(at.rig.once(flow, at.lease, chain(*"abcd")))
    at.tell(range(4), WHOLE)
    answer = at.rig.once(partial(prefetch, sharing=Sharing()), at.lease, chain(*"abcd"))
    assert answer.device_blocks == 4  # type: ignore[union-attr]
    at.rig.settle()
    assert len(at.rig.device_keys()) == 4


def test_windowed_groups_come_where_a_window_needs_them() -> None:
    at = storing("abcdef", layout=windowed(8))
    ask = at.ask("abcdef", 1)
    waits(ask())
    [fetch] = at.storage.fetches
    assert [page >= 0 for page in fetch.pages[1]] == [False] * 4 + [True] * 2
    at.tell(range(6), WHOLE, group=0)
    assert len(at.rig.model.blocks.index) == 4, "the fifth has its window to come"
    at.tell([4, 5], WHOLE, group=1)
    assert hit(ask()) == (0, 6, 6)


def test_a_fetch_makes_room_for_all_that_its_hit_needs() -> None:
    """A full host: blocks that come without a window and a state are read for nothing."""
    at = storing("abcd", layout=hybrid(), host=14, policy=WritePolicy.WRITE_THROUGH)
    for number, prompt in enumerate(("uvwx", "mnop", "qrst"), start=1):
        serve(at.rig, at.lease, number, prompt)
        at.rig.settle()
    assert at.rig.host.pools[0].unreserved < 4
    waits(at.ask("abcd", 9)())
    [fetch] = at.storage.fetches
    assert [sum(page >= 0 for page in pages) for pages in fetch.pages] == [4, 2, 4]


def test_a_fetch_behind_a_hit_takes_no_page_without_which_that_is_none() -> None:
    """Copies that have just come are the first to go. Storage has no more, and the call goes on with that hit."""
    at = storing("abcd", layout=hybrid(), host=16)
    ask = at.ask("abcdefgh", 1)
    waits(ask())
    at.tell(range(4), WHOLE, group=0)
    at.tell([2, 3], WHOLE, group=1)
    at.tell(range(3), GONE, group=2)
    at.tell([3], WHOLE, group=2)
    at.storage.knows = False
    waits(ask())
    assert len(at.storage.fetches) == 2
    at.tell([0], GONE)
    assert hit(ask()) == (0, 4, 4)


def test_without_its_window_a_block_comes_and_a_hit_ends_before() -> None:
    at = storing("abcdef", layout=windowed(8))
    ask = at.ask("abcdef", 1)
    waits(ask())
    at.tell([4, 5], GONE, group=1)
    at.tell(range(6), WHOLE, group=0)
    assert len(at.rig.model.blocks.index) == 6
    assert hit(ask()) == (0, 0, 0), "no window is there"
    assert at.pages(IN_FLIGHT) == 0


def test_a_block_counts_when_all_its_groups_have_verified() -> None:
    planes = tuple(Plane("k", 0, name, (8,), "uint8") for name in ("one", "two"))
    at = storing("abc", layout=Layout(4, 1, (PlaneGroup("one"), PlaneGroup("two")), planes))
    ask = at.ask("abc", 1)
    waits(ask())
    at.tell(range(3), WHOLE, group=0)
    assert len(at.rig.model.blocks.index) == 0
    at.tell([0, 2], WHOLE, group=1)
    assert len(at.rig.model.blocks.index) == 1
    at.tell([1], GONE, group=1)
    assert hit(ask()) == (0, 1, 1)
    assert at.pages(IN_FLIGHT) == 0


def test_keys_that_are_not_chained_end_the_fetch() -> None:
    at = storing("abcd")
    ask = at.ask("abcd", 1)
    waits(ask())
    keys = chain(*"abcd")
    index = at.rig.model.blocks.index
    prefill(at.rig, at.lease, 2, "z")
    stray = keys[KEY_BYTES : 2 * KEY_BYTES]
    row = index.insert(stray, index.rows[chain("z")], at.rig.core.ledger.stamp())
    at.rig.host.admit(0, row, at.rig.host.pools[0].take(1, IN_FLIGHT)[0])
    at.rig.model.blocks.come(at.rig.host, row)
    at.rig.model.blocks.offer(at.rig.host, row)
    at.tell(range(4), WHOLE)
    assert at.rig.core.counters["storage_fetched_blocks"] == 1
    assert at.pages(IN_FLIGHT) == 0


# Storage presence hints: sent to subscribers that asked for them, remembered, and part of an explanation.

THROUGH = WritePolicy.WRITE_THROUGH


def written(prompt: str) -> StorageRig:
    """A prompt that was served, and written to storage."""
    at = storing(policy=THROUGH)
    serve(at.rig, at.lease, 1, prompt)
    at.rig.settle()
    at.settle()
    for key in packed(prompt):
        at.tell_kept(key, WHOLE)
    return at


def feed_of(at: StorageRig, *, storage: bool = True) -> Feed:
    feed = Feed(at.rig.model, snapshot=False, storage=storage)
    assert feed.next() is not None
    return feed


def told(feed: Feed, tier: str = "storage") -> list[tuple[bool, str, list[bytes]]]:
    """Events of storage: presence, reason, blocks."""
    changes = feed.next()
    out: list[tuple[bool, str, list[bytes]]] = []
    for run in [] if changes is None else changes.runs:
        if run.tier == tier:
            keys = [run.keys[at : at + KEY_BYTES] for at in range(0, len(run.keys), KEY_BYTES)]
            if out and out[-1][:2] == (run.present, run.reason):
                out[-1][2].extend(keys)
            else:
                out.append((run.present, run.reason, keys))
    return out


def why(at: StorageRig, prefix: bytes) -> list[str]:
    view = View(at.rig.core, EVERYTHING, lambda: at.rig.now)
    return [story.verdict for part in answer_at_once(explain(view, 1, prefix)) for story in part.stories]


def test_a_block_that_was_written_is_told_to_who_asked_for_it() -> None:
    at = storing(policy=THROUGH)
    feed, other = feed_of(at), feed_of(at, storage=False)
    serve(at.rig, at.lease, 1, "ab")
    at.rig.settle()
    at.settle()
    assert told(feed) == [], "it is on its way"
    at.tell_kept(packed("ab")[0], WHOLE)
    at.tell_kept(packed("ab")[1], GONE)
    assert told(feed) == [(True, "stored", packed("ab")[:1])]
    assert told(other) == []
    assert other.behind == 0, "its numbers go on all the same"
    [event] = at.rig.model.blocks.journal.read(at.rig.model.blocks.journal.last, 1)
    assert (event.kind, event.cause, event.group) == (Kind.TIER_CHANGED, Cause.STORED, 0)


def test_what_came_from_storage_is_there_and_what_was_lent_need_not_be() -> None:
    at = storing("abc")
    at.storage.keeps_all = False
    feed = feed_of(at)
    waits(at.ask("abc", 1)())
    at.tell([0, 1], WHOLE)
    at.tell([2], LENT)
    assert told(feed) == [(True, "stored", packed("abc")[:2])]


def test_what_goes_from_storage_is_told_once_and_may_be_written_again() -> None:
    at = written("abc")
    feed = feed_of(at)
    forget(at.rig.core, 1, [*packed("xy"), *packed("abc")[1:], packed("abc")[2]])
    at.settle()
    assert told(feed) == [(False, "unstored", packed("abc")[1:])]
    at.storage.keeps.clear()
    model = at.rig.model
    want(at.rig.core, model, [model.blocks.index.rows[packed("abc")[2]]])
    at.settle()
    assert keys_of(at.storage.keeps) == packed("abc")[1:]


def test_what_is_asked_for_and_is_not_there_is_told_too() -> None:
    at = written("ab")
    at.storage.there = set(packed("ab"))
    close_lease(at.rig.core, at.lease, quiesced=True)
    for tier in ("device", "host"):
        pinning.evict(at.rig.core, 1, tier, 0)
    assert not at.rig.host_keys()
    again = StorageRig(at.rig, at.storage, at.rig.lease("b", 0))
    feed = feed_of(at)
    waits(again.ask("ab", 1)())
    again.tell([0], WHOLE)
    again.tell([1], GONE)
    assert told(feed) == [(False, "unstored", packed("ab")[1:])], "the other one was known to be there"


def test_many_go_a_turn_at_a_time() -> None:
    at = storing(policy=THROUGH)
    keys = [number.to_bytes(KEY_BYTES, "big") for number in range(2 * FORGOTTEN_A_TURN)]
    for key in keys:
        at.rig.model.stored.wrote(key, 0.0)
    forget(at.rig.core, 1, keys)
    assert len(at.rig.model.stored.written) == FORGOTTEN_A_TURN
    at.settle()
    assert not at.rig.model.stored.written
    forget(at.rig.core, 99, keys)


def test_all_that_storage_had_of_a_model_goes_a_turn_at_a_time_beside_what_is_written_and_lost() -> None:
    at = storing(policy=THROUGH)
    stored = at.rig.model.stored
    keys = [number.to_bytes(KEY_BYTES, "big") for number in range(2 * FORGOTTEN_A_TURN)]
    for key in keys:
        stored.wrote(key, 0.0)
    forget_all(at.rig.core, at.rig.model)
    assert list(stored.written) == keys[FORGOTTEN_A_TURN:]
    stored.wrote(b"meanwhile", 0.0)
    for key in keys[-8:]:
        del stored.written[key]
    at.settle()
    assert not stored.written


def test_what_a_model_that_is_gone_has_known_goes_a_turn_at_a_time() -> None:
    rig = rig_of(one_group(), device=(16,))
    a = rig.lease("a")
    serve(rig, a, 1, "abcdef")
    close_lease(rig.core, a, quiesced=True)
    model = rig.model
    rig.core.turns = rig.core.turns._replace(forgotten=4)
    model.remembered.update({b"%d" % number: 1 for number in range(6)})
    model.stored.written.update({b"%d" % number: 0.0 for number in range(6)})
    evict_model(rig.core, rig.vault, model)
    left = []
    while rig.core.chores:
        tidy(rig.core.chores)
        left.append(len(model.remembered) + len(model.stored.written))
    assert left[:4] == [8, 4, 0, 0]
    assert not model.blocks.index.keys


def test_why_knows_a_block_that_lies_in_storage_alone() -> None:
    at = written("ab")
    [said] = why(at, packed("ab")[1])
    assert said.endswith("; storage has it: written, or seen there, 0.0 s ago")
    close_lease(at.rig.core, at.lease, quiesced=True)
    for tier in ("device", "host"):
        pinning.evict(at.rig.core, 1, tier, 0)
    at.rig.now += 12.5
    [said] = why(at, packed("ab")[1])
    assert said.startswith("it is not here: 12.5 s ago an operator evicted it")
    assert said.endswith("; storage has it: written, or seen there, 12.5 s ago")
    assert len(why(at, packed("ab")[1][:3])) == 1


def test_why_asks_what_was_there_before_the_daemon() -> None:
    at = storing("abc")
    [said] = why(at, packed("abc")[2])
    assert said.endswith("; storage has it, from before")
    [said] = why(at, bytes(KEY_BYTES))
    assert "storage" not in said
