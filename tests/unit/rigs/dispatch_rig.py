"""A dispatcher over a rig: calls are messages, nothing speaks gRPC, and transfers land when a test says so."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from google.protobuf.message import Message
from kvcache.v1 import cache_pb2, common_pb2

from cachesvc.service.access.admission import Admission, CallerKey
from cachesvc.service.access.auth import EVERYONE, Caller
from cachesvc.service.access.quota import Quotas
from cachesvc.service.calls.dispatcher import CallWatch, Dispatcher, Operation
from cachesvc.service.loop.node import Node
from cachesvc.service.rpc.edge import Edge
from cachesvc.service.rpc.services import CacheService, LeaseService
from cachesvc.wire.convert import pack_numbers, pack_pages
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, rig_of

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)


class Desk:
    """Everything between a message and its answer. ``with`` it, on a running loop."""

    def __init__(
        self,
        rig: Rig | None = None,
        *,
        calls: int = 64,
        waiting: int = 64,
        waiting_each: int = 32,
        wait_seconds: float = 600.0,
        quotas: Quotas | None = None,
        watch: CallWatch | None = None,
    ) -> None:
        self.rig = rig or rig_of(one_group(), device=(16,), host=(32,))
        self.node = Node(self.rig.core, epoch=0xE, wait_seconds=wait_seconds, lease_seconds=3600.0)
        self.admission = Admission(calls, waiting, waiting_each, quotas)
        self.dispatcher = Dispatcher(self.node, self.admission, watch)
        edge = Edge(self.dispatcher)
        self.cache = CacheService(edge, 4096)
        self.leases = LeaseService(edge, quotas)
        self._request_ids = iter(range(1, 1 << 20))

    async def __aenter__(self) -> Desk:
        vault: Any = self.rig.vault
        self.node.start(vault)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.node.close()

    def lease(self, name: str = "a", replica: int = 0) -> str:
        """An open lease of a process of that name."""
        return self.rig.lease(name, replica)

    def ask(
        self,
        method: Operation[Q, R],
        request: Q,
        *,
        who: Caller = EVERYONE,
        process: CallerKey = "a process",
        seconds: float | None = None,
    ) -> Any:
        """Result of ``serve``: an answer, a refusal, or a future."""
        return self.dispatcher.serve(who, method, request, process=lambda: process, seconds=seconds)

    def fill(self, lease: str, sequence: int, prompt: str, *, blocks: int | None = None) -> None:
        """Open a sequence with pages for its prompt, or for ``blocks``."""
        keys = chain(*prompt)
        opened = self.ask(self.cache.match, cache_pb2.MatchRequest(lease_id=lease, sequence_id=sequence, keys=keys))
        assert isinstance(opened, cache_pb2.MatchResponse), opened
        wanted = cache_pb2.AllocateRequest(lease_id=lease, sequence_id=sequence, blocks=blocks or len(prompt))
        granted = self.ask(self.cache.allocate, wanted)
        assert isinstance(granted, cache_pb2.AllocateResponse), granted

    def swap_out(self, lease: str, sequence: int) -> int:
        """Begin to take a sequence off the device: whatever it is asked then waits for the ticket."""
        request = cache_pb2.SwapRequest(lease_id=lease, sequence_id=sequence, direction=cache_pb2.SWAP_DIRECTION_OUT)
        [ticket] = self.ask(self.cache.swap, request).tickets
        return int(ticket.id)

    async def land(self, ticket: int, error: Exception | None = None) -> None:
        """End a ticket, with its bytes or with an error; its waiters have their turn."""
        del self.rig.mover.transfers[ticket]
        self.node.on_transfer_done(ticket, error)
        await turns()

    def steps(self, lease: str, *operations: cache_pb2.StepOperation, **fields: Any) -> Any:
        """A Step of these operations, under a request_id of its own."""
        request = step(lease, next(self._request_ids), *operations, **fields)
        return self.ask(self.cache.step, request)

    def pages(self, lease: str, sequence: int) -> list[int]:
        """Pages of the only group that the sequence alone may write."""
        return sorted(self.rig.core.ledger.leases[lease].sequences[sequence].own[0])

    def break_ledger(self, lease: str, sequence: int) -> None:
        """Unpin what the sequence has sealed: its release gives back a pin that it does not hold."""
        sealed = cache_pb2.PublishRequest(lease_id=lease, sequence_id=sequence, blocks=1)
        assert isinstance(self.ask(self.cache.publish, sealed), cache_pb2.PublishResponse)
        held = self.rig.core.ledger.leases[lease].sequences[sequence]
        self.rig.model.blocks.unpin(self.rig.place(), held.anchor)


def step(lease: str, request_id: int, *operations: cache_pb2.StepOperation, **fields: Any) -> cache_pb2.StepRequest:
    return cache_pb2.StepRequest(lease_id=lease, request_id=request_id, operations=operations, **fields)


def match(sequence: int, prompt: str) -> cache_pb2.StepOperation:
    return cache_pb2.StepOperation(match=cache_pb2.MatchRequest(sequence_id=sequence, keys=chain(*prompt)))


def allocate(sequence: int, blocks: int, *, short_suffix: bool = False) -> cache_pb2.StepOperation:
    wanted = cache_pb2.AllocateRequest(sequence_id=sequence, blocks=blocks, short_suffix=short_suffix)
    return cache_pb2.StepOperation(allocate=wanted)


def release(sequence: int) -> cache_pb2.StepOperation:
    return cache_pb2.StepOperation(release=cache_pb2.ReleaseRequest(sequence_id=sequence))


def swap_in(sequence: int, *, short_suffix: bool = False) -> cache_pb2.StepOperation:
    return cache_pb2.StepOperation(
        swap=cache_pb2.SwapRequest(
            sequence_id=sequence, direction=cache_pb2.SWAP_DIRECTION_IN, short_suffix=short_suffix
        )
    )


def extend(sequence: int, page: int, generation: int) -> cache_pb2.StepOperation:
    cells = common_pb2.GroupPages(group=0, pages=pack_pages([page]), generations=pack_numbers([generation]))
    return cache_pb2.StepOperation(extend=cache_pb2.ExtendRequest(sequence_id=sequence, pages=[cells]))


def kinds(response: cache_pb2.StepResponse) -> list[str]:
    """Answer to each operation: its name, or the code of its refusal."""
    return [
        result.error.code if result.HasField("error") else str(result.WhichOneof("result"))
        for result in response.results
    ]


async def turns(count: int = 8) -> None:
    """Let the loop do what is due."""
    for _ in range(count):
        await asyncio.sleep(0)
