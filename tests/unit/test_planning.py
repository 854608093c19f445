"""Planning keeps the order of each direction, never holds up who submits, and abandons what it cannot do
any more."""

from __future__ import annotations

import threading

from cachesvc.model.errors import Unavailable
from cachesvc.model.transfer import Direction
from cachesvc.swap.planning import ThreadPlanning, Work

LOAD, STORE = Direction


def test_who_submits_does_not_wait_and_the_other_direction_goes_on() -> None:
    planning = ThreadPlanning()
    planning.start()
    gate, passed, order = threading.Event(), threading.Event(), list[int]()

    def wait(_: Exception | None) -> None:
        gate.wait()

    def note(number: int) -> Work:
        def work(_: Exception | None) -> None:
            order.append(number)
            planning.ended(LOAD)

        return work

    planning.submit(LOAD, wait)
    for number in range(50):
        planning.submit(LOAD, note(number))
    planning.submit(STORE, lambda _: passed.set())
    passed.wait()
    assert order == []
    gate.set()
    last = threading.Event()
    planning.submit(LOAD, lambda _: last.set())
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

    for _ in range(5):
        planning.submit(LOAD, work)
    for planned in range(2, 6):
        while len(count) < planned:
            begun.acquire()
        assert len(count) == planned
        planning.ended(LOAD)
    planning.close()


def test_close_abandons_what_waits_and_what_comes_later() -> None:
    planning = ThreadPlanning(planned_ahead=1)
    planning.start()
    errors: list[Exception | None] = []
    for _ in range(4):
        planning.submit(STORE, errors.append)
    planning.close()
    planning.submit(STORE, errors.append)
    planning.close()
    assert len(errors) == 5
    assert all(isinstance(error, Unavailable) for error in errors[1:])
