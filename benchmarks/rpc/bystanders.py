"""Latency of other engines while one engine makes large requests: ``python -m benchmarks.rpc.bystanders [CASE ...]
--json OUT``.

``waits``: an engine keeps 1,100 calls waiting for one slow transfer; another one matches, and no lease is lost.
``swap``: an engine swaps out beside 100,000 host blocks of a windowed layout, whose window pool is full.
``movers``: a match of 2,048 blocks beside an engine that swaps all the time, with each kind of movers.
``stock``: a step that wants a stock of pages, on a pool whose 96,000 pages are pinned, against one that wants none.
``windows``: a match of 2,048 blocks with one window group, against one with none.
``prefill``: an engine computes prompts of 2,048 blocks on a full pool; each evicts as many.
``restart``: the daemon gets SIGTERM while twelve clients call and a second daemon waits for its socket.

A bystander is a process of its own that makes empty calls (health checks) all the while; its longest is what counts.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import grpc
import numpy as np
from cachesvc_client import (
    CacheClient,
    CacheClientError,
    DaemonDraining,
    NotFound,
    PoolExhausted,
    Sequence,
    gqa,
    gqa_windowed,
    opaque,
)
from cachesvc_client.aio import AsyncCacheClient, AsyncSequence
from cachesvc_ctl.core.daemon_process import DaemonProcess
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.support.calls import Beside, compute, leased, match_ms, match_until, spread, timed_ms
from benchmarks.support.recording import parser_of, save
from cachesvc.config import MOVERS

BLOCK_TOKENS = 16
PROMPT_BLOCKS = 2048
KEY_BYTES = 32
WAITS = 1100
CONNECTIONS = 11
PINNED_PAGES = 96_000
HOST_BLOCKS = 100_000
ROUNDS = 40
Figures = dict[str, Any]
COMMON = ["--backend", "shm"]
QUIET_SECONDS = 1.0
CLIENTS = 12


def main() -> None:
    """Print what each case found, and write JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all without one")
    parser.add_argument("--backend", choices=("shm", "cuda"), default="shm", help="of the daemons (default shm)")
    arguments = parser.parse_args()
    COMMON[1] = arguments.backend
    unknown = set(arguments.cases) - set(CASES)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    result: Figures = {"benchmark": "bystanders"}
    for name in arguments.cases or CASES:
        result[name] = CASES[name]()
        print(f"{name:8} " + ", ".join(f"{key} {value}" for key, value in result[name].items()), flush=True)
    save(arguments, result)


def waits() -> Figures:
    """Waiting calls of one engine, and what they cost another one."""
    flags = ["--device-pool", "80MiB", "--host-pool", "80MiB", "--store-limit", "1KiB", "--slice-bytes", "1MiB"]
    flags += ["--lease-seconds", "3"]
    with daemon(*flags) as socket, CacheClient(socket, engine="bystander") as client:
        other = client.open_lease(
            client.register(
                "other", opaque(block_bytes=4096, block_tokens=BLOCK_TOKENS), device_pages=[64], host_pages=[0]
            )
        )
        parked, done = threading.Event(), threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(park(socket, parked, done)))
        thread.start()
        parked.wait()
        keys = np.random.default_rng(1).bytes(16 * KEY_BYTES)
        times, refused = [], 0
        until = time.monotonic() + 6  # two silence limits: a lease whose heartbeats are refused is lost by then
        while time.monotonic() < until:
            try:
                times.append(timed_ms(lambda: other.match(keys).release()))
            except CacheClientError:
                refused += 1
        lost = other.is_lost
        done.set()
        thread.join()
    return {
        "waiting_calls": WAITS,
        "refused": refused,
        "matches": len(times),
        "match_ms": spread(times) if times else None,
        "leases_lost": int(lost),
    }


async def park(socket: str, parked: threading.Event, done: threading.Event) -> None:
    """Keep calls waiting for swaps that take minutes, until told to stop. A connection carries 100 of them."""
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncCacheClient(socket, engine="waiter")) for _ in range(CONNECTIONS)
        ]
        layout = opaque(block_bytes=1 << 20, block_tokens=BLOCK_TOKENS)
        waiting: list[asyncio.Task[object]] = []
        for client in clients:
            model = await client.register("waiter", layout, device_pages=[64], host_pages=[48])
            lease = await client.open_lease(model)
            sequence = await lease.match(b"")
            await sequence.allocate(4)
            while (ticket := await swapped_out(sequence)) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)  # the host pool is still arriving, of which no event tells a client
            tickets = [ticket]
            waiting += [
                asyncio.create_task(lease.wait_tickets(tickets, timeout_s=60)) for _ in range(WAITS // CONNECTIONS)
            ]
        await asyncio.sleep(0.5)  # until they have been sent; there is no sign of it on this side
        parked.set()
        await asyncio.to_thread(done.wait)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def swapped_out(sequence: AsyncSequence) -> int | None:
    """Start the swap and return its ticket; None while the host has no room yet."""
    try:
        return (await sequence.swap_out()).tickets[0].id
    except PoolExhausted:
        return None


def swap() -> Figures:
    """Swap out beside many host blocks, the window pool full of young copies."""
    layout = gqa_windowed(window_layers=(False, True), kv_heads=1, head_dim=16, block_tokens=4, window_tokens=16)
    rng = np.random.default_rng(2)
    flags = ["--device-pool", "256MiB", "--host-pool", "256MiB", "--write-policy", "write_through"]
    with daemon(*flags) as socket, CacheClient(socket, engine="swapper") as client:
        pages = [8192, 8192]
        model = client.register("windowed", layout, device_pages=pages, host_pages=[HOST_BLOCKS + 4096, 2048])
        with client.open_lease(model) as lease:
            for _ in range(HOST_BLOCKS // PROMPT_BLOCKS + 1):
                compute(lease, rng.bytes(PROMPT_BLOCKS * KEY_BYTES))
            with Beside(call_until, socket) as bystander:
                for _ in range(ROUNDS // 4):
                    sequence = lease.match(rng.bytes(20 * KEY_BYTES))
                    sequence.allocate(20)
                    sequence.swap_out()
                    sequence.wait_swapped(60)
                    sequence.release()
    return {"host_blocks": HOST_BLOCKS, "bystander_ms": spread(bystander.result)}


def movers() -> Figures:
    """Match beside an engine that swaps out and in as fast as it goes, with threads and with processes as movers."""
    layout = opaque(block_bytes=256 << 10, block_tokens=BLOCK_TOKENS, layers=32)
    rng, found = np.random.default_rng(4), Figures()
    keys = rng.bytes(PROMPT_BLOCKS * KEY_BYTES)
    for kind in MOVERS:
        flags = ["--movers", kind, "--device-pool", "1GiB", "--host-pool", "512MiB", "--calibration", "never"]
        with daemon(*flags) as socket, CacheClient(socket, engine="swapper") as client:
            model = client.register("swapped", layout, device_pages=[PROMPT_BLOCKS + 1024], host_pages=[1024])
            with client.open_lease(model) as lease:
                compute(lease, keys)
                with Beside(match_until, socket, model, keys) as alone:
                    time.sleep(QUIET_SECONDS)  # the bystander is measured alone
                sequence = lease.match(rng.bytes(512 * KEY_BYTES))
                sequence.allocate(512)
                began = time.perf_counter()
                with Beside(match_until, socket, model, keys) as beside:
                    for _ in range(ROUNDS):
                        sequence.swap_out()
                        sequence.wait_swapped(60)
                        sequence.swap_in()
                        sequence.wait_loaded(60)
                rate = 2 * ROUNDS * 512 * layout.page_bytes(0) / (time.perf_counter() - began) / 1e9
                sequence.release()
        found[kind] = {"alone_ms": spread(alone.result), "beside_ms": spread(beside.result), "gb_per_s": round(rate, 2)}
    return found


def stock() -> Figures:
    """Empty steps with and without a stock target, in turns, on a pool without evictable pages."""
    flags = ["--device-pool", "512MiB", "--host-pool", "1MiB"]
    with daemon(*flags) as socket, CacheClient(socket, engine="stocker") as client:
        model = client.register(
            "pinned", opaque(block_bytes=64, block_tokens=BLOCK_TOKENS), device_pages=[PINNED_PAGES], host_pages=[0]
        )
        rng = np.random.default_rng(3)
        with client.open_lease(model) as lease, client.open_lease(model) as plain:
            held: list[Sequence] = []
            while sum(each.blocks for each in held) < PINNED_PAGES:
                held.append(lease.match(keys := rng.bytes(PROMPT_BLOCKS * KEY_BYTES)))
                count = min(PROMPT_BLOCKS, PINNED_PAGES - sum(each.blocks for each in held))
                held[-1].allocate(count)
                held[-1].publish(count, keys[: count * KEY_BYTES])
            with lease.step(stock_pages=8) as wanting, plain.step() as without:
                pairs = [(timed_ms(wanting.submit), timed_ms(without.submit)) for _ in range(ROUNDS * 5)]
    with_stock, no_stock = (spread(list(times)) for times in zip(*pairs, strict=True))
    ratio = round(with_stock["p50"] / no_stock["p50"], 2)
    return {"pinned_pages": PINNED_PAGES, "with_stock_ms": with_stock, "without_ms": no_stock, "ratio": ratio}


def windows() -> Figures:
    """The same long match under a layout without windows and under one with a window group, in turns."""
    plain = gqa(layers=2, kv_heads=1, head_dim=16, block_tokens=64)
    windowed = gqa_windowed(window_layers=(False, True), kv_heads=1, head_dim=16, block_tokens=64, window_tokens=128)
    keys = np.random.default_rng(4).bytes(PROMPT_BLOCKS * KEY_BYTES)
    times: dict[str, list[float]] = {"plain": [], "windowed": []}
    with daemon("--device-pool", "256MiB", "--host-pool", "1MiB") as socket, CacheClient(socket) as client:
        leases = {}
        for name, layout in (("plain", plain), ("windowed", windowed)):
            groups = len(layout.groups)
            model = client.register(name, layout, device_pages=[4096] * groups, host_pages=[0] * groups)
            leases[name] = client.open_lease(model)
            compute(leases[name], keys)
        for _ in range(ROUNDS * 5):
            for name, lease in leases.items():
                times[name].append(match_ms(lease, keys, PROMPT_BLOCKS))
        for lease in leases.values():
            lease.close()
    found = {f"{name}_ms": spread(each) for name, each in times.items()}
    return {**found, "ratio": round(found["windowed_ms"]["p50"] / found["plain_ms"]["p50"], 2)}


def prefill_beside() -> Figures:
    """Long prompts on a full pool, and an empty call of another process meanwhile."""
    rng = np.random.default_rng(5)
    layout = opaque(block_bytes=1024, block_tokens=BLOCK_TOKENS)
    with daemon("--device-pool", "64MiB", "--host-pool", "1MiB") as socket, leased(socket, layout, 43_000) as lease:
        for _ in range(43_000 // PROMPT_BLOCKS + 1):
            compute(lease, rng.bytes(PROMPT_BLOCKS * KEY_BYTES))
        with Beside(call_until, socket) as bystander:
            for _ in range(ROUNDS):
                compute(lease, rng.bytes(PROMPT_BLOCKS * KEY_BYTES))
    return {"blocks": PROMPT_BLOCKS, "bystander_ms": spread(bystander.result)}


def restart() -> Figures:
    """SIGTERM with a second daemon waiting for the socket: the errors that clients get, and after how long."""
    with DaemonProcess([*COMMON, "--device-pool", "16MiB", "--host-pool", "1MiB", "--drain-seconds", "0.2"]) as first:
        context = mp.get_context("spawn")
        pipes = [context.Pipe() for _ in range(CLIENTS)]
        callers = [context.Process(target=call_until_gone, args=(first.socket, theirs)) for _, theirs in pipes]
        for caller in callers:
            caller.start()
        for mine, _ in pipes:
            mine.recv()
        command = [sys.executable, "-m", "cachesvc", "--socket", first.socket, *COMMON]
        second = subprocess.Popen(
            [*command, "--device-pool", "16MiB", "--host-pool", "1MiB"], stderr=subprocess.DEVNULL
        )
        first.process.terminate()
        told = [mine.recv() for mine, _ in pipes]
        for caller in callers:
            caller.join()
        second.terminate()
        second.wait()
    delays = [each["told_ms"] for each in told if each["told_ms"] is not None]
    return {
        "clients": CLIENTS,
        "saw_not_found": sum(each["not_found"] for each in told),
        "told": len(delays),
        "told_ms_after_first_refusal": spread(delays) if delays else None,
    }


def call_until_gone(socket: str, answer: Connection) -> None:
    """Match in a loop until the lease is lost; report the errors seen on the way."""
    lost = threading.Event()
    refused_at, told_at, not_found = 0.0, 0.0, 0

    def note(_: CacheClientError) -> None:
        nonlocal told_at
        told_at = time.perf_counter()
        lost.set()

    client = CacheClient(socket, engine="caller")
    client.connect()
    model = client.register(
        "called", opaque(block_bytes=4096, block_tokens=BLOCK_TOKENS), device_pages=[64], host_pages=[0]
    )
    lease = client.open_lease(model)
    lease.on_lost(note)
    answer.send("calling")
    until = time.monotonic() + 30
    while not lost.is_set() and time.monotonic() < until:
        try:
            lease.match(b"").release()
        except DaemonDraining:
            lost.wait(0.001)
        except NotFound:
            not_found += 1
            refused_at = refused_at or time.perf_counter()
        except CacheClientError:
            refused_at = refused_at or time.perf_counter()
            lost.wait(0.001)
    told = (told_at - (refused_at or told_at)) * 1e3 if told_at else None
    answer.send({"not_found": not_found, "told_ms": None if told is None else max(told, 0.0)})
    client.close()


def call_until(ends: Event, pipe: Connection, socket: str) -> None:
    """For ``Beside``: milliseconds of every empty call."""
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        check = partial(health.Check, health_pb2.HealthCheckRequest())
        check()
        pipe.send("ready")
        times = []
        while not ends.is_set():
            times.append(timed_ms(check))
    pipe.send(times)


@contextmanager
def daemon(*flags: str) -> Iterator[str]:
    """The socket of a daemon of this run's own."""
    with DaemonProcess([*COMMON, *flags]) as process:
        yield process.socket


CASES: dict[str, Callable[[], Figures]] = {
    "waits": waits,
    "swap": swap,
    "movers": movers,
    "stock": stock,
    "windows": windows,
    "prefill": prefill_beside,
    "restart": restart,
}


if __name__ == "__main__":
    main()
