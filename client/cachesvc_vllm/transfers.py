"""What the two sides of the connector tell each other through vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from cachesvc.model.answers import TicketView
from cachesvc_vllm.node import Share


@dataclass
class WorkerShare(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """From a worker, once: its memory is the daemon's, under this name. ``comes_back``: after a loss it can go on with
    the next daemon."""

    share: Share
    comes_back: bool


@dataclass
class StepTransfers(KVConnectorMetadata):  # type: ignore[misc]
    """To the workers, in each step. ``loads``: by request, the transfers that bring its blocks from the host.
    ``lease_id``: of the lease whose pages the tables of this step are of; empty without a daemon. ``is_empty``: the
    step computes nothing."""

    loads: dict[str, tuple[TicketView, ...]] = field(default_factory=dict)
    lease_id: str = ""
    is_empty: bool = False
