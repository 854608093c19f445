"""Eviction policies by name: the choice of the next victim.

Most are a rank, one number: among the leaves that may go, the lowest rank goes first. ``hazard`` learns from requests
which candidates will be used again, and when (``hazard.py``); ``hazard_cost`` weighs that by what they cost.

``stamp`` numbers the last access of a block or of anything that was below it (``STAMP_BITS`` bits at most), ``hits``
counts accesses that ended at it, ``depth`` is its position in the prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from cachesvc.model.errors import InvalidRequest
from cachesvc.model.words import KEY_BYTES, STAMP_BITS, WritePolicy
from cachesvc.policy.hazard import History
from cachesvc.policy.positions import Positions

RankRule = Callable[[int, int, int], int]


def lru(stamp: int, hits: int, depth: int) -> int:
    """Rank by the last access: least recently used first."""
    return stamp


def lfu(stamp: int, hits: int, depth: int) -> int:
    """Least often hit first; the older access breaks ties."""
    return hits << STAMP_BITS | stamp


def deepest_first(stamp: int, hits: int, depth: int) -> int:
    """Longest prefixes first: keeps the shared beginnings of many prompts. The older access breaks ties."""
    return stamp - (depth << STAMP_BITS)


@dataclass(frozen=True, slots=True)
class Eviction:
    """A policy by its name: the order of what is equal to it, and whether it follows requests and learns from them.

    ``weighs_cost``: of a policy that learns, whether a hit counts for more the more it costs to compute.
    """

    name: str
    rank: RankRule
    learns: bool = False
    weighs_cost: bool = False

    def new_history(self, block_tokens: int) -> History | None:
        """History of one model for a policy that learns; None for the others."""
        return History(block_tokens, weighs_cost=self.weighs_cost) if self.learns else None

    def new_positions(self) -> Positions:
        """Positions of one model, by which copies of windows and states are kept beside blocks."""
        return Positions()

    def new_shadow(self, blocks: int) -> ShadowLru | None:
        """LRU shadow of a cache of ``blocks`` blocks, beside a policy that learns; None for the others."""
        return ShadowLru(blocks) if self.learns else None


def same_order(before: str, after: str) -> bool:
    """True where the second policy can continue from the first one's state: equal candidates go in the same order."""
    return eviction_policy(before).rank is eviction_policy(after).rank


EVICTION_POLICIES = {
    policy.name: policy
    for policy in (
        Eviction("lru", lru),
        Eviction("lfu", lfu),
        Eviction("deepest_first", deepest_first),
        Eviction("hazard", lru, learns=True),
        Eviction("hazard_cost", lru, learns=True, weighs_cost=True),
    )
}


def eviction_policy(name: str) -> Eviction:
    """The policy of that name. Raises InvalidRequest that lists the names."""
    policy = EVICTION_POLICIES.get(name)
    if policy is None:
        raise InvalidRequest(f"unknown eviction policy {name!r}; choose one of {', '.join(sorted(EVICTION_POLICIES))}")
    return policy


# LRU shadow beside another policy: the hits that LRU would have had, from a sample of keys alone.
#
# A prompt's blocks are used together, the root last, so a block that is there has all above it: each block of a sample
# tells by itself whether it would have been a hit. Keys are hashes, so those that end in some bytes are such a sample,
# and a cache of as small a part of the blocks behaves like the whole.

SAMPLED_KEYS = 4096
"""Keys that are kept at most, some 0.6 MiB, where the cache has at most 256 times as many blocks."""
PARTS = 256


class ShadowLru:
    """LRU of a cache of ``blocks`` blocks. Counts are of blocks, of the whole as far as the sample tells: ``asked``,
    ``hits`` that the policy in place had, ``shadow_hits`` that LRU would have had."""

    def __init__(self, blocks: int) -> None:
        self.asked = self.hits = self.shadow_hits = 0
        self._scale = 1
        while self._scale < PARTS and blocks > SAMPLED_KEYS * self._scale:
            self._scale *= 2
        self._is_sampled = bytes(value % self._scale == 0 for value in range(PARTS))
        self._most = max(1, blocks // self._scale)
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def matched(self, keys: bytes, asked: int, hit: int) -> None:
        """A prompt of packed ``keys``, of whose first ``asked`` blocks ``hit`` were a hit. All of it is used."""
        known, scale = self._known, self._scale
        sampled = keys[KEY_BYTES - 1 :: KEY_BYTES].translate(self._is_sampled)
        at = sampled.rfind(1)
        while at >= 0:  # deepest first: the root is used last
            key = keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
            if at < asked:
                self.asked += scale
                self.hits += scale * (at < hit)
                self.shadow_hits += scale * (key in known)
            known[key] = None
            known.move_to_end(key)
            at = sampled.rfind(1, 0, at)
        while len(known) > self._most:
            known.popitem(last=False)


# Hints of engines on how a request's blocks will be used, as access numbers: the order of eviction reads these alone.
#
# A block that will not return counts as never used: it goes before all others, on every tier. One that is expected back
# counts as used later, by as many accesses as its pool has blocks. So a hint moves blocks within the order of their own
# model and tenant, whose pools these are. The same hint on all blocks changes nothing, and a false one keeps a block
# for at most one more turn of its pool.


class RequestHint(IntEnum):
    """Expected use of a request's blocks. The values are those of the wire."""

    DEFAULT = 0
    ONCE = 1
    KEEP = 2


def retention_of(number: int) -> RequestHint:
    """RequestHint of a message. Raises InvalidRequest for a number that is none."""
    try:
        return RequestHint(number)
    except ValueError:
        raise InvalidRequest(f"retention is {number}; it is 0 (default), 1 (once) or 2 (keep)") from None


def hinted(stamp: int, retention: RequestHint, pool_blocks: int) -> int:
    """Access number under which an access at ``stamp`` counts, in a pool of ``pool_blocks`` blocks."""
    if retention is RequestHint.ONCE:
        return 0
    return stamp + pool_blocks if retention is RequestHint.KEEP else stamp


# Rules for copying sealed blocks to the host tier.
#
# write_through: when sealed. write_through_selective: at the ``threshold``-th reuse (a match that passes through the
# block), counts of dropped blocks being remembered. write_back: only when the last device copy is evicted.


@dataclass(frozen=True, slots=True)
class WriteRule:
    """``threshold``: reuses after which write_through_selective copies. ``remember``: counts kept of dropped blocks.
    ``share``: write_back copies blocks of a class that is used from the host at least ``share`` times as often as the
    mean, where eviction knows of classes; 0: all."""

    policy: WritePolicy
    threshold: int = 2
    remember: int = 65536
    share: float = 0.0

    copies_when_sealed: bool = field(init=False)
    """True where a block is backed up when it is published."""
    counts_reuse: bool = field(init=False)
    """True where matches must be counted block by block."""
    copies_when_evicted: bool = field(init=False)
    """True where an evicted block's last copy is saved first."""

    def __post_init__(self) -> None:
        if self.share < 0:
            raise InvalidRequest(f"write_back_share cannot be negative, got {self.share}")
        if self.threshold < 1:
            raise InvalidRequest(f"write_through_threshold must be at least 1, got {self.threshold}")
        # Set once: every match and publish asks.
        object.__setattr__(self, "copies_when_sealed", self.policy is WritePolicy.WRITE_THROUGH)
        object.__setattr__(self, "counts_reuse", self.policy is WritePolicy.WRITE_THROUGH_SELECTIVE)
        object.__setattr__(self, "copies_when_evicted", self.policy is WritePolicy.WRITE_BACK)

    def is_due(self, reuses: int) -> bool:
        """True when a block that was reused so often should have a host copy."""
        return self.counts_reuse and reuses >= self.threshold
