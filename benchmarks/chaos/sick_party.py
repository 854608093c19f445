"""One party is sick, and a bystander measures its own calls: longest wait, and hits that it holds and does not get.

    python -m benchmarks.chaos.sick_party [--json OUT] [--seconds 8] [--only device:hung ...]

Real daemons on shm with real faults: movers, other nodes and engines are stopped (hung), stopped most of the time
(slow), killed (dead), kept from memory or closed to callers (refusing), or answer wrong bytes (lying). The bystander is
an engine on a sound device of the first daemon. It matches a prompt that it has published, computes others, and
registers a new model; beside a sick peer it takes prompts from a sound one. ``NOT_RUN`` says which cells have no row.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import resource
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from cachesvc_client import CacheClient, CacheClientError, Expected
from cachesvc_client.lease import Lease
from cachesvc_ctl.core.daemon_process import DaemonProcess

from benchmarks.support.calls import compute
from benchmarks.support.daemon_log import event_of
from benchmarks.support.movers import movers_of
from benchmarks.support.recording import parser_of, save
from cachesvc.model.layout import Layout, Plane, PlaneGroup

LAYOUT = Layout(4, 1, (PlaneGroup("full"),), (Plane("k", 0, "full", (4096,), "uint8"),))
KEY_BYTES = 32
BLOCKS = 40
PEER_PROMPTS, PEER_BLOCKS = 60, 16
STOPPED_SECONDS, RUNNING_SECONDS = 0.4, 0.05
SETTLED_SECONDS = 1.0
SICK, SOUND = "shm-0", "shm-1"
COMMON = ("--backend", "shm", "--shm-devices", "2", "--device-pool", "64MiB", "--lease-seconds", "10")
POOLS = ("--host-pool", "64MiB", "--host-chunk", "2MiB")

NOT_RUN = {
    "device:lying": "no real mover brings wrong bytes: tests/unit/mover/test_mover_peers.py has one in a thread",
    "disk:slow": "needs a block device or FUSE: tests/unit/storage has slow disks behind the seam",
    "engine:refusing": "an engine refuses nothing: it only calls",
    "engine:lying": "wrong keys need an engine that chains them wrongly: tests/chaos/test_rude_callers.py",
}


@dataclass
class Seen:
    """Waits and hits of the bystander. ``known``, ``found``: blocks that it was to get, and got."""

    waits_ms: list[float] = field(default_factory=list)
    start_ms: float = 0.0
    known: int = 0
    found: int = 0
    refused: list[str] = field(default_factory=list)


class Bystander:
    """An engine on the sound device. ``peer``: a sound node whose prompts it takes, one after another."""

    def __init__(self, daemon: DaemonProcess, rng: np.random.Generator, prompts: list[bytes], peer: str) -> None:
        self._socket, self._rng, self._prompts, self._peer = daemon.socket, rng, iter(prompts), peer
        self._known = rng.bytes(KEY_BYTES * BLOCKS)
        self.seen = Seen()

    @contextmanager
    def engine(self) -> Iterator[Lease]:
        """Its lease, with the known prompt published."""
        with CacheClient(self._socket, engine="bystander") as client:
            model = client.register("sound", LAYOUT, device_pages=[400], host_pages=[400], devices=[SOUND])
            with client.open_lease(model) as lease:
                compute(lease, self._known)
                yield lease

    def run(self, lease: Lease, seconds: float) -> None:
        """Call until the time is over, and start another engine meanwhile."""
        starts = threading.Thread(target=self._start_another)
        starts.start()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._timed(lambda: self._hit(lease))
            self._timed(lambda: compute(lease, self._rng.bytes(KEY_BYTES * 8)))
            if self._peer and (prompt := next(self._prompts, None)) is not None:
                self._timed(lambda: self._borrow(lease, prompt))
        starts.join()

    def _timed(self, call: Callable[[], None]) -> None:
        began = time.perf_counter()
        try:
            call()
        except CacheClientError as refused:
            self.seen.refused.append(f"{type(refused).__name__}: {refused}"[:120])
        self.seen.waits_ms.append((time.perf_counter() - began) * 1e3)

    def _hit(self, lease: Lease) -> None:
        with lease.match(self._known) as sequence:
            self.seen.known += BLOCKS
            self.seen.found += sequence.hit_blocks
            if sequence.hit_blocks < BLOCKS:  # as an engine does
                sequence.allocate(BLOCKS)
                sequence.publish(BLOCKS)

    def _borrow(self, lease: Lease, prompt: bytes) -> None:
        self.seen.known += PEER_BLOCKS
        with lease.match(prompt, expected=Expected(self._peer, patience=10.0, is_computed=True)) as sequence:
            self.seen.found += sequence.hit_blocks

    def _start_another(self) -> None:
        began = time.perf_counter()
        with CacheClient(self._socket, engine="newcomer") as client:
            try:
                client.register("new", LAYOUT, device_pages=[32], host_pages=[32], devices=[SOUND], timeout_s=90)
            except CacheClientError as refused:
                self.seen.refused.append(f"Register: {refused}"[:120])
        self.seen.start_ms = (time.perf_counter() - began) * 1e3


def disturb(socket_path: str, device: str, peer: str, prompts: list[bytes], stop: threading.Event) -> None:
    """Ask the sick party for things until the end: start engines there, compute there, take prompts from there."""
    rng = np.random.default_rng(7)
    with suppress(CacheClientError), CacheClient(socket_path, engine="sick") as client:
        model = client.register("sick", LAYOUT, device_pages=[200], host_pages=[200], devices=[device], timeout_s=60)
        with client.open_lease(model) as lease:
            for prompt in prompts:
                if stop.is_set():
                    return
                with suppress(CacheClientError):
                    compute(lease, rng.bytes(KEY_BYTES * 8))
                    if peer:
                        lease.match(prompt, expected=Expected(peer, patience=3.0, is_computed=True)).release()


def engine_with_leases(socket_path: str, ready: Any, leases: int) -> None:
    """A process with leases and open sequences, until it is ended."""
    with CacheClient(socket_path, engine="sick") as client:
        model = client.register("sick", LAYOUT, device_pages=[leases * 8 + 8], host_pages=[8], devices=[SOUND])
        kept: list[Any] = []
        for _ in range(leases):
            kept.append(client.open_lease(model))
            sequence = kept[-1].match(b"")
            sequence.allocate(8)
            kept.append(sequence)
        ready.set()
        signal.pause()


class Stopping:
    """Stops and continues a process by turns: it is slow."""

    def __init__(self, pid: int) -> None:
        self._pid, self._over = pid, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            os.kill(self._pid, signal.SIGSTOP)
            self._over.wait(STOPPED_SECONDS)
            os.kill(self._pid, signal.SIGCONT)
            self._over.wait(RUNNING_SECONDS)

    def close(self) -> None:
        """Let it run."""
        self._over.set()
        self._thread.join()


def fall_ill(stack: ExitStack, how: str, pid: int) -> None:
    """Make a process sick by signals; it goes on when the stack is left, if it can."""
    if how == "dead":
        os.kill(pid, signal.SIGKILL)
    elif how == "slow":
        stack.callback(Stopping(pid).close)
    elif how == "refusing":
        resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))
    else:
        assert how == "hung"
        os.kill(pid, signal.SIGSTOP)
        stack.callback(_go_on, pid)


def _go_on(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def answer_badly(stack: ExitStack, garbage: bytes) -> str:
    """A port that answers each connection with garbage, or closes it; its address."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.sendall(garbage)

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def spoil(folder: Path) -> None:
    """Change the last byte of each stored object."""
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size > KEY_BYTES:
            with path.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)[0]
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last ^ 1]))


@contextmanager
def lender(prompts: list[bytes]) -> Iterator[tuple[DaemonProcess, str]]:
    """Another node with these prompts on its host, and its address."""
    flags = ("--peer-listen", "127.0.0.1:0", "--peer-allow", "127.0.0.0/8", "--write-policy", "write_through")
    with DaemonProcess([*COMMON, *POOLS, *flags], whole=True) as daemon:
        with CacheClient(daemon.socket, engine="lender") as client:
            pages = PEER_PROMPTS * PEER_BLOCKS + 8
            with client.open_lease(client.register("sound", LAYOUT, device_pages=[pages], host_pages=[pages])) as lease:
                for prompt in prompts:
                    compute(lease, prompt)
                time.sleep(SETTLED_SECONDS)  # for its copies to the host
        yield daemon, f"127.0.0.1:{event_of(daemon, 'peers_ready')['port']}"


def measure(party: str, how: str, seconds: float) -> dict[str, Any]:
    """One row: a party, sick in one way (``well``: in none), and what the bystander saw."""
    rng = np.random.default_rng(3)
    prompts = [[rng.bytes(KEY_BYTES * PEER_BLOCKS) for _ in range(PEER_PROMPTS)] for _ in range(2)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cachesvc-disk-")))
        flags, under, sick_peer, sound_peer, sick_pid = [*COMMON], list[str](), "", "", 0
        is_filling = (party, how) == ("device", "refusing")
        flags += ["--host-pool", "256MiB", "--host-chunk", "2MiB", "--host-threads", "1"] if is_filling else [*POOLS]
        if party == "peer":
            flags += ["--peer-listen", "127.0.0.1:0", "--peer-allow", "127.0.0.0/8"]
            _, sound_peer = stack.enter_context(lender(prompts[0]))
            sick_daemon, sick_peer = stack.enter_context(lender(prompts[1]))
            sick_pid = sick_daemon.process.pid
            if how in ("refusing", "lying"):
                sick_peer = answer_badly(stack, rng.bytes(4096) if how == "lying" else b"")
        if party == "disk":
            flags += ["--storage", f"file:{folder}/kept?capacity=64MiB&floor=0", "--write-policy", "write_through"]
            if how == "hung":
                under = [sys.executable, "-m", "benchmarks.storage.daemon"]
        daemon = stack.enter_context(DaemonProcess(flags, under=under, whole=not is_filling))
        if is_filling:
            fall_ill(stack, how, movers_of(daemon.process.pid)[SICK])
        bystander = Bystander(daemon, rng, prompts[0], sound_peer)
        lease = stack.enter_context(bystander.engine())
        if party == "engine" and how != "well":
            ready = mp.get_context("spawn").Event()
            sick = mp.get_context("spawn").Process(target=engine_with_leases, args=(daemon.socket, ready, 64))
            sick.start()
            stack.callback(sick.kill)
            ready.wait(60)
            assert sick.pid is not None
            fall_ill(stack, how, sick.pid)
        elif party == "device" and how != "well" and not is_filling:
            fall_ill(stack, how, movers_of(daemon.process.pid)[SICK])
        elif party == "peer" and how in ("hung", "dead", "slow"):
            fall_ill(stack, how, sick_pid)
        elif party == "disk" and how != "well":
            time.sleep(SETTLED_SECONDS)  # for objects to be written
            if how == "dead":
                shutil.rmtree(folder / "kept")
            elif how == "lying":
                spoil(folder)
            elif how == "refusing":
                resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        stop = threading.Event()
        asks = threading.Thread(
            target=disturb, args=(daemon.socket, SICK if party == "device" else SOUND, sick_peer, prompts[1], stop)
        )
        asks.daemon = True
        if party != "engine":
            asks.start()
        bystander.run(lease, seconds)
        stop.set()
    return row(party, how, bystander.seen)


def row(party: str, how: str, seen: Seen) -> dict[str, Any]:
    """Figures of one row."""
    return {
        "party": party,
        "sick": how,
        "calls": len(seen.waits_ms),
        "longest_ms": round(max(seen.waits_ms), 1),
        "p50_ms": round(statistics.median(seen.waits_ms), 2),
        "start_ms": round(seen.start_ms),
        "known_blocks": seen.known,
        "lost_blocks": seen.known - seen.found,
        "refused": len(seen.refused),
        "why": seen.refused[0] if seen.refused else "",
    }


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--only", nargs="+", default=[], metavar="PARTY:SICK")
    said = parser.parse_args()
    cells = [(party, how) for party in ("device", "peer", "disk", "engine") for how in WAYS]
    wanted = [
        each for each in cells if (not said.only or ":".join(each) in said.only) and ":".join(each) not in NOT_RUN
    ]
    rows = []
    for party, how in wanted:
        rows.append(measure(party, how, said.seconds))
        print(
            "{party:>7} {sick:>9}: longest {longest_ms:8.1f} ms, start {start_ms:6} ms, lost {lost_blocks} of "
            "{known_blocks} blocks, refused {refused} {why}".format(**rows[-1]),
            flush=True,
        )
    save(said, {"benchmark": "sick_party", "seconds": said.seconds, "rows": rows, "not_run": NOT_RUN})


WAYS = ("well", "hung", "refusing", "slow", "lying", "dead")

if __name__ == "__main__":
    main()
