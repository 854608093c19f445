"""The client for engines that run on an event loop: the same calls as ``cachesvc_client``, awaited."""

from cachesvc_client.aio.client import AsyncCacheClient
from cachesvc_client.aio.events import AsyncEventSubscriber
from cachesvc_client.aio.lease import AsyncLease
from cachesvc_client.aio.sequence import AsyncSequence
from cachesvc_client.aio.stepping import AsyncPendingStep, AsyncStepStream

__all__ = [
    "AsyncCacheClient",
    "AsyncEventSubscriber",
    "AsyncLease",
    "AsyncPendingStep",
    "AsyncSequence",
    "AsyncStepStream",
]
