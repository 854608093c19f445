"""Registers models one at a time, round robin by process: begun and entered on the event loop, planned and made on a
thread.

So no call waits for a driver, two engines that register the same model at once get one pool, and two that
register different ones never get more than there is. A caller that disappears before its turn leaves nothing; after
that its model is made all the same, and the next Register finds it.
"""

from __future__ import annotations

import asyncio
from collections import deque

from cachesvc.flows.models.registration import Registered, RegisterRequest, Registration, begin, find
from cachesvc.model.errors import CacheError, Unavailable
from cachesvc.service.access.admission import CallerKey
from cachesvc.service.loop.line import BACKGROUND
from cachesvc.service.loop.node import Node
from cachesvc.telemetry import events


class Registrar:
    """The node's registrations."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._is_busy = False
        self._waiting: dict[CallerKey, deque[asyncio.Future[None]]] = {}  # in the order of their next turns
        self._task: asyncio.Task[Registered] | None = None
        self._is_closed = False

    def find(self, request: RegisterRequest) -> Registered | None:
        """A model's pools, if they are there. Raises as ``flows.models.find``."""
        return self._node.run(find, self._node.core, self._node.vault, request)

    async def register(self, request: RegisterRequest, caller: CallerKey) -> Registered:
        """Have a model's pools made, in the caller's turn, or find that they were made meanwhile. Raises as
        ``models.register``."""
        node = self._node
        await self._take_turn(caller)
        try:
            if self._is_closed:
                raise Unavailable("the daemon stops; go on without the cache")
            begun = node.run(begin, node.core, node.vault, request)
            if isinstance(begun, Registered):
                self._pass_on()
                return begun
        except BaseException:
            self._pass_on()
            raise
        self._task = asyncio.get_running_loop().create_task(self._finish(begun))
        self._task.add_done_callback(lambda _: self._pass_on())
        return await asyncio.shield(self._task)

    async def close(self) -> None:
        """Begin nothing more, and let what has begun end: its memory is given back by those who close after this.

        Idempotent.
        """
        self._is_closed = True
        await self._take_turn(BACKGROUND)
        self._pass_on()

    async def _take_turn(self, caller: CallerKey) -> None:
        """Wait for the caller's turn; ``_pass_on`` ends it."""
        if not self._is_busy:
            self._is_busy = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._drop(caller, turn)
            else:  # it came too late
                self._pass_on()
            raise

    def _drop(self, caller: CallerKey, turn: asyncio.Future[None]) -> None:
        """A call is given up: its caller's next one has its turn instead."""
        waiting = self._waiting.get(caller, deque())
        if turn in waiting:  # it was not passed over yet
            waiting.remove(turn)
            if not waiting:
                del self._waiting[caller]

    def _pass_on(self) -> None:
        """Give the next turn: each caller has one before any has two. Callers that have gone are passed over."""
        while self._waiting:
            caller = next(iter(self._waiting))
            waiting = self._waiting.pop(caller)
            turn = waiting.popleft()
            if waiting:
                self._waiting[caller] = waiting
            if not turn.done():
                turn.set_result(None)
                return
        self._is_busy = False

    async def _finish(self, begun: Registration) -> Registered:
        node = self._node
        try:
            await asyncio.to_thread(begun.plan, node.vault)
            while not node.run(begun.evict, node.core, node.vault):  # an engine came back to an idle model
                await asyncio.to_thread(begun.plan, node.vault)
            await asyncio.to_thread(begun.make, node.vault)
            made = node.run(begun.enter, node.core, node.vault, node.now())
        except CacheError:
            raise
        except Exception:  # the caller may have gone: no other code would log it
            events.failure("registration_broke", model_name=begun.request.name)
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
        return made
