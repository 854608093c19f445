"""The client for engines that run on an event loop: the same calls as ``cachesvc_client``, awaited.

What is asked in which order, and what a failure means, is written here once, as coroutines over a ``Port``. On an event
loop they are awaited as they are; the blocking client drives each to its end on a port that blocks (``wire.blocking``).
"""

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
