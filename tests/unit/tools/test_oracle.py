"""The oracles: against counts made by hand, against each other, and against what holds for any trace."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from cachesvc_lab.traces import SyntheticTraceSpec, read_trace, write_synthetic_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import CacheCounts, distinct_blocks, infinite_hits, lru_hits, lru_hits_naive, pool_capacity


@dataclass(frozen=True)
class Prompt:
    block_ids: tuple[int, ...]


def prompts(*paths: tuple[int, ...]) -> list[Prompt]:
    return [Prompt(path) for path in paths]


@st.composite
def tree_traces(draw: st.DrawFn) -> list[Prompt]:
    """Prompts that walk a random tree from its root to any node, so that every id has one parent."""
    parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(1, 14)))]
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), node))
    chosen = draw(st.lists(st.sampled_from([(), *paths]), max_size=30))
    return prompts(*chosen)


A, B, C, D, E = 1, 2, 3, 4, 5

BY_HAND: dict[str, tuple[int, list[tuple[int, ...]], CacheCounts]] = {
    "what fits is hit again": (4, [(A, B), (A, C), (A, B)], CacheCounts(3, 6, 3, 3, 0, 0)),
    "the oldest leaf goes first": (3, [(A,), (B,), (C,), (D,), (B,), (A,)], CacheCounts(6, 6, 1, 5, 2, 0)),
    "a hit makes its path young": (3, [(A, B), (C,), (A, B), (D,), (C,)], CacheCounts(5, 7, 2, 5, 2, 0)),
    "a parent outlives its children": (2, [(A, B), (C,), (A,), (C,)], CacheCounts(4, 5, 2, 3, 1, 0)),
    "what is matched is not evicted": (3, [(A, B), (C,), (A, D, E)], CacheCounts(3, 6, 1, 5, 2, 0)),
    "a long prompt leaves its head": (2, [(A, B, C, D), (A, B, C)], CacheCounts(2, 7, 2, 5, 0, 2)),
    "a matched pool takes nothing": (1, [(A, B), (A, C)], CacheCounts(2, 4, 1, 3, 0, 2)),
    "an empty prompt is a request": (1, [(), (A,), (), (A,)], CacheCounts(4, 2, 1, 1, 0, 0)),
    "an empty trace": (1, [], CacheCounts(0, 0, 0, 0, 0, 0)),
}


@pytest.mark.parametrize("oracle", [lru_hits, lru_hits_naive])
@pytest.mark.parametrize("name", BY_HAND)
def test_lru_counts_what_was_counted_by_hand(name: str, oracle: Callable[[list[Prompt], int], CacheCounts]) -> None:
    capacity, paths, expected = BY_HAND[name]
    assert oracle(prompts(*paths), capacity) == expected


def test_infinite_counts_what_was_counted_by_hand() -> None:
    counts = infinite_hits(prompts((A, B), (A, C), (), (A, B, D), (E,)))
    assert counts == CacheCounts(requests=5, blocks=8, hits=3, computed=5, evictions=0, cut_requests=0)


@settings(deadline=None, max_examples=400)
@given(tree_traces(), st.integers(1, 15))
def test_the_fast_and_the_naive_lru_agree(requests: list[Prompt], capacity: int) -> None:
    assert lru_hits(requests, capacity) == lru_hits_naive(requests, capacity)


@settings(deadline=None)
@given(tree_traces(), st.integers(1, 15))
def test_every_access_is_a_hit_or_computed_and_no_cache_beats_infinity(requests: list[Prompt], capacity: int) -> None:
    counts = lru_hits(requests, capacity)
    assert counts.hits + counts.computed == counts.blocks
    assert counts.hits <= infinite_hits(requests).hits
    assert counts.evictions <= counts.computed


@settings(deadline=None)
@given(tree_traces())
def test_a_pool_for_all_blocks_is_infinite(requests: list[Prompt]) -> None:
    distinct = distinct_blocks(requests)
    assert lru_hits(requests, max(1, distinct)) == infinite_hits(requests)
    assert infinite_hits(requests).computed == distinct


def test_they_agree_on_a_made_trace(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    write_synthetic_trace(path, SyntheticTraceSpec(requests=60, seed=3))
    requests = list(read_trace(path))
    for percent in (2, 10, 50):
        capacity = pool_capacity(distinct_blocks(requests), percent)
        counts = lru_hits(requests, capacity)
        assert counts.evictions > 0
        assert counts == lru_hits_naive(requests, capacity)


def test_a_pool_is_never_empty() -> None:
    assert pool_capacity(49, 2) == 1
    assert pool_capacity(170_899, 2) == 3417
    assert pool_capacity(170_899, 50) == 85_449


def test_it_runs_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    write_synthetic_trace(path, SyntheticTraceSpec(requests=20))
    command = [sys.executable, "-m", "tests.oracle", str(path), "--percent", "10"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith("20 requests, ")
    assert [line.split()[0] for line in lines[2:]] == ["10", "infinite"]
