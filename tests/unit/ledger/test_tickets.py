"""Ends of tickets, their order and cause; and that landing one is work for its own chain, however many others run."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from cachesvc.ledger.tickets import Ticket, TicketBook, TicketState
from cachesvc.model.words import DONE, Direction, Failed, Outcome, Urgency
from tests.long_cases import looped
from tests.work import steps_of

LOAD, STORE = Direction
MODEL, REPLICA = 1, 0


def book_of(count: int, after: Callable[[int], list[int]]) -> TicketBook:
    """Loads 1 to ``count``, each below those that ``after(number)`` names."""
    book = TicketBook(keep=1 << 20)
    for number in range(1, count + 1):
        assert book.open(MODEL, REPLICA, LOAD, after=after(number)).id == number
    return book


def alone(_: int) -> list[int]:
    return []


def chained(number: int) -> list[int]:
    return [number - 1] if number > 1 else []


def land(book: TicketBook, number: int, outcome: Outcome) -> list[Ticket]:
    """Land one, and end what may end by it, in order."""
    ended: list[Ticket] = []
    due = book.land(number, outcome)
    for ticket in due:  # grows
        if book.may_end(ticket):
            ended.append(ticket)
            due += book.end(ticket)
    return ended


def ids(tickets: list[Ticket]) -> list[int]:
    return [ticket.id for ticket in tickets]


def test_a_ticket_ends_once_and_is_remembered_for_a_while() -> None:
    book = TicketBook(keep=2)
    for _ in range(3):
        book.open(MODEL, REPLICA, STORE)
    for number in (1, 2, 3):
        assert book.is_running(number)
        [ticket] = land(book, number, DONE)
        assert (ticket.state, ticket.reason, book.is_running(number)) == (TicketState.DONE, "", False)
    assert list(book.ended) == [2, 3]
    assert book.of_replica(MODEL, REPLICA, STORE) == []


def test_a_failure_below_tells_nothing_to_what_lies_above() -> None:
    book = book_of(2, chained)
    assert ids(land(book, 2, Failed("broken"))) == [2]
    [above] = land(book, 1, DONE)
    assert above.state is TicketState.DONE


def test_all_below_a_failure_fails_and_says_what_failed_first() -> None:
    book = book_of(3, chained)
    assert land(book, 3, DONE) == []
    assert ids(land(book, 1, Failed("broken link"))) == [3], "the others end after what lies below them"
    assert ids(land(book, 2, DONE)) == [2, 1]
    assert {ticket.state for ticket in book.ended.values()} == {TicketState.FAILED}
    assert [book.get(number).reason for number in (1, 2, 3)] == [
        "broken link",
        "ticket 1 above it failed: broken link",
        "ticket 1 above it failed: broken link",
    ]


def test_what_is_opened_below_a_failing_ticket_fails_too() -> None:
    book = book_of(2, chained)
    land(book, 1, Failed("broken"))
    book.open(MODEL, REPLICA, LOAD, after=[2])
    assert ids(land(book, 3, DONE)) == [3]
    assert ids(land(book, 2, DONE)) == [2, 1]
    assert all(book.get(number).state is TicketState.FAILED for number in (1, 2, 3))


@looped("seed", range(60))
def test_any_forest_ends_as_the_rules_say(seed: int) -> None:
    """A good ticket ends after those above it, a failed one after those below; all end; nothing above is failed."""
    rng = random.Random(seed)
    count = rng.randint(2, 12)
    above = {n: sorted(rng.sample(range(1, n), min(n - 1, rng.randint(0, 2)))) for n in range(1, count + 1)}
    book = book_of(count, above.__getitem__)
    broken = {number for number in above if rng.random() < 0.25}
    doomed = set(broken)
    for number, those in above.items():
        if doomed.intersection(those):
            doomed.add(number)
    order: list[int] = []
    for number in rng.sample(sorted(above), count):
        order += ids(land(book, number, Failed("broken") if number in broken else DONE))
    assert sorted(order) == list(above)
    at = {number: place for place, number in enumerate(order)}
    for number, those in above.items():
        assert (book.get(number).state is TicketState.FAILED) == (number in doomed)
        for other in those:
            if number in doomed:
                assert other not in doomed or at[number] < at[other]
            else:
                assert at[other] < at[number]
    assert not book.running


@pytest.mark.parametrize("outcome", [DONE, Failed("the link broke")])
@pytest.mark.parametrize("after", [alone, chained])
def test_landing_all_of_many_is_work_for_each_of_them_once(after: Callable[[int], list[int]], outcome: object) -> None:
    """Every landing looked at all that ran: a GPU that broke with 2,000 loads under way cost 0.6 s in one go."""

    def work(count: int) -> int:
        book = book_of(count, after)
        order = range(count, 0, -1) if after is chained else range(1, count + 1)
        return steps_of(lambda: [land(book, number, outcome) for number in order])  # type: ignore[arg-type]

    assert work(800) < 4.4 * work(200)


def test_landing_one_is_as_much_work_among_many_as_alone() -> None:
    def work(count: int) -> int:
        book = book_of(count, alone)
        return steps_of(lambda: land(book, count // 2, Failed("broken")))

    assert work(4096) == work(2)


def test_tickets_of_a_replica_are_found_without_looking_at_the_others() -> None:
    def book_with(others: int) -> TicketBook:
        book = TicketBook(keep=4)
        for number in range(others):
            book.open(MODEL, 1 + number % 7, LOAD, Urgency.BACKGROUND)
        book.open(MODEL, REPLICA, STORE)
        book.open(MODEL, REPLICA, LOAD)
        return book

    few, many = book_with(2), book_with(4096)
    assert ids(many.of_replica(MODEL, REPLICA, STORE)) == [4097]
    assert steps_of(lambda: few.of_replica(MODEL, REPLICA, STORE)) == steps_of(
        lambda: many.of_replica(MODEL, REPLICA, STORE)
    )
