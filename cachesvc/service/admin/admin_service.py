"""AdminService on the wire: what operators see through grpcurl and the command line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message
from kvcache.v1 import admin_pb2, admin_pb2_grpc, inspect_pb2, storage_pb2

from cachesvc.model.errors import CacheError, InvalidRequest
from cachesvc.questions.explanation import explain
from cachesvc.questions.listing import models, sequences, tickets
from cachesvc.questions.query import blocks, tree
from cachesvc.questions.status import Status, lease_lines, status
from cachesvc.questions.steps import Question
from cachesvc.questions.view import View
from cachesvc.service.access.auth import caller
from cachesvc.service.access.quota import Quotas
from cachesvc.service.access.undecodable import require_read
from cachesvc.service.admin import index_messages, status_messages
from cachesvc.service.admin.inspection import Inspection
from cachesvc.service.admin.operations import Administration
from cachesvc.service.admin.storage_answers import StorageAnswers
from cachesvc.service.host.facts import Facts
from cachesvc.service.host.reload import Change
from cachesvc.service.rpc.edge import Context, Edge, refuse

Answer = TypeVar("Answer")
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
        question = partial(status, silence_limit_seconds=self._facts.lease_seconds)
        shown = await self._ask_in_slices(context, request, question, self._status_to_proto)
        if request.brief:
            shown.ClearField("config")
            shown.ClearField("counters")
        return shown

    async def ListModels(self, request: admin_pb2.ListModelsRequest, context: Context) -> Packed:
        return await self._ask_in_parts(context, request, models, status_messages.models_to_proto)

    async def ListLeases(self, request: admin_pb2.ListLeasesRequest, context: Context) -> Packed:
        return await self._ask_in_parts(context, request, lease_lines, status_messages.leases_to_proto)

    async def ListTenants(
        self, request: inspect_pb2.ListTenantsRequest, context: Context
    ) -> inspect_pb2.ListTenantsResponse:
        return await self._ask(context, request, self._quotas.lines, status_messages.tenants_to_proto)

    async def ListSequences(self, request: admin_pb2.ListSequencesRequest, context: Context) -> Packed:
        question = partial(sequences, lease_id=request.lease_id, limit=request.limit)
        return await self._ask_in_parts(context, request, question, status_messages.sequences_to_proto)

    async def ListTickets(self, request: admin_pb2.ListTicketsRequest, context: Context) -> Packed:
        question = partial(tickets, limit=request.limit)
        return await self._ask_in_parts(context, request, question, status_messages.tickets_to_proto)

    async def ListBlocks(self, request: admin_pb2.ListBlocksRequest, context: Context) -> Packed:
        question = partial(
            blocks,
            model_id=request.model_id,
            keys=request.keys,
            digits=request.key_hex,
            by_hits=request.order == admin_pb2.BLOCK_ORDER_HITS,
            limit=request.limit,
        )
        return await self._ask_in_parts(context, request, question, index_messages.blocks_to_proto)

    async def GetTree(self, request: admin_pb2.GetTreeRequest, context: Context) -> Packed:
        question = partial(
            tree,
            model_id=request.model_id,
            key=request.key,
            digits=request.key_hex,
            depth=request.depth,
            limit=request.limit,
        )
        return await self._ask_in_parts(context, request, question, index_messages.tree_to_proto)

    async def Explain(self, request: inspect_pb2.ExplainRequest, context: Context) -> Packed:
        question = partial(explain, model_id=request.model_id, prefix=request.key_prefix, events=request.events)
        return await self._ask_in_parts(context, request, question, index_messages.explanation_to_proto)

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
        return await self._serve(context, request, self._drain)

    async def SetWeightsVersion(
        self, request: admin_pb2.SetWeightsVersionRequest, context: Context
    ) -> admin_pb2.SetWeightsVersionResponse:
        announce = self._administration.set_weights_version
        return await self._serve(context, request, lambda: announce(self._inspection.view(), request))

    async def Evict(self, request: admin_pb2.EvictRequest, context: Context) -> admin_pb2.EvictResponse:
        return await self._serve(context, request, partial(self._evict, request))

    async def Pin(self, request: inspect_pb2.PinRequest, context: Context) -> inspect_pb2.PinResponse:
        return await self._serve(context, request, partial(self._pin, request))

    async def Unpin(self, request: inspect_pb2.UnpinRequest, context: Context) -> inspect_pb2.UnpinResponse:
        unpin = self._administration.unpin
        return await self._serve(context, request, lambda: unpin(self._inspection.view(), request))

    async def Reload(self, request: inspect_pb2.ReloadRequest, context: Context) -> inspect_pb2.ReloadResponse:
        return await self._serve(context, request, self._reload)

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

    async def _ask(
        self, context: Context, request: Any, question: Callable[[View], Answer], convert: Callable[[Answer], Reply]
    ) -> Reply:
        """Answer a question in one go."""

        async def call() -> Reply:
            return convert(question(self._inspection.view()))

        return await self._serve(context, request, call)

    async def _ask_in_slices(
        self,
        context: Context,
        request: Any,
        question: Callable[[View], Question[Answer]],
        convert: Callable[[Answer], Reply],
    ) -> Reply:
        """Answer a question in slices, so that calls go on meanwhile."""

        async def call() -> Reply:
            return convert(await self._inspection.slices().answer(question(self._inspection.view())))

        return await self._serve(context, request, call)

    async def _ask_in_parts(
        self,
        context: Context,
        request: Any,
        question: Callable[[View], Question[Answer]],
        convert: Callable[[Answer], Iterable[Message]],
    ) -> Packed:
        """Answer a question in slices to the last byte: the parts of the message are made and serialised in slices too,
        and are the message, one after another."""

        async def call() -> Packed:
            slices = self._inspection.slices()
            answer = await slices.answer(question(self._inspection.view()))
            return await slices.answer(_serialised(convert(answer)))

        return await self._serve(context, request, call)

    def _status_to_proto(self, found: Status) -> admin_pb2.GetStatusResponse:
        return status_messages.status_to_proto(found, self._facts, caller())

    async def _dump(self, request: inspect_pb2.DumpIndexRequest) -> AsyncGenerator[inspect_pb2.DumpIndexResponse]:
        count = request.blocks_per_message or DUMP_BLOCKS
        if count > DUMP_BLOCKS_MAX:
            raise InvalidRequest(f"blocks_per_message is {count}; at most {DUMP_BLOCKS_MAX}")
        async with self._inspection.dump(request.model_id) as taken:
            yield index_messages.head_to_proto(taken, self._facts.version, self._facts.eviction)
            if request.recent_requests:
                for part in index_messages.requests_to_proto(taken.requests, count):
                    yield part
                return
            for first in range(0, taken.columns.blocks, count):
                yield await asyncio.to_thread(index_messages.rows_to_proto, taken.columns, first, count)

    async def _drain(self) -> admin_pb2.DrainResponse:
        return admin_pb2.DrainResponse(live_leases=await self._administration.drain())

    async def _evict(self, request: admin_pb2.EvictRequest) -> admin_pb2.EvictResponse:
        return await self._administration.evict(self._inspection.view(), request)

    async def _pin(self, request: inspect_pb2.PinRequest) -> inspect_pb2.PinResponse:
        return await self._administration.pin(self._inspection.view(), request, self._inspection.slices())

    async def _reload(self) -> inspect_pb2.ReloadResponse:
        changes = [inspect_pb2.SettingChange(**change._asdict()) for change in self._reload_settings()]
        return inspect_pb2.ReloadResponse(changes=changes)


def _serialised(parts: Iterable[Message]) -> Question[bytes]:
    out: list[bytes] = []
    for part in parts:
        out.append(part.SerializeToString())
        yield None
    return b"".join(out)
