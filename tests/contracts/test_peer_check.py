"""Copies between GPUs of one process are checked at its start: a pair that brings wrong bytes or hangs is not used."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from cachesvc.memory.backend import STAMP_BYTES, PeerCheck
from cachesvc.memory.cuda import CudaBackend
from cachesvc.memory.memcpy import PitchedCopies
from cachesvc.model.errors import Unavailable
from tests.contracts.host_gpu import HostGpu, HostMark, HostQueue

POOL_BYTES = 1 << 20
PEERS = 3
"""Queues of a GPU: loads, stores, and what comes from other GPUs."""


class SilentQueue(HostQueue):
    """A queue that says that it has copied, and has not."""

    def submit(self, copies: PitchedCopies, words: Sequence[tuple[int, int]]) -> HostMark:
        return super().submit(copies[:0], words)


class HungQueue(HostQueue):
    """A queue whose copies do not end before ``goes_on``."""

    goes_on = threading.Event()

    def submit(self, copies: PitchedCopies, words: Sequence[tuple[int, int]]) -> HostMark:
        self.goes_on.wait()
        return super().submit(copies, words)


class OddGpu(HostGpu):
    """A GPU whose way from the others is a queue of this kind."""

    def __init__(self, number: int, peers: type[HostQueue]) -> None:
        super().__init__(number)
        self._kind = peers

    def queue(self) -> HostQueue:
        return self._kind(self) if self.told["queue"] == PEERS - 1 else super().queue()


def backend_on(*gpus: HostGpu) -> Iterator[CudaBackend]:
    made = CudaBackend(gpus, POOL_BYTES, timeline_words=64)
    made.start()
    yield made
    HungQueue.goes_on.set()
    made.close()
    assert all(gpu.is_whole() for gpu in gpus)


@pytest.fixture
def sound() -> Iterator[CudaBackend]:
    yield from backend_on(HostGpu(0), HostGpu(1))


@pytest.fixture
def silent() -> Iterator[CudaBackend]:
    yield from backend_on(HostGpu(0), OddGpu(1, SilentQueue))


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaBackend]:
    monkeypatch.setattr("cachesvc.memory.backend.LOOKS", 2)
    HungQueue.goes_on.clear()
    yield from backend_on(HostGpu(0), OddGpu(1, HungQueue), HostGpu(2))


def test_pairs_that_bring_the_stamp_are_used(sound: CudaBackend) -> None:
    first, second = sound.devices()
    assert sound.refused_peers() == {}
    assert (sound.can_reach(first, second), sound.can_reach(second, first)) == (True, True)
    assert all(sound.create_slab(device, POOL_BYTES).region for device in sound.devices()), "the pools are whole"


def test_a_pair_whose_copies_do_nothing_is_refused(silent: CudaBackend) -> None:
    first, second = silent.devices()
    (wrong,) = silent.refused_peers().items()
    assert wrong[0] == (first, second)
    assert wrong[1].endswith("the first at 0")
    assert (silent.can_reach(first, second), silent.can_reach(second, first)) == (False, True)


def test_a_gpu_whose_peer_copies_hang_is_asked_for_one_and_the_others_are_used(hung: CudaBackend) -> None:
    first, second, third = hung.devices()
    assert {pair: "not checked" in why for pair, why in hung.refused_peers().items()} == {
        (first, second): False,
        (third, second): True,
    }
    assert hung.can_reach(second, first)
    assert hung.can_reach(first, third)


def test_the_bytes_of_another_stamp_do_not_pass(sound: CudaBackend) -> None:
    first, second = sound.devices()
    stamp = PeerCheck(sound, first).stamp()
    check = PeerCheck(sound, second)
    check.verify(stamp.slab.region, stamp.seed)
    with pytest.raises(Unavailable, match=f"of {STAMP_BYTES} bytes came wrong"):
        check.verify(stamp.slab.region, bytes(16))
