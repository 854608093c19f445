"""Planning keeps the order of each direction, never holds up who submits, and abandons what it cannot do
any more."""

from __future__ import annotations

import threading

from cachesvc.model.errors import Unavailable
from cachesvc.model.transfer import Direction, Urgency
from cachesvc.swap.planner_threads import ThreadPlanning, Work

LOAD, STORE = Direction
AWAITED, BACKGROUND = Urgency
ONE, OTHER = ("device 1",), ("device 2",)


def test_who_submits_does_not_wait_and_the_other_direction_goes_on() -> None:
    planning = ThreadPlanning()
    planning.start()
    gate, passed, order = threading.Event(), threading.Event(), list[int]()

    def wait(_: Exception | None) -> None:
        gate.wait()

    def note(number: int) -> Work:
        def work(_: Exception | None) -> None:
            order.append(number)
            planning.ended(LOAD, number)

        return work

    planning.submit(LOAD, AWAITED, ONE, -1, wait)
    for number in range(50):
        planning.submit(LOAD, AWAITED, ONE, number, note(number))
    planning.submit(STORE, AWAITED, ONE, 0, lambda _: passed.set())
    passed.wait()
    assert order == []
    gate.set()
    last = threading.Event()
    planning.submit(LOAD, AWAITED, ONE, 50, lambda _: last.set())
    last.wait()
    assert order == list(range(50))
    planning.close()


def test_no_more_is_planned_ahead_than_may_wait() -> None:
    planning = ThreadPlanning(planned_ahead=2)
    planning.start()
    begun = threading.Semaphore(0)
    count: list[int] = []

    def work(_: Exception | None) -> None:
        count.append(1)
        begun.release()

    for ticket in range(5):
        planning.submit(LOAD, AWAITED, ONE, ticket, work)
    for planned in range(2, 6):
        while len(count) < planned:
            begun.acquire()
        assert len(count) == planned
        planning.ended(LOAD, planned - 2)
    planning.close()


def test_close_abandons_what_waits_and_what_comes_later() -> None:
    planning = ThreadPlanning(planned_ahead=1)
    planning.start()
    errors: list[Exception | None] = []
    for ticket in range(4):
        planning.submit(STORE, AWAITED, ONE, ticket, errors.append)
    planning.close()
    planning.submit(STORE, AWAITED, ONE, 4, errors.append)
    planning.close()
    assert len(errors) == 5
    assert all(isinstance(error, Unavailable) for error in errors[1:])


def test_awaited_plans_wait_for_no_background_ones_and_an_expedited_one_is_awaited() -> None:
    planning = ThreadPlanning(planned_ahead=2)
    begun, order = threading.Semaphore(0), list[int]()

    def note(number: int) -> Work:
        def work(_: Exception | None) -> None:
            order.append(number)
            begun.release()

        return work

    for ticket in range(5):
        planning.submit(LOAD, BACKGROUND, ONE, ticket, note(ticket))
    planning.submit(LOAD, AWAITED, ONE, 10, note(10))
    planning.expedite(LOAD, 3)
    planning.expedite(LOAD, 99)
    planning.start()
    for _ in range(4):
        begun.acquire()
    assert order == [10, 3, 0, 1]
    planning.expedite(LOAD, 0)  # planned already: it counts as awaited now, and leaves its place
    begun.acquire()
    assert order == [10, 3, 0, 1, 2]
    planning.ended(LOAD, 1)
    begun.acquire()
    assert order == [10, 3, 0, 1, 2, 4]
    planning.close()


def test_a_device_that_is_slow_holds_up_no_plans_for_another_one() -> None:
    planning = ThreadPlanning(planned_ahead=2)
    begun, order = threading.Semaphore(0), list[int]()

    def note(number: int) -> Work:
        def work(_: Exception | None) -> None:
            order.append(number)
            begun.release()

        return work

    for ticket in range(5):
        planning.submit(LOAD, AWAITED, ONE, ticket, note(ticket))
    planning.submit(LOAD, AWAITED, OTHER, 10, note(10))
    planning.submit(LOAD, BACKGROUND, ONE, 11, note(11))
    planning.start()
    for _ in range(4):
        begun.acquire()
    assert order == [0, 1, 10, 11]
    planning.ended(LOAD, 10)  # makes no room on the slow one
    planning.submit(LOAD, AWAITED, OTHER, 12, note(12))
    begun.acquire()
    planning.ended(LOAD, 0)
    begun.acquire()
    assert order == [0, 1, 10, 11, 12, 2]
    planning.close()


def test_who_has_the_time_plans_what_nothing_is_before() -> None:
    planning = ThreadPlanning(planned_ahead=2, at_once=True)
    where, begun, gate = list[tuple[int, bool]](), threading.Semaphore(0), threading.Event()
    here = threading.current_thread()

    def note(number: int) -> Work:
        def work(_: Exception | None) -> None:
            where.append((number, threading.current_thread() is here))
            begun.release()

        return work

    def hold(_: Exception | None) -> None:
        begun.release()
        gate.wait()

    planning.start()
    planning.submit(LOAD, AWAITED, ONE, 0, note(0))
    planning.submit(LOAD, BACKGROUND, ONE, 1, note(1))
    begun.acquire()
    begun.acquire()
    planning.submit(LOAD, BACKGROUND, OTHER, 2, hold)
    begun.acquire()
    planning.submit(LOAD, AWAITED, ONE, 3, note(3))  # another plan is being made: behind it
    gate.set()
    begun.acquire()
    planning.submit(LOAD, AWAITED, ONE, 4, note(4))  # two wait for the streams
    planning.ended(LOAD, 0)
    begun.acquire()
    assert where == [(0, True), (1, False), (3, False), (4, False)]
    planning.close()
