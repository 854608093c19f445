"""What storage costs: ``python -m benchmarks.storage FOLDER --json OUT``, FOLDER on the disk that is meant.

``file``: objects read (verified) and written through the engine, against preadv and pwritev with O_DIRECT on files of
the same sizes by as many threads of the same priority; alternating, medians, processor time of the whole process.
``match`` and ``step``: calls by the lane to three daemons in turn, one without storage, one whose storage is idle, one
whose storage is frozen: of a prompt that is resident whole, of prompts that nobody has, and Steps of 32 sequences that
grow by a block.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from cachesvc_client import CacheClient, Lease, opaque
from cachesvc_ctl.daemon_process import DaemonProcess

from benchmarks.machine import describe_machine
from benchmarks.recording import write_result
from cachesvc.memory.mapped import yield_to_callers
from cachesvc.storage.file.engine import FileStorage
from cachesvc.storage.file.options import FileOptions
from cachesvc.storage.objects import ObjectStore
from cachesvc.storage.seam import ObjectName, Outcome, Part, Scope

MIB = 1 << 20
THREADS = 4
TOTAL_BYTES = 256 * MIB
REPETITIONS = 9
SCOPE = Scope(b"b" * 32, b"bench...")
HEAD = 4096
FAR = 1e12
BLOCK_TOKENS = 64
MATCH_BLOCKS = 2048
STEP_SEQUENCES = 32
ROUNDS = 6
CALLS = 200
FLAGS = ["--backend", "shm", "--device-pool", "256MiB", "--host-pool", "256MiB", "--host-chunk", "64MiB"]


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
            written.time(lambda: through(store.put, names, pages))  # noqa: B023 - called at once
            paths = [f"{raw}/{repetition}.{at}" for at in range(count)]
            raw_written.time(lambda: list(threads.map(lambda at: write_raw(paths[at], head, pages[at]), range(count))))  # type: ignore[arg-type]  # noqa: B023
            memory[:] = bytes(TOTAL_BYTES)
            read.time(lambda: through(store.get, names, pages))  # noqa: B023
            raw_read.time(lambda: list(threads.map(lambda at: read_raw(paths[at], head, pages[at]), range(count))))  # type: ignore[arg-type]  # noqa: B023
            for path in paths:
                Path(path).unlink()
            engine.remove(names)
    store.backend.close()
    shutil.rmtree(raw)
    shutil.rmtree(folder / "cache", ignore_errors=True)
    return {
        "bytes": size_bytes,
        "read_gb_s": round(read.rate, 3),
        "raw_read_gb_s": round(raw_read.rate, 3),
        "read_ratio": round(read.rate / raw_read.rate, 3),
        "read_cpu_s_gb": round(read.cpu_a_gb, 3),
        "raw_read_cpu_s_gb": round(raw_read.cpu_a_gb, 3),
        "write_gb_s": round(written.rate, 3),
        "raw_write_gb_s": round(raw_written.rate, 3),
        "write_ratio": round(written.rate / raw_written.rate, 3),
        "write_cpu_s_gb": round(written.cpu_a_gb, 3),
        "raw_write_cpu_s_gb": round(raw_written.cpu_a_gb, 3),
    }


def fill(memory: memoryview, seed: int) -> None:
    """Random bytes, new each time."""
    rng = np.random.default_rng(seed)
    np.frombuffer(memory, np.uint64)[:] = rng.integers(0, 1 << 63, len(memory) // 8, np.uint64)


def name_of(repetition: int, at: int) -> bytes:
    """Spread over folders as keys are."""
    return np.random.default_rng((repetition, at)).bytes(32)


def through(call: Callable[..., None], names: list[ObjectName], pages: list[memoryview]) -> None:
    """A call of the store, until each item has ended well."""
    ended, left = threading.Event(), [len(names)]
    lock = threading.Lock()

    def each(_: int, outcome: Outcome) -> None:
        if outcome is not Outcome.OK:
            raise RuntimeError(f"an object ended {outcome}")
        with lock:
            left[0] -= 1
        if not left[0]:
            ended.set()

    call(names, [(page,) for page in pages], FAR, each, lambda _: None)
    ended.wait()


def write_raw(path: str, head: memoryview, page: memoryview) -> None:
    """As a file is written without us: under another name first."""
    fd = os.open(f"{path}.part", os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    os.pwritev(fd, [head, page], 0)
    os.close(fd)
    Path(f"{path}.part").rename(path)


def read_raw(path: str, head: memoryview, page: memoryview) -> None:
    """As a file is read without us."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    os.preadv(fd, [head, page], 0)
    os.close(fd)


# -- calls ---------------------------------------------------------------------------------------------------------


class Caller:
    """An engine of one daemon, with a prompt that is resident whole."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._client = CacheClient(daemon.socket, engine="bench")
        self._client.connect()
        layout = opaque(block_bytes=4096, block_tokens=BLOCK_TOKENS, layers=1)
        registration = self._client.register("bench", layout, device_pages=[16384], host_pages=[16384])
        self._lease: Lease = self._client.open_lease(registration)
        self._pool = self._lease.attach(0)
        self._rng = np.random.default_rng(1)
        self.keys = self._rng.bytes(32 * MATCH_BLOCKS)
        with self._lease.match(self.keys) as sequence:
            sequence.allocate(MATCH_BLOCKS)
            sequence.publish(MATCH_BLOCKS)
        self.seconds: dict[str, list[float]] = {"match": [], "match_absent": [], "step": []}

    def match(self) -> None:
        """Of a resident prompt."""
        self._timed("match", self.keys)

    def match_absent(self) -> None:
        """Of a prompt that nobody has, anywhere."""
        self._timed("match_absent", self._rng.bytes(32 * MATCH_BLOCKS))

    def _timed(self, name: str, keys: bytes) -> None:
        began = time.perf_counter()
        sequence = self._lease.match(keys)
        self.seconds[name].append(time.perf_counter() - began)
        sequence.release()

    def steps(self, count: int) -> None:
        """Of sequences that each grow by a block."""
        sequences = [self._lease.match(self._rng.bytes(32)) for _ in range(STEP_SEQUENCES)]
        with self._lease.step() as stream:
            for _ in range(count):
                batch = stream.batch()
                for sequence in sequences:
                    batch.allocate(sequence, sequence.blocks + 1)
                began = time.perf_counter()
                stream.submit(batch)
                self.seconds["step"].append(time.perf_counter() - began)
        for sequence in sequences:
            sequence.release()

    def close(self) -> None:
        """The end."""
        self._pool.close()
        self._lease.close()
        self._client.close()


def measure_calls(folder: Path) -> dict[str, Any]:
    """Three daemons in turn, round after round."""
    spec = f"file:{folder}/idle?capacity=1GiB&floor=0&write=through"
    frozen = [sys.executable, "-m", "benchmarks.storage_daemon"]
    daemons = {
        "none": DaemonProcess(FLAGS),
        "idle": DaemonProcess([*FLAGS, "--storage", spec]),
        "frozen": DaemonProcess([*FLAGS, "--storage", f"file:{folder}/frozen?capacity=1GiB"], under=frozen),
    }
    callers: dict[str, Caller] = {}
    try:
        for name, daemon in daemons.items():
            daemon.start()
            callers[name] = Caller(daemon)
        for _ in range(ROUNDS):
            for caller in callers.values():
                for _ in range(CALLS):
                    caller.match()
                    caller.match_absent()
                caller.steps(CALLS // 2)
        return {name: figures(caller, callers["none"]) for name, caller in callers.items()}
    finally:
        for caller in callers.values():
            caller.close()
        for name in callers:
            daemons[name].stop()


def figures(caller: Caller, plain: Caller) -> dict[str, Any]:
    """Milliseconds, and as multiples of those without storage."""
    out: dict[str, Any] = {}
    for name, seconds in caller.seconds.items():
        row: dict[str, float] = {"n": len(seconds)}
        for share in (50, 99):
            own, base = (float(np.percentile(each, share)) for each in (seconds, plain.seconds[name]))
            row[f"p{share}_ms"] = round(own * 1e3, 4)
            row[f"p{share}_of_none"] = round(own / base, 3)
        row["max_ms"] = round(max(seconds) * 1e3, 2)
        out[name] = row
    return out


def main() -> None:
    """Print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    said = parser.parse_args()
    said.folder.mkdir(parents=True, exist_ok=True)
    found = {
        "machine": {**describe_machine(), "load": f"{os.getloadavg()[0]:.1f}"},
        "threads": THREADS,
        "repetitions": REPETITIONS,
        "file": [measure_file(said.folder, size * MIB) for size in (1, 4)],
        "calls": measure_calls(said.folder),
    }
    shutil.rmtree(said.folder, ignore_errors=True)
    for row in found["file"]:  # type: ignore[attr-defined]
        print(row)
    for name, rows in found["calls"].items():  # type: ignore[attr-defined]
        print(name, rows)
    if said.json:
        write_result(said.json, found)


if __name__ == "__main__":
    main()
