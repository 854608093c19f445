"""A mover that waits plans its last job again, for a while and for nothing."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from cachesvc.memory.cuda import CudaBackend
from cachesvc.memory.seam import CopyJob
from cachesvc.model.errors import InvalidRequest, Unavailable
from cachesvc.model.transfer import Direction
from cachesvc.mover import records
from cachesvc.mover.records import Listener, Teller
from cachesvc.mover.rehearsal import EVERY_S, MOST_BYTES, TIMES, Rehearsal
from cachesvc.mover.ring import LOOK_S, Reader, Ring, Writer
from cachesvc.swap.movers import Inside, RankJob
from tests.contracts.host_gpu import HostGpu
from tests.unit.test_mover_records import REGIONS, heard, job, joined, moves


class Planner:
    """Keeps what is rehearsed. ``breaks``: it cannot be planned."""

    def __init__(self) -> None:
        self.is_busy = False
        self.breaks = False
        self.jobs: list[RankJob] = []

    def rehearse(self, job: RankJob) -> None:
        self.jobs.append(job)
        if self.breaks:
            raise InvalidRequest("no such page")


def after_a_job() -> tuple[Planner, Rehearsal, Listener]:
    """A job of the pools that a listener knows has just been taken."""
    planner, listener = Planner(), Listener("shm-0", REGIONS)
    rehearsal = Rehearsal(listener, planner)
    assert rehearsal.meanwhile() == LOOK_S
    told = Teller().job(job(7, moves()))
    heard(listener, told)
    rehearsal.remember(joined(told[-1]))
    return planner, rehearsal, listener


def test_the_last_job_is_planned_again_some_time_after_and_not_for_ever() -> None:
    planner, rehearsal, _ = after_a_job()
    assert rehearsal.meanwhile() == EVERY_S
    assert not planner.jobs, "it was done just now"
    pauses = [rehearsal.meanwhile() for _ in range(TIMES + 1)]
    assert pauses == [EVERY_S] * TIMES + [LOOK_S]
    assert [one.ticket for one in planner.jobs] == [7] * TIMES


def test_a_busy_mover_rehearses_nothing() -> None:
    planner, rehearsal, _ = after_a_job()
    planner.is_busy = True
    assert {rehearsal.meanwhile() for _ in range(2 * TIMES)} == {EVERY_S}
    assert not planner.jobs


def test_what_is_forgotten_or_cannot_be_planned_is_not_tried_again() -> None:
    planner, rehearsal, _ = after_a_job()
    planner.breaks = True
    assert [rehearsal.meanwhile() for _ in range(3)] == [EVERY_S, EVERY_S, LOOK_S]
    assert len(planner.jobs) == 1
    planner, rehearsal, listener = after_a_job()
    listener.forget(np.array([records.FORGET, 1]))
    assert [rehearsal.meanwhile() for _ in range(3)] == [EVERY_S, EVERY_S, LOOK_S]
    assert not planner.jobs


def test_a_long_job_is_not_rehearsed() -> None:
    planner, rehearsal, _ = after_a_job()
    rehearsal.remember(bytes(MOST_BYTES + 8))
    assert rehearsal.meanwhile() == LOOK_S
    assert not planner.jobs


def test_a_reader_asks_what_to_do_meanwhile_for_as_long_as_nothing_comes() -> None:
    ring = Ring.make("jobs", 4096)
    writer, reader, asked = Writer(ring), Reader(ring), 0

    def meanwhile() -> float:
        nonlocal asked
        asked += 1
        if asked == 3:
            writer.put([b"job"])
        return 0.0

    assert reader.wait(meanwhile)
    assert (asked, reader.take()) == (3, [b"job"])
    ring.close()


@pytest.mark.parametrize("direction", Direction)
def test_a_rehearsal_passes_through_the_driver_and_copies_nothing(direction: Direction) -> None:
    gpu = HostGpu()
    backend = CudaBackend((gpu,), 1 << 20)
    backend.start()
    inside = Inside(backend)
    inside.listen(lambda _: None)
    told = replace(job(1, moves()), device=gpu.uuid, direction=direction)  # of regions that are not there
    inside.rehearse(told)
    assert not inside.is_busy
    over = threading.Event()
    stream = backend.load_stream(gpu.uuid) if direction is Direction.LOAD else backend.store_stream(gpu.uuid)
    stream.submit(CopyJob(2, (), None, None, 0, lambda _: over.set()))
    over.wait()
    assert (gpu.told["submit"], gpu.told["wait"]) == (2, 2), "and the job behind it"
    backend.close()
    assert gpu.is_whole()
    with pytest.raises(Unavailable):
        inside.rehearse(told)
