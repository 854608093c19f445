"""Facts of the daemon beside its ledger: version, settings, devices and host memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from cachesvc.memory.host.pool import HostPool
from cachesvc.service.access.keyring import Keyring
from cachesvc.service.access.retired import Shown
from cachesvc.service.host.device_health import DeviceHealth
from cachesvc.service.host.device_line import DeviceLine
from cachesvc.service.loop.latency import LoopWatch


class Transports(NamedTuple):
    """Transports of calls: lanes that are open, and calls since the start."""

    lanes: int
    lane_calls: int
    grpc_calls: int


@dataclass(frozen=True, slots=True)
class Facts:
    """Sizes in bytes, of one device and of the host pool. ``started``: monotonic seconds. ``lease_seconds``: silence
    after which a lease is lost. ``settings``: as operators see them, kept up to date. ``devices``: those that were
    measured. ``keyring``: of the tokens' file; None: there is none.
    ``other_attention``: sentences about storage and other nodes."""

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
    loop: LoopWatch
    keyring: Keyring | None = None
    other_attention: Callable[[], list[str]] = list

    @property
    def uptime_seconds(self) -> float:
        """Seconds since the daemon started."""
        return time.monotonic() - self.started

    @property
    def host_pool_ready_bytes(self) -> int:
        """Usable bytes of the host pool by now."""
        return min(self.host_pool_bytes, self.host_pool.ready_chunks * self.host_chunk_bytes)

    @property
    def tokens_stale_seconds(self) -> float:
        """Time for which the tokens' file could not be read, seconds; 0 where it is read, or there is none."""
        return 0.0 if self.keyring is None else self.keyring.stale_seconds

    def retired_shown(self) -> list[Shown]:
        """Tokens that left the file, and that callers have shown lately."""
        return [] if self.keyring is None else self.keyring.retired_shown()

    def attention(self, sees: Callable[[str], bool], *, sees_all: bool) -> list[str]:
        """Sentences about what is broken; empty where nothing is. ``sees``: whether a tenant's matters are shown;
        ``sees_all``: those about storage and other nodes are, whose causes may name any tenant's."""
        out = [f"device {uuid} is broken: {fault}" for uuid, fault in self.health.faults().items()]
        out += [
            f"copies from {source} to {target} are refused, hits there come by the host: {reason}; "
            "check the link between the two GPUs (ACS, IOMMU, bridge)"
            for (source, target), reason in self.health.refused_peers().items()
        ]
        out += [
            f"device {uuid} refuses {chunks} chunks of the host pool, which its models do without: {why}; "
            "check the limits of locked memory and address space"
            for uuid, (chunks, why) in self.health.lacking_hosts().items()
        ]
        if self.host_pool.failure is not None:
            out.append(f"the host pool stays at {self.host_pool_ready_bytes} bytes: {self.host_pool.failure}")
        if stale := self.tokens_stale_seconds:
            out.append(
                f"the tokens' file has not been readable for {stale:.0f} s: nothing that was taken out is revoked"
            )
        if sees_all:
            out += self.other_attention()
        return out + [_describe_retired(each) for each in self.retired_shown() if sees(each.tenant)]


def _describe_retired(shown: Shown) -> str:
    whose = f"the token {shown.name!r}" + (f" of tenant {shown.tenant}" if shown.tenant else "")
    todo = "write the new one to the token file of those engines"
    if shown.left_seconds:
        end = f"in {shown.left_seconds:.0f} s these lose their leases"
        return f"{whose} was replaced, and callers still show it: {end}; {todo}"
    return f"{whose} is not accepted any more, and callers that still show it lose their leases; {todo}"
