"""Threads that read loans: each peer has its part, whatever the streams of others do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from cachesvc.peer.reading import MOST_WAITING, PART, SHARED, SILENT_SECONDS, Readers, ReadJob

FAR = 1e9


class Jobs:
    """Jobs that end when the test says so, in a time that the test sets. ``begun``, ``refused``: names, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self.begun: list[str] = []
        self.refused: list[str] = []
        self.jobs: dict[str, ReadJob] = {}
        self.readers = Readers(lambda: self.now)
        self.readers.start()
        self._ends: dict[str, threading.Event] = {}
        self._changed = threading.Condition()

    def add(self, peer: str, loan: str, count: int = 1, deadline: float = FAR) -> list[str]:
        """Add jobs of a loan, which is one object for all of its streams."""
        names = [f"{peer}/{loan}/{len(self._ends) + at}" for at in range(count)]
        for name in names:
            self._ends[name] = threading.Event()
            self.jobs[name] = job = ReadJob(peer, loan or None, lambda: None, self._refuse(name), deadline)
            job.run = self._run(name)
            self.readers.add(job)
        return names

    def _run(self, name: str) -> Callable[[], None]:
        def run() -> None:
            with self._changed:
                self.begun.append(name)
                self._changed.notify_all()
            self._ends[name].wait()

        return run

    def _refuse(self, name: str) -> Callable[[], None]:
        def refuse() -> None:
            with self._changed:
                self.refused.append(name)
                self._changed.notify_all()

        return refuse

    def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()

    def wait_for(self, begun: int, refused: int = 0) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self.begun) >= begun and len(self.refused) >= refused)

    def of(self, peer: str) -> int:
        return sum(name.startswith(f"{peer}/") for name in self.begun)


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    made = Jobs()
    yield made
    made.end(*made.jobs)
    made.readers.close(FAR)


def test_a_peer_alone_has_three_loans_read_at_once(jobs: Jobs) -> None:
    for loan in "abcd":
        jobs.add("x", loan, PART)
    jobs.wait_for(PART + SHARED)
    assert jobs.of("x") == PART + SHARED
    assert jobs.begun[-1].startswith("x/c"), "one loan after another"


def test_peers_whose_streams_bring_nothing_take_no_part_of_another(jobs: Jobs) -> None:
    for peer in ("x", "y", "z"):
        for loan in "abc":
            jobs.add(peer, loan, PART)
    jobs.wait_for(3 * PART + SHARED)
    jobs.add("well", "a", PART)
    jobs.wait_for(4 * PART + SHARED)
    assert jobs.of("well") == PART


def test_a_peer_of_which_a_stream_is_silent_gets_no_second_loans_streams(jobs: Jobs) -> None:
    first = jobs.add("x", "a", 2)
    jobs.wait_for(2)
    jobs.now += SILENT_SECONDS
    jobs.jobs[first[0]].heard_at = jobs.now
    jobs.add("x", "b", 2)
    jobs.add("x", "a", 1)
    jobs.add("y", "a", 1)
    jobs.wait_for(3)
    assert jobs.of("y") == 1
    assert not any(name.startswith("x/b") for name in jobs.begun)
    jobs.jobs[first[1]].heard_at = jobs.now  # it goes on
    jobs.wait_for(6)
    assert jobs.of("x") == 5
    assert jobs.refused == []


def test_what_waits_for_too_long_is_refused_though_its_peer_has_no_thread_for_it(jobs: Jobs) -> None:
    jobs.add("x", "a", PART)
    jobs.wait_for(PART)
    jobs.now += SILENT_SECONDS
    late = jobs.add("x", "b", 3, deadline=jobs.now + 1.0)
    jobs.add("y", "a")
    jobs.wait_for(PART + 1)
    assert jobs.refused == []
    jobs.now += 1.0
    jobs.wait_for(PART + 1, refused=3)
    assert jobs.refused == late
    assert jobs.of("x") == PART


def test_questions_that_wait_hold_up_no_loan(jobs: Jobs) -> None:
    jobs.add("", "", 4 * (PART + SHARED))
    jobs.wait_for(PART + SHARED)
    jobs.add("x", "a", PART)
    jobs.wait_for(2 * PART + SHARED)
    assert jobs.of("x") == PART


def test_one_peers_queue_is_limited_and_does_not_fill_anothers(jobs: Jobs) -> None:
    jobs.add("x", "a", PART + SHARED)
    jobs.wait_for(PART + SHARED)
    jobs.add("x", "a", MOST_WAITING)
    refused = jobs.add("x", "a", 2)
    assert jobs.refused == refused
    jobs.add("y", "a")
    jobs.wait_for(PART + SHARED + 1)
    assert jobs.of("y") == 1


def test_the_end_refuses_what_waits(jobs: Jobs) -> None:
    jobs.add("x", "a", PART + SHARED)
    jobs.wait_for(PART + SHARED)
    waiting = jobs.add("x", "a", 3)
    jobs.readers.close(0.0)
    assert jobs.refused == waiting
    assert jobs.add("x", "a") == jobs.refused[3:]
