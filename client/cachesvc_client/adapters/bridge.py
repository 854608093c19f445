"""Keeps routers told: follows a model's blocks for as long as it runs, whatever becomes of the daemon meanwhile."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence

from cachesvc_client.adapters.kv_events import Event, KvEventMapper
from cachesvc_client.errors import DaemonUnavailable, LimitExceeded, NotFound
from cachesvc_client.events import EventSubscriber

EVENTS_PER_BATCH = 64
PAUSE_S = 1.0

log = logging.getLogger(__name__)


class KvEventBridge:
    """``run`` publishes until ``close``, which another thread may call.

    ``connect``: makes a subscriber. ``publish``: takes one batch of events. When the daemon goes, or the model gives
    way to another one, routers are told that all is gone; once it is back they get everything anew.
    """

    def __init__(
        self,
        connect: Callable[[], EventSubscriber],
        mapper: KvEventMapper,
        publish: Callable[[Sequence[Event]], None],
        *,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._connect = connect
        self._mapper = mapper
        self._publish = publish
        self._pause_s = pause_s
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._subscriber: EventSubscriber | None = None

    def run(self) -> None:
        """Publish until ``close``. Raises what waiting cannot cure: NotOwned, NotSupported, InvalidRequest."""
        while not self._closing.is_set():
            try:
                self._follow()
            except (DaemonUnavailable, NotFound, LimitExceeded) as error:
                log.warning("events stopped, trying again reason=%s", error)
                self._publish([{"type": "AllBlocksCleared"}])
                self._closing.wait(self._pause_s)

    def close(self) -> None:
        """End ``run``. Idempotent."""
        self._closing.set()
        with self._lock:
            if self._subscriber is not None:
                self._subscriber.close()

    def _follow(self) -> None:
        with self._lock:
            if self._closing.is_set():
                return
            self._subscriber = self._connect()
        with self._subscriber as subscriber:
            for batch in subscriber.follow():
                events = iter(self._mapper.events_of(batch))
                while some := list(itertools.islice(events, EVENTS_PER_BATCH)):
                    self._publish(some)
