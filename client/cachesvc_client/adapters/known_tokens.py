"""Tokens of blocks, kept by the process that hashes prompts, for routers that look prompts up by their tokens.

The daemon knows keys and no tokens. ``learn`` is made for an engine's scheduler thread: it copies what it is given and
returns; the thread that publishes events takes it in.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cachesvc.model.keys import KEY_BYTES
from cachesvc_client.core.errors import InvalidRequest
from cachesvc_client.core.keys import PackedKeys, as_bytes

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
        """The tokens as numbers."""
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
        """News since the last call."""
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

    def of(self, key: bytes) -> list[int] | None:
        """Tokens of one block; None where they are unknown."""
        block = self.find(key)
        return None if block is None else block.token_ids

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
