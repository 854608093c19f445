"""Registers models: begun and entered on the event loop, planned and made on threads, each device in a line of its own.

So no call waits for a driver, two engines that register the same model at once get one pool, and two that
register different ones never get more than there is. Registrations of one device are made one at a time, round robin by
process; those of other devices go on beside them, whatever that device does. A caller that disappears before its turn
leaves nothing; after that its model is made all the same, and the next Register finds it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from cachesvc.flows.registration import (
    Registered,
    RegisterRequest,
    Work,
    claimed,
    devices_of,
    find,
    models_on_host,
    registering,
)
from cachesvc.ledger.ledger import Model
from cachesvc.model.errors import CacheError, Unavailable
from cachesvc.service.access.admission import CallerKey
from cachesvc.service.loop.line import BACKGROUND
from cachesvc.service.loop.node import Node
from cachesvc.telemetry import events


class _Waiting(NamedTuple):
    """Registration that waits until none of its devices has another one under way."""

    devices: frozenset[str]
    turn: asyncio.Future[None]


class Registrar:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._busy: set[str] = set()
        self._waiting: dict[CallerKey, deque[_Waiting]] = {}  # in the order of their next turns; none is empty
        self._planning = asyncio.Lock()  # what is free is read and taken by one registration at a time; no device waits
        self._tasks: set[asyncio.Task[Registered]] = set()
        self._is_closed = False

    def find(self, request: RegisterRequest) -> Registered | None:
        """A model's pools, if they are there. Raises as ``flows.registration.find``."""
        return self._node.run(find, self._node.core, self._node.vault, request)

    async def register(self, request: RegisterRequest, caller: CallerKey) -> Registered:
        """Have a model's pools made, in the caller's turn, or find that they were made meanwhile. Raises as
        ``flows.registration.registering``."""
        devices = frozenset(devices_of(self._node.vault, request))
        await self._take_turn(caller, devices)
        if self._is_closed:
            self._pass_on(devices)
            raise Unavailable("the daemon stops; go on without the cache")
        task = asyncio.get_running_loop().create_task(self._register(request, devices))
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._pass_on(devices))
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Begin nothing more, and let what has begun end: its memory is given back by those who close after this.

        Idempotent.
        """
        self._is_closed = True
        every = frozenset(self._node.vault.devices())
        await self._take_turn(BACKGROUND, every)
        self._pass_on(every)

    async def _take_turn(self, caller: CallerKey, devices: frozenset[str]) -> None:
        """Wait for the caller's turn on all of these devices; ``_pass_on`` ends it."""
        mine = _Waiting(devices, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(caller, deque()).append(mine)
        self._give_turns()
        try:
            await mine.turn
        except asyncio.CancelledError:
            if not mine.turn.cancelled():  # it came too late
                self._pass_on(devices)
            elif mine in (waiting := self._waiting.get(caller, deque())):  # its caller's next one has its turn instead
                self._remove(caller, waiting, mine)
                self._give_turns()
            raise

    def _pass_on(self, devices: frozenset[str]) -> None:
        self._busy -= devices
        self._give_turns()

    def _give_turns(self) -> None:
        """Give each device that is free its next turn: each caller has one before any has two. One that waits for
        several devices is passed by none that wants one of them."""
        wanted = set(self._busy)
        for caller in list(self._waiting):
            waiting = self._waiting[caller]
            for each in list(waiting):
                if wanted.isdisjoint(each.devices) and not each.turn.done():
                    self._remove(caller, waiting, each)
                    if caller in self._waiting:
                        self._waiting[caller] = self._waiting.pop(caller)
                    self._busy |= each.devices
                    each.turn.set_result(None)
                wanted |= each.devices

    def _remove(self, caller: CallerKey, waiting: deque[_Waiting], which: _Waiting) -> None:
        waiting.remove(which)
        if not waiting:
            del self._waiting[caller]

    async def _register(self, request: RegisterRequest, devices: frozenset[str]) -> Registered:
        node = self._node
        try:
            await asyncio.to_thread(node.vault.require_answers, devices)  # first: no model leaves for nothing
            made = await self._carry_through(request)
            if made.existed:
                return made
        except CacheError:
            raise
        except Exception:  # the caller may have gone: no other code would log it
            events.failure("registration_broke", model_name=request.name)
            raise
        if made.replica.gone:  # it is in the ledger like any other lost replica, and no Register finds it
            raise Unavailable(f"{made.replica.gone}; register again")
        events.event(
            "model_registered",
            model=made.model.id,
            model_name=made.model.name,
            display_name=made.model.display_name,
            devices=made.replica.devices,
            device_pages=made.replica.device_pages,
            host_pages=made.model.host_pages,
        )
        self._warn_of_host(made.model, request)
        return made

    def _warn_of_host(self, model: Model, request: RegisterRequest) -> None:
        """Warn where a model that wants a part of the host pool got a page of it, or none, because others have it."""
        others = self._node.run(models_on_host, self._node.core, model)
        wants = request.host_pool.share > 0 and not request.host_pool.pages
        if wants and others and max(model.host_pages, default=0) <= 1:
            events.event(
                "host_tier_missing",
                model=model.id,
                display_name=model.display_name,
                host_pages=model.host_pages,
                others=others,
            )

    async def _carry_through(self, request: RegisterRequest) -> Registered:
        """Drive a registration: its own code where the ledger is, its work on threads."""
        node = self._node
        flow = registering(node.core, node.vault, request, node.now)
        go_on: Callable[[], Work] = partial(next, flow)
        await self._planning.acquire()
        is_planning = True
        try:
            while True:
                work = node.run(go_on)
                if work is claimed:
                    self._planning.release()
                    is_planning = False
                try:
                    go_on = partial(flow.send, await asyncio.to_thread(work))
                except BaseException as broken:  # noqa: BLE001 - it raises it, or gives up first
                    go_on = partial(flow.throw, broken)
        except StopIteration as ended:
            made: Registered = ended.value
            return made
        finally:
            if is_planning:
                self._planning.release()
