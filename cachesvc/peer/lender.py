"""Sends lent pages over TCP: a thread accepts, and each stream has one that sends.

A stream for which there is no thread waits for its turn, one address after another: its borrower would take a closed
one for a node that is broken.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from functools import partial

from cachesvc.memory.mapped import yield_to_callers
from cachesvc.model.errors import Unavailable
from cachesvc.peer.desk import Lent, LentObject, LoanDesk, cut
from cachesvc.peer.wire import (
    ANSWER,
    HELLO,
    MAGIC,
    OK,
    STREAMS,
    StreamEnded,
    receive,
    receive_numbers,
    send_pieces,
)
from cachesvc.storage.header import HEADER_BYTES, Digest, require_digest, write_header
from cachesvc.storage.seam import Item
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
        """Cut all streams. Idempotent."""
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
        """Root of the thread."""
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
        """Root of a stream's thread."""
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
        """Send one object, from pages that stay until it is sent. Raises OSError."""
        found = lent.objects[number] if number < len(lent.objects) else None
        if found is None:
            raise StreamEnded(f"object {number} was not lent")
        with self._desk.sending(lent, number) as may_send:
            if not may_send:
                raise StreamEnded("the lease is over")
            self._send_object(stream, lent, number, found)

    def _send_object(self, stream: socket.socket, lent: Lent, number: int, found: LentObject) -> None:
        """Send an object. Each part of it that the borrower takes renews the lease. Raises OSError."""
        assert self._digest is not None
        size_bytes = sum(map(len, found.pages))
        head = bytearray(HEADER_BYTES)
        write_header(self._digest, Item(found.name, memoryview(head), found.pages, found.parent))
        pieces: list[memoryview | bytes] = [ANSWER.pack(number, OK, size_bytes) + head, *found.pages]
        send_pieces(stream, pieces, min(STUCK_SECONDS, lent.seconds), partial(self._desk.renew, lent))
        with self._lock:
            self.sent_bytes += size_bytes
