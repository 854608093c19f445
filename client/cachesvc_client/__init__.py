"""The client of the node cache daemon: what an inference engine imports.

    with CacheClient("/run/cachesvc/cachesvc.sock", engine="my-engine") as client:
        registration = client.register("model@revision", gqa(layers=32, kv_heads=8, head_dim=128, block_tokens=64))
        with client.open_lease(registration) as lease, lease.attach() as pool:
            keys = lease.hasher(prompt).keys
            with lease.match(keys, max_blocks=(len(prompt) - 1) // 64) as sequence:  # one token is computed at least
                sequence.allocate(-(-len(prompt) // 64))  # the table's whole length; host blocks start to load
                for ticket in sequence.tickets:   # before layer l's attention
                    pool.wait_layer(ticket, l, timeout_s=5)
                    # on a GPU: pool.wait_layer_on(stream, ticket, l), and pool.confirm(*sequence.tickets) at the end
                ...                               # compute from block sequence.hit_blocks on, into sequence.tables
                sequence.publish(len(keys) // 32)

Every error is a CacheClientError, drawn as a tree in ``errors``; on any of them an engine can go on without the cache.
"""

from cachesvc.model.answers import Allocated, Expected, Prefetched, Published, Recycled, Swapped, TicketView
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.words import KEY_BYTES, NO_PAGE
from cachesvc_client.client import CacheClient, Reattacher
from cachesvc_client.core.arguments import Retention
from cachesvc_client.core.errors import (
    AlreadyClosed,
    CacheClientError,
    Conflict,
    DaemonDraining,
    DaemonFault,
    DaemonUnavailable,
    DeadlineExceeded,
    EventsMissed,
    GpuFailed,
    InvalidRequest,
    KeyMisplaced,
    LayoutRejected,
    LeaseLost,
    LimitExceeded,
    LoadFailed,
    NoSuchPlane,
    NotFound,
    NotOwned,
    NotSupported,
    PermissionDenied,
    PoolExhausted,
    QuotaExceeded,
    Registration,
    StockEmpty,
    SubscriberTooSlow,
    TokenFileUnreadable,
    Unauthenticated,
    UntrustedDaemon,
    UsedAfterFork,
)
from cachesvc_client.core.keys import BlockHasher, ExtraKey, block_keys
from cachesvc_client.events import BlockMirror, EventSubscriber
from cachesvc_client.layouts.families import (
    HeadPlace,
    IndexPage,
    dsa,
    even_window_heads,
    gqa,
    gqa_head_windows,
    gqa_windowed,
    head_places,
    mla,
    mla_windowed,
    opaque,
    padding_bytes,
    split_heads,
    tensor_names,
    with_draft,
)
from cachesvc_client.layouts.hf_config import layout_of_config
from cachesvc_client.lease import Lease
from cachesvc_client.memory.device import from_bfloat16, to_bfloat16
from cachesvc_client.memory.pool import AttachedPool, LoadOutcome
from cachesvc_client.records.entries import Stock
from cachesvc_client.records.steps import StepBatch
from cachesvc_client.sequence import PendingStep, Sequence, StepStream
from cachesvc_client.wire.credentials import Credentials, open_remote
from cachesvc_client.wire.settings import ChannelOptions, Retries, Timeouts, Transport, default_socket, default_target

__all__ = [
    "KEY_BYTES",
    "NO_PAGE",
    "Allocated",
    "AlreadyClosed",
    "AttachedPool",
    "BlockHasher",
    "BlockMirror",
    "CacheClient",
    "CacheClientError",
    "ChannelOptions",
    "Conflict",
    "Credentials",
    "DaemonDraining",
    "DaemonFault",
    "DaemonUnavailable",
    "DeadlineExceeded",
    "EventSubscriber",
    "EventsMissed",
    "Expected",
    "ExtraKey",
    "GpuFailed",
    "HeadPlace",
    "IndexPage",
    "InvalidRequest",
    "KeyMisplaced",
    "Layout",
    "LayoutRejected",
    "Lease",
    "LeaseLost",
    "LimitExceeded",
    "LoadFailed",
    "LoadOutcome",
    "NoSuchPlane",
    "NotFound",
    "NotOwned",
    "NotSupported",
    "PendingStep",
    "PermissionDenied",
    "Plane",
    "PlaneGroup",
    "PoolExhausted",
    "Prefetched",
    "Published",
    "QuotaExceeded",
    "Reattacher",
    "Recycled",
    "Registration",
    "Retention",
    "Retries",
    "Sequence",
    "StepBatch",
    "StepStream",
    "Stock",
    "StockEmpty",
    "SubscriberTooSlow",
    "Swapped",
    "TicketView",
    "Timeouts",
    "TokenFileUnreadable",
    "Transport",
    "Unauthenticated",
    "UntrustedDaemon",
    "UsedAfterFork",
    "block_keys",
    "default_socket",
    "default_target",
    "dsa",
    "even_window_heads",
    "from_bfloat16",
    "gqa",
    "gqa_head_windows",
    "gqa_windowed",
    "head_places",
    "layout_of_config",
    "mla",
    "mla_windowed",
    "opaque",
    "open_remote",
    "padding_bytes",
    "split_heads",
    "tensor_names",
    "to_bfloat16",
    "with_draft",
]
