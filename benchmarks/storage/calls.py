"""Cost of storage and of other nodes to a call, healthy and broken: ``python -m benchmarks.storage.calls --json OUT``.

Calls by the lane, in turns with those to a daemon without storage: a Match of a prompt that is resident whole, a Match
of a prompt that no node has, a Step of 32 sequences that each grow by a block. What is behind the other daemon: an idle
folder, a disk that never answers, a Mooncake Store that is idle, whose master or server is stopped (SIGSTOP) or killed,
or that lies behind a link of 1 Mbit/s; a bucket (SeaweedFS) that is idle, stopped, killed, slow (each answer a second
late) or lying (answers cut in the middle); and a peer that is idle or stopped. Cases that need Mooncake, SeaweedFS or
network namespaces are skipped where there are none, with a message.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cachesvc_client import opaque
from cachesvc_ctl.core.daemon_process import DaemonProcess

from benchmarks.support.calls import compute, leased, match_ms, timed_ms
from benchmarks.support.daemon_log import event_of
from benchmarks.support.recording import parser_of, save
from cachesvc.storage.s3.client import S3Options
from tests.contracts import mooncake_rig, s3_rig
from tests.e2e.storage import network as network_rig

BLOCK_TOKENS = 64
MATCH_BLOCKS = 2048
STEP_SEQUENCES = 32
ROUNDS = 40
CALLS = 50
FLAGS = ["--backend", "shm", "--device-pool", "256MiB", "--host-pool", "256MiB", "--host-chunk", "64MiB"]
WAIT = "wait=250ms&deadline=2s"


class Caller:
    """An engine of one daemon, with a prompt that is resident whole."""

    def __init__(self, daemon: DaemonProcess, stack: ExitStack) -> None:
        layout = opaque(block_bytes=4096, block_tokens=BLOCK_TOKENS, layers=1)
        self._lease = stack.enter_context(leased(daemon.socket, layout, 16384, 16384))
        stack.enter_context(self._lease.attach(0))
        self._rng = np.random.default_rng(1)
        self.keys = self._rng.bytes(32 * MATCH_BLOCKS)
        compute(self._lease, self.keys)
        self.ms: dict[str, list[float]] = {"match": [], "match_absent": [], "step": []}

    def match(self) -> None:
        """Match a resident prompt, and one that no node has."""
        self.ms["match"].append(match_ms(self._lease, self.keys))
        self.ms["match_absent"].append(match_ms(self._lease, self._rng.bytes(32 * MATCH_BLOCKS)))

    def steps(self, count: int) -> None:
        """Grow each of the sequences by a block, ``count`` times."""
        sequences = [self._lease.match(self._rng.bytes(32)) for _ in range(STEP_SEQUENCES)]
        with self._lease.step() as stream:
            for _ in range(count):
                batch = stream.batch()
                for sequence in sequences:
                    batch.allocate(sequence, sequence.blocks + 1)
                self.ms["step"].append(timed_ms(partial(stream.submit, batch)))
        for sequence in sequences:
            sequence.release()


# -- what is behind the daemon -------------------------------------------------------------------------------------


class Behind(NamedTuple):
    """Backend behind a daemon: how it is started, and what to do to it before the calls and undo after them."""

    flags: Sequence[str]
    under: Sequence[str] = ()
    harm: Callable[[], object] = lambda: None
    mend: Callable[[], object] = lambda: None
    event: str = "ready"


Case = Callable[[Path], AbstractContextManager[Behind]]


@contextmanager
def folder_idle(folder: Path) -> Iterator[Behind]:
    """Nothing is read or written, but what the calls lead to."""
    yield Behind(["--storage", f"file:{folder}/idle?capacity=1GiB&floor=0&write=through&{WAIT}"])


@contextmanager
def folder_frozen(folder: Path) -> Iterator[Behind]:
    """A disk that never answers."""
    under = [sys.executable, "-m", "benchmarks.storage.daemon"]
    yield Behind(["--storage", f"file:{folder}/frozen?capacity=1GiB&{WAIT}"], under)


def mooncake(victim: str = "", how: str = "") -> Case:
    """A store of one server, of which ``victim`` is killed or frozen."""

    @contextmanager
    def made(folder: Path) -> Iterator[Behind]:
        store = mooncake_rig.Store(folder)
        store.wait_for_server()
        try:
            harm = getattr(getattr(store, victim), how) if victim else lambda: None
            yield Behind(_on_store(store, "127.0.0.1"), harm=harm, event="storage_connected")
        finally:
            store.close()

    return made


@contextmanager
def mooncake_slow(folder: Path) -> Iterator[Behind]:
    """A store on another node, behind a link that became slow."""
    with network_rig.Network(folder) as network:
        with network.inside(0):
            store = mooncake_rig.Store(folder, host=network.address(0))
            store.wait_for_server()
        under = ["ip", "netns", "exec", network.names[1]]
        flags = _on_store(store, network.address(1))
        yield Behind(flags, under, network.slow_down, network.speed_up, "storage_connected")
        store.close()


def _on_store(store: mooncake_rig.Store, host: str) -> list[str]:
    return ["--storage", f"mooncake:{store.address}?host={host}&{WAIT}&discard={store.discard}s"]


def bucket(harm: Callable[[s3_rig.Server, s3_rig.Proxy], object]) -> Case:
    """An S3-compatible store behind a proxy, to which ``harm`` is done."""

    @contextmanager
    def made(folder: Path) -> Iterator[Behind]:
        server = s3_rig.Server(folder / "store")
        proxy = s3_rig.Proxy(server.port)
        try:
            server.wait(S3Options("bench", endpoint=server.endpoint))
            yield Behind(
                ["--storage", f"s3://bench?endpoint={proxy.endpoint}&{WAIT}"], harm=lambda: harm(server, proxy)
            )
        finally:
            proxy.close()
            server.kill()

    return made


def _slow(_: s3_rig.Server, proxy: s3_rig.Proxy) -> None:
    proxy.harm = s3_rig.late


def _lying(_: s3_rig.Server, proxy: s3_rig.Proxy) -> None:
    proxy.harm = s3_rig.half


def peer(*, is_frozen: bool) -> Case:
    """Another daemon that lends, and has nothing."""

    @contextmanager
    def made(_: Path) -> Iterator[Behind]:
        with DaemonProcess([*FLAGS, "--peer-listen", "127.0.0.1:0"]) as lender:
            process = lender.process
            flags = ["--peers", f"127.0.0.1:{event_of(lender, 'peers_ready')['port']}?{WAIT}"]
            if not is_frozen:
                yield Behind(flags)
                return
            stop, go_on = ((lambda each=each: process.send_signal(each)) for each in (signal.SIGSTOP, signal.SIGCONT))
            yield Behind(flags, harm=stop, mend=go_on)

    return made


CASES: dict[str, Case] = {
    "folder, idle": folder_idle,
    "folder, frozen": folder_frozen,
    "mooncake, idle": mooncake(),
    "mooncake, master frozen": mooncake("master", "freeze"),
    "mooncake, server frozen": mooncake("server", "freeze"),
    "mooncake, master killed": mooncake("master", "kill"),
    "mooncake, server killed": mooncake("server", "kill"),
    "mooncake, link slow": mooncake_slow,
    "s3, idle": bucket(lambda *_: None),
    "s3, frozen": bucket(lambda server, _: server.freeze()),
    "s3, killed": bucket(lambda server, _: server.kill()),
    "s3, slow": bucket(_slow),
    "s3, lying": bucket(_lying),
    "peer, idle": peer(is_frozen=False),
    "peer, frozen": peer(is_frozen=True),
}


def why_not(name: str) -> str:
    """Reason why a case cannot run here; empty where it can."""
    if name.startswith("s3"):
        return s3_rig.why_not()
    why = mooncake_rig.why_not() if name.startswith("mooncake") else ""
    return why or (network_rig.why_not() if name.endswith("slow") else "")


# -- calls ---------------------------------------------------------------------------------------------------------


def measure(name: str, rounds: int) -> dict[str, Any]:
    """One case beside a daemon without storage, round after round."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="calls-")))
        behind = stack.enter_context(CASES[name](folder))
        plain = stack.enter_context(DaemonProcess(FLAGS))
        daemon = stack.enter_context(DaemonProcess([*FLAGS, *behind.flags], under=behind.under))
        event_of(daemon, behind.event)
        callers = [Caller(plain, stack), Caller(daemon, stack)]
        behind.harm()
        for _ in range(rounds):
            for caller in callers:
                for _ in range(CALLS):
                    caller.match()
                caller.steps(CALLS // 2)
        behind.mend()
        return figures(*callers)


def figures(plain: Caller, caller: Caller) -> dict[str, Any]:
    """Milliseconds, and as multiples of those without storage."""
    out: dict[str, Any] = {}
    for name, times in caller.ms.items():
        row: dict[str, float] = {"n": len(times)}
        for share in (50, 99):
            own, base = (float(np.percentile(each, share)) for each in (times, plain.ms[name]))
            row |= {f"p{share}_ms": round(own, 4), f"plain_p{share}_ms": round(base, 4)}
            row[f"p{share}_ratio"] = round(own / base, 3)
        out[name] = row | {"max_ms": round(max(times), 2)}
    return out


def main() -> None:
    """Print and write JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    said = parser.parse_args()
    cases: dict[str, Any] = {}
    for name in CASES:
        if said.only not in name:
            continue
        if why := why_not(name):
            print(f"{name}: left out: {why}", file=sys.stderr)
            continue
        cases[name] = measure(name, said.rounds)
        for call, row in cases[name].items():
            print(name, call, row, flush=True)
    save(said, {"rounds": said.rounds, "cases": cases})


if __name__ == "__main__":
    main()
