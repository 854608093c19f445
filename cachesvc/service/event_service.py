"""EventService on the wire: known by name; subscribers are told that it is not built yet."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from kvcache.v1 import event_pb2, event_pb2_grpc

from cachesvc.model.errors import NotSupported
from cachesvc.service.calls import Context, refuse


class EventService(event_pb2_grpc.EventServiceServicer):
    """Subscribe answers UNIMPLEMENTED by name."""

    async def Subscribe(
        self, request: event_pb2.SubscribeRequest, context: Context
    ) -> AsyncIterator[event_pb2.SubscribeResponse]:
        end: Callable[[Context, NotSupported], Awaitable[None]] = refuse
        await end(context, NotSupported("event streams are not built in this release; poll AdminService.ListBlocks"))
        yield event_pb2.SubscribeResponse()  # not reached: it makes this a stream
