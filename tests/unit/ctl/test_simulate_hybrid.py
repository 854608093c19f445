"""Simulations of hybrid models: states and windows in the pools of blocks, against simple rules and by hand."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from cachesvc_lab.grid import (
    ENDS,
    EVERY,
    HYBRID_MODELS,
    NO_COPIES,
    Cell,
    Copies,
    HybridRejected,
    hybrid_grid,
    hybrid_model,
    hybrid_table,
    optimal_hits,
    reference_hits,
    rows_table,
    run_cell,
)
from cachesvc_lab.traces import Prompts, SyntheticTraceSpec, TraceRequest, prompts_of, read_trace, write_synthetic_trace

from cachesvc.simulation import Copies as SimulatedCopies
from cachesvc.simulation import SimulatedPools, Simulation
from tests.conservation import audit

QWEN = Copies(state_pages=3, state_blocks=3, window_pages=0, window_blocks=1)
GEMMA = Copies(state_pages=0, state_blocks=1, window_pages=2, window_blocks=2)


def columns(*paths: tuple[int, ...]) -> Prompts:
    """Prompts a second apart, of blocks of one token."""
    return prompts_of("t", (TraceRequest(i, i * 1000, len(path), 1, path) for i, path in enumerate(paths)), 1)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    write_synthetic_trace(path, SyntheticTraceSpec(requests=250, seed=5))
    return prompts_of(path.name, read_trace(path), 512)


def served(prompts: Prompts, policy: str, blocks: int, copies: Copies) -> tuple[list[int], Simulation]:
    """Hits of each prompt, and the simulation after them."""
    pools = SimulatedPools(policy, "write_back", blocks, 0, copies=SimulatedCopies(*copies))
    simulation = Simulation(pools, prompts.block_tokens)
    hits = [simulation.serve(prompts.keys(n), now).device for n, now in enumerate(prompts.seconds.tolist())]
    return hits, simulation


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_a_hit_ends_where_there_is_a_state(policy: str) -> None:
    a, b = tuple(range(10)), (0, 1, 2, 3, 4, 50, 51, 52)
    hits, _ = served(columns(a, (*a, 10, 11), a, b, a[:5]), policy, 100, QWEN)
    assert hits == [0, 9, 9, 3, 3]


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_a_hit_needs_its_window_alone(policy: str) -> None:
    a = tuple(range(10))
    hits, _ = served(columns(a, (*a, 10, 11), a, (0, 1, 2, 3, 50)), policy, 200, GEMMA)
    assert hits[:3] == [0, 10, 10]


@pytest.mark.parametrize("policy", ["lru", "hazard", "lfu", "deepest_first"])
@pytest.mark.parametrize("copies", [QWEN, GEMMA])
def test_what_is_simulated_adds_up(chats: Prompts, policy: str, copies: Copies) -> None:
    hits, simulation = served(chats, policy, chats.distinct_blocks // 5, copies)
    assert sum(hits)
    assert audit(simulation.ledger).problems == []


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_middles_go_and_ends_stay(policy: str) -> None:
    """Six lines of requests take turns, each with 30 new blocks. There is room for all blocks and a few states: the
    ends of all lines are kept, where a state at every position drives out the line that is next."""
    turns = [tuple(range(1000 * line, 1000 * line + 30 * turn)) for turn in range(1, 7) for line in range(6)]
    prompts, blocks = columns(*turns), 6 * 180 * 11 // 10
    hits, simulation = served(prompts, policy, blocks, QWEN)
    assert hits == [len(path) - 30 for path in turns]
    assert reference_hits(prompts, blocks, QWEN, keeps_every=True)[-3:] == [150, 135, 0]
    assert audit(simulation.ledger).problems == []


GROUPS, MEMBERS, TURNS, NEW = 6, 6, 4, 10
"""Conversations that take turns, a group after another; each turn has as many new blocks."""


@pytest.fixture(scope="module")
def groups() -> Prompts:
    turns = product(range(GROUPS), range(1, TURNS + 1), range(MEMBERS))
    return columns(*(tuple(range(1000 * (8 * g + m), 1000 * (8 * g + m) + NEW * t)) for g, t, m in turns))


def hits_of_groups(prompts: Prompts, policy: str, writes: str, host: int, copies: Copies) -> list[float]:
    """Share of the known blocks that each group hits, on a device for three conversations and a host for nine."""
    simulation = Simulation(SimulatedPools(policy, writes, 160, host, copies=SimulatedCopies(*copies)), 1)
    hits = [sum(simulation.serve(prompts.keys(n), now)) for n, now in enumerate(prompts.seconds.tolist())]
    assert audit(simulation.ledger).problems == []
    known = MEMBERS * NEW * sum(range(TURNS))
    each = len(hits) // GROUPS
    return [sum(hits[first : first + each]) / known for first in range(0, len(hits), each)]


@pytest.mark.parametrize(("policy", "writes"), [("hazard", "write_through"), ("lru", "write_back")])
@pytest.mark.parametrize(
    ("copies", "host"),
    [(Copies(1, 5, 0, 1), 450), (Copies(0, 1, 1, 2), 378), (Copies(2, 5, 0, 1), 540), (Copies(0, 1, 3, 2), 450)],
)
def test_the_host_turns_over_with_all_parts_of_its_prompts(
    groups: Prompts, policy: str, writes: str, copies: Copies, host: int
) -> None:
    """Blocks without the windows or states behind which prompts go on are no hits: what is new has to come with them,
    and what is old has to go with them."""
    alone = hits_of_groups(groups, policy, writes, 360, NO_COPIES)
    found = hits_of_groups(groups, policy, writes, host, copies)
    assert alone == [1.0] * GROUPS
    assert min(found) >= 0.95, found
    most = sum(optimal_hits(groups, 160, 360)) / MEMBERS / NEW / sum(range(TURNS))
    assert sum(found) <= most


@pytest.mark.parametrize("copies", [Copies(1, 5, 0, 1), Copies(0, 1, 1, 2)])
def test_selective_writes_bring_the_end_of_the_hit_along(groups: Prompts, copies: Copies) -> None:
    """The blocks that are due have no state or window of their own: those of the hit are behind them."""
    beside = hits_of_groups(groups, "lru", "write_through_selective", 900, copies)
    assert min(beside[1:]) > max(hits_of_groups(groups, "lru", "write_through_selective", 0, copies)[1:])


def test_a_grid_has_a_host_below_the_device(groups: Prompts) -> None:
    copies = Copies(1, 5, 0, 1)
    cells = hybrid_grid(("lru",), (160,), copies, (0, 450), ("write_through",))
    rows = {(cell.host_blocks, cell.policy, cell.copies): run_cell(groups, cell) for cell in cells}
    row = rows[450, "lru", copies]
    assert row.host_hits > 0.3 * row.blocks
    assert row.hit_ratio > rows[0, "lru", copies].hit_ratio + 0.3
    assert row.hit_ratio == rows[450, "lru", NO_COPIES].hit_ratio
    assert rows[450, ENDS, copies].host_hits > 0
    table = rows_table(list(rows.values()), 0, "own")
    assert "accesses of own" in table
    assert [line.split()[:4] for line in table.splitlines()[-2:]] == [
        ["160", "450", "write_through", "lru"],
        ["160", "450", "write_through", "lru,"],
    ]


def test_the_rules_count_as_by_hand() -> None:
    a, b = tuple(range(9)), (0, 1, 2, 3, 50, 51)
    prompts = columns(a, b, b, a)
    assert reference_hits(prompts, 100, QWEN, keeps_every=True) == [0, 3, 6, 9]
    assert reference_hits(prompts, 100, QWEN, keeps_every=False) == [0, 0, 6, 9]
    assert reference_hits(prompts, 100, GEMMA, keeps_every=False) == [0, 0, 6, 9]
    assert reference_hits(prompts, 12, QWEN, keeps_every=True) == [0, 3, 6, 3]


def test_without_copies_a_cell_counts_as_ever(chats: Prompts) -> None:
    blocks = chats.distinct_blocks // 10
    cells = hybrid_grid(("lru",), (blocks,), QWEN)
    assert [(cell.policy, cell.copies) for cell in cells] == [
        (EVERY, QWEN),
        (ENDS, QWEN),
        ("lru", QWEN),
        ("lru", NO_COPIES),
    ]
    assert run_cell(chats, cells[-1]).hit_ratio == run_cell(chats, Cell("lru", "write_back", blocks, 0)).hit_ratio


def test_the_table_has_a_column_for_each_rule_and_policy() -> None:
    prompts = columns((0, 1, 2), (0, 1, 2, 3))
    rows = [run_cell(prompts, cell) for cell in hybrid_grid(("lru",), (40,), QWEN)]
    head, line = hybrid_table(rows, "qwen3-next", 0).splitlines()[-2:]
    assert head.split() == ["device", *EVERY.split(), *ENDS.split(), "lru", "lru,", "KV", "alone"]
    assert line.split() == ["40", "42.86%", "42.86%", "42.86%", "42.86%"]


def test_the_models_take_as_many_pages_as_their_bytes() -> None:
    assert HYBRID_MODELS["qwen3-next"].copies(512) == QWEN
    assert HYBRID_MODELS["gemma-3"].copies(512) == Copies(0, 1, 6, 2)


def test_a_model_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"kv_bytes": 1024, "state_bytes": 1 << 20, "state_tokens": 1024}))
    assert hybrid_model(str(path)).copies(512) == Copies(2, 2, 0, 1)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("[]", "one object"),
        ("{", "no JSON"),
        ('{"kv_bytes": 1, "more": 2}', "one object"),
        ('{"kv_bytes": -1}', "whole number"),
        ('{"kv_bytes": 1}', "above 0"),
        ('{"kv_bytes": 1, "state_bytes": 2}', "state_tokens"),
        ('{"kv_bytes": 1, "window_bytes": 2}', "window_tokens"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, said: str, reason: str) -> None:
    path = tmp_path / "own.json"
    path.write_text(said)
    with pytest.raises(HybridRejected, match=reason):
        hybrid_model(str(path))


def test_unknown_models_and_states_that_are_too_large_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HybridRejected, match="qwen3-next"):
        hybrid_model("qwen")
    with pytest.raises(HybridRejected, match="cannot read"):
        hybrid_model(str(tmp_path / "none.json"))
    with pytest.raises(HybridRejected, match="larger blocks"):
        HYBRID_MODELS["qwen3-next"].copies(16)
