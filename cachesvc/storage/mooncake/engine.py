"""``mooncake``: host pages to a Mooncake Store and back, by threads that block in its client.

A put is what it says only once the object exists: where another writer has died in the middle, the library answers 0 to
every put of the same name until the master discards that writer's, and nothing is stored (30 s by its defaults, five by
ours). Such an item is put again then, where its deadline lets us, and has FAILED otherwise.
"""

from __future__ import annotations

import mmap
import re
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cachesvc.memory.extents import address_of
from cachesvc.model.errors import Unavailable
from cachesvc.storage.known import KnownObjects
from cachesvc.storage.mooncake import native
from cachesvc.storage.mooncake.native import BATCH_ITEMS, OK, Batches, Carry, Library, MooncakeOptions, Task
from cachesvc.storage.objects import HEADER_BYTES, is_newer
from cachesvc.storage.seam import (
    FORMAT,
    Caps,
    Check,
    Checked,
    Each,
    Found,
    Item,
    ObjectName,
    Outcome,
    Scope,
    Step,
    StorageBackend,
    StoreStatus,
    Totals,
    no_step,
)
from cachesvc.storage.workers import Job, Workers, nothing
from cachesvc.telemetry import events

RETRY_SECONDS = 2.0
"""Between attempts to reach a master."""
DISCARD_MARGIN_SECONDS = 0.5
"""The hole after a dead writer was seen to last up to 0.3 s longer than the master's limit."""
QUESTION_SECONDS = 30.0
MOST_NAMES = 1 << 17
"""Most recent objects that are counted."""
MOST_QUESTIONS = 1024
DOUBT_SECONDS = 60.0
"""Time for which the memory of a failed read stays in quarantine, seconds: the library gives a transfer up without
saying whether bytes of it may still come."""


class MooncakeStorage(StorageBackend):
    kind = "mooncake"

    def __init__(
        self,
        options: MooncakeOptions,
        load: Callable[[], Any] = native.load,
        probe: Callable[[MooncakeOptions], None] = native.probe,
        doubt_seconds: float = DOUBT_SECONDS,
    ) -> None:
        """``load`` gives the library, ``probe`` tries whether its master lets clients in."""
        self.caps = Caps(is_shared=True, survives="node", evicts_itself=True, needs_registration=True)
        self._options = options
        self._load = load
        self._probe = probe
        self._doubt_seconds = doubt_seconds
        self._module: Any = None
        self._library: native.Library | None = None
        self._has_tried = threading.Event()
        self._stopping = threading.Event()
        self._registered = Registered()
        self._known = KnownObjects(most=MOST_NAMES)
        self._aside = threading.Lock()
        self._heads_aside: deque[tuple[float, list[memoryview]]] = deque()
        self._readers = Batches("mooncake-read", options.readers, self._reader, self._set_aside)
        self._writers = Batches("mooncake-write", options.writers, self._writer, lambda task: task.end(Outcome.FAILED))
        self._questions = Workers("mooncake-ask", 1, nothing, most_waiting=MOST_QUESTIONS)
        self._connector = threading.Thread(target=self._connect, name="mooncake-connect", daemon=True)

    def start(self) -> None:
        """Raises Unavailable where the library cannot be loaded. A master that is not there is asked again."""
        self._module = self._load()
        self._connector.start()
        for workers in (self._questions, self._readers.workers, self._writers.workers):
            workers.start()

    def register(self, chunk: memoryview) -> None:
        """Register memory with the library's client, as soon as there is one."""
        self._registered.add(chunk)

    def describe(self, scope: Scope, label: str) -> None:
        """Set a label for this daemon's status alone."""
        self._known.describe(scope, label)

    def exists(self, names: Sequence[ObjectName], deadline: float, found: Found) -> None:
        """Ask the master; for some seconds it also claims what a dead server had."""
        texts = [name.text for name in names]
        none = [False] * len(texts)

        def ask() -> None:
            library = self._library
            codes = library.batch_is_exist(texts) if library is not None and time.monotonic() < deadline else []
            found([code == 1 for code in codes] if len(codes) == len(texts) else none)

        self._questions.add([Job(lambda _: ask(), partial(found, none))])

    def get(self, items: Sequence[Item], deadline: float, each: Each) -> None:
        """Read in batches, each piece to where it belongs."""
        self._readers.add([Task(item, deadline, index, each) for index, item in enumerate(items)])

    def put(self, items: Sequence[Item], deadline: float, each: Each) -> None:
        """Write in batches, each piece from where it is."""
        self._writers.add([Task(item, deadline, index, each) for index, item in enumerate(items)])

    def remove(self, names: Sequence[ObjectName]) -> None:
        """Remove objects in the background; look-ups meanwhile miss them."""
        gone = list(names)
        self._known.hide(gone)
        self._questions.add([Job(lambda _: self._remove(gone), partial(self._known.leaving.end, gone))])

    def doubt(self, names: Sequence[ObjectName], check: Check) -> None:  # noqa: ARG002 - a store's own checksums
        """Look again in the background, and remove what is not of a newer format; look-ups meanwhile miss."""
        gone = list(names)
        self._known.hide(gone)
        self._questions.add([Job(lambda _: self._look_again(gone), partial(self._known.leaving.end, gone))])

    def _look_again(self, names: list[ObjectName]) -> None:
        library = self._library
        kept = [name for name in names if library is not None and is_newer(library.get(name.text) or b"")]
        self._known.leaving.end(kept)
        self._remove([name for name in names if name not in kept])

    def purge(self, scope: Scope | None, step: Step = no_step) -> int:  # noqa: ARG002 - one call does it all
        """Purge all nodes' objects. Raises Unavailable."""
        library = self._library
        pattern = f"^{FORMAT}/" if scope is None else f"^{FORMAT}/{re.escape(scope.text)}/"
        code = -1 if library is None else library.remove_by_regex(pattern, True)
        if code < 0:
            raise Unavailable(f"the Mooncake master at {self._options.master} did not purge (code {code}); try again")
        self._known.forget(scope)
        return code

    def status(self) -> StoreStatus:
        """Objects that this daemon has put and not seen go; not those of other nodes."""
        return self._known.status(int(time.time()))

    def totals(self) -> Totals:
        return Totals(len(self._known), self._known.size_bytes, 0, 0)

    def check_all(self, check: Check, step: Step = no_step) -> Checked:
        """Check what this daemon has put lately; others' objects cannot be listed. Raises Unavailable."""
        library, found = self._library, Checked()
        if library is None:
            raise Unavailable(f"the Mooncake master at {self._options.master} was not found yet; try again")
        for name in self._known.names():
            step()
            content = library.get(name.text)
            if not content:
                found.missing += 1
                self._known.drop(name)
                continue
            verdict = check(name, memoryview(content))
            if found.note(verdict, len(content)):
                continue
            if verdict is Outcome.MISS:
                self.doubt([name], check)
            else:
                self._known.hide([name])
                self._remove([name])
        return found

    def close(self) -> None:
        """Threads that hang in the library are left behind, with their memory and the client."""
        self._stopping.set()
        self._known.leaving.close()
        are_through = [batches.workers.close() for batches in (self._readers, self._writers)]
        if self._questions.finish() and all(are_through) and not self._connector.is_alive():
            library, self._library = self._library, None
            self._registered.disconnect()
            if library is not None:
                library.close()

    # -- on threads ----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Root of the thread that finds the master; once found, the client finds it again by itself."""
        while not self._stopping.is_set():
            try:
                self._probe(self._options)
                library = native.connect(self._module, self._options)
                self._registered.connect(library)
                self._library = library
                events.event("storage_connected", storage=self.kind, master=self._options.master)
                return
            except Unavailable as error:
                events.event("storage_unreachable", storage=self.kind, reason=str(error))
            except Exception:  # noqa: BLE001 - the root of a thread: the next attempt may be better
                events.failure("storage_connect_broke")
            finally:
                self._has_tried.set()
            self._stopping.wait(RETRY_SECONDS)

    def _heads(self) -> list[memoryview]:
        """A thread's own memory for headers, where bytes may come to."""
        with self._aside:
            if self._heads_aside and self._heads_aside[0][0] <= time.monotonic():
                return self._heads_aside.popleft()[1]
        slab = memoryview(mmap.mmap(-1, HEADER_BYTES * BATCH_ITEMS))
        self._registered.add(slab)
        self._has_tried.wait()
        return [slab[at : at + HEADER_BYTES] for at in range(0, len(slab), HEADER_BYTES)]

    def _usable(self, batch: list[Task]) -> tuple[native.Library, list[Task]] | None:
        """Tasks whose memory the client knows; the others have FAILED, and all have where there is no client."""
        library = self._library
        known = [task for task in batch if library is not None and self._registered.has(task.item.pages)]
        if len(known) < len(batch):
            here = set(map(id, known))
            for task in batch:
                if id(task) not in here:
                    task.end(Outcome.FAILED)
        return (library, known) if library is not None and known else None

    def _reader(self) -> Carry:
        heads = self._heads()

        def carry(batch: list[Task]) -> None:
            is_sure = False
            try:
                is_sure = self._read(batch, heads)
            finally:
                if not is_sure:
                    self._heads_aside.append((time.monotonic() + self._doubt_seconds, heads[:]))
                    heads[:] = self._heads()

        return carry

    def _read(self, batch: list[Task], heads: list[memoryview]) -> bool:
        """False where bytes of it may still come."""
        for task in batch:
            if task.item.name in self._known.leaving:
                task.end(Outcome.MISS)
        batch = [task for task in batch if not task.is_ended]
        if (usable := self._usable(batch)) is None:
            return True
        library, batch = usable
        is_sure = True
        codes = self._call(library.batch_get_into_multi_buffers, batch, heads)
        for task, head, code in zip(batch, heads, codes, strict=False):
            outcome = self._of_read(library, task.item, code)
            if outcome is Outcome.OK:
                task.item.head[:HEADER_BYTES] = head
            elif outcome is Outcome.WRONG:
                self.remove([task.item.name])
            elif outcome is Outcome.MISS:
                self._known.drop(task.item.name)
            elif outcome is Outcome.LATE:
                is_sure = False
                self._set_aside(task)
                continue
            task.end(outcome)
        return is_sure

    def _set_aside(self, task: Task) -> None:
        """Set a failed read aside: its wait has ended, and its memory is left alone for a while."""
        if task.set_aside():
            self._readers.put_off(task, time.monotonic() + self._doubt_seconds)

    def _of_read(self, library: native.Library, item: Item, code: int) -> Outcome:
        whole = HEADER_BYTES + item.payload_bytes
        if code == whole:
            return Outcome.OK
        if code in native.ABSENT:
            return Outcome.MISS
        if code >= 0:
            return Outcome.WRONG
        if code in (native.INVALID, native.TRANSFER_FAILED):  # of another size, or not to be had
            size_bytes = library.get_size(item.name.text)
            if size_bytes >= 0 and size_bytes != whole:
                return Outcome.WRONG
        return Outcome.LATE if code == native.TRANSFER_FAILED else Outcome.FAILED

    def _writer(self) -> Carry:
        heads = self._heads()
        config = native.replication(self._module, self._options.replicas)
        return lambda batch: self._write(batch, heads, config)

    def _write(self, batch: list[Task], heads: list[memoryview], config: object) -> None:
        until = min(time.monotonic() + QUESTION_SECONDS, *(task.deadline for task in batch))
        self._known.leaving.wait_for([task.item.name for task in batch], until - time.monotonic())
        if (usable := self._usable(batch)) is None:
            return
        library, batch = usable
        for task, head in zip(batch, heads, strict=False):
            head[:] = task.item.head[:HEADER_BYTES]
        codes = self._call(library.batch_put_from_multi_buffers, batch, heads, config)
        are_there = self._have(library, batch)
        for task, code, is_there in zip(batch, codes, are_there, strict=True):
            self._settle(task, code, is_there=is_there)

    def _settle(self, task: Task, code: int, *, is_there: bool) -> None:
        again = time.monotonic() + self._options.discard + DISCARD_MARGIN_SECONDS
        if code == native.OK and is_there:
            self._known.add(task.item.name, HEADER_BYTES + task.item.payload_bytes, int(time.time()))
            task.end(Outcome.OK)
        elif code == native.OK and not task.tries and again < task.deadline:
            task.tries += 1
            self._writers.put_off(task, again)
        else:
            task.end(Outcome.BUSY if code == native.NO_ROOM else Outcome.FAILED)

    def _have(self, library: native.Library, batch: list[Task]) -> list[bool]:
        if not batch:
            return []
        codes = library.batch_is_exist([task.item.name.text for task in batch])
        return [code == 1 for code in codes] if len(codes) == len(batch) else [False] * len(batch)

    @staticmethod
    def _call(call: Callable[..., list[int]], batch: list[Task], heads: list[memoryview], *rest: object) -> list[int]:
        if not batch:
            return []
        places = [native.addresses(head, task.item.pages) for task, head in zip(batch, heads, strict=False)]
        names = [task.item.name.text for task in batch]
        codes = call(names, [where for where, _ in places], [sizes for _, sizes in places], *rest)
        return codes if len(codes) == len(batch) else [native.TRANSFER_FAILED] * len(batch)

    def _remove(self, names: list[ObjectName]) -> None:
        try:
            library = self._library
            if library is not None:
                library.batch_remove([name.text for name in names], True)
        finally:
            self._known.leaving.end(names)


class Registered:
    """Chunks, which the client gets as soon as there is one. Thread-safe; what is here stays mapped."""

    def __init__(self) -> None:
        self._chunks: list[memoryview] = []
        self._known: list[tuple[int, int]] = []
        self._library: Library | None = None
        self._lock = threading.Lock()

    def add(self, chunk: memoryview) -> None:
        """May block where the client is one of RDMA."""
        with self._lock:
            self._chunks.append(chunk)
            if self._library is not None:
                self._tell(self._library, chunk)

    def connect(self, library: Library) -> None:
        """Set a new client of the library, and register all chunks with it."""
        with self._lock:
            self._library = library
            for chunk in self._chunks:
                self._tell(library, chunk)

    def disconnect(self) -> None:
        """The client ends: it must not be called any more."""
        with self._lock:
            self._library = None
            self._known = []

    def has(self, pages: Sequence[memoryview]) -> bool:
        """True where the client knows all of this memory."""
        known = self._known
        for page in pages:
            address = address_of(page) if len(page) else 0
            at = bisect_right(known, (address, 1 << 62)) - 1
            if len(page) and (at < 0 or address + len(page) > known[at][1]):
                return False
        return True

    def _tell(self, library: Library, chunk: memoryview) -> None:
        address, size_bytes = address_of(chunk), len(chunk)
        code = library.register_buffer(address, size_bytes)
        if code == OK:
            self._known = sorted([*self._known, (address, address + size_bytes)])
        else:
            events.warning("storage_memory_refused", storage="mooncake", size_bytes=size_bytes, code=code)
