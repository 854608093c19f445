"""A copy stream with its runner: interleaved jobs, some of which break, one end for each."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from cachesvc.memory.arbiter import CopyRules
from cachesvc.memory.copy_thread import CopyThreads
from cachesvc.memory.interface import COPY_FIELDS, CopyJob, CopyStep, Slice, SliceRunner
from cachesvc.memory.memcpy import run_copies
from cachesvc.memory.shm import ShmRunner
from cachesvc.model.errors import InvalidRequest, LimitExceeded, Unavailable
from cachesvc.model.words import Direction, Urgency
from tests.sim.stepped_memory import check_bounds

LOAD, STORE = Direction
SLICE = 1024
SIZE = 64 * SLICE
BROKEN_AT = 13 * SLICE
KINDS = ("one at a time", "three on the way")


class LateRunner:
    """Three slices on their way: nothing is copied before it is waited for. What ``breaks`` raises, breaks there."""

    depth = 3
    only_queues = True

    def __init__(
        self,
        copy: Callable[[np.ndarray], None],
        write_word: Callable[[int, int], None],
    ) -> None:
        self.on_way: list[Slice] = []
        self.most = 0
        self.by: list[threading.Thread] = []
        self.broken: set[int] = set()
        self._copy = copy
        self._write_word = write_word

    def begin(self) -> None:
        """Nothing to prepare."""

    def submit(self, piece: Slice) -> Slice:
        self.by.append(threading.current_thread())
        self.on_way.append(piece)
        self.most = max(self.most, len(self.on_way))
        assert len(self.on_way) <= self.depth
        return piece

    def wait(self, started: object) -> None:
        piece = self.on_way.pop(0)
        assert piece is started, "the oldest is waited for first"
        if piece.job.ticket in self.broken:
            raise InvalidRequest("an earlier slice of it broke")
        try:
            self._copy(piece.copies)
        except InvalidRequest:
            self.broken.add(piece.job.ticket)
            raise
        if piece.word_value is not None and piece.job.word is not None:
            self._write_word(piece.job.word, piece.word_value)


@dataclass
class Bench:
    """Both streams of a device over memory: region 1 is read, region 2 is written. ``log``: words and ends in order."""

    kind: str
    rules: CopyRules = field(default_factory=lambda: CopyRules(slice_bytes=SLICE))
    log: list[tuple[object, ...]] = field(default_factory=list)
    ends: dict[int, Exception | None] = field(default_factory=dict)
    begin: Callable[[], object] = bool

    def __post_init__(self) -> None:
        self.source = bytearray(np.random.default_rng(3).bytes(SIZE))
        self.target = bytearray(SIZE)
        self.regions = {1: memoryview(self.source), 2: memoryview(self.target)}
        self.order: list[int] = []
        self.all_ended = threading.Semaphore(0)
        self.runners: dict[Direction, SliceRunner] = {way: self._runner() for way in Direction}
        self.threads = CopyThreads("gpu", self.rules, self.runners, lambda *word: self.log.append(word))

    def _runner(self) -> SliceRunner:
        made: SliceRunner
        if self.kind == KINDS[0]:
            made = ShmRunner(self._copy, lambda *word: self.log.append(word))
        else:
            made = LateRunner(self._copy, lambda *word: self.log.append(word))
        made.begin = self.begin  # type: ignore[method-assign, assignment]
        return made

    def _copy(self, copies: np.ndarray) -> None:
        check_bounds(copies, {region: view.nbytes for region, view in self.regions.items()})
        run_copies(copies, self.regions)
        self.order += copies[:, 3].tolist()

    def job(
        self,
        ticket: int,
        at: int,
        slices: int,
        *,
        urgency: Urgency = Urgency.AWAITED,
        steps: int = 1,
        then: Callable[[], object] = bool,
    ) -> CopyJob:
        """Copies ``slices`` slices from ``at`` on, in several steps; its words are ``10 * ticket`` and the next."""
        rows = [(1, at + i * SLICE, 2, at + i * SLICE, SLICE, 1, SLICE, SLICE) for i in range(slices)]
        parts = np.array_split(np.array(rows, np.int64).reshape(-1, len(COPY_FIELDS)), steps)

        def done(error: Exception | None) -> None:
            assert ticket not in self.ends
            self.ends[ticket] = error
            self.log.append(("end", ticket))
            try:
                then()
            finally:
                self.all_ended.release()

        made = tuple(CopyStep(part, number) for number, part in enumerate(parts, start=1))
        return CopyJob(ticket, made, 10 * ticket, 10 * ticket + 1, 99, done, urgency)

    def run(self, jobs: list[CopyJob], way: Direction = LOAD) -> None:
        """Queue all, then start, and see all of them end."""
        for job in jobs:
            self.threads.streams[way].submit(job)
        self.threads.start()
        for _ in jobs:
            assert self.all_ended.acquire(timeout=30)
        self.threads.close()

    def words_of(self, ticket: int) -> list[tuple[object, ...]]:
        return [entry for entry in self.log if entry[0] in (10 * ticket, 10 * ticket + 1) or entry == ("end", ticket)]

    def is_copied(self, at: int, slices: int) -> bool:
        return self.target[at : at + slices * SLICE] == self.source[at : at + slices * SLICE]


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(request.param)
    yield made
    made.threads.close()


def test_jobs_are_interleaved_and_each_ends_with_its_own_last_slice(bench: Bench) -> None:
    long, short = bench.job(1, 0, 24, steps=4), bench.job(2, 32 * SLICE, 6, steps=3)
    bench.run([long, short])
    assert bench.ends == {1: None, 2: None}
    assert list(bench.ends) == [2, 1]
    assert bench.words_of(1) == [(10, 1), (10, 2), (10, 3), (10, 4), ("end", 1)]
    assert bench.words_of(2) == [(20, 1), (20, 2), (20, 3), ("end", 2)]
    assert bench.is_copied(0, 24)
    assert bench.is_copied(32 * SLICE, 6)
    first = bench.order[:9]  # two for the short one, one for the oldest
    assert sum(at >= 32 * SLICE for at in first) == 6
    runner = bench.runners[LOAD]
    assert not isinstance(runner, LateRunner) or (runner.most == 3 and not runner.on_way)


def test_of_two_interleaved_jobs_one_fails_and_the_other_does_not_notice(bench: Bench) -> None:
    good, bad = bench.job(1, 0, 16, steps=4), bench.job(2, 32 * SLICE, 8, steps=8)
    tuple(bad.steps)[3].copies[0, 0] = 7  # no such region
    bench.run([good, bad, bench.job(3, 50 * SLICE, 2)])
    assert bench.ends[1] is None
    assert bench.ends[3] is None
    assert isinstance(bench.ends[2], InvalidRequest)
    assert bench.words_of(2) == [(20, 1), (20, 2), (20, 3), (21, 99), (20, 99), ("end", 2)]
    assert bench.words_of(1) == [(10, 1), (10, 2), (10, 3), (10, 4), ("end", 1)]
    assert bench.is_copied(0, 16)
    assert bench.is_copied(32 * SLICE, 3)
    assert not any(bench.target[35 * SLICE : 40 * SLICE])  # nothing after what broke


def test_a_broken_job_ends_after_all_that_was_on_its_way() -> None:
    bench = Bench("three on the way")
    runner = bench.runners[LOAD]
    assert isinstance(runner, LateRunner)
    left: list[int] = []

    bad = bench.job(1, 0, 9, steps=9, then=lambda: left.append(len(runner.on_way)))
    next(iter(bad.steps)).copies[0, 0] = 7
    bench.run([bad])
    assert left == [0]
    assert bench.words_of(1) == [(11, 99), (10, 99), ("end", 1)]


def planned_late(job: CopyJob, ask: Callable[[int], object]) -> CopyJob:
    """A job whose steps are made when they are asked for."""

    def steps() -> Iterator[CopyStep]:
        for number, step in enumerate(job.steps):
            ask(number)
            yield step

    return replace(job, steps=steps(), size_bytes=sum(int(step.copies[:, 4].sum()) for step in job.steps))


def test_a_job_that_cannot_be_planned_to_its_end_ends_after_what_was_on_its_way(bench: Bench) -> None:
    def ask(number: int) -> None:
        if number == 2:
            raise InvalidRequest("no such page")

    bench.run([planned_late(bench.job(1, 0, 8, steps=4), ask), bench.job(2, 32 * SLICE, 4)])
    assert isinstance(bench.ends[1], InvalidRequest)
    assert bench.ends[2] is None
    assert bench.words_of(1) == [(10, 1), (10, 2), (11, 99), (10, 99), ("end", 1)]
    assert bench.is_copied(0, 4)
    assert not any(bench.target[4 * SLICE : 8 * SLICE])


def test_a_job_is_planned_as_it_is_copied_and_nobody_waits_for_that(bench: Bench) -> None:
    runner = bench.runners[LOAD]
    ahead = []

    def ask(number: int) -> None:
        others = threading.Thread(target=bench.threads.expedite, args=(1,))  # takes the lock
        others.start()
        others.join()
        ahead.append(number - len(bench.order))

    bench.run([planned_late(bench.job(1, 0, 12, steps=12), ask)])
    assert bench.is_copied(0, 12)
    assert max(ahead) <= runner.depth


def test_a_runner_that_cannot_begin_fails_every_job() -> None:
    def fails() -> None:
        raise Unavailable("no device")

    bench = Bench("one at a time", begin=fails)
    bench.run([bench.job(1, 0, 2), bench.job(2, 8 * SLICE, 2)])
    assert [str(error) for error in bench.ends.values()] == ["no device", "no device"]
    first, second = bench.ends.values()
    assert first is second
    assert first is not None
    assert len(list(traceback.walk_tb(first.__traceback__))) == 2  # each job would add to it, and be kept by it
    assert bench.words_of(2) == [(21, 99), (20, 99), ("end", 2)]
    assert not any(bench.target)


def test_close_lets_land_what_is_on_its_way_and_fails_the_rest(bench: Bench) -> None:
    """A mover whose daemon was gone copied what was left of begun jobs for seconds, into pages of engines that had
    recomputed by then."""
    stream = bench.threads.streams[LOAD]

    def close() -> None:
        stream.close()
        with pytest.raises(Unavailable):
            stream.submit(bench.job(9, 0, 1))

    long, short = bench.job(1, 0, 24), bench.job(2, 32 * SLICE, 8, then=close)
    behind = [bench.job(3, 40 * SLICE, 8), bench.job(4, 48 * SLICE, 8, urgency=Urgency.BACKGROUND)]
    bench.run([long, short, *behind])
    assert bench.ends[2] is None
    for ticket in (1, 3, 4):
        assert isinstance(bench.ends[ticket], Unavailable)
        assert bench.words_of(ticket)[-3:] == [(10 * ticket + 1, 99), (10 * ticket, 99), ("end", ticket)]
    most = len(bench.order) if bench.kind == KINDS[0] else bench.order.index(39 * SLICE) + 1 + LateRunner.depth
    assert len(bench.order) <= most
    assert not bench.is_copied(0, 24), "the long one had a third of the bytes"
    assert not any(bench.target[48 * SLICE : 56 * SLICE])


@pytest.mark.parametrize("kind", KINDS)
def test_both_directions_share_one_limit_and_one_order_of_urgency(kind: str) -> None:
    bench = Bench(kind, CopyRules(slice_bytes=SLICE, queued_jobs=3))
    load, store = bench.threads.streams[LOAD], bench.threads.streams[STORE]
    backup = bench.job(1, 0, 4, urgency=Urgency.BACKGROUND)
    store.submit(backup)
    load.submit(bench.job(2, 32 * SLICE, 16))
    store.submit(bench.job(3, 16 * SLICE, 4))
    with pytest.raises(LimitExceeded):
        load.submit(bench.job(4, 0, 1))
    bench.threads.start()
    for _ in range(3):
        assert bench.all_ended.acquire(timeout=30)
    assert list(bench.ends)[-1] == 1
    bench.threads.close()


def test_an_expedited_backup_goes_on_in_a_pause(bench: Bench) -> None:
    bench.threads.pause_background(3600)
    bench.threads.start()
    store = bench.threads.streams[STORE]
    store.submit(bench.job(1, 0, 4, urgency=Urgency.BACKGROUND))
    store.submit(bench.job(2, 8 * SLICE, 4))
    assert bench.all_ended.acquire(timeout=30)
    assert list(bench.ends) == [2]
    bench.threads.expedite(1)
    assert bench.all_ended.acquire(timeout=30)
    assert list(bench.ends) == [2, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_of_our_own_fails_every_job_and_says_so(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing that a runner does: the choice between jobs breaks, as a bug in it would."""
    bench = Bench(kind)
    is_broken = threading.Event()

    def clock() -> float:
        if is_broken.is_set() and threading.current_thread() is not threading.main_thread():
            raise ZeroDivisionError("a clock that broke")
        return time.monotonic()

    bench.threads = CopyThreads("gpu", bench.rules, bench.runners, lambda *word: bench.log.append(word), clock)
    load = bench.threads.streams[LOAD]
    for job in (bench.job(1, 0, 4, then=is_broken.set), bench.job(2, 8 * SLICE, 16), bench.job(3, 32 * SLICE, 4)):
        load.submit(job)
    bench.threads.start()
    for _ in range(3):
        assert bench.all_ended.acquire(timeout=30)
    assert bench.ends[1] is None
    for ticket in (2, 3):
        assert isinstance(bench.ends[ticket], Unavailable)
        assert "a clock that broke" in str(bench.ends[ticket])
        assert bench.words_of(ticket)[-3:] == [(10 * ticket + 1, 99), (10 * ticket, 99), ("end", ticket)]
    assert [record.message for record in caplog.records if record.levelname == "ERROR"].count(
        "copy_stream_broken name=load-gpu"
    ) == 1
    with pytest.raises(Unavailable, match="closed"):
        load.submit(bench.job(4, 0, 1))
    bench.threads.close()
