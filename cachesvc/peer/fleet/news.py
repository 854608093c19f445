"""Keeps the digests of peers: each is asked again once it has told something, or after a pause where it fails.

A peer that answers at once has the next question at the next look, whatever it told: while engines seal, something has
always changed there, and questions one after another would take up the peer's loop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from cachesvc.model.errors import CacheError
from cachesvc.peer.fleet.digest import DigestNews
from cachesvc.peer.fleet.health import Peer

PATIENCE_SECONDS = 20.0
"""Time that a peer waits for a change of its own, seconds."""
QUICK_SECONDS = 1.0
"""Time within which an answer has come at once, seconds."""


class NewsReader:
    """``peers``: those that there are now. ``clock``: monotonic seconds. Any thread."""

    def __init__(self, peers: Callable[[], Sequence[Peer]], clock: Callable[[], float] = time.monotonic) -> None:
        self._peers = peers
        self._clock = clock
        self._asked: set[int] = set()
        self._is_open = True
        self._lock = threading.Lock()

    def look(self) -> None:
        """Ask peers of which no answer is under way. Called periodically."""
        for peer in self._peers():
            with self._lock:
                is_due = self._is_open and id(peer) not in self._asked
                if is_due:
                    self._asked.add(id(peer))
            if is_due:
                self._ask(peer)

    def close(self) -> None:
        """Ask nothing more. Idempotent."""
        with self._lock:
            self._is_open = False

    def _ask(self, peer: Peer) -> None:
        digest, told = peer.digest, partial(self._told, peer, self._clock())
        try:
            peer.control.news_later(digest.epoch, digest.version, PATIENCE_SECONDS, told)
        except CacheError:
            self._failed(peer)

    def _told(self, peer: Peer, asked_at: float, news: DigestNews | CacheError) -> None:
        if isinstance(news, CacheError) or not any(each is peer for each in self._peers()):
            self._failed(peer)
            return
        peer.digest.learn(news)
        peer.answered()
        if self._is_open and self._clock() - asked_at >= QUICK_SECONDS:
            self._ask(peer)
        else:
            self._done(peer)

    def _failed(self, peer: Peer) -> None:
        """Without its news, a peer may have anything."""
        peer.digest.forget()
        self._done(peer)

    def _done(self, peer: Peer) -> None:
        with self._lock:
            self._asked.discard(id(peer))
