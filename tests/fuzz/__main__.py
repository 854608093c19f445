"""``python -m tests.fuzz``: try many messages, print what came of it, and exit 1 unless nothing broke."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

from cachesvc_client.ctl.daemon_process import DaemonProcess

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
WIRE_SHARE = 0.1


def fuzz_in_process(messages: int, seed: int) -> Findings:
    """Handlers called without a socket."""

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
    return found, [line for line in log if "Traceback" in line or "call_broke" in line]


def verdict(found: Findings, broken: list[str]) -> list[str]:
    """Everything that must not be."""
    kept = {what: count for what, count in found.left.items() if count}
    out = [*found.crashes, *found.problems, *broken]
    out += [f"still held at the end: {kept}"] if kept else []
    out += [f"{found.descriptors_more} more descriptors"] if found.descriptors_more > 2 else []
    out += [f"{found.threads_more} more threads"] if found.threads_more > 2 else []
    return out


def main() -> None:
    """Exit codes: 0 nothing broke, 1 something did."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    start_logging("error")
    on_wire = int(arguments.messages * WIRE_SHARE)
    inside = fuzz_in_process(arguments.messages - on_wire, arguments.seed)
    outside, broken = fuzz_socket(on_wire, arguments.seed + 1)
    wrong = verdict(inside, []) + verdict(outside, broken)
    result: dict[str, Any] = {
        "seed": arguments.seed,
        "messages": inside.messages + outside.messages,
        "crashes": len(wrong),
        "answered_internal": inside.statuses.get("INTERNAL", 0) + outside.statuses.get("INTERNAL", 0),
        "in_process": inside.shown(),
        "over_the_socket": outside.shown(),
    }
    print(table(inside, outside))
    for line in wrong:
        print(f"BROKEN {line}", file=sys.stderr)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if wrong else 0)


def table(inside: Findings, outside: Findings) -> str:
    """Both halves side by side."""
    rows: list[tuple[str, Any, Any]] = [
        (name.replace("_", " "), getattr(inside, name), getattr(outside, name))
        for name in ("messages", "sensible", "mutated", "random")
    ]
    rows += [("crashes", len(inside.crashes), len(outside.crashes))]
    rows += [("conservation problems", len(inside.problems), len(outside.problems))]
    rows += [("pages and leases held at the end", sum(inside.left.values()), sum(outside.left.values()))]
    rows += [("memory grown, KiB", inside.grown_kib, outside.grown_kib)]
    rows += [("seconds", inside.seconds, outside.seconds)]
    for status in sorted({*inside.statuses, *outside.statuses}):
        rows.append((f"answered {status}", inside.statuses.get(status, 0), outside.statuses.get(status, 0)))
    lines = [f"{'':36}{'in process':>12}{'over the socket':>18}"]
    lines += [f"{name:36}{left:>12,}{right:>18,}" for name, left, right in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
