"""AdminService on the wire: what operators see through grpcurl and the command line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message
from kvcache.v1 import admin_pb2, admin_pb2_grpc, inspect_pb2, storage_pb2

from cachesvc.flows import pinning
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.reuse_stats import ID_BYTES, RecentRequest
from cachesvc.model.errors import CacheError, InvalidRequest, LimitExceeded, NotFound
from cachesvc.questions.audit import verify
from cachesvc.questions.dump import Dump, dump
from cachesvc.questions.explanation import explain
from cachesvc.questions.query import blocks, models, one_key, sequences, tickets, tree
from cachesvc.questions.status import leases, pin_line, status
from cachesvc.questions.view import Question, View
from cachesvc.service.access.auth import caller, require_read, sight
from cachesvc.service.access.quota import Quotas
from cachesvc.service.admin.checksums import Checksums
from cachesvc.service.admin.storage_answers import StorageAnswers
from cachesvc.service.calls.dispatcher import AnswerBudget, Mark, Repeats, mark_of
from cachesvc.service.host.device_health import DeviceHealth, Facts
from cachesvc.service.host.reload import Change
from cachesvc.service.loop.line import TimeSlices
from cachesvc.service.loop.node import Node
from cachesvc.service.rpc.edge import Context, Edge, refuse
from cachesvc.telemetry import events

Reply = TypeVar("Reply", bound=Message)
Packed = Any
"""Bytes of an answer: the service's serialiser sends them as they are."""

DUMP_BLOCKS = 8192
DUMP_BLOCKS_MAX = 65536


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Each call is a question to the ledger and its answer as a message, or a deed of ``Administration``."""

    def __init__(
        self,
        edge: Edge,
        inspection: Inspection,
        administration: Administration,
        facts: Facts,
        quotas: Quotas,
        reload: Callable[[], list[Change]],
        storage: StorageAnswers,
    ) -> None:
        self._edge = edge
        self._inspection = inspection
        self._administration = administration
        self._facts = facts
        self._quotas = quotas
        self._reload_settings = reload
        self._storage = storage

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Context) -> admin_pb2.GetStatusResponse:
        async def call() -> admin_pb2.GetStatusResponse:
            question = status(self._inspection.view(), self._facts.lease_seconds)
            return self._facts.complete(await self._inspection.slices().answer(question), caller())

        shown = await self._serve(context, request, call)
        if request.brief:
            shown.ClearField("config")
            shown.ClearField("counters")
        return shown

    async def ListModels(self, request: admin_pb2.ListModelsRequest, context: Context) -> Packed:
        return await self._ask(context, request, models)

    async def ListLeases(self, request: admin_pb2.ListLeasesRequest, context: Context) -> Packed:
        return await self._ask(context, request, leases)

    async def ListTenants(
        self, request: inspect_pb2.ListTenantsRequest, context: Context
    ) -> inspect_pb2.ListTenantsResponse:
        async def call() -> inspect_pb2.ListTenantsResponse:
            return inspect_pb2.ListTenantsResponse(tenants=self._quotas.tenants(self._inspection.view()))

        return await self._serve(context, request, call)

    async def ListSequences(self, request: admin_pb2.ListSequencesRequest, context: Context) -> Packed:
        return await self._ask(context, request, sequences, lease_id=request.lease_id, limit=request.limit)

    async def ListTickets(self, request: admin_pb2.ListTicketsRequest, context: Context) -> Packed:
        return await self._ask(context, request, tickets, limit=request.limit)

    async def ListBlocks(self, request: admin_pb2.ListBlocksRequest, context: Context) -> Packed:
        return await self._ask(
            context,
            request,
            blocks,
            model_id=request.model_id,
            keys=request.keys,
            digits=request.key_hex,
            by_hits=request.order == admin_pb2.BLOCK_ORDER_HITS,
            limit=request.limit,
        )

    async def GetTree(self, request: admin_pb2.GetTreeRequest, context: Context) -> Packed:
        fields = {"model_id": request.model_id, "key": request.key, "digits": request.key_hex}
        return await self._ask(context, request, tree, **fields, depth=request.depth, limit=request.limit)

    async def Explain(self, request: inspect_pb2.ExplainRequest, context: Context) -> Packed:
        fields = {"model_id": request.model_id, "prefix": request.key_prefix, "events": request.events}
        return await self._ask(context, request, explain, **fields)

    async def Verify(self, request: admin_pb2.VerifyRequest, context: Context) -> admin_pb2.VerifyResponse:
        return await self._serve(context, request, partial(self._inspection.verify, request))

    async def DumpIndex(
        self, request: inspect_pb2.DumpIndexRequest, context: Context
    ) -> AsyncIterator[inspect_pb2.DumpIndexResponse]:
        try:
            require_read()
            async with aclosing(self._dump(request)) as parts:  # also where the caller goes half way
                async for part in parts:
                    caller().require_current("DumpIndex")
                    yield part
        except CacheError as error:
            await refuse(context, error)

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        async def call() -> admin_pb2.DrainResponse:
            return admin_pb2.DrainResponse(live_leases=await self._administration.drain())

        return await self._serve(context, request, call)

    async def SetWeightsVersion(
        self, request: admin_pb2.SetWeightsVersionRequest, context: Context
    ) -> admin_pb2.SetWeightsVersionResponse:
        return await self._do(context, request, self._administration.set_weights_version)

    async def Evict(self, request: admin_pb2.EvictRequest, context: Context) -> admin_pb2.EvictResponse:
        return await self._do(context, request, self._administration.evict)

    async def Pin(self, request: inspect_pb2.PinRequest, context: Context) -> inspect_pb2.PinResponse:
        return await self._do(context, request, self._administration.pin)

    async def Unpin(self, request: inspect_pb2.UnpinRequest, context: Context) -> inspect_pb2.UnpinResponse:
        return await self._do(context, request, self._administration.unpin)

    async def Reload(self, request: inspect_pb2.ReloadRequest, context: Context) -> inspect_pb2.ReloadResponse:
        async def call() -> inspect_pb2.ReloadResponse:
            changes = [inspect_pb2.SettingChange(**change._asdict()) for change in self._reload_settings()]
            return inspect_pb2.ReloadResponse(changes=changes)

        return await self._serve(context, request, call)

    async def GetStorage(
        self, request: storage_pb2.GetStorageRequest, context: Context
    ) -> storage_pb2.GetStorageResponse:
        return await self._serve(context, request, lambda: self._storage.status(self._inspection.view()))

    async def CheckStorage(
        self, request: storage_pb2.CheckStorageRequest, context: Context
    ) -> storage_pb2.CheckStorageResponse:
        return await self._serve(context, request, self._storage.check)

    async def PurgeStorage(
        self, request: storage_pb2.PurgeStorageRequest, context: Context
    ) -> storage_pb2.PurgeStorageResponse:
        return await self._serve(context, request, partial(self._storage.purge, request.model))

    # -- how a call is served ----------------------------------------------------------------------------------

    async def _serve(self, context: Context, request: Any, call: Callable[[], Awaitable[Reply]]) -> Reply:
        name = type(request).DESCRIPTOR.name.removesuffix("Request")
        return await self._edge.ask(context, f"AdminService/{name}", request, call)

    async def _do(self, context: Context, request: Any, deed: Callable[[View, Any], Awaitable[Reply]]) -> Reply:
        return await self._serve(context, request, lambda: deed(self._inspection.view(), request))

    async def _ask(
        self, context: Context, request: Any, question: Callable[..., Question[Sequence[Message]]], **fields: Any
    ) -> Packed:
        """Answer a question in slices to the last byte: the parts of the message are made and serialised in slices too,
        and are the message, one after another."""

        async def call() -> Packed:
            slices = self._inspection.slices()
            parts = await slices.answer(question(self._inspection.view(), **fields))
            return await slices.answer(_serialised(parts))

        return await self._serve(context, request, call)

    async def _dump(self, request: inspect_pb2.DumpIndexRequest) -> AsyncGenerator[inspect_pb2.DumpIndexResponse]:
        count = request.blocks_per_message or DUMP_BLOCKS
        if count > DUMP_BLOCKS_MAX:
            raise InvalidRequest(f"blocks_per_message is {count}; at most {DUMP_BLOCKS_MAX}")
        async with self._inspection.dump(request.model_id) as taken:
            taken.head.version, taken.head.eviction = self._facts.version, self._facts.eviction
            yield inspect_pb2.DumpIndexResponse(head=taken.head)
            if request.recent_requests:
                for part in requests_in_parts(taken.requests, count):
                    yield inspect_pb2.DumpIndexResponse(requests=part)
                return
            for first in range(0, taken.columns.blocks, count):
                rows = await asyncio.to_thread(taken.columns.rows, first, count)
                yield inspect_pb2.DumpIndexResponse(rows=rows)


def requests_in_parts(requests: Sequence[RecentRequest], most_blocks: int) -> Iterator[inspect_pb2.RecentRequests]:
    """Requests of a dump, in parts of at most ``most_blocks`` blocks, but of one request at least."""
    part = inspect_pb2.RecentRequests()
    for request in requests:
        if part.blocks and len(part.block_ids) // ID_BYTES + request.blocks > most_blocks:
            yield part
            part = inspect_pb2.RecentRequests()
        part.seconds.append(request.seconds - requests[0].seconds)
        part.output_tokens.append(request.output_tokens)
        part.blocks.append(request.blocks)
        part.block_ids += request.block_ids
    if part.blocks:
        yield part


def _serialised(parts: Iterable[Message]) -> Question[bytes]:
    out: list[bytes] = []
    for part in parts:
        out.append(part.SerializeToString())
        yield None
    return b"".join(out)


DUMPS_MAX = 2
"""Most dumps at a time: each holds a copy of the index's columns, some 60 bytes a block, until its caller has read all
of it."""


class Inspection:
    """Reads the ledger of a node; changes nothing of it."""

    def __init__(self, node: Node, checksums: Checksums) -> None:
        self._node = node
        self._checksums = checksums
        self._verifying = asyncio.Lock()
        self._dumps = 0

    def view(self) -> View:
        """The ledger as the caller of the running RPC may see it."""
        return self._node.view(sight())

    def slices(self) -> TimeSlices:
        """Share of the loop for one long call."""
        return TimeSlices(self._node.loop_watch)

    async def verify(self, request: admin_pb2.VerifyRequest) -> admin_pb2.VerifyResponse:
        """Recount; then, if asked for, compare checksums; what was out of service and is sound is served again.

        One call at a time. Raises NotFound for an unknown model.
        """
        async with self._verifying:
            slices, began, view = self.slices(), time.monotonic(), self.view()
            defects = {model.id: model.defects for model in view.models()}
            found = await slices.answer(verify(view, request.model_id))
            response = admin_pb2.VerifyResponse(
                problems=found.problems, pages_checked=found.pages, blocks_checked=found.blocks, checks=found.checks
            )
            if request.checksums:
                response.checksums.CopyFrom(await self._checksums.compare(slices, frozenset(found.models)))
            sound = set(found.sound) - {each.model_id for each in response.checksums.mismatches}
            for model in view.models():
                if model.id in sound and model.defects == defects.get(model.id):  # else it broke again meanwhile
                    self._node.trust(model.id)
            response.ok = not found.problems and not response.checksums.mismatches
            response.longest_pause_ms = slices.longest_seconds * 1e3
            response.seconds = time.monotonic() - began
            return response

    @asynccontextmanager
    async def dump(self, model_id: int) -> AsyncIterator[Dump]:
        """The columns of a model's index, counted while the caller reads them.

        Raises NotFound, InvalidRequest, LimitExceeded.
        """
        if self._dumps >= DUMPS_MAX:
            raise LimitExceeded("dumps at a time", self._dumps + 1, DUMPS_MAX)
        self._dumps += 1
        slices = self.slices()
        try:
            taken = await slices.answer(dump(self.view(), model_id))
            try:
                yield taken
            finally:
                await slices.answer(taken.columns.forget())
        finally:
            self._dumps -= 1


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
        live = self._node.run(partial(pinning.drain, self._node.core))
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

    async def pin(self, view: View, request: inspect_pb2.PinRequest) -> inspect_pb2.PinResponse:
        """Keep a prefix for a time. Idempotent. Raises as ``pinning.pin``, and what ``one_key`` raises."""
        pinning.require_time(request.seconds)
        model = _named(view, request.model_id)
        key = await TimeSlices(self._node.loop_watch).answer(one_key(model, request.key_hex))
        made = self._node.run(partial(pinning.pin, self._node.core, model, key, request.seconds, view.now()))
        line = pin_line(model, made, view.now())
        events.event("pinned", model=model.id, key=line.key_hex[:16], blocks=made.blocks, seconds=request.seconds)
        return inspect_pb2.PinResponse(pin=line)

    async def unpin(self, view: View, request: inspect_pb2.UnpinRequest) -> inspect_pb2.UnpinResponse:
        """End a pin before its time. Raises NotFound, InvalidRequest."""
        model = _named(view, request.model_id)
        ended = self._node.run(partial(pinning.unpin, model, request.key_hex))
        line = pin_line(model, ended, view.now())
        events.event("unpinned", model=model.id, key=line.key_hex[:16], blocks=ended.blocks)
        return inspect_pb2.UnpinResponse(pin=line)

    async def evict(self, view: View, request: admin_pb2.EvictRequest) -> admin_pb2.EvictResponse:
        """Drop blocks, some at a time. A request_id that came before gets its answer again.

        Raises NotFound, InvalidRequest, KeyReused.
        """
        pinning.require_tier(request.tier)
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
            gone = self._node.run(partial(pinning.evict, self._node.core, model.id, request.tier, at_once))
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
