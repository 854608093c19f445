"""Questions about the whole index, answered without keeping engines waiting: blocks, trees, dumps, verification."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from functools import partial

from kvcache.v1 import admin_pb2, inspect_pb2

from cachesvc import __version__
from cachesvc.model.errors import InvalidRequest, LimitExceeded
from cachesvc.questions import dump, verify
from cachesvc.questions import query as study
from cachesvc.questions.recount import Part
from cachesvc.service.access.owners import shown_namespace, visible_model, visible_models
from cachesvc.service.checksums import Checksums
from cachesvc.service.node import Node
from cachesvc.service.time_slices import Turns

MOST_PROBLEMS = 1024
MESSAGE_BLOCKS = 8192
MESSAGE_BLOCKS_MAX = 65536
DUMPS_MAX = 2
"""Each holds a copy of the index's columns, some 60 bytes a block, until its caller has read all of it."""


class Inspection:
    """Reads the ledger of a node; changes nothing."""

    def __init__(self, node: Node, checksums: Checksums, eviction: str) -> None:
        self._node = node
        self._checksums = checksums
        self._eviction = eviction
        self._verifying = asyncio.Lock()
        self._dumps = 0

    async def blocks(self, request: admin_pb2.ListBlocksRequest) -> admin_pb2.ListBlocksResponse:
        """Raises NotFound, InvalidRequest."""
        core, turns, model = self._node.core, Turns(), request.model_id
        visible_model(core, model)
        limit = min(request.limit or 64, study.MAX_LISTED)
        if request.keys or request.key_hex:
            keys = request.keys
            for digits in request.key_hex[: study.MAX_LISTED]:
                keys += await self._key(turns, model, digits)
            rows = study.rows_of(core, model, keys)
        else:
            by_hits = request.order == admin_pb2.BLOCK_ORDER_HITS
            ranking = turns.take(partial(study.Ranking, core, model, by_hits=by_hits))
            rows = await turns.aside(partial(ranking.first, limit + 1))
        lines = study.block_lines(core, model, rows[:limit])
        return admin_pb2.ListBlocksResponse(
            blocks=[block_to_proto(line) for line in lines], truncated=len(rows) > limit
        )

    async def tree(self, request: admin_pb2.GetTreeRequest) -> admin_pb2.GetTreeResponse:
        """Raises NotFound, InvalidRequest."""
        core, turns, model = self._node.core, Turns(), request.model_id
        visible_model(core, model)
        key = await self._key(turns, model, request.key_hex) if request.key_hex else request.key
        tree = turns.take(partial(study.Tree, core, model, key))
        limit = min(request.limit or 256, study.MAX_LISTED)
        rows, truncated = await turns.aside(partial(tree.nodes, request.depth or 8, limit))
        nodes = [
            admin_pb2.TreeNode(key_hex=line.key.hex(), **line._asdict()) for line in study.tree_lines(core, model, rows)
        ]
        return admin_pb2.GetTreeResponse(nodes=nodes, truncated=truncated)

    async def _key(self, turns: Turns, model: int, digits: str) -> bytes:
        found = await turns.walk(study.find_keys(self._node.core, model, digits))
        key = found[-1]
        assert key is not None
        return key

    async def verify(self, request: admin_pb2.VerifyRequest) -> admin_pb2.VerifyResponse:
        """Part by part; then, if asked for, checksums. One call at a time. Raises NotFound for an unknown model."""
        async with self._verifying:
            return await self._verify(request)

    def _models(self, model_id: int) -> list[int]:
        """The one, or all that the caller may look at. Raises NotFound."""
        core = self._node.core
        return [visible_model(core, model_id).id] if model_id else [model.id for model in visible_models(core)]

    async def _verify(self, request: admin_pb2.VerifyRequest) -> admin_pb2.VerifyResponse:
        core, turns, began = self._node.core, Turns(), time.monotonic()
        problems: list[str] = []
        checks: list[str] = []
        pages = blocks = 0
        models = self._models(request.model_id)
        for model in models:
            for part in verify.parts(core, model):
                if not verify.is_known(core, model):
                    break
                problems += await _look(turns, part)
                checks.append(part.name)
            usable, resident = verify.sizes(core, model)
            pages, blocks = pages + usable, blocks + resident
        response = admin_pb2.VerifyResponse(
            problems=problems[:MOST_PROBLEMS], pages_checked=pages, blocks_checked=blocks, checks=checks
        )
        if request.checksums:
            found = await self._checksums.compare(turns, frozenset(models))
            response.checksums.CopyFrom(found)
        response.ok = not problems and not response.checksums.mismatches
        response.longest_pause_ms = turns.longest_seconds * 1e3
        response.seconds = time.monotonic() - began
        return response

    async def dump(self, request: inspect_pb2.DumpIndexRequest) -> AsyncGenerator[inspect_pb2.DumpIndexResponse]:
        """The head, then the rows. Raises NotFound, InvalidRequest, LimitExceeded."""
        if self._dumps >= DUMPS_MAX:
            raise LimitExceeded("dumps at a time", self._dumps + 1, DUMPS_MAX)
        self._dumps += 1
        try:
            async for part in self._dump(request):
                yield part
        finally:
            self._dumps -= 1

    async def _dump(self, request: inspect_pb2.DumpIndexRequest) -> AsyncGenerator[inspect_pb2.DumpIndexResponse]:
        size = request.blocks_per_message or MESSAGE_BLOCKS
        if size > MESSAGE_BLOCKS_MAX:
            raise InvalidRequest(f"blocks_per_message is {size}; at most {MESSAGE_BLOCKS_MAX}")
        core, turns = self._node.core, Turns()
        model = visible_model(core, request.model_id)
        taken = turns.take(partial(dump.Columns, model))
        await turns.aside(taken.put_in_order)
        yield inspect_pb2.DumpIndexResponse(
            head=inspect_pb2.IndexHead(
                format=1,
                version=__version__,
                taken_unix_seconds=time.time(),
                model_id=model.id,
                model=model.name,
                namespace_hex=shown_namespace(model).hex(),
                block_tokens=model.layout.block_tokens,
                groups=[group.name for group in model.layout.groups],
                full_groups=model.layout.full_groups,
                places=taken.places,
                eviction=self._eviction,
                blocks=taken.blocks,
                pools=[inspect_pb2.IndexPool(**pool._asdict()) for pool in taken.pools],
            )
        )
        for first in range(0, taken.blocks, size):
            yield await turns.aside(partial(_rows, taken, first, size))


def block_to_proto(line: study.BlockLine) -> admin_pb2.BlockStatus:
    """One block of the index."""
    return admin_pb2.BlockStatus(
        copies=[admin_pb2.BlockCopy(**copy._asdict()) for copy in line.copies],
        key_hex=line.key.hex(),
        parent_key_hex=line.parent_key.hex(),
        **{name: value for name, value in line._asdict().items() if name != "copies"},
    )


def _rows(taken: dump.Columns, first: int, size: int) -> inspect_pb2.DumpIndexResponse:
    rows = taken.rows(first, size)
    copies = [inspect_pb2.IndexCopies(**copy._asdict()) for copy in rows.copies]
    columns = {name: value for name, value in rows._asdict().items() if name != "copies"}
    return inspect_pb2.DumpIndexResponse(rows=inspect_pb2.IndexRows(copies=copies, **columns))


async def _look(turns: Turns, part: Part) -> list[str]:
    if part.walk is not None:
        return [problem for step in await turns.walk(part.walk()) for problem in step]
    assert part.capture is not None
    assert part.recount is not None
    captured = turns.take(part.capture)
    return await turns.aside(partial(part.recount, captured))
