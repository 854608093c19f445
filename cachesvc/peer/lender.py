"""Sends lent pages over TCP: a thread accepts, and each stream has one that sends.

A stream for which there is no thread waits for its turn, one address after another: its borrower would take a closed
one for a node that is broken.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from cachesvc.memory.extents import yield_to_callers
from cachesvc.model.errors import Unavailable
from cachesvc.peer.reading import (
    ANSWER,
    HELLO,
    MAGIC,
    OK,
    SECRET_BYTES,
    STREAMS,
    StreamEnded,
    receive,
    receive_numbers,
    send_pieces,
)
from cachesvc.storage.objects import HEADER_BYTES, Digest, require_digest, write_header
from cachesvc.storage.seam import Item, ObjectName
from cachesvc.storage.workers import nothing
from cachesvc.telemetry import events

MOST_STREAMS = 128
MOST_STREAMS_OF_ONE = 4 * STREAMS
"""Most streams of one address: a borrower has three quarters of them at a time."""
MOST_WAITING = 512
MOST_WAITING_OF_ONE = 128
"""Most streams that wait for their turn, of all and of one address: each is a descriptor."""
PAUSE_SECONDS = 0.1
"""Pause before the next attempt where no descriptor is left, seconds."""
HELLO_SECONDS = 5.0
"""Time limit for a secret, seconds: a connection without one does not keep a place."""
SILENT_SECONDS = 60.0
"""Between two requests of a stream: its lease ends it sooner."""
STUCK_SECONDS = 10.0
"""Time limit of a borrower that takes nothing more, seconds."""


class Lender:
    """Listens on ``host``:``port`` (0: any) from ``start`` to ``close``."""

    def __init__(self, desk: LoanDesk, host: str, port: int, digest: Callable[[], Digest] = require_digest) -> None:
        self.port = port
        self.sent_bytes = 0
        self.refused = 0
        self._desk = desk
        self._host = host
        self._make_digest = digest
        self._digest: Digest | None = None
        self._listener: socket.socket | None = None
        self._closing = threading.Event()
        self._streams: dict[socket.socket, str] = {}
        self._waiting: OrderedDict[str, deque[socket.socket]] = OrderedDict()
        self._lock = threading.Lock()
        self._acceptor = threading.Thread(target=self._accept, name="peer-accept", daemon=True)

    def start(self) -> None:
        """Raises Unavailable where the address cannot be had."""
        self._digest = self._make_digest()
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            self._listener = socket.create_server((self._host, self.port), family=family)
        except OSError as error:
            raise Unavailable(
                f"cannot listen on {self._host}:{self.port} for other nodes: {error}; choose another peer_data_port"
            ) from error
        self.port = int(self._listener.getsockname()[1])
        self._acceptor.start()

    def close(self) -> None:
        self._closing.set()
        listener, self._listener = self._listener, None
        if listener is not None:
            cut(listener)
            listener.close()
            self._acceptor.join()
        with self._lock:
            streams = list(self._streams)
            waiting, self._waiting = self._waiting, OrderedDict()
        for stream in streams:
            cut(stream)
        for some in waiting.values():
            for stream in some:
                stream.close()

    def _accept(self) -> None:
        listener = self._listener
        while listener is not None:
            try:
                stream, address = listener.accept()
            except OSError:  # closed, or out of descriptors
                if self._closing.wait(PAUSE_SECONDS):
                    return
                continue
            with self._lock:
                waiting = self._waiting.get(address[0], deque())
                all_waiting = sum(map(len, self._waiting.values()))
                may_wait = len(waiting) < MOST_WAITING_OF_ONE and all_waiting < MOST_WAITING
                may_wait &= not self._closing.is_set()
                if may_wait:
                    self._waiting[address[0]] = waiting
                    waiting.append(stream)
            if not may_wait:
                self.refused += 1
                stream.close()
            self._begin_next()

    def _begin_next(self) -> None:
        """Begin to serve the next stream that waits, where there is room."""
        with self._lock:
            held = Counter(self._streams.values())
            free = (host for host in self._waiting if held[host] < MOST_STREAMS_OF_ONE)
            host = next(free, None) if len(self._streams) < MOST_STREAMS else None
            if host is None:
                return
            stream = self._waiting[host].popleft()
            self._waiting.move_to_end(host)
            if not self._waiting[host]:
                del self._waiting[host]
            self._streams[stream] = host
        threading.Thread(target=self._serve, args=(stream,), name="peer-send", daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        yield_to_callers()
        try:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            lent = self._greet(stream)
            while lent is not None:
                numbers = receive_numbers(stream, time.monotonic() + SILENT_SECONDS)
                for number in numbers:
                    self._send(stream, lent, number)
        except OSError:  # the borrower has what it wanted, or is gone; or the lease is over
            return
        except Exception:  # noqa: BLE001 - the root of a thread
            events.failure("peer_stream_broke")
        finally:
            with self._lock:
                del self._streams[stream]
            stream.close()
            self._begin_next()

    def _greet(self, stream: socket.socket) -> Lent | None:
        magic, secret = HELLO.unpack(receive(stream, HELLO.size, time.monotonic() + HELLO_SECONDS))
        lent = self._desk.open(secret, stream) if magic == MAGIC else None
        if lent is None:
            self.refused += 1
            events.event("peer_stream_refused")
        return lent

    def _send(self, stream: socket.socket, lent: Lent, number: int) -> None:
        """Send one object, from pages that stay until it is sent. Each part of it that the borrower takes renews the
        lease. Raises OSError."""
        assert self._digest is not None
        found = lent.objects[number] if number < len(lent.objects) else None
        if found is None:
            raise StreamEnded(f"object {number} was not lent")
        with self._desk.sending(lent, number) as may_send:
            if not may_send:
                raise StreamEnded("the lease is over")
            size_bytes = sum(map(len, found.pages))
            head = bytearray(HEADER_BYTES)
            write_header(self._digest, Item(found.name, memoryview(head), found.pages, found.parent))
            pieces: list[memoryview | bytes] = [ANSWER.pack(number, OK, size_bytes) + head, *found.pages]
            send_pieces(stream, pieces, min(STUCK_SECONDS, lent.seconds), partial(self._desk.renew, lent))
        with self._lock:
            self.sent_bytes += size_bytes


# Loans of this daemon: pinned pages by lease, while they are wanted, and until the last sender has finished.
#
# A lease is renewed by a heartbeat, and by each byte that its borrower takes: a transfer may last longer than its
# lease, while a reader that stands still loses it. One that is given back or lapses is over at once: its streams are
# cut. ``quiet`` is called for it when the last sender has finished with its pages; only then may they be used for
# anything else.


@dataclass(frozen=True, slots=True)
class LentObject:
    """An object and the host pages that hold its payload, one after another. ``parent``: the key of the block above its
    own; empty for none."""

    name: ObjectName
    pages: tuple[memoryview, ...]
    parent: bytes = b""


@dataclass(eq=False)
class Lent:
    """A lease. ``objects``: by number, None for those that are not here. ``seconds``: it lasts without a sign of its
    borrower, from the last one ``until``, monotonic seconds. ``ready``: leading objects whose bytes are there, and may
    be sent. ``quiet``: see LoanDesk. ``streams``: all that its secret has opened."""

    lease: int
    secret: bytes
    objects: tuple[LentObject | None, ...]
    seconds: float
    until: float
    ready: int
    quiet: Callable[[int], None]
    is_over: bool = False
    senders: int = 0
    streams: list[socket.socket] = field(default_factory=list)


class LoanDesk:
    """Leases of lent objects, by number. Thread-safe. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lent: dict[int, Lent] = {}
        self._lock = threading.Condition()

    def lend(
        self,
        objects: Sequence[LentObject | None],
        seconds: float,
        ready: int | None = None,
        quiet: Callable[[int], None] = nothing,
    ) -> Lent:
        """A new lease, whose secret is good for ``STREAMS`` streams. ``ready``: see Lent; None: all. ``quiet``: called
        once with its number, from any thread."""
        lease = secrets.randbits(63)  # another daemon's, or of another life, is none of ours
        secret, most = secrets.token_bytes(SECRET_BYTES), len(objects) if ready is None else ready
        lent = Lent(lease, secret, tuple(objects), seconds, self._clock() + seconds, most, quiet)
        with self._lock:
            self._lent[lease] = lent
        return lent

    def __len__(self) -> int:
        return len(self._lent)

    def beat(self, lease: int) -> bool:
        """Renew a lease whose borrower wants it. False for one that is over."""
        lent = self._lent.get(lease)
        return lent is not None and self.renew(lent)

    def renew(self, lent: Lent) -> bool:
        """Renew a lease, from any thread. False for one that is over."""
        with self._lock:
            if not lent.is_over:
                lent.until = self._clock() + lent.seconds
            return not lent.is_over

    def fill(self, lease: int, ready: int) -> None:
        """Have the first ``ready`` objects of a loan sent: their bytes are there."""
        with self._lock:
            lent = self._lent.get(lease)
            if lent is not None:
                lent.ready = ready
                self._lock.notify_all()

    def give_back(self, lease: int) -> None:
        with self._lock:
            lent = self._lent.get(lease)
        if lent is not None:
            self._end(lent)

    def expire(self) -> None:
        """End loans that neither a heartbeat nor a stream has renewed in time. Called periodically."""
        now = self._clock()
        with self._lock:
            late = [lent for lent in self._lent.values() if not lent.is_over and lent.until <= now]
        for lent in late:
            self._end(lent)

    def end_all(self) -> None:
        """End all loans, at the daemon's end."""
        for lease in list(self._lent):
            self.give_back(lease)

    def open(self, secret: bytes, stream: socket.socket) -> Lent | None:
        """The lease of a stream's secret; None where nothing is lent for it, or enough streams had it before."""
        with self._lock:
            found = None
            for lent in self._lent.values():
                if hmac.compare_digest(lent.secret, secret):
                    found = lent
            if found is None or found.is_over or len(found.streams) >= STREAMS:
                return None
            found.streams.append(stream)
            return found

    @contextmanager
    def sending(self, lent: Lent, number: int) -> Iterator[bool]:
        """Hold a loan's pages while an object of it is sent, once its bytes are there. False where the loan is over:
        nothing may be sent."""
        with self._lock:
            self._lock.wait_for(lambda: lent.is_over or number < lent.ready)
            may_send = not lent.is_over
            lent.senders += may_send
        try:
            yield may_send
        finally:
            if may_send:
                with self._lock:
                    lent.senders -= 1
                    is_quiet = self._is_quiet(lent)
                if is_quiet:
                    lent.quiet(lent.lease)

    def _end(self, lent: Lent) -> None:
        with self._lock:
            if lent.is_over:
                return
            lent.is_over = True
            self._lock.notify_all()
            streams = list(lent.streams)
            is_quiet = self._is_quiet(lent)
        for stream in streams:
            cut(stream)
        if is_quiet:
            lent.quiet(lent.lease)

    def _is_quiet(self, lent: Lent) -> bool:
        """Under the lock: true once no stream sends from its pages, and none will; it is forgotten then."""
        is_quiet = lent.is_over and not lent.senders and lent.lease in self._lent
        if is_quiet:
            del self._lent[lent.lease]
        return is_quiet


def cut(stream: socket.socket) -> None:
    """Cut a stream: its sender and its receiver get an error at once."""
    try:
        stream.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has ended already
        return
