"""Movers as processes die and come back: every ticket ends once, its waiters go on, nothing else is touched."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cachesvc import __version__
from cachesvc.memory.extents import map_memfd, sealed_memfd
from cachesvc.model.errors import InvalidRequest, LedgerBroken, NotFound, PoolExhausted, Unavailable
from cachesvc.model.words import PagePairs, Transfer, has_reached
from cachesvc.mover import peers
from cachesvc.mover.life import Life, MoverProcess, child
from cachesvc.mover.processes import MoverProcesses
from cachesvc.mover.records import Settings
from tests.e2e.rig import wait_until
from tests.unit.mover.mover_rig import Heard, freeze
from tests.unit.rigs.swap_rig import (
    DEVICE_PAGES,
    LOAD,
    MODEL,
    REPLICA,
    STORE,
    HostArray,
    Rig,
    attach_replica,
    mixed_layout,
    rig_of,
    wait_chunks,
)

SECOND = 2


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = rig_of("process", mixed_layout(2))
    yield made
    made.close()


def movers_of(rig: Rig) -> MoverProcesses:
    assert isinstance(rig.backend, MoverProcesses)
    return rig.backend


def kill(movers: MoverProcesses, device: str) -> None:
    os.kill(movers.mover_pids()[device], signal.SIGKILL)


def test_what_was_under_way_when_a_mover_is_killed_fails_with_its_waiters_released(rig: Rig, heard: Heard) -> None:
    movers, lost = movers_of(rig), list[tuple[str, str]]()
    movers.tell_losses(lambda device, why: lost.append((device, why)))
    kept = [rig.device_page(1, 1, page) for page in range(DEVICE_PAGES)]
    freeze(movers.mover_pids()["shm-0"])  # so that nothing ends before it dies
    slots = [rig.move(LOAD, (0, [page], [page]), layered=True) for page in range(6)]
    slots += [rig.move(STORE, (1, [page], [20 + page])) for page in range(6)]
    kill(movers, "shm-0")
    rig.settle(len(slots))
    assert [ticket for ticket, _ in sorted(rig.ended)] == list(range(12))
    for _, error in rig.ended:
        assert isinstance(error, Unavailable)
        assert "shm-0" in str(error)
    for slot in slots:
        for word, failed in rig.words(slot):
            assert has_reached(word, slot.end)
            assert failed == slot.end
    heard.wait("mover_started")
    assert [device for device, _ in lost] == ["shm-0"]
    assert [rig.device_page(1, 1, page) for page in range(DEVICE_PAGES)] == kept


def test_a_device_serves_again_with_the_same_host_memory_and_words(rig: Rig, heard: Heard) -> None:
    movers = movers_of(rig)
    rig.move(LOAD, (0, [1], [1]), layered=True)
    rig.settle()
    kill(movers, "shm-1")
    heard.wait("mover_started")
    assert movers.fault("shm-1") == ""
    attach_replica(rig, REPLICA + 1)
    pages, host = [3, 7, 8, 9], [5, 1, 2, 30]
    before = {
        (rank, group): [rig.host_page(rank, group, page) for page in host] for rank in range(2) for group in (0, 1)
    }
    for ticket in range(100, 140):  # all slots are used again: on both devices their words go on where they stood
        pairs = (PagePairs(0, pages, host), PagePairs(1, pages, host))
        slot = rig.engine.submit(Transfer(ticket, MODEL, REPLICA + 1, LOAD, pairs, layered=True))
        rig.settle()
        assert rig.ended[-1] == (ticket, None)
        for word, failed in rig.words(slot):
            assert word == slot.end
            assert failed != slot.end
    for (rank, group), content in before.items():
        assert [rig.device_page(rank, group, page, REPLICA + 1) for page in pages] == content


def test_a_mover_killed_again_and_again_comes_back_each_time(rig: Rig, heard: Heard) -> None:
    movers = movers_of(rig)
    for turn in range(1, 4):
        rig.move(LOAD, (0, [turn], [turn]))
        kill(movers, "shm-0")
        rig.settle()
        heard.wait("mover_started", turn)
    attach_replica(rig, REPLICA + 1)
    rig.engine.submit(Transfer(500, MODEL, REPLICA + 1, LOAD, (PagePairs(0, [1], [1]),), layered=False))
    rig.settle()
    assert rig.ended[-1] == (500, None)


def test_a_mover_that_hangs_is_replaced(heard: Heard) -> None:
    movers = MoverProcesses([Settings("shm", "shm-0", 1 << 20)], __version__, probe_seconds=0.2)
    movers.start()
    movers.listen(lambda _: None)
    freeze(movers.mover_pids()["shm-0"])
    movers.probe()
    heard.wait("mover_started")
    movers.create_slab("shm-0", 4096)
    movers.close()


def test_a_mover_that_hangs_is_replaced_while_it_owes_an_answer(heard: Heard) -> None:
    """Its watchdog asks on a connection of its own."""
    movers = MoverProcesses([Settings("shm", "shm-0", 1 << 20)], __version__, probe_seconds=0.2)
    movers.start()
    movers.listen(lambda _: None)
    freeze(movers.mover_pids()["shm-0"])
    refused: list[Exception] = []

    def make() -> None:
        try:
            movers.create_slab("shm-0", 4096)
        except Unavailable as error:
            refused.append(error)

    making = threading.Thread(target=make)
    making.start()
    with pytest.raises(Unavailable):
        movers.require_answer("shm-0")
    making.join()
    assert len(refused) == 1
    heard.wait("mover_started")
    movers.require_answer("shm-0")
    movers.close()


def test_host_memory_that_comes_while_there_is_no_mover_is_there_for_the_next(rig: Rig, heard: Heard) -> None:
    movers, held = movers_of(rig), threading.Event()

    def hold(device: str, why: str) -> None:
        held.wait()

    movers.tell_losses(hold)
    for device in movers.devices():
        kill(movers, device)
    heard.wait("mover_died", 2)
    fd = sealed_memfd("late", 8192)
    view = map_memfd(fd, 8192)
    view[:] = bytes(range(256)) * 32
    late = HostArray(rig.layout.page_bytes(0), 20, view, movers.register_host(view, fd), 20)
    held.set()
    heard.wait("mover_started", 2)
    rig.engine.detach_model(MODEL)
    rig.engine.attach_model(MODEL, rig.layout, [[late], *rig.hosts[1:]])
    attach_replica(rig, REPLICA)
    rig.move(LOAD, (0, [1, 2], [3, 17]))
    rig.settle()
    assert rig.ended[-1][1] is None
    for rank in range(2):
        assert [rig.device_page(rank, 0, page) for page in (1, 2)] == [bytes(view[late.page(at)]) for at in (3, 17)]
    os.close(fd)


def test_chunks_that_come_together_are_all_learned_and_a_refused_one_is_known() -> None:
    movers = MoverProcesses([Settings("shm", "shm-0", 1 << 20)], __version__)
    movers.start()
    sizes = [4096] * 5 + [8192] + [4096] * 7
    files = [sealed_memfd(f"chunk-{at}", 4096) for at in range(len(sizes))]
    views = [map_memfd(fd, 4096) for fd in files]
    for at, view in enumerate(views):
        view[:] = bytes([at]) * 4096
    views[5] = memoryview(bytearray(8192))  # more than its file has

    with ThreadPoolExecutor(len(sizes)) as threads:
        regions = list(threads.map(lambda at: movers.register_host(views[at], files[at]), range(len(sizes))))
    wait_chunks()
    for at, region in enumerate(regions):
        assert movers.has_host("shm-0", region) == (at != 5)
        if at != 5:
            mover = movers._mover("shm-0")  # noqa: SLF001 - what it has mapped itself
            there = mover.life().ask("read", region=region, offset=0, size_bytes=4096)
            assert there.body == bytes([at]) * 4096
    [(device, (count, why))] = movers.lacking_hosts().items()
    assert (device, count) == ("shm-0", 1)
    assert why
    movers.close()
    for fd in files:
        os.close(fd)


def test_slabs_of_a_dead_mover_are_closed_without_it(rig: Rig, heard: Heard) -> None:
    movers = movers_of(rig)
    slab = movers.create_slab("shm-0", 4096)
    free = movers.create_slab("shm-1", 4096)
    kill(movers, "shm-0")
    heard.wait("mover_started")
    slab.close()
    with pytest.raises(LedgerBroken):
        slab.close()
    free.close()
    with pytest.raises(NotFound):
        movers.read(slab.region, 0, 1)
    movers.create_slab("shm-0", 1 << 20).close()  # all of the budget is there again


def test_what_is_submitted_while_there_is_no_mover_ends_at_once(rig: Rig, heard: Heard) -> None:
    movers, held = movers_of(rig), threading.Event()

    def hold(device: str, why: str) -> None:
        held.wait()  # there is no new one before this returns

    movers.tell_losses(hold)
    kill(movers, "shm-0")
    heard.wait("mover_died")
    assert "mover has ended" in movers.fault("shm-0")
    with pytest.raises(Unavailable, match="shm-0"):
        movers.create_slab("shm-0", 4096)
    rig.move(LOAD, (0, [1], [1]))
    rig.settle()
    assert isinstance(rig.ended[-1][1], Unavailable)
    held.set()
    heard.wait("mover_started")


def test_replicas_share_from_device_to_device_through_both_movers(rig: Rig) -> None:
    attach_replica(rig, SECOND, turned=True)
    rig.move(LOAD, (1, [4, 5, 6], [10, 11, 12]))
    rig.settle()
    pairs = (PagePairs(1, [0, 1, 2], [4, 5, 6]),)
    rig.engine.submit(Transfer(900, MODEL, SECOND, LOAD, pairs, layered=False, source_replica=REPLICA))
    rig.settle()
    assert rig.ended[-1] == (900, None)
    for rank in range(2):
        assert [rig.device_page(rank, 1, page, SECOND) for page in range(3)] == [
            rig.host_page(rank, 1, page) for page in (10, 11, 12)
        ]


def test_a_slab_does_not_wait_for_another_device_s_mover_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "WAITED_SECONDS", 0.05)
    movers = MoverProcesses([Settings("shm", f"shm-{number}", 1 << 20) for number in range(2)], __version__)
    movers.start()
    movers.listen(lambda _: None)
    hung = movers.mover_pids()["shm-1"]
    freeze(hung)
    kept, closed = (movers.create_slab("shm-0", 4096) for _ in range(2))
    closed.close()
    assert not movers.can_reach("shm-0", "shm-1"), "it does not know the slab yet"
    assert movers.can_reach("shm-1", "shm-0")
    os.kill(hung, signal.SIGCONT)
    for thread in threading.enumerate():
        if thread.name == "mover-asked":
            thread.join()
    assert movers.can_reach("shm-0", "shm-1")
    kept.close()
    movers.close()


def test_waits_for_a_device_that_hangs_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "WAITED_SECONDS", 0.2)
    patience, goes_on = peers.Patience(), threading.Event()
    began, done = time.monotonic(), threading.Event()
    for _ in range(20):
        done.clear()
        patience.ask({"hung": goes_on.wait, "well": done.set})
    assert time.monotonic() - began < 10 * peers.WAITED_SECONDS
    assert done.wait(1.0)
    goes_on.set()


def test_waits_for_a_device_that_is_slow_each_time_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "WAITED_SECONDS", 0.2)
    patience, never = peers.Patience(), threading.Event()
    began = time.monotonic()
    for _ in range(20):
        patience.ask({"slow": partial(never.wait, 0.15)})
    assert time.monotonic() - began < 10 * peers.WAITED_SECONDS


def test_a_slab_that_a_mover_refused_is_not_reached_until_a_new_mover_knows_it(
    monkeypatch: pytest.MonkeyPatch, heard: Heard
) -> None:
    """Its copies failed one after another, and the way through the host was never taken."""

    def refuse(life: Life, region: int, handle: object, fd: int | None) -> None:
        raise Unavailable(f"mover {life.pid} maps no region {region}, neither {handle} nor {fd}")

    movers = MoverProcesses([Settings("shm", f"shm-{number}", 1 << 20) for number in range(2)], __version__)
    movers.start()
    movers.listen(lambda _: None)
    with monkeypatch.context() as patched:
        patched.setattr(Life, "learn_peer", refuse)
        refused, again = movers.create_slab("shm-0", 4096), movers.create_slab("shm-0", 4096)
    assert not movers.can_reach("shm-0", "shm-1")
    assert movers.can_reach("shm-1", "shm-0")
    refused.close()
    assert not movers.can_reach("shm-0", "shm-1"), "there is another one"
    kill(movers, "shm-1")
    heard.wait("mover_started")
    assert movers.can_reach("shm-0", "shm-1")
    again.close()
    movers.close()


def test_budgets_and_names_are_checked_before_a_mover_is_asked(rig: Rig) -> None:
    movers = movers_of(rig)
    with pytest.raises(PoolExhausted) as refused:
        movers.create_slab("shm-0", 1 << 30)
    assert refused.value.capacity == 1 << 20
    calls: list[Callable[[str], object]] = [movers.timeline, movers.fault, movers.capacity_bytes]
    for call in calls:
        with pytest.raises(NotFound, match="device"):
            call("nowhere")
    with pytest.raises(NotFound):
        movers.can_reach("shm-0", "nowhere")
    with pytest.raises(InvalidRequest):
        movers.read(1, -1, 4)


def test_nothing_is_left_after_close() -> None:
    def use() -> None:
        made = rig_of("process", mixed_layout(2))
        made.move(LOAD, (0, [1, 2], [3, 4]), layered=True)
        made.settle()
        pids = movers_of(made).mover_pids().values()
        made.close()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

    def collect() -> int:
        for thread in threading.enumerate():
            if thread.name.startswith("mover-"):
                thread.join()  # those that see the processes end
        gc.collect()  # a mapping keeps a descriptor of its own
        return len(list(Path("/proc/self/fd").iterdir()))

    use()  # whatever is loaded once, is loaded
    before, threads = collect(), set(threading.enumerate())
    use()
    wait_until(lambda: collect() <= before, "every descriptor is closed")  # but those of other tests' threads
    assert set(threading.enumerate()) <= threads


def test_a_mover_of_another_version_is_refused() -> None:
    movers = MoverProcesses([Settings("shm", "shm-0", 1 << 20)], "0.0.1")
    with pytest.raises(Unavailable, match=f"version {__version__}"):
        movers.start()
    movers.close()


def test_a_device_whose_mover_cannot_start_yet_is_broken_and_others_serve(heard: Heard) -> None:
    can_start = threading.Event()

    def second() -> tuple[socket.socket, MoverProcess | None]:
        if not can_start.is_set():
            raise OSError("no such device yet")
        return child("shm-1")

    settings = [Settings("shm", device, 1 << 20) for device in ("shm-0", "shm-1")]
    movers = MoverProcesses(settings, __version__, begins=[partial(child, "shm-0"), second])
    movers.start()
    try:
        assert (movers.fault("shm-0"), "no such device yet" in movers.fault("shm-1")) == ("", True)
        assert list(movers.measure()) == ["shm-0"]
        movers.create_slab("shm-0", 4096).close()
        with pytest.raises(Unavailable, match="no such device yet"):
            movers.create_slab("shm-1", 4096)
        can_start.set()
        heard.wait("mover_started")
        assert movers.fault("shm-1") == ""
        movers.create_slab("shm-1", 4096).close()
    finally:
        movers.close()


def test_a_start_without_any_mover_or_with_one_that_was_asked_wrongly_is_refused() -> None:
    def absent() -> tuple[socket.socket, MoverProcess | None]:
        raise OSError("no such device")

    fine, wrong = Settings("shm", "shm-0", 1 << 20), Settings("tape", "t", 1 << 20)
    movers = MoverProcesses([fine, replace(fine, device="shm-1")], __version__, begins=[absent, absent])
    with pytest.raises(Unavailable, match="no such device"):
        movers.start()
    movers.close()
    movers = MoverProcesses([fine, wrong], __version__)
    with pytest.raises(InvalidRequest, match="tape"):
        movers.start()
    assert movers.mover_pids() == {"shm-0": 0, "t": 0}
    movers.close()


def test_what_a_mover_refuses_is_what_the_start_says() -> None:
    movers = MoverProcesses([Settings("tape", "t", 1 << 20)], __version__)
    with pytest.raises(InvalidRequest, match="tape"):
        movers.start()
    movers.close()
