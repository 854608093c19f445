"""Loads from one GPU's replica to another's, alone and beside a load from the host to the same GPU; a part of
``benchmarks.gpus``, whose head explains the figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.gpus.fleet import Fleet
from benchmarks.swap.plain import MOST_BYTES
from benchmarks.swap.swaps import WAYS
from cachesvc.model.words import Transfer
from gpu_ops.gpu import gpu_by_uuid

MIB = 1 << 20
HOST_LOAD = WAYS[0]


@dataclass(frozen=True)
class PeerRow:
    """One line: GB/s. ``plain``: of one copy from GPU to GPU; ``host``: of a load from the host."""

    plane_bytes: int
    mib: int
    gb_per_s: float
    plain_gb_per_s: float
    host_gb_per_s: float
    beside_gb_per_s: float
    host_beside_gb_per_s: float


def measure_peers(fleet: Fleet, uuids: tuple[str, ...], mibs: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
    """Every size, from the first device to the second. ``uuids``: of GPUs, or nothing. Raises AssertionError for wrong
    bytes."""
    rows = []
    print(f"{'plane':>9} {'MiB':>5} {'GB/s':>7} {'plain':>7} {'host':>6} {'beside':>7} {'host beside':>11}", flush=True)
    with ExitStack() as stack:
        plain_bytes = min(max(mibs) * MIB, MOST_BYTES)
        plain = plain_copy(uuids, plain_bytes, stack)
        for mib in mibs:
            row = measure(fleet, plain, plain_bytes, mib, repeats)
            rows.append(asdict(row))
            print(
                f"{row.plane_bytes:>7} B {row.mib:>5} {row.gb_per_s:>7.1f} {row.plain_gb_per_s:>7.1f} "
                f"{row.host_gb_per_s:>6.1f} {row.beside_gb_per_s:>7.1f} {row.host_beside_gb_per_s:>11.1f}",
                flush=True,
            )
    return rows


def measure(fleet: Fleet, plain: Callable[[], float], plain_bytes: int, mib: int, repeats: int) -> PeerRow:
    """Medians of tickets."""
    blocks = mib * MIB // fleet.page_bytes
    plains, alone, hosts, beside, hosts_beside = (list[float]() for _ in range(5))
    with ThreadPoolExecutor(2) as threads:
        for repeat in range(repeats + 1):
            loaded = fleet.transfers([fleet.replicas[0]], HOST_LOAD, blocks)
            fleet.mark(loaded)  # what no page had before
            fleet.move(loaded)
            shared = fleet.shared(*loaded)
            spent = fleet.move([shared]).seconds
            check(fleet, shared)
            (host,) = fleet.transfers([fleet.replicas[1]], HOST_LOAD, blocks)
            host_spent = fleet.move([host]).seconds
            both = [threads.submit(fleet.move, [each]) for each in (fleet.shared(*loaded), *fleet.again([host]))]
            beside_spent, host_beside_spent = (each.result().seconds for each in both)
            if repeat:  # the first one warms up
                plains.append(plain())
                alone.append(spent)
                hosts.append(host_spent)
                beside.append(beside_spent)
                hosts_beside.append(host_beside_spent)
    size_bytes = blocks * fleet.page_bytes
    rates = (size_bytes / statistics.median(each) / 1e9 for each in (hosts, beside, hosts_beside))
    return PeerRow(
        fleet.layout.planes[0].page_bytes,
        mib,
        size_bytes / statistics.median(alone) / 1e9,
        plain_bytes / statistics.median(plains) / 1e9,
        *rates,
    )


def check(fleet: Fleet, moved: Transfer) -> None:
    """Compare the copied pages with the source. Raises AssertionError."""
    for _, at in fleet.looked_at([moved]):
        page, source = moved.pages[0].device_pages[at], moved.pages[0].host_pages[at]
        found = (fleet.engine.page_bytes(moved.model, each, 0, 0, one) for each, one in ((1, page), (0, source)))
        if len(set(found)) > 1:
            raise AssertionError(f"ticket {moved.ticket}: page {page} is not page {source} of the other device")


def plain_copy(uuids: tuple[str, ...], size_bytes: int, stack: ExitStack) -> Callable[[], float]:
    """Makes one copy from GPU to GPU, in seconds; between arrays where there are none."""
    if not uuids:
        ours, theirs = (np.ones(size_bytes, np.uint8) for _ in range(2))
        return lambda: timed(lambda: np.copyto(ours, theirs))
    source, target = (gpu_by_uuid(uuid) for uuid in uuids[:2])
    for gpu in (source, target):
        gpu.start()
        stack.callback(gpu.close)
    target.open_peer(source)
    memories = [gpu.allocate(size_bytes, vmm=False) for gpu in (source, target)]
    queue = target.queue()
    queue.start()
    for undo in (*(memory.close for memory in memories), queue.close):
        stack.callback(undo)
    row = np.array([(memories[0].address, memories[1].address, size_bytes, 1, size_bytes, size_bytes)], np.int64)

    def copy() -> None:
        queue.copy(row)
        queue.synchronize()

    return lambda: timed(copy)


def timed(work: Callable[[], object]) -> float:
    """Seconds that it takes."""
    began = perf_counter()
    work()
    return perf_counter() - began
