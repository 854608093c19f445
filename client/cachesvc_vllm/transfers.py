"""What the scheduler's side tells the workers' side in a step: the loads to wait for."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from cachesvc.model.answers import TicketView


@dataclass
class StepTransfers(KVConnectorMetadata):  # type: ignore[misc]
    """``loads``: by request, the transfers that bring its blocks from the host."""

    loads: dict[str, tuple[TicketView, ...]] = field(default_factory=dict)
