"""Health of another daemon: what it answers, and what it sends, each with a pause of its own after a failure.

A failure counts once: those of calls that began before the pause that it set was over have the same cause.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable

from cachesvc.peer.fleet.control import PeerControl
from cachesvc.peer.fleet.digest import PeerDigest

FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 30.0
LONGEST_PROBE_PAUSE_SECONDS = 1.0
"""Longest pause between two probes of a peer that does not answer, seconds: a probe holds up no request."""
QUICK_SECONDS = 0.05
"""Time within which a call has failed at once, such as to a daemon that is not started yet, seconds."""
WARN_SECONDS = 300.0
"""Between two warnings that certificates are not trusted."""
ABSENT_SECONDS = 1.0
"""Time for which an absent prefix is not asked for again, seconds."""
MOST_ABSENT = 4096


class BackOff:
    """Pause after failures of one kind of call, twice as long each time. Not thread-safe. ``pause``: the length of the
    last one, seconds; 0 from a success on."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.pause = 0.0
        self._until = float("-inf")

    @property
    def left(self) -> float:
        """Seconds until calls may begin; 0: they may begin now."""
        return max(0.0, self._until - self._clock())

    @property
    def has_failed(self) -> bool:
        """True from a failure on until a call succeeds."""
        return self.pause > 0

    def failed(self, began: float) -> bool:
        """Begin a pause after the failure of a call that began then. False, without effect, for a call that began
        before the last pause was over."""
        if began < self._until:
            return False
        self.pause = min(max(2 * self.pause, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
        self._until = self._clock() + self.pause
        return True

    def succeeded(self) -> None:
        """End the pause. Calls that began before this one count neither for the peer nor against it."""
        if self.pause:
            self.pause, self._until = 0.0, self._clock()


class Peer:
    """One other daemon, as this one sees it. Any thread. ``counts``: answers and failures by kind.
    ``distrust``: why the two do not trust each other's certificates; empty once the peer has answered since.
    ``is_self``: it is this daemon. ``down_since``: when it stopped answering; None while it answers."""

    def __init__(self, control: PeerControl, clock: Callable[[], float]) -> None:
        self.control = control
        self.counts: Counter[str] = Counter()
        self.digest = PeerDigest()
        self.epoch = 0
        self.reason = ""
        self.distrust = ""
        self.is_self = False
        self.down_since: float | None = None
        self._warn_at = 0.0
        self._clock = clock
        self._answers = BackOff(clock)
        self._bytes = BackOff(clock)
        self._probe_at = 0.0
        self._is_silent = False
        self._absent: OrderedDict[bytes, float] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def pause_left(self) -> float:
        """Seconds for which the peer is not asked to lend; 0: it may be asked now."""
        return max(self._answers.left, self._bytes.left)

    @property
    def is_usable(self) -> bool:
        """False during a pause."""
        return not self.pause_left

    @property
    def is_up(self) -> bool:
        """True where any request may ask it: no call waited for it in vain since it answered last. One that did is
        asked by probes, and for requests that name it."""
        return not self.is_self and not self._is_silent and self.is_usable

    @property
    def answers(self) -> bool:
        """False from a call without an answer on until it answers again."""
        return not self._answers.has_failed

    def lacks(self, key: bytes) -> bool:
        """True where a recent question found nothing that begins with this block."""
        with self._lock:
            return self._absent.get(key, 0.0) > self._clock()

    def answered(self, epoch: int = 0) -> None:
        """Note an answer in time. Another ``epoch`` (0: unknown) is another life, which may have what the last one
        lacked."""
        with self._lock:
            self._answers.succeeded()
            self.distrust, self.down_since, self._is_silent = "", None, False
            if epoch not in (0, self.epoch):
                self.epoch = epoch
                self._absent.clear()

    def sent(self) -> None:
        """Note that a stream has brought all that it was asked for, and all of it was right."""
        with self._lock:
            self._bytes.succeeded()

    def had_nothing(self, key: bytes) -> None:
        """Note that the peer lacks the blocks from this one on."""
        with self._lock:
            self.counts["absent"] += 1
            self._absent[key] = self._clock() + ABSENT_SECONDS
            self._absent.move_to_end(key)
            while len(self._absent) > MOST_ABSENT:
                self._absent.popitem(last=False)

    def distrusts(self, reason: str) -> bool:
        """Note that a certificate is not trusted, the peer's here or ours there. True where it is time to warn
        again."""
        with self._lock:
            is_new, self.distrust = not self.distrust, reason
            is_due = is_new or self._clock() >= self._warn_at
            if is_due:
                self._warn_at = self._clock() + WARN_SECONDS
            return is_due

    def did_not_answer(self, reason: str, began: float) -> bool:
        """Note that a call that began then had no answer. True where it counts: see BackOff."""
        with self._lock:
            counts = self._note(self._answers, reason, began)
            if counts:
                now = self._clock()
                self.down_since = now if self.down_since is None else self.down_since
                self._is_silent |= now - began >= QUICK_SECONDS
            return counts

    def did_not_send(self, reason: str, began: float) -> bool:
        """Note that a loan of then was not sent as it should be. True where it counts: see BackOff."""
        with self._lock:
            return self._note(self._bytes, reason, began)

    def _note(self, back_off: BackOff, reason: str, began: float) -> bool:
        self.counts["failed"] += 1
        self.reason = reason
        return back_off.failed(began)

    def wants_probe(self) -> bool:
        """True once it is time to try a peer that does not answer, or that was never tried; that is noted as done."""
        with self._lock:
            now = self._clock()
            if (self.answers and self._probe_at) or now < self._probe_at:
                return False
            self._probe_at = now + min(self._answers.pause or FIRST_PAUSE_SECONDS, LONGEST_PROBE_PAUSE_SECONDS)
            return True
