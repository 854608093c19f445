"""Mooncake's own client, typed: calls that block, addresses in place of memory, numbers in place of errors."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from cachesvc.memory.mapped import address_of
from cachesvc.model.errors import Unavailable
from cachesvc.storage.mooncake.options import MooncakeOptions

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
from cachesvc.storage.mooncake.options import MooncakeOptions
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
    """Replication settings of objects."""
    config: object = module.ReplicateConfig()
    config.replica_num = replicas  # type: ignore[attr-defined]
    return config


def addresses(head: memoryview, pages: Sequence[memoryview]) -> tuple[list[int], list[int]]:
    """Addresses of an object's bytes, and the sizes there."""
    pieces = (head, *(page for page in pages if len(page)))
    return list(map(address_of, pieces)), list(map(len, pieces))
