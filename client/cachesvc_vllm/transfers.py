"""Messages between the two sides of the connector, sent through vLLM."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from cachesvc_client.plugins.daemon.node import Share
from cachesvc_client.plugins.pages.request_pages import PageCopy
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from cachesvc.model.answers import TicketView
from cachesvc_vllm.daemon.vllm_objects import LoraRequest
from cachesvc_vllm.namespace.adapters import AdapterReport


@dataclass
class WorkerShare(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Message of a worker, sent once: its memory is the daemon's, under this name. ``comes_back``: after a loss it can
    go on with the next daemon. ``instance``: the one of ``Node``, for the scheduler's. ``replaced``: why the name may
    be of other weights than the workers have; empty where it is not."""

    share: Share
    comes_back: bool
    instance: str
    replaced: str = ""


class EarlyLoad(NamedTuple):
    """A load that runs while its request is computed: each layer waits for its part. ``pages``: those that it fills,
    as the request's table has them."""

    tickets: tuple[TicketView, ...]
    pages: tuple[int, ...]


@dataclass
class StepTransfers(KVConnectorMetadata):  # type: ignore[misc]
    """Message to the workers, in each step. ``loads``: by request, the transfers that bring its blocks from the host.
    ``next_lease``: after a loss, the lease that they are to move to, while nothing uses any page; else empty.
    ``is_empty``: the step computes nothing. ``copies``: pages to copy before it computes. ``early``: by request, loads
    that the step itself waits for. ``adapters``: those that the workers are to load and report, in ``adapters_epoch``
    (``Adapters``)."""

    loads: dict[str, tuple[TicketView, ...]] = field(default_factory=dict)
    next_lease: str = ""
    is_empty: bool = False
    copies: list[PageCopy] = field(default_factory=list)
    early: dict[str, EarlyLoad] = field(default_factory=dict)
    adapters: tuple[LoraRequest, ...] = ()
    adapters_epoch: int = 0


@dataclass
class WorkerLease(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Message of the workers. ``lease_id``: to a step with a ``next_lease``, the lease whose slab their tensors lie on;
    empty where one has another one than the rest. ``has_lapsed``: the step may have read other engines' pages.
    ``adapters``: those that are loaded, where that is news."""

    lease_id: str
    has_lapsed: bool = False
    adapters: AdapterReport | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerLease:
        """Combine two ranks' leases: the common one, or an empty name where they differ."""
        assert isinstance(other, WorkerLease)
        lease_id = self.lease_id if self.lease_id == other.lease_id else ""
        adapters = other.adapters if self.adapters is None else self.adapters.aggregate(other.adapters)
        return WorkerLease(lease_id, self.has_lapsed or other.has_lapsed, adapters)


def lapsed_blocks(pages: int) -> set[int]:
    """Return all blocks of an engine, for its scheduler: what was read of them may have been others'."""
    return set(range(pages))


def has_lapsed(invalid_blocks: Collection[int]) -> bool:
    """Return whether a worker reported ``lapsed_blocks``. Page 0 is in no request's table, so a sibling connector under
    a MultiConnector, which reports blocks that it could not load, never names it."""
    return 0 in invalid_blocks
