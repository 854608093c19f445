"""Publishes a model's blocks to routers for as long as it runs, whatever becomes of the daemon meanwhile."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial

from cachesvc_client.adapters.kv_event_form import Event
from cachesvc_client.adapters.kv_events import KvEventMapper
from cachesvc_client.core.errors import CacheClientError, InvalidRequest, NotOwned, NotSupported, TokenFileUnreadable
from cachesvc_client.events import EventSubscriber
from cachesvc_client.records.event_batch import Batch

EVENTS_PER_BATCH = 64
PAUSE_S = 1.0
LONGEST_PAUSE_S = 10.0
"""Back-off while the daemon cannot be followed: a token that was replaced comes within minutes."""

WAITING_BATCHES = 64
"""Answers read ahead of a slow publisher. Beyond that the daemon's own limit holds, and a snapshot follows."""

READER_S = 0.05
"""Between two looks whether the reading thread has ended."""

HOPELESS = (InvalidRequest, NotOwned, NotSupported)
"""Errors that a retry cannot cure: the request itself is wrong. An operator, the daemon or a new token file mends the
rest."""

log = logging.getLogger(__name__)


class WakeUp(Enum):
    """Wake-up reasons of the publishing thread beside batches."""

    TOKENS = "tokens"


Inbox = queue.Queue[Batch | WakeUp | Exception | None]


class KvEventBridge:
    """``run`` publishes until ``close``, which another thread may call.

    ``connect``: makes a subscriber, which reads its token file anew. ``publish``: takes one batch of events. Whenever
    the subscription ends, routers are sent AllBlocksCleared at once, and everything anew once it is back. What
    ``mapper.tokens`` learns is published without waiting for the daemon.
    """

    def __init__(
        self,
        connect: Callable[[], EventSubscriber],
        mapper: KvEventMapper,
        publish: Callable[[Sequence[Event]], None],
        *,
        pause_s: float = PAUSE_S,
        longest_pause_s: float = LONGEST_PAUSE_S,
    ) -> None:
        self._connect = connect
        self._mapper = mapper
        self._publish = publish
        self._first_pause_s = self._pause_s = pause_s
        self._longest_pause_s = longest_pause_s
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._subscriber: EventSubscriber | None = None

    def run(self) -> None:
        """Publish until ``close``. Raises what waiting cannot cure: NotOwned, NotSupported, InvalidRequest; and what
        ``publish`` raises."""
        while not self._closing.is_set():
            try:
                self._follow()
            except CacheClientError as error:
                self._send(self._mapper.forget())
                if isinstance(error, HOPELESS) and not isinstance(error, TokenFileUnreadable):
                    raise
                log.warning("events_stopped retry_s=%g reason=%s", self._pause_s, error)
                self._closing.wait(self._pause_s)
                self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
            else:
                if not self._closing.is_set():
                    self._send(self._mapper.forget())

    def restart(self) -> None:
        """Subscribe anew, as ``connect`` says now."""
        with self._lock:
            if self._subscriber is not None:
                self._subscriber.close()

    def close(self) -> None:
        """End ``run``. Idempotent."""
        self._closing.set()
        self.restart()

    def _follow(self) -> None:
        """Follow one subscription to its end. Raises what ended it."""
        with self._lock:
            if self._closing.is_set():
                return
            subscriber = self._subscriber = self._connect()
        inbox: Inbox = queue.Queue(WAITING_BATCHES)
        reader = threading.Thread(target=_read, args=(subscriber, inbox), name="kvcache-events-reader", daemon=True)
        reader.start()
        try:
            if self._mapper.tokens is not None:
                self._mapper.tokens.on_news = partial(_nudge, inbox)
            self._send(self._mapper.news())
            while (item := inbox.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, Batch):
                    self._pause_s = self._first_pause_s
                    self._send(self._mapper.events_of(item))
                self._send(self._mapper.news())
        finally:
            subscriber.close()
            while reader.is_alive():  # it may wait for room
                with suppress(queue.Empty):
                    inbox.get(timeout=READER_S)

    def _send(self, events: Iterable[Event]) -> None:
        rest = iter(events)
        while some := list(itertools.islice(rest, EVENTS_PER_BATCH)):
            self._publish(some)


def _read(subscriber: EventSubscriber, inbox: Inbox) -> None:
    """Root of the reading thread: hand on every batch, then the error that ended the subscription, or None."""
    end: Exception | None = None
    try:
        for batch in subscriber.follow():
            inbox.put(batch)
    except Exception as error:  # noqa: BLE001 - raised by the thread that publishes
        end = error
    inbox.put(end)


def _nudge(inbox: Inbox) -> None:
    """Wake the publishing thread. A full inbox wakes it anyway."""
    with suppress(queue.Full):
        inbox.put_nowait(WakeUp.TOKENS)
