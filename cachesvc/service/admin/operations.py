"""Operators' changes of the ledger: drain, evict, pin."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from kvcache.v1 import admin_pb2, inspect_pb2

from cachesvc.flows.models import admin, pinning
from cachesvc.ledger.ledger import Model
from cachesvc.model.errors import InvalidRequest, NotFound
from cachesvc.questions.query import one_key
from cachesvc.questions.status import pin_line
from cachesvc.questions.view import View
from cachesvc.service.admin.status_messages import pin_to_proto
from cachesvc.service.calls.idempotency import AnswerBudget, Mark, Repeats, mark_of
from cachesvc.service.host.device_health import DeviceHealth
from cachesvc.service.loop.node import Node
from cachesvc.service.loop.time_slices import TimeSlices
from cachesvc.telemetry import events

EVICTED_AT_ONCE = 32
"""Blocks that leave before calls get their turn: some 0.5 ms."""

DRAIN_LOOK_SECONDS = 0.05

MAX_VERSION_BYTES = 128


class Administration:
    """Runs the flows of operators. ``drain_seconds``: how long an ending daemon waits for its engines."""

    def __init__(self, node: Node, health: DeviceHealth, drain_seconds: float) -> None:
        self._node = node
        self._health = health
        self.drain_seconds = drain_seconds
        self._repeats = Repeats(AnswerBudget())

    async def drain(self) -> int:
        """Open nothing new and say so in health checks; returns how many leases are live. Idempotent."""
        live = self._node.run(partial(admin.drain, self._node.core))
        await self._health.tell()
        events.event("draining", live_leases=live)
        return live

    async def wait_for_engines(self, flush: Callable[[float], Awaitable[None]]) -> None:
        """Wait until no lease is live, at most ``drain_seconds``, and meanwhile ``flush`` for as long at most."""
        await asyncio.gather(self._wait_for_engines(), flush(self.drain_seconds))

    async def _wait_for_engines(self) -> None:
        view = self._node.view()
        for _ in range(round(self.drain_seconds / DRAIN_LOOK_SECONDS)):
            if not view.live_leases:
                return
            await asyncio.sleep(DRAIN_LOOK_SECONDS)

    async def set_weights_version(
        self, view: View, request: admin_pb2.SetWeightsVersionRequest
    ) -> admin_pb2.SetWeightsVersionResponse:
        """Announce the version of weights that a model's engines load next. Raises NotFound, InvalidRequest."""
        version = request.version
        if not 0 < len(version.encode()) <= MAX_VERSION_BYTES or not version.isprintable():
            raise InvalidRequest(
                f"a version of weights is 1 to {MAX_VERSION_BYTES} bytes of printable text, such as step-17; got "
                f"{version[:MAX_VERSION_BYTES]!r}"
            )
        model = view.model(request.model_id)
        previous, model.weights_version = model.weights_version, version
        if previous != version:
            events.event("weights_announced", model=model.id, version=version, previous=previous)
        return admin_pb2.SetWeightsVersionResponse(previous=previous)

    async def pin(self, view: View, request: inspect_pb2.PinRequest, slices: TimeSlices) -> inspect_pb2.PinResponse:
        """Keep a prefix for a time. Idempotent. Raises as ``pinning.pin``, and what ``one_key`` raises."""
        pinning.require_time(request.seconds)
        model = _named(view, request.model_id)
        key = await slices.answer(one_key(model, request.key_hex))
        made = self._node.run(partial(pinning.pin, self._node.core, model, key, request.seconds, view.now()))
        line = pin_line(model, made, view.now())
        events.event("pinned", model=model.id, key=line.key_hex[:16], blocks=made.blocks, seconds=request.seconds)
        return inspect_pb2.PinResponse(pin=pin_to_proto(line))

    async def unpin(self, view: View, request: inspect_pb2.UnpinRequest) -> inspect_pb2.UnpinResponse:
        """End a pin before its time. Raises NotFound, InvalidRequest."""
        model = _named(view, request.model_id)
        ended = self._node.run(partial(pinning.unpin, model, request.key_hex))
        line = pin_line(model, ended, view.now())
        events.event("unpinned", model=model.id, key=line.key_hex[:16], blocks=ended.blocks)
        return inspect_pb2.UnpinResponse(pin=pin_to_proto(line))

    async def evict(self, view: View, request: admin_pb2.EvictRequest) -> admin_pb2.EvictResponse:
        """Drop blocks, some at a time. A request_id that came before gets its answer again.

        Raises NotFound, InvalidRequest, KeyReused.
        """
        admin.require_tier(request.tier)
        model = view.model_or_only(request.model_id)
        if model is None:
            return admin_pb2.EvictResponse()
        request_id, mark = request.request_id, mark_of("Evict", request, request.SerializeToString())
        evicting = self._repeats.find(request_id, mark) if request_id else None
        if evicting is None:
            evicting = asyncio.get_running_loop().create_task(self._evict(view, model, request))
            if request_id:
                self._repeats.begin(request_id, mark, evicting)
                evicting.add_done_callback(partial(self._keep, request_id, mark))
        if isinstance(evicting, admin_pb2.EvictResponse):
            return evicting
        answer: admin_pb2.EvictResponse = await asyncio.shield(evicting)
        return answer

    def _keep(self, request_id: int, mark: Mark, evicting: asyncio.Task[admin_pb2.EvictResponse]) -> None:
        self._repeats.end(request_id)
        if not evicting.cancelled() and evicting.exception() is None:
            self._repeats.keep(request_id, mark, evicting.result())

    async def _evict(self, view: View, model: Model, request: admin_pb2.EvictRequest) -> admin_pb2.EvictResponse:
        wanted = request.blocks or len(model.blocks.index)
        evicted = 0
        while evicted < wanted and view.has(model):
            at_once = min(EVICTED_AT_ONCE, wanted - evicted)
            gone = self._node.run(partial(admin.evict, self._node.core, model.id, request.tier, at_once))
            evicted += gone
            if not gone:
                break
            await asyncio.sleep(0)
        events.event("evicted_by_operator", model=model.id, tier=request.tier, blocks=evicted)
        return admin_pb2.EvictResponse(evicted=evicted)


def _named(view: View, model_id: int) -> Model:
    """A model by number; 0: the only one. Raises NotFound, InvalidRequest."""
    model = view.model_or_only(model_id)
    if model is None:
        raise NotFound("model", model_id, "no model is registered yet")
    return model
