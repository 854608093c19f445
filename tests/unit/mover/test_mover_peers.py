"""Copies between movers are checked before a load uses them: wrong bytes, pulls that hang, pulls that kill."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import pytest

from cachesvc import __version__
from cachesvc.memory.backend import STAMP_BYTES
from cachesvc.memory.copy_thread import CopyThread
from cachesvc.memory.extents import map_memfd
from cachesvc.memory.host_pool import Neighbours
from cachesvc.memory.interface import CopyJob, CopyStep, Handle
from cachesvc.memory.shm import ShmBackend
from cachesvc.model.errors import Unavailable
from cachesvc.mover.life import Begin, MoverProcess, child
from cachesvc.mover.processes import MoverProcesses
from cachesvc.mover.records import Settings
from cachesvc.mover.server import Equipment, MoverServer
from tests.e2e.rig import wait_until
from tests.unit.mover.mover_rig import Heard

SOURCE, TARGET, OTHER = "shm-0", "shm-1", "shm-2"
OFFSET = STAMP_BYTES // 2


class Target(ShmBackend):
    """A mover's memory whose links are sound. ``pulls``: checks that were asked of it. ``mapped``: what it has of
    others. ``end``: ends its mover."""

    end: Callable[[], None]

    def __init__(self, settings: Settings) -> None:
        super().__init__(1, settings.device_bytes, timeline_words=settings.timeline_words, names=(settings.device,))
        self.pulls = 0
        self.mapped: set[int] = set()

    def open_peer(self, handle: Handle, fd: int | None) -> int:
        self.pulls += handle.size_bytes == STAMP_BYTES
        region = super().open_peer(handle, fd)
        self.mapped.add(region)
        return region

    def close_peer(self, region: int) -> None:
        super().close_peer(region)
        self.mapped.discard(region)


class SlowTarget(Target):
    """A mover whose check takes until ``goes_on``. ``has_begun``: it is asked for one."""

    goes_on: threading.Event

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.has_begun = threading.Event()

    def open_peer(self, handle: Handle, fd: int | None) -> int:
        if handle.size_bytes == STAMP_BYTES:
            self.has_begun.set()
            self.goes_on.wait()
        return super().open_peer(handle, fd)


class WrongTarget(Target):
    """One byte of what its link brings is another one."""

    def open_peer(self, handle: Handle, fd: int | None) -> int:
        self.pulls += 1
        assert fd is not None
        came = bytearray(map_memfd(fd, handle.size_bytes))
        came[OFFSET] ^= 1
        return self.register_host(memoryview(came))


class HungTarget(Target):
    """Its link is held by a copy that does not end before ``goes_on``."""

    goes_on: threading.Event

    def peer_stream(self, device: str) -> CopyThread:
        stream, begun = super().peer_stream(device), threading.Event()

        def hold(error: Exception | None) -> None:
            del error
            begun.set()
            self.goes_on.wait()

        nothing = CopyStep(np.empty((0, 8), np.int64))
        stream.submit(CopyJob(7, (nothing,), None, None, 0, hold))
        begun.wait()
        return stream


class Dead(Exception):
    """A mover's process that ends in the middle of a question."""


class KilledTarget(Target):
    """A mover that ends when it maps another one's memory."""

    def open_peer(self, handle: Handle, fd: int | None) -> int:
        self.pulls += 1
        self.end()
        raise Dead


class InThreads:
    """Begins the mover of the target as a thread, of each kind in turn. ``made``: its lives."""

    def __init__(self, kinds: Sequence[type[Target]]) -> None:
        self._kinds = iter(kinds)
        self.made: list[Target] = []
        self.goes_on = threading.Event()
        self.has_made = threading.Semaphore(0)

    def __call__(self) -> tuple[socket.socket, MoverProcess | None]:
        ours, theirs = socket.socketpair()
        kind = next(self._kinds)

        def equip(settings: Settings, neighbours: Neighbours) -> Equipment:
            del neighbours
            target = kind(settings)
            target.end = partial(theirs.shutdown, socket.SHUT_RDWR)
            if isinstance(target, HungTarget | SlowTarget):
                target.goes_on = self.goes_on
            self.made.append(target)
            self.has_made.release()
            return Equipment(target, dict)

        threading.Thread(target=MoverServer(theirs, __version__, equip).serve, daemon=True).start()
        return ours, None


class Pair:
    """A source in a process of its own, and a target in a thread of each kind in turn. ``others``: further sources."""

    def __init__(self, *kinds: type[Target], others: Sequence[str] = ()) -> None:
        self.targets = InThreads(kinds)
        begins: list[Begin] = [partial(child, SOURCE), self.targets, *(partial(child, each) for each in others)]
        settings = [Settings("shm", name, 1 << 20, timeline_words=64) for name in (SOURCE, TARGET, *others)]
        self.movers = MoverProcesses(settings, __version__, begins=begins)
        self.movers.start()
        self.movers.listen(lambda _: None)

    def share(self) -> bool:
        """Give the source a slab; whether the target may copy from it, once all have answered."""
        self.movers.create_slab(SOURCE, 4096)
        self.wait_told()
        return self.movers.can_reach(SOURCE, TARGET)

    def wait_told(self) -> None:
        for thread in threading.enumerate():
            if thread.name == "mover-asked":
                thread.join()

    def kill_source(self) -> None:
        os.kill(self.movers.mover_pids()[SOURCE], signal.SIGKILL)


@pytest.fixture
def make() -> Iterator[Callable[..., Pair]]:
    made = list[Pair]()

    def pair(*kinds: type[Target], others: Sequence[str] = ()) -> Pair:
        made.append(Pair(*kinds, others=others))
        return made[-1]

    yield pair
    for each in made:
        each.targets.goes_on.set()
        each.movers.close()


def test_a_stamp_is_pulled_once_for_all_slabs_of_a_life(make: Callable[..., Pair], heard: Heard) -> None:
    pair = make(Target)
    assert pair.share()
    assert pair.share()
    assert [target.pulls for target in pair.targets.made] == [1]
    pair.kill_source()
    heard.wait("mover_started")
    assert pair.share()
    assert [target.pulls for target in pair.targets.made] == [2], "a new life has a stamp of its own"
    assert pair.movers.refused_peers() == {}
    assert pair.movers.create_slab(TARGET, 1 << 20).is_open, "the checks took nothing of the pool"


def test_a_pair_that_brings_wrong_bytes_is_refused_until_the_source_has_a_new_life(
    make: Callable[..., Pair], heard: Heard
) -> None:
    pair = make(WrongTarget)
    assert not pair.share()
    wrong = f"1 of {STAMP_BYTES} bytes came wrong, the first at {OFFSET}"
    assert pair.movers.refused_peers() == {(SOURCE, TARGET): wrong}
    assert not pair.share()
    (target,) = pair.targets.made
    assert target.pulls == 1, "it is not tried again"
    assert pair.movers.can_reach(TARGET, SOURCE), "the other way is another link"
    pair.kill_source()
    heard.wait("mover_started")
    assert pair.movers.refused_peers() == {}
    assert not pair.share()
    assert target.pulls == 2


def test_a_pair_that_brought_wrong_bytes_is_checked_anew_with_a_new_life_of_the_target(
    make: Callable[..., Pair], heard: Heard
) -> None:
    pair = make(WrongTarget, Target)
    assert not pair.share()
    pair.targets.made[0].end()
    heard.wait("mover_started")
    assert pair.movers.refused_peers() == {}
    assert pair.movers.can_reach(SOURCE, TARGET)


def test_a_device_without_a_mover_is_not_reached_from_and_reaches_none(make: Callable[..., Pair], heard: Heard) -> None:
    pair, is_lost, held = make(Target), threading.Event(), threading.Event()

    def hold(device: str, why: str) -> None:
        assert (device, bool(why)) == (SOURCE, True)
        is_lost.set()
        held.wait()

    pair.movers.tell_losses(hold)
    assert pair.share()
    pair.kill_source()
    is_lost.wait()
    reached = [pair.movers.can_reach(SOURCE, TARGET), pair.movers.can_reach(TARGET, SOURCE)]
    held.set()
    heard.wait("mover_started")
    assert reached == [False, False]


def test_a_pull_that_hangs_refuses_the_ways_into_its_device_and_holds_up_no_slab(
    make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachesvc.memory.backend.LOOKS", 2)
    pair = make(HungTarget, others=(OTHER,))
    assert not pair.share()
    why = pair.movers.refused_peers()[SOURCE, TARGET]
    assert "did not end in" in why
    assert not pair.share()
    pair.movers.create_slab(OTHER, 4096)
    pair.wait_told()
    assert not pair.movers.can_reach(OTHER, TARGET), "a check would wait behind the one that hangs"
    assert pair.movers.refused_peers() == {(SOURCE, TARGET): why, (OTHER, TARGET): f"not checked: {why}"}
    assert pair.movers.can_reach(OTHER, SOURCE)
    assert pair.targets.made[0].pulls == 1


def test_a_pair_that_ends_its_mover_again_is_refused(make: Callable[..., Pair], heard: Heard) -> None:
    pair = make(KilledTarget, KilledTarget, Target)
    pair.movers.create_slab(SOURCE, 4096)
    heard.wait("mover_started", 2)  # the second ends in its check too, and the third makes none
    wait_until(lambda: (SOURCE, TARGET) in pair.movers.refused_peers(), "the pair is refused")
    assert "2 movers ended during the check" in pair.movers.refused_peers()[SOURCE, TARGET]
    assert not pair.share()
    assert [target.pulls for target in pair.targets.made] == [1, 1, 0]


def test_one_death_refuses_no_pair_however_many_slabs_were_to_be_shown(make: Callable[..., Pair], heard: Heard) -> None:
    pair = make(Target, KilledTarget, Target)
    assert pair.share()
    assert pair.share()
    pair.targets.made[0].end()
    heard.wait("mover_started", 2)  # the second ends when the first of both slabs is shown
    assert pair.movers.refused_peers() == {}
    assert pair.movers.can_reach(SOURCE, TARGET)
    assert [target.pulls for target in pair.targets.made] == [1, 1, 1]


def test_a_slab_that_is_closed_during_its_check_is_not_kept_by_the_other_mover(
    make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachesvc.mover.peers.WAITED_SECONDS", 0.01)
    pair = make(SlowTarget)
    pair.movers.create_slab(SOURCE, 4096).close()
    (target,) = pair.targets.made
    pair.targets.goes_on.set()
    pair.wait_told()
    assert target.pulls == 1
    assert target.mapped == set(), "its memory would stay allocated"
    assert pair.share()


def test_a_slab_that_is_closed_while_a_new_mover_is_checked_does_no_harm_to_that_one(
    make: Callable[..., Pair], heard: Heard
) -> None:
    pair = make(Target, SlowTarget, Target)
    slab = pair.movers.create_slab(SOURCE, 4096)
    pair.targets.has_made.acquire()
    pair.targets.made[0].end()
    pair.targets.has_made.acquire()
    checked = pair.targets.made[1]
    assert isinstance(checked, SlowTarget)
    checked.has_begun.wait()
    assert not pair.movers.can_reach(SOURCE, TARGET), "it has not been shown the slab yet"
    slab.close()
    pair.targets.goes_on.set()
    heard.wait("mover_started")
    assert pair.share()
    assert len(pair.targets.made) == 2
    assert len(checked.mapped) == 1, "the new slab alone"


def test_a_stamp_that_cannot_be_written_refuses_the_ways_from_its_device(make: Callable[..., Pair]) -> None:
    class Stampless(Target):
        def create_scratch(self, device: str, size_bytes: int) -> None:  # type: ignore[override]
            raise Unavailable(f"{device} has no {size_bytes} bytes")

    pair = make(Stampless)
    pair.movers.create_slab(TARGET, 4096)
    assert not pair.movers.can_reach(TARGET, SOURCE)
    assert "has no" in pair.movers.refused_peers()[TARGET, SOURCE]
