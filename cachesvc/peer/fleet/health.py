"""Health of another daemon: it is not asked for a while after it failed, twice as long each time."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable

from cachesvc.peer.fleet.control import PeerControl
from cachesvc.peer.fleet.digest import PeerDigest

FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 30.0
WARN_SECONDS = 300.0
"""Between two warnings that certificates are not trusted."""
ABSENT_SECONDS = 1.0
"""Time for which an absent prefix is not asked for again, seconds."""
MOST_ABSENT = 4096


class Peer:
    """One other daemon, as this one sees it. Any thread. ``counts``: of what became of asking, by outcome.
    ``distrust``: why the two do not trust each other's certificates; empty where it has answered since."""

    def __init__(self, control: PeerControl, clock: Callable[[], float]) -> None:
        self.control = control
        self.counts: Counter[str] = Counter()
        self.digest = PeerDigest()
        self.epoch = 0
        self.reason = ""
        self.distrust = ""
        self._warn_at = 0.0
        self._clock = clock
        self._pause = 0.0
        self._until = 0.0
        self._absent: OrderedDict[bytes, float] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def is_usable(self) -> bool:
        """False during a pause."""
        return self._clock() >= self._until

    def lacks(self, key: bytes) -> bool:
        """True where a recent question found nothing that begins with this block."""
        with self._lock:
            return self._absent.get(key, 0.0) > self._clock()

    def worked(self, epoch: int) -> None:
        """Note an answer in time. Another epoch is another life, which may have what the last one lacked."""
        with self._lock:
            self._pause = 0.0
            self.distrust = ""
            if epoch != self.epoch:
                self.epoch = epoch
                self._absent.clear()

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

    def failed(self, reason: str) -> None:
        """Note a missing, late or wrong answer."""
        with self._lock:
            self.counts["failed"] += 1
            self.reason = reason
            self._pause = min(max(2 * self._pause, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
            self._until = self._clock() + self._pause
