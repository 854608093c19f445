"""Loans of this daemon: pinned pages by lease, while they are wanted, and until the last sender has finished.

A lease is renewed by a heartbeat, and by each byte that its borrower takes: a transfer may last longer than its lease,
while a reader that stands still loses it. One that is given back or lapses is over at once: its streams are cut.
``quiet`` is called for it when the last sender has finished with its pages; only then may they be used for anything
else.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from cachesvc.peer.wire import SECRET_BYTES, STREAMS
from cachesvc.storage.seam import ObjectName


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
    be sent. ``streams``: all that its secret has opened."""

    lease: int
    secret: bytes
    objects: tuple[LentObject | None, ...]
    seconds: float
    until: float
    ready: int
    is_over: bool = False
    senders: int = 0
    streams: list[socket.socket] = field(default_factory=list)


class LoanDesk:
    """Thread-safe. ``quiet(lease)`` is called once for each lease, from any thread."""

    def __init__(self, clock: Callable[[], float], quiet: Callable[[int], None]) -> None:
        self._clock = clock
        self._quiet = quiet
        self._lent: dict[int, Lent] = {}
        self._lock = threading.Condition()
        self.lapsed = 0

    def lend(self, objects: Sequence[LentObject | None], seconds: float, ready: int | None = None) -> Lent:
        """A new lease, whose secret is good for ``STREAMS`` streams. ``ready``: see Lent; None: all."""
        with self._lock:
            lease = secrets.randbits(63)  # another daemon's, or of another life, is none of ours
            secret = secrets.token_bytes(SECRET_BYTES)
            most = len(objects) if ready is None else ready
            lent = Lent(lease, secret, tuple(objects), seconds, self._clock() + seconds, most)
            self._lent[lent.lease] = lent
        return lent

    def __len__(self) -> int:
        return len(self._lent)

    def knows(self, lease: int) -> bool:
        """True while pages are lent under it, or still being sent."""
        return lease in self._lent

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
        """End a loan. Idempotent."""
        with self._lock:
            lent = self._lent.get(lease)
        if lent is not None:
            self._end(lent)

    def expire(self) -> None:
        """End loans that neither a heartbeat nor a stream has renewed in time. Called periodically."""
        now = self._clock()
        with self._lock:
            late = [lent for lent in self._lent.values() if not lent.is_over and lent.until <= now]
            self.lapsed += len(late)
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
                    self._quiet(lent.lease)

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
            self._quiet(lent.lease)

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
