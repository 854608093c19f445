"""A long load begins in parts, some blocks a turn, each with a transfer of its own; the answer names them all."""

from __future__ import annotations

from functools import partial

import pytest

from cachesvc.flows import pinning
from cachesvc.flows.allocate import allocate
from cachesvc.flows.core import TURN, tidy, tidy_all
from cachesvc.flows.leases import lose
from cachesvc.flows.match import match
from cachesvc.flows.recycle import release
from cachesvc.model.answers import Allocated, Wait
from cachesvc.model.errors import PoolExhausted
from cachesvc.model.layout import Layout
from cachesvc.model.words import NO_PAGE, WritePolicy
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, prefill, rig_of, serve, windowed

PROMPT = "abcdefgh"
PART = 3


def loading(*, part: int = PART, layout: Layout | None = None, pages: int = 16) -> tuple[Rig, str]:
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
    rig, a = loading()
    begun, answer = turns_of(rig, a, len(PROMPT) + 2)
    assert begun == [3, 3, 2]
    assert answer.loading_blocks == len(PROMPT)
    assert [ticket.id for ticket in answer.tickets] == list(rig.mover.transfers)
    pages = [page for each in rig.mover.all[-3:] for page in each.pages[0].device_pages]
    assert list(answer.tables[0].pages[: len(PROMPT)]) == pages, "the parts are in their order"
    assert all(each.layered for each in rig.mover.all[-3:])
    assert settled(rig, a) == (len(PROMPT), len(PROMPT) + 2)


def test_a_load_of_one_turn_is_one_transfer() -> None:
    rig, a = loading(part=len(PROMPT))
    begun, answer = turns_of(rig, a)
    assert (begun, len(answer.tickets)) == ([len(PROMPT)], 1)


def test_windowed_copies_come_with_the_blocks_of_their_part() -> None:
    rig, a = loading(layout=windowed(8))
    begun, answer = turns_of(rig, a)
    assert begun[:2] == [3, 3]
    assert len(answer.tickets) == len(begun) == 3
    assert settled(rig, a)[0] == len(PROMPT)
    needed = [page for page in rig.core.ledger.leases[a].sequences[1].tables[1] if page != NO_PAGE]
    assert len(needed) >= 2, "the window of the hit is there"


def test_a_part_that_fails_is_told_by_the_answer() -> None:
    """The rest comes at once then: no call goes round in turns for a device that brings nothing."""
    rig, a = loading()
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
    rig, a = loading()
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
    rig, a = loading()
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
    rig, a = loading()
    assert isinstance(rig.once(allocate, a, 1, len(PROMPT)), Wait)
    rig.settle()
    tidy_all(rig.core)
    begun, answer = turns_of(rig, a)
    assert (begun, len(answer.tickets)) == ([3, 2], 2)
    assert settled(rig, a) == (len(PROMPT), len(PROMPT))


def test_another_call_between_the_turns_joins_the_parts_and_takes_no_page_of_the_rest() -> None:
    rig, a = loading(pages=len(PROMPT))
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
    rig, a = loading()
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
