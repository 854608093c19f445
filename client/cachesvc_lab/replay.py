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
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

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
from cachesvc_lab.replay_report import LatencyHistogram, ReplayReport, Sample, merge_samples
from cachesvc_lab.traces import SECONDS_A_TOKEN, PagePattern, TraceRequest

SETTLE_SECONDS = 30.0
PROGRESS_SECONDS = 1.0
MOVED = ("h2d_bytes", "d2h_bytes")
"""Counters of a daemon that a report has, and its samples by the second."""


class ReplayFailed(Exception):
    """The replay could not go on; the message says what to do."""


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Parameters of a replay. ``kill_every_seconds`` 0: kill no engine, and ``restart_every_seconds`` likewise no
    daemon. ``tells_time``: the trace's, for eviction. ``storage``: the daemon's flag, or empty."""

    trace: str
    engines: int
    device_blocks: int
    host_blocks: int
    write_policy: str
    eviction: str
    block_bytes: int
    block_tokens: int
    layers: int
    kill_every_seconds: float
    tells_time: bool
    storage: str = ""
    restart_every_seconds: float = 0.0
    seed: int = 1


@dataclass
class Tally:
    lock: threading.Lock = field(default_factory=threading.Lock)
    requests: int = 0
    blocks: int = 0
    device: int = 0
    host: int = 0
    storage: int = 0
    computed: int = 0
    uncached: int = 0
    verified: int = 0
    corrupt: int = 0
    kills: int = 0
    rpc: dict[str, LatencyHistogram] = field(default_factory=dict)
    samples: dict[int, Sample] = field(default_factory=dict)

    def add(self, outcome: dict[str, object], blocks: int, second: int) -> None:
        names = ("device", "host", "storage", "computed")
        device, host, storage, computed = (int(str(outcome[name])) for name in names)
        with self.lock:
            self.requests += 1
            self.blocks += blocks
            self.device += device
            self.host += host
            self.storage += storage
            self.computed += computed
            self.uncached += int(str(outcome["uncached"]))
            self.verified += int(str(outcome["verified"]))
            self.corrupt += int(str(outcome["corrupt"]))
            timed = outcome["rpc"]
            assert isinstance(timed, list)
            for name, milliseconds in timed:
                self.rpc.setdefault(name, LatencyHistogram()).record(milliseconds)
            sample = Sample(second, device, host, storage, computed)
            known = self.samples.get(second)
            self.samples[second] = known.plus(sample) if known is not None else sample

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
                self._end(self._process)
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
        line = json.dumps(_told(request)) + "\n"
        while True:
            process = self._process or self._start()
            answer = self._ask(process, line)
            if answer is not None:
                self._run.tally.add(answer, len(request.block_ids), self._run.second())
                return
            self._reap(process)

    def _ask(self, process: subprocess.Popen[str], line: str) -> dict[str, object] | None:
        """Outcome of one request; None when the engine has died over it."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            return None
        if not answer.endswith("\n"):
            return None
        parsed = json.loads(answer)
        assert isinstance(parsed, dict)
        return parsed

    def _start(self) -> subprocess.Popen[str]:
        self._starts += 1
        self._life = self._run.lives.count
        socket = self._run.sockets[self.number % len(self._run.sockets)]
        settings = replace(self._run.settings, socket=socket, name=f"replay-{self.number}.{self._starts}")
        command = module_command("cachesvc_lab.replay", json.dumps(asdict(settings)))
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
        assert process.stdout is not None
        if not process.stdout.readline():
            self._reap(process)
            if process.returncode != -signal.SIGKILL and self._life == self._run.lives.count:
                raise ReplayFailed("an engine did not start; what it said stands above")
            return self._start()
        self._process = process
        return process

    def _reap(self, process: subprocess.Popen[str]) -> None:
        self._process = None
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # what was still to be written goes to its successor
        if code not in (0, -signal.SIGKILL) and self._life == self._run.lives.count:
            raise ReplayFailed(f"an engine ended with exit code {code}; what it said stands above")

    def _end(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _told(request: TraceRequest) -> dict[str, object]:
    """Message to an engine about a request."""
    return {
        "index": request.index,
        "block_ids": request.block_ids,
        "seconds": request.timestamp_ms / 1000,
        "output_tokens": request.output_tokens,
    }


def _kill_all(slots: Iterable[EngineSlot]) -> None:
    """Engines of a daemon that is gone: each is started again with the request that it was at."""
    for slot in slots:
        slot.kill()


class ReplayRun:
    """One replay against the daemon at ``socket``; ``daemon``: its process, where it may be restarted. ``others``:
    sockets of further nodes, to which engines are dealt out in turn."""

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
        self.lives = Lives(daemon)
        self.tally = Tally()
        self.queue = deque(requests)
        self.total = len(self.queue)
        self.settings = EngineSettings(
            socket=socket,
            name="",
            model=f"replay {Path(plan.trace).name} {time.time_ns()}",
            block_bytes=plan.block_bytes,
            block_tokens=plan.block_tokens,
            layers=plan.layers,
            device_blocks=plan.device_blocks,
            host_blocks=plan.host_blocks,
            tells_time=plan.tells_time,
        )
        self._began = 0.0
        self._over = threading.Event()
        self._backend = ""

    def next(self) -> TraceRequest | None:
        """The next request in trace order, or None when all are taken."""
        try:
            return self.queue.popleft()
        except IndexError:
            return None

    def second(self) -> int:
        return int(time.monotonic() - self._began)

    def run(self) -> ReplayReport:
        """Serve every request; the report. Raises ReplayFailed."""
        self._began = time.monotonic()
        slots = [EngineSlot(number, self) for number in range(self.plan.engines)]
        with open_remote(as_path(self.settings.socket)) as channel, OtherNodes(self.sockets[1:]) as others:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            status = admin.GetStatus(admin_pb2.GetStatusRequest())
            self._backend, before = status.backend, dict(status.counters)
            restarter = Restarter(
                self.lives, self.plan.restart_every_seconds, self._over, admin, partial(_kill_all, slots)
            )
            for slot in slots:
                slot.start()
            watcher = threading.Thread(target=self._watch, args=(admin, before), daemon=True)
            watcher.start()
            if self.plan.restart_every_seconds > 0:
                restarter.start()
            if self.plan.kill_every_seconds > 0:
                threading.Thread(target=self._kill, args=(slots,), daemon=True).start()
            for slot in slots:
                slot.join()
            seconds = time.monotonic() - self._began
            self._over.set()
            watcher.join()
            if restarter.is_alive():
                restarter.join()
            for error in (*(slot.error for slot in slots), restarter.error):
                if error is not None:
                    raise ReplayFailed(str(error)) from error
            conservation = self._settle(admin)
            if conservation == "ok":
                conservation = others.settled(self._settle)
            after = self.lives.counters(admin)
            counted = Counter(others.counted())
        counted.update({name: after[name] - before.get(name, 0) for name in after})
        self.tally.note_bytes(int(seconds), counted)  # what moved since the last look, and between other nodes
        return self._report(seconds, conservation, dict(counted))

    def _kill(self, slots: list[EngineSlot]) -> None:
        rng = random.Random(self.plan.seed)
        while not self._over.wait(self.plan.kill_every_seconds):
            if rng.choice(slots).kill():
                with self.tally.lock:
                    self.tally.kills += 1

    def _watch(self, admin: admin_pb2_grpc.AdminServiceStub, before: Mapping[str, int]) -> None:
        """Show progress once a second, and note what the daemon has moved."""
        while not self._over.wait(PROGRESS_SECONDS):
            counters = counters_now(admin)
            if counters is None:
                continue
            moved = {name: counters.get(name, 0) - before.get(name, 0) for name in MOVED}
            self.tally.note_bytes(max(0, self.second() - 1), moved)  # in the second that is over
            tally = self.tally
            ratio = (tally.device + tally.host + tally.storage) / max(tally.blocks, 1)
            end = "\r" if sys.stderr.isatty() else "\n"
            print(
                f"{tally.requests:,} of {self.total:,} requests, hits {ratio:.1%}, verified {tally.verified:,} pages, "
                f"corrupt {tally.corrupt}, kills {tally.kills}",
                end=end,
                file=sys.stderr,
                flush=True,
            )
        if sys.stderr.isatty():
            print(file=sys.stderr)

    def _settle(self, admin: admin_pb2_grpc.AdminServiceStub) -> str:
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
        return "ok" if verdict.ok else "; ".join(verdict.problems[:10])

    def _report(self, seconds: float, conservation: str, counters: dict[str, int]) -> ReplayReport:
        plan, tally = self.plan, self.tally
        if tally.requests != self.total and conservation == "ok":
            conservation = f"{self.total - tally.requests} requests were lost"
        return ReplayReport(
            trace=Path(plan.trace).name,
            engines=plan.engines,
            pool_blocks=plan.device_blocks,
            host_blocks=plan.host_blocks,
            policy=f"{plan.write_policy}, {plan.eviction}",
            block_bytes=plan.block_bytes,
            requests=tally.requests,
            blocks=tally.blocks,
            device_hits=tally.device,
            host_hits=tally.host,
            storage_hits=tally.storage,
            computed=tally.computed,
            evictions=counters.get("evictions", 0),
            h2d_bytes=counters.get("h2d_bytes", 0),
            d2h_bytes=counters.get("d2h_bytes", 0),
            seconds=seconds,
            verified_pages=tally.verified,
            corrupt_pages=tally.corrupt,
            kills=tally.kills,
            conservation=conservation,
            settings={
                "backend": self._backend,
                "write_policy": plan.write_policy,
                "eviction": plan.eviction,
                "clock": "trace" if plan.tells_time else "daemon",
                "uncached": tally.uncached,
                "host_evictions": counters.get("host_evictions", 0),
                "duplicate_blocks": counters.get("duplicate_blocks", 0),
                "tickets_failed": counters.get("tickets_failed", 0),
                **({"nodes": len(self.sockets)} if len(self.sockets) > 1 else {}),
                **({"storage": plan.storage, "restarts": self.lives.restarts} if plan.storage else {}),
            },
            rpc=tally.rpc,
            samples=merge_samples(tuple(tally.samples[second] for second in sorted(tally.samples))),
        )


WAIT = "?wait=2s&deadline=10s"
"""Limits for a machine that both nodes share, where a replay shows what comes over."""

Admin = admin_pb2_grpc.AdminServiceStub


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


class OtherNodes:
    """The nodes of a replay beside its first one."""

    def __init__(self, sockets: Sequence[str]) -> None:
        self.sockets = tuple(sockets)
        self._before: Counter[str] = Counter()
        self._admins: list[Admin] = []
        self._stack = ExitStack()

    def __enter__(self) -> OtherNodes:
        for path in self.sockets:
            channel = self._stack.enter_context(open_remote(as_path(path)))
            self._admins.append(admin_pb2_grpc.AdminServiceStub(channel))
        self._before = self._sum()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def counted(self) -> dict[str, int]:
        """Increase of their counters since the start."""
        now = self._sum()
        return {name: count - self._before[name] for name, count in now.items()}

    def settled(self, settle: Callable[[Admin], str]) -> str:
        """Combined result of ``settle``: "ok", or the problem of the first daemon that has one."""
        return next((said for said in map(settle, self._admins) if said != "ok"), "ok")

    def _sum(self) -> Counter[str]:
        out: Counter[str] = Counter()
        for admin in self._admins:
            out.update(status_counters(admin))
        return out


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
            request = json.loads(line)
            say(asdict(engine.serve(**request)))
        del engine
        pool.close()
        lease.close()


def say(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message, separators=(",", ":")) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()


ANSWER_SECONDS = 10.0
"""A channel finds the next daemon at its socket within that."""


class Lives:
    """The daemons of one replay, one after another. ``count`` changes before one dies and after the next one serves:
    while it stays the same, no daemon has ended. ``daemon``: None where the replay did not start it."""

    def __init__(self, daemon: DaemonProcess | None) -> None:
        self.count = 0
        self.restarts = 0
        self._daemon = daemon
        self._lost: Counter[str] = Counter()

    def restart(self, admin: admin_pb2_grpc.AdminServiceStub, kill_engines: Callable[[], None]) -> None:
        """Kill the daemon and its engines, and start the next one. Raises DaemonFailed."""
        assert self._daemon is not None, "a replay kills the daemon that it started"
        self._lost.update(status_counters(admin))
        self.count += 1
        self._daemon.kill()
        kill_engines()
        self._daemon.start()
        self.restarts += 1
        self.count += 1

    def counters(self, admin: admin_pb2_grpc.AdminServiceStub) -> dict[str, int]:
        """Counters of this daemon, and of earlier ones as last read."""
        return dict(self._lost + Counter(status_counters(admin)))


class Restarter(threading.Thread):
    """Restarts every ``seconds`` until it is ``over``. ``error``: why it ended before."""

    def __init__(
        self,
        lives: Lives,
        seconds: float,
        over: threading.Event,
        admin: admin_pb2_grpc.AdminServiceStub,
        kill_engines: Callable[[], None],
    ) -> None:
        super().__init__(name="restarts", daemon=True)
        self.error: Exception | None = None
        self._lives = lives
        self._seconds = seconds
        self._over = over
        self._admin = admin
        self._kill_engines = kill_engines

    def run(self) -> None:
        try:
            while not self._over.wait(self._seconds):
                self._lives.restart(self._admin, self._kill_engines)
        except Exception as error:  # noqa: BLE001 - the root of this thread; the run reports it
            self.error = error


def status_counters(admin: admin_pb2_grpc.AdminServiceStub) -> dict[str, int]:
    """The daemon's counters. Raises grpc.RpcError where the daemon stays unreachable."""
    status = admin.GetStatus(admin_pb2.GetStatusRequest(), wait_for_ready=True, timeout=ANSWER_SECONDS)
    return dict(status.counters)


def counters_now(admin: admin_pb2_grpc.AdminServiceStub) -> dict[str, int] | None:
    """The daemon's counters; None while there is no daemon."""
    try:
        return dict(admin.GetStatus(admin_pb2.GetStatusRequest()).counters)
    except grpc.RpcError:
        return None
