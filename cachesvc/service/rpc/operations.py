"""The operations of CacheService, one row each: how a message becomes a flow and its answer a message."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from google.protobuf.message import Message
from kvcache.v1 import cache_pb2

from cachesvc.flows.allocate import allocate
from cachesvc.flows.core import Core
from cachesvc.flows.match import match
from cachesvc.flows.peers import Sharing
from cachesvc.flows.prefetch import prefetch
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import extend, recycle
from cachesvc.flows.release import release
from cachesvc.flows.swap import swap_in, swap_out
from cachesvc.model.answers import Allocated, Matched, Prefetched, Published, Recycled, Swapped, Wait
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


class Operation(NamedTuple):
    """``begin(core, lease_id, message, now)`` gives the flow, to be run until it does not wait; ``reply(answer)``.

    What a call has to remember from one run of its flow to the next is made in ``begin``.
    """

    begin: Callable[[Core, str, Any, float], Callable[[], Any]]
    reply: Callable[[Any], Message]


def _match(core: Core, lease_id: str, m: cache_pb2.MatchRequest, now: float) -> Callable[[], Matched | Wait]:
    return partial(match, core, lease_id, m.sequence_id, m.keys, m.max_blocks, now, Sharing())


def _allocate(core: Core, lease_id: str, m: cache_pb2.AllocateRequest, now: float) -> Callable[[], Allocated | Wait]:
    return partial(allocate, core, lease_id, m.sequence_id, m.blocks, now)


def _publish(core: Core, lease_id: str, m: cache_pb2.PublishRequest, now: float) -> Callable[[], Published | Wait]:
    return partial(publish, core, lease_id, m.sequence_id, m.first_block, m.keys, m.blocks, now)


def _swap(core: Core, lease_id: str, m: cache_pb2.SwapRequest, now: float) -> Callable[[], Swapped | Wait]:
    if m.direction == cache_pb2.SWAP_DIRECTION_OUT:
        return partial(swap_out, core, lease_id, m.sequence_id, now)
    if m.direction == cache_pb2.SWAP_DIRECTION_IN:
        return partial(swap_in, core, lease_id, m.sequence_id, now)
    raise InvalidRequest("swap needs a direction, OUT or IN")


def _recycle(core: Core, lease_id: str, m: cache_pb2.RecycleRequest, now: float) -> Callable[[], Recycled]:
    return partial(recycle, core, lease_id, m.sequence_id, m.computed_tokens, cells_from_proto(m.pages), now)


def _release(core: Core, lease_id: str, m: cache_pb2.ReleaseRequest, now: float) -> Callable[[], int]:
    return partial(release, core, lease_id, m.sequence_id, now)


def _prefetch(core: Core, lease_id: str, m: cache_pb2.PrefetchRequest, now: float) -> Callable[[], Prefetched | Wait]:
    return partial(prefetch, core, lease_id, m.keys, now, Sharing(Urgency.BACKGROUND))


def _extend(core: Core, lease_id: str, m: cache_pb2.ExtendRequest, now: float) -> Callable[[], int]:
    del now
    return partial(extend, core, lease_id, m.sequence_id, cells_from_proto(m.pages))


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
