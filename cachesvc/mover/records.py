"""Records of the rings: jobs and their pools as columns of numbers, and their ends.

A pool is sent once: its geometry (rows of layer, offset, width, stride) and its table (rows of first page, pages,
region, offset), each under a number. A job is then ``JOB_FIELDS``, six numbers for each group that it moves (two pools
and two counts), and the plain page ids: some microseconds and 16 bytes a block. All numbers have 64 bits; few are
packed and unpacked without NumPy, each of whose functions takes a processor that has just woken 10 us and more.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cachesvc.memory.arbiter import SLICE_BYTES, CopyRules
from cachesvc.memory.extents import Extent, ExtentTable, map_memfd, sealed_memfd
from cachesvc.memory.interface import Handle
from cachesvc.memory.timeline import TIMELINE_WORDS
from cachesvc.model.errors import BY_CODE, CacheError, ErrorCode, Unavailable
from cachesvc.model.futex import fence, store, store_and_wake, wait_reached, wake, words_of
from cachesvc.model.layout import Geometry, Plane, PlaneSpan
from cachesvc.model.words import Direction, TimelineSlot, Urgency
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
WAYS, _URGENCIES = tuple(Direction), tuple(Urgency)
_FROM_PEER = len(WAYS)
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
        way = _FROM_PEER if job.is_from_peer else WAYS.index(job.direction)
        urgency = _URGENCIES.index(job.urgency)
        head = packed(JOB, job.ticket, way, urgency, step, *places, len(job.moves), *numbers)
        pages = [column for move in job.moves for column in (move.device_pages, move.host_pages)]
        records.append([head, *pages])
        return records

    def forget(self, pools: Sequence[Pool]) -> list[list[Part]]:
        """Records that let a mover forget pools, as far as it knows them."""
        gone = [self._told.pop(id(pool.geometry), None) for pool in pools]
        return [[packed(FORGET, told.number)] for told in gone if told is not None]

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
        from_peer, direction = way == _FROM_PEER, WAYS[way % _FROM_PEER]
        return RankJob(ticket, self._device, direction, _URGENCIES[urgency], steps, slot, tuple(moves), from_peer)


def end_record(end: RankEnd) -> list[Part]:
    began = -1 if end.began is None else round(end.began * 1e9)
    head = packed(ENDED, end.ticket, began, end.error is not None)
    if end.error is None:
        return [head]
    code, said = told_as(end.error)
    return [head, f"{code} {said}".encode()[:MOST_REASON_BYTES]]


def end_of(record: bytes, device: str) -> RankEnd:
    _, ticket, began, is_failed = _END.unpack_from(record)
    code, _, said = record[_END.size :].decode(errors="replace").partition(" ")
    error = error_again(code, said) if is_failed else None
    return RankEnd(ticket, device, error, None if began < 0 else began / 1e9)


def _geometry_record(number: int, geometry: Geometry) -> list[Part]:
    spans = [(span.plane.layer, span.offset, span.width, span.page_stride) for span in geometry.spans]
    return [packed(GEOMETRY, number, geometry.pages, geometry.total_bytes), np.array(spans, np.int64)]


def _table_record(geometry: int, number: int, table: ExtentTable) -> list[Part]:
    extents = [(one.first_page, one.pages, one.region, one.offset) for one in table.extents]
    return [packed(TABLE, geometry, number), np.array(extents, np.int64).reshape(-1, 4)]


def packed(kind: int, *numbers: int) -> bytes:
    """A record of its kind and numbers, or the beginning of one."""
    return struct.pack(f"<{1 + len(numbers)}q", kind, *numbers)


JOBS_BYTES = 4 << 20
"""Size of the ring of jobs: a quarter of a million pages of either side that are not read yet; more wait in the
daemon."""
ENDS_BYTES = 1 << 20
"""Size of the ring of ends: of every job of a model that can be in flight, were each to fail with a reason of 200
bytes."""


@dataclass(frozen=True, slots=True)
class Settings:
    """``kind``: ``shm`` or ``cuda``. ``device``: the name of a pretended device, or a GPU's UUID. ``place``: of
    the device among the node's. The rest is as in the configuration of the same name."""

    kind: str
    device: str
    device_bytes: int
    vmm: bool = False
    timeline_words: int = TIMELINE_WORDS
    slice_bytes: int = SLICE_BYTES
    load_limit: int = 0
    store_limit: int = 0
    fault_copies: float = 0.0
    log_level: str = "info"
    place: int = 0

    @property
    def rules(self) -> CopyRules:
        """Rules by which copies share the link."""
        return CopyRules(self.slice_bytes, self.load_limit, self.store_limit)


# Records from one process to another through shared memory, in order, with a futex in place of a socket.
#
#     word 0    position of the writer    (in units of 8 bytes, cyclic over 32 bits)
#     word 16   position of the reader    (in a cache line of its own)
#     page 1 .. the bytes, as a circle
#
# A record is cut into frames: 8 bytes (length, and whether more of the record follows), then the bytes, filled up to 8.
# The side that moves a word wakes its waiter; a wake without a waiter costs a microsecond. One process writes and one
# reads. Each side trusts memory that the other can write: both ends are the daemon's own.

HEAD_BYTES = 4096
UNIT = 8
WRITTEN, READ = 0, 16
_FRAME = struct.Struct("<II")
_MORE = 1
CYCLE = 0xFFFFFFFF
LOOK_S = 0.25
"""Longest delay after which a writer notices that it was closed, or a reader that it was stopped, seconds."""
Part = bytes | npt.NDArray[np.int64]


class Ring:
    """The shared memory of one ring. ``size_bytes``: of the circle, a power of two from 4096 on."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        assert size_bytes >= HEAD_BYTES
        assert not size_bytes & (size_bytes - 1)
        self.fd = fd
        self.size_bytes = size_bytes
        self._view = map_memfd(fd, HEAD_BYTES + size_bytes)
        self.words = words_of(self._view[:HEAD_BYTES])
        self._marks = self._view[:HEAD_BYTES].cast("I")
        self._circle = self._view[HEAD_BYTES:]

    @classmethod
    def make(cls, name: str, size_bytes: int) -> Ring:
        """Make an empty ring. Raises OSError."""
        return cls(sealed_memfd(name, HEAD_BYTES + size_bytes), size_bytes)

    def mark(self, word: int) -> int:
        """Position of a side: ``WRITTEN`` or ``READ``. What it did before is seen from here on."""
        come = self._marks[word]
        fence()
        return come

    def put_bytes(self, at: int, content: bytes | memoryview) -> None:
        """Copy into the circle, around its end."""
        at %= self.size_bytes
        first = min(len(content), self.size_bytes - at)
        if first == len(content):
            self._circle[at : at + first] = content
            return
        self._circle[at:] = content[:first]
        self._circle[: len(content) - first] = content[first:]

    def get_bytes(self, at: int, size_bytes: int) -> bytes:
        """Copy out of the circle, around its end."""
        at %= self.size_bytes
        first = min(size_bytes, self.size_bytes - at)
        if first == size_bytes:
            return bytes(self._circle[at : at + first])
        return bytes(self._circle[at:]) + bytes(self._circle[: size_bytes - first])

    def close(self) -> None:
        """Close the descriptor; the mapping goes with the last reference. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Writer:
    """Writes records, from any thread. What finds no room waits here, in order, until the reader has come further."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._at = ring.mark(WRITTEN)
        self._most = ring.size_bytes // 4
        self._waiting: deque[tuple[memoryview, bool]] = deque()
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_pumped = False

    def put(self, parts: Sequence[Part], *, wakes: bool = True) -> None:
        """Write one record of these parts, one after another; returns at once. Nothing after ``close``. ``wakes``:
        False lets the reader sleep until the next record, or for ``LOOK_S``."""
        content = memoryview(b"".join(part if isinstance(part, bytes) else part.data for part in parts))
        with self._lock:
            if self._is_closed:
                return
            wakes = wakes or bool(self._waiting)  # some of these wake
            for first in range(0, len(content) or 1, self._most):
                piece = content[first : first + self._most]
                self._waiting.append((piece, first + self._most < len(content)))
            self._write(wakes=wakes)
            if self._waiting and not self._is_pumped:
                self._is_pumped = True
                threading.Thread(target=self._pump, name="ring-pump", daemon=True).start()

    def close(self) -> None:
        """Drop records that found no room. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()
            wake(self._ring.words, READ)  # the word is the reader's

    def _pump(self) -> None:
        """Root of a thread that is there while something waits for room."""
        ring = self._ring
        while True:
            with self._lock:
                reached = ring.mark(READ)  # first: the reader may come further meanwhile
                self._write()
                if not self._waiting:
                    self._is_pumped = False
                    return
            wait_reached(ring.words, READ, reached + 1, time.monotonic() + LOOK_S)

    def _write(self, *, wakes: bool = True) -> None:
        ring, written = self._ring, self._at
        while self._waiting:
            piece, has_more = self._waiting[0]
            units = -(-(_FRAME.size + len(piece)) // UNIT)
            if ((self._at + units - ring.mark(READ)) & CYCLE) * UNIT > ring.size_bytes:
                break
            ring.put_bytes(self._at * UNIT, _FRAME.pack(len(piece), _MORE * has_more))
            ring.put_bytes(self._at * UNIT + _FRAME.size, piece)
            self._at = (self._at + units) & CYCLE
            self._waiting.popleft()
        if self._at == written:
            return
        if wakes or self._waiting:
            store_and_wake(ring.words, WRITTEN, self._at)
        else:
            store(ring.words, WRITTEN, self._at)


class Reader:
    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._at = ring.mark(READ)
        self._parts: list[bytes] = []
        self._is_stopped = False

    def wait(self) -> bool:
        """Sleep until something is there that was not read; False once it was stopped. What was taken before is done
        with now: the writer learns it here, and not before it is carried out, which begins at once."""
        words, target = self._ring.words, self._at + 1
        if self._ring.mark(READ) != self._at:
            store_and_wake(words, READ, self._at)
        while not self._is_stopped and not wait_reached(words, WRITTEN, target, time.monotonic() + LOOK_S):
            pass
        return not self._is_stopped

    def stop(self) -> None:
        """Wait for nothing more: the writer may have died in the middle of a record. Any thread."""
        self._is_stopped = True
        wake(self._ring.words, WRITTEN)

    def take(self) -> list[bytes]:
        ring, found = self._ring, []
        written = ring.mark(WRITTEN)
        while self._at != written:
            size_bytes, flags = _FRAME.unpack(ring.get_bytes(self._at * UNIT, _FRAME.size))
            self._parts.append(ring.get_bytes(self._at * UNIT + _FRAME.size, size_bytes))
            self._at = (self._at + -(-(_FRAME.size + size_bytes) // UNIT)) & CYCLE
            if not flags & _MORE:
                found.append(b"".join(self._parts))
                self._parts.clear()
        return found


# Connection for rare questions of the daemon to a mover: one at a time, an answer, descriptors beside them.
#
# A message is 8 bytes (length of its head, length of its body), the head as JSON, the raw body. Both sides are this
# package at one version, which the first answer tells; a mover of another one is refused.

log = logging.getLogger(__name__)

_SIZES = struct.Struct("<II")
MOST_HEAD_BYTES = 1 << 20
MOST_BODY_BYTES = 1 << 30
MOST_DESCRIPTORS = 4
_PIECE_BYTES = 1 << 20


class Message(NamedTuple):
    head: dict[str, Any]
    body: bytes = b""
    descriptors: tuple[int, ...] = ()


NOTHING = Message({})


def showing(handle: Handle, fd: int | None, **fields: Any) -> Message:
    """A message about memory that the other side may map."""
    head = {"kind": handle.kind, "size_bytes": handle.size_bytes} | fields
    return Message(head, handle.token, () if fd is None else (fd,))


def shown(message: Message) -> tuple[Handle, int | None]:
    """Memory of ``showing``, by a descriptor of this process."""
    handle = Handle(message.head["kind"], message.body, message.head["size_bytes"])
    return handle, message.descriptors[0] if message.descriptors else None


class MoverFault(RuntimeError):
    """Something broke in a mover, with these words: a bug, or a driver's fault."""


class MoverGone(Unavailable):
    """The mover does not answer any more: what it had is gone, and a new one is started."""


class ChannelClosed(ConnectionError):
    """The other side has ended."""


def send(connection: socket.socket, message: Message) -> None:
    """Send a message with copies of its descriptors. Raises OSError."""
    head = json.dumps(message.head, separators=(",", ":")).encode()
    sizes = _SIZES.pack(len(head), len(message.body))
    socket.send_fds(connection, [sizes], list(message.descriptors))  # 8 bytes and descriptors go whole
    connection.sendall(head + message.body)


def receive(connection: socket.socket, until: float | None = None) -> Message:
    """The next message, whole by a time of the monotonic clock. Raises ChannelClosed, OSError."""
    _wait_at_most(connection, until)
    first, descriptors, _, _ = socket.recv_fds(connection, _SIZES.size, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    try:
        if not first:
            raise ChannelClosed("the other side has closed")
        head_bytes, body_bytes = _SIZES.unpack(first + _exactly(connection, _SIZES.size - len(first), until))
        if head_bytes > MOST_HEAD_BYTES or body_bytes > MOST_BODY_BYTES:
            raise ChannelClosed(f"a message of {head_bytes} and {body_bytes} bytes: this is no mover's connection")
        try:
            head = json.loads(_exactly(connection, head_bytes, until))
        except ValueError as other:
            raise ChannelClosed(f"a message that is not JSON: this is no mover's connection ({other})") from other
        if not isinstance(head, dict):
            raise ChannelClosed("a message without names: this is no mover's connection")
        return Message(head, _exactly(connection, body_bytes, until), tuple(descriptors))
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _exactly(connection: socket.socket, size_bytes: int, until: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < size_bytes:
        _wait_at_most(connection, until)
        part = connection.recv(min(_PIECE_BYTES, size_bytes - len(parts)))
        if not part:
            raise ChannelClosed("the other side closed in the middle of a message")
        parts += part
    return bytes(parts)


def _wait_at_most(connection: socket.socket, until: float | None) -> None:
    if until is not None:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left)


class Channel:
    def __init__(self, connection: socket.socket, on_broken: Callable[[], None]) -> None:
        """``on_broken``: nothing more can be asked, and the other side is to end."""
        self._connection = connection
        self._on_broken = on_broken
        self._lock = threading.Lock()
        self._most_seconds = math.inf

    def ask(self, name: str, seconds: float, message: Message = NOTHING) -> Message:
        """Ask, and wait for the whole answer. Raises what the mover refused with, MoverFault, and MoverGone."""
        with self._lock:
            try:
                seconds = min(seconds, self._most_seconds)
                until = time.monotonic() + seconds
                self._connection.settimeout(seconds)
                send(self._connection, message._replace(head={"ask": name} | message.head))
                answer = receive(self._connection, until)
            except OSError as error:  # what comes late must not be taken for the answer to another question
                self._on_broken()
                raise MoverGone(f"the mover does not answer ({error}); it is started again by itself") from error
        if "refused" in answer.head:
            raise error_again(answer.head["refused"], answer.head["said"])
        return answer

    def hurry(self, seconds: float) -> None:
        """Wait no longer than ``seconds`` for what is asked now, and for any answer from now on: a side that has not
        answered by then is broken off."""
        self._most_seconds = seconds
        if self._lock.acquire(timeout=seconds):
            self._lock.release()
        else:
            self._on_broken()

    def close(self) -> None:
        """End the questions, by which a mover learns to end. Idempotent."""
        with contextlib.suppress(OSError):  # the other side went first
            self._connection.shutdown(socket.SHUT_WR)

    def break_off(self) -> None:
        """Wait for nothing more from the other side, which may never close its own. Idempotent."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


def answer_all(connection: socket.socket, answer: Callable[[Message], Message]) -> None:
    """Answer questions until the other side closes. An error of ``answer`` goes back as its answer."""
    while True:
        try:
            asked = receive(connection)
        except (ChannelClosed, ConnectionError):
            return
        try:
            told = answer(asked)
        except Exception as refused:
            if not isinstance(refused, CacheError):
                log.exception("mover_answer_broke question=%s", asked.head.get("ask"))
            code, said = told_as(refused)
            told = Message({"refused": code, "said": said})
        finally:
            for descriptor in asked.descriptors:
                os.close(descriptor)
        try:
            send(connection, told)
        except ConnectionError:
            return


def told_as(error: Exception) -> tuple[str, str]:
    """An error as the name of its code and its words; what is none of callers' has no code."""
    return error.code.value if isinstance(error, CacheError) else "", str(error) or type(error).__name__


def error_again(code: str, said: str) -> Exception:
    """Error that ``told_as`` has encoded; one without a code is a MoverFault."""
    return BY_CODE[ErrorCode(code)].from_message(said) if code else MoverFault(said)
