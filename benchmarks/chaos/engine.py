"""One engine process under chaos: requests on standard input, outcomes on standard output, one JSON line each.

It serves through its lease's step stream, checks the bytes of every block that the cache gives it, and survives
injected faults: a lost lease, a daemon that restarts (``Reattacher``), a broken connection, failed loads.
When a lease is lost it first writes rubbish into the pages that were its own, as kernels that still run would, and only
then reports that it has quiesced: the daemon must not have granted those pages to another engine. SIGUSR1 cuts its gRPC
connection, SIGUSR2 its life connection, both with ``shutdown`` on the descriptor. SIGQUIT prints every thread's stack.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from cachesvc_client import (
    KEY_BYTES,
    CacheClient,
    CacheClientError,
    DaemonUnavailable,
    DeadlineExceeded,
    Lease,
    LeaseLost,
    LoadFailed,
    NotFound,
    PoolExhausted,
    Reattacher,
    Timeouts,
)
from cachesvc_client.records.steps import StepBatch
from cachesvc_client.sequence import PendingStep, Sequence, StepStream
from cachesvc_lab.replay import EngineSettings, say
from cachesvc_lab.traces import PagePattern

from cachesvc.wire.status import LIFE_SUFFIX

BACK_SECONDS = 120.0
"""A daemon that does not come back for so long is the end of the run."""
LOAD_SECONDS = 60.0
LOOK_SECONDS = 0.02
SHARE_OF_POOL = 16
"""A prompt is cut to this part of the device pool: a pool that all engines pin at once serves no request."""
LOSSES = (LeaseLost, DaemonUnavailable, NotFound)


@dataclass(slots=True)
class Outcome:
    """Result of one request. ``step_ms``: each Step that was answered at the first attempt. ``losses``: faults
    survived, by the error's name. ``lost_at``, ``back_at``: monotonic seconds of the last time that the daemon was
    noticed gone, and that a lease was attached again; 0: not during this request."""

    index: int
    device: int = 0
    host: int = 0
    computed: int = 0
    uncached: int = 0
    verified: int = 0
    corrupt: int = 0
    epoch: int = 0
    step_ms: list[float] = field(default_factory=list)
    losses: dict[str, int] = field(default_factory=dict)
    lost_at: float = 0.0
    back_at: float = 0.0

    def count(self, device: int, host: int, computed: int, uncached: int, verified: int, wrong: int) -> None:
        """Count one attempt that came to its end."""
        self.device, self.host, self.computed, self.uncached = device, host, computed, uncached
        self.verified, self.corrupt = verified, wrong

    def lost(self, error: CacheClientError) -> None:
        """Count what was survived."""
        name = type(error).__name__
        self.losses[name] = self.losses.get(name, 0) + 1


class ChaosEngine:
    """Serves requests one at a time through one lease, and through its successors."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        timeouts = Timeouts(connect_s=5.0, call_s=10.0, step_s=10.0)
        self._client = CacheClient(settings.socket, engine=settings.name, timeouts=timeouts)
        self._back: queue.SimpleQueue[tuple[Lease, ...]] = queue.SimpleQueue()
        self._reattacher = Reattacher(self._client, self._back.put)
        self._lease: Lease | None = None
        self._pattern: PagePattern | None = None
        self._stream: StepStream | None = None
        self._lost_at = 0.0
        self._back_at = 0.0
        self.cuts = 0

    def start(self) -> None:
        """Connect, wherever the daemon is at the moment, and take a lease. Raises CacheClientError."""
        self._client.on_lost(self._note_loss)
        until = time.monotonic() + BACK_SECONDS
        pause = threading.Event()
        while not self._client.connected:
            try:
                self._client.connect()
            except DaemonUnavailable:
                if time.monotonic() > until:
                    raise
                pause.wait(LOOK_SECONDS)
        self._reattacher.start()
        self._recover()
        self._back_at = 0.0

    def close(self) -> None:
        """End the lease and disconnect."""
        self._reattacher.close()
        self._forget()
        self._client.close()

    def cut(self, suffix: str) -> None:
        """Break the connection to the socket of that suffix, as a network would."""
        self.cuts += cut(self._settings.socket + suffix)

    def serve(self, index: int, salt: int, block_ids: list[int]) -> Outcome:
        """Serve one request, as often as it takes."""
        outcome = Outcome(index)
        while True:
            try:
                if self._lease is None:
                    self._recover()
                self._attempt(salt, block_ids, outcome)
                break
            except LOSSES as error:
                outcome.lost(error)
                self._recover()
        assert self._lease is not None
        outcome.epoch = self._lease.registration.epoch
        outcome.lost_at, outcome.back_at = self._lost_at, self._back_at
        self._lost_at = self._back_at = 0.0
        return outcome

    # -- one request ---------------------------------------------------------------------------------------------

    def _attempt(self, salt: int, block_ids: list[int], outcome: Outcome) -> None:
        """Answer once; verified bytes count only when the lease lived to the end: without it pages may be another's any
        time."""
        assert self._lease is not None
        namespace = self._lease.registration.namespace
        keys = b"".join(_key(namespace, salt, block) for block in block_ids)
        sequence: Sequence = self._step(outcome, lambda batch: batch.match(keys))
        blocks, hit, device = len(block_ids), sequence.hit_blocks, sequence.device_blocks
        wrong = self._count_wrong(sequence, keys, 0, device)
        cached = max(hit, min(blocks, self._settings.device_blocks // SHARE_OF_POOL))
        try:
            self._step(outcome, lambda batch: batch.allocate(sequence, cached))
            sequence.wait_loaded(LOAD_SECONDS)
        except (PoolExhausted, LoadFailed) as error:
            outcome.lost(error)
            self._step(outcome, lambda batch: batch.release(sequence))
            outcome.count(device, 0, blocks - device, blocks - device, device, wrong)
            return
        wrong += self._count_wrong(sequence, keys, device, hit)
        if cached > hit:
            self._publish(sequence, keys, hit, cached, outcome)
            wrong += self._count_wrong(sequence, keys, hit, cached)
        self._step(outcome, lambda batch: batch.release(sequence))
        outcome.count(device, hit - device, blocks - hit, blocks - cached, cached, wrong)

    def _publish(self, sequence: Sequence, keys: bytes, first: int, last: int, outcome: Outcome) -> None:
        assert self._pattern is not None
        cuts = self.cuts
        self._pattern.write(sequence.tables[0], keys, first, last)
        try:
            self._step(outcome, lambda batch: batch.publish(sequence, last))
        except LOSSES:
            self._write_late(sequence, first, last, cuts)
            raise

    def _write_late(self, sequence: Sequence, first: int, last: int, cuts: int) -> None:
        """Write as kernels that cannot be stopped would, to pages that were private when the lease was lost. Skip this
        where the connection was cut meanwhile: then the publish may have been carried out, and the pages are sealed."""
        if self._pattern is None or self._lease is None or not isinstance(self._lease.record.loss, LeaseLost):
            return
        if self.cuts != cuts:
            return
        rubbish = blake2b(b"late writes", digest_size=KEY_BYTES).digest() * last
        self._pattern.write(sequence.tables[0], rubbish, first, last)

    def _count_wrong(self, sequence: Sequence, keys: bytes, first: int, last: int) -> int:
        assert self._pattern is not None
        return self._pattern.count_wrong(sequence.tables[0], keys, first, last)

    def _step(self, outcome: Outcome, ask: Callable[[StepBatch[Sequence]], int]) -> Any:
        """One operation in a Step of its own; its result. Raises what refused it."""
        assert self._stream is not None
        batch = self._stream.batch()
        at = ask(batch)
        step = self._stream.send(batch)
        began = time.perf_counter()
        result = self._collect(step, outcome)[at]
        outcome.step_ms.append((time.perf_counter() - began) * 1e3)
        if isinstance(result, CacheClientError):
            raise result
        return result

    def _collect(self, step: PendingStep, outcome: Outcome) -> list[Any]:
        """A daemon that hangs answers late: the same step is asked for again."""
        until = time.monotonic() + BACK_SECONDS
        while True:
            try:
                return step.results()
            except DeadlineExceeded as error:
                outcome.lost(error)
                if time.monotonic() > until:
                    raise

    # -- losses --------------------------------------------------------------------------------------------------

    def _note_loss(self) -> None:
        self._lost_at = time.monotonic()

    def _recover(self) -> None:
        """Give up what the old lease held, and come back with a new one: the reattacher's, or one's own."""
        self._forget()
        until = time.monotonic() + BACK_SECONDS
        pause = threading.Event()
        while True:
            try:
                lease = self._newest() or self._open_lease()
                self._take(lease)
                break
            except CacheClientError:
                self._forget()
                if time.monotonic() > until:
                    raise
                pause.wait(LOOK_SECONDS)
        self._back_at = time.monotonic()

    def _newest(self) -> Lease | None:
        """The lease that the reattacher came back with, if it is still good."""
        newest: Lease | None = None
        while not self._back.empty():
            for lease in self._back.get():
                if newest is not None:
                    newest.close()
                newest = lease
        return newest

    def _open_lease(self) -> Lease:
        return self._client.open_lease(self._settings.register(self._client))

    def _take(self, lease: Lease) -> None:
        self._lease = lease
        self._pattern = self._settings.pattern(lease.attach(0))
        self._stream = lease.step()

    def _forget(self) -> None:
        """Nothing of this process writes the lease's pages any more: unmap, and let the daemon have them back."""
        self._pattern = self._stream = None
        if self._lease is not None:
            self._lease.close(quiesced=True)
        self._lease = None


def _key(namespace: bytes, salt: int, block: int) -> bytes:
    contents = namespace + salt.to_bytes(8, "little") + block.to_bytes(8, "little")
    return blake2b(contents, digest_size=KEY_BYTES).digest()


def cut(path: str) -> int:
    """Shut every socket of this process down that is connected to ``path``; how many there were."""
    count = 0
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            if not stat.S_ISSOCK(entry.stat().st_mode):
                continue
            copy = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # closed meanwhile
            continue
        with copy:
            try:
                if copy.family == socket.AF_UNIX and copy.getpeername() == path:
                    copy.shutdown(socket.SHUT_RDWR)
                    count += 1
            except OSError:  # it listens, or has ended by itself
                continue
    return count


def mapped_epochs() -> int:
    """Number of slabs of different lives of the daemon that this process has mapped."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return len({line.split()[4] for line in lines if "memfd:kvcache-timeline" in line})


def main() -> None:
    """Serve until standard input ends."""
    settings = EngineSettings(**json.loads(sys.argv[1]))
    faulthandler.register(signal.SIGQUIT)
    engine = ChaosEngine(settings)
    signal.signal(signal.SIGUSR1, lambda *_: engine.cut(""))
    signal.signal(signal.SIGUSR2, lambda *_: engine.cut(LIFE_SUFFIX))
    engine.start()
    say({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        say(asdict(engine.serve(request["index"], request["salt"], request["block_ids"])))
    say({"mapped_epochs": mapped_epochs()})
    engine.close()


if __name__ == "__main__":
    main()
