"""The CUDA backend on a GPU that hangs: its jobs end, nothing more is asked of it, and the other GPU serves on."""

from __future__ import annotations

import logging

import pytest

from cachesvc.memory.copy_thread import MOST_COUNTED_S, PATIENCE_S
from cachesvc.memory.cuda import CudaBackend
from cachesvc.model.errors import Unavailable
from cachesvc.model.words import CopiesHang
from tests.contracts.host_gpu import HostGpu
from tests.contracts.test_backend import DEVICE_BYTES, Bench, flat, host, step

LOOKS = int(PATIENCE_S / MOST_COUNTED_S) + 1


class Stage:
    """Two GPUs, of which the first hangs in ``call``; time passes where a test says so."""

    def __init__(self, call: str) -> None:
        self.now = 0.0
        self.step_s = 0.0
        self.gpus = (HostGpu(0), HostGpu(1))
        self.backend = CudaBackend(self.gpus, DEVICE_BYTES, timeline_words=64, clock=self.time)
        self.backend.start()
        for gpu in self.gpus:
            self.backend.open_sheet(gpu.uuid, 0)
        self.bench = Bench(self.backend, lambda: None, self.gpus[0].uuid)
        self.other = Bench(self.backend, lambda: None, self.gpus[1].uuid)
        self.region, self.memory = host(self.bench, 4096)
        self.slab = self.backend.create_slab(self.gpus[0].uuid, 4096)
        self.gpus[0].hangs = {call}

    def time(self) -> float:
        """Each question may take time itself."""
        self.now += self.step_s
        return self.now

    def look(self, seconds: float) -> None:
        """Some time later."""
        self.now += seconds
        self.backend.probe()

    def load(self, ticket: int, value: int) -> None:
        """Queue a load on the GPU that hangs; its words are ``2 * ticket`` and the next."""
        copies = [step(flat(self.region, 0, self.slab.region, 0, 64), value=value)]
        self.bench.load(self.bench.job(ticket, copies, word=2 * ticket))


@pytest.mark.parametrize("call", ["submit", "wait"])
def test_copies_that_do_not_end_fail_and_the_other_gpu_serves_on(call: str, caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(call)
    for ticket in range(4):
        stage.load(ticket, 5)
    assert stage.gpus[0].hung.acquire()
    for _ in range(LOOKS - 1):
        stage.look(MOST_COUNTED_S)
    assert not stage.bench.ended
    with caplog.at_level(logging.INFO):
        stage.look(MOST_COUNTED_S)
    stage.bench.settle()
    kinds = [type(stage.bench.ended[ticket]) for ticket in range(4)]
    begun = kinds.count(CopiesHang)  # as many as there were slices on their way
    assert 1 <= begun <= 2
    assert kinds == [CopiesHang] * begun + [Unavailable] * (4 - begun)
    words = [stage.backend.timeline(stage.gpus[0].uuid).read(word) for word in range(8)]
    assert words == [9] * 8
    assert "were not copied in 3" in stage.backend.fault(stage.gpus[0].uuid)
    assert [record.message.split()[0] for record in caplog.records] == ["gpu_broken"]
    with pytest.raises(Unavailable, match="hangs"):
        stage.load(9, 5)
    with pytest.raises(Unavailable, match="restart the daemon"):
        stage.backend.create_slab(stage.gpus[0].uuid, 4096)

    late, memory = host(stage.other, 4096)  # the first GPU is not asked to pin it
    slab = stage.backend.create_slab(stage.gpus[1].uuid, 4096)
    stage.other.load(stage.other.job(7, [step(flat(late, 0, slab.region, 0, 4096), value=9)]))
    stage.other.settle()
    assert stage.other.ended[7] is None
    assert stage.backend.read(slab.region, 0, 4096) == bytes(memory)
    assert stage.backend.fault(stage.gpus[1].uuid) == ""
    told = stage.gpus[0].told.copy()
    stage.slab.close()
    stage.backend.close()
    assert stage.gpus[0].told == told, "whatever it is asked would not return"
    assert sum(count for name, count in stage.gpus[0].held.items() if name.startswith("pin")) > 1, "it may still write"
    stage.gpus[0].goes_on.set()


def test_a_slice_that_lands_late_ends_no_job_again() -> None:
    stage = Stage("wait")
    stage.load(0, 5)
    assert stage.gpus[0].hung.acquire()
    for _ in range(LOOKS):
        stage.look(MOST_COUNTED_S)
    stage.bench.settle()
    stage.gpus[0].goes_on.set()
    stage.backend.close()  # ``done`` asserts that it is called once
    assert isinstance(stage.bench.ended[0], CopiesHang)


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_end_waits_for_no_gpu_that_hangs(is_broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachesvc.memory.cuda.LOOK_S", 0.001)
    stage = Stage("wait")
    stage.load(0, 5)
    assert stage.gpus[0].hung.acquire()
    if is_broken:
        stage.gpus[0].is_dead = True
        stage.look(1.0)
    stage.step_s = MOST_COUNTED_S
    stage.backend.close()
    assert isinstance(stage.bench.ended[0], CopiesHang)
    stage.gpus[0].goes_on.set()


def test_a_process_that_was_stopped_blames_no_gpu() -> None:
    stage = Stage("wait")
    stage.load(0, 9)
    assert stage.gpus[0].hung.acquire()
    stage.look(3600.0)
    assert not stage.bench.ended
    stage.gpus[0].goes_on.set()
    stage.bench.settle()
    assert stage.bench.ended[0] is None
    stage.look(3600.0)
    assert stage.backend.fault(stage.gpus[0].uuid) == ""
    stage.backend.close()
    assert stage.gpus[0].is_whole()


def test_a_gpu_that_does_not_say_how_it_is_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachesvc.memory.cuda.ANSWER_S", 0.01)
    stage = Stage("free_bytes")
    stage.look(1.0)
    stage.gpus[1].is_dead = True
    asked = stage.gpus[0].told["free_bytes"]
    while not stage.backend.fault(stage.gpus[1].uuid):
        stage.look(1.0)
    assert stage.gpus[0].told["free_bytes"] == asked, "nor is it asked again"
    assert stage.backend.fault(stage.gpus[0].uuid) == ""
    stage.gpus[0].goes_on.set()
    stage.backend.close()


@pytest.mark.parametrize("dead", [0, 1])
def test_host_memory_is_pinned_while_any_gpu_works(dead: int) -> None:
    stage = Stage("")
    stage.gpus[dead].is_dead = True
    stage.look(1.0)
    region, memory = host(stage.bench, 4096)
    assert stage.backend.read(region, 0, 4096) == bytes(memory)
    stage.gpus[1 - dead].is_dead = True
    stage.look(1.0)
    with pytest.raises(Unavailable, match="no GPU works"):
        host(stage.bench, 4096)
    stage.backend.close()
    assert all(gpu.is_whole() for gpu in stage.gpus)
