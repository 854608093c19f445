"""Independent oracles: what a prefix cache must count on a trace, written as plainly as the rules themselves.

They share no line with the daemon, so a replay whose numbers agree with these has the cache right. There is
one engine, its requests one after another in trace order. By hand: `python -m tests.oracle TRACE`.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cachesvc_lab.traces import read_trace


class Request(Protocol):
    """All that an oracle looks at: the ids of the filled blocks, root to leaf; every id has one parent."""

    @property
    def block_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """`blocks` counts accesses: hits + computed. `cut_requests` had more blocks than the pool could take."""

    requests: int
    blocks: int
    hits: int
    computed: int
    evictions: int
    cut_requests: int


def distinct_blocks(requests: Iterable[Request]) -> int:
    return len({block_id for request in requests for block_id in request.block_ids})


def pool_capacity(distinct: int, percent: float) -> int:
    """The pool size that stands for a share of all blocks of a trace."""
    return max(1, int(distinct * percent / 100))


def infinite_hits(requests: Iterable[Request]) -> CacheCounts:
    """Nothing is ever evicted: a request hits the longest leading run of blocks that were seen before it."""
    seen: set[int] = set()
    request_count = blocks = hits = 0
    for request in requests:
        hits += _leading_run(request.block_ids, seen)
        blocks += len(request.block_ids)
        request_count += 1
        seen.update(request.block_ids)
    return CacheCounts(request_count, blocks, hits, blocks - hits, evictions=0, cut_requests=0)


def lru_hits(requests: Iterable[Request], capacity: int) -> CacheCounts:
    """One engine on one pool of `capacity` blocks, leaf-first LRU. The rules, for each request in order:

    1. The hit is the longest resident prefix. It is pinned, and all of it is stamped with this request.
    2. Of the missing blocks the leading ones get pages: as many as fit beside the matched prefix, so at most
       capacity - matched. The rest is computed outside of the cache (a cut request), and counts as computed.
    3. Until that many pages are free, the victim is the resident block without a resident child, not on the
       matched path, whose stamp is oldest. The stamp is the request's place in the trace, not its timestamp;
       blocks of one stamp lie on one path, of which only the deepest can lack a child: there are no ties.
    4. At the request's end the new blocks become resident, all at once, stamped with this request.
    """
    stamps: dict[int, int] = {}  # of each resident block
    parents: dict[int, int | None] = {}
    children: dict[int, int] = {}  # how many resident children a resident block has
    # Leaves by stamp. An entry whose block was since evicted or stamped anew is skipped.
    leaves: list[tuple[int, int]] = []
    request_count = blocks = hits = evictions = cut_requests = 0

    for now, request in enumerate(requests):
        path = request.block_ids
        matched = _leading_run(path, stamps)
        for block_id in path[:matched]:
            stamps[block_id] = now
        missing = len(path) - matched
        wanted = min(missing, capacity - matched)

        while capacity - len(stamps) < wanted:
            stamp, victim = heapq.heappop(leaves)
            if stamps.get(victim) != stamp:
                continue
            assert children[victim] == 0  # a new child stamps its parent anew
            del stamps[victim], children[victim]
            evictions += 1
            parent = parents.pop(victim)
            if parent is not None:
                children[parent] -= 1
                is_pinned = stamps[parent] == now
                if children[parent] == 0 and not is_pinned:
                    heapq.heappush(leaves, (stamps[parent], parent))

        for position in range(matched, matched + wanted):
            block_id = path[position]
            stamps[block_id] = now
            children[block_id] = 0
            parents[block_id] = path[position - 1] if position > 0 else None
            if position > 0:
                children[path[position - 1]] += 1
        deepest = matched + wanted - 1
        if deepest >= 0 and children[path[deepest]] == 0:
            heapq.heappush(leaves, (now, path[deepest]))

        assert len(stamps) <= capacity
        request_count += 1
        blocks += len(path)
        hits += matched
        cut_requests += wanted < missing
    return CacheCounts(request_count, blocks, hits, blocks - hits, evictions, cut_requests)


def lru_hits_naive(requests: Iterable[Request], capacity: int) -> CacheCounts:
    """The rules of lru_hits once more, with nothing kept but each resident block's stamp: O(n^2)."""
    requests = list(requests)
    parent_of = {child: parent for request in requests for parent, child in _edges(request.block_ids)}
    stamps: dict[int, int] = {}
    hits = evictions = cut_requests = 0
    for now, request in enumerate(requests):
        path = request.block_ids
        matched = [block_id for i, block_id in enumerate(path) if all(above in stamps for above in path[: i + 1])]
        stamps.update(dict.fromkeys(matched, now))
        missing = [block_id for block_id in path if block_id not in matched]
        fitting = missing[: capacity - len(matched)]
        while len(stamps) + len(fitting) > capacity:
            with_child = {parent_of[block_id] for block_id in stamps}
            candidates = [b for b in stamps if b not in with_child and b not in matched]
            victim = min(candidates, key=lambda block_id: stamps[block_id])
            assert [stamps[b] for b in candidates].count(stamps[victim]) == 1, "the rule has no ties"
            del stamps[victim]
            evictions += 1
        stamps.update(dict.fromkeys(fitting, now))
        hits += len(matched)
        cut_requests += len(fitting) < len(missing)
    blocks = sum(len(request.block_ids) for request in requests)
    return CacheCounts(len(requests), blocks, hits, blocks - hits, evictions, cut_requests)


def best_hits_naive(requests: Iterable[Request], capacity: int) -> int:
    """The most hits that any choice of victims has, under rules 1, 2 and 4 of lru_hits: every choice is tried."""
    requests = list(requests)
    parent_of = {child: parent for request in requests for parent, child in _edges(request.block_ids)}
    best = {frozenset[int](): 0}  # of what may be resident, the most hits until then
    for request in requests:
        path = request.block_ids
        kept: dict[frozenset[int], int] = {}
        for resident, hits in best.items():
            matched = _leading_run(path, resident)
            own = frozenset(path[:capacity])
            for others in _closed_subsets(resident - own, own, parent_of, capacity - len(own)):
                after = others | own
                kept[after] = max(kept.get(after, 0), hits + min(matched, capacity))
        best = kept
    return max(best.values())


def _closed_subsets(
    blocks: frozenset[int], base: frozenset[int], parent_of: dict[int, int | None], most: int
) -> set[frozenset[int]]:
    """Sets of at most ``most`` of ``blocks`` whose parents are in them or in ``base``."""
    found = {frozenset[int]()}
    frontier = found
    for _ in range(most):
        frontier = {
            chosen | {block}
            for chosen in frontier
            for block in blocks - chosen
            if parent_of[block] is None or parent_of[block] in chosen or parent_of[block] in base
        }
        found = found | frontier
    return found


def _leading_run(path: Sequence[int], known: Container[int]) -> int:
    length = 0
    while length < len(path) and path[length] in known:
        length += 1
    return length


def _edges(path: Sequence[int]) -> list[tuple[int | None, int]]:
    return list(zip([None, *path], path, strict=False))


def _print_counts(name: str, capacity: int | None, counts: CacheCounts) -> None:
    size = "-" if capacity is None else str(capacity)
    ratio = counts.hits / counts.blocks if counts.blocks else 0.0
    print(
        f"{name:>9} {size:>9} {counts.hits:>9} {ratio:>9.4f} {counts.computed:>9} {counts.evictions:>9}"
        f" {counts.cut_requests:>9}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="What a prefix cache must count on a trace (one engine, leaf-first LRU)."
    )
    parser.add_argument("trace")
    parser.add_argument(
        "--percent", type=float, nargs="+", default=[2.0, 10.0, 50.0], help="pool, %% of distinct blocks"
    )
    parser.add_argument("--block-tokens", type=int, default=512)
    parser.add_argument("--limit", type=int, default=None, help="only the first N requests")
    options = parser.parse_args()

    requests = list(read_trace(options.trace, block_tokens=options.block_tokens, limit=options.limit))
    distinct = distinct_blocks(requests)
    infinite = infinite_hits(requests)
    print(f"{infinite.requests} requests, {infinite.blocks} block accesses, {distinct} distinct blocks")
    print("     pool    blocks      hits hit_ratio  computed evictions       cut")
    for percent in options.percent:
        capacity = pool_capacity(distinct, percent)
        _print_counts(f"{percent:g} %", capacity, lru_hits(requests, capacity))
    _print_counts("infinite", None, infinite)


if __name__ == "__main__":
    main()
