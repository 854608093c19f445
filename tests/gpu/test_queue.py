"""CopyQueue: byte for byte, in order, and words that tell the truth."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from gpu_ops.driver import CudaError
from gpu_ops.gpu import Gpu
from gpu_ops.streams import PITCHED_FIELDS, SPLIT_COPIES, WIDEST_SPLIT, CopyQueue, PitchedCopies
from tests.gpu.frameworks import cupy
from tests.gpu.rig import (
    LoopQueue,
    Side,
    allocated,
    in_rows,
    load_copies,
    pinned,
    queue_of,
    scrambled,
    sides,
    spin_until,
    turned,
    write_device,
)

pytestmark = pytest.mark.gpu

WIDTHS = (1000, 4096, 8448, 41_984, 73_728, 131_072)
PLANES, PAGES, MOVED = 5, 24, 11
PLANE_GAP = 768
"""Bytes between two planes that no copy may touch."""


@pytest.mark.parametrize("kind", [CopyQueue, LoopQueue])
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_go_there_and_back_and_nothing_else_moves(
    gpu: Gpu, rng: np.random.Generator, width: int, kind: type[CopyQueue]
) -> None:
    stride = PAGES * width + PLANE_GAP
    host_bytes, device_bytes = PAGES * PLANES * width, PLANES * stride
    given, poison = (rng.integers(0, 256, size, np.uint8) for size in (host_bytes, device_bytes))
    pairs = np.stack([scrambled(rng, MOVED, PAGES), scrambled(rng, MOVED, PAGES)], axis=1)
    back = np.stack([scrambled(rng, MOVED, PAGES), pairs[:, 1]], axis=1)
    pages = given.reshape(PAGES, PLANES, width)
    with sides(gpu, host_bytes, device_bytes) as (host, device), queue_of(gpu, kind) as queue:
        host.put(given)
        device.put(poison)
        queue.copy(load_copies(host.address, device.address, PLANES, width, stride, pairs))
        queue.synchronize()
        want = poison.copy()
        for there, here in pairs:
            for plane in range(PLANES):
                at = plane * stride + here * width
                want[at : at + width] = pages[there, plane]
        np.testing.assert_array_equal(device.get(), want)
        np.testing.assert_array_equal(host.get(), given)

        other = rng.integers(0, 256, host_bytes, np.uint8)
        host.put(other)
        queue.copy(turned(load_copies(host.address, device.address, PLANES, width, stride, back)))
        queue.synchronize()
        stored = other.reshape(PAGES, PLANES, width).copy()
        stored[back[:, 0]] = pages[pairs[:, 0]]
        np.testing.assert_array_equal(host.get(), stored.reshape(-1))
        np.testing.assert_array_equal(device.get(), want)


@pytest.mark.parametrize("alone", [3, MOVED])
@pytest.mark.parametrize("width", WIDTHS)
def test_single_rows_go_by_themselves_and_among_tall_copies(
    gpu: Gpu, rng: np.random.Generator, width: int, alone: int
) -> None:
    stride = PAGES * width + PLANE_GAP
    host_bytes, device_bytes = PAGES * PLANES * width, PLANES * stride
    given, poison = (rng.integers(0, 256, size, np.uint8) for size in (host_bytes, device_bytes))
    pairs = np.stack([scrambled(rng, MOVED, PAGES), scrambled(rng, MOVED, PAGES)], axis=1)
    with sides(gpu, host_bytes, device_bytes) as (host, device), queue_of(gpu) as queue:
        host.put(given)
        device.put(poison)
        copies = load_copies(host.address, device.address, PLANES, width, stride, pairs)
        mixed = np.concatenate((in_rows(copies[:alone]), copies[alone:]))
        queue.copy(mixed[rng.permutation(len(mixed))])
        queue.synchronize()
        want = poison.copy()
        for there, here in pairs:
            for plane in range(PLANES):
                at = plane * stride + here * width
                want[at : at + width] = given.reshape(PAGES, PLANES, width)[there, plane]
        np.testing.assert_array_equal(device.get(), want)
        host.put(poison[:host_bytes] if host_bytes <= device_bytes else np.zeros(host_bytes, np.uint8))
        queue.copy(turned(mixed))
        queue.synchronize()
        pages = host.get().reshape(PAGES, PLANES, width)
        np.testing.assert_array_equal(pages[pairs[:, 0]], given.reshape(PAGES, PLANES, width)[pairs[:, 0]])


@pytest.mark.parametrize("kind", [CopyQueue, LoopQueue])
def test_runs_of_blocks_are_rows_too(gpu: Gpu, rng: np.random.Generator, kind: type[CopyQueue]) -> None:
    """Rows = blocks: one plane of a run that is contiguous in both pools."""
    width, run, first_host, first_device, plane = 8448, 7, 3, 9, 2
    stride = PAGES * width + PLANE_GAP
    host_bytes, device_bytes = PAGES * PLANES * width, PLANES * stride
    given, poison = (rng.integers(0, 256, size, np.uint8) for size in (host_bytes, device_bytes))
    with sides(gpu, host_bytes, device_bytes) as (host, device), queue_of(gpu, kind) as queue:
        host.put(given)
        device.put(poison)
        source = host.address + (first_host * PLANES + plane) * width
        target = device.address + plane * stride + first_device * width
        copy = np.array([(source, target, width, run, PLANES * width, width)], np.int64)
        queue.copy(copy)
        queue.synchronize()
        want = poison.copy()
        at = plane * stride + first_device * width
        want[at : at + run * width] = given.reshape(PAGES, PLANES, width)[first_host : first_host + run, plane].ravel()
        np.testing.assert_array_equal(device.get(), want)


@pytest.mark.parametrize("kind", [CopyQueue, LoopQueue])
def test_no_copies_are_nothing(gpu: Gpu, kind: type[CopyQueue]) -> None:
    with queue_of(gpu, kind) as queue:
        queue.copy(np.empty((0, len(PITCHED_FIELDS)), np.int64))
        queue.synchronize()


@pytest.mark.parametrize("kind", [CopyQueue, LoopQueue])
def test_what_a_word_tells_is_there(gpu: Gpu, rng: np.random.Generator, kind: type[CopyQueue]) -> None:
    """Stores of 4 MiB with a word after each: the processor that sees the word finds the bytes, without any wait."""
    steps, step_bytes = 24, 4 << 20
    given = rng.integers(0, 256, steps * step_bytes, np.uint8)
    with (
        pinned(gpu, given.size) as (host, host_bytes),
        allocated(gpu, given.size) as device,
        pinned(gpu, 4096) as (words_at, words_bytes),
        queue_of(gpu, kind) as queue,
    ):
        words = words_bytes.view(np.uint32)
        write_device(gpu, device.address, given.tobytes())
        host_bytes[:] = 0x5A
        seen_by_gpu = gpu.device_address(words_at)
        for step in range(steps):
            at = step * step_bytes
            queue.copy(np.array([(device.address + at, host + at, step_bytes, 1, step_bytes, step_bytes)], np.int64))
            queue.write_words([(seen_by_gpu + 4, 100 + step), (seen_by_gpu, step + 1)])
        for step in range(steps):
            spin_until(lambda wanted=step: int(words[0]) > wanted, f"word {step + 1}")  # type: ignore[misc]
            part = slice(step * step_bytes, (step + 1) * step_bytes)
            np.testing.assert_array_equal(host_bytes[part], given[part])
            assert int(words[1]) >= 100 + step  # written before the other
        queue.synchronize()


def test_a_mark_is_reached_after_what_was_queued_before_it(gpu: Gpu, rng: np.random.Generator) -> None:
    given = rng.integers(0, 256, 64 << 20, np.uint8)
    with sides(gpu, given.size, given.size) as (host, device), queue_of(gpu) as queue:
        device.put(given)
        queue.copy(np.array([(device.address, host.address, given.size, 1, given.size, given.size)], np.int64))
        mark = queue.mark()
        mark.wait()
        mark.close()
        mark.close()
        np.testing.assert_array_equal(host.get(), given)


def test_a_stream_waits_for_a_word_as_it_goes_around(gpu: Gpu) -> None:
    """The word lies where the timeline's do, in pinned host memory: the processor's store ends the wait."""
    with pinned(gpu, 4096) as (at, memory), allocated(gpu, 1) as one:
        write_device(gpu, one.address, b"\1")
        words, flag = memory.view(np.uint32), memory[2048:]
        word = gpu.device_address(at)
        words[0] = 0xFFFFFFF0
        stream = cupy.cuda.Stream(non_blocking=True)
        gpu.wait_word(stream.ptr, word, 0xFFFFFFF0)  # reached already
        gpu.wait_word(stream.ptr, word, 0x80000000)  # and this one long ago
        stream.synchronize()
        gpu.wait_word(stream.ptr, word, 5)
        to_host = cupy.cuda.runtime.memcpyDeviceToHost
        cupy.cuda.runtime.memcpyAsync(at + 2048, one.address, 1, to_host, stream.ptr)
        try:
            for value in (0xFFFFFFFF, 0, 4):
                words[0] = value
                assert not any(stream.done for _ in range(1000))  # no work for the GPU, which the wait might hold up
                assert flag[0] == 0
        finally:
            words[0] = 6
        stream.synchronize()
        assert flag[0] == 1


def test_copies_words_and_mark_in_one(gpu: Gpu, rng: np.random.Generator) -> None:
    given = rng.integers(0, 256, 8 << 20, np.uint8)
    with (
        sides(gpu, given.size, given.size) as (host, device),
        pinned(gpu, 4096) as (at, memory),
        queue_of(gpu) as queue,
    ):
        words = memory.view(np.uint32)
        seen_by_gpu = gpu.device_address(at)
        host.put(given)
        copies = np.array([(host.address, device.address, given.size, 1, given.size, given.size)], np.int64)
        for value in (7, 8):
            mark = queue.submit(copies, [(seen_by_gpu, value), (seen_by_gpu + 4, value + 100)])
            mark.wait()
            mark.close()
            assert words[:2].tolist() == [value, value + 100]
        mark = queue.submit(copies, [])
        mark.wait()
        mark.close()
        np.testing.assert_array_equal(device.get(), given)


@pytest.mark.parametrize("width", [1000, 32 << 10, WIDEST_SPLIT])
def test_a_word_behind_rows_of_two_threads_tells_of_both(gpu: Gpu, rng: np.random.Generator, width: int) -> None:
    """Stores, whose bytes the processor finds without any wait once it sees the word."""
    rows, steps = 2 * SPLIT_COPIES + 1, 5
    given = rng.integers(0, 256, (rows, width), np.uint8)
    with (
        sides(gpu, given.size, given.size) as (host, device),
        pinned(gpu, 4096) as (words_at, words_bytes),
        queue_of(gpu) as queue,
    ):
        words = words_bytes.view(np.uint32)
        device.put(given.reshape(-1))
        for step in range(1, steps + 1):
            host.put(np.full(given.size, 0x5A, np.uint8))
            there, here = rng.permutation(rows), rng.permutation(rows)
            copies = np.empty((rows, len(PITCHED_FIELDS)), np.int64)
            copies[:, 0], copies[:, 1] = device.address + here * width, host.address + there * width
            copies[:, 2:] = (width, 1, width, width)
            mark = queue.submit(copies, [(gpu.device_address(words_at), step)])
            spin_until(lambda wanted=step: int(words[0]) == wanted, f"word {step}")  # type: ignore[misc]
            np.testing.assert_array_equal(host.get().reshape(rows, width)[there], given[here])
            mark.wait()
            mark.close()


def rows_in_order(source: Side, target: Side, rows: int, width: int) -> PitchedCopies:
    copies = np.empty((rows, len(PITCHED_FIELDS)), np.int64)
    places = np.arange(rows) * width
    copies[:, 0], copies[:, 1] = source.address + places, target.address + places
    copies[:, 2:] = (width, 1, width, width)
    return copies


def test_a_second_thread_that_cannot_be_started_breaks_that_submission_alone(
    gpu: Gpu, rng: np.random.Generator
) -> None:
    width, rows = 4096, 2 * SPLIT_COPIES
    given = rng.integers(0, 256, rows * width, np.uint8)
    with sides(gpu, given.size, given.size) as (host, device), queue_of(gpu) as queue:
        host.put(given)
        copies = rows_in_order(host, device, rows, width)
        usual = threading.stack_size(1 << 48)  # more than a process has addresses
        try:
            with pytest.raises(RuntimeError, match="new thread"):
                queue.submit(copies, [])
        finally:
            threading.stack_size(usual)
        queue.submit(copies, []).close()
        queue.synchronize()
        np.testing.assert_array_equal(device.get(), given)


@pytest.mark.parametrize("at", [0, -1])
def test_a_row_that_either_thread_cannot_submit_is_an_error_and_no_end(
    gpu: Gpu, rng: np.random.Generator, at: int
) -> None:
    width, rows = 4096, 2 * SPLIT_COPIES
    given = rng.integers(0, 256, rows * width, np.uint8)
    with sides(gpu, given.size, given.size) as (host, device), queue_of(gpu) as queue:
        host.put(given)
        copies = rows_in_order(host, device, rows, width)
        wrong = copies.copy()
        wrong[at, 1] = 0
        with pytest.raises(CudaError):
            queue.submit(wrong, [])
        queue.synchronize()
        queue.submit(copies, []).close()
        queue.synchronize()
        np.testing.assert_array_equal(device.get(), given)
