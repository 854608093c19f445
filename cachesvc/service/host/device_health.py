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
from collections.abc import Awaitable, Callable

from cachesvc.memory.interface import DeviceMemory
from cachesvc.model.errors import Unavailable
from cachesvc.service.host.health import Serving
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
        """``heals``: devices come back by themselves."""
        self._heals = heals
        self._backend = backend
        self._view = node.view()
        self._tell = tell
        self._probe_seconds = probe_seconds
        self._told = Serving(ready=True, live=True)
        self._known: dict[str, str] = {}
        self._known_peers: dict[tuple[str, str], str] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin on the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        """Stop the task."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def faults(self) -> dict[str, str]:
        """Broken devices, and the cause of each."""
        told = {device: self._backend.fault(device) for device in self._backend.devices()}
        return {device: reason for device, reason in told.items() if reason}

    def refused_peers(self) -> dict[tuple[str, str], str]:
        """Pairs (source, target) of devices whose copies go by the host, and why."""
        return self._backend.refused_peers()

    def lacking_hosts(self) -> dict[str, tuple[int, str]]:
        """Devices that refuse chunks of the host pool: how many, and why the last of them."""
        return self._backend.lacking_hosts()

    def serving(self) -> Serving:
        """Current answers."""
        faults = self.faults()
        if not faults:
            return Serving(ready=not self._view.is_draining, live=True)
        others = len(faults) < len(self._backend.devices())
        return Serving(ready=False, live=self._heals or (others and self._view.live_leases > 0))

    async def look(self) -> None:
        """Ask the devices, log what is new, and tell what has changed."""
        await asyncio.to_thread(self._backend.probe)
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
                    devices_left=len(self._backend.devices()) - len(self._known),
                    action="its mover is started again by itself"
                    if self._heals
                    else "restart the daemon when the engines of its other devices can do without it",
                )
        self._look_at_peers()
        await self.tell()

    def _look_at_peers(self) -> None:
        refused = self.refused_peers()
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
