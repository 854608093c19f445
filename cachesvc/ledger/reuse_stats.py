"""Reuse statistics of a namespace: hits, misses by cause, and the hits of an infinite cache.

Keys of blocks that were dropped are remembered in two generations: full, the young one becomes the old one and the old
one is forgotten. Children are dropped before their parents, so they are forgotten before them too, and what is known,
here and in the index together, stays prefix-closed: the ceiling is found by bisection like a hit. A key that was
forgotten counts as new, so the ceiling is a lower bound where more was dropped than is remembered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Any

import numpy as np

from cachesvc.ledger.block_index import BlockIndex
from cachesvc.ledger.counted_tables import PartedDict
from cachesvc.model.words import KEY_BYTES

LEAST_REMEMBERED = 1024


class Miss(Enum):
    """Cause of a miss, or of computing tokens again."""

    NEW = "new"  # never published here, or forgotten since
    EVICTED = "evicted"  # made room for others
    OPERATOR = "operator"  # an operator had it evicted
    LOST = "lost"  # the memory of its device was lost
    PARTLY = "partly"  # a windowed group has lost its part of it
    ELSEWHERE = "elsewhere"  # on another replica alone, or on its way
    DUPLICATE = "duplicate"  # two computed it at the same time


class Reuse:
    """Counts of blocks, one namespace's. ``unloaded``: of hits whose load failed later; they are no misses."""

    def __init__(self) -> None:
        self.requested = 0
        self.ceiling = 0
        self.published = 0
        self.unloaded = 0
        self.missed = dict.fromkeys(Miss, 0)
        self.recomputed: dict[tuple[str, Miss], int] = {}
        self._young: PartedDict[tuple[str, Miss]] = PartedDict()
        self._old: PartedDict[tuple[str, Miss]] = PartedDict()
        self._young_keys = 0
        self._knows_some = False
        self._forgotten: list[dict[bytes, tuple[str, Miss]]] = []

    @property
    def remembered(self) -> int:
        """Number of dropped keys that are known still."""
        return len(self._young) + len(self._old)

    def matched(self, index: BlockIndex, keys: bytes, blocks: int, hit: int, *, has_windows: bool) -> None:
        """A prompt of ``blocks`` blocks had a hit of ``hit``. Bisects what lies beyond it; nothing for a whole hit."""
        self.requested += blocks
        if hit >= blocks:
            self.ceiling += hit
            return
        resident, seen = self.known(index, keys, hit, blocks)
        self.ceiling += seen
        self.missed[Miss.PARTLY if has_windows else Miss.ELSEWHERE] += resident - hit
        if seen > resident:
            first = keys[resident * KEY_BYTES : (resident + 1) * KEY_BYTES]
            known = self._young.get(first) or self._old.get(first)
            self.missed[known[1] if known else Miss.EVICTED] += seen - resident
        self.missed[Miss.NEW] += blocks - seen

    def known(self, index: BlockIndex, keys: bytes, hit: int, blocks: int) -> tuple[int, int]:
        """Number of a prompt's blocks that the index has, and number known or remembered; its hit has ``hit``
        blocks."""
        resident = self._bisect(keys, hit, blocks, index.rows)
        if (
            resident > hit
            and index.depth[index.rows[keys[(resident - 1) * KEY_BYTES : resident * KEY_BYTES]]] != resident - 1
        ):
            resident = hit  # the caller's keys are not chained
        return resident, self._bisect(keys, resident, blocks, index.rows, self._young, self._old)

    @staticmethod
    def _bisect(keys: bytes, low: int, high: int, *known: PartedDict[Any]) -> int:
        parts = [each.parts for each in known]
        while low < high:
            middle = (low + high + 1) >> 1
            key = keys[(middle - 1) * KEY_BYTES : middle * KEY_BYTES]
            last = key[-1]
            for each in parts:
                if key in each[last]:
                    low = middle
                    break
            else:
                high = middle - 1
        return low

    def computed(self, key: bytes) -> None:
        """A block that is not in the index was published."""
        self.computed_all((key,))

    def computed_all(self, keys: Iterable[bytes]) -> None:
        if not self._knows_some:
            return
        young, old, recomputed = self._young.parts, self._old.parts, self.recomputed
        for key in keys:
            part = key[-1]
            known = young[part].get(key) or old[part].get(key)
            if known is not None:
                recomputed[known] = recomputed.get(known, 0) + 1

    def computed_again(self, tier: str, cause: Miss) -> None:
        """Count a publish of a block that the index has, on ``tier``."""
        known = (tier, cause)
        self.recomputed[known] = self.recomputed.get(known, 0) + 1

    def dropped(self, keys: Iterable[tuple[bytes, str]], cause: Miss, limit: int) -> None:
        """Blocks left the index from a tier, children before parents. Remembers about ``limit`` at most."""
        half = max(limit, LEAST_REMEMBERED) // 2
        self._knows_some = True
        young, forgotten, last, known = self._young.parts, self._forgotten, "", ("", cause)
        for key, tier in keys:
            if forgotten:
                forgotten.pop()  # a part for each key: no call frees a whole generation
            part = young[key[-1]]
            if key not in part:
                self._young_keys += 1
            if tier != last:
                last, known = tier, _KNOWN[tier, cause]
            part[key] = known
            if self._young_keys >= half:
                self._forgotten = forgotten = self._old.parts
                self._old, self._young, self._young_keys = self._young, PartedDict(), 0
                young = self._young.parts


_KNOWN = {(tier, cause): (tier, cause) for tier in ("device", "host", "storage") for cause in Miss}
"""Shared tuples, so that a remembered key costs a slot of a dict and no more."""


# The prompts of a model's last requests: input of simulations of another policy, or of bigger pools.
#
# Of each block a part of its key is kept that distinguishes it from all others. Nothing is decided by it.

ID_BYTES = 8
"""Bytes kept of a key: among a million blocks two are taken for one once in thirty million times."""
REQUEST_BLOCKS = 16
"""Cost of keeping a request beside its blocks' ids, in ids (some 120 bytes)."""


class RecentRequest:
    """Time of its arrival (seconds), ``ID_BYTES`` of each of its blocks' keys, root to leaf, and the tokens of its
    output (0: not reported)."""

    __slots__ = ("block_ids", "output_tokens", "seconds")

    def __init__(self, seconds: float, block_ids: bytes) -> None:
        self.seconds = seconds
        self.block_ids = block_ids
        self.output_tokens = 0

    @property
    def blocks(self) -> int:
        return len(self.block_ids) // ID_BYTES


class RecentRequests:
    """The last requests that had blocks, oldest first, in the memory of a limited number of blocks' ids."""

    def __init__(self) -> None:
        self._ids = 0
        self._kept: deque[RecentRequest] = deque()

    def add(self, seconds: float, keys: bytes, most_blocks: int) -> RecentRequest:
        """A prompt of packed ``keys`` came: what is older goes until all take the memory of ``most_blocks`` ids."""
        words = np.frombuffer(keys, np.uint64)[:: KEY_BYTES // ID_BYTES]
        request = RecentRequest(seconds, words.tobytes())
        if len(words):
            self._kept.append(request)
            self._ids += REQUEST_BLOCKS + len(words)
        while self._ids > most_blocks:
            self._ids -= REQUEST_BLOCKS + self._kept.popleft().blocks
        return request

    def all(self) -> list[RecentRequest]:
        return list(self._kept)
