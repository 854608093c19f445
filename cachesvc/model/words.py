"""Types shared by all layers: tiers, copy states, page runs and write policies."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

NO_PAGE = -1
"""A cell of a block table that holds no page: behind a window, or not granted yet."""
STAMP_BITS = 48
"""Numbers of accesses have no more bits: nine years of a million a second."""


class Tier(Enum):
    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


class CopyState(IntEnum):
    """State of one copy: one block's page in one group on one place."""

    ABSENT = 0
    FILLING = 1
    READY = 2
    DRAINING = 3


ABSENT, FILLING, READY, DRAINING = map(int, CopyState)
"""The states as they lie in columns: to compare with an enum's member takes three times as long."""


class PageState(IntEnum):
    """State of a page; it has exactly one of these at any moment."""

    FREE = 0
    PRIVATE = 1
    SEALED = 2
    IN_FLIGHT = 3
    QUARANTINED = 4


class WritePolicy(Enum):
    """Time at which a sealed block's bytes are copied to the host tier. ``WRITE_THROUGH``: as soon as the block is
    sealed. ``WRITE_THROUGH_SELECTIVE``: once it was hit often enough. ``WRITE_BACK``: only when its last device copy is
    evicted.
    """

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` pages whose ids follow one another, from ``first`` on."""

    first: int
    count: int


def runs_of(pages: Iterable[int]) -> list[Run]:
    """Split ``pages`` into its maximal runs of consecutive rising ids, in order."""
    runs: list[Run] = []
    first = previous = None
    for page in pages:
        if first is None or previous is None:
            first = page
        elif page != previous + 1:
            runs.append(Run(first, previous - first + 1))
            first = page
        previous = page
    if first is not None and previous is not None:
        runs.append(Run(first, previous - first + 1))
    return runs


# Block keys, for daemon and client: 32 bytes, chained below a namespace.
#
# Key of block i = BLAKE2b-256(parent key, tokens as little-endian u32, extra keys and the tokens that they cover), the
# parent of block 0 being the namespace. So key i stands for the whole prefix, and equal keys in two namespaces cannot
# be. BLAKE2b is RFC 7693. The client hashes them (``cachesvc_client.core.keys``); the daemon never sees a token, only
# keys and their parents.

KEY_BYTES = 32
MOST_KEYS = 65536
"""Keys of the longest prompt: a request carries no more."""


def namespace_of(model: str, layout_fingerprint: bytes, tenant_salt: bytes = b"", tenant: str = "") -> bytes:
    """32 bytes under which keys live: model, layout, salt and tenant. Nothing is ever shared across two of them.

    ``tenant`` is the name that the daemon itself knows the caller by: no salt leads into another tenant's namespaces.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"kv-namespace")
    for part in (model.encode(), layout_fingerprint, tenant_salt, *((tenant.encode(),) if tenant else ())):
        digest.update(struct.pack("<I", len(part)))
        digest.update(part)
    return digest.digest()


class Direction(Enum):
    """Direction of a transfer, seen from the device."""

    LOAD = "load"  # host -> device, or from another replica's device
    STORE = "store"  # device -> host

    __hash__ = object.__hash__  # an Enum's own is written in Python


class Inward(Enum):
    """Ways to the host that no device has a part in."""

    FETCH = "fetch"  # from storage


class Urgency(Enum):
    """Urgency of a transfer: with a waiter or without."""

    AWAITED = "awaited"  # an engine waits for it
    BACKGROUND = "background"  # write-through backups and prefetches: no waiter yet

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Done:
    """Outcome of a transfer that ended well: every byte has arrived."""


class CopiesHang(Exception):
    """Copies of a transfer hang, and may still write to their targets. Callers learn that the transfer failed."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A transfer has ended, and nothing that it was to bring can be relied on. ``reason``: never empty. ``may_write``:
    its bytes may still come, for its copies hang."""

    reason: str
    may_write: bool = False


DONE = Done()
Outcome = Done | Failed


@dataclass(frozen=True, slots=True)
class PagePairs:
    """Pages of one group: ``device_pages[i]`` and ``host_pages[i]`` hold the same block.

    Thousands of pages are arrays. In a transfer from another replica ``host_pages`` are pages of that replica's device.
    """

    group: int
    device_pages: Sequence[int]
    host_pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer job between a replica's device pools and the host pool of one model.

    ``source_replica``: a load that reads from the device pools of that replica, rank by rank, and not from the host.
    ``layered``: a load whose waiters follow layer by layer; the timeline word then moves after each layer (or few).
    ``short_suffix``: they take less time for a layer than the link does: the first comes alone, all others together.
    ``urgency``: what it is at first; the mover's ``expedite`` makes a BACKGROUND transfer an AWAITED one.
    """

    ticket: int
    model: int
    replica: int
    direction: Direction
    pages: tuple[PagePairs, ...]
    layered: bool
    urgency: Urgency = Urgency.AWAITED
    source_replica: int | None = None
    short_suffix: bool = False

    def touches(self, model: int, replica: int) -> bool:
        """True where it reads or writes pages of a replica."""
        return self.model == model and replica in (self.replica, self.source_replica)


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """Monotonic seconds: queued, its first slice started (None: it never was), ended."""

    submitted: float
    began: float | None
    ended: float


@dataclass(frozen=True, slots=True)
class TimelineSlot:
    """Words that show the progress of a transfer: layer l is there once ``word`` has reached ``base + l + 1``.

    Comparison is cyclic over 32 bits: reached means ``(value - target) mod 2^32 < 2^31``. ``failed_word`` holds
    ``base + layers`` of the last transfer on this slot that failed; ``word`` reaches its end even then.
    """

    word: int
    failed_word: int
    base: int
    layers: int

    @property
    def end(self) -> int:
        """Value of ``word`` once the transfer has ended, well or not."""
        return (self.base + self.layers) & 0xFFFFFFFF


def has_reached(value: int, target: int) -> bool:
    """True when a 32-bit timeline value is at or past ``target``, cyclically."""
    return (value - target) & 0xFFFFFFFF < 1 << 31
