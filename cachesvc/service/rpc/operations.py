"""The operations of sequences, one row each: a message becomes a run of a flow, and the flow's answer a message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message
from kvcache.v1 import cache_pb2

from cachesvc.flows.context.call import Call
from cachesvc.flows.context.core import Core
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
from cachesvc.model.columns import NO_POSITIONS
from cachesvc.model.errors import InvalidRequest, LimitExceeded
from cachesvc.model.transfer import Urgency
from cachesvc.policy.hints import RequestHint, retention_of
from cachesvc.service.access.admission import CallKind, Slot
from cachesvc.service.access.quota import Quotas
from cachesvc.service.calls.dispatcher import Ask, Dispatcher, Operation
from cachesvc.service.loop.node import end_wait
from cachesvc.wire.convert import (
    allocated_to_proto,
    cells_from_proto,
    expected_from_proto,
    matched_to_proto,
    positions_from_proto,
    prefetched_to_proto,
    published_to_proto,
    recycled_to_proto,
    swapped_to_proto,
)

Q = TypeVar("Q", bound=Message)
M = TypeVar("M")
A = TypeVar("A")
R = TypeVar("R", bound=Message)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FlowOperation(Operation[Q, R], Generic[Q, M, A, R]):
    """An operation that is one flow under a lease. It is run until it does not wait, and ``reply`` makes its message.

    ``memory`` makes what the flow has to remember from one run to the next. ``quota`` is held right before each run.
    ``has_order``: a Step keeps the order of its operations on one sequence.
    """

    flow: Callable[[Core, Call, Q, M], A | Wait]
    reply: Callable[[A], R]
    memory: Callable[[], M]
    quota: Callable[[Quotas, Call, Q], None] | None = None
    is_repeatable: bool = True
    is_of_lease: bool = True
    has_order: bool = True

    def carry(self, ask: Ask, message: Q) -> R | asyncio.Future[Any]:
        """Run the flow, and have the dispatcher go on with it where it waits."""
        call, memory = ask.call, self.memory()
        assert call is not None, "an operation of a lease"
        answer = self.run(ask.dispatcher, call, message, memory)
        return self._wait_out(ask, message, memory, answer) if isinstance(answer, Wait) else self.reply(answer)

    def run(self, dispatcher: Dispatcher, call: Call, message: Q, memory: M) -> A | Wait:
        """Run the flow once. Raises what refuses the operation."""
        if self.quota is not None and (quotas := dispatcher.admission.quotas) is not None:
            self.quota(quotas, call, message)
        node = dispatcher.node
        return node.run_of(call.model.id, self.flow, node.core, call, message, memory)

    def _wait_out(self, ask: Ask, message: Q, memory: M, wait: Wait) -> asyncio.Future[Any]:
        dispatcher = ask.dispatcher
        ask.goes_on = wait.goes_on

        def run() -> A | Wait:
            dispatcher.free_bytes(ask)  # for this run: what it opens counts by itself
            again = self.run(dispatcher, ask.renewed(), message, memory)
            if isinstance(again, Wait):
                dispatcher.hold_bytes(ask)
            ask.goes_on = isinstance(again, Wait) and again.goes_on
            return again

        async def wait_out(place: Slot) -> R:
            node, until = dispatcher.node, dispatcher.until(ask)
            return self.reply(await node.wait_out(run, wait, until, ask.holder.process, ask.method, place.wait))

        kind = CallKind.WAITS if wait.tickets else CallKind.WORK  # for which there was room, or nothing had been done
        try:
            later = dispatcher.later(ask, kind, wait_out, is_admitted=not wait.tickets)
        except LimitExceeded:
            end_wait(wait)
            raise
        later.add_done_callback(lambda _: end_wait(wait))  # where it was given up before its first turn
        return later


def _nothing() -> None:
    """Memory of a flow that needs none."""


def _match(core: Core, call: Call, m: cache_pb2.MatchRequest, sharing: Sharing) -> Matched | Wait:
    clock = m.clock_seconds if m.HasField("clock_seconds") else None
    if m.HasField("expected"):
        sharing.expected = expected_from_proto(m.expected)
    hint = retention_of(m.retention) if m.retention else RequestHint.DEFAULT
    return match(core, call, m.sequence_id, m.keys, m.max_blocks, sharing, m.waited_ms / 1000, clock, hint)


def _allocate(core: Core, call: Call, m: cache_pb2.AllocateRequest, _: None) -> Allocated | Wait:
    positions = positions_from_proto(m.positions) if m.positions else NO_POSITIONS
    return allocate(core, call, m.sequence_id, m.blocks, short_suffix=m.short_suffix, positions=positions)


def _publish(core: Core, call: Call, m: cache_pb2.PublishRequest, publishing: Publishing) -> Published | Wait:
    states = cells_from_proto(m.states) if m.states else ()
    return publish(core, call, m.sequence_id, m.first_block, m.keys, m.blocks, publishing, states)


def _swap(core: Core, call: Call, m: cache_pb2.SwapRequest, _: None) -> Swapped | Wait:
    if m.direction == cache_pb2.SWAP_DIRECTION_OUT:
        return swap_out(core, call, m.sequence_id)
    if m.direction == cache_pb2.SWAP_DIRECTION_IN:
        return swap_in(core, call, m.sequence_id, short_suffix=m.short_suffix)
    raise InvalidRequest("swap needs a direction, OUT or IN")


def _recycle(core: Core, call: Call, m: cache_pb2.RecycleRequest, recycling: Recycling) -> Recycled | Wait:
    pages = () if recycling.has_begun else cells_from_proto(m.pages)
    return recycle(core, call, m.sequence_id, m.computed_tokens, pages, recycling, tuple(m.dead_blocks))


def _release(core: Core, call: Call, m: cache_pb2.ReleaseRequest, _: None) -> int | Wait:
    tokens = m.output_tokens if m.HasField("output_tokens") else None
    clock = require_clock(m.clock_seconds) if m.HasField("clock_seconds") else None
    return release(core, call, m.sequence_id, ended(call, tokens, m.ended_ms / 1000, clock))


def _prefetch(core: Core, call: Call, m: cache_pb2.PrefetchRequest, sharing: Sharing) -> Prefetched | Wait:
    return prefetch(core, call, m.keys, sharing)


def _extend(core: Core, call: Call, m: cache_pb2.ExtendRequest, _: None) -> int | Wait:
    return extend(core, call, m.sequence_id, cells_from_proto(m.pages))


MATCH: FlowOperation[cache_pb2.MatchRequest, Sharing, Matched, cache_pb2.MatchResponse] = FlowOperation(
    name="CacheService/Match",
    flow=_match,
    memory=Sharing,
    reply=matched_to_proto,
    quota=lambda quotas, call, _: quotas.require_sequence(call),
)
ALLOCATE: FlowOperation[cache_pb2.AllocateRequest, None, Allocated, cache_pb2.AllocateResponse] = FlowOperation(
    name="CacheService/Allocate",
    flow=_allocate,
    memory=_nothing,
    reply=allocated_to_proto,
    quota=lambda quotas, call, m: quotas.require_blocks(call, m.sequence_id, m.blocks),
)
PUBLISH: FlowOperation[cache_pb2.PublishRequest, Publishing, Published, cache_pb2.PublishResponse] = FlowOperation(
    name="CacheService/Publish", flow=_publish, memory=Publishing, reply=published_to_proto
)
SWAP: FlowOperation[cache_pb2.SwapRequest, None, Swapped, cache_pb2.SwapResponse] = FlowOperation(
    name="CacheService/Swap",
    flow=_swap,
    memory=_nothing,
    reply=swapped_to_proto,
    quota=lambda quotas, call, m: quotas.require_swapped(call, m.sequence_id),
)
RECYCLE: FlowOperation[cache_pb2.RecycleRequest, Recycling, Recycled, cache_pb2.RecycleResponse] = FlowOperation(
    name="CacheService/Recycle", flow=_recycle, memory=Recycling, reply=recycled_to_proto
)
RELEASE: FlowOperation[cache_pb2.ReleaseRequest, None, int, cache_pb2.ReleaseResponse] = FlowOperation(
    name="CacheService/Release",
    flow=_release,
    memory=_nothing,
    reply=lambda freed: cache_pb2.ReleaseResponse(freed_pages=freed),
    kind=CallKind.LIFE,
)
PREFETCH: FlowOperation[cache_pb2.PrefetchRequest, Sharing, Prefetched, cache_pb2.PrefetchResponse] = FlowOperation(
    name="CacheService/Prefetch",
    flow=_prefetch,
    memory=lambda: Sharing(Urgency.BACKGROUND),
    reply=prefetched_to_proto,
    has_order=False,
)
EXTEND: FlowOperation[cache_pb2.ExtendRequest, None, int, cache_pb2.ExtendResponse] = FlowOperation(
    name="CacheService/Extend",  # within a Step alone
    flow=_extend,
    memory=_nothing,
    reply=lambda blocks: cache_pb2.ExtendResponse(blocks=blocks),
)

OPERATIONS: dict[str, FlowOperation[Any, Any, Any, Any]] = {
    "match": MATCH,
    "allocate": ALLOCATE,
    "publish": PUBLISH,
    "swap": SWAP,
    "recycle": RECYCLE,
    "release": RELEASE,
    "prefetch": PREFETCH,
    "extend": EXTEND,
}
"""Operations by their names in StepOperation and OperationResult."""
