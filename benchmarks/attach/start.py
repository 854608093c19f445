"""Start cost of a daemon on a GPU, and the time until an engine can read a prefix that is already cached.

    python -m benchmarks.attach [--json OUT] [--pools 1,16,64] [--host-gib 64]

Engines are processes of their own (``benchmarks.attach.prefixes``) beside one daemon; 8 MiB a block, 32k tokens: 4 GiB.
``start``: until the daemon serves, and the rate at which the rest of its host pool comes. ``memory``: what it then
takes of the GPU without a model, beside another process's context; ``context_bytes`` is what it says itself.
``restart``: an engine fills a device pool with prompts and ends; the next one's time from ``connect`` to the first
page's bytes counts once CuPy is imported and its context made. ``hit``: a second engine finds the first one's prefix on
the device; nothing may be copied. ``host``: the same prefix is on the host alone and all else was overwritten; from
Match until it is there. Every byte is checked.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import grpc
from cachesvc_ctl.core.daemon_process import DaemonFailed, DaemonProcess
from kvcache.v1 import admin_pb2, admin_pb2_grpc

from benchmarks.attach.interference import Neighbour, NeighbourLost
from benchmarks.attach.prefixes import BLOCK_BYTES, BLOCK_TOKENS, PAGE_SHAPES, Hits, Loaded, Reused, Wish, run_engine
from benchmarks.support.machine import describe_gpu, describe_machine, fail, require_gpu
from benchmarks.support.recording import write_result
from cachesvc.config import DEVICE_MEMORY, Config

GIB, MIB = 1 << 30, 1 << 20
PREFIX_BLOCKS = 32768 // BLOCK_TOKENS
SPARE_PAGES = 16
"""Pages reserved for what an engine computes anew, beside a pool that must be found whole."""
DEVICE_PAGES = PREFIX_BLOCKS + SPARE_PAGES
LEAST_DEVICE_GIB = 5
LEAST_HOST_GIB = 9
BESIDE_BYTES = 3 * GIB
"""Left on the GPU beside the largest pool: contexts of the daemon and of two engines."""
HITS, LOADS = 20, 5
WAYS = {"whole": False, "by layer": True}
BUDGETS = {"restart_ms": 1000.0, "hit_ms": 5.0, "context_bytes": 600 * MIB}
CITED_OF = "LMCache 0.5.6 on an H100"
CITED = {"token-major": {"ms": 92, "gb_per_s": 46}, "head-major": {"ms": 105, "gb_per_s": 41}}
FILL_SECONDS = 300.0
SETTLE_SECONDS = 60.0
CALL_SECONDS = 30.0
LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class Start:
    """``ready_s``: by the daemon's own clock; ``serving_s``, ``filled_s`` (the host pool): since its process began."""

    host_gib: int
    ready_s: float
    serving_s: float
    filled_s: float
    ready_gib_when_serving: float
    gb_per_s: float


@dataclass(frozen=True)
class Restart:
    """``usable_ms``: connect to first page; ``whole_ms``: until every prompt was found; ``since_spawn_ms``: from the
    process's start to the first page."""

    pool_gib: int
    prompts: int
    blocks: int
    usable_ms: float
    whole_ms: float
    since_spawn_ms: float
    phases_ms: dict[str, float]
    wrong_blocks: int


@dataclass(frozen=True)
class Hit:
    """From Match to the first page's bytes; the first time apart. Bytes that the daemon copied before and after."""

    blocks: int
    first_ms: float
    median_ms: float
    worst_ms: float
    h2d_bytes: tuple[int, int]
    d2h_bytes: tuple[int, int]
    wrong_blocks: int


@dataclass(frozen=True)
class Host:
    """From Match; medians. ``gb_per_s``: of all bytes in ``all_ms``."""

    order: str
    way: str
    copy_bytes: int
    repeats: int
    first_layer_ms: float | None
    all_ms: float
    worst_ms: float
    gb_per_s: float
    wrong_blocks: int


class Unfit(Exception):
    """A result that cannot be counted; the message says why."""


class Node:
    """A running daemon as its operator sees it."""

    def __init__(self, socket: str, channel: grpc.Channel) -> None:
        self.socket = socket
        self._admin = admin_pb2_grpc.AdminServiceStub(channel)
        self._evictions = count(1)

    def status(self) -> admin_pb2.GetStatusResponse:
        """Pools, counters, devices."""
        return self._admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=CALL_SECONDS)

    def settle(self) -> dict[str, int]:
        """Wait until nothing is being copied; the counters. Raises Unfit."""
        until = time.monotonic() + SETTLE_SECONDS
        while (counters := dict(self.status().counters))["tickets_running"]:
            if time.monotonic() > until:
                raise Unfit(f"copies still run after {SETTLE_SECONDS:g} s")
            time.sleep(LOOK_SECONDS)  # between two looks; nothing is timed here
        return counters

    def leave_to_host(self, model_id: int) -> None:
        """Take a prefix off the device. Raises Unfit."""
        self.settle()
        request = admin_pb2.EvictRequest(request_id=next(self._evictions), model_id=model_id, tier="device")
        evicted = self._admin.Evict(request, timeout=CALL_SECONDS).evicted
        if evicted != PREFIX_BLOCKS:
            raise Unfit(f"{evicted} blocks left the device, of {PREFIX_BLOCKS}")


def free_bytes() -> int:
    """Free bytes of the first GPU, measured beside this process's context, which stays until the process ends."""
    from gpu_ops.gpu import find_gpus

    gpu = find_gpus()[0]
    gpu.start()
    return gpu.free_bytes()


def look_at_gpu() -> int:
    """``free_bytes`` in a process of its own, because a daemon counts every context that is there when it starts."""
    with ProcessPoolExecutor(1, mp_context=mp.get_context("spawn")) as pool:
        return pool.submit(free_bytes).result()


def ask(engine: Neighbour, name: str, *arguments: object) -> Any:
    """Have an engine do something. Raises NeighbourLost."""
    engine.send((name, *arguments))
    return engine.answer()


def new_engine(name: str, node: Node, wish: Wish) -> Neighbour:
    """An attached engine. Raises NeighbourLost."""
    return Neighbour(name, run_engine, node.socket, wish, time.monotonic())


def measure_start(node: Node, daemon: DaemonProcess, began_s: float) -> Start:
    """Follow the host pool until all of it has come. Raises Unfit."""
    serving_s = time.monotonic()
    status = node.status()
    first = status.host_pool_ready_bytes
    while status.host_pool_ready_bytes < status.host_pool_bytes:
        if time.monotonic() > serving_s + FILL_SECONDS:
            raise Unfit(f"the host pool had {status.host_pool_ready_bytes / GIB:.0f} GiB after {FILL_SECONDS:g} s")
        time.sleep(LOOK_SECONDS)  # between two looks: asking takes the daemon from filling
        status = node.status()
    filled_s = time.monotonic()
    return Start(
        host_gib=status.host_pool_bytes // GIB,
        ready_s=daemon.seconds_to_ready,
        serving_s=serving_s - began_s,
        filled_s=filled_s - began_s,
        ready_gib_when_serving=first / GIB,
        gb_per_s=(status.host_pool_bytes - first) / (filled_s - serving_s) / 1e9,
    )


def measure_memory(node: Node, free_before: int) -> dict[str, int]:
    """GPU memory of a daemon without models."""
    device = node.status().devices[0]
    return {"taken_bytes": free_before - look_at_gpu(), "context_bytes": device.context_bytes}


def measure_restart(node: Node, pool_gib: int) -> Restart:
    """Fill a pool, leave, and come back. Raises NeighbourLost."""
    pages = pool_gib * GIB // BLOCK_BYTES
    whole, rest = divmod(pages - SPARE_PAGES, PREFIX_BLOCKS)
    prompts = (PREFIX_BLOCKS,) * whole + ((rest,) if rest else ())
    wish = Wish(f"restart-{pool_gib}@1", "head-major", pages, 0, prompts)
    engine = new_engine("the engine that fills the pool", node, wish)
    ask(engine, "publish")
    engine.close()
    engine = new_engine("the engine that restarts", node, wish)
    found: Reused = ask(engine, "reuse")
    engine.close()
    phases = found.phases_ms
    usable = sum(phases[name] for name in ("connect", "register", "lease", "attach", "match", "page"))
    return Restart(
        pool_gib=pool_gib,
        prompts=len(prompts),
        blocks=sum(prompts),
        usable_ms=usable,
        whole_ms=usable + phases["others"],
        since_spawn_ms=found.since_spawn_ms,
        phases_ms=phases,
        wrong_blocks=found.wrong_blocks,
    )


def measure_hit(node: Node, engine: Neighbour) -> Hit:
    """``engine`` finds what another one has published."""
    before = node.settle()
    found: Hits = ask(engine, "hit", HITS + 1)
    after = node.settle()
    first, *rest = (seconds * 1e3 for seconds in found.seconds)
    return Hit(
        blocks=PREFIX_BLOCKS,
        first_ms=first,
        median_ms=statistics.median(rest),
        worst_ms=max(rest),
        h2d_bytes=(before.get("h2d_bytes", 0), after.get("h2d_bytes", 0)),
        d2h_bytes=(before.get("d2h_bytes", 0), after.get("d2h_bytes", 0)),
        wrong_blocks=found.wrong_blocks,
    )


def measure_host(node: Node, engine: Neighbour, order: str, way: str) -> Host:
    """Load what is on the host alone, again and again; the first time warms up. Raises Unfit."""
    model_id = ask(engine, "model_id")
    found: list[Loaded] = []
    for _ in range(LOADS + 1):
        node.leave_to_host(model_id)
        ask(engine, "scribble")
        found.append(ask(engine, "load", WAYS[way]))
    counted = found[1:]
    firsts = [each.first_layer_s for each in counted if each.first_layer_s is not None]
    all_s = statistics.median(each.all_s for each in counted)
    copy_bytes = PREFIX_BLOCKS * BLOCK_BYTES
    return Host(
        order=order,
        way=way,
        copy_bytes=copy_bytes,
        repeats=LOADS,
        first_layer_ms=statistics.median(firsts) * 1e3 if firsts else None,
        all_ms=all_s * 1e3,
        worst_ms=max(each.all_s for each in counted) * 1e3,
        gb_per_s=copy_bytes / all_s / 1e9,
        wrong_blocks=sum(each.wrong_blocks for each in found),
    )


def measure_order(node: Node, order: str) -> tuple[Hit, list[Host]]:
    """One layout of a page: a hit on the device, then loads from the host, while the first engine lives."""
    wish = Wish(f"{order}@1", order, DEVICE_PAGES, PREFIX_BLOCKS, (PREFIX_BLOCKS,))
    first = new_engine("the engine that publishes", node, wish)
    ask(first, "publish")
    second = new_engine("the second engine", node, wish)
    hit = measure_hit(node, second)
    rows = [measure_host(node, second, order, way) for way in WAYS]
    second.close()
    first.close()
    return hit, rows


def run_all(pools: list[int], host_gib: int, device_memory: str) -> dict[str, object]:
    """Every section, printed as it comes. Raises Unfit, NeighbourLost, DaemonFailed, and gRPC's errors."""
    free_before = look_at_gpu()
    fitting = [pool for pool in pools if pool * GIB + BESIDE_BYTES <= free_before]
    skipped = [pool for pool in pools if pool not in fitting]
    for pool in skipped:
        print(f"a device pool of {pool} GiB is left out: this GPU has {free_before / GIB:.1f} GiB free")
    device_gib = max([LEAST_DEVICE_GIB, *fitting])
    if device_gib * GIB + BESIDE_BYTES > free_before:
        raise Unfit(f"{free_before / GIB:.1f} GiB of the GPU are free; a prefix takes {LEAST_DEVICE_GIB}")
    flags = ["--backend", "cuda", "--device-pool", f"{device_gib}GiB", "--host-pool", f"{host_gib}GiB"]
    flags += ["--host-threads", "8", "--write-policy", "write_through", "--drain-seconds", "1"]
    flags += ["--device-memory", device_memory]
    began_s = time.monotonic()
    with DaemonProcess(flags) as daemon, grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        node = Node(daemon.socket, channel)
        start = measure_start(node, daemon, began_s)
        memory = measure_memory(node, free_before)
        show_daemon(start, memory)
        hits, hosts = {}, []
        for order in PAGE_SHAPES:
            hits[order], rows = measure_order(node, order)
            show_prefix(order, hits[order], rows)
            hosts += rows
        restarts = []
        for pool_gib in fitting:
            restarts.append(measure_restart(node, pool_gib))
            show_restart(restarts[-1])
    return {
        "start": asdict(start),
        "memory": memory,
        "restart": [asdict(row) for row in restarts],
        "restart_left_out_gib": skipped,
        "hit": asdict(hits["head-major"]),
        "host": [asdict(row) for row in hosts],
    }


def show_daemon(start: Start, memory: dict[str, int]) -> None:
    """Two lines."""
    print(
        f"start: ready after {start.ready_s:.2f} s ({start.serving_s:.2f} with the process), host pool of "
        f"{start.host_gib} GiB whole after {start.filled_s:.1f} s, {start.gb_per_s:.1f} GB/s\n"
        f"memory: {memory['taken_bytes'] / MIB:.0f} MiB beside the pools, host pool pinned; the daemon says "
        f"{memory['context_bytes'] / MIB:.0f} MiB (budget {BUDGETS['context_bytes'] / MIB:.0f})",
        flush=True,
    )


def show_restart(row: Restart) -> None:
    """One line, and its phases. Raises Unfit for wrong bytes."""
    phases = ", ".join(f"{name} {spent:.1f}" for name, spent in row.phases_ms.items())
    print(
        f"restart, {row.pool_gib} GiB: first page after {row.usable_ms:.1f} ms (budget {BUDGETS['restart_ms']:g}), all "
        f"{row.blocks:,} blocks of {row.prompts} prompts after {row.whole_ms:.1f} ms, {row.since_spawn_ms / 1e3:.2f} s "
        f"from the process's start; ms: {phases}",
        flush=True,
    )
    require_right(row.wrong_blocks)


def show_prefix(order: str, hit: Hit, rows: list[Host]) -> None:
    """A few lines. Raises Unfit for wrong bytes, or where a hit has copied some."""
    print(
        f"hit, {order}: {hit.median_ms:.2f} ms (worst {hit.worst_ms:.2f}, the first {hit.first_ms:.2f}, budget "
        f"{BUDGETS['hit_ms']:g}); bytes copied in: {hit.h2d_bytes[1] - hit.h2d_bytes[0]}, out: "
        f"{hit.d2h_bytes[1] - hit.d2h_bytes[0]}"
    )
    cited = f"{CITED_OF}: {CITED[order]['ms']} ms, {CITED[order]['gb_per_s']} GB/s"
    for row in rows:
        first = "" if row.first_layer_ms is None else f"first layer after {row.first_layer_ms:.1f} ms, "
        print(
            f"host, {order}, {row.way}: {first}all after {row.all_ms:.1f} ms, {row.gb_per_s:.1f} GB/s (worst "
            f"{row.worst_ms:.1f} ms; {cited})",
            flush=True,
        )
    require_right(hit.wrong_blocks + sum(row.wrong_blocks for row in rows))
    for before, after in (hit.h2d_bytes, hit.d2h_bytes):
        if before != after:
            raise Unfit(f"a hit on the device copied {after - before} bytes")


def require_right(wrong_blocks: int) -> None:
    """Raises Unfit."""
    if wrong_blocks:
        raise Unfit(f"{wrong_blocks} blocks hold wrong bytes")


def main() -> None:
    """Measure, print, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attach", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--pools", default="1,16,64", help="GiB of the device pools that engines come back to")
    parser.add_argument("--host-gib", type=int, default=64, help=f"host pool, at least {LEAST_HOST_GIB}")
    parser.add_argument("--device-memory", default=Config().device_memory, choices=DEVICE_MEMORY)
    arguments = parser.parse_args()
    require_gpu("cupy")
    if arguments.host_gib < LEAST_HOST_GIB:
        fail(f"--host-gib {arguments.host_gib}: two layouts of a prefix take {LEAST_HOST_GIB}")
    began = time.monotonic()
    try:
        found = run_all([int(part) for part in arguments.pools.split(",")], arguments.host_gib, arguments.device_memory)
    except (Unfit, NeighbourLost, DaemonFailed) as error:
        fail(str(error))
    except grpc.RpcError as error:
        fail(f"the daemon went away: {error}")
    if arguments.json:
        about: dict[str, object] = {
            "benchmark": "attach",
            "device_memory": arguments.device_memory,
            "machine": describe_machine() | describe_gpu(),
            "budgets": BUDGETS,
            "cited": CITED | {"of": CITED_OF},
            "seconds": time.monotonic() - began,
        }
        write_result(arguments.json, about | found)


if __name__ == "__main__":
    main()
