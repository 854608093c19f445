"""Waits of streams by themselves: which are pending, released, and when the words may be unpinned."""

from __future__ import annotations

import gc
import time
import weakref

import numpy as np
from cachesvc_client.memory.stream_waits import PRUNE_AT, StreamWaits

from cachesvc.model.futex import wait_reached
from cachesvc.model.words import TimelineSlot
from tests.unit.rigs.client_gpu_rig import FakeGpu

LAYERS = 4
WORD, FAILED = 4, 5


def test_words_stay_pinned_while_a_stream_is_being_told_to_wait() -> None:
    gpu, words = FakeGpu(), np.zeros(64, np.uint32)
    gpu.start()
    waits = StreamWaits(gpu, words, ())
    waits.start()

    def end() -> None:  # the load has ended, so nothing is pending; but the call is under way
        words[WORD] = 14
        assert not waits.close()

    gpu.on_wait = end
    waits.wait(1, TimelineSlot(WORD, FAILED, 10, LAYERS), 7, 14)
    assert waits.close()


def test_words_stay_mapped_for_as_long_as_they_are_pinned() -> None:
    gpu, words = FakeGpu(), np.zeros(64, np.uint32)
    gpu.start()
    forgotten, closed = StreamWaits(gpu, words, ()), StreamWaits(gpu, np.zeros(64, np.uint32), ())
    left = [weakref.ref(each._words) for each in (forgotten, closed)]  # noqa: SLF001
    forgotten.start()
    closed.start()
    assert closed.close()
    del forgotten, closed, words
    gc.collect()
    assert [each() is None for each in left] == [False, True]


def test_a_word_that_the_dying_daemons_gpu_sets_back_is_released_again() -> None:
    gpu, words = FakeGpu(), np.zeros(64, np.uint32)
    gpu.start()
    waits = StreamWaits(gpu, words, (0.0, 0.0, 3600.0))
    waits.start()
    waits.wait(1, TimelineSlot(WORD, FAILED, 10, LAYERS), 7, 14)
    waits.wait(2, TimelineSlot(8, 9, 20, LAYERS), 7, 24)
    waits.lose()
    waits.lose()
    assert waits.close()
    words[WORD] = 11
    assert words[[WORD, FAILED, 8, 9]].tolist() == [11, 14, 24, 24]

    waits = StreamWaits(gpu, words, (0.001,) * 1000)
    waits.start()
    waits.wait(1, TimelineSlot(WORD, FAILED, 10, LAYERS), 7, 14)
    waits.lose()
    for late in (11, 12, 13):
        words[WORD] = late
        assert wait_reached(words, WORD, 14, time.monotonic() + 5, poll_s=(1e-4, 1e-3))
    assert waits.close()


def test_of_many_pending_waits_all_are_released_and_ended_ones_forgotten() -> None:
    gpu, words = FakeGpu(), np.zeros(64, np.uint32)
    gpu.start()
    waits = StreamWaits(gpu, words, ())
    waits.start()
    for ticket in range(4 * PRUNE_AT):  # one load after the other in each of 32 slots: the last one counts
        word = 2 * (ticket % 32)
        base = LAYERS * (ticket // 32)
        words[word] = base
        waits.wait(ticket, TimelineSlot(word, word + 1, base, LAYERS), 7, base + LAYERS)
        waits.wait(ticket, TimelineSlot(word, word + 1, base - LAYERS, LAYERS), 7, base)
    end = 4 * PRUNE_AT // 32 * LAYERS
    words[0] = end
    waits.lose()
    assert words.tolist() == [end, 0] + [end] * 62
    assert not waits.has_released(TimelineSlot(0, 1, end - LAYERS, LAYERS))
    assert waits.has_released(TimelineSlot(2, 3, end - LAYERS, LAYERS))
