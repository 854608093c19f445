"""Brings a client back by itself after its daemon went: tries until the socket accepts, then hands out new leases."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from cachesvc_client.client import CacheClient
from cachesvc_client.core.errors import AlreadyClosed, CacheClientError
from cachesvc_client.lease import Lease

log = logging.getLogger(__name__)


class Reattacher:
    """One thread for one client. ``on_back(leases)`` is called from it after each ``reconnect``, with what that gave.

    Pauses between attempts double from ``first_pause_s`` to ``longest_pause_s``: an attempt on a socket without a
    listener costs a millisecond, a pause costs every engine of the node that much of the daemon's return.
    """

    def __init__(
        self,
        client: CacheClient,
        on_back: Callable[[tuple[Lease, ...]], None],
        *,
        first_pause_s: float = 0.05,
        longest_pause_s: float = 0.25,
    ) -> None:
        self._client = client
        self._on_back = on_back
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._closed = threading.Event()
        self._wanted = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcache-reattach", daemon=True)

    def start(self) -> None:
        """Watch the client from now on; one whose daemon is gone already is brought back too."""
        self._client.on_lost(self._wanted.set)
        if not self._client.connected:
            self._wanted.set()
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._closed.set()
        self._wanted.set()
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> Reattacher:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while self._wanted.wait() and not self._closed.is_set():
                self._wanted.clear()
                self._come_back()
        except AlreadyClosed:
            log.debug("reattach_ended path=%s", self._client.socket_path)
        except Exception:
            log.exception("reattach_failed path=%s", self._client.socket_path)

    def _come_back(self) -> None:
        pause_s = self._first_pause_s
        while not self._closed.is_set():
            if self._client.connected:  # another thread reconnected it
                return
            try:
                leases = self._client.reconnect()
            except AlreadyClosed:
                raise
            except CacheClientError as error:
                log.debug("reattach_waits path=%s why=%s", self._client.socket_path, error)
                self._closed.wait(pause_s)
                pause_s = min(2 * pause_s, self._longest_pause_s)
            else:
                log.info("reattached path=%s leases=%s", self._client.socket_path, len(leases))
                self._on_back(leases)
                return
