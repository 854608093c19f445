"""Time to first token by where a prompt's prefix lies: on the device, in the host pool, in a folder, on another daemon,
in a Mooncake Store; beside computing all of it.

    python -m benchmarks.storage.ttft [--json OUT] [--prefix 32768] [--repeats 5] [--folder FOLDER] [--readers 4]

One daemon has the folder and lends to a second one over TCP on loopback; a third has the store, whose master and server
are started here too. Each has an engine in this process, with the compute of an 8B model (``prefill_model``), or with
``--backend shm`` with checksums in its place. Every time counts from Match to the last token's result on the host.
``overlapped``: Match waits until the prefix is in the host pool, then each layer waits for its part of it. ``after``:
everything is loaded, then computed. ``matched`` and ``loaded`` are of the latter: Match has returned, the whole prefix
is on the device. Before each, the tiers above are emptied and the device's pages overwritten; afterwards the daemon
must have counted every block as a hit of its storage, and the result must equal that of a resident prefix bit for bit.
The folder is read around the page cache where its filesystem lets us, which is said. A tier that has had
``--tier-seconds`` gets no further repeat; interrupted, it still writes the rows that there are.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from cachesvc_client import AttachedPool, CacheClientError, gqa
from cachesvc_ctl.core.daemon_process import DaemonFailed, DaemonProcess

from benchmarks.support.daemon_log import event_of
from benchmarks.support.machine import fail, require_gpu
from benchmarks.support.recording import parser_of, save
from benchmarks.swap.plain_compute import PlainCompute
from benchmarks.swap.prefill_engine import (
    BLOCK_TOKENS,
    NEW_TOKENS,
    VOCABULARY,
    Compute,
    Engine,
    GpuCompute,
    Tokens,
    clock,
    running_engine,
)
from tests.contracts import mooncake_rig

GIB, MIB = 1 << 30, 1 << 20
SPARE_BLOCKS = 16
WAIT = "wait=60s&deadline=60s"
WRITE = "write=through&write_rate=64GiB"


@dataclass(frozen=True)
class Backend:
    """Layers of the model, what computes it, and flags of its daemons."""

    layers: int
    compute: Callable[[AttachedPool], Compute]
    flags: tuple[str, ...]

    @property
    def block_bytes(self) -> int:
        """K and V of a block, 8 heads of 128 in bf16."""
        return self.layers * 2 * 8 * BLOCK_TOKENS * 128 * 2


BACKENDS = {
    "cuda": Backend(32, GpuCompute, ("--backend", "cuda", "--host-threads", "8")),
    "shm": Backend(2, PlainCompute, ("--backend", "shm", "--host-chunk", "64MiB")),
}


@dataclass(frozen=True)
class Row:
    """Milliseconds. ``gb_per_s``: of the prefix until it was on the device, median."""

    tier: str
    repeats: int
    overlapped_p50_ms: float
    overlapped_max_ms: float
    after_p50_ms: float | None = None
    after_max_ms: float | None = None
    matched_p50_ms: float | None = None
    loaded_p50_ms: float | None = None
    loaded_max_ms: float | None = None
    gb_per_s: float | None = None


class Run:
    """One prompt and how it is measured."""

    def __init__(self, backend: Backend, said: argparse.Namespace) -> None:
        self._backend = backend
        self._repeats: int = said.repeats
        self._tier_seconds: float = said.tier_seconds
        self._first: int = said.prefix
        rng = np.random.default_rng(said.prefix)
        self._tokens: Tokens = rng.integers(0, VOCABULARY, said.prefix + said.new, np.int64)
        self._resident = b""
        self.blocks: int = said.prefix // BLOCK_TOKENS
        self.size_bytes = self.blocks * backend.block_bytes
        self.rows: list[Row] = []
        self.left_out: dict[str, str] = {}
        self.filesystem = ""
        self.is_direct = False

    @contextmanager
    def node(self, *flags: str, event: str = "ready") -> Iterator[tuple[DaemonProcess, Engine]]:
        """A daemon with room for the prompt on the device and for two prefixes on the host: one fetch takes no more
        than half of a host pool."""
        device = len(self._tokens) // BLOCK_TOKENS + SPARE_BLOCKS
        host = 2 * (self.blocks + SPARE_BLOCKS)
        layout = gqa(layers=self._backend.layers, kv_heads=8, head_dim=128, block_tokens=BLOCK_TOKENS)
        pools = [("--device-pool", device), ("--host-pool", host)]
        sizes = [part for name, pages in pools for part in (name, str(pages * self._backend.block_bytes + 64 * MIB))]
        every = [*self._backend.flags, "--write-policy", "write_through", *sizes, *flags]
        with DaemonProcess(every, whole=True) as daemon:
            event_of(daemon, event)
            running = running_engine(daemon.socket, layout, self._backend.compute, device_pages=device, host_pages=host)
            with running as engine:
                yield daemon, engine

    def prepare(self, engine: Engine) -> None:
        """Compute the prefix, wait until its storage has it, and note the result with it on the device."""
        engine.compute_prefix(self._tokens[: self._first])
        engine.wait_until(
            lambda counters: counters.get("storage_kept_blocks", 0) >= self.blocks, "the storage has the prefix"
        )
        self._resident = self._overlapped(engine, on_host=False)()

    def recompute(self, engine: Engine) -> None:
        """A row without the cache. Its last bits may be others: it computes in other pieces."""
        every = engine.to_device(self._tokens)
        self._repeat("recompute", lambda: engine.recompute(every))

    def device(self, engine: Engine) -> None:
        """A row of what is in place."""
        engine.settle()
        overlapped = self._overlapped(engine, on_host=False)
        self._repeat("device", lambda: self._check("device", overlapped()))

    def host(self, engine: Engine) -> None:
        """A row of the host pool."""
        self._load("host", engine, engine.leave_to_host, from_storage=0)

    def storage(self, tier: str, engine: Engine) -> None:
        """A row of what is behind the host pool."""
        self._load(tier, engine, engine.leave_to_storage, from_storage=self.blocks)

    def _overlapped(self, engine: Engine, *, on_host: bool) -> Callable[[], bytes]:
        prefix, new = engine.keys(self._tokens[: self._first]), engine.to_device(self._tokens[self._first :])
        return lambda: engine.overlapped(prefix, new, self._first, on_host=on_host)

    def _repeat(self, tier: str, work: Callable[[], object]) -> None:
        spent = [clock(work)[0] * 1e3 for _ in range(self._repeats + 1)][1:]
        self._add(Row(tier, len(spent), statistics.median(spent), max(spent)))

    def _load(self, tier: str, engine: Engine, leave: Callable[[], None], *, from_storage: int) -> None:
        prefix, new = engine.keys(self._tokens[: self._first]), engine.to_device(self._tokens[self._first :])
        overlapped = self._overlapped(engine, on_host=True)
        spent: dict[str, list[float]] = {"overlapped": [], "after": [], "matched": [], "loaded": []}
        until = time.monotonic() + self._tier_seconds
        for repeat in range(self._repeats + 1):  # the first one warms up
            if repeat > 1 and time.monotonic() > until:
                break
            before = engine.counters().get("hit_blocks_storage", 0)
            leave()
            seconds, result = clock(overlapped)
            self._check(tier, result)
            spent["overlapped"].append(seconds)
            leave()
            began = time.perf_counter()
            self._check(tier, engine.loaded_first(prefix, new, self._first))
            spent["after"].append(time.perf_counter() - began)
            spent["matched"].append(engine.matched_s - began)
            spent["loaded"].append(engine.loaded_s - began)
            found = engine.counters().get("hit_blocks_storage", 0) - before
            assert found == 2 * from_storage, f"{tier}: {found} blocks came from storage, not {2 * from_storage}"
        p50 = {name: statistics.median(each[1:]) * 1e3 for name, each in spent.items()}
        most = {name: max(each[1:]) * 1e3 for name, each in spent.items()}
        self._add(
            Row(
                tier,
                len(spent["after"]) - 1,
                p50["overlapped"],
                most["overlapped"],
                p50["after"],
                most["after"],
                p50["matched"],
                p50["loaded"],
                most["loaded"],
                self.size_bytes / p50["loaded"] / 1e6,
            )
        )

    def _check(self, tier: str, result: bytes) -> None:
        assert result == self._resident, f"{tier}: the result differs from that of a resident prefix"

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        names = ("overlapped_p50_ms", "overlapped_max_ms", "after_p50_ms", "after_max_ms", "matched_p50_ms")
        figures = [getattr(row, name) for name in (*names, "loaded_p50_ms", "gb_per_s")]
        cells = " ".join(f"{'-':>10}" if one is None else f"{one:>10.2f}" for one in figures)
        print(f"{row.tier:>10} {row.repeats:>7} {cells}", flush=True)


def measure(run: Run, folder: Path, readers: int) -> None:
    """Every row that can be had here."""
    heads = ("overlapped", "max", "after", "max", "matched", "loaded", "GB/s")
    print(f"{'tier':>10} {'repeats':>7} {' '.join(f'{head:>10}' for head in heads)}   (ms, p50 and max)")
    capacity = 2 * run.size_bytes + GIB
    keeps = f"file:{folder}/cache?capacity={capacity}&floor=0&readers={readers}&{WRITE}&{WAIT}"
    with run.node("--storage", keeps, "--peer-listen", "127.0.0.1:0") as (daemon, engine):
        run.filesystem = filesystem_of(folder)
        run.is_direct = "storage_not_direct" not in daemon.log.read_text(encoding="utf-8")
        run.prepare(engine)
        run.recompute(engine)
        run.host(engine)
        run.device(engine)
        run.storage("file", engine)
        lender = event_of(daemon, "peers_ready")["port"]
        with run.node("--peers", f"127.0.0.1:{lender}?{WAIT}") as (_, borrower):
            run.storage("peer", borrower)
    if why := mooncake_rig.why_not():
        run.left_out["mooncake"] = why
        print(f"{'mooncake':>10} left out: {why}")
    else:
        measure_mooncake(run, folder, readers)


def measure_mooncake(run: Run, folder: Path, readers: int) -> None:
    """A store of one server, with room to spare: its master begins to evict at 90 %."""
    with ExitStack() as stack:
        store = mooncake_rig.Store(folder, segment_bytes=run.size_bytes * 3 // 2 + GIB)
        stack.callback(store.close)
        store.wait_for_server()
        spec = f"mooncake:{store.address}?discard={store.discard}s&readers={readers}&{WRITE}&{WAIT}"
        with run.node("--storage", spec, event="storage_connected") as (_, engine):
            run.prepare(engine)
            run.storage("mooncake", engine)


def filesystem_of(folder: Path) -> str:
    """Type of the filesystem, and its device."""
    where = str(folder.resolve())
    mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    over = [each for each in mounts if where == each[1] or where.startswith(each[1].rstrip("/") + "/")]
    device, _, kind, *_ = max(over, key=lambda each: len(each[1]))
    return f"{kind} ({device})"


def main() -> None:
    """Measure, print the table, and write it as JSON where asked."""
    parser = parser_of(__doc__)
    parser.add_argument("--backend", choices=BACKENDS, default="cuda")
    parser.add_argument("--prefix", type=int, default=32768, help=f"tokens, a multiple of {BLOCK_TOKENS}")
    parser.add_argument("--new", type=int, default=NEW_TOKENS, help="tokens behind it, likewise")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tier-seconds", type=float, default=15.0, help="then no further repeat of a tier begins")
    parser.add_argument("--readers", type=int, default=4, help="threads that read of the folder and of the store")
    parser.add_argument("--folder", type=Path, help="on the disk that is meant (where temporary files go)")
    said = parser.parse_args()
    if said.prefix % BLOCK_TOKENS or said.new % BLOCK_TOKENS or min(said.prefix, said.new, said.repeats) <= 0:
        fail(f"--prefix and --new are multiples of {BLOCK_TOKENS}, and --repeats is at least 1")
    if said.backend == "cuda":
        require_gpu("torch")
    began = time.monotonic()
    run = Run(BACKENDS[said.backend], said)
    try:
        with tempfile.TemporaryDirectory(prefix="ttft-", dir=said.folder) as folder:
            measure(run, Path(folder), said.readers)
    except (DaemonFailed, CacheClientError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        run.left_out["others"] = "interrupted"
    found = {
        "benchmark": "storage_ttft",
        "backend": said.backend,
        "prefix_tokens": said.prefix,
        "new_tokens": said.new,
        "prefix_bytes": run.size_bytes,
        "readers": said.readers,
        "seconds": round(time.monotonic() - began, 1),
        "filesystem": run.filesystem,
        "direct": run.is_direct,
        "left_out": run.left_out,
        "rows": [
            {name: round(one, 2) if isinstance(one, float) else one for name, one in asdict(row).items()}
            for row in run.rows
        ],
    }
    save(said, found)


if __name__ == "__main__":
    main()
