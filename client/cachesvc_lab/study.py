"""Questions to a dumped index, without a daemon: a summary, the tree, the hottest prefixes, the next victims of
eviction.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from cachesvc_client.core.errors import InvalidRequest

from cachesvc.model.words import ABSENT, READY
from cachesvc_lab.index_file import KEY_BYTES, StoredIndex

Rank = tuple[int, ...]
RANKS: dict[str, Callable[[int, int, int], Rank]] = {
    "lru": lambda stamp, _hits, _position: (stamp,),
    "lfu": lambda stamp, hits, _position: (hits, stamp),
    "deepest_first": lambda stamp, _hits, position: (-position, stamp),
}
"""The daemon's eviction policies: the lowest goes first."""


class Node(NamedTuple):
    """A block of a tree. ``depth``: below where the listing began."""

    block: int
    depth: int
    below: int


class NodeList(NamedTuple):
    """Nodes in depth-first order. ``is_deep``, ``is_long``: levels, or nodes, were left out."""

    nodes: list[Node]
    is_deep: bool
    is_long: bool


def descendants(index: StoredIndex) -> npt.NDArray[np.int64]:
    below = [0] * len(index)
    for block in range(len(index) - 1, -1, -1):  # children come after their parents
        parent = index.parent[block]
        if parent >= 0:
            below[parent] += below[block] + 1
    return np.array(below, np.int64)


def find(index: StoredIndex, digits: str) -> int:
    """The one block whose key begins so. Raises InvalidRequest where there is none, or several."""
    text = digits.lower()
    start = bytes.fromhex(text[: len(text) // 2 * 2])
    found: list[int] = []
    at = index.keys.find(start)
    while at >= 0 and len(found) < 2:
        block, within = divmod(at, KEY_BYTES)
        if not within and index.key(block).startswith(text):
            found.append(block)
        at = index.keys.find(start, at + 1)
    if len(found) != 1:
        raise InvalidRequest(f"{digits} begins the key of {'no' if not found else 'more than one'} block of this dump")
    return found[0]


def tree(index: StoredIndex, top: int, depth: int, limit: int) -> NodeList:
    """The index below ``top`` (-1: the roots), the biggest branches first."""
    below = descendants(index)
    children: dict[int, list[int]] = {}
    for block, parent in enumerate(index.parent):
        children.setdefault(parent, []).append(block)
    stack = [(top, 0)] if top >= 0 else [(block, 0) for block in _largest_last(children.get(-1, []), below)]
    out: list[Node] = []
    is_deep = False
    while stack:
        block, level = stack.pop()
        if len(out) >= limit:
            return NodeList(out, is_deep, is_long=True)
        out.append(Node(block, level, int(below[block])))
        if level + 1 < depth:
            stack += [(child, level + 1) for child in _largest_last(children.get(block, []), below)]
        else:
            is_deep = is_deep or block in children
    return NodeList(out, is_deep, is_long=False)


def _largest_last(blocks: list[int], below: npt.NDArray[np.int64]) -> list[int]:
    return sorted(blocks, key=lambda block: int(below[block]))


def hottest(index: StoredIndex, limit: int) -> list[int]:
    return heapq.nlargest(limit, range(len(index)), key=lambda block: (index.hits[block], index.stamp[block]))


def newest(index: StoredIndex, limit: int) -> list[int]:
    return heapq.nlargest(limit, range(len(index)), key=lambda block: (index.stamp[block], index.position[block]))


def tiers(index: StoredIndex, block: int) -> str:
    """Places that hold the block's full groups."""
    lead = index.head["full_groups"][0]
    names = index.head["places"]
    return "+".join(names[place] for place in reversed(range(len(names))) if index.copies[place, lead][0][block])


def tier_shares(index: StoredIndex) -> Counter[str]:
    return Counter(tiers(index, block) for block in range(len(index)))


def depth_histogram(index: StoredIndex) -> list[tuple[int, int, int]]:
    """``(first, last, blocks)`` by position in the prompt, in powers of two."""
    counts = Counter(int(position).bit_length() for position in index.position)
    return [(0 if not bits else 1 << (bits - 1), (1 << bits) - 1, counts[bits]) for bits in sorted(counts)]


def next_out(index: StoredIndex, place: int) -> Iterator[int]:
    """Blocks in the order in which the daemon's policy would take them from a place if nothing were used any more.

    Leaves first, and a parent inherits its child's last access, as in the daemon. What is pinned anywhere or in a
    transfer stays, and all above it. Raises InvalidRequest for a policy that learns: what it has learned is not here.
    """
    rank = RANKS.get(index.head["eviction"])
    if rank is None:
        raise InvalidRequest(
            f"what goes next under {index.head['eviction']} hangs on what it has learned, which a dump does not have; "
            "ask the daemon: cachesvc why KEY"
        )
    lead = index.head["full_groups"][0]
    states = index.copies[place, lead][0]
    stamp, left = list(index.stamp), [0] * len(index)
    for block, parent in enumerate(index.parent):
        if parent >= 0 and states[block] != ABSENT:
            left[parent] += 1

    def may_go(block: int) -> bool:
        idle = not (left[block] or index.pins[block] or index.transfers[block])
        return states[block] == READY and idle

    def entry(block: int) -> tuple[Rank, int]:
        return rank(stamp[block], index.hits[block], index.position[block]), block

    heap = [entry(block) for block in range(len(index)) if may_go(block)]
    heapq.heapify(heap)
    while heap:
        _, block = heapq.heappop(heap)
        yield block
        parent = index.parent[block]
        if parent >= 0:
            left[parent] -= 1
            stamp[parent] = max(stamp[parent], stamp[block])
            if may_go(parent):
                heapq.heappush(heap, entry(parent))
