"""A waiter for a timeline word, as another process maps it, is woken and finds the bytes of its step."""

from __future__ import annotations

import mmap
import threading
import time

import pytest

from cachesvc.model.futex import Words, wait_reached, words_of
from tests.contracts.test_backend import CUDA, Bench, flat, host, make, step

SHARED_KINDS = ("shm", CUDA)
"""Kinds whose timelines other processes map."""


def words_as_mapped(bench: Bench) -> Words:
    """The bench's sheet, mapped a second time, as an engine does it."""
    timeline = bench.backend.timeline(bench.device)
    descriptor = timeline.sheet(0).fd
    assert descriptor is not None
    return words_of(memoryview(mmap.mmap(descriptor, 4 * timeline.words, prot=mmap.PROT_READ)))


@pytest.mark.parametrize("kind", ["shm", "host gpu", CUDA])
def test_whoever_waits_for_a_word_is_woken(kind: str) -> None:
    """A GPU wakes no waiter: the thread that sees its slice land does."""
    bench = make(kind)
    region, _ = host(bench, 4096)
    slab = bench.backend.create_slab(bench.device, 4096)
    words = words_as_mapped(bench)
    for value in range(1, 20):
        waiter = threading.Thread(target=wait_reached, args=(words, 0, value, float("inf")))
        waiter.start()
        bench.load(bench.job(value, [step(flat(region, 0, slab.region, 0, 4096), value=value)], end_value=value))
        waiter.join()
    bench.settle()
    bench.backend.close()


@pytest.mark.parametrize("kind", SHARED_KINDS)
def test_whoever_waits_for_a_word_finds_the_bytes_of_its_step(kind: str) -> None:
    """A GPU wakes no waiter."""
    bench = make(kind)
    poll_s = None if kind == "shm" else (1e-5, 1e-3)
    region, memory = host(bench, 1 << 18)
    slab = bench.backend.create_slab(bench.device, 1 << 18)
    words = words_as_mapped(bench)
    part = len(memory) // 64
    steps = [step(flat(region, i * part, slab.region, i * part, part), value=i + 1) for i in range(64)]
    bench.load(bench.job(1, steps, end_value=64))
    for i in range(64):
        assert wait_reached(words, 0, i + 1, time.monotonic() + 60, poll_s=poll_s)
        assert bench.backend.read(slab.region, i * part, part) == bytes(memory[i * part : (i + 1) * part])
    bench.settle()
    bench.backend.close()
