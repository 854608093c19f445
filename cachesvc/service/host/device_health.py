"""Answers of health checks when a device broke.

After a fault a driver refuses every call of this process for good, so only a new process heals it. But as long as other
devices serve, or engines still hold leases (hits in place go on), ending this one would cost more than it brings:

* ready: no device is broken, and the daemon does not drain. Else no new engine should be sent here.
* live: there is something to keep alive. Not so once every device is broken, or one is and no lease is left; but where
  devices have movers in processes of their own, which are started again, the daemon has no part in it.

A supervisor that restarts what is not live brings the device back then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvcache.v1 import admin_pb2, status_pb2

from cachesvc.memory.host_pool import HostPool
from cachesvc.memory.interface import DeviceMemory
from cachesvc.model.errors import Unavailable
from cachesvc.service.access.auth import UNPROVEN, Caller
from cachesvc.service.access.tokens import Keyring, Shown
from cachesvc.service.host.health import Serving
from cachesvc.service.loop.line import LoopWatch
from cachesvc.service.loop.node import Node
from cachesvc.telemetry import events

PROBE_SECONDS = 2.0
"""Between two questions to the drivers; a copy that fails tells at once, but is noticed here only at the next look."""


class DeviceHealth:
    """Looks after the devices on the event loop. ``tell(serving)`` is called whenever the answer changes."""

    def __init__(
        self,
        backend: DeviceMemory,
        node: Node,
        tell: Callable[[Serving], Awaitable[None]],
        *,
        probe_seconds: float = PROBE_SECONDS,
        heals: bool = False,
    ) -> None:
        self._heals = heals
        self.backend = backend
        self._view = node.view()
        self._tell = tell
        self._probe_seconds = probe_seconds
        self._told = Serving(ready=True, live=True)
        self._known: dict[str, str] = {}
        self._known_peers: dict[tuple[str, str], str] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def faults(self) -> dict[str, str]:
        """Broken devices, and the cause of each."""
        told = {device: self.backend.fault(device) for device in self.backend.devices()}
        return {device: reason for device, reason in told.items() if reason}

    def serving(self) -> Serving:
        faults = self.faults()
        if not faults:
            return Serving(ready=not self._view.is_draining, live=True)
        others = len(faults) < len(self.backend.devices())
        return Serving(ready=False, live=self._heals or (others and self._view.live_leases > 0))

    async def look(self) -> None:
        """Ask the devices, log what is new, and tell what has changed."""
        await asyncio.to_thread(self.backend.probe)
        faults = self.faults()
        for device in [device for device in self._known if device not in faults]:
            del self._known[device]
            events.event("device_back", device=device)
        for device, reason in faults.items():
            if device not in self._known:
                self._known[device] = reason
                events.warning(
                    "device_lost",
                    device=device,
                    reason=reason,
                    devices_left=len(self.backend.devices()) - len(self._known),
                    action="its mover is started again by itself"
                    if self._heals
                    else "restart the daemon when the engines of its other devices can do without it",
                )
        self._look_at_peers()
        await self.tell()

    def _look_at_peers(self) -> None:
        refused = self.backend.refused_peers()
        for (source, target), reason in refused.items() - self._known_peers.items():
            events.warning("device_pair_refused", source=source, target=target, reason=reason)
        self._known_peers = refused

    async def tell(self) -> None:
        """Tell health checks what is so now, where that has changed."""
        serving = self.serving()
        if serving != self._told:
            await self._tell(serving)
            self._told = serving
            events.event("serving", ready=serving.ready, live=serving.live)

    async def _watch(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:  # noqa: BLE001 - the root of a task: without it a lost device would not be noticed
                events.failure("device_look_broke")
            await asyncio.sleep(self._probe_seconds)


def require_working(backend: DeviceMemory, devices: tuple[str, ...]) -> None:
    """Raises Unavailable where one of the devices, which may be unknown, is broken."""
    known = backend.devices()
    for device in devices:
        reason = backend.fault(device) if device in known else ""
        if reason:
            working = [other for other in known if not backend.fault(other)]
            raise Unavailable(
                f"device {device} is broken for now ({reason}), or until the daemon is restarted; "
                "go on without the cache" + (f", or register on {', '.join(working)}" if working else "")
            )


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
    devices: list[status_pb2.DeviceStatus]
    host_pool: HostPool
    health: DeviceHealth
    transports: Callable[[], status_pb2.TransportStatus]
    loop: LoopWatch
    keyring: Keyring | None = None
    other_attention: Callable[[], list[str]] = list

    @property
    def uptime_seconds(self) -> float:
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

    def complete(self, found: admin_pb2.GetStatusResponse, who: Caller) -> admin_pb2.GetStatusResponse:
        """The ledger's status with what the daemon around it adds, as ``who`` may see it."""
        serving, faults = self.health.serving(), self.health.faults()
        found.MergeFrom(
            admin_pb2.GetStatusResponse(
                version=self.version,
                epoch=self.epoch,
                uptime_seconds=self.uptime_seconds,
                backend=self.backend,
                config=self.settings if who.sees_all else {},
                devices=self.devices,
                host_pool_bytes=self.host_pool_bytes,
                host_pool_ready_bytes=self.host_pool_ready_bytes,
                ready=serving.ready,
                live=serving.live,
                caller=who.name,
                scopes=sorted(scope.value for scope in who.scopes),
                tenant=who.tenant or "",
                tokens=who not in UNPROVEN,
                attention=self.attention(who.sees, sees_all=who.sees_all),
                transports=self.transports(),
                loop=self.loop.status(),
            )
        )
        for device in found.devices:
            device.healthy, device.fault = device.uuid not in faults, faults.get(device.uuid, "")
        return found

    def attention(self, sees: Callable[[str], bool], *, sees_all: bool) -> list[str]:
        """Sentences about what is broken; empty where nothing is. ``sees``: whether a tenant's matters are shown;
        ``sees_all``: those about storage and other nodes are, whose causes may name any tenant's."""
        out = [f"device {uuid} is broken: {fault}" for uuid, fault in self.health.faults().items()]
        out += [
            f"copies from {source} to {target} are refused, hits there come by the host: {reason}; "
            "check the link between the two GPUs (ACS, IOMMU, bridge)"
            for (source, target), reason in self.health.backend.refused_peers().items()
        ]
        out += [
            f"device {uuid} refuses {chunks} chunks of the host pool, which its models do without: {why}; "
            "check the limits of locked memory and address space"
            for uuid, (chunks, why) in self.health.backend.lacking_hosts().items()
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
