"""The daemon's side of one mover: what comes out of turn leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Sequence
from functools import partial

from cachesvc import __version__
from cachesvc.memory.host_pool import HostBudget
from cachesvc.model.words import Direction, TimelineSlot, Urgency
from cachesvc.mover import records
from cachesvc.mover.device import DeviceMover
from cachesvc.mover.life import Life, MoverProcess, child
from cachesvc.mover.processes import MoverProcesses
from cachesvc.mover.records import ENDS_BYTES, Message, Part, Ring, Settings, Writer, answer_all
from cachesvc.swap.movers import RankEnd, RankJob

SETTINGS = Settings("shm", "shm-0", 1 << 20, timeline_words=64)


def limit_record(direction: Direction, bytes_per_second: int) -> list[Part]:
    return [records.packed(records.LIMIT, records.WAYS.index(direction), bytes_per_second)]


def flat(record: Sequence[Part]) -> bytes:
    return b"".join(map(bytes, record))


class Late:
    """A mover that, when asked for its device, tells first of the end of a job and then of its beginning, and last
    that job 1 has ended."""

    def __call__(self) -> tuple[socket.socket, MoverProcess | None]:
        ours, self._connection = socket.socketpair()
        threading.Thread(target=self._serve, daemon=True).start()
        return ours, None

    def _serve(self) -> None:
        answer_all(self._connection, self._answer)
        self._ring.close()
        self._connection.close()

    def _answer(self, asked: Message) -> Message:
        if asked.head["ask"] == "hello":
            return Message({"version": __version__, "pid": 1})
        if asked.head["ask"] == "open":
            self._ring = Ring(os.dup(asked.descriptors[1]), ENDS_BYTES)
            self._ends = Writer(self._ring)
        elif asked.head["ask"] == "watch":
            signs = socket.socket(fileno=os.dup(asked.descriptors[0]))
            threading.Thread(target=answer_all, args=(signs, self._answer), daemon=True).start()
        elif asked.head["ask"] == "probe":
            self._ends.put(records.end_record(RankEnd(0, "shm-0", None, None)))
            self._ends.put([records.packed(records.BEGAN, 0, 10**9)])
            self._ends.put(records.end_record(RankEnd(1, "shm-0", None, None)))
        return Message({"fault": ""})


def test_the_beginning_of_a_job_that_has_ended_is_forgotten() -> None:
    movers, ended = MoverProcesses([SETTINGS], __version__, begins=[Late()]), threading.Semaphore(0)
    movers.start()
    movers.listen(lambda _: ended.release())
    for ticket in range(2):
        movers.submit(RankJob(ticket, "shm-0", Direction.LOAD, Urgency.AWAITED, None, TimelineSlot(0, 1, 0, 1), ()))
    movers.probe()
    for _ in range(2):
        ended.acquire()
    assert movers.began("shm-0", 0) is None
    movers.close()


def test_a_budget_that_comes_while_a_life_is_told_of_another_is_told_too() -> None:
    told, page = list[bytes](), HostBudget.make(1)

    class Listening(Life):
        """Mover whose budget comes with its first message."""

        def put(self, record: Sequence[Part]) -> None:
            if record == limit_record(Direction.LOAD, 1):
                mover.limit_copies(Direction.STORE, 2)
            told.append(flat(record))
            super().put(record)

    live = partial(Listening, partial(child, "shm-0"), __version__, SETTINGS, lambda: (page.fd,))
    mover = DeviceMover("shm-0", 1 << 20, 64, live, lambda _: None, lambda *_: None, 10.0)
    mover.limit_copies(Direction.LOAD, 1)
    mover.begin()
    mover.started.result()
    mover.go_on()
    mover.close()
    assert told[:2] == [flat(limit_record(*limit)) for limit in ((Direction.STORE, 2), (Direction.LOAD, 1))]


def test_a_mover_comes_after_one_whose_jobs_could_not_be_ended() -> None:
    """A listener that broke took the thread with it, and the device had no mover any more."""
    begun, lost, page = threading.Semaphore(0), threading.Semaphore(0), HostBudget.make(1)

    class Deaf(Life):
        """Nothing reaches its mover, so that its jobs are under way when it dies."""

        def put(self, record: Sequence[Part]) -> None:
            if record == [records.packed(records.STOP)]:
                super().put(record)

    def breaks(end: RankEnd) -> None:
        raise ValueError(end.ticket)

    live = partial(Deaf, partial(child, "shm-0"), __version__, SETTINGS, lambda: (page.fd,))
    mover = DeviceMover("shm-0", 1 << 20, 64, live, lambda _: begun.release(), lambda *_: lost.release(), 10.0)
    mover.begin()
    mover.started.result()
    mover.go_on()
    mover.on_end = breaks
    begun.acquire()
    for ticket in range(2):
        mover.submit(RankJob(ticket, "shm-0", Direction.LOAD, Urgency.AWAITED, None, TimelineSlot(0, 1, 0, 1), ()))
    os.kill(mover.pid, signal.SIGKILL)
    lost.acquire()
    begun.acquire()
    mover.close()
