"""Memory that callers and deaths can have the daemon hold: ``python -m benchmarks.loop.memory --json OUT``.

* ``deaths``: a device's mover is killed again and again under an engine that registers and computes anew each time.
* ``keys``: sequences of one process with 65,536 keys (2 MiB) each, and no page.
* ``frames``: lanes that begin a frame of 8 MiB and send 256 KiB of it, after HELLO.

Each has a daemon of its own. Reported is its anonymous memory without pools, in MiB: before, at most, and after what
held it has ended; and what was refused. Exit code 1 where one grew by more than its bound.
"""

from __future__ import annotations

import logging
import os
import signal
import socket as sockets
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from cachesvc_client import CacheClient, CacheClientError
from cachesvc_client.wire.life import LifeConnection
from cachesvc_client.wire.transports import BlockingLane
from cachesvc_ctl.core.daemon_process import DaemonProcess

from benchmarks.chaos.proc import MIB, bytes_beside_pools
from benchmarks.loop.cases import KEY_BYTES, LAYOUT, Site
from benchmarks.support.calls import compute
from benchmarks.support.movers import movers_of
from benchmarks.support.recording import parser_of, save
from cachesvc.wire.lane import HEADER, METHODS, READ_BYTES

BOUND_MIB = {"deaths": 64, "keys": 384, "frames": 160}
"""Most growth of each: keys of a process have 256 MiB, its half-read frames 64 MiB."""
BLOCKS = 512
CALL_SECONDS = 60.0
FRAME_BYTES = (8 << 20) - 64
LANES_A_CONNECTION = 8


def main() -> None:
    """Print a table and write JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--deaths", type=int, default=300)
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--frames", type=int, default=2048)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # a client reports each lease that it loses
    found = {
        "deaths": measure(deaths, arguments.deaths, "--movers", "process"),
        "keys": measure(keys, arguments.sequences),
        "frames": measure(frames, arguments.frames),
    }
    save(arguments, {"benchmark": "loop.memory", **found})
    sys.exit(any(each["most_mib"] - each["before_mib"] > BOUND_MIB[name] for name, each in found.items()))


class Memory:
    """Memory of a daemon beside its pools, MiB."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.before = self.most = self.look()

    def look(self) -> float:
        """Memory now."""
        now = bytes_beside_pools(self._pid, 0) / MIB
        self.most = max(getattr(self, "most", now), now)
        return now


def measure(case: Callable[[Site, Memory, int], int], count: int, *flags: str) -> dict[str, Any]:
    """Figures of one case."""
    if not count:
        return {"count": 0, "before_mib": 0.0, "most_mib": 0.0, "after_mib": 0.0}
    every = ["--backend", "shm", "--host-pool", "0", "--device-pool", "64MiB", *flags]
    with DaemonProcess(every) as daemon:
        memory = Memory(daemon.process.pid)
        refused = case(Site(daemon, time.monotonic), memory, count)
        time.sleep(2.0)  # what was given up goes in turns
        after = memory.look()
    row = {"count": count, "refused": refused}
    row |= {"before_mib": round(memory.before), "most_mib": round(memory.most), "after_mib": round(after)}
    print(f"{case.__name__:8}" + "  ".join(f"{name} {value:,}" for name, value in row.items()), flush=True)
    return row


def deaths(site: Site, memory: Memory, count: int) -> int:
    """Kill the mover; an engine registers and computes again."""
    refused = last = 0
    with CacheClient(site.socket, engine="dying") as client:
        for number in range(count):
            mover = last
            while mover == last:
                with suppress(LookupError):
                    mover = movers_of(site.daemon.process.pid)["shm-0"]
                time.sleep(0.02)  # between two looks for the next one
            is_done = False
            while not is_done:
                try:
                    lease = client.open_lease(client.register("m", LAYOUT, device_pages=[8 * BLOCKS], host_pages=[0]))
                    compute(lease, site.keys(BLOCKS))
                    is_done = True
                except CacheClientError:
                    refused += 1
                    time.sleep(0.02)  # until it serves
            if number == 0:
                memory.before = memory.look()
            os.kill(mover, signal.SIGKILL)
            last = mover
            memory.look()
    return refused


def keys(site: Site, memory: Memory, count: int) -> int:
    """Match long prompts, and leave the sequences open."""
    prompt = bytearray(site.keys(65536))
    refused, held = 0, []
    with CacheClient(site.socket, engine="keys") as client:
        lease = client.open_lease(client.register("m", LAYOUT, device_pages=[16], host_pages=[0]))
        for number in range(count):
            prompt[:4] = number.to_bytes(4, "little")
            try:
                held.append(lease.match(bytes(prompt)))
            except CacheClientError:
                refused += 1
            if number % 64 == 0:
                memory.look()
        assert len(prompt) == 65536 * KEY_BYTES
    return refused


def frames(site: Site, memory: Memory, count: int) -> int:
    """Begin frames that are never ended."""
    rng, lives, refused, open_lanes = np.random.default_rng(1), [], 0, []
    for _ in range(-(-count // LANES_A_CONNECTION)):
        life = LifeConnection(site.socket, CALL_SECONDS, lambda: None)
        life.start()
        lives.append(life)
        for _ in range(LANES_A_CONNECTION):
            try:
                end: sockets.socket = life.fetch_lane()
                lane = BlockingLane(end)
                lane.greet((), CALL_SECONDS)
                open_lanes.append(lane)
                head = HEADER.pack(FRAME_BYTES, METHODS["Match"], 0, 0, 1)
                end.settimeout(CALL_SECONDS)
                end.sendall(head + rng.bytes(READ_BYTES))
            except (CacheClientError, OSError):
                refused += 1
        memory.look()
    time.sleep(1.0)  # all that came is read
    memory.look()
    for lane in open_lanes:
        with suppress(CacheClientError, OSError):
            lane.close()
    for each in lives:
        each.close()
    return refused


if __name__ == "__main__":
    main()
