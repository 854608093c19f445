"""Publishes KV events over ZeroMQ as engines do: a PUB socket, and a ROUTER that replays what a subscriber missed.

    PUB     topic, sequence number (8 bytes, big-endian), payload
    ROUTER  request: empty, first number (8 bytes); answer: for each batch  empty, topic, number, payload
            and at the end  empty, empty, -1, empty

One thread owns both sockets, because a socket of ZeroMQ belongs to one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from cachesvc_client.adapters.kv_events import Event, Form, wire_batch
from cachesvc_client.core.errors import InvalidRequest, NotSupported

END = (-1).to_bytes(8, "big", signed=True)
DEFAULT_REPLAY_BATCHES = 10_000
DEFAULT_SENDING_BATCHES = 100_000
WAITING_BATCHES = 4096
_STOP = object()


def wants_ipv6(endpoint: str) -> bool:
    """True for every address (``*``: both families on one socket, IPv4 alone where the host has no IPv6) and for
    addresses of IPv6. An interface's name stays with IPv4: ZeroMQ would look for its IPv6 addresses alone."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    return endpoint.startswith("tcp://") and (host == "*" or ":" in host)


class ZmqPublisher:
    """``publish`` from any one thread between ``start`` and ``close``.

    ``endpoint`` and ``replay_endpoint`` (empty: no replay) are bound. The last ``replay_batches`` are kept for replay.
    ``topic``: llm-d reads "kv@POD@MODEL". ``rank``: the data-parallel rank that each batch names.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str = "",
        *,
        topic: str = "",
        rank: int | None = 0,
        form: Form = Form.MAP,
        replay_batches: int = DEFAULT_REPLAY_BATCHES,
    ) -> None:
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self.published = 0
        self._topic = topic.encode()
        self._rank = rank
        self._form = form
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=replay_batches)
        self._batches: queue.Queue[Any] = queue.Queue(WAITING_BATCHES)
        self._thread = threading.Thread(target=self._run, name="kvcache-events", daemon=True)
        self._context: Any = None
        self._encode: Any = None
        self._sockets: list[Any] = []
        self._wake: Any = None

    def start(self) -> ZmqPublisher:
        """Bind and serve. ``endpoint`` then says the real port. Raises NotSupported (no ZeroMQ), InvalidRequest."""
        try:
            import msgspec
            import zmq
        except ImportError as missing:
            raise NotSupported(f"{missing}; install the extra: pip install 'cachesvc[events]'") from missing
        self._encode = msgspec.msgpack.encode
        self._context = zmq.Context()
        pub, waking = self._context.socket(zmq.PUB), self._context.socket(zmq.PULL)
        self._sockets = [pub, waking]
        pub.set_hwm(DEFAULT_SENDING_BATCHES)
        waking.bind("inproc://wake")
        try:
            pub.setsockopt(zmq.IPV6, wants_ipv6(self.endpoint))
            pub.bind(self.endpoint)
            if self.replay_endpoint:
                replay = self._context.socket(zmq.ROUTER)
                self._sockets.append(replay)
                replay.setsockopt(zmq.IPV6, wants_ipv6(self.replay_endpoint))
                replay.bind(self.replay_endpoint)
                self.replay_endpoint = replay.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise InvalidRequest(f"cannot bind {self.endpoint} {self.replay_endpoint}: {error}") from error
        self.endpoint = pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake = self._context.socket(zmq.PUSH)
        self._wake.connect("inproc://wake")
        self._thread.start()
        return self

    def publish(self, events: Sequence[Event]) -> None:
        """Send one batch; waits while ``WAITING_BATCHES`` are still to be sent."""
        self._batches.put((time.time(), list(events)))
        self._wake.send(b"")

    def close(self) -> None:
        if self._context is None or self._context.closed:
            return
        self._batches.put(_STOP)
        self._wake.send(b"")
        self._thread.join()
        self._context.destroy(linger=1000)

    def __enter__(self) -> ZmqPublisher:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        import zmq

        pub, waking = self._sockets[:2]
        poller = zmq.Poller()
        for each in self._sockets[1:]:
            poller.register(each, zmq.POLLIN)
        while True:
            for ready, _ in poller.poll():
                if ready is not waking:
                    self._replay(ready)
                    continue
                waking.recv()
                batch = self._batches.get()
                if batch is _STOP:
                    return
                self._send(pub, *batch)

    def _send(self, pub: Any, seconds: float, events: list[Event]) -> None:
        payload = self._encode(wire_batch(events, seconds, self._rank, self._form))
        number = self.published
        self._kept.append((number, payload))
        pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        self.published += 1

    def _replay(self, router: Any) -> None:
        """Answer one request; one of another shape gets no answer, as from an engine."""
        request = router.recv_multipart()
        if len(request) != 3 or len(request[2]) != 8:
            return
        asker, empty, first = request
        wanted = int.from_bytes(first, "big")
        for number, payload in self._kept:
            if number >= wanted:
                router.send_multipart((asker, empty, self._topic, number.to_bytes(8, "big"), payload))
        router.send_multipart((asker, empty, b"", END, b""))
