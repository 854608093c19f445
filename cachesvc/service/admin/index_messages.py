"""Answers about the index as messages: blocks, trees, explanations, dumps, verification."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from kvcache.v1 import admin_pb2, inspect_pb2

from cachesvc.ledger.recent_requests import ID_BYTES, RecentRequest
from cachesvc.model.words import Tier
from cachesvc.questions.dump import Columns, Dump
from cachesvc.questions.explanation import BlockExplanation, BlockHolder, EventLine, Explanation
from cachesvc.questions.query import BlockLine, TreeLine
from cachesvc.questions.steps import in_steps
from cachesvc.questions.view import Listed


def blocks_to_proto(listed: Listed[BlockLine]) -> Iterator[admin_pb2.ListBlocksResponse]:
    """The answer of ListBlocks, in parts."""
    yield admin_pb2.ListBlocksResponse(truncated=listed.truncated)
    for some in in_steps(listed.lines):
        yield admin_pb2.ListBlocksResponse(blocks=map(_block, some))


def tree_to_proto(listed: Listed[TreeLine]) -> Iterator[admin_pb2.GetTreeResponse]:
    """The answer of GetTree, in parts."""
    yield admin_pb2.GetTreeResponse(truncated=listed.truncated)
    for some in in_steps(listed.lines):
        nodes = [admin_pb2.TreeNode(key_hex=line.key.hex(), **line._asdict()) for line in some]
        yield admin_pb2.GetTreeResponse(nodes=nodes)


def explanation_to_proto(found: Explanation) -> Iterator[admin_pb2.ExplainResponse]:
    """The answer of Explain, in parts."""
    yield admin_pb2.ExplainResponse(truncated=found.truncated, forgotten_before_seconds=found.forgotten_before_seconds)
    for block in found.blocks:
        yield admin_pb2.ExplainResponse(stories=[_explained(block)])


def head_to_proto(taken: Dump, version: str, eviction: str) -> inspect_pb2.DumpIndexResponse:
    """The first message of a dump."""
    columns = taken.columns
    return inspect_pb2.DumpIndexResponse(
        head=inspect_pb2.IndexHead(
            format=1,
            version=version,
            taken_unix_seconds=time.time(),
            model_id=taken.model,
            model=taken.model_name,
            namespace_hex=taken.namespace.hex(),
            block_tokens=taken.block_tokens,
            groups=taken.groups,
            full_groups=taken.full_groups,
            places=columns.places,
            eviction=eviction,
            blocks=columns.blocks,
            pools=[inspect_pb2.IndexPool(**pool._asdict()) for pool in columns.pools],
        )
    )


def rows_to_proto(columns: Columns, first: int, count: int) -> inspect_pb2.DumpIndexResponse:
    """A further message of a dump. Touches nothing of the ledger."""
    known = columns.rows(first, count)._asdict()
    known["copies"] = [inspect_pb2.IndexCopies(**copy._asdict()) for copy in known["copies"]]
    return inspect_pb2.DumpIndexResponse(rows=inspect_pb2.IndexRows(**known))


def requests_to_proto(
    requests: Sequence[RecentRequest], blocks_per_message: int
) -> Iterator[inspect_pb2.DumpIndexResponse]:
    """Further messages of a dump of requests, each with at most as many blocks, but with one request at least."""
    part = inspect_pb2.RecentRequests()
    for request in requests:
        if part.blocks and len(part.block_ids) // ID_BYTES + request.blocks > blocks_per_message:
            yield inspect_pb2.DumpIndexResponse(requests=part)
            part = inspect_pb2.RecentRequests()
        part.seconds.append(request.seconds - requests[0].seconds)
        part.output_tokens.append(request.output_tokens)
        part.blocks.append(request.blocks)
        part.block_ids += request.block_ids
    if part.blocks:
        yield inspect_pb2.DumpIndexResponse(requests=part)


def _block(line: BlockLine) -> admin_pb2.BlockStatus:
    known = line._asdict()
    known |= {
        "key_hex": line.key.hex(),
        "parent_key_hex": line.parent_key.hex(),
        "copies": [admin_pb2.BlockCopy(**copy._asdict()) for copy in line.copies],
    }
    return admin_pb2.BlockStatus(**known)


def _explained(found: BlockExplanation) -> admin_pb2.BlockStory:
    return admin_pb2.BlockStory(
        model_id=found.model,
        model=found.model_name,
        key=found.key,
        block=None if found.block is None else _block(found.block),
        holders=[_holder(holder) for holder in found.holders],
        holders_truncated=found.holders_truncated,
        tickets=found.tickets,
        events=[_event(event) for event in found.events],
        verdict=found.conclusion,
        accesses_since=found.accesses_since,
    )


def _holder(holder: BlockHolder) -> inspect_pb2.BlockHolder:
    return inspect_pb2.BlockHolder(
        lease_id=holder.lease_id,
        engine=holder.engine,
        sequence_id=holder.sequence,
        tier=(Tier.DEVICE if holder.place else Tier.HOST).value,
        replica=max(0, holder.place - 1),
        blocks_below=holder.blocks_below,
    )


def _event(event: EventLine) -> inspect_pb2.BlockEvent:
    return inspect_pb2.BlockEvent(
        sequence_number=event.number,
        age_seconds=event.age_seconds,
        kind=event.kind,
        present=event.present,
        place=event.place,
        group=event.group,
        reason=event.cause,
    )
