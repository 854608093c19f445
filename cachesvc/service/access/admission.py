"""Limits of concurrent calls: by kind, in all, and for each process and tenant.

* **LIFE**: a heartbeat, Close, Detach, Release. They keep a lease or give memory back, and end in one turn of the event
  loop. Never refused for load or for a rate. Nor is a retry, whatever it asks: what it asks for may have been done, and
  a refusal says that nothing was.
* **WORK**: all else while it is carried out. What is answered within its turn of the loop is never beside another call:
  it has to find room and takes none. What goes on for several turns holds a place.
* **WAITS**: what waits for transfers, or for the first answer to its request_id. It costs memory and no time, so it is
  counted apart, and a call that begins to wait gives its place among WORK back.

A stream costs memory while it is open, though nothing comes: streams have places of their own.

A process is known by the lease that a call names (the process that opened it), else by its life-socket token, else by
its connection. What one process or tenant has under way keeps no other one out that stays below its share.
"""

from __future__ import annotations

import resource
from enum import Enum
from typing import NamedTuple

from cachesvc.model.errors import LimitExceeded, QuotaExceeded
from cachesvc.model.numbers import count_held, share_of
from cachesvc.service.access.quota import Meter, Quotas
from cachesvc.wire.status import MAX_MESSAGE_BYTES, MAX_METADATA_BYTES, MAX_STREAMS

CallerKey = bytes | str
"""Known identity of a caller: a life-socket token, or the name of a connection."""


MOST_STREAMS = 4096
"""Step streams and heartbeats that are open at a time: an engine has one of each."""


class CallKind(Enum):
    LIFE = "life"
    WORK = "work"
    WAITS = "waits"


class Holder(NamedTuple):
    """Holder of a call's places: a process and a tenant. ``meter``: of its tenant, where there are quotas."""

    process: CallerKey
    meter: Meter | None


class Slots:
    """Places for calls of one kind: ``limit`` in all; ``each``: for one process (0: its share of the limit)."""

    def __init__(self, what: str, limit: int, each: int = 0) -> None:
        self.limit = limit
        self.each = each
        self.held = 0
        self._what = what
        self._processes: dict[CallerKey, int] = {}
        self._tenants: dict[CallerKey, int] = {}

    def require(self, holder: Holder) -> None:
        """Raises LimitExceeded where there is no place for one call more."""
        if self.held >= self.limit:
            raise LimitExceeded(self._what, self.held + 1, self.limit)
        process, meter = holder
        held, most = self._processes.get(process, 0), self.each or self._share(self._processes, process)
        if held >= most:
            raise LimitExceeded(f"{self._what} of this process", held + 1, most)
        if meter is not None:
            held, most = self._tenants.get(meter.tenant, 0), self._share(self._tenants, meter.tenant)
            if held >= most:
                meter.refused += 1
                raise LimitExceeded(f"{self._what} of this tenant", held + 1, most)

    def count(self, holder: Holder, by: int) -> None:
        """Count one call more (1) or less (-1)."""
        self.held += by
        count_held(self._processes, holder.process, by)
        if holder.meter is not None:
            count_held(self._tenants, holder.meter.tenant, by)

    def _share(self, held: dict[CallerKey, int], key: CallerKey) -> int:
        """The most that one caller may hold now."""
        return share_of(self.limit, len(held) + (key not in held))


class Slot:
    """The place of one call that is not answered yet, to be given back once."""

    __slots__ = ("_holder", "_places", "_waiting")

    def __init__(self, places: Slots, waiting: Slots, holder: Holder) -> None:
        self._places: Slots | None = places
        self._waiting = waiting
        self._holder = holder

    def wait(self) -> None:
        """The call only waits from here on. Raises LimitExceeded where too many do; its place stays what it was."""
        if self._places is not None and self._places is not self._waiting:
            self._waiting.require(self._holder)
            self._waiting.count(self._holder, 1)
            self._places.count(self._holder, -1)
            self._places = self._waiting

    def leave(self) -> None:
        assert self._places is not None, "a place is given back once"
        self._places.count(self._holder, -1)
        self._places = None
        if self._holder.meter is not None:
            self._holder.meter.in_flight -= 1


class Admission:
    """The places of one daemon. ``quotas``: None where no tenants are configured."""

    def __init__(self, calls: int, waiting: int, waiting_each: int, quotas: Quotas | None = None) -> None:
        """``calls``, ``waiting``: at a time in all; ``waiting_each``: of one process."""
        self.work = Slots("calls in flight", calls)
        self.waits = Slots("waiting calls", waiting, waiting_each)
        self.streams = Slots("open streams", MOST_STREAMS)
        self.quotas = quotas

    def holder(self, process: CallerKey, tenant: str) -> Holder:
        """Holder for a call of this process and tenant."""
        return Holder(process, None if self.quotas is None else self.quotas.meter(tenant))

    def charge_bytes(self, tenant: str, size_bytes: int, now: float) -> None:
        """A message that is not parsed yet. Raises QuotaExceeded."""
        if self.quotas is not None:
            self.quotas.meter(tenant).admit("bytes_per_second", size_bytes, now)

    def admit(self, kind: CallKind, holder: Holder, now: float) -> None:
        """Admit one call more: charged to its tenant before any work is done. ``now``: seconds, monotonic.

        Raises LimitExceeded, QuotaExceeded; never for LIFE, which is charged all the same.
        """
        meter = holder.meter
        if kind is CallKind.LIFE:
            if meter is not None:
                meter.buckets["calls_per_second"].charge(1, now)
            return
        if kind is CallKind.WORK and self.work.held:
            self.work.require(holder)
        if meter is not None:
            most = meter.quota.calls_in_flight
            if most and meter.in_flight >= most:
                meter.refused += 1
                raise QuotaExceeded(meter.tenant, "calls_in_flight", meter.in_flight + 1, most, "send fewer at a time")
            meter.admit("calls_per_second", 1, now)

    def take(self, kind: CallKind, holder: Holder, *, is_admitted: bool = False) -> Slot:
        """A place for a call that goes on beyond this turn of the loop. Raises LimitExceeded; not where it is admitted:
        room was found for it, or it is a retry and waits for a call that has a place."""
        places = self.waits if kind is CallKind.WAITS else self.work
        if not is_admitted:
            places.require(holder)
        places.count(holder, 1)
        if holder.meter is not None:
            holder.meter.in_flight += 1
        return Slot(places, self.waits, holder)


# Limits of connections for each way in, and time limits of silent ones.
#
# File descriptors are the daemon's own, for any peer, and gRPC ends the process where it gets none. So each way in has
# a part of what the process may open, and what memory, GPUs and the daemon's own files need is kept.

MOST_FILES = 1 << 20
"""Number of files that an unlimited process counts on."""
HANDSHAKE_SECONDS = 5
IDLE_SECONDS = 300
"""A client connects again by itself when it calls again."""
TCP_CONNECTIONS, TCP_STREAMS, TCP_MESSAGE_BYTES = 64, 16, 320 << 10
"""Connections of readers from elsewhere: a few routers and operators, whose longest question asks for 4,096 blocks.
What one more connection could hold in unfinished messages is their product."""

Option = tuple[str, int]


class Ways(NamedTuple):
    """Connections of each way in, at most. A life connection takes two descriptors, with that of its process."""

    life: int
    lanes: int
    local: int
    tcp: int
    probes: int


def ways_in(files: int | None = None) -> Ways:
    """Ways into a process that may open ``files`` files; by default this one, once it has raised its limit."""
    if files is None:
        _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = MOST_FILES if files == resource.RLIM_INFINITY else files
    part = files // 16
    return Ways(min(4096, 2 * part), 2 * part, min(4096, 4 * part), min(TCP_CONNECTIONS, part), min(1024, part))


def local_options(ways: Ways) -> list[Option]:
    """Options of the server on the unix socket."""
    return [*_options(ways.local, MAX_STREAMS), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]


def tcp_options(ways: Ways) -> list[Option]:
    return [*_options(ways.tcp, TCP_STREAMS), ("grpc.max_receive_message_length", TCP_MESSAGE_BYTES)]


def rude_options(connections: int) -> list[Option]:
    """Options of any listener against callers that connect and say nothing."""
    return [
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
        ("grpc.so_reuseport", 0),
    ]


def _options(connections: int, streams: int) -> list[Option]:
    return [
        *rude_options(connections),
        ("grpc.max_connection_idle_ms", IDLE_SECONDS * 1000),
        ("grpc.max_concurrent_streams", streams),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ]
