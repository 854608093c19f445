"""Turns a subscription to a model's blocks into the KV events that one worker publishes for routers.

Routers look prompts up by hashes of their own over an event's tokens: a block without tokens, or whose parent they were
not sent, is dropped or lands in the wrong place. So with ``tokens`` a block is announced once its tokens are known and
its parent was announced, and at once when the last of the two becomes true.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cachesvc.model.layout import Layout, PlaneGroup
from cachesvc_client.adapters.known_tokens import Adapter, KnownBlock, KnownTokens
from cachesvc_client.adapters.kv_event_form import CLEARED, MEDIA, Event, Form, hash_of, wire_batch
from cachesvc_client.records.event_batch import (
    Batch,
    BlockMirror,
    CopyLocation,
    Kind,
    Part,
    with_location,
    without_location,
)

__all__ = ["Adapter", "Event", "Form", "KnownTokens", "KvEventMapper", "hash_of", "wire_batch"]

BLOCKS_PER_EVENT = 1024
"""Blocks of one event at most."""

MOST_ORPHANS = 65_536
"""Parents that blocks wait for. Beyond that their blocks are announced with the next snapshot alone."""

_NOWHERE: frozenset[CopyLocation] = frozenset()
_UNKNOWN = KnownBlock(b"", Adapter(), None)


@dataclass
class KvEventMapper:
    """The view of one worker: an engine on ``replica``, the host behind it, and storage where the subscription has it.

    ``layout`` gives the block size, the groups and their kinds; a marker group holds no KV and is left out. ``tokens``:
    announce exactly the blocks that these know; None: announce all, without tokens. ``lora_name``: of every block,
    where the model is one with an adapter. ``hash_of``: a key's hash in events.

    A snapshot becomes AllBlocksCleared and all blocks, each behind its parent, once its last part is there.
    """

    layout: Layout
    replica: int = 0
    tokens: KnownTokens | None = None
    media: Mapping[str, str] = field(default_factory=lambda: MEDIA)
    lora_name: str | None = None
    hash_of: Callable[[bytes], int | bytes] = hash_of
    mirror: BlockMirror = field(default_factory=BlockMirror)
    _told: dict[bytes, frozenset[CopyLocation]] = field(default_factory=dict)
    _orphans: dict[bytes, set[bytes]] = field(default_factory=dict)
    _stores: set[CopyLocation] = field(default_factory=set)

    def __post_init__(self) -> None:
        own = set(self.layout.own_groups)
        self._groups = {number: group for number, group in enumerate(self.layout.groups) if group in own}

    def events_of(self, batch: Batch) -> list[Event]:
        """Events for a batch, in order. Raises EventsMissed where one is missing before it."""
        self.mirror.apply(batch)
        for run in batch.runs:
            if run.present and run.location.tier == "storage":
                self._forget_unknown(run.location, run.keys)
        if batch.part is Part.LAST:
            self._clear()
            known = None if self.tokens is None else self.tokens.keys()
            return [CLEARED, *self._announce(self._places(self.mirror.root_first(known)))]
        if batch.part is not Part.NONE:
            return []
        out: list[Event] = []
        for run in batch.runs:
            if not self._concerns(run.location) or run.kind is Kind.COPY_FAILED:
                continue
            # The mirror has the state after the batch: a block that comes and goes within it is not announced.
            keys = [key for key in run.keys if (run.location in self.mirror.locations.get(key, ())) == run.present]
            if not run.present:
                out += self._removed(run.location, keys)
                continue
            out += self._announce([(run.location, keys)])
        return out

    def news(self) -> list[Event]:
        """Events for what ``tokens`` learned or forgot since the last call."""
        if self.tokens is None:
            return []
        learned = self.tokens.take()
        out: list[Event] = []
        if learned.is_forgotten:
            self._clear()
            out.append(CLEARED)
        if self.mirror.is_whole:
            out += self._announce(self._places([key for key in learned.fresh if key in self.mirror.locations]))
        for location in [location for location in self._stores if learned.dropped]:
            out += self._removed(location, learned.dropped)
            self.mirror.take_away(location, learned.dropped)
        return out

    def forget(self) -> list[Event]:
        """Events where the subscription ended: what is true now will come with the next snapshot."""
        self.mirror = BlockMirror()
        self._clear()
        return [CLEARED]

    def _forget_unknown(self, location: CopyLocation, keys: Sequence[bytes]) -> None:
        """Storage may hold more than fits into memory: keep of it what is known, which is bounded."""
        self._stores.add(location)
        if self.tokens is not None:
            self.mirror.take_away(location, [key for key in keys if self.tokens.find(key) is None])

    def _clear(self) -> None:
        self._told.clear()
        self._orphans.clear()

    def _concerns(self, location: CopyLocation) -> bool:
        return location.group in self._groups and (location.tier != "device" or location.replica == self.replica)

    def _places(self, keys: Sequence[bytes]) -> list[tuple[CopyLocation, list[bytes]]]:
        """``keys``, which the mirror has, by the places of this worker where they have copies."""
        places: dict[CopyLocation, list[bytes]] = {}
        for key in keys:
            for location in self.mirror.locations[key]:
                places.setdefault(location, []).append(key)
        return [(location, places[location]) for location in sorted(places) if self._concerns(location)]

    def _announce(self, places: Iterable[tuple[CopyLocation, Sequence[bytes]]]) -> Iterator[Event]:
        """Events of blocks with copies there, parents before children; then of those that waited for one of these."""
        todo = deque(places)
        while todo:
            location, keys = todo.popleft()
            adopted: list[bytes] = []
            yield from self._chains(location, keys, adopted)
            todo += self._places([key for key in adopted if key in self.mirror.locations])

    def _chains(self, location: CopyLocation, keys: Sequence[bytes], adopted: list[bytes]) -> Iterator[Event]:
        """An event for each run of chained blocks of one adapter. Adds to ``adopted`` what waited for these blocks."""
        chain: list[bytes] = []
        blocks: list[KnownBlock] = []
        for key in keys:
            block = self._announceable(location, key)
            if block is None:
                continue
            follows = chain and self.mirror.parents[key] == chain[-1] and block.adapter == blocks[-1].adapter
            if chain and (not follows or len(chain) == BLOCKS_PER_EVENT):
                yield self._stored_event(location, chain, blocks)
                chain, blocks = [], []
            chain.append(key)
            blocks.append(block)
            self._told[key] = with_location(self._told.get(key, _NOWHERE), location)
            adopted += self._orphans.pop(key, ())
        if chain:
            yield self._stored_event(location, chain, blocks)

    def _announceable(self, location: CopyLocation, key: bytes) -> KnownBlock | None:
        """Known facts of a block that can be announced now and was not."""
        if self.tokens is None:
            return _UNKNOWN
        if location in self._told.get(key, ()):
            return None
        block = self.tokens.find(key)
        if block is None or key not in self.mirror.parents:
            return None
        parent = self.mirror.parents[key]
        if parent and parent not in self._told:
            if len(self._orphans) >= MOST_ORPHANS:
                self._orphans.clear()
            self._orphans.setdefault(parent, set()).add(key)
            return None
        return block

    def _stored_event(self, location: CopyLocation, keys: Sequence[bytes], blocks: Sequence[KnownBlock]) -> Event:
        group = self._groups[location.group]
        window = group.window_tokens
        parent = self.mirror.parents[keys[0]]
        adapter = blocks[0].adapter
        event: Event = {
            "type": "BlockStored",
            "block_hashes": [self.hash_of(key) for key in keys],
            "parent_block_hash": self.hash_of(parent) if parent else None,
            "token_ids": [token for block in blocks for token in block.token_ids],
            "block_size": self.layout.block_tokens,
            "lora_id": adapter.lora_id,
            "medium": self.media[location.tier],
            "lora_name": adapter.lora_name or self.lora_name,
            "group_idx": location.group,
            "kv_cache_spec_kind": _kind_of(group),
        }
        if window is not None:
            event["kv_cache_spec_sliding_window"] = window
        if any(block.extra_keys for block in blocks):
            event["extra_keys"] = [block.extra_keys for block in blocks]
        return event

    def _removed(self, location: CopyLocation, keys: Sequence[bytes]) -> list[Event]:
        if self.tokens is not None:
            keys = [key for key in keys if location in self._told.get(key, ())]
            for key in keys:
                left = without_location(self._told[key], location)
                if left:
                    self._told[key] = left
                else:
                    del self._told[key]
        if not keys:
            return []
        hashes = [self.hash_of(key) for key in keys]
        return [
            {
                "type": "BlockRemoved",
                "block_hashes": hashes,
                "medium": self.media[location.tier],
                "group_idx": location.group,
            }
        ]


def _kind_of(group: PlaneGroup) -> str:
    """The word of vLLM's events for a group's kind."""
    if group.is_state:
        return "mamba"
    return "full_attention" if group.is_full else "sliding_window"
