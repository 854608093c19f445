"""Overhead of the daemon over a disk: ``python -m benchmarks.storage.disk FOLDER --json OUT``, FOLDER on the disk to
measure.

Objects are read (verified) and written through the engine ``file``, against preadv and pwritev with O_DIRECT on files
of the same sizes by as many threads of the same priority; alternating, medians, processor time of the whole process.
``storage_calls`` has what storage costs calls, ``storage_mooncake`` the same of a Mooncake Store.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.recording import parser_of, save
from cachesvc.memory.extents import yield_to_callers
from cachesvc.storage.file.engine import FileOptions, FileStorage
from cachesvc.storage.objects import ObjectStore, Verb
from cachesvc.storage.seam import ObjectName, Outcome, Part, Scope

MIB = 1 << 20
THREADS = 4
TOTAL_BYTES = 256 * MIB
REPETITIONS = 9
SCOPE = Scope(b"b" * 32, b"bench...")
HEAD = 4096
FAR = 1e12


class Figure:
    """Seconds and processor seconds of repetitions that each moved ``size_bytes``."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.seconds: list[float] = []
        self.cpu: list[float] = []

    def time(self, work: Callable[[], None]) -> None:
        """One repetition."""
        began, cpu = time.perf_counter(), time.process_time()
        work()
        self.seconds.append(time.perf_counter() - began)
        self.cpu.append(time.process_time() - cpu)

    @property
    def rate(self) -> float:
        """GB/s, median."""
        return self.size_bytes / statistics.median(self.seconds) / 1e9

    @property
    def cpu_a_gb(self) -> float:
        """Processor seconds a GB, median."""
        return statistics.median(self.cpu) / (self.size_bytes / 1e9)


def measure_file(folder: Path, size_bytes: int) -> dict[str, Any]:
    """Reads and writes of objects of one size."""
    count = TOTAL_BYTES // size_bytes
    memory = memoryview(mmap.mmap(-1, TOTAL_BYTES))
    pages = [memory[at : at + size_bytes] for at in range(0, TOTAL_BYTES, size_bytes)]
    engine = FileStorage(FileOptions(str(folder / "cache"), 4 * TOTAL_BYTES, floor=0, readers=THREADS, writers=THREADS))
    store = ObjectStore(engine, time.monotonic)
    store.start()
    engine.join_scan()
    raw = folder / "raw"
    raw.mkdir()
    written, raw_written, read, raw_read = (Figure(TOTAL_BYTES) for _ in range(4))
    names: list[ObjectName] = []
    with ThreadPoolExecutor(THREADS, initializer=yield_to_callers) as threads:
        head = memoryview(mmap.mmap(-1, HEAD))
        for repetition in range(REPETITIONS):
            fill(memory, repetition)
            names = [ObjectName(SCOPE, name_of(repetition, at), Part(0, 0, 1)) for at in range(count)]
            written.time(lambda: keep(store, names, pages))  # noqa: B023 - called at once
            paths = [f"{raw}/{repetition}.{at}" for at in range(count)]
            raw_written.time(lambda: list(threads.map(lambda at: write_raw(paths[at], head, pages[at]), range(count))))  # type: ignore[arg-type]  # noqa: B023
            memory[:] = bytes(TOTAL_BYTES)
            read.time(lambda: fetch(store, names, pages))  # noqa: B023
            raw_read.time(lambda: list(threads.map(lambda at: read_raw(paths[at], head, pages[at]), range(count))))  # type: ignore[arg-type]  # noqa: B023
            for path in paths:
                Path(path).unlink()
            engine.remove(names)
    store.backend.close()
    shutil.rmtree(raw)
    shutil.rmtree(folder / "cache", ignore_errors=True)
    return {"bytes": size_bytes} | beside_raw(read=(read, raw_read), write=(written, raw_written))


def beside_raw(**ways: tuple[Figure, Figure]) -> dict[str, Any]:
    """Columns of ours and of the raw way, by the name of what was done."""
    row: dict[str, Any] = {}
    for way, (own, raw) in ways.items():
        row |= {f"{way}_gb_s": round(own.rate, 3), f"raw_{way}_gb_s": round(raw.rate, 3)}
        row[f"{way}_ratio"] = round(own.rate / raw.rate, 3)
        row |= {f"{way}_cpu_s_gb": round(own.cpu_a_gb, 3), f"raw_{way}_cpu_s_gb": round(raw.cpu_a_gb, 3)}
    return row


def fill(memory: memoryview, seed: int) -> None:
    """Random bytes, new each time."""
    rng = np.random.default_rng(seed)
    np.frombuffer(memory, np.uint64)[:] = rng.integers(0, 1 << 63, len(memory) // 8, np.uint64)


def name_of(repetition: int, at: int) -> bytes:
    """Spread over folders as keys are."""
    return np.random.default_rng((repetition, at)).bytes(32)


def fetch(store: ObjectStore, names: list[ObjectName], pages: list[memoryview]) -> None:
    """Fetch a prefix: all objects in one call."""
    _through(store, Verb.GET, [(names, pages)])


def keep(store: ObjectStore, names: list[ObjectName], pages: list[memoryview]) -> None:
    """Write blocks: a call for each, one after another, while earlier ones are in flight."""
    _through(store, Verb.PUT, [([name], [page]) for name, page in zip(names, pages, strict=True)])


def _through(store: ObjectStore, verb: Verb, calls: list[tuple[list[ObjectName], list[memoryview]]]) -> None:
    """Calls of the store, until each item has ended well."""
    ended, left = threading.Event(), [sum(len(names) for names, _ in calls)]
    lock = threading.Lock()

    def each(_: int, outcome: Outcome) -> None:
        if outcome is not Outcome.OK:
            raise RuntimeError(f"an object ended {outcome}")
        with lock:
            left[0] -= 1
        if not left[0]:
            ended.set()

    for names, pages in calls:
        store.prepare(verb, names, [(page,) for page in pages], FAR, each, lambda _: None)()
    ended.wait()


def write_raw(path: str, head: memoryview, page: memoryview) -> None:
    """Write a file without the engine: under another name first."""
    fd = os.open(f"{path}.part", os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    os.pwritev(fd, [head, page], 0)
    os.close(fd)
    Path(f"{path}.part").rename(path)


def read_raw(path: str, head: memoryview, page: memoryview) -> None:
    """Read a file without the engine."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    os.preadv(fd, [head, page], 0)
    os.close(fd)


def main() -> None:
    """Print and write JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    said = parser.parse_args()
    said.folder.mkdir(parents=True, exist_ok=True)
    found = {
        "threads": THREADS,
        "repetitions": REPETITIONS,
        "file": [measure_file(said.folder, size * MIB) for size in (1, 4)],
    }
    shutil.rmtree(said.folder, ignore_errors=True)
    for row in found["file"]:  # type: ignore[attr-defined]
        print(row)
    save(said, found)


if __name__ == "__main__":
    main()
