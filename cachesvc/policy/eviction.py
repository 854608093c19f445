"""Eviction policies by name: the choice of the next victim.

Most are a rank, one number: among the leaves that may go, the lowest rank goes first. ``hazard`` learns from requests
which candidates will be used again, and when (``hazard/history.py``); ``hazard_cost`` weighs that by what they cost.

``stamp`` numbers the last access of a block or of anything that was below it (``STAMP_BITS`` bits at most), ``hits``
counts accesses that ended at it, ``depth`` is its position in the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cachesvc.model.errors import InvalidRequest
from cachesvc.model.words import STAMP_BITS
from cachesvc.policy.hazard.history import History
from cachesvc.policy.positions.positions import Positions
from cachesvc.policy.shadow import ShadowLru

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
