"""Turns a subscription to a model's blocks into the KV events that one worker publishes for routers.

Routers look prompts up by hashes of their own over an event's tokens: a block without tokens, or whose parent they were
not sent, is dropped or lands in the wrong place. So with ``tokens`` a block is announced once its tokens are known and
its parent was announced, and at once when the last of the two becomes true.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cachesvc.model.layout import Layout
from cachesvc.model.words import KEY_BYTES
from cachesvc_client.core.errors import CacheClientError, InvalidRequest, NotOwned, NotSupported, TokenFileUnreadable
from cachesvc_client.core.keys import PackedKeys, as_bytes
from cachesvc_client.events import (
    NOWHERE,
    Batch,
    BlockMirror,
    CopyLocation,
    EventSubscriber,
    Kind,
    Part,
    with_location,
    without_location,
)

# The form of KV events that the cache-aware routers of vLLM, Dynamo and llm-d read.
#
#     batch     [seconds since 1970, [event, ...], data-parallel rank]
#     event     {"type": "BlockStored", ...}, {"type": "BlockRemoved", ...}, {"type": "AllBlocksCleared"}
#
# That is what vLLM publishes as msgpack; before mid-2026 its events were arrays with the tag first, which
# ``Form.ARRAY`` still writes. A hash is the last 8 bytes of a block's key as an unsigned number, as vLLM cuts its own.

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
    MAP = "map"
    ARRAY = "array"


def hash_of(key: bytes) -> int:
    """A block's hash as routers know it."""
    return int.from_bytes(key[-8:], "big")


def wire_batch(events: Sequence[Event], seconds: float, rank: int | None, form: Form = Form.MAP) -> list[Any]:
    """A batch as plain lists and maps, ready for msgpack. ``seconds``: since 1970."""
    written: list[Any] = list(events)
    for number, event in enumerate(
        events if form is Form.ARRAY else ()
    ):  # by position, without those missing at the end
        fields = FIELDS[event["type"]]
        present = max((at for at, name in enumerate(fields) if name in event), default=-1)
        written[number] = [event["type"], *(event.get(name) for name in fields[: present + 1])]
    return [seconds, written] if rank is None else [seconds, written, rank]


EVENTS_PER_BATCH = 64
PAUSE_S = 1.0
LONGEST_PAUSE_S = 10.0
"""Back-off while the daemon cannot be followed: a token that was replaced comes within minutes."""

WAITING_BATCHES = 64
"""Answers read ahead of a slow publisher. Beyond that the daemon's own limit holds, and a snapshot follows."""

READER_S = 0.05
"""Between two looks whether the reading thread has ended."""

HOPELESS = (InvalidRequest, NotOwned, NotSupported)
"""Errors that a retry cannot cure: the request itself is wrong. An operator, the daemon or a new token file mends the
rest."""

log = logging.getLogger(__name__)


class WakeUp(Enum):
    """Wake-up reasons of the publishing thread beside batches."""

    TOKENS = "tokens"


Inbox = queue.Queue[Batch | WakeUp | Exception | None]


class KvEventBridge:
    """``run`` publishes until ``close``, which another thread may call.

    ``connect``: makes a subscriber, which reads its token file anew. ``publish``: takes one batch of events. Whenever
    the subscription ends, routers are sent AllBlocksCleared at once, and everything anew once it is back. What
    ``mapper.tokens`` learns is published without waiting for the daemon.
    """

    def __init__(
        self,
        connect: Callable[[], EventSubscriber],
        mapper: KvEventMapper,
        publish: Callable[[Sequence[Event]], None],
        *,
        pause_s: float = PAUSE_S,
        longest_pause_s: float = LONGEST_PAUSE_S,
    ) -> None:
        self._connect = connect
        self._mapper = mapper
        self._publish = publish
        self._first_pause_s = self._pause_s = pause_s
        self._longest_pause_s = longest_pause_s
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._subscriber: EventSubscriber | None = None

    def run(self) -> None:
        """Publish until ``close``. Raises what waiting cannot cure: NotOwned, NotSupported, InvalidRequest; and what
        ``publish`` raises."""
        while not self._closing.is_set():
            try:
                self._follow()
            except CacheClientError as error:
                self._send(self._mapper.forget())
                if isinstance(error, HOPELESS) and not isinstance(error, TokenFileUnreadable):
                    raise
                log.warning("events_stopped retry_s=%g reason=%s", self._pause_s, error)
                self._closing.wait(self._pause_s)
                self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
            else:
                if not self._closing.is_set():
                    self._send(self._mapper.forget())

    def restart(self) -> None:
        with self._lock:
            if self._subscriber is not None:
                self._subscriber.close()

    def close(self) -> None:
        self._closing.set()
        self.restart()

    def _follow(self) -> None:
        """Follow one subscription to its end. Raises what ended it."""
        with self._lock:
            if self._closing.is_set():
                return
            subscriber = self._subscriber = self._connect()
        inbox: Inbox = queue.Queue(WAITING_BATCHES)

        def read() -> None:
            """Hand on every batch, then the error that ended the subscription, or None."""
            end: Exception | None = None
            try:
                for batch in subscriber.follow():
                    inbox.put(batch)
            except Exception as error:  # noqa: BLE001 - the root of this thread; raised by the one that publishes
                end = error
            inbox.put(end)

        def nudge() -> None:
            with suppress(queue.Full):  # a full inbox wakes the publishing thread anyway
                inbox.put_nowait(WakeUp.TOKENS)

        reader = threading.Thread(target=read, name="kvcache-events-reader", daemon=True)
        reader.start()
        try:
            if self._mapper.tokens is not None:
                self._mapper.tokens.on_news = nudge
            self._send(self._mapper.news())
            while (item := inbox.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, Batch):
                    self._pause_s = self._first_pause_s
                    self._send(self._mapper.events_of(item))
                self._send(self._mapper.news())
        finally:
            subscriber.close()
            while reader.is_alive():  # it may wait for room
                with suppress(queue.Empty):
                    inbox.get(timeout=READER_S)

    def _send(self, events: Iterable[Event]) -> None:
        rest = iter(events)
        while some := list(itertools.islice(rest, EVENTS_PER_BATCH)):
            self._publish(some)


# Tokens of blocks, kept by the process that hashes prompts, for routers that look prompts up by their tokens.
#
# The daemon knows keys and no tokens. ``learn`` is made for an engine's scheduler thread: it copies what it is given
# and returns; the thread that publishes events takes it in.

WAITING_PROMPTS = 1024
"""Prompts that wait to be taken in. ``learn`` takes them in by itself beyond that, so memory stays bounded."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as KV events name it."""

    lora_id: int | None = None
    lora_name: str | None = None


class KnownBlock(NamedTuple):
    """Facts about one block that its key does not tell. ``extra_keys``: as the engine's events have them."""

    tokens: bytes
    adapter: Adapter
    extra_keys: Any

    @property
    def token_ids(self) -> list[int]:
        return np.frombuffer(self.tokens, "<u4").tolist()  # type: ignore[no-any-return]


class Learned(NamedTuple):
    """News since the last ``take``: keys that became known, in the order of their chains; keys whose tokens were
    dropped for room; ``is_forgotten``: all that was known before ``fresh`` is void."""

    fresh: list[bytes]
    dropped: list[bytes]
    is_forgotten: bool


class _Prompt(NamedTuple):
    keys: bytes
    tokens: Sequence[int] | npt.NDArray[np.integer]
    block_tokens: int
    adapter: Adapter
    extra_keys: Callable[[], Sequence[Any]] | None


class KnownTokens:
    """The tokens of the last ``limit`` blocks that this process hashed. Safe to use from several threads.

    ``on_news``: called by ``learn`` and ``forget``, on the caller's thread, once until the next ``take``; must not
    block.
    """

    def __init__(self, limit: int = 65_536) -> None:
        if limit < 1:
            raise InvalidRequest(f"the limit of known blocks is at least 1, got {limit}")
        self._limit = limit
        self._blocks: OrderedDict[bytes, KnownBlock] = OrderedDict()
        self._waiting: deque[_Prompt] = deque()
        self._lock = threading.Lock()
        self._news = Learned([], [], is_forgotten=False)
        self._is_told = False
        self.on_news: Callable[[], None] | None = None

    def learn(
        self,
        keys: PackedKeys,
        tokens: Sequence[int] | npt.NDArray[np.integer],
        block_tokens: int,
        *,
        adapter: Adapter = Adapter(),
        extra_keys: Callable[[], Sequence[Any]] | None = None,
    ) -> None:
        """Remember ``tokens``, which fill the blocks of packed ``keys`` from the first on. ``extra_keys``: makes one
        entry a block, later and on another thread. Raises InvalidRequest where tokens are missing."""
        mine = as_bytes(keys)
        wanted = len(mine) // KEY_BYTES * block_tokens
        if len(mine) % KEY_BYTES or len(tokens) < wanted:
            raise InvalidRequest(
                f"{len(mine)} bytes of keys and {len(tokens)} tokens: {KEY_BYTES} bytes and {block_tokens} tokens make "
                "a block, and each key needs its tokens"
            )
        if not mine:
            return
        part = tokens[:wanted]
        copied = part.copy() if isinstance(part, np.ndarray) else part if isinstance(tokens, list) else list(part)
        self._waiting.append(_Prompt(mine, copied, block_tokens, adapter, extra_keys))
        if len(self._waiting) > WAITING_PROMPTS:
            with self._lock:
                self._take_in()
        self._tell()

    def forget(self) -> None:
        """Drop everything learned so far: none of it can be hit any more."""
        with self._lock:
            self._waiting.clear()
            self._blocks.clear()
            self._news = Learned([], [], is_forgotten=True)
        self._tell()

    def take(self) -> Learned:
        with self._lock:
            self._is_told = False
            self._take_in()
            news, self._news = self._news, Learned([], [], is_forgotten=False)
        return news

    def keys(self) -> list[bytes]:
        """Keys of all blocks that are known."""
        with self._lock:
            self._take_in()
            return list(self._blocks)

    def find(self, key: bytes) -> KnownBlock | None:
        """Find one block; None where it is unknown."""
        with self._lock:
            self._take_in()
            return self._blocks.get(key)

    def _tell(self) -> None:
        if not self._is_told and self.on_news is not None:
            self._is_told = True
            self.on_news()

    def _take_in(self) -> None:
        """Under the lock: make blocks of the prompts that wait."""
        while self._waiting:
            prompt = self._waiting.popleft()
            raw = np.asarray(prompt.tokens).astype("<u4", copy=False).tobytes()
            step = 4 * prompt.block_tokens
            count = len(prompt.keys) // KEY_BYTES
            extra_keys = [None] * count if prompt.extra_keys is None else prompt.extra_keys()
            keys = [prompt.keys[at : at + KEY_BYTES] for at in range(0, len(prompt.keys), KEY_BYTES)]
            self._news.fresh.extend(key for key in keys if key not in self._blocks)
            for at in range(count - 1, -1, -1):  # the root is the newest: a child without it is of no use
                block = KnownBlock(raw[at * step : (at + 1) * step], prompt.adapter, extra_keys[at])
                self._blocks[keys[at]] = block
                self._blocks.move_to_end(keys[at])
        while len(self._blocks) > self._limit:
            self._news.dropped.append(self._blocks.popitem(last=False)[0])
        for news in (self._news.fresh, self._news.dropped):  # whether or not they are ever taken
            del news[: -self._limit]


__all__ = ["Adapter", "Event", "Form", "KnownTokens", "KvEventMapper", "hash_of", "wire_batch"]

BLOCKS_PER_EVENT = 1024
"""Blocks of one event at most."""

MOST_ORPHANS = 65_536
"""Parents that blocks wait for. Beyond that their blocks are announced with the next snapshot alone."""

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
            self._told[key] = with_location(self._told.get(key, NOWHERE), location)
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
        kind = "mamba" if group.is_state else "full_attention" if group.is_full else "sliding_window"
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
            "kv_cache_spec_kind": kind,
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
        hashes, medium = [self.hash_of(key) for key in keys], self.media[location.tier]
        removed = {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, "group_idx": location.group}
        return [removed] if keys else []
