"""Threads that read loans, a part of them for each peer; and a stream of a loan, read by one of them.

A stream reads several objects with one call of the kernel's where they come quickly: each call costs a turn at the
interpreter, which the streams of all loans and the ledger share.
"""

from __future__ import annotations

import itertools
import math
import socket
import struct
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cachesvc.memory.extents import yield_to_callers
from cachesvc.peer.fleet import Loan
from cachesvc.storage.objects import HEADER_BYTES
from cachesvc.storage.seam import Item
from cachesvc.telemetry import events

# The stream of bytes between two daemons, on a socket of its own.
#
#     borrower    magic 8 | secret 32
#                 count u32 | count x (number u32)                            again and again
#     lender      number u32 | status u32 | payload bytes u64 | header 256 | payload        for each, in this order
#
# The status is OK: a lender that is asked for what it does not lend ends the stream, as either side does by closing it.
# A loan is read by several streams at once. Sockets block, with time limits of the kernel's: a whole object takes one
# call.

MAGIC = b"cspeer\x02\n"
SECRET_BYTES = 32
HELLO = struct.Struct(f"<8s{SECRET_BYTES}s")
COUNT = struct.Struct("<I")
ANSWER = struct.Struct("<IIQ")
OK = 0
MOST_NUMBERS = 1 << 16
"""Most numbers in one request."""
STREAMS = 8
"""Most streams of one loan: each is limited by a processor on either side."""
LOOKS = 4
"""Calls in which a peer may take nothing, one after another, until it is given up: each has its part of the time."""
_MOST_PIECES = 512
"""Most pieces of one call; the kernel takes 1,024."""
_TIME = struct.Struct("@ll")


class StreamEnded(OSError):
    """The other side is not there any more, or does not speak as it should."""


def send_pieces(
    stream: socket.socket,
    pieces: Sequence[memoryview | bytes],
    seconds: float,
    taken: Callable[[], object] = lambda: None,
) -> None:
    """Send all pieces to a peer that takes something every ``seconds``. ``taken``: called when it has, several times in
    ``seconds`` where these are long. Raises OSError (TimeoutError)."""
    left, looks = [memoryview(piece) for piece in pieces], LOOKS
    _limit(stream, socket.SO_SNDTIMEO, seconds / LOOKS)
    while left:
        try:
            count = stream.sendmsg(left[:_MOST_PIECES])  # after its time it answers what it has sent
        except BlockingIOError as error:
            looks -= 1
            if not looks:
                raise TimeoutError("the peer takes nothing more") from error
            continue
        looks = LOOKS
        taken()
        _advance(left, count)


def receive_all(stream: socket.socket, left: list[memoryview], deadline: float) -> None:
    """Fill the pieces that are ``left`` by ``deadline``, monotonic seconds; what remains of them after an error is
    ``left``, too. Raises OSError (TimeoutError); nothing is written after."""
    left[:] = filter(len, left)
    while left:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the peer was too slow")
        _limit(stream, socket.SO_RCVTIMEO, seconds)
        try:
            count = stream.recvmsg_into(left[:_MOST_PIECES], 0, socket.MSG_WAITALL)[0]
        except BlockingIOError as error:
            raise TimeoutError("the peer was too slow") from error
        if not count:
            raise StreamEnded("the peer has closed the stream")
        _advance(left, count)


def _limit(stream: socket.socket, option: int, seconds: float) -> None:
    """Set a time limit of the kernel's, which wakes no interpreter for a part of an object. Zero would be none."""
    whole = max(1, math.ceil(seconds * 1e6))
    stream.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(whole // 1_000_000, whole % 1_000_000))


def _advance(left: list[memoryview], count: int) -> None:
    """Take ``count`` bytes off the front of some pieces."""
    whole = 0
    while whole < len(left) and count >= len(left[whole]):
        count -= len(left[whole])
        whole += 1
    del left[:whole]
    if count:
        left[0] = left[0][count:]


def receive(stream: socket.socket, size_bytes: int, deadline: float) -> bytes:
    """Receive some bytes. Raises OSError."""
    content = bytearray(size_bytes)
    receive_all(stream, [memoryview(content)], deadline)
    return bytes(content)


def pack_numbers(numbers: Sequence[int]) -> bytes:
    return COUNT.pack(len(numbers)) + struct.pack(f"<{len(numbers)}I", *numbers)


def receive_numbers(stream: socket.socket, deadline: float) -> tuple[int, ...]:
    """Receive a request. Raises OSError."""
    (count,) = COUNT.unpack(receive(stream, COUNT.size, deadline))
    if not 0 < count <= MOST_NUMBERS:
        raise StreamEnded(f"a request for {count} objects")
    return struct.unpack(f"<{count}I", receive(stream, 4 * count, deadline))


__all__ = ["ANSWER", "HEADER_BYTES", "HELLO", "MAGIC", "OK", "SECRET_BYTES", "StreamEnded"]


PART = STREAMS
"""Threads of each peer, whatever the others do: one large loan is read at once."""
SHARED = 2 * STREAMS
"""Threads for more than these parts, the first come first: a peer alone has three large loans read at once."""
MOST_THREADS = 256
MOST_WAITING = 1024
"""Most streams of a peer that wait for a thread."""
SILENT_SECONDS = 1.0
"""Time without a byte after which a stream is silent, seconds. Its peer gets no thread for another loan then."""
LOOK_SECONDS = 0.25
"""Interval at which streams that wait are looked at again, seconds."""
CONNECT_SECONDS = 3.5
"""Time limit for a connection, seconds: its first packet, where it is lost, is sent again after 1 and after 3 s."""
GROUP_BYTES = 8 << 20
"""Bytes that one call brings: fewer objects have come when it fails, and a call for more saves nothing."""
QUICK_SECONDS = 0.005
"""Time of a call after which the next one is for twice as many objects, seconds; after a longer one it is for one."""

Came = Callable[[Sequence[int]], None]
"""Called with the indexes of objects that have come, and are not written to any more."""


Asked = tuple[int, Item, int]
"""An object that has been asked for: its index, item, and number."""


@dataclass(eq=False)
class ReadJob:
    """Job for a thread: ``run`` does it, or ``refuse`` where it is not begun by ``deadline``, monotonic seconds.
    ``peer``: that it waits for. ``loan``: that it reads; None for a question. ``heard_at``: when its peer was heard
    last."""

    peer: object
    loan: object
    run: Callable[[], None]
    refuse: Callable[[], None]
    deadline: float
    heard_at: float = 0.0


class Readers:
    """Threads for jobs that wait for peers. One peer's jobs cannot take the part of another; see PART, SHARED.
    ``clock``: monotonic seconds. Any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: OrderedDict[object, deque[ReadJob]] = OrderedDict()
        self._active: dict[object, list[ReadJob]] = {}
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._is_open = False
        self._changed = threading.Condition()

    def start(self) -> None:
        self._is_open = True

    def add(self, job: ReadJob) -> None:
        """Run or refuse a job, later; refuse it at once where too many of its peer wait."""
        with self._changed:
            waiting = self._waiting.get(job.peer, deque())
            is_taken = self._is_open and len(waiting) < MOST_WAITING
            if is_taken:
                self._waiting[job.peer] = waiting
                waiting.append(job)
                self._wake()
        if not is_taken:
            job.refuse()

    def close(self, until: float) -> None:
        """Refuse what waits, and wait for what runs until then, monotonic seconds. Idempotent."""
        with self._changed:
            self._is_open = False
            waiting, self._waiting = self._waiting, OrderedDict()
            self._changed.notify_all()
        for jobs in waiting.values():
            for job in jobs:
                job.refuse()
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _wake(self) -> None:
        """Under the lock: have a thread look at the jobs that wait."""
        if self._idle:
            self._changed.notify()
        elif len(self._threads) <= MOST_THREADS:  # one more than jobs: it refuses those that wait for too long
            thread = threading.Thread(target=self._work, name=f"peer-read-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        yield_to_callers()
        while True:
            with self._changed:
                while (job := self._take()) is None:
                    if not self._is_open:
                        return
                    self._idle += 1
                    self._changed.wait(LOOK_SECONDS if self._waiting else None)
                    self._idle -= 1
                is_late = job.deadline <= self._clock()
                if not is_late:
                    job.heard_at = self._clock()
                    self._active.setdefault(job.peer, []).append(job)
                if self._waiting:
                    self._wake()
            try:
                job.refuse() if is_late else job.run()
            except Exception:  # noqa: BLE001 - the root of a thread: the next job is another's
                events.failure("peer_job_broke")
            if not is_late:
                self._end(job)

    def _end(self, job: ReadJob) -> None:
        with self._changed:
            active = self._active[job.peer]
            active.remove(job)
            if not active:
                del self._active[job.peer]

    def _take(self) -> ReadJob | None:
        """Under the lock: the next job that may begin or is too late, of one peer after another."""
        now = self._clock()
        running = sum(map(len, self._active.values()))
        for peer, jobs in self._waiting.items():
            if jobs[0].deadline > now and not (running < MOST_THREADS and self._may_begin(jobs[0], now)):
                continue
            job = jobs.popleft()
            self._waiting.move_to_end(peer)
            if not jobs:
                del self._waiting[peer]
            return job
        return None

    def _may_begin(self, job: ReadJob, now: float) -> bool:
        active = self._active.get(job.peer, [])
        is_silent = any(each.loan is not None and now - each.heard_at >= SILENT_SECONDS for each in active)
        if is_silent and all(each.loan is not job.loan for each in active):
            return False
        beyond = sum(max(0, len(each) - PART) for each in self._active.values())
        return len(active) < PART or beyond < SHARED


class LoanStream:
    """One stream of a loan. ``left``: objects that have not come. ``came``: see Came. ``is_wanted``: looked at before
    each few objects."""

    def __init__(
        self,
        loan: Loan,
        left: deque[Asked],
        deadline: float,
        came: Came,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self._loan = loan
        self._left = left
        self._deadline = deadline
        self._came = came
        self._is_wanted = is_wanted
        self._most = 1

    def read(self) -> None:
        """Read all of them, while they are wanted; what is left has not come. Raises OSError."""
        if not self._is_wanted():
            return
        limit = min(self._deadline - time.monotonic(), CONNECT_SECONDS)
        if limit <= 0:
            raise TimeoutError("there is no time left")
        with socket.create_connection((self._loan.host, self._loan.port), timeout=limit) as stream:
            stream.settimeout(None)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            numbers = pack_numbers([number for _, _, number in self._left])
            send_pieces(stream, [HELLO.pack(MAGIC, self._loan.secret) + numbers], limit)
            answer = receive(stream, ANSWER.size, self._deadline)
            while self._left and self._is_wanted():
                answer = self._read_some(stream, answer)

    def _read_some(self, stream: socket.socket, answer: bytes) -> bytes:
        """Read the next few objects, the first of which is behind ``answer``; return the answer behind the last one.
        Those that have come whole are reported, whatever befalls the others."""
        group = self._next_group()
        self._check(answer, group[0])
        behind = [bytearray(ANSWER.size) for _ in range(min(len(group), len(self._left) - 1))]
        pieces: list[memoryview] = []
        for at, (_, item, _) in enumerate(group):
            pieces += (item.head[:HEADER_BYTES], *item.pages, *(memoryview(answer) for answer in behind[at : at + 1]))
        whole, began = sum(map(len, pieces)), time.monotonic()
        try:
            receive_all(stream, pieces, self._deadline)
            is_quick = time.monotonic() - began < QUICK_SECONDS
            self._most = min(2 * self._most, len(self._left)) if is_quick else 1
        finally:
            self._report(group, [answer, *behind], whole - sum(map(len, pieces)))
        return bytes(behind[-1]) if behind else b""

    def _next_group(self) -> list[Asked]:
        group, size_bytes = [self._left[0]], self._left[0][1].payload_bytes
        for each in itertools.islice(self._left, 1, self._most):
            size_bytes += each[1].payload_bytes
            if size_bytes > GROUP_BYTES:
                break
            group.append(each)
        return group

    def _report(self, group: Sequence[Asked], answers: Sequence[bytes | bytearray], received: int) -> None:
        """Report the objects that are whole after ``received`` bytes. Raises StreamEnded for an answer that is wrong:
        what lies behind it is not what it was read as."""
        indexes: list[int] = []
        try:
            for each, answer in zip(group, answers, strict=False):
                received -= HEADER_BYTES + each[1].payload_bytes
                if received < 0:
                    break
                if indexes:
                    self._check(answer, each)
                received -= ANSWER.size
                indexes.append(each[0])
        finally:
            for _ in indexes:
                self._left.popleft()
            self._came(indexes)

    def _check(self, answer: bytes | bytearray, asked: Asked) -> None:
        """Raises StreamEnded for another answer than that the object follows."""
        _, item, number = asked
        if ANSWER.unpack(answer) != (number, OK, item.payload_bytes):
            raise StreamEnded("the peer answered something else")
