"""A daemon's own parts in one process, without sockets: calls are messages, and each callback of its loop is timed."""

from __future__ import annotations

import asyncio
import gc
import time
from asyncio.events import Handle
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

from kvcache.v1 import cache_pb2, lease_pb2

from benchmarks.ledger.moves import PROMPT_BLOCKS, block_key
from cachesvc import daemon as composition
from cachesvc.config import Config
from cachesvc.flows.leases import process_arrived
from cachesvc.flows.pinning import evict
from cachesvc.flows.registration import PoolRequest, RegisterRequest
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.words import KEY_BYTES
from cachesvc.service.access.auth import EVERYONE
from cachesvc.service.rpc.edge import Edge
from cachesvc.service.rpc.services import CacheService, LeaseService

PAGE_BYTES = 64
LAYOUT = Layout(64, 1, (PlaneGroup("full"),), (Plane("bytes", 0, "full", (PAGE_BYTES,), "uint8"),))
WINDOWED = Layout(
    64,
    1,
    (PlaneGroup("full"), PlaneGroup("window", window_tokens=1024)),
    (
        Plane("bytes", 0, "full", (PAGE_BYTES,), "uint8"),
        Plane("bytes", 1, "window", (PAGE_BYTES,), "uint8"),
    ),
)
"""Every other layer looks back 16 blocks."""
GIVE_UP_SECONDS = 600.0
TOKEN = b"turns---"


class Holds:
    """Times every callback of asyncio's own loop, for the flow that ``flow`` names. Landings are counted apart.
    ``times``: seconds of the processor and by the clock, in order."""

    def __init__(self) -> None:
        self.flow = ""
        self.times: dict[str, list[tuple[float, float]]] = {}
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
        """Restore the loop's own callbacks."""
        Handle._run = self._run  # type: ignore[method-assign]  # noqa: SLF001

    def _note(self, handle: Handle, cpu: float, wall: float) -> None:
        if not self.flow:
            return
        lands = getattr(handle._callback, "__name__", "") == "_land"  # type: ignore[attr-defined]  # noqa: SLF001
        name = f"{self.flow}, landing" if lands else self.flow
        self.times.setdefault(name, []).append((cpu, wall))


class Daemon:
    """The parts, and one engine's calls. ``measured`` names a flow around calls that count."""

    def __init__(self, parts: composition.Daemon, blocks: int, layout: Layout) -> None:
        self.parts = parts
        self.layout = layout
        self.node = parts.node
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
        groups = len(self.layout.groups)
        request = RegisterRequest(
            "turns",
            self.layout,
            device_pool=PoolRequest((self.blocks,) * groups),
            host_pool=PoolRequest((host_pages,) * groups),
        )
        made = await self.parts.registrar.register(request, "bench")
        self.model = made.model.id
        while made.model.blocks.host.pools[-1].usable < host_pages:  # noqa: ASYNC110 - threads fill it
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
        """Answer of ``calls``; all callbacks until then, and until all transfers have landed, count for ``flow``."""
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
        """Packed keys of an unknown prompt."""
        name = f"prompt {next(self._prompts)}"
        return b"".join(block_key(name, at) for at in range(blocks))

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

    async def save(self, keys: bytes) -> None:
        """A prompt comes to lie on the host alone."""
        sequence = await self.match(keys)
        await self.allocate(sequence, len(keys) // KEY_BYTES)
        await self.publish(sequence, 0, len(keys) // KEY_BYTES)
        await self.swap(sequence, cache_pb2.SWAP_DIRECTION_OUT)
        await self.landed()
        self.leave_device()
        await self.release(sequence)

    def leave_device(self) -> None:
        """Evict all unpinned blocks from the device; their copies on the host stay."""
        self.node.run(evict, self.core, self.model, "device", 0)
        gc.collect(1)  # a flow measured later must not pay for garbage made here


@asynccontextmanager
async def running(
    blocks: int, policy: str, host_pages: int, layout: Layout = LAYOUT, eviction: str = "lru"
) -> AsyncIterator[Daemon]:
    """A daemon with a full pool, and one lease."""
    config = Config(
        socket="/tmp/benchmarks-turns.sock",
        backend="shm",
        device_pool=2 * len(layout.groups) * (blocks + 1) * PAGE_BYTES + (64 << 20),
        host_pool=max(1 << 20, len(layout.groups) * host_pages * PAGE_BYTES * 2),
        write_policy=policy,
        eviction=eviction,
        lease_seconds=3600.0,
        wait_seconds=GIVE_UP_SECONDS,
    )
    parts = composition.Daemon(config)
    parts.hardware.backend.start()
    parts.engine.start()
    parts.node.start(parts.vault)
    parts.host_pool.start()
    daemon = Daemon(parts, blocks, layout)
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
        await parts.node.close()
        parts.engine.close()
        parts.hardware.backend.close()
        parts.host_pool.close()
