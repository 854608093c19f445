"""Overhead of the daemon over an S3 store: ``python -m benchmarks.storage.s3 --json OUT``.

SeaweedFS is started here, on the same machine. Objects are written and read (verified) through the engine, and by
obstore alone with the same settings, by as many threads of the same priority; alternating, medians, processor time of
this process. Every byte that was read through the engine is looked at once more.
"""

from __future__ import annotations

import mmap
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.storage.disk import MIB, SCOPE, Figure, beside_raw, fetch, fill, keep, name_of
from benchmarks.support.machine import fail
from benchmarks.support.recording import parser_of, save
from cachesvc.memory.extents import yield_to_callers
from cachesvc.storage.objects import HEADER_BYTES, ObjectStore
from cachesvc.storage.s3.client import S3Bucket, S3Options
from cachesvc.storage.s3.engine import S3Storage
from cachesvc.storage.seam import ObjectName, Part
from tests.contracts import s3_rig

TOTAL_BYTES = 64 * MIB
REPETITIONS = 10
THREADS = 8
SIZES = (MIB, 4 * MIB)


def measure(options: S3Options, size_bytes: int) -> dict[str, Any]:
    """Objects of one size."""
    count = TOTAL_BYTES // size_bytes
    memory, before = (memoryview(mmap.mmap(-1, TOTAL_BYTES)) for _ in range(2))
    pages = [memory[at : at + size_bytes] for at in range(0, TOTAL_BYTES, size_bytes)]
    whole = size_bytes + HEADER_BYTES
    raw_memory = memoryview(mmap.mmap(-1, count * whole))
    raw = [raw_memory[at * whole : (at + 1) * whole] for at in range(count)]
    written, raw_written, read, raw_read = (Figure(TOTAL_BYTES) for _ in range(4))
    store = ObjectStore(S3Storage(options), time.monotonic)
    store.start()
    bucket = S3Bucket(options)
    with ThreadPoolExecutor(THREADS, initializer=yield_to_callers) as threads:
        for repetition in range(REPETITIONS):
            fill(memory, repetition)
            before[:] = memory
            for content, page in zip(raw, pages, strict=True):
                content[HEADER_BYTES:] = page
            names = [ObjectName(SCOPE, name_of(repetition, at), Part(0, 0, 1)) for at in range(count)]
            texts = [f"raw/{size_bytes}/{repetition}/{at}" for at in range(count)]

            def put(at: int, texts: list[str] = texts) -> None:
                bucket.put(texts[at], raw[at])

            def get(at: int, texts: list[str] = texts) -> None:
                bucket.get(texts[at], 0, whole, whole)

            def by_threads(call: Callable[[int], None]) -> None:
                list(threads.map(call, range(count)))

            writes = [(written, partial(keep, store, names, pages)), (raw_written, partial(by_threads, put))]
            reads = [(read, partial(fetch, store, names, pages)), (raw_read, partial(by_threads, get))]
            turn = -1 if repetition % 2 else 1  # who comes second finds a store that is busy with the first one's
            for figure, work in writes[::turn]:
                figure.time(work)
            memory[:] = bytes(TOTAL_BYTES)
            for figure, work in reads[::turn]:
                figure.time(work)
            if memory != before:
                raise RuntimeError("a byte is wrong")
            bucket.delete(texts)
            store.backend.remove(names)
    store.backend.close()
    return {"bytes": size_bytes} | beside_raw(write=(written, raw_written), read=(read, raw_read))


def main() -> None:
    """Print and write JSON."""
    parser = parser_of(__doc__)
    said = parser.parse_args()
    if why := s3_rig.why_not():
        fail(why)
    with tempfile.TemporaryDirectory() as folder:
        server = s3_rig.Server(Path(folder) / "store")
        options = S3Options("bench", endpoint=server.endpoint, readers=THREADS, writers=THREADS, timeout=60.0)
        try:
            server.wait(options)
            measure(options, SIZES[0])  # the server's first volume grows
            rows = [measure(options, size) for size in SIZES]
        finally:
            server.kill()
    found = {
        "threads": THREADS,
        "repetitions": REPETITIONS,
        "rows": rows,
    }
    for row in rows:
        print(row)
    save(said, found)


if __name__ == "__main__":
    main()
