"""The operations of CacheService, one row each: how a message becomes a flow and its answer a message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.message import Message
from kvcache.v1 import cache_pb2

from cachesvc.flows.context.call import Call
from cachesvc.flows.engine.allocate import allocate
from cachesvc.flows.engine.match import match, require_clock
from cachesvc.flows.engine.prefetch import prefetch
from cachesvc.flows.engine.publish import Publishing, publish
from cachesvc.flows.engine.recycle import Recycling, recycle
from cachesvc.flows.engine.release import ended, release
from cachesvc.flows.engine.stock import extend
from cachesvc.flows.engine.swap import swap_in, swap_out
from cachesvc.flows.transfer.replicas import Sharing
from cachesvc.model.answers import Allocated, Matched, Prefetched, Published, Recycled, Swapped, Wait
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.transfer import Urgency
from cachesvc.service.access.quota import Quotas
from cachesvc.service.calls.dispatcher import Ask, Dispatcher
from cachesvc.service.loop.node import Flow
from cachesvc.wire.convert import (
    allocated_to_proto,
    cells_from_proto,
    matched_to_proto,
    positions_from_proto,
    prefetched_to_proto,
    published_to_proto,
    recycled_to_proto,
    swapped_to_proto,
)


class OfSequence(Protocol):
    """A message that names a sequence."""

    sequence_id: int


Q = TypeVar("Q", bound=Message)
A = TypeVar("A")
R = TypeVar("R", bound=Message)


@dataclass(frozen=True, slots=True, eq=False)
class Operation(Generic[Q, A, R]):
    """``begin(message)`` gives the flow, to be run until it does not wait; ``reply(answer)`` its message.

    ``begin`` makes what a call has to remember from one run of its flow to the next. ``of`` is the operation's
    message in a Step, ``into`` its place in a result. ``sequence``: the sequence whose order within a Step it keeps;
    None: of none. ``quota`` is held right before each run.
    """

    name: str
    begin: Callable[[Q], Flow[A]]
    reply: Callable[[A], R]
    of: Callable[[cache_pb2.StepOperation], Q]
    into: Callable[[cache_pb2.OperationResult], R]
    sequence: Callable[[Q], int] | None
    quota: Callable[[Quotas, Call, Q], None] | None = None


def _sequence_of(m: OfSequence) -> int:
    return m.sequence_id


def _match(m: cache_pb2.MatchRequest) -> Flow[Matched]:
    sharing = Sharing()
    waited = m.waited_ms / 1000
    clock = m.clock_seconds if m.HasField("clock_seconds") else None
    return lambda core, call: match(core, call, m.sequence_id, m.keys, m.max_blocks, sharing, waited, clock)


def _allocate(m: cache_pb2.AllocateRequest) -> Flow[Allocated]:
    positions = positions_from_proto(m.positions)
    return lambda core, call: allocate(
        core, call, m.sequence_id, m.blocks, short_suffix=m.short_suffix, positions=positions
    )


def _publish(m: cache_pb2.PublishRequest) -> Flow[Published]:
    publishing, states = Publishing(), cells_from_proto(m.states)
    return lambda core, call: publish(core, call, m.sequence_id, m.first_block, m.keys, m.blocks, publishing, states)


def _swap(m: cache_pb2.SwapRequest) -> Flow[Swapped]:
    if m.direction == cache_pb2.SWAP_DIRECTION_OUT:
        return lambda core, call: swap_out(core, call, m.sequence_id)
    if m.direction == cache_pb2.SWAP_DIRECTION_IN:
        return lambda core, call: swap_in(core, call, m.sequence_id, short_suffix=m.short_suffix)
    raise InvalidRequest("swap needs a direction, OUT or IN")


def _recycle(m: cache_pb2.RecycleRequest) -> Flow[Recycled]:
    recycling, pages, dead = Recycling(), cells_from_proto(m.pages), tuple(m.dead_blocks)
    return lambda core, call: recycle(core, call, m.sequence_id, m.computed_tokens, pages, recycling, dead)


def _release(m: cache_pb2.ReleaseRequest) -> Flow[int]:
    tokens = m.output_tokens if m.HasField("output_tokens") else None
    clock = require_clock(m.clock_seconds) if m.HasField("clock_seconds") else None
    ago = m.ended_ms / 1000
    return lambda core, call: release(core, call, m.sequence_id, ended(call, tokens, ago, clock))


def _prefetch(m: cache_pb2.PrefetchRequest) -> Flow[Prefetched]:
    sharing = Sharing(Urgency.BACKGROUND)
    return lambda core, call: prefetch(core, call, m.keys, sharing)


def _extend(m: cache_pb2.ExtendRequest) -> Flow[int]:
    return lambda core, call: extend(core, call, m.sequence_id, cells_from_proto(m.pages))


MATCH: Operation[cache_pb2.MatchRequest, Matched, cache_pb2.MatchResponse] = Operation(
    "match",
    _match,
    matched_to_proto,
    of=lambda step: step.match,
    into=lambda result: result.match,
    sequence=_sequence_of,
    quota=lambda quotas, call, _: quotas.require_sequence(call),
)
ALLOCATE: Operation[cache_pb2.AllocateRequest, Allocated, cache_pb2.AllocateResponse] = Operation(
    "allocate",
    _allocate,
    allocated_to_proto,
    of=lambda step: step.allocate,
    into=lambda result: result.allocate,
    sequence=_sequence_of,
    quota=lambda quotas, call, m: quotas.require_blocks(call, m.sequence_id, m.blocks),
)
PUBLISH: Operation[cache_pb2.PublishRequest, Published, cache_pb2.PublishResponse] = Operation(
    "publish",
    _publish,
    published_to_proto,
    of=lambda step: step.publish,
    into=lambda result: result.publish,
    sequence=_sequence_of,
)
SWAP: Operation[cache_pb2.SwapRequest, Swapped, cache_pb2.SwapResponse] = Operation(
    "swap",
    _swap,
    swapped_to_proto,
    of=lambda step: step.swap,
    into=lambda result: result.swap,
    sequence=_sequence_of,
    quota=lambda quotas, call, m: quotas.require_swapped(call, m.sequence_id),
)
RECYCLE: Operation[cache_pb2.RecycleRequest, Recycled, cache_pb2.RecycleResponse] = Operation(
    "recycle",
    _recycle,
    recycled_to_proto,
    of=lambda step: step.recycle,
    into=lambda result: result.recycle,
    sequence=_sequence_of,
)
RELEASE: Operation[cache_pb2.ReleaseRequest, int, cache_pb2.ReleaseResponse] = Operation(
    "release",
    _release,
    lambda freed: cache_pb2.ReleaseResponse(freed_pages=freed),
    of=lambda step: step.release,
    into=lambda result: result.release,
    sequence=_sequence_of,
)
PREFETCH: Operation[cache_pb2.PrefetchRequest, Prefetched, cache_pb2.PrefetchResponse] = Operation(
    "prefetch",
    _prefetch,
    prefetched_to_proto,
    of=lambda step: step.prefetch,
    into=lambda result: result.prefetch,
    sequence=None,
)
EXTEND: Operation[cache_pb2.ExtendRequest, int, cache_pb2.ExtendResponse] = Operation(
    "extend",
    _extend,
    lambda blocks: cache_pb2.ExtendResponse(blocks=blocks),
    of=lambda step: step.extend,
    into=lambda result: result.extend,
    sequence=_sequence_of,
)

OPERATIONS: dict[str, Operation[Any, Any, Any]] = {
    row.name: row for row in (MATCH, ALLOCATE, PUBLISH, SWAP, RECYCLE, RELEASE, PREFETCH, EXTEND)
}
"""Operations by their names in StepOperation and OperationResult."""


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs operations under a lease. ``quotas``: None where no tenants are configured."""

    dispatcher: Dispatcher
    quotas: Quotas | None

    def run(self, ask: Ask, operation: Operation[Q, A, R], message: Q, flow: Flow[A]) -> A | Wait:
        """Run the flow once, with everything looked up anew. Raises what refuses the operation."""
        return self.run_under(self.dispatcher.resolve(ask), operation, message, flow)

    def run_under(self, call: Call, operation: Operation[Q, A, R], message: Q, flow: Flow[A]) -> A | Wait:
        """Run like ``run``, with what was looked up in this turn of the loop."""
        if operation.quota is not None and self.quotas is not None:
            operation.quota(self.quotas, call, message)
        node = self.dispatcher.node
        return node.run_of(call.model.id, flow, node.core, call)
