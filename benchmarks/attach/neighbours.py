"""Processes that share one GPU: an engine at work, two kinds of daemon that swap beside it, and plain copies.

Each runs in a process of its own and talks over a pipe. An engine answers a number of seconds with the milliseconds of
every iteration; a swapper answers a ``Job`` with "running", and the next message with the GB/s that it had until then.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.support.mover import Mover, two_plane_layout
from cachesvc.model.words import Direction, PagePairs, Transfer

LAYERS = 32
PLANE_BYTES = 128 << 10
BLOCKS = 64
"""Blocks of one transfer: 512 MiB."""
OUTSTANDING = 2
BATCH = 50
WARM_UP = 20
MATRIX = 8192
SMALL_KERNELS = 200
KERNEL = Path(__file__).parent / "kernels" / "zero_copy_swap.cu"
KERNEL_THREADS = 1024
PINNED_AND_MAPPED = 3
WAYS = {"in": (Direction.LOAD,), "out": (Direction.STORE,), "both": tuple(Direction)}


class Job(NamedTuple):
    """``way`` of WAYS; ``thread_blocks``: of the kernel, where it is a kernel that swaps."""

    way: str
    thread_blocks: int = 0


def run_engine(mode: str, pipe: Connection) -> None:
    """``prefill``: large matmuls; ``decode``: a graph of small kernels. None ends it."""
    import torch

    work = _matmul(torch) if mode == "prefill" else _small_kernels(torch)
    for _ in range(WARM_UP):
        work()
    torch.cuda.synchronize()
    pipe.send("ready")
    while (seconds := pipe.recv()) is not None:
        pipe.send(_iterations(torch, work, seconds))


def _matmul(torch: Any) -> Callable[[], object]:
    a = torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16)
    b, c = a.clone(), torch.empty_like(a)
    return lambda: torch.matmul(a, b, out=c)


def _small_kernels(torch: Any) -> Callable[[], object]:
    x = torch.randn(64, 4096, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            x.mul_(1.0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(SMALL_KERNELS):
            x.mul_(1.0)
    replay: Callable[[], object] = graph.replay
    return replay


def _iterations(torch: Any, work: Callable[[], object], seconds: float) -> list[float]:
    """Milliseconds from the end of one iteration to the end of the next, on the GPU's clock, back to back."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(BATCH + 1)]
        for mark in marks:
            work()
            mark.record()
        torch.cuda.synchronize()
        times += [first.elapsed_time(second) for first, second in pairwise(marks)]
    return times


def run_mover(pipe: Connection) -> None:
    """The daemon's mover on its CUDA backend: copy engines alone. None ends it."""
    layout = two_plane_layout(LAYERS, PLANE_BYTES)
    pages = 2 * len(Direction) * OUTSTANDING * BLOCKS
    pool_bytes = pages * layout.page_bytes(0)
    mover = Mover("cuda", pool_bytes, pool_bytes)
    mover.start()
    slab = mover.slab(layout, pages)
    ended: queue.SimpleQueue[tuple[int, Exception | None]] = queue.SimpleQueue()
    engine = mover.engine(
        layout, mover.reserve(layout, pages), slab, pages, lambda ticket, error: ended.put((ticket, error))
    )
    rng = np.random.default_rng(1)
    device, host = rng.permutation(pages).tolist(), rng.permutation(pages).tolist()
    places = itertools.product(Direction, range(OUTSTANDING))
    pairs = {
        place: PagePairs(0, tuple(device[at : at + BLOCKS]), tuple(host[at : at + BLOCKS]))
        for place, at in zip(places, range(0, pages, BLOCKS), strict=False)
    }
    tickets = itertools.count(1)

    def swap(job: Job) -> float:
        running: dict[int, tuple[Direction, int]] = {}

        def submit(place: tuple[Direction, int]) -> None:
            ticket = next(tickets)
            running[ticket] = place
            engine.submit(Transfer(ticket, 0, 0, place[0], (pairs[place],), layered=False))

        for place in itertools.product(WAYS[job.way], range(OUTSTANDING)):
            submit(place)
        pipe.send("running")
        moved, began = 0, time.perf_counter()
        while running:
            ticket, error = ended.get(timeout=30)
            if error is not None:
                raise error
            place = running.pop(ticket)
            moved += BLOCKS * layout.page_bytes(0)
            if not pipe.poll():
                submit(place)
        return moved / (time.perf_counter() - began) / 1e9

    pipe.send("ready")
    _serve(pipe, swap)
    engine.close()
    mover.close()


def run_copies(pipe: Connection) -> None:
    """One plain memcpy after another, of as many bytes as a transfer has: what a link at work costs by itself. None
    ends it."""
    import cupy

    size_bytes = BLOCKS * 2 * LAYERS * PLANE_BYTES
    runtime = cupy.cuda.runtime
    copies = {
        direction: (
            runtime.hostAlloc(size_bytes, 0),
            cupy.empty(size_bytes, cupy.uint8),
            cupy.cuda.Stream(non_blocking=True),
        )
        for direction in Direction
    }

    def copy(direction: Direction) -> None:
        host, device, stream = copies[direction]
        if direction is Direction.LOAD:
            runtime.memcpyAsync(device.data.ptr, host, size_bytes, runtime.memcpyHostToDevice, stream.ptr)
        else:
            runtime.memcpyAsync(host, device.data.ptr, size_bytes, runtime.memcpyDeviceToHost, stream.ptr)

    def swap(job: Job) -> float:
        pipe.send("running")
        moved, began = 0, time.perf_counter()
        while not pipe.poll():
            for _ in range(OUTSTANDING):
                for direction in WAYS[job.way]:
                    copy(direction)
                    moved += size_bytes
            for direction in WAYS[job.way]:
                copies[direction][2].synchronize()
        return moved / (time.perf_counter() - began) / 1e9

    pipe.send("ready")
    _serve(pipe, swap)


def run_kernels(pipe: Connection) -> None:
    """A daemon as others write it: kernels that read and write pinned host memory. None ends it."""
    import cupy

    size_bytes = BLOCKS * 2 * LAYERS * PLANE_BYTES
    runtime = cupy.cuda.runtime
    kernel = cupy.RawModule(code=KERNEL.read_text(encoding="utf-8")).get_function("zero_copy_swap")
    hosts = [runtime.hostAlloc(size_bytes, PINNED_AND_MAPPED) for _ in Direction]
    devices = [cupy.empty(size_bytes, cupy.uint8) for _ in Direction]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in Direction]
    pieces = size_bytes // PLANE_BYTES
    rng = np.random.default_rng(1)
    orders = [rng.permutation(pieces) for _ in range(2 * len(Direction))]
    ends = []
    for way, direction in enumerate(Direction):
        on_device = devices[way].data.ptr + orders[2 * way].astype(np.uint64) * np.uint64(PLANE_BYTES)
        on_host = np.uint64(hosts[way]) + orders[2 * way + 1].astype(np.uint64) * np.uint64(PLANE_BYTES)
        pair = (on_device, on_host) if direction is Direction.LOAD else (on_host, on_device)
        ends.append(tuple(cupy.asarray(addresses) for addresses in pair))
    cupy.cuda.Device().synchronize()

    def launch(way: int, thread_blocks: int) -> None:
        arguments = (*ends[way], np.int64(pieces), np.int64(PLANE_BYTES))
        kernel((thread_blocks,), (KERNEL_THREADS,), arguments, stream=streams[way])

    def swap(job: Job) -> float:
        ways = [list(Direction).index(direction) for direction in WAYS[job.way]]
        pipe.send("running")
        moved, began = 0, time.perf_counter()
        while not pipe.poll():
            for way in ways:
                launch(way, max(1, job.thread_blocks // len(ways)))
            for way in ways:
                streams[way].synchronize()
            moved += size_bytes * len(ways)
        return moved / (time.perf_counter() - began) / 1e9

    host = _array_at(hosts[0], size_bytes)
    host[:] = rng.integers(0, 256, size_bytes, dtype=np.uint8)
    launch(0, 16)
    streams[0].synchronize()
    came = devices[0].reshape(pieces, PLANE_BYTES)[cupy.asarray(orders[0][:BATCH])].get()
    if not (came == host.reshape(pieces, PLANE_BYTES)[orders[1][:BATCH]]).all():
        raise AssertionError("the kernel copied wrong bytes")
    pipe.send("ready")
    _serve(pipe, swap)


def _array_at(address: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))


def _serve(pipe: Connection, swap: Callable[[Job], float]) -> None:
    while (job := pipe.recv()) is not None:
        rate = swap(job)
        pipe.recv()  # what ended it
        pipe.send(rate)
