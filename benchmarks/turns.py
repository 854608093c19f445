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
import time
from asyncio.events import Handle
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from kvcache.v1 import cache_pb2, lease_pb2

from benchmarks.ledger import PROMPT_BLOCKS, _key
from benchmarks.machine import describe_machine
from benchmarks.recording import write_result
from cachesvc.__main__ import SWITCH_SECONDS
from cachesvc.config import Config
from cachesvc.daemon import Parts, build
from cachesvc.flows.admin import evict
from cachesvc.flows.leases import lose_silent, process_arrived, process_gone
from cachesvc.flows.models import RegisterRequest
from cachesvc.flows.sizing import PoolRequest
from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.service.access.auth import EVERYONE
from cachesvc.service.rpc.cache_service import CacheService
from cachesvc.service.rpc.edge import Edge
from cachesvc.service.rpc.lease_service import LeaseService

PAGE_BYTES = 64
LAYOUT = Layout(64, 1, (PlaneGroup("full"),), (Plane("bytes", 0, "full", (PAGE_BYTES,), "uint8"),))
LONG = 43_000
SEQUENCES = 16
HOST_SHARE = 10
GIVE_UP_SECONDS = 600.0
TOKEN = b"turns---"


class Holds:
    """Times every callback of asyncio's own loop, for the flow that ``flow`` names. Landings are told apart."""

    def __init__(self) -> None:
        self.flow = ""
        self.longest: dict[str, tuple[float, float]] = {}
        self._run = Handle._run  # noqa: SLF001 - asyncio has no hook around its callbacks

    def start(self) -> None:
        """From now on."""
        run, note = self._run, self._note

        def timed(handle: Handle) -> None:
            wall, cpu = time.perf_counter(), time.thread_time()
            run(handle)
            note(handle, time.thread_time() - cpu, time.perf_counter() - wall)

        Handle._run = timed  # type: ignore[assignment, method-assign]  # noqa: SLF001

    def stop(self) -> None:
        """As it was."""
        Handle._run = self._run  # type: ignore[method-assign]  # noqa: SLF001

    def _note(self, handle: Handle, cpu: float, wall: float) -> None:
        if not self.flow:
            return
        lands = getattr(handle._callback, "__name__", "") == "_land"  # type: ignore[attr-defined]  # noqa: SLF001
        name = f"{self.flow}, landing" if lands else self.flow
        before = self.longest.get(name, (0.0, 0.0))
        self.longest[name] = max(before[0], cpu), max(before[1], wall)


class Daemon:
    """The parts, and one engine's calls. ``measured`` names a flow around calls that count."""

    def __init__(self, parts: Parts, blocks: int) -> None:
        self.parts = parts
        self.node = parts.base.node
        self.core = self.node.core
        self.blocks = blocks
        self.holds = Holds()
        edge = Edge(parts.dispatcher)
        self.cache, self.leases = CacheService(edge, 4096), LeaseService(edge)
        self.model = 0
        self.lease = ""
        self.totals: dict[str, float] = {}
        self.numbers = iter(range(1, 1 << 40))
        self._prompts = iter(range(1 << 40))

    async def register(self, host_pages: int) -> None:
        """The model's pools, filled once."""
        request = RegisterRequest(
            "turns", LAYOUT, device_pool=PoolRequest((self.blocks,)), host_pool=PoolRequest((host_pages,))
        )
        made = await self.parts.registrar.register(request)
        self.model = made.model.id
        while made.model.blocks.host.pools[0].usable < host_pages:  # noqa: ASYNC110 - threads fill it
            await asyncio.sleep(0.01)

    async def open(self, token: bytes = TOKEN) -> str:
        """A lease of a process of its own."""
        process_arrived(self.core, token, 1, 1)
        request = lease_pb2.OpenRequest(model_id=self.model, process_token=token, engine="turns")
        self.lease = (await self.ask(self.leases.open, request)).lease_id
        return self.lease

    async def ask(self, method: Any, request: Any) -> Any:
        """Serve one message in a callback of its own, and wait for its answer."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def serve() -> None:
            answer.set_result(self.parts.dispatcher.serve(EVERYONE, method, request, process=lambda: "turns"))

        loop.call_soon(serve)
        served = await answer
        outcome = await served if isinstance(served, asyncio.Future) else served
        assert not isinstance(outcome, cache_pb2.OperationError), outcome
        return outcome

    async def measured(self, flow: str, calls: Awaitable[Any]) -> Any:
        """What ``calls`` answers; all callbacks until then, and until all transfers have landed, count for ``flow``."""
        await asyncio.sleep(0)  # what was done before is another callback
        self.holds.flow = flow
        began = time.perf_counter()
        answer = await calls
        self.totals[flow] = min(self.totals.get(flow, GIVE_UP_SECONDS), time.perf_counter() - began)
        await self.landed()
        self.holds.flow = ""
        return answer

    async def landed(self) -> None:
        """No transfer runs any more."""
        while self.core.ledger.tickets.running or self.core.chores:  # noqa: ASYNC110 - so do copies end
            await asyncio.sleep(0.001)

    # -- calls -------------------------------------------------------------------------------------------------

    def prompt(self, blocks: int = PROMPT_BLOCKS) -> bytes:
        """Packed keys that nobody has seen."""
        name = f"prompt {next(self._prompts)}"
        return b"".join(_key(name, at) for at in range(blocks))

    async def match(self, keys: bytes = b"") -> int:
        """A new sequence."""
        number = next(self.numbers)
        request = cache_pb2.MatchRequest(lease_id=self.lease, sequence_id=number, keys=keys)
        await self.ask(self.cache.match, request)
        return number

    async def allocate(self, sequence: int, blocks: int) -> None:
        """Grow its tables."""
        request = cache_pb2.AllocateRequest(lease_id=self.lease, sequence_id=sequence, blocks=blocks)
        await self.ask(self.cache.allocate, request)

    async def publish(self, sequence: int, first: int, blocks: int) -> None:
        """Seal blocks whose keys Match was told."""
        request = cache_pb2.PublishRequest(lease_id=self.lease, sequence_id=sequence, first_block=first, blocks=blocks)
        answer = await self.ask(self.cache.publish, request)
        assert answer.sealed_blocks == first + blocks

    async def swap(self, sequence: int, direction: cache_pb2.SwapDirection.ValueType) -> None:
        """Begin to take it out, or back."""
        request = cache_pb2.SwapRequest(lease_id=self.lease, sequence_id=sequence, direction=direction)
        await self.ask(self.cache.swap, request)

    async def release(self, sequence: int) -> None:
        """End it."""
        await self.ask(self.cache.release, cache_pb2.ReleaseRequest(lease_id=self.lease, sequence_id=sequence))

    async def close(self) -> None:
        """End the lease."""
        await self.ask(self.leases.close, lease_pb2.CloseRequest(lease_id=self.lease, quiesced=True))

    async def serve(self, keys: bytes) -> None:
        """A request from beginning to end: its blocks stay behind."""
        blocks = len(keys) // KEY_BYTES
        sequence = await self.match(keys)
        await self.allocate(sequence, blocks)
        await self.publish(sequence, 0, blocks)
        await self.release(sequence)

    async def fill(self) -> None:
        """Blocks until no page is free."""
        pool = self.core.ledger.models[self.model].replicas[0].place.pools[0]
        while pool.free:
            await self.serve(self.prompt(min(PROMPT_BLOCKS, pool.free)))


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


@asynccontextmanager
async def running(blocks: int, policy: str, host_pages: int) -> AsyncIterator[Daemon]:
    """A daemon with a full pool, and one lease."""
    config = Config(
        socket="/tmp/benchmarks-turns.sock",
        backend="shm",
        device_pool=(blocks + 1) * PAGE_BYTES + (64 << 20),
        host_pool=max(1 << 20, host_pages * PAGE_BYTES * 2),
        write_policy=policy,
        lease_seconds=3600.0,
        wait_seconds=GIVE_UP_SECONDS,
    )
    parts = build(config)
    base = parts.base
    base.hardware.backend.start()
    base.engine.start()
    base.node.start(base.vault)
    base.host_pool.start()
    daemon = Daemon(parts, blocks)
    try:
        await daemon.register(host_pages)
        await daemon.open()
        await daemon.fill()
        await daemon.landed()
        parts.collector.start()
        daemon.holds.start()
        yield daemon
    finally:
        daemon.holds.stop()
        parts.collector.close()
        await base.node.close()
        base.engine.close()
        base.hardware.backend.close()
        base.host_pool.close()


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
