"""The form of KV events that the cache-aware routers of vLLM, Dynamo and llm-d read.

    batch     [seconds since 1970, [event, ...], data-parallel rank]
    event     {"type": "BlockStored", ...}, {"type": "BlockRemoved", ...}, {"type": "AllBlocksCleared"}

That is what vLLM publishes as msgpack; before mid-2026 its events were arrays with the tag first, which
``Form.ARRAY`` still writes. A hash is the last 8 bytes of a block's key as an unsigned number, as vLLM cuts its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

Event = dict[str, Any]
MEDIA: Mapping[str, str] = {"device": "GPU", "host": "CPU", "storage": "DISK"}
"""Dynamo before 2026-06 knows the host only as CPU_PINNED."""

CLEARED: Event = {"type": "AllBlocksCleared"}

FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""Order of an event's fields behind its tag, where it is an array."""


class Form(Enum):
    """Encodings of an event."""

    MAP = "map"
    ARRAY = "array"


def hash_of(key: bytes) -> int:
    """A block's hash as routers know it."""
    return int.from_bytes(key[-8:], "big")


def wire_batch(events: Sequence[Event], seconds: float, rank: int | None, form: Form = Form.MAP) -> list[Any]:
    """A batch as plain lists and maps, ready for msgpack. ``seconds``: since 1970."""
    written = list(events) if form is Form.MAP else [_as_array(event) for event in events]
    return [seconds, written] if rank is None else [seconds, written, rank]


def _as_array(event: Event) -> list[Any]:
    """The tag and the fields by position, without those missing at the end."""
    fields = FIELDS[event["type"]]
    present = max((at for at, name in enumerate(fields) if name in event), default=-1)
    return [event["type"], *(event.get(name) for name in fields[: present + 1])]
