"""Long flows are cut in turns: each is short whatever was asked for, the ledger adds up between any two, others are
served meanwhile, and what is given up half-way leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from cachesvc.flows import pinning
from cachesvc.flows.allocate import allocate, refill_stock, swap_in, swap_out
from cachesvc.flows.core import TURN, Turns, resolve, tidy, tidy_all
from cachesvc.flows.leases import close_lease, lose, lose_silent, process_gone
from cachesvc.flows.match import match
from cachesvc.flows.publish import Publishing, publish
from cachesvc.flows.recycle import Recycling, recycle, release
from cachesvc.ledger.tickets import TicketState
from cachesvc.model.answers import Allocated, GroupCells, Matched, Published, Recycled, Wait
from cachesvc.model.errors import LeaseLost, LedgerBroken, NotFound, NotOwned, PoolExhausted
from cachesvc.model.layout import Layout
from cachesvc.model.words import KEY_BYTES, NO_PAGE, PageState, WritePolicy
from tests.unit.rigs.ledger_rig import TOKEN, Rig, chain, one_group, prefill, rig_of, serve, windowed
from tests.unit.rigs.turns_rig import SMALL, full, own, reserved

# -- eviction ------------------------------------------------------------------------------------------------------


def test_an_allocation_evicts_in_turns_and_keeps_what_it_has_made_free() -> None:
    rig, a, b = full(8)
    rig.run(match, a, 1, b"", 0)
    rig.run(match, b, 99, b"", 0)
    rig.core.ledger.leases[b].grown = 0
    evicted = []
    while isinstance(answer := rig.once(allocate, a, 1, 6), Wait):
        evicted.append(8 - len(rig.model.blocks.index))
        assert answer.tickets == ()
        with pytest.raises(PoolExhausted):
            rig.once(allocate, b, 99, 8)
        assert rig.once(refill_stock, b, (1,)) == ()
    assert isinstance(answer, Allocated)
    assert evicted[:2] == [2, 4]
    assert len(answer.tables[0].pages) == 6
    assert (rig.free(), reserved(rig)) == ([0], 0)


def test_growth_beyond_a_turn_is_replaced_before_the_next_step() -> None:
    """A refill evicts a turn's worth, and the rest goes once it is answered: the stock keeps up with the engine."""
    rig, a, b = full(24)
    for sequence in range(1, 7):
        rig.run(match, a, sequence, b"", 0)
    rig.core.ledger.leases[b].grown = 0
    rig.core.ledger.leases[a].grown = 6
    rig.once(refill_stock, a, (12,))
    assert len(rig.core.ledger.leases[a].stock[0]) == SMALL.evicted
    while rig.core.chores:
        tidy(rig.core.chores)
        rig.check()
    assert rig.free() == [6 - SMALL.evicted]
    rig.once(refill_stock, a, (12,))
    assert len(rig.core.ledger.leases[a].stock[0]) == 6
    assert rig.core.ledger.leases[a].grown == 0
    assert rig.once(refill_stock, a, (12,)) == (), "nothing twice"


def test_a_demand_that_cannot_be_met_evicts_nothing_in_any_turn() -> None:
    rig, a, b = full(8)
    rig.run(match, b, 99, chain(7), 0)
    rig.run(match, a, 1, b"", 0)
    with pytest.raises(PoolExhausted):
        rig.once(allocate, a, 1, 8)
    assert len(rig.model.blocks.index) == 8
    assert not rig.place().reservations


def test_write_backs_of_a_long_eviction_begin_while_it_goes_on() -> None:
    rig, a, _ = full(8, host=16)
    rig.run(match, a, 1, b"", 0)
    assert rig.once(allocate, a, 1, 6).tickets == ()
    assert len(rig.mover.transfers) == 1
    assert isinstance(rig.run(allocate, a, 1, 6), Allocated)
    assert len(rig.host_keys()) >= 6


def test_pages_are_taken_in_turns_and_go_with_the_sequence() -> None:
    rig = rig_of(one_group(), device=(8,))
    a, b = rig.lease("a"), rig.lease("b")
    rig.core.turns = SMALL
    rig.run(match, a, 1, chain(*"abcdefg"), 0)
    taken = []
    while isinstance(rig.once(allocate, a, 1, 7), Wait):
        taken.append(8 - rig.free()[0])
        assert rig.place().pools[0].unreserved == 1
        if len(taken) == 3:
            break
    assert taken == [2, 4, 6]
    rig.run(match, b, 1, b"", 0)
    with pytest.raises(PoolExhausted):
        rig.once(allocate, b, 1, 2)
    rig.run(release, a, 1)
    assert rig.free() == [8]
    assert rig.model.computing == {}


def test_a_lease_that_is_lost_between_turns_loses_what_was_kept_and_taken() -> None:
    rig, a, _ = full(8)
    rig.run(match, a, 1, b"", 0)
    for _ in range(4):
        assert isinstance(rig.once(allocate, a, 1, 6), Wait)
    process_gone(rig.core, TOKEN + b"a")
    while rig.core.chores:
        tidy(rig.core.chores)
        rig.check()
    with pytest.raises(LeaseLost):
        rig.once(allocate, a, 1, 6)
    assert not rig.place().reservations
    assert rig.place().pools[0].counts[PageState.PRIVATE] == 0


# -- ends ----------------------------------------------------------------------------------------------------------


def test_a_release_in_turns_is_over_for_others_from_the_first_on_and_can_be_sent_again() -> None:
    rig = rig_of(one_group(), device=(8,))
    a = rig.lease("a")
    own(rig, a, 1, 7)
    rig.core.turns = SMALL
    assert isinstance(rig.once(release, a, 1), Wait)
    assert rig.free() == [3]
    for flow in ((allocate, a, 1, 8), (publish, a, 1, 0, chain("a"), 1), (swap_out, a, 1)):
        with pytest.raises(NotFound):
            rig.once(*flow)
    assert rig.run(release, a, 1) == 7
    assert rig.free() == [8]
    with pytest.raises(NotFound):
        rig.once(release, a, 1)


def test_a_sequence_whose_swap_lands_between_the_turns_of_its_release() -> None:
    rig = rig_of(one_group(), device=(8,), host=(8,))
    a = rig.lease("a")
    own(rig, a, 1, 6)
    rig.core.turns = SMALL
    rig.run(swap_out, a, 1)
    rig.settle()
    rig.run(swap_in, a, 1)
    rig.core.ledger.leases[a].sequences[1].keys = bytearray(chain(*"abcdef"))
    rig.core.ledger.leases[a].sequences[1].declare(6, 6)
    assert isinstance(rig.once(release, a, 1), Wait)
    rig.settle()
    rig.run(release, a, 1)
    assert rig.free() == [8]
    assert rig.host.pools[0].free == 8


@pytest.mark.parametrize("quiesced", [True, False])
def test_a_lease_is_lost_at_once_and_what_it_holds_in_turns(quiesced: bool) -> None:
    rig = rig_of(one_group(), device=(16,))
    a = rig.lease("a")
    own(rig, a, 1, 5)
    prefill(rig, a, 2, "abc")
    rig.run(refill_stock, a, (3,))
    rig.core.turns = SMALL
    answer = close_lease(rig.core, a, quiesced=quiesced)
    rig.check()
    with pytest.raises(LeaseLost):
        resolve(rig.core.ledger, a, 0.0)
    assert isinstance(answer, Wait) == quiesced
    rounds = 0
    while rig.core.chores:
        assert (close_lease(rig.core, a, quiesced=quiesced) is not None) == quiesced
        tidy(rig.core.chores)
        rig.check()
        rounds += 1
    assert rounds > 2
    pool = rig.place().pools[0]
    assert pool.counts[PageState.PRIVATE] == 0
    assert pool.counts[PageState.QUARANTINED] == (0 if quiesced else 8)
    assert close_lease(rig.core, a, quiesced=quiesced) is None
    process_gone(rig.core, TOKEN + b"a")
    tidy_all(rig.core)
    rig.check()
    assert rig.free() == [13]
    assert not rig.core.ledger.leases


def test_a_process_that_goes_while_its_silent_lease_is_ending() -> None:
    rig = rig_of(one_group(), device=(16,))
    a = rig.lease("a")
    own(rig, a, 1, 8)
    rig.core.turns = SMALL
    lose_silent(rig.core, 1.0, 10.0)
    assert rig.core.chores
    process_gone(rig.core, TOKEN + b"a")
    rig.check()
    while rig.core.chores:
        tidy(rig.core.chores)
        rig.check()
    assert rig.free() == [16]
    assert not rig.core.ledger.leases


def test_who_needs_pages_that_are_on_their_way_back_has_another_turn() -> None:
    rig = rig_of(one_group(), device=(8,))
    a, b = rig.lease("a"), rig.lease("b")
    own(rig, a, 1, 8)
    rig.run(match, b, 1, b"", 0)
    rig.core.turns = SMALL
    process_gone(rig.core, TOKEN + b"a")
    assert isinstance(rig.once(allocate, b, 1, 8), Wait)
    assert isinstance(rig.run(allocate, b, 1, 8), Allocated)


# -- publish -------------------------------------------------------------------------------------------------------


def publishing(rig: Rig, lease: str, sequence: int, keys: bytes) -> Callable[[], Published | Wait]:
    progress = Publishing()
    return lambda: rig.once(publish, lease, sequence, 0, keys, 0, progress)


@pytest.mark.parametrize("layout", [one_group(), windowed(8)])
def test_a_publish_in_turns_answers_as_one_in_one_go(layout: Any) -> None:
    answers = []
    for sizes in (Turns(), SMALL):
        rig = rig_of(layout, device=(32,) * len(layout.groups))
        a, b = rig.lease("a"), rig.lease("b")
        prompt = "abcdefghi"
        rig.run(match, b, 1, b"", 0)
        rig.run(allocate, b, 1, 9)
        prefill(rig, a, 1, "abcde")
        rig.core.turns = sizes
        flow, runs = publishing(rig, b, 1, chain(*prompt)), 1
        while isinstance(answer := flow(), Wait):
            runs += 1
        answers.append(answer)
        assert (runs > 1) == (sizes is SMALL)
    assert answers[0] == answers[1]
    assert answers[0].duplicate_positions == (0, 1, 2, 3, 4)


def test_blocks_of_a_publish_whose_lease_is_lost_between_turns_stay() -> None:
    rig = rig_of(one_group(), device=(16,))
    a, b = rig.lease("a"), rig.lease("b")
    own(rig, a, 1, 6)
    rig.core.turns = SMALL
    flow = publishing(rig, a, 1, chain(*"abcdef"))
    assert isinstance(flow(), Wait)
    assert isinstance(flow(), Wait)
    process_gone(rig.core, TOKEN + b"a")
    with pytest.raises(LeaseLost):
        flow()
    tidy_all(rig.core)
    found = rig.run(match, b, 1, chain(*"abcdef"), 0)
    assert isinstance(found, Matched)
    assert found.device_blocks == 4
    assert rig.free() == [12]


def test_keys_that_contradict_each_other_far_behind_are_refused_before_anything_is_sealed() -> None:
    rig = rig_of(one_group(), device=(16,))
    a = rig.lease("a")
    rig.run(match, a, 1, chain(*"abcdef"), 0)
    rig.run(allocate, a, 1, 6)
    rig.core.turns = SMALL
    wrong = chain(*"abcdef")[: 5 * KEY_BYTES] + chain("z")
    with pytest.raises(Exception, match="contradict"):
        publishing(rig, a, 1, wrong)()
    assert len(rig.model.blocks.index) == 0


def test_a_publish_that_is_backed_up_evicts_a_turn_of_the_host_at_a_time_and_loses_no_backup() -> None:
    rig = rig_of(one_group(), device=(32,), host=(8,), policy=WritePolicy.WRITE_THROUGH)
    a = rig.lease("a")
    prefill(rig, a, 1, "stuvwxyz")
    rig.settle()
    rig.run(release, a, 1)
    own(rig, a, 2, 7)
    rig.core.turns = SMALL._replace(sealed=4)
    flow, runs = publishing(rig, a, 2, chain(*"abcdefg")), 1
    while isinstance(flow(), Wait):
        rig.settle()
        runs += 1
    rig.settle()
    assert runs > 2
    path = rig.model.blocks.index.path(rig.core.ledger.leases[a].sequences[2].anchor)
    assert [rig.host.is_hittable(row) for row in path] == [True] * 7


# -- landing -------------------------------------------------------------------------------------------------------


def loading(prompt: str) -> tuple[Rig, str, str, int]:
    """A prompt that lies on the host alone, and a sequence that loads it."""
    rig = rig_of(one_group(), device=(8,), host=(16,))
    a, b = rig.lease("a"), rig.lease("b")
    serve(rig, a, 1, prompt)
    own(rig, a, 2, 8)
    rig.settle()
    rig.run(release, a, 2)
    rig.run(match, a, 3, chain(*prompt), 0)
    [ticket] = rig.run(allocate, a, 3, len(prompt)).tickets
    rig.core.turns = SMALL
    return rig, a, b, ticket.id


def test_a_load_lands_root_first_and_whoever_comes_between_sees_a_prefix() -> None:
    rig, a, b, ticket = loading("abcdefg")
    assert rig.land(ticket) == []
    assert rig.core.ledger.tickets.is_running(ticket)
    hits = []
    while rig.core.chores:
        found = rig.run(match, b, 1, chain(*"abcdefg"), 0)
        hits.append(found.device_blocks)
        rig.run(release, b, 1)
        tidy(rig.core.chores)
        rig.check()
    assert hits == sorted(hits)
    assert 2 in hits
    assert not rig.core.ledger.tickets.is_running(ticket)
    assert rig.core.ledger.leases[a].sequences[3].sealed == 7


def test_a_load_that_cannot_be_settled_ends_as_failed() -> None:
    """A defect: it counted as a transfer under way for good."""
    rig, _, _, ticket = loading("abcdefg")
    ended: list[int] = []
    rig.core.on_ended = ended.extend
    assert rig.land(ticket) == []
    last = rig.model.blocks.index.rows[chain(*"abcdefg")[-KEY_BYTES:]]
    rig.place().pools[0].states[rig.place().pages[0][last]] = PageState.SEALED
    tidy(rig.core.chores)
    tidy(rig.core.chores)
    with pytest.raises(LedgerBroken, match="IllegalMove"):
        tidy(rig.core.chores)
    book = rig.core.ledger.tickets
    assert not book.is_running(ticket)
    assert book.ended[ticket].state is TicketState.FAILED
    assert not book.held
    assert ended == [ticket]


def test_a_load_that_failed_is_told_before_anything_of_it_goes() -> None:
    rig, a, b, ticket = loading("abcdefg")
    ended: list[int] = []
    rig.core.on_ended = ended.extend
    assert rig.land(ticket, "broken") == []
    assert "broken" in rig.core.ledger.leases[a].sequences[3].failed
    rig.run(match, b, 1, chain(*"abcdefg"), 0)
    waiting = rig.once(allocate, b, 1, 7)
    assert isinstance(waiting, Wait)
    assert list(waiting.tickets) == [ticket], "no call joins it: its waiters got the error"
    while rig.core.chores:
        tidy(rig.core.chores)
        rig.check()
    rig.settle()
    tidy_all(rig.core)
    rig.check()
    assert ticket in ended


# Pages that fall out of windows, and those of a released prompt's windows, go in turns.


def test_windows_are_let_go_of_in_turns() -> None:
    """A released prompt's windows become candidates some at a time, and none is dropped or held for good."""
    rig = rig_of(windowed(8), device=(32, 32))
    a = rig.lease("a")
    prefill(rig, a, 1, "abcdefghi")
    held = len(rig.core.ledger.leases[a].sequences[1].window_rows[1])
    rig.core.turns = SMALL
    runs = 0
    while isinstance(rig.once(release, a, 1), Wait):
        runs += 1
    assert runs >= held - 1
    assert not any(rig.place().window_pins[1])
    assert len(rig.place().window_leaves[1]) == held


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_recycle_in_turns_answers_as_one_in_one_go(is_shared: bool) -> None:
    answers = []
    for sizes in (Turns(), SMALL):
        rig = rig_of(windowed(8), device=(32, 32))
        a = rig.lease("a")
        if is_shared:
            prefill(rig, a, 1, "abcdefghi")
        else:
            own(rig, a, 1, 9)
        rig.core.turns = sizes
        recycling, runs = Recycling(), 1
        while isinstance(answer := rig.once(recycle, a, 1, 36, (), recycling), Wait):
            runs += 1
        answers.append((answer, rig.free()))
        assert (runs > 1) == (sizes is SMALL)
    assert answers[0] == answers[1]


def test_a_sequence_that_is_released_between_the_turns_of_a_recycle() -> None:
    rig = rig_of(windowed(8), device=(32, 32))
    a = rig.lease("a")
    own(rig, a, 1, 9)
    rig.core.turns = SMALL
    recycling = Recycling()
    assert isinstance(rig.once(recycle, a, 1, 36, (), recycling), Wait)
    rig.run(release, a, 1)
    assert isinstance(rig.once(recycle, a, 1, 36, (), recycling), Recycled)
    assert rig.free() == [32, 32]


# Pages that a call takes ahead, in turns: what becomes of them where it is given up.


def test_a_call_that_was_given_up_begins_with_the_pages_that_it_had() -> None:
    rig = rig_of(one_group(), device=(8,))
    a = rig.lease("a")
    rig.core.turns = SMALL
    rig.run(match, a, 1, b"", 0)
    wait = rig.once(allocate, a, 1, 6)
    assert isinstance(wait, Wait)
    assert wait.reserved is not None
    wait.reserved.release()
    rig.check()
    assert (rig.free(), reserved(rig)) == ([6], 0)
    answer = rig.run(allocate, a, 1, 1)
    assert isinstance(answer, Allocated)
    assert len(answer.tables[0].pages) == 1
    assert rig.free() == [7], "it wants no more than that now"
    rig.run(allocate, a, 1, 6)
    assert rig.free() == [2]
    rig.run(release, a, 1)
    assert rig.free() == [8]


def test_a_smaller_call_gives_back_what_a_larger_one_took_that_was_given_up() -> None:
    rig, a, _ = full(8)
    rig.run(match, a, 9, chain(*range(100, 108)), 0)
    sequence = rig.core.ledger.leases[a].sequences[9]
    while not sequence.pages_ahead or sequence.pages_ahead[0] < 6:
        assert isinstance(rig.once(allocate, a, 9, 8), Wait)
    assert len(rig.model.blocks.computing) == 6
    rig.run(allocate, a, 9, 1)
    assert (len(sequence.own[0]), sequence.pages_ahead) == (1, [])
    assert rig.free()[0] == 7
    assert len(rig.model.blocks.computing) == 1
    rig.run(allocate, a, 9, 3)
    assert (len(sequence.own[0]), len(rig.model.blocks.computing)) == (3, 3)
    rig.run(release, a, 9)
    assert (rig.free()[0], rig.model.blocks.computing) == (8, {})


def test_pages_that_a_call_has_taken_ahead_are_nobodys_to_recycle() -> None:
    rig = rig_of(one_group(), device=(8,))
    a = rig.lease("a")
    rig.core.turns = SMALL
    rig.run(match, a, 1, b"", 0)
    assert isinstance(rig.once(allocate, a, 1, 6), Wait)
    ahead = next(iter(rig.core.ledger.leases[a].sequences[1].own[0]))
    with pytest.raises(NotOwned):
        rig.once(recycle, a, 1, 0, (GroupCells(0, 0, (ahead,)),))
    rig.run(allocate, a, 1, 6)


# A long load begins in parts, some blocks a turn, each with a transfer of its own; the answer names them all.

PROMPT = "abcdefgh"
PART = 3


def in_parts(*, part: int = PART, layout: Layout | None = None, pages: int = 16) -> tuple[Rig, str]:
    """A sequence that has matched a prompt of the host."""
    layout = layout or one_group()
    groups = len(layout.groups)
    rig = rig_of(layout, device=(pages,) * groups, host=(32,) * groups, policy=WritePolicy.WRITE_THROUGH)
    serve(rig, rig.lease("first"), 1, PROMPT)
    rig.settle()
    pinning.evict(rig.core, 1, "device", 0)
    rig.core.turns = rig.core.turns._replace(loaded=part)
    a = rig.lease("a")
    rig.run(match, a, 1, chain(*PROMPT), 0)
    return rig, a


def turns_of(rig: Rig, lease: str, blocks: int = len(PROMPT)) -> tuple[list[int], Allocated]:
    """Blocks that each turn of an Allocate begins to load, and its answer."""
    begun: list[int] = []
    while True:
        before = len(rig.mover.all)
        answer = rig.once(allocate, lease, 1, blocks)
        begun.append(sum(len(pair.device_pages) for each in rig.mover.all[before:] for pair in each.pages))
        if not isinstance(answer, Wait):
            return begun, answer
        assert answer._replace(reserved=None) == TURN, "it waits for nothing but its turn"


def settled(rig: Rig, lease: str) -> tuple[int, int]:
    rig.settle()
    tidy_all(rig.core)
    rig.check()
    sequence = rig.core.ledger.leases[lease].sequences[1]
    return sequence.sealed, sum(page != NO_PAGE for page in sequence.tables[0])


def test_a_turn_begins_no_more_blocks_than_it_is_for() -> None:
    rig, a = in_parts()
    begun, answer = turns_of(rig, a, len(PROMPT) + 2)
    assert begun == [3, 3, 2]
    assert answer.loading_blocks == len(PROMPT)
    assert [ticket.id for ticket in answer.tickets] == list(rig.mover.transfers)
    pages = [page for each in rig.mover.all[-3:] for page in each.pages[0].device_pages]
    assert list(answer.tables[0].pages[: len(PROMPT)]) == pages, "the parts are in their order"
    assert all(each.layered for each in rig.mover.all[-3:])
    assert settled(rig, a) == (len(PROMPT), len(PROMPT) + 2)


def test_a_load_of_one_turn_is_one_transfer() -> None:
    rig, a = in_parts(part=len(PROMPT))
    begun, answer = turns_of(rig, a)
    assert (begun, len(answer.tickets)) == ([len(PROMPT)], 1)


def test_windowed_copies_come_with_the_blocks_of_their_part() -> None:
    rig, a = in_parts(layout=windowed(8))
    begun, answer = turns_of(rig, a)
    assert begun[:2] == [3, 3]
    assert len(answer.tickets) == len(begun) == 3
    assert settled(rig, a)[0] == len(PROMPT)
    needed = [page for page in rig.core.ledger.leases[a].sequences[1].tables[1] if page != NO_PAGE]
    assert len(needed) >= 2, "the window of the hit is there"


def test_a_part_that_fails_is_told_by_the_answer() -> None:
    """The rest comes at once then: no call goes round in turns for a device that brings nothing."""
    rig, a = in_parts()
    assert isinstance(rig.once(allocate, a, 1, len(PROMPT)), Wait)
    [part] = rig.mover.transfers
    rig.land(part, "broken")
    tidy_all(rig.core)
    begun, answer = turns_of(rig, a)
    assert begun == [len(PROMPT)]
    [ticket] = answer.tickets
    rig.land(ticket.id, "broken again")
    assert "broken again" in rig.core.ledger.leases[a].sequences[1].failed


def test_a_mover_that_refuses_ends_the_call_with_a_failed_ticket() -> None:
    rig, a = in_parts()
    rig.mover.refusing = True
    answer = rig.once(allocate, a, 1, len(PROMPT))
    runs = 1
    while isinstance(answer, Wait):
        for _ in range(len(rig.core.chores)):
            tidy(rig.core.chores)
        answer, runs = rig.once(allocate, a, 1, len(PROMPT)), runs + 1
        assert runs < 20
    assert [ticket.state for ticket in answer.tickets] == ["failed"]


@pytest.mark.parametrize("end", ["release", "lose"])
def test_a_call_that_ends_between_its_turns_leaves_a_prefix_and_keeps_nothing(end: str) -> None:
    rig, a = in_parts()
    assert isinstance(rig.once(allocate, a, 1, len(PROMPT)), Wait)
    if end == "release":
        rig.run(release, a, 1)
    else:
        lose(rig.core, rig.core.ledger.leases[a], "by order")
        tidy_all(rig.core)
    rig.settle()
    tidy_all(rig.core)
    rig.check()
    assert rig.device_keys() == {chain(*PROMPT)[at : at + 32] for at in range(0, 32 * PART, 32)}
    assert not rig.place().reservations
    assert not any(rig.place().pins)


def test_a_call_that_was_given_up_goes_on_with_what_it_has_begun() -> None:
    rig, a = in_parts()
    assert isinstance(rig.once(allocate, a, 1, len(PROMPT)), Wait)
    rig.settle()
    tidy_all(rig.core)
    begun, answer = turns_of(rig, a)
    assert (begun, len(answer.tickets)) == ([3, 2], 2)
    assert settled(rig, a) == (len(PROMPT), len(PROMPT))


def test_another_call_between_the_turns_joins_the_parts_and_takes_no_page_of_the_rest() -> None:
    rig, a = in_parts(pages=len(PROMPT))
    b = rig.lease("b")
    waiting = rig.once(allocate, a, 1, len(PROMPT))
    assert isinstance(waiting, Wait)
    assert rig.place().pools[0].unreserved == 0, "what the call still needs is kept for it"
    rig.run(match, b, 1, chain(*PROMPT[:PART]), 0)
    joined = rig.once(allocate, b, 1, PART)
    assert isinstance(joined, Allocated)
    assert [ticket.id for ticket in joined.tickets] == list(rig.mover.transfers)
    begun, _ = turns_of(rig, a)
    assert begun == [3, 2]
    assert settled(rig, a) == (len(PROMPT), len(PROMPT))


def test_a_call_whose_parts_have_all_that_its_process_may_have_waits_for_them() -> None:
    """A long load was refused in its midst, where as one transfer it had begun."""
    rig, a = in_parts()
    rig.mover.slots = 2
    assert isinstance(rig.once(allocate, a, 1, len(PROMPT)), Wait)
    waits = rig.once(allocate, a, 1, len(PROMPT))
    assert isinstance(waits, Wait)
    assert list(waits.tickets) == list(rig.mover.transfers)
    answer = rig.run(allocate, a, 1, len(PROMPT))
    assert len(answer.tables[0].pages) == len(PROMPT)
    assert settled(rig, a) == (len(PROMPT), len(PROMPT))


def test_a_load_in_parts_is_remembered_as_long_as_it_was() -> None:
    """Parts that came from two places at once counted twice, and twice the pages were kept free for the next load."""
    prompt = [str(at) for at in range(48)]
    rig = rig_of(one_group(), device=(64,), host=(64,), policy=WritePolicy.WRITE_THROUGH, replicas=2)
    serve(rig, rig.lease("first"), 1, prompt)
    rig.settle()
    rig.core.turns = rig.core.turns._replace(loaded=24)
    rig.mover.rate = 1.5
    b = rig.lease("b", 1)
    rig.run(match, b, 1, chain(*prompt), 0)
    before = len(rig.mover.all)
    begun, _ = turns_of(rig, b, len(prompt))
    assert begun == [24, 24]
    assert len(rig.mover.all) - before == 4, "each from the other device and from the host"
    assert rig.place(1).recent_load == len(prompt)


def test_what_a_joined_load_brought_stays_while_a_window_above_it_still_comes() -> None:
    rig = rig_of(windowed(), device=(4, 4), host=(8, 8), policy=WritePolicy.WRITE_THROUGH)
    a, b = rig.lease("a"), rig.lease("b")

    def push_out(blocks: int) -> None:
        rig.run(match, b, 9, b"", 0)
        rig.run(allocate, b, 9, blocks)
        rig.run(release, b, 9)

    serve(rig, a, 1, "xyz")
    rig.settle()
    push_out(4)
    prefill(rig, a, 2, "xyz")  # x comes without its window, which a hit of three does not look back to
    rig.run(release, a, 2)
    push_out(3)  # x alone stays
    rig.run(match, a, 3, chain(*"xyz"), 0)
    brings = rig.run(allocate, a, 3, 3).tickets[0].id
    rig.run(match, a, 4, chain(*"xy"), 0)
    joined = rig.run(allocate, a, 4, 2)
    window = joined.tickets[1].id
    assert [each.id for each in joined.tickets] == [brings, window]
    rig.land(brings)
    rig.run(release, a, 3)
    rig.run(match, b, 9, b"", 0)
    with pytest.raises(PoolExhausted):
        rig.once(partial(allocate, positions={1: []}), b, 9, 3)  # z may go, y not
    rig.land(window)
    sequence = rig.core.ledger.leases[a].sequences[4]
    assert (sequence.sealed, sequence.failed) == (2, "")
