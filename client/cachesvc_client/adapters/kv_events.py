"""Batches of changes in the form that the cache-aware routers of vLLM, Dynamo and llm-d read.

    batch     [seconds since 1970, [event, ...], data-parallel rank]
    event     {"type": "BlockStored", ...}, {"type": "BlockRemoved", ...}, {"type": "AllBlocksCleared"}

That is what vLLM publishes as msgpack; before mid-2026 its events were arrays with the tag first, which
``Form.ARRAY`` still writes. A hash is the last 8 bytes of a block's key as an unsigned number, as vLLM cuts its own.

Routers look prompts up by their tokens, and the daemon knows none: it is never told more than digests. Who publishes
for a router in an engine's process gives a ``KnownTokens`` that the engine fills as it hashes prompts. A stored block
whose tokens are not known is told without them: llm-d then takes it for another tier of a block that it knows,
Dynamo passes it over.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.layout import Layout
from cachesvc_client.records.event_batch import Batch, BlockMirror, Kind, Part, Spot

Event = dict[str, Any]
MEDIA: Mapping[str, str] = {"device": "GPU", "host": "CPU", "storage": "DISK"}
"""Dynamo before 2026-06 knows the host only as CPU_PINNED."""

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
BLOCKS_PER_EVENT = 1024
"""Blocks of one event at most."""


class Form(Enum):
    """How an event is written."""

    MAP = "map"
    ARRAY = "array"


def hash_of(key: bytes) -> int:
    """A block's hash as routers know it."""
    return int.from_bytes(key[-8:], "big")


class KnownTokens:
    """The tokens of the last ``limit`` blocks that this process hashed. One thread may learn while others ask."""

    def __init__(self, limit: int = 65_536) -> None:
        self._limit = limit
        self._tokens: OrderedDict[bytes, npt.NDArray[np.uint32]] = OrderedDict()
        self._lock = threading.Lock()

    def learn(self, keys: bytes, tokens: Sequence[int] | npt.NDArray[np.integer], block_tokens: int) -> None:
        """``keys``: packed keys of the full blocks of ``tokens``, from the first on, as ``block_keys`` gives them."""
        flat = np.asarray(tokens, np.uint32)
        with self._lock:
            for block in range(len(keys) // KEY_BYTES):
                key = keys[block * KEY_BYTES : (block + 1) * KEY_BYTES]
                if key not in self._tokens:
                    self._tokens[key] = flat[block * block_tokens : (block + 1) * block_tokens].copy()
                self._tokens.move_to_end(key)
            while len(self._tokens) > self._limit:
                self._tokens.popitem(last=False)

    def of(self, key: bytes) -> list[int] | None:
        """One block's tokens; None where they are not known."""
        with self._lock:
            tokens = self._tokens.get(key)
        return None if tokens is None else tokens.tolist()


@dataclass
class KvEventMapper:
    """Turns a subscription into what one worker would publish: an engine on ``replica`` and the host behind it.

    ``layout`` gives the block size, and each group its kind. ``lora_name``: told with every stored block, where the
    model is one with an adapter. Only whole truths are told: a snapshot as AllBlocksCleared and all blocks, each behind
    its parent, once its last part is there.
    """

    layout: Layout
    replica: int = 0
    tokens: KnownTokens = field(default_factory=KnownTokens)
    media: Mapping[str, str] = field(default_factory=lambda: MEDIA)
    lora_name: str | None = None
    mirror: BlockMirror = field(default_factory=BlockMirror)

    def events_of(self, batch: Batch) -> list[Event]:
        """What routers are told of a batch, in order. Raises EventsMissed where one is missing before it."""
        self.mirror.apply(batch)
        if batch.part is Part.LAST:
            return [{"type": "AllBlocksCleared"}, *self._all()]
        if batch.part is not Part.NONE:
            return []
        out: list[Event] = []
        for run in batch.runs:
            if not self._concerns(run.spot):
                continue
            if run.present:
                out += self._stored(run.spot, run.parent, run.keys)
            elif run.kind is not Kind.COPY_FAILED:
                out.append(self._removed(run.spot, run.keys))
        return out

    def _concerns(self, spot: Spot) -> bool:
        return spot.tier != "device" or spot.replica == self.replica

    def _all(self) -> Iterator[Event]:
        """Everything in the mirror, as runs of chained blocks."""
        spots = sorted({spot for spots in self.mirror.spots.values() for spot in spots if self._concerns(spot)})
        keys = self.mirror.root_first()
        for spot in spots:
            run: list[bytes] = []
            for key in keys:
                if spot not in self.mirror.spots[key]:
                    continue
                if run and self.mirror.parents[key] != run[-1]:
                    yield from self._stored(spot, self.mirror.parents[run[0]], run)
                    run = []
                run.append(key)
            if run:
                yield from self._stored(spot, self.mirror.parents[run[0]], run)

    def _stored(self, spot: Spot, parent: bytes, keys: Sequence[bytes]) -> Iterator[Event]:
        """Events of a chain: each of blocks whose tokens are all known, or all not."""
        hashes: list[int] = []
        tokens: list[int] = []
        first = parent
        for key in keys:
            mine = self.tokens.of(key)
            if hashes and (bool(tokens) != (mine is not None) or len(hashes) == BLOCKS_PER_EVENT):
                yield self._stored_event(spot, first, hashes, tokens)
                first, hashes, tokens = parent, [], []
            hashes.append(hash_of(key))
            tokens += mine or []
            parent = key
        if hashes:
            yield self._stored_event(spot, first, hashes, tokens)

    def _stored_event(self, spot: Spot, parent: bytes, hashes: list[int], tokens: list[int]) -> Event:
        window = self.layout.groups[spot.group].window_tokens
        event: Event = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": hash_of(parent) if parent else None,
            "token_ids": tokens,
            "block_size": self.layout.block_tokens,
            "lora_id": None,
            "medium": self.media[spot.tier],
            "lora_name": self.lora_name,
            "group_idx": spot.group,
            "kv_cache_spec_kind": "full_attention" if window is None else "sliding_window",
        }
        if window is not None:
            event["kv_cache_spec_sliding_window"] = window
        return event

    def _removed(self, spot: Spot, keys: Sequence[bytes]) -> Event:
        return {
            "type": "BlockRemoved",
            "block_hashes": [hash_of(key) for key in keys],
            "medium": self.media[spot.tier],
            "group_idx": spot.group,
        }


def wire_batch(events: Sequence[Event], seconds: float, rank: int | None, form: Form = Form.MAP) -> list[Any]:
    """A batch as plain lists and maps, ready for msgpack. ``seconds``: since 1970."""
    written = list(events) if form is Form.MAP else [_as_array(event) for event in events]
    return [seconds, written] if rank is None else [seconds, written, rank]


def _as_array(event: Event) -> list[Any]:
    """The tag and the fields by position, without those missing at the end."""
    fields = FIELDS[event["type"]]
    present = max((at for at, name in enumerate(fields) if name in event), default=-1)
    return [event["type"], *(event.get(name) for name in fields[: present + 1])]
