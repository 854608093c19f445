"""Calls that many benchmarks make of a cache, the times that they take, and processes that make them beside others."""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np
from cachesvc_client import KEY_BYTES, CacheClient, Lease

from cachesvc.model.layout import Layout


@contextmanager
def leased(socket: str, layout: Layout, device_pages: int, host_pages: int = 0, name: str = "bench") -> Iterator[Lease]:
    """A lease on a model with pools of that many pages in each group."""
    groups = len(layout.groups)
    with CacheClient(socket, engine=name) as client:
        model = client.register(name, layout, device_pages=[device_pages] * groups, host_pages=[host_pages] * groups)
        with client.open_lease(model) as lease:
            yield lease


def compute(lease: Lease, keys: bytes) -> None:
    """Have all blocks of a prompt sealed on the device, as after its prefill."""
    blocks = len(keys) // KEY_BYTES
    with lease.match(keys) as sequence:
        if sequence.device_blocks < blocks:
            sequence.allocate(blocks)
            for ticket in sequence.tickets:
                lease.wait_tickets([ticket.id])
            sequence.publish(blocks)


def timed_ms(call: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def match_ms(lease: Lease, keys: bytes, least_blocks: int = 0) -> float:
    """Milliseconds of a Match without its release, which finds ``least_blocks`` blocks on the device at least."""
    began = time.perf_counter()
    sequence = lease.match(keys)
    milliseconds = (time.perf_counter() - began) * 1e3
    assert sequence.device_blocks >= least_blocks
    sequence.release()
    return milliseconds


def spread(times: Sequence[float]) -> dict[str, float]:
    """Count, median, 99th percentile and longest, in the unit of the times; NaN without any."""
    column = np.array(times or [float("nan")])
    p50, p99, most = (round(float(each), 3) for each in (*np.percentile(column, (50, 99)), column.max()))
    return {"count": len(times), "p50": p50, "p99": p99, "max": most}


class Beside:
    """A process that runs ``target(ends, pipe, *arguments)`` until the ``with`` ends. It sends something once it is
    ready, and its ``result`` when ``ends`` is set."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = mp.get_context("spawn")
        self.result: Any = None
        self._ends = context.Event()
        self.pipe, self._theirs = context.Pipe()
        self._process = context.Process(target=target, args=(self._ends, self._theirs, *arguments), daemon=True)

    def __enter__(self) -> Beside:
        self._process.start()
        self._theirs.close()
        self.pipe.recv()
        return self

    def end(self) -> Any:
        """Tell it to end, and wait for its result. Idempotent."""
        self._ends.set()
        try:
            while True:
                self.result = self.pipe.recv()
        except EOFError:
            self._process.join()
        return self.result

    def __exit__(self, *_: object) -> None:
        self.end()


def match_until(ends: Event, pipe: Connection, socket: str, model: Any, keys: bytes) -> None:
    """For ``Beside``: milliseconds of every Match of a prompt under a registration."""
    with CacheClient(socket, engine="bystander") as client, client.open_lease(model) as lease:
        match_ms(lease, keys)
        pipe.send("ready")
        times = []
        while not ends.is_set():
            times.append(match_ms(lease, keys))
    pipe.send(times)
