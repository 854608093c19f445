"""AdminService.Explain: finds the blocks of a prefix without holding up the loop, and tells their stories."""

from __future__ import annotations

import asyncio

from kvcache.v1 import admin_pb2, inspect_pb2

from cachesvc.ledger.journal import Event
from cachesvc.ledger.ledger import Model
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.words import Tier
from cachesvc.questions.explanation import Holder, Story, story
from cachesvc.service.access.owners import shown_lease, visible_model, visible_models
from cachesvc.service.inspection import block_to_proto
from cachesvc.service.node import Node

PREFIX_BYTES_MIN = 2
EVENTS_MAX = 256
EVENTS_DEFAULT = 16
STORIES_MAX = 16
LOOKED_AT_ONCE = 8192
"""Keys that are compared before others may run: under a millisecond."""


async def explain(node: Node, request: inspect_pb2.ExplainRequest) -> admin_pb2.ExplainResponse:
    """The stories of up to ``STORIES_MAX`` blocks. Raises InvalidRequest, NotFound (the model)."""
    prefix = request.key_prefix
    if not PREFIX_BYTES_MIN <= len(prefix) <= KEY_BYTES:
        raise InvalidRequest(f"a key has {KEY_BYTES} bytes; name at least the first {PREFIX_BYTES_MIN} bytes of it")
    models = [visible_model(node.core, request.model_id)] if request.model_id else visible_models(node.core)
    limit = min(request.events or EVENTS_DEFAULT, EVENTS_MAX)
    stories: list[admin_pb2.BlockStory] = []
    truncated = False
    forgotten = 0.0
    for model in models:
        found = await _events_of(model, prefix)
        for key in await _keys_of(model, prefix):
            found.setdefault(key, [])
        if not found and len(prefix) == KEY_BYTES and len(models) == 1:
            found = {prefix: []}
        journal = model.blocks.journal
        if journal.first > 1:
            age = node.now() - journal.seconds_of(journal.first)
            forgotten = min(forgotten, age) if forgotten else age
        truncated = truncated or len(found) > STORIES_MAX - len(stories)
        told = list(found)[: STORIES_MAX - len(stories)]
        told_now = (story(node.core, model, key, found[key][-limit:], node.now()) for key in told)
        stories += [_message(node, each) for each in told_now]  # before others run: its holders may leave
    return admin_pb2.ExplainResponse(
        stories=stories,
        truncated=truncated,
        forgotten_before_seconds=forgotten,
    )


async def _keys_of(model: Model, prefix: bytes) -> list[bytes]:
    """Keys in the index that begin with ``prefix``; a few more than are told of."""
    index = model.blocks.index
    if len(prefix) == KEY_BYTES:
        return [prefix] if prefix in index.rows else []
    found: list[bytes] = []
    for start in range(0, len(index.keys), LOOKED_AT_ONCE):
        part = index.keys[start : start + LOOKED_AT_ONCE]
        found += [key for key in part if key is not None and key.startswith(prefix)]
        if len(found) > STORIES_MAX:
            break
        await asyncio.sleep(0)
    return found


async def _events_of(model: Model, prefix: bytes) -> dict[bytes, list[Event]]:
    """What the journal knows of the keys that begin with ``prefix``, oldest first."""
    journal = model.blocks.journal
    found: dict[bytes, list[Event]] = {}
    for start in range(journal.first, journal.last + 1, LOOKED_AT_ONCE):
        for event in journal.about(prefix, range(start, start + LOOKED_AT_ONCE)):
            found.setdefault(event.key, []).append(event)
        await asyncio.sleep(0)
    return found


def _message(node: Node, told: Story) -> admin_pb2.BlockStory:
    return admin_pb2.BlockStory(
        model_id=told.model.id,
        model=told.model.name,
        key=told.key,
        block=None if told.block is None else block_to_proto(told.block),
        holders=[_holder(node, holder) for holder in told.holders],
        holders_truncated=told.holders_truncated,
        tickets=told.tickets,
        events=[_event(node, told.model, event) for event in told.events],
        verdict=told.verdict,
        accesses_since=told.accesses_since,
    )


def _holder(node: Node, holder: Holder) -> inspect_pb2.BlockHolder:
    lease = node.core.ledger.leases[holder.lease]
    return inspect_pb2.BlockHolder(
        lease_id=shown_lease(node.core, lease),
        engine=holder.engine,
        sequence_id=holder.sequence,
        tier=(Tier.DEVICE if holder.place else Tier.HOST).value,
        replica=max(0, holder.place - 1),
        blocks_below=holder.blocks_below,
    )


def _event(node: Node, model: Model, event: Event) -> inspect_pb2.BlockEvent:
    return inspect_pb2.BlockEvent(
        sequence_number=event.number,
        age_seconds=node.now() - event.seconds,
        kind=event.kind.name.lower(),
        present=event.present,
        place=model.blocks.index.places[event.place].name,
        group=model.layout.groups[event.group].name,
        reason=event.cause.name.lower(),
    )
