"""Runs to be made in processes of their own: handlers called directly, and a daemon behind its socket."""

from __future__ import annotations

import asyncio
import random

from cachesvc_ctl.daemon_process import DaemonProcess

from cachesvc.telemetry.events import start_logging
from tests.fuzz.fuzzer import Findings, Fuzzer
from tests.fuzz.target import Target
from tests.fuzz.wire import RemoteTarget, throw_garbage

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


def fuzz_socket(messages: int, seed: int) -> tuple[Findings, list[str]]:
    """A daemon of its own, and garbage on its sockets; also what its log says of calls that broke."""
    with DaemonProcess(FLAGS) as daemon:

        async def run() -> Findings:
            target = RemoteTarget(daemon.socket, daemon.process.pid)
            await target.start()
            try:
                found = await Fuzzer(target, seed, frozenset({"Drain"})).run(messages)
                await asyncio.to_thread(throw_garbage, daemon.socket, random.Random(seed), max(20, messages // 100))
                found.problems += await target.problems()
            finally:
                await target.close()
            return found

        found = asyncio.run(run())
        if daemon.process.poll() is not None:
            found.crashes.append(f"the daemon ended with code {daemon.process.poll()}")
        log = daemon.log.read_text(encoding="utf-8").splitlines()
    # gRPC logs an ExecuteBatchError where it cannot send a status because the caller hung up: no handler broke.
    return found, [line for line in log if "Traceback" in line and "ExecuteBatchError raised in core" not in line]


def verdict(found: Findings, broken: list[str]) -> list[str]:
    """Everything that must not be."""
    kept = {what: count for what, count in found.left.items() if count}
    out = [*found.crashes, *found.problems, *broken]
    out += [f"still held at the end: {kept}"] if kept else []
    out += [f"{found.descriptors_more} more descriptors"] if found.descriptors_more > 2 else []
    out += [f"{found.threads_more} more threads"] if found.threads_more > 2 else []
    return out
