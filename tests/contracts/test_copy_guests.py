"""Jobs whose first slice the submitting thread starts: the stream's own thread goes on from there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cachesvc.memory.copy_thread import CopyThreads
from cachesvc.model.errors import Unavailable
from tests.contracts.test_copy_thread import KINDS, LOAD, SLICE, Bench, LateRunner


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(request.param)
    yield made
    made.threads.close()


def test_whoever_submits_to_an_idle_stream_starts_the_first_slice_itself(bench: Bench) -> None:
    """A stream is idle some time after a job has ended: until then its own thread goes on."""
    bench.threads.start()
    runner, tickets = bench.runners[LOAD], 0
    while not tickets or (isinstance(runner, LateRunner) and threading.current_thread() not in runner.by):
        tickets += 1
        assert tickets < 10_000, "it was never idle"
        bench.threads.streams[LOAD].submit_here(bench.job(tickets, 0, 4, steps=2))
        assert bench.all_ended.acquire(timeout=30)
    assert set(bench.ends.values()) == {None}
    assert bench.words_of(tickets) == [(10 * tickets, 1), (10 * tickets, 2), ("end", tickets)]
    assert not isinstance(runner, LateRunner) or not runner.on_way


def test_many_who_submit_here_do_not_meet(bench: Bench) -> None:
    bench.threads.start()
    load = bench.threads.streams[LOAD]

    def submit(first: int) -> None:
        for ticket in range(first, 200, 4):
            job = bench.job(ticket, ticket % 60 * SLICE, 2)
            if ticket % 7 == 0:
                next(iter(job.steps)).copies[0, 0] = 7  # no such region
            load.submit_here(job)

    threads = [threading.Thread(target=submit, args=(first,)) for first in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(199):
        assert bench.all_ended.acquire(timeout=30)
    assert {ticket for ticket, error in bench.ends.items() if error is not None} == set(range(7, 200, 7))


def test_a_fault_of_our_own_on_the_submitter_s_thread_fails_every_job() -> None:
    bench, looks = Bench(KINDS[1]), 0

    def clock() -> float:
        nonlocal looks
        looks += threading.current_thread() is threading.main_thread()
        if looks == 2:
            raise ZeroDivisionError("a clock that broke")
        return time.monotonic()

    bench.threads = CopyThreads("gpu", bench.rules, bench.runners, lambda *word: bench.log.append(word), clock)
    bench.threads.start()
    load, ticket = bench.threads.streams[LOAD], 0
    while not ticket or bench.ends[ticket] is None:
        ticket, looks = ticket + 1, 0
        assert ticket < 10_000, "it was never idle"
        load.submit_here(bench.job(ticket, 0, 4))
        assert bench.all_ended.acquire(timeout=30)
    assert "a clock that broke" in str(bench.ends[ticket])
    with pytest.raises(Unavailable, match="closed"):
        load.submit(bench.job(ticket + 1, 0, 1))
    bench.threads.close()


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_beginning_is_told_before_the_end_and_not_by_who_starts_the_next_job(bench: Bench, is_broken: bool) -> None:
    """The thread that reports it may wake other processes."""
    bench.threads.start()
    runner, ticket = bench.runners[LOAD], 0
    told_by: list[threading.Thread] = []

    def begun(_: float) -> None:
        bench.log.append(("begun", ticket))
        told_by.append(threading.current_thread())

    while not ticket or (isinstance(runner, LateRunner) and threading.current_thread() not in runner.by):
        ticket += 1
        assert ticket < 10_000, "it was never idle"
        job = replace(bench.job(ticket, 0, 4, steps=2), begun=begun)
        if is_broken:
            next(iter(job.steps)).copies[0, 0] = 7  # no such region
        bench.threads.streams[LOAD].submit_here(job)
        assert bench.all_ended.acquire(timeout=30)
    ends = [entry for entry in bench.log if entry in (("begun", ticket), ("end", ticket))]
    assert ends == [("begun", ticket), ("end", ticket)]
    assert threading.current_thread() not in told_by
