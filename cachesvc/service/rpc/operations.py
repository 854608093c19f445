"""The operations of CacheService, one row each: how a message becomes a flow and its answer a message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from google.protobuf.message import Message
from kvcache.v1 import cache_pb2

from cachesvc.flows.allocate import allocate
from cachesvc.flows.call import Call
from cachesvc.flows.core import Core
from cachesvc.flows.match import match
from cachesvc.flows.peers import Sharing
from cachesvc.flows.prefetch import prefetch
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import extend, recycle
from cachesvc.flows.release import release
from cachesvc.flows.swap import swap_in, swap_out
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.transfer import Urgency
from cachesvc.wire.convert import (
    allocated_to_proto,
    cells_from_proto,
    matched_to_proto,
    prefetched_to_proto,
    published_to_proto,
    recycled_to_proto,
    swapped_to_proto,
)

Flow = Callable[[Core, Call], Any]
"""Answers, or says what to wait for and is run again with a new Call."""


class Operation(NamedTuple):
    """``begin(message)`` gives the flow, to be run until it does not wait; ``reply(answer)`` its message.

    What a call has to remember from one run of its flow to the next is made in ``begin``.
    """

    begin: Callable[[Any], Flow]
    reply: Callable[[Any], Message]


def _match(m: cache_pb2.MatchRequest) -> Flow:
    sharing = Sharing()
    return lambda core, call: match(core, call, m.sequence_id, m.keys, m.max_blocks, sharing)


def _allocate(m: cache_pb2.AllocateRequest) -> Flow:
    return lambda core, call: allocate(core, call, m.sequence_id, m.blocks)


def _publish(m: cache_pb2.PublishRequest) -> Flow:
    return lambda core, call: publish(core, call, m.sequence_id, m.first_block, m.keys, m.blocks)


def _swap(m: cache_pb2.SwapRequest) -> Flow:
    if m.direction == cache_pb2.SWAP_DIRECTION_OUT:
        return lambda core, call: swap_out(core, call, m.sequence_id)
    if m.direction == cache_pb2.SWAP_DIRECTION_IN:
        return lambda core, call: swap_in(core, call, m.sequence_id)
    raise InvalidRequest("swap needs a direction, OUT or IN")


def _recycle(m: cache_pb2.RecycleRequest) -> Flow:
    return lambda core, call: recycle(core, call, m.sequence_id, m.computed_tokens, cells_from_proto(m.pages))


def _release(m: cache_pb2.ReleaseRequest) -> Flow:
    return lambda core, call: release(core, call, m.sequence_id)


def _prefetch(m: cache_pb2.PrefetchRequest) -> Flow:
    sharing = Sharing(Urgency.BACKGROUND)
    return lambda core, call: prefetch(core, call, m.keys, sharing)


def _extend(m: cache_pb2.ExtendRequest) -> Flow:
    return lambda core, call: extend(core, call, m.sequence_id, cells_from_proto(m.pages))


OPERATIONS: dict[str, Operation] = {
    "match": Operation(_match, matched_to_proto),
    "allocate": Operation(_allocate, allocated_to_proto),
    "publish": Operation(_publish, published_to_proto),
    "swap": Operation(_swap, swapped_to_proto),
    "recycle": Operation(_recycle, recycled_to_proto),
    "release": Operation(_release, lambda freed: cache_pb2.ReleaseResponse(freed_pages=freed)),
    "prefetch": Operation(_prefetch, prefetched_to_proto),
    "extend": Operation(_extend, lambda blocks: cache_pb2.ExtendResponse(blocks=blocks)),
}
