"""What is told of the daemon beside its ledger: what it is, how it is set, its devices and its host memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from cachesvc.memory.host_pool import HostPool
from cachesvc.service.host.device_health import DeviceHealth
from cachesvc.service.host.device_line import DeviceLine


class Transports(NamedTuple):
    """Which way calls come: lanes that are open, and calls since the start."""

    lanes: int
    lane_calls: int
    grpc_calls: int


@dataclass(frozen=True, slots=True)
class Facts:
    """Sizes in bytes, of one device and of the host pool. ``started``: monotonic seconds. ``lease_seconds``: silence
    after which a lease is lost. ``settings``: as operators see them, kept up to date. ``devices``: those that were
    measured. ``tokens_stale_seconds``: how long the tokens' file could not be read; 0 where it is, or there is none."""

    version: str
    backend: str
    epoch: int
    started: float
    lease_seconds: float
    device_pool_bytes: int
    host_pool_bytes: int
    host_chunk_bytes: int
    eviction: str
    settings: dict[str, str]
    devices: list[DeviceLine]
    host_pool: HostPool
    health: DeviceHealth
    transports: Callable[[], Transports]
    tokens_stale_seconds: Callable[[], float]

    @property
    def uptime_seconds(self) -> float:
        """Since the daemon started."""
        return time.monotonic() - self.started

    @property
    def host_pool_ready_bytes(self) -> int:
        """How much of the host pool can be used by now."""
        return min(self.host_pool_bytes, self.host_pool.ready_chunks * self.host_chunk_bytes)

    def attention(self) -> list[str]:
        """Sentences about what is broken; empty where nothing is."""
        out = [f"device {uuid} is broken: {fault}" for uuid, fault in self.health.faults().items()]
        if self.host_pool.failure is not None:
            out.append(f"the host pool stays at {self.host_pool_ready_bytes} bytes: {self.host_pool.failure}")
        if stale := self.tokens_stale_seconds():
            out.append(
                f"the tokens' file has not been readable for {stale:.0f} s: nothing that was taken out is revoked"
            )
        return out
