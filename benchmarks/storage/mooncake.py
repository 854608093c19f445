"""Overhead of the daemon over Mooncake: ``python -m benchmarks.storage.mooncake --json OUT``.

A master and a server are started here, and a client in this process. Objects are written and read (verified) through
the engine, and by ``batch_put_from`` and ``batch_get_into`` of the same client library, by as many threads of the same
priority, in batches as large; alternating, medians, processor time of this process. Every byte that was read is looked
at once more.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.storage.disk import MIB, SCOPE, Figure, beside_raw, fetch, fill, keep, name_of
from benchmarks.support.machine import fail
from benchmarks.support.recording import parser_of, save
from cachesvc.memory.extents import address_of, yield_to_callers
from cachesvc.model.errors import Unavailable
from cachesvc.storage.mooncake import native
from cachesvc.storage.mooncake.engine import MooncakeStorage
from cachesvc.storage.mooncake.native import BATCH_BYTES, BATCH_ITEMS, MooncakeOptions
from cachesvc.storage.objects import ObjectStore
from cachesvc.storage.seam import ObjectName, Part

TOTAL_BYTES = 128 * MIB
SEGMENT_BYTES = 1 << 30
REPETITIONS = 5
SIZES = (64 << 10, 256 << 10, MIB, 4 * MIB)


class Raw:
    """The library alone, on memory of its own."""

    def __init__(self, options: MooncakeOptions, memory: memoryview) -> None:
        module = native.load()
        self._library: Any = native.connect(module, options)
        self._config = native.replication(module, 1)
        self._base = address_of(memory)
        if self._library.register_buffer(self._base, len(memory)) != native.OK:
            raise RuntimeError("the library does not take this memory")

    def fill_segment(self, memory: memoryview) -> None:
        """Touch all of the server's memory once."""
        names = [f"fill{at}" for at in range(SEGMENT_BYTES * 8 // 10 // len(memory))]
        while any(self._library.batch_put_from(names[:1], [self._base], [len(memory)], self._config)):
            pass  # until the master knows the server
        for name in names[1:]:
            self._library.put_from(name, self._base, len(memory), self._config)
        self.clear()

    def put(self, names: list[str], at: int, size_bytes: int) -> None:
        """Objects that lie one after another."""
        where, sizes = self._where(names, at, size_bytes)
        if any(self._library.batch_put_from(names, where, sizes, self._config)):
            raise RuntimeError("an object was not taken")

    def get(self, names: list[str], at: int, size_bytes: int) -> None:
        """The same back."""
        where, sizes = self._where(names, at, size_bytes)
        if any(code != size_bytes for code in self._library.batch_get_into(names, where, sizes)):
            raise RuntimeError("an object did not come")

    def clear(self) -> None:
        """All objects."""
        self._library.remove_all(True)

    def _where(self, names: list[str], at: int, size_bytes: int) -> tuple[list[int], list[int]]:
        first = self._base + at * size_bytes
        return [first + number * size_bytes for number in range(len(names))], [size_bytes] * len(names)


def measure(master: str, raw: Raw, memory: memoryview, raw_memory: memoryview, size_bytes: int) -> dict[str, Any]:
    """Objects of one size."""
    options = MooncakeOptions(master)
    count = TOTAL_BYTES // size_bytes
    pages = [memory[at : at + size_bytes] for at in range(0, TOTAL_BYTES, size_bytes)]
    written, raw_written, read, raw_read = (Figure(TOTAL_BYTES) for _ in range(4))
    batch = min(BATCH_ITEMS, max(1, BATCH_BYTES // size_bytes))
    batches = [range(at, min(at + batch, count)) for at in range(0, count, batch)]
    with (
        running(options, memory) as store,
        ThreadPoolExecutor(options.writers, initializer=yield_to_callers) as writers,
        ThreadPoolExecutor(options.readers, initializer=yield_to_callers) as readers,
    ):

        def by(threads: ThreadPoolExecutor, call: Callable[..., None], texts: list[str]) -> None:
            list(threads.map(lambda of: call([texts[at] for at in of], of[0], size_bytes), batches))

        for repetition in range(REPETITIONS):
            fill(memory, repetition)
            raw_memory[:] = memory
            names = [ObjectName(SCOPE, name_of(repetition, at), Part(0, 0, 1)) for at in range(count)]
            texts = [f"raw/{repetition}/{at}" for at in range(count)]
            written.time(lambda: keep(store, names, pages))  # noqa: B023 - called at once
            raw_written.time(lambda: by(writers, raw.put, texts))  # noqa: B023
            memory[:] = bytes(TOTAL_BYTES)
            read.time(lambda: fetch(store, names, pages))  # noqa: B023
            if memory != raw_memory:
                raise RuntimeError("a byte is wrong")
            raw_read.time(lambda: by(readers, raw.get, texts))  # noqa: B023
            raw.clear()
    row = {"bytes": size_bytes, "batch": batch}
    return row | beside_raw(write=(written, raw_written), read=(read, raw_read))


@contextmanager
def running(options: MooncakeOptions, memory: memoryview) -> Iterator[ObjectStore]:
    """The engine, once it has found the master."""
    store = ObjectStore(MooncakeStorage(options), time.monotonic)
    store.start()
    store.backend.register(memory)
    keep(store, [ObjectName(SCOPE, name_of(REPETITIONS, 0), Part(0, 0, 1))], [memory[:4096]])
    yield store
    store.backend.close()


def main() -> None:
    """Print and write JSON."""
    parser = parser_of(__doc__)
    said = parser.parse_args()
    try:
        native.load()
    except Unavailable as missing:
        fail(str(missing))
    from tests.contracts.mooncake_rig import Store

    memory, raw_memory = (memoryview(mmap.mmap(-1, TOTAL_BYTES)) for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder), segment_bytes=SEGMENT_BYTES)
        try:
            raw = Raw(MooncakeOptions(store.address), raw_memory)
            raw.fill_segment(raw_memory)
            rows = [measure(store.address, raw, memory, raw_memory, size) for size in SIZES]
        finally:
            store.close()
    for row in rows:
        print(row)
    save(said, {"repetitions": REPETITIONS, "rows": rows})
    sys.stdout.flush()
    os._exit(0)  # the library's own threads would be waited for


if __name__ == "__main__":
    main()
