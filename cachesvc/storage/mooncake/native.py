"""Mooncake's own client, typed: calls that block, addresses in place of memory, numbers in place of errors."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from cachesvc.memory.extents import address_of
from cachesvc.model.errors import InvalidRequest, Unavailable
from cachesvc.model.text import parse_address
from cachesvc.storage.seam import Each, Item, Outcome
from cachesvc.storage.spec import StorageSpec, count_option, option, seconds_option, size_option, text_option
from cachesvc.storage.workers import Job, Workers
from cachesvc.telemetry import events

OK = 0
NO_ROOM = -200
INVALID = -600
NOT_FOUND = -704
NOT_COMPLETE = -703
TRANSFER_FAILED = -800

ABSENT = frozenset((NOT_FOUND, NOT_COMPLETE))
"""Codes of a read: there is no such object, or its writer never ended."""
KNOCK_SECONDS = 1.0
"""Time after which a silent master counts as absent, seconds: the client's own setup tries for 90 s (0.3.13)."""

PROBE_SECONDS = 20.0
_PROBE = """
import os, sys
from cachesvc.model.errors import Unavailable
from cachesvc.storage.mooncake.native import connect, load
from cachesvc.storage.mooncake.native import MooncakeOptions
master, host, protocol, devices = sys.argv[1:]
try:
    connect(load(), MooncakeOptions(master, host, protocol=protocol, devices=devices))
except Unavailable:
    os._exit(1)
os._exit(0)
"""

_ENVIRONMENT = {"GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR", "MOONCAKE_STORE_CHECKSUM": "0"}
"""Read by the library when it is loaded: warnings of its own are not ours to print; its checksums cost 25 times as much
as the header's."""


class Library(Protocol):
    """A connected client. Codes are of the library: 0 or a count of bytes where all went well, else below 0."""

    def register_buffer(self, address: int, size_bytes: int) -> int:
        """Memory that bytes may come to."""

    def batch_is_exist(self, names: list[str]) -> list[int]:
        """1, 0, or a code."""

    def batch_get_into_multi_buffers(
        self, names: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        """Bytes that came, or a code."""

    def batch_put_from_multi_buffers(
        self, names: list[str], addresses: list[list[int]], sizes: list[list[int]], config: object
    ) -> list[int]:
        """0 or a code."""

    def get(self, name: str) -> bytes:
        """A copy of an object; empty where there is none."""

    def get_size(self, name: str) -> int:
        """Bytes of an object, or a code."""

    def batch_remove(self, names: list[str], force: bool) -> list[int]:
        """``force``: also what is leased to readers."""

    def remove_by_regex(self, pattern: str, force: bool) -> int:
        """Number of removed objects, or a code."""

    def close(self) -> int:
        """Takes about a second."""


def load() -> Any:
    """The library. Raises Unavailable with what is missing."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as missing:
        raise Unavailable(
            f"storage needs Mooncake, which cannot be loaded ({missing}); install cachesvc[mooncake] (or -cuda12, "
            "-cuda13) and the system's libibverbs1, librdmacm1, libnuma1 and libcurl4"
        ) from missing


def probe(options: MooncakeOptions) -> None:
    """Connect in another process, to see whether it can be done. The library holds the interpreter's lock while it sets
    a client up, for 90 s where a master is frozen, and no call of any engine would be served meanwhile. That process
    loads nothing from the folder that it is started in (``-P``). Blocks. Raises Unavailable."""
    asked = (options.master, options.host, options.protocol, options.devices)
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and words
            [sys.executable, "-P", "-c", _PROBE, *asked],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as slow:
        raise Unavailable(f"the Mooncake master at {options.master} lets no new client in") from slow
    except OSError as error:
        raise Unavailable(f"whether a Mooncake master is at {options.master} cannot be tried: {error}") from error
    if done.returncode:
        raise Unavailable(f"no Mooncake master lets a client in at {options.master}")


def connect(module: Any, options: MooncakeOptions) -> Library:
    """A client of the master. Blocks, and everything in this process with it: ``probe`` first. Raises Unavailable."""
    try:
        socket.create_connection(options.address, timeout=KNOCK_SECONDS).close()
    except OSError as error:
        raise Unavailable(f"no Mooncake master answers at {options.master}: {error}") from error
    library = module.MooncakeDistributedStore()
    code = library.setup(
        options.host,
        "P2PHANDSHAKE",
        options.segment,
        options.buffer,
        options.protocol,
        options.devices,
        options.master,
    )
    if code != OK:
        raise Unavailable(f"the Mooncake master at {options.master} refused this client (code {code})")
    connected: Library = library
    return connected


def replication(module: Any, replicas: int) -> object:
    config: object = module.ReplicateConfig()
    config.replica_num = replicas  # type: ignore[attr-defined]
    return config


def addresses(head: memoryview, pages: Sequence[memoryview]) -> tuple[list[int], list[int]]:
    """Addresses of an object's bytes, and the sizes there."""
    pieces = (head, *(page for page in pages if len(page)))
    return list(map(address_of, pieces)), list(map(len, pieces))


BATCH_ITEMS = 32
BATCH_BYTES = 4 << 20
"""Bytes of one call to the library: a batch is worth 5 to 10 times at 64 KiB and nothing from 4 MiB on."""


@dataclass(slots=True)
class Task:
    """An item to carry out by ``deadline`` (monotonic seconds). ``tries``: how often it was before.
    ``is_taken``: a thread has it."""

    item: Item
    deadline: float
    index: int
    each: Each
    tries: int = 0
    is_taken: bool = False
    is_ended: bool = False
    is_aside: bool = False

    def end(self, outcome: Outcome) -> None:
        """End a task, none of whose bytes move any more. The first end counts."""
        if not self.is_ended:
            self.is_ended = True
            self.each(self.index, outcome)

    def set_aside(self) -> bool:
        """Set aside a task of which bytes may still move. True the first time."""
        is_first = not self.is_ended and not self.is_aside
        if is_first:
            self.is_aside, self.deadline = True, float("-inf")
            self.each(self.index, Outcome.LATE)
        return is_first


Carry = Callable[[list[Task]], None]
"""Ends every task that it is given, or puts it off. Blocks."""


class Batches:
    """Tasks that wait for threads, which carry them out in batches. ``make``: as of Workers. ``broke``: ends a task
    whose batch broke on its way."""

    def __init__(self, name: str, threads: int, make: Callable[[], Carry], broke: Callable[[Task], None]) -> None:
        self.workers = Workers(name, threads, make)
        self._broke = broke
        self._waiting: deque[Task] = deque()
        self._lock = threading.Lock()

    def add(self, tasks: Sequence[Task]) -> None:
        """Queue tasks. Those that find no room, or are not begun in time, are BUSY."""
        with self._lock:
            self._waiting.extend(tasks)
        self.workers.add([self._job(task) for task in tasks])

    def put_off(self, task: Task, until: float) -> None:
        """Carry out a task once more at ``until``, monotonic seconds."""
        task.is_taken = False
        self.workers.put_off(self._job(task), until)

    def _job(self, task: Task) -> Job[Carry]:
        return Job(partial(self._run, task), partial(self._refuse, task), task.deadline)

    def _refuse(self, task: Task) -> None:
        with self._lock:
            was_taken, task.is_taken = task.is_taken, True
        if not was_taken:
            task.end(Outcome.BUSY)

    def _run(self, first: Task, carry: Carry) -> None:
        if not (batch := self._take(first)):
            return
        try:
            carry(batch)
        except Exception:  # noqa: BLE001 - a batch ends otherwise than the job that carries it
            events.failure("storage_batch_broke")
            for task in batch:
                self._broke(task)

    def _take(self, first: Task) -> list[Task]:
        """A batch that begins with a task; empty where an earlier one had it."""
        with self._lock:
            if first.is_taken:
                return []
            first.is_taken = True
            batch, size_bytes, now = [first], first.item.payload_bytes, time.monotonic()
            while self._waiting and len(batch) < BATCH_ITEMS:
                task = self._waiting[0]
                if not task.is_taken and task.deadline > now:  # what is over its deadline is refused by its own job
                    size_bytes += task.item.payload_bytes
                    if size_bytes > BATCH_BYTES:
                        break
                    task.is_taken = True
                    batch.append(task)
                self._waiting.popleft()
        return batch


PROTOCOLS = ("tcp", "rdma")
MOST_THREADS = 64
MOST_REPLICAS = 8


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """``master``: HOST:PORT. ``host``: by which other clients reach this one. ``segment``: bytes of memory that this
    daemon gives to the store; 0: none. ``buffer``: bytes of the client's own memory, which our calls do not use.
    ``protocol``: tcp or rdma; ``devices``: of rdma, by comma. ``readers``, ``writers``: threads. ``replicas``: copies
    of an object. ``discard``: seconds after which the master lets go of a put that never ended (its flag
    put_start_discard_timeout_sec): until then a put of the same name says 0, and nothing is stored."""

    master: str
    host: str = option(text_option, "127.0.0.1")
    segment: int = option(size_option, 0)
    buffer: int = option(size_option, 16 << 20)
    protocol: str = option(text_option, "tcp")
    devices: str = option(text_option, "")
    readers: int = option(count_option, 4)
    writers: int = option(count_option, 2)
    replicas: int = option(count_option, 1)
    discard: float = option(seconds_option, 5.0)

    @property
    def address(self) -> tuple[str, int]:
        return parse_address("storage", self.master)


def mooncake_options(spec: StorageSpec) -> MooncakeOptions:
    """Parse the options. Raises InvalidRequest."""
    made = spec.read_options(MooncakeOptions, master=spec.where)
    parse_address("storage: the master of mooncake", spec.where, least_port=1)
    if made.protocol not in PROTOCOLS:
        raise InvalidRequest(f"storage: protocol={made.protocol} is not one of {', '.join(PROTOCOLS)}")
    if not 1 <= made.readers <= MOST_THREADS or not 1 <= made.writers <= MOST_THREADS:
        raise InvalidRequest(f"storage: readers and writers are 1 to {MOST_THREADS} threads")
    if not 1 <= made.replicas <= MOST_REPLICAS:
        raise InvalidRequest(f"storage: replicas is 1 to {MOST_REPLICAS}")
    return made
