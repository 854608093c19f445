"""Replay a trace: a daemon, N engine processes, every request served and every hit's bytes checked."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import grpc
from cachesvc_client.client import CacheClient
from cachesvc_client.core.errors import DaemonUnavailable, LoadFailed, PoolExhausted, Registration
from cachesvc_client.layouts.families import opaque
from cachesvc_client.lease import Lease
from cachesvc_client.memory.pool import AttachedPool
from cachesvc_client.sequence import Sequence as ClientSequence
from cachesvc_client.wire.credentials import PATIENT_OPTIONS, open_remote
from cachesvc_client.wire.settings import Retries, Timeouts, as_path
from cachesvc_ctl.core.daemon_process import DaemonProcess
from kvcache.v1 import admin_pb2, admin_pb2_grpc

from cachesvc.model.text import module_command
from cachesvc.model.words import KEY_BYTES
from cachesvc_lab.replay_report import CONSERVED, LatencyHistogram, ReplayReport, Sample
from cachesvc_lab.traces import SECONDS_A_TOKEN, PagePattern, TraceRequest

ANSWER_SECONDS = 10.0
"""A channel finds the next daemon at its socket within that."""
SETTLE_SECONDS = 30.0
PROGRESS_SECONDS = 1.0
Admin = admin_pb2_grpc.AdminServiceStub
MOVED = ("h2d_bytes", "d2h_bytes")
"""Counters of a daemon that a report has, and its samples by the second."""


class ReplayFailed(Exception):
    """The replay could not go on; the message says what to do."""


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Parameters of a replay. ``settings``: of its engines, but for their daemon and names. ``kill_every_seconds`` 0:
    kill no engine, and ``restart_every_seconds`` likewise no daemon. ``storage``: the daemon's flag, or empty."""

    trace: str
    engines: int
    settings: EngineSettings
    write_policy: str
    eviction: str
    kill_every_seconds: float
    storage: str = ""
    restart_every_seconds: float = 0.0
    seed: int = 1


@dataclass
class Tally:
    """Sums of the outcomes so far. ``counts``: by an outcome's fields, with "requests", "blocks" and "kills"."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: Counter[str] = field(default_factory=Counter)
    rpc: dict[str, LatencyHistogram] = field(default_factory=dict)
    samples: dict[int, Sample] = field(default_factory=dict)

    def add(self, outcome: dict[str, Any], blocks: int, second: int) -> None:
        timed = outcome.pop("rpc")
        with self.lock:
            self.counts.update(outcome, requests=1, blocks=blocks)
            for name, milliseconds in timed:
                self.rpc.setdefault(name, LatencyHistogram()).record(milliseconds)
            accesses = (outcome[name] for name in ("device", "host", "storage", "computed"))
            self.samples[second] = self.samples.get(second, Sample(second)).plus(Sample(second, *accesses))

    def note_bytes(self, second: int, totals: Mapping[str, int]) -> None:
        """Count what the daemon has moved beyond what is counted so far, by its own counters, in one second. They begin
        anew with the next daemon: then nothing is counted until they are beyond it again."""
        with self.lock:
            known = self.samples.get(second, Sample(second))
            beyond = {
                name: max(0, totals.get(name, 0) - sum(getattr(each, name) for each in self.samples.values()))
                for name in MOVED
            }
            self.samples[second] = known.plus(Sample(second, **beyond))


class EngineSlot(threading.Thread):
    """Keeps one engine process at work; starts it again, with the request it was at, when it is killed."""

    def __init__(self, number: int, run: ReplayRun) -> None:
        super().__init__(name=f"engine {number}", daemon=True)
        self.number = number
        self.error: Exception | None = None
        self._run = run
        self._process: subprocess.Popen[str] | None = None
        self._starts = 0
        self._life = 0

    def run(self) -> None:
        try:
            while (request := self._run.next()) is not None:
                self._serve(request)
            if self._process is not None:
                self._process.communicate()
        except Exception as error:  # noqa: BLE001 - the root of this thread; the run reports it
            self.error = error
            self._run.queue.clear()

    def kill(self) -> bool:
        """SIGKILL the engine if it is at work."""
        process = self._process
        if process is None or process.poll() is not None:
            return False
        process.send_signal(signal.SIGKILL)
        return True

    def _serve(self, request: TraceRequest) -> None:
        question = {
            "block_ids": request.block_ids,
            "seconds": request.timestamp_ms / 1000,
            "output_tokens": request.output_tokens,
        }
        while True:
            process = self._process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            answer = ""
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            if answer.endswith("\n"):
                self._run.tally.add(json.loads(answer), len(request.block_ids), self._run.second())
                return
            self._reap(process)  # it died over the request, which its successor gets

    def _start(self) -> subprocess.Popen[str]:
        self._starts += 1
        self._life = self._run.lives
        socket = self._run.sockets[self.number % len(self._run.sockets)]
        settings = replace(self._run.plan.settings, socket=socket, name=f"replay-{self.number}.{self._starts}")
        command = module_command("cachesvc_lab.replay", json.dumps(asdict(settings)))
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
        assert process.stdout is not None
        if not process.stdout.readline():
            self._reap(process)
            if process.returncode != -signal.SIGKILL and self._life == self._run.lives:
                raise ReplayFailed("an engine did not start; what it said stands above")
            return self._start()
        self._process = process
        return process

    def _reap(self, process: subprocess.Popen[str]) -> None:
        self._process = None
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # what was still to be written goes to its successor
                pipe.close()
        if code not in (0, -signal.SIGKILL) and self._life == self._run.lives:
            raise ReplayFailed(f"an engine ended with exit code {code}; what it said stands above")


class ReplayRun:
    """One replay against the daemon at ``socket``; ``daemon``: its process, where it may be restarted. ``others``:
    sockets of further nodes, to which engines are dealt out in turn.

    ``lives`` changes before a daemon dies and after the next one serves: while it stays the same, none has ended.
    """

    def __init__(
        self,
        plan: ReplayPlan,
        socket: str,
        requests: Iterable[TraceRequest],
        daemon: DaemonProcess | None = None,
        others: Sequence[str] = (),
    ) -> None:
        self.plan = plan
        self.sockets = (socket, *others)
        self.tally = Tally()
        self.queue = deque(requests)
        self.total = len(self.queue)
        self.lives = 0
        self._daemon = daemon
        self._restarts = 0
        self._lost: Counter[str] = Counter()  # counters of the daemons that were killed
        self._slots = [EngineSlot(number, self) for number in range(plan.engines)]
        self._began = 0.0
        self._over = threading.Event()
        self._error: Exception | None = None

    def next(self) -> TraceRequest | None:
        """The next request in trace order, or None when all are taken."""
        with suppress(IndexError):
            return self.queue.popleft()
        return None

    def second(self) -> int:
        return int(time.monotonic() - self._began)

    def run(self) -> ReplayReport:
        """Serve every request; the report. Raises ReplayFailed."""
        plan, self._began = self.plan, time.monotonic()
        with ExitStack() as stack:
            channels = [stack.enter_context(open_remote(as_path(path))) for path in self.sockets]
            admin, *others = nodes = [Admin(channel) for channel in channels]
            backend = admin.GetStatus(admin_pb2.GetStatusRequest()).backend
            before = [status_counters(node) for node in nodes]
            for slot in self._slots:
                slot.start()
            tasks = [self._task(self._watch, admin, before[0])]
            if plan.restart_every_seconds > 0:
                tasks.append(self._task(self._restart, admin))
            if plan.kill_every_seconds > 0:
                self._task(self._kill)
            for slot in self._slots:
                slot.join()
            seconds = time.monotonic() - self._began
            self._over.set()
            for task in tasks:
                task.join()
            for error in (*(slot.error for slot in self._slots), self._error):
                if error is not None:
                    raise ReplayFailed(str(error)) from error
            conservation = next((said for said in map(self._settle, nodes) if said != CONSERVED), CONSERVED)
            after = [self._lost + status_counters(admin), *map(status_counters, others)]
        counted: Counter[str] = Counter()
        for now, then in zip(after, before, strict=True):
            counted.update({name: now[name] - then[name] for name in now})
        self.tally.note_bytes(int(seconds), counted)  # what moved since the last look, and between other nodes
        return self._report(seconds, backend, conservation, counted)

    def _task(self, work: Callable[..., None], *args: Any) -> threading.Thread:
        """Run ``work`` in a thread; the run reports its error."""

        def root() -> None:
            try:
                work(*args)
            except Exception as error:  # noqa: BLE001 - the root of this thread
                self._error = error

        thread = threading.Thread(target=root, name=work.__name__, daemon=True)
        thread.start()
        return thread

    def _kill(self) -> None:
        rng = random.Random(self.plan.seed)
        while not self._over.wait(self.plan.kill_every_seconds):
            if rng.choice(self._slots).kill():
                with self.tally.lock:
                    self.tally.counts["kills"] += 1

    def _restart(self, admin: Admin) -> None:
        """Kill the daemon and its engines again and again, and start the next ones. Raises DaemonFailed."""
        assert self._daemon is not None, "a replay kills the daemon that it started"
        while not self._over.wait(self.plan.restart_every_seconds):
            self._lost += status_counters(admin)
            self.lives += 1
            self._daemon.kill()
            for slot in self._slots:
                slot.kill()
            self._daemon.start()
            self._restarts += 1
            self.lives += 1

    def _watch(self, admin: Admin, before: Counter[str]) -> None:
        """Show progress once a second, and note what the daemon has moved."""
        while not self._over.wait(PROGRESS_SECONDS):
            try:
                counters = admin.GetStatus(admin_pb2.GetStatusRequest()).counters
            except grpc.RpcError:  # it is being restarted
                continue
            moved = {name: counters.get(name, 0) - before[name] for name in MOVED}
            self.tally.note_bytes(max(0, self.second() - 1), moved)  # in the second that is over
            counts = self.tally.counts
            ratio = (counts["device"] + counts["host"] + counts["storage"]) / max(counts["blocks"], 1)
            print(
                f"{counts['requests']:,} of {self.total:,} requests, hits {ratio:.1%}, "
                f"verified {counts['verified']:,} pages, corrupt {counts['corrupt']}, kills {counts['kills']}",
                end="\r" if sys.stderr.isatty() else "\n",
                file=sys.stderr,
                flush=True,
            )
        if sys.stderr.isatty():
            print(file=sys.stderr)

    def _settle(self, admin: Admin) -> str:
        """Wait until no transfer runs and no lease is left, then check conservation: "ok", or what broke."""
        until = time.monotonic() + SETTLE_SECONDS
        pause = threading.Event()
        held = 0
        while time.monotonic() < until:
            pools = admin.GetStatus(admin_pb2.GetStatusRequest(), wait_for_ready=True, timeout=SETTLE_SECONDS).pools
            held = sum(pool.private + pool.in_flight + pool.quarantined for pool in pools)
            if held == 0:
                break
            pause.wait(0.05)
        else:
            return f"{held} pages are still held {SETTLE_SECONDS:g} s after the last engine has ended"
        verdict = admin.Verify(admin_pb2.VerifyRequest())
        return CONSERVED if verdict.ok else "; ".join(verdict.problems[:10])

    def _report(self, seconds: float, backend: str, conservation: str, counted: Counter[str]) -> ReplayReport:
        plan, tally, counts = self.plan, self.tally, self.tally.counts
        if counts["requests"] != self.total and conservation == CONSERVED:
            conservation = f"{self.total - counts['requests']} requests were lost"
        return ReplayReport(
            trace=Path(plan.trace).name,
            engines=plan.engines,
            pool_blocks=plan.settings.device_blocks,
            host_blocks=plan.settings.host_blocks,
            policy=f"{plan.write_policy}, {plan.eviction}",
            block_bytes=plan.settings.block_bytes,
            requests=counts["requests"],
            blocks=counts["blocks"],
            device_hits=counts["device"],
            host_hits=counts["host"],
            storage_hits=counts["storage"],
            computed=counts["computed"],
            evictions=counted["evictions"],
            h2d_bytes=counted["h2d_bytes"],
            d2h_bytes=counted["d2h_bytes"],
            seconds=seconds,
            verified_pages=counts["verified"],
            corrupt_pages=counts["corrupt"],
            kills=counts["kills"],
            conservation=conservation,
            settings={
                "backend": backend,
                "write_policy": plan.write_policy,
                "eviction": plan.eviction,
                "clock": "trace" if plan.settings.tells_time else "daemon",
                "uncached": counts["uncached"],
                **{name: counted[name] for name in ("host_evictions", "duplicate_blocks", "tickets_failed")},
                **({"nodes": len(self.sockets)} if len(self.sockets) > 1 else {}),
                **({"storage": plan.storage, "restarts": self._restarts} if plan.storage else {}),
            },
            rpc=tally.rpc,
            samples=tuple(tally.samples[second] for second in sorted(tally.samples)),
        )


WAIT = "?wait=2s&deadline=10s"
"""Limits for a machine that both nodes share, where a replay shows what comes over."""


@contextmanager
def running_nodes(flags: Sequence[str], count: int, *, has_storage: bool) -> Iterator[list[DaemonProcess]]:
    """Run ``count`` daemons with these flags. With a storage, its options count for what is borrowed too."""
    with ExitStack() as stack:
        ports = _free_ports(count) if count > 1 else []
        daemons = []
        for number in range(count):
            others = ",".join(f"127.0.0.1:{port}" for at, port in enumerate(ports) if at != number)
            peers: tuple[str, ...] = ("--peer-listen", f"127.0.0.1:{ports[number]}") if ports else ()
            if others:
                peers += ("--peers", others if has_storage else others + WAIT)
            daemons.append(stack.enter_context(DaemonProcess([*flags, *peers])))
        yield daemons


def status_counters(admin: Admin) -> Counter[str]:
    """The daemon's counters. Raises grpc.RpcError where the daemon stays unreachable."""
    status = admin.GetStatus(admin_pb2.GetStatusRequest(), wait_for_ready=True, timeout=ANSWER_SECONDS)
    return Counter(status.counters)


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


# One engine process of a replay: takes requests on standard input, answers on standard output, one JSON line each.
#
# It does what an engine does: match, load, compute (here: write bytes that tell their block), publish, release; and it
# checks the bytes of every block that the cache gave it.

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
    """Result of one request. ``uncached``: computed blocks that did not fit into the pool. ``rpc``: (name, ms)."""

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

    def serve(self, block_ids: Sequence[int], seconds: float, output_tokens: int) -> Outcome:
        """Serve one request: its blocks from the cache where they are, computed and published where not."""
        outcome = Outcome()
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

    def _serve(self, sequence: ClientSequence, keys: bytes, blocks: int, cached: int, outcome: Outcome) -> None:
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

    def _verify(self, sequence: ClientSequence, keys: bytes, first: int, last: int, outcome: Outcome) -> None:
        outcome.verified += last - first
        outcome.corrupt += self._pattern.count_wrong(sequence.tables[0], keys, first, last)

    def _wait_loads(self, sequence: ClientSequence, outcome: Outcome) -> None:
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
    settings = EngineSettings(**json.loads(sys.argv[1]))
    with connect(settings) as client:
        registration = settings.register(client)
        lease = client.open_lease(registration)
        pool = lease.attach(0)
        engine = ReplayEngine(settings, lease, pool, registration.namespace)
        say({"ready": True})
        for line in sys.stdin:
            say(asdict(engine.serve(**json.loads(line))))
        del engine
        pool.close()
        lease.close()


def say(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message, separators=(",", ":")) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
