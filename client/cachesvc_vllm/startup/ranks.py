"""Tensor parallelism: a worker process for each rank, all of which have the daemon's memory, or none has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cachesvc_client.plugins.daemon.errors import ConnectorRefused


@dataclass(frozen=True, slots=True)
class Start:
    """Start of one rank: it has its slab of ``model``, which is empty where no daemon is there and none is required; or
    a ``failure`` kept it from starting. ``replaced``: why its name may be of other weights than it has."""

    model: str = ""
    failure: str = ""
    replaced: str = ""


def agreed_model(starts: Sequence[Start]) -> str:
    """The model that every rank has its slab of; empty where one rank has none, and the others may not use theirs.
    Raises ConnectorRefused where a rank failed, or ranks share as different models."""
    for rank, start in enumerate(starts):
        if start.failure:
            raise ConnectorRefused(f"rank {rank} did not start: {start.failure}")
    models = {start.model for start in starts}
    if "" in models:
        return ""
    if len(models) > 1:
        raise ConnectorRefused(f"ranks of one engine share as {', '.join(sorted(models))}: they read different weights")
    return models.pop()
