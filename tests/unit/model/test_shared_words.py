"""Words that two processes share: the waiter sleeps in the kernel until the other process wakes it."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from cachesvc.model import futex
from cachesvc.model.futex import WORD_BYTES, Words, load, pause_s, store_and_wake, wait_reached, words_of

FOREVER_S = 1e9
WORDS = 16

WAITER = """
import mmap, sys, time
from cachesvc.model.futex import store_and_wake, wait_reached, words_of
view = memoryview(mmap.mmap(int(sys.argv[1]), 64))
words = words_of(view)
for i in range(int(sys.argv[2])):
    assert wait_reached(words, 0, i + 1, time.monotonic() + 1e6)
    store_and_wake(words, 1, i + 1)
"""


@pytest.fixture
def shared() -> Iterator[tuple[int, Words]]:
    fd = os.memfd_create("words")
    os.ftruncate(fd, WORDS * WORD_BYTES)
    yield fd, words_of(memoryview(mmap.mmap(fd, WORDS * WORD_BYTES)))
    os.close(fd)


def deadline() -> float:
    return time.monotonic() + FOREVER_S


@contextmanager
def waiter(fd: int, rounds: int) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", WAITER, str(fd), str(rounds)], pass_fds=[fd]) as other:
        try:
            yield other
        finally:
            other.kill()  # where the test broke; one that went well is gone


def test_two_processes_take_turns(shared: tuple[int, Words]) -> None:
    fd, words = shared
    with waiter(fd, 2000) as other:
        for i in range(2000):
            store_and_wake(words, 0, i + 1)
            assert wait_reached(words, 1, i + 1, deadline())
        assert other.wait() == 0


def test_a_waiting_process_sleeps(shared: tuple[int, Words]) -> None:
    """Not one that polls: from one look to the next it has not run at all."""
    fd, words = shared
    with waiter(fd, 2) as other:
        store_and_wake(words, 0, 1)
        assert wait_reached(words, 1, 1, deadline())
        while status_of(other.pid)["State"] != "S (sleeping)":
            os.sched_yield()
        before = status_of(other.pid)
        assert not wait_reached(words, 2, 1, time.monotonic() + 0.2)
        after = status_of(other.pid)
        for name in ("State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"):
            assert before[name] == after[name]
        store_and_wake(words, 0, 2)
        assert other.wait() == 0


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_a_read_only_mapping_will_do_for_waiting(shared: tuple[int, Words]) -> None:
    fd, words = shared
    readable = words_of(memoryview(mmap.mmap(fd, WORDS * WORD_BYTES, prot=mmap.PROT_READ)))
    assert not readable.flags.writeable
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(wait_reached(readable, 3, 5, deadline())))
    thread.start()
    for value in range(1, 6):
        store_and_wake(words, 3, value)
    thread.join()
    assert seen == [True]


@pytest.mark.parametrize(
    ("value", "target", "reached"),
    [
        (0, 0, True),
        (5, 4, True),
        (4, 5, False),
        (3, 0xFFFFFFFF, True),
        (0xFFFFFFFF, 3, False),
        (0, 1 << 31, False),
    ],
)
def test_what_counts_as_reached_goes_around(shared: tuple[int, Words], value: int, target: int, reached: bool) -> None:
    _, words = shared
    words[7] = value
    assert wait_reached(words, 7, target, time.monotonic()) is reached


def test_a_deadline_ends_the_wait(shared: tuple[int, Words]) -> None:
    _, words = shared
    begin = time.monotonic()
    assert not wait_reached(words, 0, 1, begin + 0.05)
    assert time.monotonic() >= begin + 0.05


@pytest.mark.parametrize(("waited_s", "pause"), [(0.0, 1e-4), (1.6e-3, 1e-4), (3.2e-3, 2e-4), (1.0, 1e-3)])
def test_a_waiter_looks_late_by_a_part_of_what_it_has_waited(waited_s: float, pause: float) -> None:
    assert pause_s((1e-4, 1e-3), waited_s) == pytest.approx(pause)


def test_a_wake_for_a_value_that_is_not_enough_is_slept_through(shared: tuple[int, Words]) -> None:
    _, words = shared
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(wait_reached(words, 0, 1000, deadline())))
    thread.start()
    for value in range(1000):
        store_and_wake(words, 0, value)
    assert not seen
    store_and_wake(words, 0, 1000)
    thread.join()
    assert seen == [True]


def test_a_signal_does_not_end_the_wait(shared: tuple[int, Words]) -> None:
    _, words = shared
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        main = threading.main_thread().ident
        assert main is not None

        def knock_then_wake() -> None:
            signal.pthread_kill(main, signal.SIGUSR1)
            while not heard:
                os.sched_yield()
            store_and_wake(words, 0, 1)

        thread = threading.Thread(target=knock_then_wake)
        thread.start()
        assert wait_reached(words, 0, 1, deadline())
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1]


def test_everybody_who_waits_is_woken(shared: tuple[int, Words]) -> None:
    _, words = shared
    seen: list[bool] = []
    threads = [threading.Thread(target=lambda: seen.append(wait_reached(words, 0, 1, deadline()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    store_and_wake(words, 0, 1)
    for thread in threads:
        thread.join()
    assert seen == [True] * 8


@pytest.mark.parametrize("index", [-1, WORDS])
def test_a_word_that_is_not_there(shared: tuple[int, Words], index: int) -> None:
    _, words = shared
    with pytest.raises(IndexError):
        store_and_wake(words, index, 1)
    with pytest.raises(IndexError):
        wait_reached(words, index, 1, 0.0)


def test_memory_that_no_futex_can_stand_on() -> None:
    odd = np.frombuffer(bytearray(64), np.uint8)[1:5].view(np.uint32)
    with pytest.raises(OSError, match="FUTEX"):
        store_and_wake(odd, 0, 1)


def test_a_fence_stands_between_a_word_and_what_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.zeros(2, np.uint32)
    seen: list[int] = []

    def fence() -> None:
        seen.append(int(words[0]))
        words[0] += 10

    monkeypatch.setattr(futex, "fence", fence)
    store_and_wake(words, 0, 7)
    assert (seen, int(words[0])) == ([0], 7)
    assert (load(words, 0), int(words[0])) == (7, 17)
    assert wait_reached(words, 0, 17, deadline())
    assert (seen, int(words[0])) == ([0, 7, 17], 27)


def test_words_work_with_the_fence_of_other_processors(
    shared: tuple[int, Words], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futex, "_MACHINE", "aarch64")
    test_two_processes_take_turns(shared)


def test_who_was_woken_too_early_sleeps_again(shared: tuple[int, Words]) -> None:
    _, words = shared
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(wait_reached(words, 5, 1, deadline())))
    thread.start()
    for _ in range(20):
        while not futex.wake(words, 5):
            assert not seen
    store_and_wake(words, 5, 1)
    thread.join()
    assert seen == [True]
