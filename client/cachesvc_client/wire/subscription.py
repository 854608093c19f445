"""Requests for events, and the options of a channel that carries them."""

from __future__ import annotations

from kvcache.v1 import event_pb2

from cachesvc_client.wire.settings import ChannelOptions

DEFAULT_OPTIONS = ChannelOptions(first_reconnect_ms=2000, longest_reconnect_ms=2000)
"""Channel options of a subscriber, which is in no hurry."""


def subscription(
    namespace: bytes, *, snapshot: bool = True, epoch: int = 0, after: int | None = None, storage: bool = False
) -> event_pb2.SubscribeRequest:
    """Request for events: a snapshot first, or all behind change ``after`` of ``epoch``, or (neither) from now on.
    ``storage``: also changes of storage."""
    request = event_pb2.SubscribeRequest(namespace=namespace, snapshot=snapshot, epoch=epoch, storage=storage)
    if after is not None and not snapshot:
        request.after_sequence_number = after
    return request
