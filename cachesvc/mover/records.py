"""Records of the rings: jobs and their pools as columns of numbers, and their ends.

A pool is sent once: its geometry (rows of layer, offset, width, stride) and its table (rows of first page, pages,
region, offset), each under a number. A job is then ``JOB_FIELDS``, six numbers for each group that it moves (two pools
and two counts), and the plain page ids: some microseconds and 16 bytes a block. All numbers have 64 bits; few are
packed and unpacked without NumPy, each of whose functions takes a processor that has just woken 10 us and more.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cachesvc.memory.extents import Extent, ExtentTable
from cachesvc.model.geometry import Geometry, PlaneSpan
from cachesvc.model.layout import Plane
from cachesvc.model.transfer import Direction, TimelineSlot, Urgency
from cachesvc.mover.channel import error_again, told_as
from cachesvc.mover.ring import Part
from cachesvc.swap.movers import RankEnd, RankJob
from cachesvc.swap.planner import GroupMove, Pool

GEOMETRY, TABLE, FORGET, JOB, EXPEDITE, PAUSE, LIMIT, STOP = range(1, 9)
"""First number of each record to a mover."""
ENDED, BEGAN, BROKEN, DIED = range(1, 5)
"""First number of each record from a mover; ``DIED`` is written in its name when its process has ended."""

JOB_FIELDS = ("kind", "ticket", "way", "urgency", "step", "word", "failed_word", "base", "layers", "moves")
_HEAD = struct.Struct(f"<{len(JOB_FIELDS)}q")
_MOVE = struct.Struct("<6q")
_END = struct.Struct("<4q")
_BY_COSTS = -2
_WAYS, _URGENCIES = tuple(Direction), tuple(Urgency)
_FROM_PEER = len(_WAYS)
"""Number of the way of a load from another replica."""
MOST_REASON_BYTES = 4096
KEPT_TABLES = 64
"""Tables of one geometry that are sent before all are sent anew: a host pool has a new one when a chunk comes."""

Int64s = npt.NDArray[np.int64]


class _Told(NamedTuple):
    """A geometry that a mover knows. It is kept, so that no other one can take its identity."""

    number: int
    geometry: Geometry
    tables: dict[int, tuple[int, ExtentTable]]


class Teller:
    """The daemon's side of one mover's pools: what that mover knows already. One thread at a time."""

    def __init__(self) -> None:
        self._told: dict[int, _Told] = {}
        self._last = 0

    def job(self, job: RankJob) -> list[list[Part]]:
        """Records that hand over a job: what is new of its pools, then the job itself."""
        records: list[list[Part]] = []
        numbers: list[int] = []
        for move in job.moves:
            pools = (*self._pool(move.device, records), *self._pool(move.host, records))
            numbers += (*pools, len(move.device_pages), len(move.host_pages))
        slot, step = job.slot, _BY_COSTS if job.layers_per_step is None else job.layers_per_step
        places = (slot.word, slot.failed_word, slot.base, slot.layers)
        way = _FROM_PEER if job.is_from_peer else _WAYS.index(job.direction)
        urgency = _URGENCIES.index(job.urgency)
        head = _packed(JOB, job.ticket, way, urgency, step, *places, len(job.moves), *numbers)
        pages = [column for move in job.moves for column in (move.device_pages, move.host_pages)]
        records.append([head, *pages])
        return records

    def forget(self, pools: Sequence[Pool]) -> list[list[Part]]:
        """Records that let a mover forget pools, as far as it knows them."""
        gone = [self._told.pop(id(pool.geometry), None) for pool in pools]
        return [[_packed(FORGET, told.number)] for told in gone if told is not None]

    def _pool(self, pool: Pool, records: list[list[Part]]) -> tuple[int, int]:
        told = self._told.get(id(pool.geometry))
        if told is not None and len(told.tables) >= KEPT_TABLES and id(pool.table) not in told.tables:
            records += self.forget([pool])
            told = None
        if told is None:
            told = self._told[id(pool.geometry)] = _Told(self._next(), pool.geometry, {})
            records.append(_geometry_record(told.number, pool.geometry))
        known = told.tables.get(id(pool.table))
        if known is None:
            known = told.tables[id(pool.table)] = self._next(), pool.table
            records.append(_table_record(told.number, known[0], pool.table))
        return told.number, known[0]

    def _next(self) -> int:
        self._last += 1
        return self._last


class Listener:
    """The mover's side: pools by their numbers. ``regions``: the mover's own number of each region of the daemon's."""

    def __init__(self, device: str, regions: Mapping[int, int]) -> None:
        self._device = device
        self._regions = regions
        self._geometries: dict[int, Geometry] = {}
        self._pools: dict[int, dict[int, Pool]] = {}

    def geometry(self, numbers: Int64s) -> None:
        """Take in a geometry."""
        number, pages, total_bytes = numbers[1:4].tolist()
        spans = tuple(
            PlaneSpan(Plane("", layer, "", (width,), "uint8"), offset, stride)
            for layer, offset, width, stride in numbers[4:].reshape(-1, 4).tolist()
        )
        self._geometries[number] = Geometry(spans, pages, total_bytes)
        self._pools[number] = {}

    def table(self, numbers: Int64s) -> None:
        """Take in a table; a region that is not there yet is one that no copy may name."""
        extents = numbers[3:].reshape(-1, 4).tolist()
        table = ExtentTable(
            Extent(first, pages, self._regions.get(region, 0), offset) for first, pages, region, offset in extents
        )
        self._pools[int(numbers[1])][int(numbers[2])] = Pool(self._geometries[int(numbers[1])], table)

    def forget(self, numbers: Int64s) -> None:
        """Forget a geometry with its tables."""
        self._geometries.pop(int(numbers[1]), None)
        self._pools.pop(int(numbers[1]), None)

    def job(self, record: bytes) -> RankJob:
        """Job of a record. Raises KeyError for unknown pools."""
        _, ticket, way, urgency, step, *places, count = _HEAD.unpack_from(record)
        pages = np.frombuffer(record, np.int64, offset=_HEAD.size + _MOVE.size * count)
        moves: list[GroupMove] = []
        at = 0
        for move in range(count):
            numbers = _MOVE.unpack_from(record, _HEAD.size + _MOVE.size * move)
            device, device_table, host, host_table, ours, theirs = numbers
            columns = pages[at : at + ours], pages[at + ours : at + ours + theirs]
            at += ours + theirs
            moves.append(GroupMove(self._pools[device][device_table], self._pools[host][host_table], *columns))
        steps = None if step == _BY_COSTS else step
        slot = TimelineSlot(*places)
        from_peer, direction = way == _FROM_PEER, _WAYS[way % _FROM_PEER]
        return RankJob(ticket, self._device, direction, _URGENCIES[urgency], steps, slot, tuple(moves), from_peer)


def expedite_record(direction: Direction, ticket: int) -> list[Part]:
    """Record that makes a ticket awaited."""
    return [_packed(EXPEDITE, _WAYS.index(direction), ticket)]


def expedited(numbers: Int64s) -> tuple[Direction, int]:
    """Contents of ``expedite_record``."""
    return _WAYS[int(numbers[1])], int(numbers[2])


def pause_record(seconds: float) -> list[Part]:
    """Record that holds background stores back for a while."""
    return [_packed(PAUSE, round(seconds * 1e6))]


def limit_record(direction: Direction, bytes_per_second: int) -> list[Part]:
    """Record of another byte budget."""
    return [_packed(LIMIT, _WAYS.index(direction), bytes_per_second)]


def limited(numbers: Int64s) -> tuple[Direction, int]:
    """Contents of ``limit_record``."""
    return _WAYS[int(numbers[1])], int(numbers[2])


def stop_record() -> list[Part]:
    """Record that ends the jobs."""
    return [_packed(STOP)]


def end_record(end: RankEnd) -> list[Part]:
    """Record of a job's end."""
    began = -1 if end.began is None else round(end.began * 1e9)
    head = _packed(ENDED, end.ticket, began, end.error is not None)
    if end.error is None:
        return [head]
    code, said = told_as(end.error)
    return [head, f"{code} {said}".encode()[:MOST_REASON_BYTES]]


def end_of(record: bytes, device: str) -> RankEnd:
    """Contents of ``end_record``."""
    _, ticket, began, is_failed = _END.unpack_from(record)
    code, _, said = record[_END.size :].decode(errors="replace").partition(" ")
    error = error_again(code, said) if is_failed else None
    return RankEnd(ticket, device, error, None if began < 0 else began / 1e9)


def began_record(ticket: int, began: float) -> list[Part]:
    """Record of the start of a job's first slice."""
    return [_packed(BEGAN, ticket, round(began * 1e9))]


def began_of(numbers: Int64s) -> tuple[int, float]:
    """Contents of ``began_record``."""
    return int(numbers[1]), float(numbers[2]) / 1e9


def broken_record(fault: str) -> list[Part]:
    """Record of a device that no longer works for this mover."""
    return [_packed(BROKEN), fault.encode()[:MOST_REASON_BYTES]]


def died_record() -> list[Part]:
    """Record of a mover's death: the last one."""
    return [_packed(DIED)]


def _geometry_record(number: int, geometry: Geometry) -> list[Part]:
    spans = [(span.plane.layer, span.offset, span.width, span.page_stride) for span in geometry.spans]
    return [_packed(GEOMETRY, number, geometry.pages, geometry.total_bytes), np.array(spans, np.int64)]


def _table_record(geometry: int, number: int, table: ExtentTable) -> list[Part]:
    extents = [(one.first_page, one.pages, one.region, one.offset) for one in table.extents]
    return [_packed(TABLE, geometry, number), np.array(extents, np.int64).reshape(-1, 4)]


def _packed(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)
