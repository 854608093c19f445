"""Blocks that another node computes: fetched as they are sealed there, for as long as there is progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from cachesvc.flows import expected as flow
from cachesvc.flows.allocate import allocate
from cachesvc.flows.core import Promise
from cachesvc.flows.leases import process_arrived
from cachesvc.flows.loads import Sharing
from cachesvc.flows.match import match
from cachesvc.flows.recycle import release
from cachesvc.ledger.block_ledger import BlockLedger
from cachesvc.ledger.ledger import Model
from cachesvc.model.answers import LONGEST_EXPECTED_WAIT_SECONDS, Expected, Matched, Wait
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.numbers import Party, share_of
from cachesvc.model.words import KEY_BYTES, PageState
from cachesvc.peer.fleet import Peer
from cachesvc.questions.explanation import EXPECTATIONS
from tests.unit.peer.peer_rig import NearControl
from tests.unit.rigs.ledger_rig import TOKEN, chain, prefill
from tests.unit.rigs.storage_flows_rig import GONE, LENT, StorageRig, storing


def test_each_piece_is_fetched_as_it_is_sealed() -> None:
    following = Following()
    assert following.look() == (0, 8)
    assert following.lenders.asked == [(8, flow.POLL_SECONDS)]
    following.promise(3, 5)
    assert following.lenders.asked[-1] == (5, flow.POLL_SECONDS), "the rest is asked for at once"
    assert following.look() == (0, 8), "the fetch is on its way"
    following.at.tell(range(3), LENT)
    assert following.look() == (3, 5)
    following.promise(5)
    following.at.tell(range(5), LENT)
    assert following.look() == (8, 0)
    assert following.ended("arrived") == 1
    assert following.rig.core.counters["expected_blocks"] == 8
    assert following.rig.core.counters["match_requests"] == 1, "looks that found it coming are no requests"
    assert following.rig.model.hit_blocks == {"device": 0, "host": 0, "storage": 8}
    assert not following.rig.core.ledger.tickets.running


def test_what_is_lent_behind_what_is_expected_comes_along() -> None:
    following = Following()
    assert following.look(blocks=6) == (0, 6)
    assert following.lenders.asked == [(8, flow.POLL_SECONDS)]
    following.promise(3, 5)
    following.at.tell(range(3), LENT)
    assert following.look(blocks=6) == (3, 3)
    following.promise(5)
    following.at.tell(range(5), LENT)
    assert following.look(blocks=6) == (8, 0)
    assert following.ended("arrived") == 1
    assert following.rig.core.counters["expected_blocks"] == 8


def test_what_is_behind_what_is_expected_is_not_waited_for() -> None:
    following = Following()
    following.look(blocks=6)
    following.promise(6, 2)
    following.at.tell(range(6), LENT)
    assert following.ended("arrived") == 1
    assert following.look(blocks=6)[1] == 0
    assert not following.rig.core.ledger.tickets.running or following.storage.fetches[1:], "of the usual fetch alone"


def test_a_fetch_that_brings_nothing_is_tried_again_though_a_question_waits_behind_it() -> None:
    following = Following()
    following.look()
    following.promise(3, 5)
    following.at.tell(range(3), GONE)
    late = following.lenders.told[-1]
    following.pass_time(flow.FAILED_PAUSE_SECONDS)
    assert [blocks for blocks, _ in following.lenders.asked] == [8, 5, 8]
    late(Promise(5, 0, 1))
    following.promise(8)
    following.at.tell(range(8), LENT)
    assert following.look() == (8, 0)


def test_the_absence_of_the_rest_ends_no_fetch_that_runs() -> None:
    following = Following()
    following.look(is_computed=True)
    following.promise(3)
    following.promise(0)
    assert following.look(is_computed=True) == (0, 8)
    following.at.tell(range(3), LENT)
    assert following.look(is_computed=True)[0] == 3
    following.promise(0)
    assert following.ended("absent") == 1
    assert following.rig.core.counters["expected_blocks"] == 3


def test_a_call_that_waits_is_run_again_until_all_is_here() -> None:
    following = Following()
    ask = following.ask(Expected(PEER))
    waited = ask()
    assert isinstance(waited, Wait)
    following.promise(8)
    assert isinstance(ask(), Wait)
    following.at.tell(range(8), LENT)
    assert not following.rig.core.ledger.tickets.is_running(waited.tickets[0])
    answer = ask()
    assert isinstance(answer, Matched)
    assert (answer.host_blocks, answer.coming_blocks) == (8, 0)


def test_a_call_that_looks_again_looks_nothing_up_before_its_last_block_is_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    following, looked = Following(), list[int]()
    find = BlockLedger.find

    def counted(blocks: BlockLedger, keys: bytes, *rest: Any) -> Any:
        looked.append(len(keys))
        return find(blocks, keys, *rest)

    monkeypatch.setattr(BlockLedger, "find", counted)
    ask = following.ask(Expected(PEER))
    assert isinstance(ask(), Wait)
    looked.clear()
    for _ in range(3):
        following.pass_time(0.5)
        assert isinstance(ask(), Wait)
    assert looked == []
    following.promise(3, 5)
    following.at.tell(range(3), LENT)
    assert isinstance(ask(), Wait)
    following.promise(5)
    following.at.tell(range(5), LENT)
    answer = ask()
    assert isinstance(answer, Matched)
    assert (answer.host_blocks, answer.coming_blocks) == (8, 0)


def test_a_call_that_waits_says_after_a_while_what_is_coming() -> None:
    following = Following()
    ask = following.ask(Expected(PEER, patience=600.0))
    assert isinstance(ask(), Wait)
    following.rig.now += LONGEST_EXPECTED_WAIT_SECONDS
    answer = ask()
    assert isinstance(answer, Matched)
    assert answer.coming_blocks == 8


def test_a_silent_peer_is_given_up_after_the_callers_patience_with_its_question_under_way() -> None:
    following = Following()
    following.look(patience=3.0)
    following.pass_time(2.0)
    assert following.look(patience=3.0) == (0, 8)
    following.pass_time(1.5)
    assert following.look(patience=3.0)[1] == 0
    assert following.ended("silent") == 1
    following.promise(8)
    assert not following.storage.fetches[1:], "a late answer begins nothing"


def test_progress_renews_the_patience() -> None:
    following = Following()
    for sealed in range(1, 8):
        following.look(patience=3.0)
        following.promise(1, 8 - sealed)
        following.pass_time(2.0)
        following.at.tell([0], LENT)
        assert following.look(patience=3.0) == (sealed, 8 - sealed)


def test_what_a_peer_has_computed_and_lacks_is_not_waited_for() -> None:
    following = Following()
    following.look(is_computed=True)
    following.promise(0)
    assert following.look(is_computed=True)[1] == 0
    assert following.ended("absent") == 1


def test_what_the_peers_request_has_given_up_is_not_waited_for() -> None:
    following = Following()
    ask = following.ask(Expected(PEER, patience=600.0))
    waited = ask()
    assert isinstance(waited, Wait)
    following.promise(3, 5)
    following.give_up()
    assert isinstance(ask(), Wait)
    assert following.ended("given_up") == 0, "what was lent before is on its way"
    following.at.tell(range(3), LENT)
    following.give_up()
    assert following.ended("given_up") == 1
    assert not following.rig.core.ledger.tickets.is_running(waited.tickets[0]), "the call goes on"
    assert following.look()[1] == 0


def test_a_prefill_that_has_not_begun_is_waited_for() -> None:
    following = Following()
    following.look()
    following.promise(0)
    assert following.look() == (0, 8)
    following.pass_time(0.2)
    assert len(following.lenders.asked) == 2, "it is asked again after a pause"


def test_a_peer_of_another_life_computes_nothing_for_this_node() -> None:
    following = Following()
    following.look()
    following.promise(0, 8, epoch=1)
    following.pass_time(0.2)
    following.promise(0, 8, epoch=2)
    assert following.look()[1] == 0
    assert following.ended("unreachable") == 1


def test_an_unreachable_peer_that_has_computed_all_is_given_up_soon() -> None:
    following = Following()
    following.look(is_computed=True)
    for _ in range(flow.MOST_FAILURES):
        following.promise(problem="it does not answer")
        following.pass_time(0.4)
    assert following.look(is_computed=True)[1] == 0
    assert following.ended("unreachable") == 1


def test_a_peer_that_failed_another_request_is_asked_once_its_pause_is_over() -> None:
    following = Following()
    peer = Peer(NearControl.__new__(NearControl), lambda: following.rig.now)
    peer.did_not_answer("another request's answer was late", following.rig.now)
    following.look(is_computed=True)
    while len(following.lenders.asked) < flow.MOST_FAILURES:
        assert not peer.is_usable
        following.promise(problem="it is left alone for a while")
        following.pass_time(flow.FAILED_PAUSE_SECONDS)
    assert peer.is_usable
    following.promise(8)
    following.at.tell(range(8), LENT)
    assert following.look(is_computed=True) == (8, 0)


def test_a_peer_whose_stream_broke_is_asked_once_its_pause_is_over() -> None:
    following = Following()
    peer = Peer(NearControl.__new__(NearControl), lambda: following.rig.now)
    following.look(is_computed=True)
    following.promise(8)
    peer.did_not_send("a connection took too long", following.rig.now)
    following.at.tell(range(8), GONE)
    while len(following.lenders.asked) < 2:
        following.pass_time(flow.PAUSE_SECONDS)
    assert peer.is_usable
    following.promise(8)
    following.at.tell(range(8), LENT)
    assert following.look(is_computed=True) == (8, 0)


def test_a_refused_peer_is_not_expected_and_no_address_is_an_error() -> None:
    following = Following()
    following.lenders.refuses = "no network of peer_allow"
    assert following.look()[1] == 0
    assert following.ended("other") == 1
    with pytest.raises(InvalidRequest, match=r"expected\.peer"):
        following.look(peer="nowhere")


def test_without_a_match_nothing_is_asked_or_fetched_any_more() -> None:
    following = Following()
    following.look(patience=600.0)
    following.pass_time(flow.IDLE_SECONDS + 0.1)
    assert following.ended("other") == 1
    following.promise(8)
    assert not following.storage.fetches
    assert not following.rig.core.ledger.tickets.running
    following.pass_time(flow.KEEP_SECONDS)
    assert not following.rig.model.stored.expectations, "it is forgotten"


def test_what_a_request_expected_that_has_ended_is_not_fetched_any_more() -> None:
    following = Following()
    following.look()
    following.promise(3, 5)
    following.look(is_over=True)
    assert following.lenders.dropped == [chain(*PROMPT)[:KEY_BYTES]], "what reads its blocks may end"
    asked = len(following.lenders.asked)
    assert following.ended("other") == 1
    following.at.tell(range(3), GONE)
    following.promise(8)
    following.pass_time(flow.FAILED_PAUSE_SECONDS)
    assert len(following.lenders.asked) == asked
    assert len(following.storage.fetches) == 1, "nor does the last Match begin a fetch"
    assert following.look() == (0, 8), "another request of the prompt begins anew"


@pytest.mark.parametrize("is_open", [True, False])
def test_what_is_expected_is_wanted_for_longer_while_a_sequence_of_its_match_is_open(is_open: bool) -> None:
    following = Following()
    assert isinstance(following.ask(Expected(PEER, waits=False))(), Matched)
    following.promise(3, 5)
    if not is_open:
        following.rig.run(release, following.lease, following.number)
    following.pass_time(flow.RELEASED_SECONDS + 0.1)
    assert bool(following.lenders.dropped) is not is_open, "streams end with what no request waits for"
    assert following.ended("other") == (not is_open)
    if is_open:
        following.pass_time(flow.IDLE_SECONDS)
        assert following.ended("other") == 1
        following.rig.run(release, following.lease, following.number)
    following.at.tell(range(3), GONE)
    assert following.look() == (0, 8)


def test_the_end_of_one_request_ends_no_fetch_that_another_waits_for() -> None:
    following = Following()
    other = "10.0.0.2:7100"
    following.look()
    following.promise(3, 5)
    following.look(peer=other)
    following.promise(3, 5)
    following.look(peer=other, is_over=True)
    assert not following.lenders.dropped
    following.at.tell(range(3), LENT)
    assert following.look() == (3, 5)


def test_what_was_lent_and_is_not_fetched_yet_is_given_back_with_its_request() -> None:
    following = Following(host=2)
    following.look()
    following.rig.core.ledger.moment.seconds = following.rig.now
    [known] = following.rig.model.stored.expectations.values()
    known.lent = (2, 5)
    following.look(is_over=True)
    assert following.lenders.dropped == [chain(*PROMPT)[2 * KEY_BYTES : 3 * KEY_BYTES]]


def test_an_engine_that_was_held_up_goes_on_expecting() -> None:
    following = Following()
    following.look()
    following.pass_time(flow.IDLE_SECONDS + 0.1)
    assert following.look() == (0, 8)
    following.promise(8)
    following.at.tell(range(8), LENT)
    assert following.look() == (8, 0)


def test_what_was_lent_and_does_not_come_is_asked_for_once_more() -> None:
    following = Following()
    following.look()
    for _ in range(flow.MOST_FAILURES):
        following.promise(8)
        following.at.tell(range(8), GONE)
        following.pass_time(flow.FAILED_PAUSE_SECONDS)
    assert following.ended("other") == 1
    assert following.at.pages(PageState.IN_FLIGHT) == 0
    assert following.look()[1] == 0


def test_a_host_without_room_ends_it() -> None:
    following = Following(host=4)
    following.look()
    following.promise(8)
    following.at.tell(range(2), LENT)
    following.promise(6)
    following.at.tell(range(2), LENT)
    following.promise(4)
    assert following.look()[1] == 0
    assert following.ended("other") == 1


def test_what_this_node_computes_itself_is_waited_for_here() -> None:
    following = Following()
    following.lenders.here = {PEER}
    assert following.look() == (0, 8)
    assert not following.lenders.asked


def test_what_this_node_has_computed_and_evicted_is_not_waited_for() -> None:
    following = Following()
    following.lenders.here = {PEER}
    assert following.look(is_computed=True)[1] == 0
    assert following.ended("absent") == 1


def test_what_an_engine_of_this_node_is_about_to_seal_is_waited_for() -> None:
    following = Following()
    following.lenders.here = {PEER}
    following.rig.run(match, following.lease, 99, chain(*PROMPT), 0)
    following.rig.run(allocate, following.lease, 99, len(PROMPT))
    assert following.look(is_computed=True) == (0, 8)
    following.rig.run(release, following.lease, 99)
    following.pass_time(flow.PAUSE_SECONDS)
    assert following.look(is_computed=True)[1] == 0, "it was released without having sealed them"
    assert following.ended("absent") == 1


def test_what_is_being_copied_from_another_gpu_of_this_node_is_waited_for() -> None:
    """A long prompt takes longer than a call waits for another replica's blocks."""
    following = Following(replicas=2)
    following.lenders.here = {PEER}
    prefill(following.rig, following.rig.lease("b", 1), 98, PROMPT)
    ask = following.ask(Expected(PEER, 0, 5.0, is_computed=True, waits=False))
    began = ask()
    assert isinstance(began, Wait)
    assert began.tickets
    late = ask()
    assert isinstance(late, Matched)
    assert late.coming_blocks == len(PROMPT)
    following.rig.run(release, following.lease, following.number)
    for ticket in began.tickets:
        following.rig.land(ticket)
    assert following.look(is_computed=True) == (8, 0)


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "MOST_EXPECTATIONS", 16)
    monkeypatch.setattr(flow, "FLOOR_EXPECTATIONS", 3)


def shares(following: Following, processes: int) -> list[int]:
    """Numbers of prompts that each of some processes is let expect, one after another."""
    got = []
    for number in range(processes):
        following.be_other_process(number)
        asked = range(1, flow.MOST_EXPECTATIONS + 9)
        got.append(sum(following.look(peer=f"10.0.{number}.1:{port}")[1] == 8 for port in asked))
    return got


@pytest.mark.usefixtures("_few")
def test_a_process_has_its_share_of_them_and_each_that_comes_later_a_floor() -> None:
    following = Following()
    assert shares(following, 8) == [12, 3, 3, 3, 3, 3, 3, 2], "no more than twice the limit, however many come"
    stored = following.rig.model.stored.expectations
    assert len(stored) == flow.FLOORS * flow.MOST_EXPECTATIONS
    assert following.rig.core.counters["expectations_refused"] == 8 * 24 - 32


@pytest.mark.usefixtures("_few")
def test_the_refused_are_remembered_as_far_as_there_is_room() -> None:
    following = Following()
    looks = [following.look(peer=f"10.0.0.1:{port}")[1] for port in range(1, 2 * flow.MOST_EXPECTATIONS + 9)]
    share = share_of(flow.MOST_EXPECTATIONS, 1)
    assert looks == [8] * share + [0] * (len(looks) - share)
    stored = following.rig.model.stored.expectations
    assert len(stored) == flow.FLOORS * flow.MOST_EXPECTATIONS
    assert [each.end for each in stored.values()][-1] == flow.ExpectationEnd.CROWDED


def test_prompts_that_end_with_one_key_are_not_taken_for_each_other() -> None:
    following = Following()
    right = chain(*PROMPT)
    wrong = chain(*"ijklmno") + right[-KEY_BYTES:]
    assert following.look(keys=wrong) == (0, 8)
    following.promise(0)
    assert following.look(keys=right) == (0, 8)
    assert len(following.lenders.asked) == 2, "it is asked for by its own keys"
    following.promise(8)
    following.at.tell(range(8), LENT)
    assert following.look(keys=right) == (8, 0)


@pytest.mark.usefixtures("_few")
def test_one_that_found_no_room_is_begun_once_there_is_some() -> None:
    following = Following()
    for port in range(1, flow.MOST_EXPECTATIONS):
        following.look(peer=f"10.0.0.1:{port}")
    assert following.look()[1] == 0
    following.pass_time(flow.IDLE_SECONDS + 0.1)
    assert following.look()[1] == 8


def test_there_are_only_so_many_however_many_processes() -> None:
    following = Following()
    model = following.rig.model
    assert following.look()[1] == 8
    [first] = model.stored.expectations.values()
    for number in range(flow.FLOORS * flow.MOST_EXPECTATIONS - 1):
        held = replace(first, peer=str(number), party=(9, number))
        model.stored.expectations[held.name] = held
    assert following.look(peer="10.0.0.2:1")[1] == 0
    assert len(model.stored.expectations) == flow.FLOORS * flow.MOST_EXPECTATIONS


def test_their_keys_take_only_so_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "MOST_KEY_BYTES", 24 * KEY_BYTES)
    monkeypatch.setattr(flow, "FLOOR_KEY_BYTES", 0)
    following = Following()
    for port in (1, 2):
        assert following.look(peer=f"10.0.0.1:{port}")[1] == 8
    assert following.look(peer="10.0.0.1:3")[1] == 0
    assert following.rig.core.counters["expectations_refused"] == 1
    following.be_other_process()
    assert following.look(peer="10.0.0.1:3")[1] == 0, "a quarter of the memory is left, and a prompt takes a third"
    following.pass_time(flow.IDLE_SECONDS + 0.1)
    assert following.look(peer="10.0.0.1:3")[1] == 8, "those that have ended keep one key"


def test_a_process_may_expect_one_prompt_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "MOST_KEY_BYTES", 24 * KEY_BYTES)
    monkeypatch.setattr(flow, "FLOOR_KEY_BYTES", 8 * KEY_BYTES)
    following = Following()
    got = []
    for number in range(6):
        following.be_other_process(number)
        got.append([following.look(peer=f"10.0.{number}.1:{port}")[1] for port in (1, 2, 3)])
    assert got == [[8, 8, 0], *[[8, 0, 0]] * 4, [0, 0, 0]], "no more than twice the memory, however many come"


def test_every_end_has_words_for_operators() -> None:
    assert set(EXPECTATIONS) == {end.value for end in flow.ExpectationEnd}


def test_a_peer_that_is_paused_is_asked_once_it_may_be_and_that_is_no_failure() -> None:
    following = Following()
    assert isinstance(following.ask(Expected(PEER, is_computed=True, waits=False))(), Matched)
    for _ in range(2 * flow.MOST_FAILURES):
        asked = len(following.lenders.asked)
        following.lenders.told[-1](Promise(problem="it failed another request", ask_in=0.5))
        following.pass_time(0.4)
        assert len(following.lenders.asked) == asked
        following.pass_time(0.2)
        assert len(following.lenders.asked) == asked + 1
    following.promise(8)
    following.at.tell(range(8), LENT)
    assert following.look(is_computed=True) == (8, 0)


def test_a_peer_that_is_left_alone_for_long_is_done_without_where_it_has_computed_all() -> None:
    for is_computed in (True, False):
        following = Following()
        following.look(is_computed=is_computed)
        following.lenders.told[-1](Promise(problem="no answer", ask_in=2 * flow.LONGEST_PAUSE_SECONDS))
        assert following.ended("unreachable") == is_computed


def test_a_peer_that_sends_a_little_each_time_is_not_followed_for_ever() -> None:
    following = Following()
    following.look(patience=60.0)
    for sealed in range(1, 1 + flow.MOST_FAILURES):
        assert following.ended("other") == 0
        following.promise(9 - sealed)
        following.at.tell([0], LENT)
        following.look(patience=60.0)
        following.pass_time(2 * flow.SILENT_SECONDS)
        following.at.tell(range(1, 9 - sealed), GONE)
        assert following.rig.core.counters["expected_blocks"] == sealed
    assert following.ended("other") == 1


def test_a_peer_whose_streams_are_cut_again_and_again_is_followed_to_the_end() -> None:
    following = Following()
    following.look()
    for sealed in range(1, 9):
        following.promise(9 - sealed)
        following.at.tell([0], LENT)
        following.at.tell(range(1, 9 - sealed), GONE)
        assert following.look()[0] == sealed
    assert following.ended("arrived") == 1


# Fetches of one prompt that another node computes, which run at the same time, each behind the one before.


def fetched(following: Following) -> list[int]:
    """Blocks of each fetch."""
    return [len(each.keys) // KEY_BYTES for each in following.storage.fetches]


def test_what_is_lent_while_a_fetch_runs_is_fetched_beside_it() -> None:
    following = Following()
    following.look()
    for lent in (3, 2, 1, 1):
        following.promise(lent, 2)
    assert fetched(following) == [3, 2, 1]
    assert len(following.lenders.asked) == 4, "one loan ahead is enough"
    following.at.tell(range(2), LENT, fetch=1)
    following.at.tell(range(1), LENT, fetch=2)
    assert following.look() == (0, 8), "they come under what is not there yet"
    following.at.tell(range(3), LENT, fetch=0)
    assert following.look() == (6, 2)
    assert fetched(following) == [3, 2, 1, 1]
    following.at.tell(range(1), LENT)
    following.promise(1)
    following.at.tell(range(1), LENT)
    assert following.look() == (8, 0)
    assert following.rig.core.counters["expected_blocks"] == 8
    assert not following.rig.model.stored.fetches
    assert not following.rig.core.ledger.tickets.running


def test_where_many_fetches_run_each_prompt_has_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "MOST_BESIDE", 1)
    following = Following()
    following.look()
    following.promise(3, 5)
    following.promise(2, 3)
    assert fetched(following) == [3]
    following.at.tell(range(3), LENT)
    assert fetched(following) == [3, 2]


@pytest.mark.parametrize("is_last_first", [False, True])
def test_a_fetch_that_brings_less_leaves_what_was_lent_behind_it(is_last_first: bool) -> None:
    following = Following()
    following.look()
    following.promise(3, 5)
    following.promise(5)
    for fetch in (1, 0) if is_last_first else (0, 1):
        if fetch:
            following.at.tell(range(5), LENT, fetch=1)
        else:
            following.at.tell([0], LENT, fetch=0)
            following.at.tell([1, 2], GONE, fetch=0)
    assert following.lenders.asked[-1] == (7, flow.POLL_SECONDS), "it is asked for again, from the gap on"
    assert following.at.pages(PageState.IN_FLIGHT) == following.at.pages(PageState.QUARANTINED) == 0
    following.promise(7)
    following.at.tell(range(7), LENT)
    assert following.look() == (8, 0)


def test_a_fetch_that_fails_fails_those_behind_it_once() -> None:
    following = Following()
    following.look()
    for lent in (3, 2, 3):
        following.promise(lent, 3)
    following.at.tell(range(3), GONE, fetch=0)
    following.pass_time(flow.FAILED_PAUSE_SECONDS)
    assert following.look() == (0, 8), "one failure is not the end"
    assert following.at.pages(PageState.QUARANTINED) == 5, "bytes of the others may still come"
    following.at.tell(range(2), LENT, fetch=1)
    following.at.tell(range(3), LENT, fetch=2)
    assert following.at.pages(PageState.QUARANTINED) == 0
    following.promise(8)
    following.at.tell(range(8), LENT)
    assert following.look() == (8, 0)


# A decoder's daemon that follows a prefill of another node, which the test plays.

PEER = "10.0.0.1:7100"
PROMPT = "abcdefgh"
PROMPT_KEYS = chain(*PROMPT)


class RecordingLenders:
    """Keeps questions, which the test answers. ``refuses``: why a peer is not asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, float]] = []
        self.told: list[Callable[[Promise], None]] = []
        self.refuses = ""
        self.here: set[str] = set()
        self.dropped: list[bytes] = []

    def drop(self, model: Model, keys: Sequence[bytes]) -> None:
        self.dropped += keys

    def is_here(self, peer: str) -> bool:
        return peer in self.here

    def ask(
        self, model: Model, party: Party, keys: bytes, peer: str, seconds: float, told: Callable[[Promise], None]
    ) -> str:
        if not self.refuses:
            self.asked.append((len(keys) // KEY_BYTES, seconds))
            self.told.append(told)
        return self.refuses


class Following:
    """A decoder's daemon whose peer is the test."""

    def __init__(self, host: int = 16, replicas: int = 1) -> None:
        self.at: StorageRig = storing(host=host, replicas=replicas)
        self.at.storage.knows = False
        self.rig, self.storage = self.at.rig, self.at.storage
        self.lenders = RecordingLenders()
        self.rig.core.lenders = self.lenders
        self.number = 0
        self.lease = self.at.lease

    def be_other_process(self, number: int = 0) -> None:
        """The Matches that follow are another process's."""
        name = f"other{number}"
        process_arrived(self.rig.core, TOKEN + name.encode(), 2 + number, 1)
        self.lease = self.rig.lease(name)

    def look(
        self,
        *,
        is_computed: bool = False,
        patience: float = 5.0,
        peer: str = PEER,
        blocks: int = 0,
        keys: bytes = PROMPT_KEYS,
        is_over: bool = False,
    ) -> tuple[int, int]:
        """Blocks that are here, and that are coming, by a Match that does not wait."""
        expected = Expected(peer, blocks, patience, is_computed, waits=False, is_over=is_over)
        answer = self.ask(expected, keys)()
        while isinstance(answer, Wait) and not answer.tickets:
            answer = self.ask(expected, keys)()
        if isinstance(answer, Wait):  # of the usual fetch, once nothing is expected any more
            return -1, 0
        self.rig.run(release, self.lease, self.number)
        return answer.device_blocks + answer.host_blocks, answer.coming_blocks

    def ask(self, expected: Expected, keys: bytes = PROMPT_KEYS) -> Callable[[], Matched | Wait]:
        """One Match call, to be run again and again."""
        self.number += 1
        self.rig.core.ledger.moment.seconds = self.rig.now
        sharing = Sharing(expected=expected)
        return partial(self.rig.once, partial(match, sharing=sharing), self.lease, self.number, keys, 0)

    def promise(self, lent: int = 0, computing: int = 0, epoch: int = 1, problem: str = "") -> None:
        """The peer answers the last question."""
        self.rig.core.ledger.moment.seconds = self.rig.now
        self.lenders.told[-1](Promise(lent, computing, epoch, problem))
        self.at.settle()

    def give_up(self) -> None:
        """The peer answers the last question: its request has ended without these blocks."""
        self.lenders.told[-1](Promise(epoch=1, is_given_up=True))
        self.at.settle()

    def pass_time(self, seconds: float) -> None:
        self.rig.now += seconds
        self.rig.core.ledger.moment.seconds = self.rig.now
        flow.tick_expected(self.rig.core)
        self.at.settle()

    def ended(self, how: str) -> int:
        return self.rig.core.counters.get(f"expectations_ended_{how}", 0)
