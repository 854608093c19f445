"""Time of one small swap, step by step: from the call to the driver, to the last byte, to the waiter.

    python -m benchmarks.swap.ticket [--backend shm|cuda] [--width KIB ...] [--mib N ...] [--pause-ms N] [--repeats N]
                                     [--steps whole|layered|"by layer"] [--free] [--link] [--json OUT]

Tickets of single blocks, anywhere in both pools, go through the real engine and a mover in a process of its own, which
notes the time at each hand-over. All times are microseconds after the call, medians of the repeats; ``pause-ms`` is
slept before each ticket, so that a longer one finds every thread cold. In every other ticket the waiter looks without
sleeping: ``word`` and ``first word`` are when it sees the last word and the first layer's, ``woke`` is when one that
sleeps as engines' workers do goes on. ``--free`` (shm): nothing is copied, only our own cost remains. ``--link``
(cuda): what single rows take in calls of several sizes, and how late a sleeping wait for an event ends.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.mover import Mover, two_plane_layout
from benchmarks.support.recording import parser_of, save
from benchmarks.swap.swaps import CHECKED_PAGES, GROUNDS, KIB, MIB, WAYS, Field, check
from cachesvc.__main__ import SWITCH_SECONDS
from cachesvc.memory import copy_thread, shm
from cachesvc.memory import cuda as copy_streams
from cachesvc.model.futex import wait_reached
from cachesvc.model.words import has_reached
from cachesvc.mover import __main__ as mover_main
from cachesvc.mover import life, processes, records
from cachesvc.swap import movers
from gpu_ops import streams
from gpu_ops.gpu import Gpu, gpu_by_uuid

KEPT_STAMPS = 1 << 20
STAMP = struct.Struct("<qdd")
NAMES = (
    "mover woke",
    "job read",
    "job queued",
    "thread took it",
    "slice cut",
    "slice begun",
    "driver called",
    "driver back",
    "slice begun, back",
    "event reached",
    "slice landed",
    "end told",
)
IN_WAYS = {way.steps: way for way in WAYS if way.name == "in"}
WAIT_SECONDS = 60.0


class Stamps:
    """Times that one process notes and another one reads: (name, seconds, value) in a file that both map. Packed
    without NumPy, which takes a processor that has just woken longer than what is measured."""

    def __init__(self, path: str) -> None:
        """``path``: of a file of ``KEPT_STAMPS`` rows."""
        with Path(path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), KEPT_STAMPS * STAMP.size)
        self._lock = threading.Lock()
        self._seen = self._count = 0

    def note(self, name: int, value: float = 0.0) -> None:
        """One more; by any thread of the one process that notes."""
        now = time.perf_counter()
        with self._lock:
            self._count += 1
            STAMP.pack_into(self._map, STAMP.size * self._count, name, now, value)
            STAMP.pack_into(self._map, 0, self._count, 0.0, 0.0)

    def take(self) -> list[tuple[str, float, float]]:
        """Times since the last call."""
        first, (self._seen, _, _) = self._seen + 1, STAMP.unpack_from(self._map, 0)
        rows = [STAMP.unpack_from(self._map, STAMP.size * at) for at in range(first, self._seen + 1)]
        return [(NAMES[name], at, value) for name, at, value in rows]


def noted(owner: Any, name: str, before: Callable[..., None] | None, after: Callable[..., None] | None) -> None:
    """Have a method noted as it begins and as it comes back."""
    method = getattr(owner, name)

    def around(*arguments: Any, **named: Any) -> Any:
        if before is not None:
            before()
        answer = method(*arguments, **named)
        if after is not None:
            after()
        return answer

    setattr(owner, name, around)


def serve_noted(fd: int, device: str, path: str, *, is_free: bool) -> None:
    """The mover's process: the real one, with its hand-overs noted."""
    stamps = Stamps(path)
    note = {name: partial(stamps.note, number) for number, name in enumerate(NAMES)}
    if is_free:
        vars(shm)["run_copies"] = vars(shm)["yield_to_callers"] = lambda *_: None
        shm.ShmRunner.only_queues = True
    noted(records.Reader, "wait", None, note["mover woke"])
    noted(movers.InProcessMovers, "submit_here", note["job read"], note["job queued"])
    noted(copy_thread.CopyThread, "_cut", note["thread took it"], note["slice cut"])
    for runner in (shm.ShmRunner, copy_streams.CudaRunner):
        noted(runner, "submit", note["slice begun"], note["slice begun, back"])
        noted(runner, "wait", None, note["slice landed"])
    noted(streams.CopyQueue, "_copy", note["driver called"], note["driver back"])
    noted(shm.ShmBackend, "_copy", note["driver called"], note["driver back"])
    noted(streams.Mark, "wait", None, note["event reached"])
    noted(records.Writer, "put", None, note["end told"])
    sys.argv = ["cachesvc-mover", "--connected", str(fd), "--gpu", device]
    mover_main.main()


def noted_child(path: str, is_free: bool, device: str) -> tuple[socket.socket, life.MoverProcess | None]:
    """Starts it; as ``process.child``."""
    ours, theirs = socket.socketpair()
    with theirs:
        told = [str(theirs.fileno()), device, path, str(int(is_free))]
        command = [sys.executable, "-m", "benchmarks.swap.ticket", "--serve", *told]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    return ours, life.Child(child)


def ticket(field: Field, stamps: Stamps, way: Any, blocks: int, *, spins: bool) -> list[tuple[str, float, float]]:
    """One ticket's stamps, in seconds after the call."""
    (ready,) = field.transfers(way, 1, blocks)
    field.engine.layers_per_step = way.layers_per_step
    stamps.take()
    words, began = field._words, time.perf_counter()  # noqa: SLF001
    slot = field.engine.submit(ready)
    found = [("submit back", time.perf_counter(), 0.0)]
    if spins:
        for name, value in (("first word", slot.base + 1), ("word", slot.end)):
            while not has_reached(int(words[slot.word]), value):
                pass
            found.append((name, time.perf_counter(), 0.0))
    else:
        deadline_s = time.monotonic() + WAIT_SECONDS
        assert wait_reached(words, slot.word, slot.end, deadline_s, poll_s=field._poll_s)  # noqa: SLF001
        found.append(("woke", time.perf_counter(), 0.0))
    field.arrivals.wait(1)
    found.append(("engine done", time.perf_counter(), 0.0))
    time.sleep(0.003)  # what is noted after the end, but for rehearsals
    found += stamps.take()
    if blocks >= CHECKED_PAGES and "--free" not in sys.argv:
        check(field.engine, [ready])
    return sorted(((name, at - began, value) for name, at, value in found), key=lambda stamp: stamp[1])


def measure(field: Field, stamps: Stamps, way: Any, blocks: int, pause_s: float, repeats: int) -> dict[str, Any]:
    """Medians of each stamp's first and last time, and of what a plain copy takes."""
    size_bytes = blocks * field.layout.page_bytes(0)
    firsts, lasts = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    counts, plain = defaultdict[str, list[int]](list), []
    shown: list[tuple[str, float, float]] = []
    for repeat in range(2 * repeats + 2):
        plain.append(field.plain.seconds(way.directions, size_bytes))
        time.sleep(pause_s)  # so long nothing is asked of the mover
        found = ticket(field, stamps, way, blocks, spins=bool(repeat % 2))
        if repeat < 2:
            continue
        shown = shown if repeat % 2 else found
        by_name = defaultdict[str, list[float]](list)
        for name, at, _ in found:
            by_name[name].append(at * 1e6)
        for name, ats in by_name.items():
            firsts[name].append(ats[0])
            lasts[name].append(ats[-1])
            counts[name].append(len(ats))
    plain_us = statistics.median(plain[2:]) * 1e6
    stamped = {
        name: {
            "first": round(statistics.median(firsts[name])),
            "last": round(statistics.median(lasts[name])),
            "times": round(statistics.median(counts[name])),
        }
        for name in sorted(firsts, key=lambda name: statistics.median(firsts[name]))
    }
    return {
        "plane_bytes": field.layout.planes[0].page_bytes,
        "mib": size_bytes / MIB,
        "steps": way.steps,
        "pause_ms": pause_s * 1e3,
        "plain_us": round(plain_us),
        "of_plain": round(plain_us / statistics.median(lasts["woke"]), 3),
        "us": stamped,
        "last_ticket": [(name, round(at * 1e6)) for name, at, _ in shown],
    }


def show(row: dict[str, Any]) -> None:
    """A ticket as lines."""
    print(
        f"\n{row['plane_bytes'] // KIB} KiB planes, {row['mib']:g} MiB, {row['steps']}, after {row['pause_ms']:g} ms: "
        f"plain {row['plain_us']} us, {row['of_plain']} of it"
    )
    for name, told in row["us"].items():
        print(f"  {name:<20} {told['first']:>7} .. {told['last']:>7} us  x{told['times']}")
    short = {"slice begun": "[", "slice begun, back": "]", "driver called": "(", "driver back": ")", "slice cut": "c"}
    if len(row["last_ticket"]) < 200:
        print("  " + " ".join(f"{short.get(name, name)}{at}" for name, at in row["last_ticket"]), flush=True)


def link_table(uuid: str) -> None:
    """Times of single rows by width and bytes a call, and of the wake-up after the last byte."""
    gpu = gpu_by_uuid(uuid)
    gpu.start()
    size_bytes = 1 << 30
    host = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
    host[:] = 1
    device = gpu.allocate(size_bytes, vmm=False)
    gpu.register_host(host.ctypes.data, size_bytes)
    queue = gpu.queue()
    queue.start()
    for width, rows in itertools.product((8 * KIB, 32 * KIB, 64 * KIB, 128 * KIB), (1, 2)):
        for call_bytes in (2 * MIB, 8 * MIB, 32 * MIB, 64 * MIB):
            print(_calls(queue, host.ctypes.data, device.address, size_bytes, width, rows, call_bytes), flush=True)
    _late(gpu, queue, host, device.address)
    queue.close()
    gpu.unregister_host(host.ctypes.data)
    device.close()
    gpu.close()


def _calls(queue: Any, host: int, device: int, size_bytes: int, width: int, rows: int, call_bytes: int) -> str:
    moved = 128 * MIB
    rng = np.random.default_rng(width)
    places, count = size_bytes // width // rows, moved // width // rows
    copies = np.empty((count, 6), np.int64)
    copies[:, 0] = host + rng.permutation(places)[:count] * width * rows
    copies[:, 1] = device + rng.permutation(places)[:count] * width
    copies[:, 2:] = (width, rows, width, size_bytes // 2 if rows > 1 else width)
    spent, submitted = [], []
    for _ in range(5):
        began = time.perf_counter()
        for first in range(0, count, call_bytes // width // rows):
            queue.copy(copies[first : first + call_bytes // width // rows])
        submitted.append(time.perf_counter() - began)
        queue.synchronize()
        spent.append(time.perf_counter() - began)
    us = statistics.median(submitted) * 1e6 / count
    rate = moved / statistics.median(spent) / 1e9
    return (
        f"link: {width // KIB:>4} KiB x {rows}, calls of {call_bytes // MIB:>3} MiB: {rate:6.2f} GB/s, "
        f"{us:.2f} us of host time a copy"
    )


def _late(gpu: Gpu, queue: Any, host: Any, device: int) -> None:
    """A word after 8 MiB: a second thread looks at it all the time, this one sleeps in the driver."""
    words = host[:4096].view(np.uint32)
    place = gpu.device_address(host.ctypes.data)
    late, seen, plain = [], [0.0], np.array([(host.ctypes.data + (1 << 20), device, 8 * MIB, 1, 8 * MIB, 8 * MIB)])

    def look(value: int) -> None:
        while int(words[0]) != value:
            pass
        seen[0] = time.perf_counter()

    words[0] = 0
    for value in range(1, 21):
        looking = threading.Thread(target=look, args=(value,))
        looking.start()
        mark = queue.submit(plain, [(place, value)])
        mark.wait()
        now = time.perf_counter()
        mark.close()
        looking.join()
        late.append((now - seen[0]) * 1e6)
    print(f"link: an event's sleeper wakes {statistics.median(late):.0f} us after the word, at most {max(late):.0f}")


def main() -> None:
    """Measure, print, and write as JSON where asked."""
    parser = parser_of(__doc__)
    parser.add_argument("--backend", choices=sorted(GROUNDS), default="shm")
    parser.add_argument("--width", type=int, nargs="+", default=[128, 64, 32], help="KiB of a plane's block")
    parser.add_argument("--mib", type=int, nargs="+", default=[64])
    parser.add_argument("--steps", nargs="+", choices=sorted(IN_WAYS), default=["whole", "by layer"])
    parser.add_argument("--pause-ms", type=float, nargs="+", default=[0.0, 10.0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--pool-mib", type=int, default=0)
    parser.add_argument("--free", action="store_true", help="copy nothing (shm)")
    parser.add_argument("--link", action="store_true", help="measure calls and waits of the driver too (cuda)")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)  # how the mover is started
    arguments = parser.parse_args()
    if arguments.serve:
        fd, device, path, is_free = arguments.serve
        serve_noted(int(fd), device, path, is_free=is_free == "1")
        return
    sys.setswitchinterval(SWITCH_SECONDS)  # as the daemon does
    ground = replace(GROUNDS[arguments.backend], layers=32)
    pool_bytes = (arguments.pool_mib or max(arguments.mib) * 4) * MIB
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "stamps")
        with Path(path).open("wb") as file:
            file.truncate(KEPT_STAMPS * STAMP.size)
        stamps = Stamps(path)
        vars(processes)["child"] = partial(noted_child, path, arguments.free)
        mover = Mover(arguments.backend, pool_bytes, 2 * pool_bytes, movers="process")
        mover.start()
        slab = mover.backend.create_slab(mover.device, pool_bytes)
        print("link:", mover.link)
        for width in arguments.width:
            layout = two_plane_layout(ground.layers, width * KIB)
            pages = pool_bytes // layout.page_bytes(0) // 2
            for mib in arguments.mib:
                field = Field(mover, slab, layout, pages, mib * MIB // layout.page_bytes(0))
                field.start()
                for steps, pause_ms in itertools.product(arguments.steps, arguments.pause_ms):
                    row = measure(field, stamps, IN_WAYS[steps], field.blocks, pause_ms / 1e3, arguments.repeats)
                    rows.append(row)
                    show(row)
                field.close()
        slab.close()
        uuid = mover.gpu
        mover.close()
    if arguments.link and uuid:
        link_table(uuid)
    save(arguments, {"benchmark": "ticket", "backend": arguments.backend, "rows": rows})


if __name__ == "__main__":
    main()
