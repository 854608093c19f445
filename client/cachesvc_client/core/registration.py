"""Pools that the daemon grants to a registered model."""

from __future__ import annotations

from dataclasses import dataclass, field

from cachesvc.model.layout import Layout


@dataclass(frozen=True)
class Registration:
    """A model's pools on one replica. Plain data: hand it to worker processes.

    ``namespace`` (32 bytes) is the root of every block key. ``device_pages[g]`` and ``host_pages[g]`` count the pages
    of each group's pool, in the layout's order, the first ``reserved_pages`` of which on the device are the engines'
    own. ``devices`` are UUIDs, one a rank. ``epoch`` changes whenever the daemon starts anew: what was registered in
    another epoch is gone. ``existed``: the pools were there, perhaps with blocks. ``peer_address``:
    where the daemon lends blocks to other nodes; empty: nowhere.
    """

    model_id: int
    replica: int
    namespace: bytes = field(repr=False)
    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...]
    devices: tuple[str, ...]
    epoch: int
    layout: Layout
    existed: bool = False
    reserved_pages: int = 0
    weights_version: str = ""
    peer_address: str = ""

    @property
    def key(self) -> tuple[int, int]:
        """Model and replica, among those of one epoch."""
        return self.model_id, self.replica
