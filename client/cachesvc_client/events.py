"""Follow the blocks of a model: where each has copies, as a snapshot and then change by change.

    with EventSubscriber(socket_path, registration.namespace) as events:
        mirror = BlockMirror()
        for batch in events.follow():
            mirror.apply(batch)

``follow`` begins with a snapshot and comes back with another one where it was cut off or the daemon no longer knows
what was missed. It ends with DaemonUnavailable when the daemon goes: subscribe anew when it is back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import lru_cache
from types import TracebackType
from typing import Any, NamedTuple

import grpc
from kvcache.v1 import event_pb2

from cachesvc.model.words import KEY_BYTES
from cachesvc_client.core.arguments import warn_renamed
from cachesvc_client.core.errors import EventsMissed, Maker, Unauthenticated, error_of
from cachesvc_client.wire.credentials import Metadata, credentials_from, has_token
from cachesvc_client.wire.life import may_show
from cachesvc_client.wire.methods import SUBSCRIBE
from cachesvc_client.wire.settings import ChannelOptions, default_socket
from cachesvc_client.wire.transports import ChannelMaker, open_channel

DEFAULT_OPTIONS = ChannelOptions(first_reconnect_ms=2000, longest_reconnect_ms=2000)
"""Channel options of a subscriber, which is in no hurry."""


class Kind(Enum):
    """Meaning of a change for the block in its group, on the whole node."""

    STORED = event_pb2.EVENT_KIND_STORED
    REMOVED = event_pb2.EVENT_KIND_REMOVED
    TIER_CHANGED = event_pb2.EVENT_KIND_TIER_CHANGED
    COPY_FAILED = event_pb2.EVENT_KIND_COPY_FAILED


KINDS = {kind.value for kind in Kind}


class Part(Enum):
    """Position of a batch in a snapshot; NONE: it holds changes that follow the last batch without a gap."""

    NONE = event_pb2.SNAPSHOT_PART_UNSPECIFIED
    FIRST = event_pb2.SNAPSHOT_PART_FIRST
    MORE = event_pb2.SNAPSHOT_PART_MORE
    LAST = event_pb2.SNAPSHOT_PART_LAST


class CopyLocation(NamedTuple):
    """Place of a copy: its group, its tier ("device", "host" or "storage"), and the replica of a device copy."""

    group: int
    tier: str
    replica: int


class Run(NamedTuple):
    """Changes that have all but the keys in common.

    ``present``: from now on the blocks have a copy at ``location``, or none. ``parent``: of the first key where they
    have; each further key's parent is the key before it; empty below the root. ``reason``: empty in a snapshot.
    """

    kind: Kind
    present: bool
    location: CopyLocation
    parent: bytes
    keys: tuple[bytes, ...]
    reason: str

    @property
    def spot(self) -> CopyLocation:
        warn_renamed("Run.spot", "Run.location")
        return self.location


class Batch(NamedTuple):
    """One answer: changes ``first`` to ``last`` of ``epoch``, or a piece of a snapshot as of change ``last``."""

    epoch: int
    model: int
    part: Part
    first: int
    last: int
    runs: tuple[Run, ...]


@lru_cache(1024)
def with_location(locations: frozenset[CopyLocation], location: CopyLocation) -> frozenset[CopyLocation]:
    """``locations`` and ``location``. Blocks at the same places share one object, so a million blocks need few."""
    return locations | {location}


@lru_cache(1024)
def without_location(locations: frozenset[CopyLocation], location: CopyLocation) -> frozenset[CopyLocation]:
    return locations - {location}


def parse_batch(message: event_pb2.SubscribeResponse) -> Batch:
    """A message in the client's words. Kinds of a newer daemon that change nothing here are passed over."""
    runs = []
    for run in message.runs:
        if run.kind in KINDS:
            raw, location = run.keys, CopyLocation(run.group, run.tier, run.replica)
            keys = tuple([raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)])
            runs.append(Run(Kind(run.kind), run.present, location, run.parent_key, keys, run.reason))
    part, first, last = message.snapshot_part, message.first_sequence_number, message.sequence_number
    return Batch(message.epoch, message.model_id, Part(part), first, last, tuple(runs))


NOWHERE: frozenset[CopyLocation] = frozenset()


class BlockMirror:
    """Copy of the daemon's index: after each ``apply`` as of change ``last`` of ``epoch``.

    ``locations``: key -> where it has copies. ``parents``: key -> the key of the block before it, empty for a first
    one. Within a snapshot (``is_whole`` is False) only the blocks received so far are there.
    """

    def __init__(self) -> None:
        self.locations: dict[bytes, frozenset[CopyLocation]] = {}
        self.parents: dict[bytes, bytes] = {}
        self.epoch = 0
        self.last = 0
        self.is_whole = False
        self._has_begun = False

    @property
    def spots(self) -> dict[bytes, frozenset[CopyLocation]]:
        warn_renamed("BlockMirror.spots", "BlockMirror.locations")
        return self.locations

    def apply(self, batch: Batch) -> None:
        """Take one batch. Raises EventsMissed where it does not follow the last one; a snapshot always may."""
        self._check(batch)
        for run in batch.runs:
            if run.present:
                self._add(run)
            elif run.kind is not Kind.COPY_FAILED:
                self.take_away(run.location, run.keys)
        self.epoch, self.last = batch.epoch, batch.last
        self._has_begun = True
        if batch.part is not Part.NONE:
            self.is_whole = batch.part is Part.LAST

    def _check(self, batch: Batch) -> None:
        if batch.part is Part.FIRST:
            self.locations.clear()
            self.parents.clear()
        elif not self._has_begun:
            if batch.part is not Part.NONE:
                raise EventsMissed("the snapshot's first part is missing; subscribe with a snapshot")
        elif batch.epoch != self.epoch:
            raise EventsMissed(f"epoch {batch.epoch} follows {self.epoch}; subscribe with a snapshot")
        elif batch.part is Part.NONE and batch.first != self.last + 1:
            raise EventsMissed(f"change {batch.first} follows {self.last}; subscribe with a snapshot")

    def take_away(self, location: CopyLocation, keys: Iterable[bytes]) -> None:
        """Blocks have no copy at ``location`` any more; one without any copy is dropped."""
        for key in keys:
            locations = self.locations.get(key)
            if locations is None:
                continue
            left = without_location(locations, location)
            if left:
                self.locations[key] = left
            else:
                del self.locations[key]
                del self.parents[key]

    def _add(self, run: Run) -> None:
        parent = run.parent
        for key in run.keys:
            self.locations[key] = with_location(self.locations.get(key, NOWHERE), run.location)
            self.parents[key] = parent
            parent = key

    def root_first(self, keys: Iterable[bytes] | None = None) -> list[bytes]:
        """``keys`` (None: all) and their ancestors, as far as they are here: each behind its parent."""
        out: list[bytes] = []
        placed: set[bytes] = set()
        for key in self.parents if keys is None else keys:
            path = []
            while key and key not in placed and key in self.parents:
                placed.add(key)
                path.append(key)
                key = self.parents[key]  # noqa: PLW2901 - the walk upwards is the loop
            out += reversed(path)
        return out


def subscription(
    namespace: bytes, *, snapshot: bool = True, epoch: int = 0, after: int | None = None, storage: bool = False
) -> event_pb2.SubscribeRequest:
    """Request for events: a snapshot first, or all behind change ``after`` of ``epoch``, or (neither) from now on.
    ``storage``: also changes of storage."""
    request = event_pb2.SubscribeRequest(namespace=namespace, snapshot=snapshot, epoch=epoch, storage=storage)
    if after is not None and not snapshot:
        request.after_sequence_number = after
    return request


def __getattr__(name: str) -> object:
    if name == "Spot":
        warn_renamed("cachesvc_client.events.Spot", "CopyLocation")
        return CopyLocation
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class EventSubscriber:
    """Subscriptions to the model of ``namespace``. Safe to ``close`` from another thread, which ends them.

    ``socket_path`` None: that of CACHESVC_SOCKET, else /run/cachesvc/cachesvc.sock.

    ``token``, or ``token_file`` (read for each subscription), else CACHESVC_TOKEN or CACHESVC_TOKEN_FILE of the
    environment: needed where the daemon runs with ``--tokens``, with the scope ``engine`` or ``read-only``.

    ``storage``: also report what is written to storage and what leaves it, as far as the daemon knows.
    """

    def __init__(
        self,
        socket_path: str | None,
        namespace: bytes,
        *,
        options: ChannelOptions = DEFAULT_OPTIONS,
        make_channel: ChannelMaker = open_channel,
        token: str | None = None,
        token_file: str | None = None,
        storage: bool = False,
    ) -> None:
        self._path = default_socket() if socket_path is None else socket_path
        self._namespace = namespace
        self._storage = storage
        self._options = options
        self._make_channel = make_channel
        self._credentials = credentials_from(token, token_file)
        self._used: Metadata = ()
        self._channel: grpc.Channel | None = None
        self._calls: set[Any] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._maker = Maker()

    def subscribe(self, *, snapshot: bool = True, epoch: int = 0, after: int | None = None) -> Iterator[Batch]:
        """Subscribe once, as ``subscription`` says; ends without an error only at ``close``.

        Raises SubscriberTooSlow, EventsMissed (``after`` is too long ago), NotFound (the model was evicted), NotOwned,
        LimitExceeded, DaemonUnavailable, Unauthenticated, PermissionDenied.
        """
        request = subscription(self._namespace, snapshot=snapshot, epoch=epoch, after=after, storage=self._storage)
        call = self._open(request)
        if call is None:
            return
        try:
            for message in call:
                yield parse_batch(message)
        except grpc.RpcError as failure:
            if not self._is_closed:
                raise error_of(failure) from failure
        finally:
            with self._lock:
                self._calls.discard(call)
            call.cancel()

    def follow(self) -> Iterator[Batch]:
        """A snapshot, then changes for as long as the daemon lives; after what was missed, a snapshot again."""
        while not self._is_closed:
            try:
                yield from self.subscribe(snapshot=True)
            except EventsMissed:
                continue
            except Unauthenticated:  # a token file may hold another one by now
                if self._credentials.metadata() == self._used:
                    raise

    def close(self) -> None:
        """End all subscriptions. Idempotent. Raises UsedAfterFork."""
        self._maker.check()
        with self._lock:
            self._is_closed = True
            calls, self._calls = self._calls, set()
        for call in calls:
            call.cancel()
        if self._channel is not None:
            self._channel.close()

    def __enter__(self) -> EventSubscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, request: event_pb2.SubscribeRequest) -> Any:
        self._maker.check()
        with self._lock:
            if self._is_closed:
                return None
            self._used = used = self._credentials.metadata()
            if has_token(used) and not may_show(self._path):
                used = ()
            if self._channel is None:
                self._channel = self._make_channel(self._path, self._options)
            call = self._channel.unary_stream(
                SUBSCRIBE.path,
                request_serializer=SUBSCRIBE.request.SerializeToString,
                response_deserializer=SUBSCRIBE.response.FromString,
            )(request, metadata=used)
            self._calls.add(call)
            return call
