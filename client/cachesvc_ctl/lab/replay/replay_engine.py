"""One engine process of a replay: takes requests on standard input, answers on standard output, one JSON line each.

It does what an engine does: match, load, compute (here: write bytes that tell their block), publish, release; and it
checks the bytes of every block that the cache gave it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import TypeVar

from cachesvc_client.client import CacheClient
from cachesvc_client.core.errors import DaemonUnavailable, LoadFailed, PoolExhausted
from cachesvc_client.core.registration import Registration
from cachesvc_client.layouts.families import opaque
from cachesvc_client.lease import Lease
from cachesvc_client.memory.pool import AttachedPool
from cachesvc_client.sequence import Sequence
from cachesvc_client.wire.credentials import PATIENT_OPTIONS
from cachesvc_client.wire.settings import Retries, Timeouts

from cachesvc.model.keys import KEY_BYTES
from cachesvc_ctl.lab.traces.page_pattern import PagePattern
from cachesvc_ctl.lab.traces.trace import SECONDS_A_TOKEN

LOAD_SECONDS = 60.0
PATIENCE_SECONDS = 60.0
"""Time limit of a call and of a connection: a busy machine makes a replay longer, not fail."""
RETRY_SECONDS = 0.1
TIMEOUTS = Timeouts(
    attach_s=PATIENCE_SECONDS, call_s=PATIENCE_SECONDS, step_s=PATIENCE_SECONDS, close_s=PATIENCE_SECONDS
)
RETRIES = Retries(attempts=10)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of an engine, here and under chaos. ``layers`` planes share ``block_bytes``. ``tells_time``: the daemon
    learns of requests when they came in their trace."""

    socket: str
    name: str
    model: str
    block_bytes: int
    block_tokens: int
    layers: int
    device_blocks: int
    host_blocks: int
    tells_time: bool = False

    def register(self, client: CacheClient) -> Registration:
        """The model of these engines, which none of them computes. Raises as ``CacheClient.register`` does."""
        layout = opaque(block_bytes=self.block_bytes, block_tokens=self.block_tokens, layers=self.layers)
        return client.register(self.model, layout, device_pages=[self.device_blocks], host_pages=[self.host_blocks])

    def pattern(self, pool: AttachedPool) -> PagePattern:
        """Stand-in for KV in the pages of a pool."""
        return PagePattern(pool, block_bytes=self.block_bytes, layers=self.layers)


@dataclass(slots=True)
class Outcome:
    """Result of one request. ``uncached``: computed blocks for which there was no room. ``rpc``: (name, ms)."""

    index: int
    device: int = 0
    host: int = 0
    storage: int = 0
    computed: int = 0
    uncached: int = 0
    verified: int = 0
    corrupt: int = 0
    rpc: list[tuple[str, float]] = field(default_factory=list)

    def timed(self, name: str, call: Callable[[], T]) -> T:
        """Run a call and note how long it took, whether it succeeds or not."""
        began = time.perf_counter()
        try:
            return call()
        finally:
            self.rpc.append((name, (time.perf_counter() - began) * 1e3))


class ReplayEngine:
    """Serves requests one at a time through one lease."""

    def __init__(self, settings: EngineSettings, lease: Lease, pool: AttachedPool, namespace: bytes) -> None:
        self._settings = settings
        self._lease = lease
        self._namespace = namespace
        self._pool = pool
        self._pattern = settings.pattern(pool)
        self._key_of = lru_cache(maxsize=1 << 18)(self._make_key)

    def _make_key(self, block: int) -> bytes:
        return blake2b(self._namespace + block.to_bytes(8, "little"), digest_size=KEY_BYTES).digest()

    def serve(self, index: int, block_ids: list[int], seconds: float, output_tokens: int) -> Outcome:
        """Serve one request: its blocks from the cache where they are, computed and published where not."""
        outcome = Outcome(index)
        if not block_ids:
            return outcome
        keys = b"".join(map(self._key_of, block_ids))
        if self._settings.tells_time:
            self._lease.record.clock_seconds = seconds
        # A hit beyond the pool could not be loaded: of a prompt longer than it the leading blocks that fit are cached.
        cached = min(len(block_ids), self._settings.device_blocks)
        sequence = outcome.timed("match", lambda: self._lease.match(keys, max_blocks=cached))
        try:
            self._serve(sequence, keys, len(block_ids), cached, outcome)
        finally:
            if self._settings.tells_time:
                sequence.record.clock_seconds = seconds + output_tokens * SECONDS_A_TOKEN
            outcome.timed("release", lambda: sequence.release(output_tokens=output_tokens))
        return outcome

    def _serve(self, sequence: Sequence, keys: bytes, blocks: int, cached: int, outcome: Outcome) -> None:
        outcome.device = sequence.device_blocks
        self._verify(sequence, keys, 0, sequence.device_blocks, outcome)
        hit = sequence.hit_blocks
        try:
            outcome.timed("allocate", lambda: sequence.allocate(cached))
            self._wait_loads(sequence, outcome)
        except (PoolExhausted, LoadFailed):
            outcome.computed = blocks - outcome.device
            outcome.uncached = outcome.computed
            return
        outcome.storage = sequence.storage_blocks
        outcome.host = hit - outcome.device - outcome.storage
        self._verify(sequence, keys, outcome.device, hit, outcome)
        self._pattern.write(sequence.tables[0], keys, hit, cached)
        outcome.computed = blocks - hit
        outcome.uncached = blocks - cached
        if cached > hit:
            outcome.timed("publish", lambda: sequence.publish(cached))

    def _verify(self, sequence: Sequence, keys: bytes, first: int, last: int, outcome: Outcome) -> None:
        outcome.verified += last - first
        outcome.corrupt += self._pattern.count_wrong(sequence.tables[0], keys, first, last)

    def _wait_loads(self, sequence: Sequence, outcome: Outcome) -> None:
        for ticket in sequence.tickets:
            outcome.timed("load", lambda ticket=ticket: self._pool.wait_ticket(ticket, LOAD_SECONDS))  # type: ignore[misc]


def connect(settings: EngineSettings, limit_seconds: float = PATIENCE_SECONDS) -> CacheClient:
    """Connect a client. Raises DaemonUnavailable after ``limit_seconds`` without an answer."""
    until = time.monotonic() + limit_seconds
    client = CacheClient(
        settings.socket, engine=settings.name, timeouts=TIMEOUTS, retries=RETRIES, options=PATIENT_OPTIONS
    )
    while True:
        try:
            return client.connect()
        except DaemonUnavailable:
            if time.monotonic() >= until:
                raise
        time.sleep(RETRY_SECONDS)  # no process exists that could report its start


def main() -> None:
    """Serve until standard input ends."""
    settings = EngineSettings(**json.loads(sys.argv[1]))
    with connect(settings) as client:
        registration = settings.register(client)
        lease = client.open_lease(registration)
        pool = lease.attach(0)
        engine = ReplayEngine(settings, lease, pool, registration.namespace)
        say({"ready": True})
        for line in sys.stdin:
            request = json.loads(line)
            say(asdict(engine.serve(**request)))
        del engine
        pool.close()
        lease.close()


def say(message: dict[str, object]) -> None:
    """Write one line to standard output."""
    sys.stdout.write(json.dumps(message, separators=(",", ":")) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
