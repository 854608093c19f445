"""Events of a subscriber, and a mirror of the cache that they keep."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from kvcache.v1 import event_pb2

from cachesvc.model.words import KEY_BYTES
from cachesvc_client.core.arguments import warn_renamed
from cachesvc_client.core.errors import EventsMissed


class Kind(Enum):
    """Meaning of a change for the block in its group, on the whole node."""

    STORED = event_pb2.EVENT_KIND_STORED
    REMOVED = event_pb2.EVENT_KIND_REMOVED
    TIER_CHANGED = event_pb2.EVENT_KIND_TIER_CHANGED
    COPY_FAILED = event_pb2.EVENT_KIND_COPY_FAILED


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
    known = {kind.value for kind in Kind}
    return Batch(
        message.epoch,
        message.model_id,
        Part(message.snapshot_part),
        message.first_sequence_number,
        message.sequence_number,
        tuple(_run(run) for run in message.runs if run.kind in known),
    )


def _run(run: event_pb2.BlockRun) -> Run:
    raw = run.keys
    keys = tuple(raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES))
    return Run(
        Kind(run.kind), run.present, CopyLocation(run.group, run.tier, run.replica), run.parent_key, keys, run.reason
    )


_NOWHERE: frozenset[CopyLocation] = frozenset()


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
            self.locations[key] = with_location(self.locations.get(key, _NOWHERE), run.location)
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
