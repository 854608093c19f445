"""Operators' questions that need more than the ledger, or have a limit on concurrent calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvcache.v1 import admin_pb2

from cachesvc.model.errors import LimitExceeded
from cachesvc.questions.audit.verify import verify
from cachesvc.questions.dump import Dump, dump
from cachesvc.questions.view import View
from cachesvc.service.access.owners import sight
from cachesvc.service.admin.checksums import Checksums
from cachesvc.service.loop.node import Node
from cachesvc.service.loop.time_slices import TimeSlices

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
