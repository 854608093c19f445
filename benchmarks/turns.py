"""The longest hold of the event loop, by flow: ``python -m benchmarks.turns --json OUT``.

A daemon's own parts in one process (dispatcher, node, ledger, swap engine, shared memory) without sockets around them.
Calls are messages, as large as they come: prompts of 128k tokens, evictions of 43,000 pages, swaps, loads, leases that
end with all that they hold; with ``--blocks`` blocks resident. Every callback of the loop is timed, and of each flow
the longest one counts: so long everybody else waits. ``ms`` is of the loop thread's processor time, which neighbours
of a shared machine do not disturb (``wall_ms``: by the clock); of several rounds the best one, and the worst beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable

from kvcache.v1 import cache_pb2

from benchmarks.ledger import PROMPT_BLOCKS
from benchmarks.machine import describe_machine
from benchmarks.recording import write_result
from benchmarks.turns_daemon import TOKEN, Daemon, running
from cachesvc.__main__ import SWITCH_SECONDS
from cachesvc.flows.admin import evict
from cachesvc.flows.leases import lose_silent, process_gone

LONG = 43_000
SEQUENCES = 16
HOST_SHARE = 10


# -- flows ---------------------------------------------------------------------------------------------------------


async def prompts(daemon: Daemon) -> None:
    """A prompt of 128k tokens from beginning to end, on a full pool and then in its own pages."""
    keys = daemon.prompt()
    sequence = await daemon.measured("match 2,048 new", daemon.match(keys))
    await daemon.measured("allocate 2,048, evicting", daemon.allocate(sequence, PROMPT_BLOCKS))
    await daemon.measured("publish 2,048", daemon.publish(sequence, 0, PROMPT_BLOCKS))
    await daemon.measured("release 2,048 shared", daemon.release(sequence))
    hit = await daemon.measured("match 2,048 resident", daemon.match(keys))
    await daemon.release(hit)
    own = await daemon.match()
    await daemon.allocate(own, PROMPT_BLOCKS)
    await daemon.measured("release 2,048 own", daemon.release(own))
    own = await daemon.match(daemon.prompt())
    await daemon.measured("allocate 2,048 free", daemon.allocate(own, PROMPT_BLOCKS))
    await daemon.release(own)
    await daemon.fill()


async def many_pages(daemon: Daemon) -> None:
    """One sequence with room for millions of tokens."""
    blocks = min(LONG, daemon.blocks // 2)
    sequence = await daemon.match()
    await daemon.measured("allocate 43,000, evicting", daemon.allocate(sequence, blocks))
    await daemon.measured("release 43,000 own", daemon.release(sequence))
    await daemon.fill()


async def swaps(daemon: Daemon) -> None:
    """A sequence of 128k tokens goes out and comes back: own pages, then shared ones too."""
    own = await daemon.match()
    await daemon.allocate(own, PROMPT_BLOCKS)
    await daemon.measured("swap out 2,048 own", daemon.swap(own, cache_pb2.SWAP_DIRECTION_OUT))
    await daemon.measured("swap in 2,048 own", daemon.swap(own, cache_pb2.SWAP_DIRECTION_IN))
    await daemon.release(own)
    shared = await daemon.match(daemon.prompt())
    await daemon.allocate(shared, PROMPT_BLOCKS)
    await daemon.publish(shared, 0, PROMPT_BLOCKS)
    await daemon.measured("swap out 2,048 shared", daemon.swap(shared, cache_pb2.SWAP_DIRECTION_OUT))
    _leave_device(daemon)
    await daemon.measured("swap in 2,048 shared", daemon.swap(shared, cache_pb2.SWAP_DIRECTION_IN))
    await daemon.release(shared)
    await daemon.fill()


async def loads(daemon: Daemon) -> None:
    """A prompt of 128k tokens that lies on the host."""
    keys = daemon.prompt()
    sequence = await daemon.match(keys)
    await daemon.allocate(sequence, PROMPT_BLOCKS)
    await daemon.publish(sequence, 0, PROMPT_BLOCKS)
    await daemon.swap(sequence, cache_pb2.SWAP_DIRECTION_OUT)
    await daemon.landed()
    _leave_device(daemon)
    await daemon.release(sequence)
    sequence = await daemon.measured("match 2,048 on the host", daemon.match(keys))
    await daemon.measured("allocate 2,048, loading", daemon.allocate(sequence, PROMPT_BLOCKS))
    await daemon.release(sequence)
    await daemon.fill()


def _leave_device(daemon: Daemon) -> None:
    """All blocks that nobody holds leave the device; what the host has of them stays there."""
    daemon.node.run(evict, daemon.core, daemon.model, "device", 0)


async def leases(daemon: Daemon) -> None:
    """Engines that hold much and go: closed, dead, silent."""
    for flow, end in (("close a lease", _close), ("process gone", _die), ("lease silent", _silence)):
        token = flow.encode()
        main = daemon.lease
        await daemon.open(token)
        for number in range(SEQUENCES):
            keys = daemon.prompt()
            sequence = await daemon.match(keys)
            await daemon.allocate(sequence, PROMPT_BLOCKS)
            if number % 2:
                await daemon.publish(sequence, 0, PROMPT_BLOCKS)
        await daemon.measured(flow, end(daemon, token))
        process_gone(daemon.core, token)
        daemon.lease = main
    await daemon.fill()


async def _close(daemon: Daemon, _: bytes) -> None:
    await daemon.close()


async def _die(daemon: Daemon, token: bytes) -> None:
    await _call(lambda: daemon.node.run(process_gone, daemon.core, token))


async def _silence(daemon: Daemon, _: bytes) -> None:
    now = daemon.node.now() + 1e6
    main = next(lease for lease in daemon.core.ledger.leases.values() if lease.opened_by[0] == TOKEN)
    main.last_heard = now
    await _call(lambda: daemon.node.run(lose_silent, daemon.core, 30.0, now))


async def _call(work: Callable[[], object]) -> None:
    done = asyncio.get_running_loop().create_future()

    def run() -> None:
        work()
        done.set_result(None)

    asyncio.get_running_loop().call_soon(run)
    await done


async def stock(daemon: Daemon) -> None:
    """A stock as large as it may be, on a full pool, for an engine that has grown as much."""
    sequence = await daemon.match()
    await daemon.allocate(sequence, PROMPT_BLOCKS)
    request = cache_pb2.StepRequest(lease_id=daemon.lease, request_id=next(daemon.numbers), stock_pages=[4096])
    await daemon.measured("refill a stock of 4,096", daemon.ask(daemon.cache.step, request))
    request = cache_pb2.StepRequest(lease_id=daemon.lease, request_id=next(daemon.numbers), stock_pages=[0])
    await daemon.ask(daemon.cache.step, request)
    await daemon.release(sequence)
    await daemon.close()
    await daemon.open()
    await daemon.fill()


FLOWS = (prompts, many_pages, stock, leases, swaps, loads)


# -- running -------------------------------------------------------------------------------------------------------


async def measure(blocks: int, rounds: int, names: list[str]) -> dict[str, dict[str, float]]:
    """Figures by flow, in milliseconds."""
    sys.setswitchinterval(SWITCH_SECONDS)
    found: dict[str, list[tuple[float, float]]] = {}
    totals: dict[str, float] = {}
    for host_share, label in ((0, ""), (HOST_SHARE, "; saved")):
        chosen = [each for each in FLOWS if each.__name__ in names]
        chosen = [each for each in chosen if (each in (swaps, loads)) <= bool(host_share)]
        host = blocks // host_share if host_share else 0
        async with running(blocks, "write_back", host) as daemon:
            for _ in range(rounds):
                daemon.holds.longest = {}
                for flow in chosen:
                    await flow(daemon)
                for name, times in daemon.holds.longest.items():
                    found.setdefault(name + label, []).append(times)
            totals |= {name + label: seconds for name, seconds in daemon.totals.items()}
    return {
        name: {
            "ms": min(cpu for cpu, _ in times) * 1e3,
            "worst_ms": max(cpu for cpu, _ in times) * 1e3,
            "wall_ms": min(wall for _, wall in times) * 1e3,
            "whole_ms": totals.get(name, 0.0) * 1e3,
        }
        for name, times in found.items()
    }


def main() -> None:
    """Print the table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="OUT")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks that are resident")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flows", nargs="+", default=[flow.__name__ for flow in FLOWS])
    arguments = parser.parse_args()
    flows = asyncio.run(measure(arguments.blocks, arguments.rounds, arguments.flows))
    print(f"{'longest hold of the loop':40}{'ms':>9}{'worst':>9}{'wall':>9}{'whole call':>12}")
    for name, row in flows.items():
        print(f"{name:40}" + "".join(f"{row[key]:9.2f}" for key in ("ms", "worst_ms", "wall_ms", "whole_ms")))
    result: dict[str, object] = {
        "machine": describe_machine(),
        "blocks": arguments.blocks,
        "loop_longest_ms": max(row["ms"] for row in flows.values()),
        "flows": flows,
    }
    if arguments.json:
        write_result(arguments.json, result)


if __name__ == "__main__":
    main()
