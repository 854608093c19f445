"""Runs: handlers called directly, in a process each, and one daemon behind its socket with several client processes."""

from __future__ import annotations

import asyncio
import os
import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import grpc
from cachesvc_ctl.core.daemon_process import DaemonProcess

from cachesvc.telemetry.events import start_logging
from tests.e2e.access.test_access import entry
from tests.e2e.rig import short_folder
from tests.fuzz.fuzzer import Findings, Fuzzer
from tests.fuzz.target import Target
from tests.fuzz.wire import RemoteTarget, Tokens, throw_garbage

FLAGS = (
    "--backend",
    "shm",
    "--shm-devices",
    "2",
    "--device-pool",
    "16MiB",
    "--host-pool",
    "8MiB",
    "--drain-seconds",
    "0",
)

POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Threads of the event loop's own pool, which come when they are first wanted, and stay."""

TENANTS = ("secret of a with enough letters", "secret of b with enough letters")
VIEWER, OPERATOR = "sees a and has enough letters", "sees all and has enough letters"
TOKENS_FILE = (
    entry(TENANTS[0], "engines of a", '["engine"]', 'tenant = "a"')
    + entry(TENANTS[1], "engines of b", '["engine"]', 'tenant = "b"')
    + entry(VIEWER, "viewer of a", '["read-only"]', 'tenant = "a"')
    + entry(OPERATOR, "operator", '["admin"]')
)


def fuzz_in_process(messages: int, seed: int) -> Findings:
    """Handlers called without a socket."""
    start_logging("error")

    async def run() -> Findings:
        target = Target()
        await target.start()
        try:
            return await Fuzzer(target, seed).run(messages)
        finally:
            await target.close()

    return asyncio.run(run())


def fuzz_socket(messages: int, seed: int, clients: int = 1, *, guarded: bool = False) -> tuple[Findings, list[str]]:
    """A daemon of its own under several client processes, with garbage on its sockets meanwhile; also what its log says
    of calls that broke. ``guarded``: it knows tokens, of two tenants and an operator, and clients show what they have,
    what others have, or nothing. When all have left, no page may be held and accounting must be right."""
    with short_folder() as folder:
        flags = [*FLAGS]
        if guarded:
            path = folder / "tokens.toml"
            path.write_text(TOKENS_FILE, encoding="utf-8")
            path.chmod(0o600)
            flags += ["--tokens", str(path)]
        with DaemonProcess(flags, folder=str(folder)) as daemon:
            found = asyncio.run(_with_clients(daemon, messages, seed, clients, guarded=guarded))
            if daemon.process.poll() is not None:
                found.crashes.append(f"the daemon ended with code {daemon.process.poll()}")
            log = daemon.log.read_text(encoding="utf-8").splitlines()
    # gRPC logs an ExecuteBatchError where it cannot send a status because the caller hung up: no handler broke.
    return found, [line for line in log if "Traceback" in line and "ExecuteBatchError raised in core" not in line]


async def _with_clients(daemon: DaemonProcess, messages: int, seed: int, clients: int, *, guarded: bool) -> Findings:
    looking = RemoteTarget(daemon.socket, daemon.process.pid, _tokens_of(0) if guarded else None)
    await looking.start()
    before = looking.usage()
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(clients, mp_context=get_context("spawn")) as pool:
        runs = [
            loop.run_in_executor(
                pool, be_client, daemon.socket, daemon.process.pid, messages // clients, seed * 1000 + i, i, guarded
            )
            for i in range(clients)
        ]
        await asyncio.to_thread(throw_garbage, daemon.socket, random.Random(seed), max(20, messages // 100))
        found, *others = await asyncio.gather(*runs)
    for other in others:
        found.add(other)
    try:
        found.left = await looking.rest()
        found.problems += await looking.problems()
        after = looking.usage()
    except (grpc.aio.AioRpcError, OSError) as gone:
        found.crashes.append(f"the daemon does not answer any more: {gone!r}")
        return found
    finally:
        await looking.close()
    found.grown_kib, found.descriptors_more, found.threads_more = (
        now - then for now, then in zip(after, before, strict=True)
    )
    return found


def be_client(socket: str, pid: int, messages: int, seed: int, number: int, guarded: bool) -> Findings:
    """One client process of several."""

    async def run() -> Findings:
        target = RemoteTarget(socket, pid, _tokens_of(number) if guarded else None, seed)
        await target.start()
        try:
            return await Fuzzer(target, seed, frozenset({"Drain"}), is_alone=False).run(messages)
        finally:
            await target.close()

    return asyncio.run(run())


def _tokens_of(number: int) -> Tokens:
    """The tenants in turn."""
    own = TENANTS[number % len(TENANTS)]
    return Tokens(own, (*TENANTS, VIEWER, OPERATOR), OPERATOR)


def verdict(found: Findings, broken: list[str]) -> list[str]:
    """Everything that must not be."""
    kept = {what: count for what, count in found.left.items() if count}
    out = [*found.crashes, *found.problems, *broken]
    out += [f"still held at the end: {kept}"] if kept else []
    out += [f"{found.descriptors_more} more descriptors"] if found.descriptors_more > 2 else []
    out += [f"{found.threads_more} more threads"] if found.threads_more > POOL_THREADS else []
    return out
