"""Simulations: the ledger and the policy alone count as the oracles do, and the optimum is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from cachesvc_lab.grid import (
    OPTIMUM,
    Cell,
    SimulationFailed,
    check_names,
    compute_saved,
    grid,
    optimal_hits,
    retentions,
    run_cell,
    run_grid,
)
from cachesvc_lab.traces import Prompts, SyntheticTraceSpec, TraceRequest, prompts_of, read_trace, write_synthetic_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.model.errors import InvalidRequest
from cachesvc.simulation import EVICTIONS, WRITE_POLICIES, SimulatedPools, Simulation
from tests.conservation import audit
from tests.oracle import best_hits_naive, distinct_blocks, infinite_hits, lru_hits, pool_capacity
from tests.unit.tools.test_oracle import Prompt, tree_traces


def columns(paths: Sequence[Prompt], name: str = "t") -> Prompts:
    """Prompts a second apart."""
    requests = (TraceRequest(i, i * 1000, len(p.block_ids), 1, p.block_ids) for i, p in enumerate(paths))
    return prompts_of(name, requests, 1)


@dataclass(frozen=True)
class Chats:
    """A synthetic trace as requests and as columns."""

    requests: list[TraceRequest]
    prompts: Prompts

    def blocks(self, percent: float) -> int:
        return pool_capacity(distinct_blocks(self.requests), percent)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Chats:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    write_synthetic_trace(path, SyntheticTraceSpec(requests=300, seed=11))
    requests = list(read_trace(path))
    return Chats(requests, prompts_of(path.name, requests, 512))


@pytest.mark.parametrize("percent", [1, 2, 5, 10, 20, 50, 100])
def test_lru_counts_as_the_oracle_does_to_the_block(chats: Chats, percent: int) -> None:
    device = chats.blocks(percent)
    row = run_cell(chats.prompts, Cell("lru", "write_back", device, 0))
    counts = lru_hits(chats.requests, device)
    assert (row.requests, row.blocks, row.device_hits, row.host_hits) == (
        counts.requests,
        counts.blocks,
        counts.hits,
        0,
    )


@settings(deadline=None, max_examples=200)
@given(tree_traces(), st.integers(1, 15))
def test_lru_counts_as_the_oracle_does_on_any_tree(paths: list[Prompt], capacity: int) -> None:
    row = run_cell(columns(paths), Cell("lru", "write_back", capacity, 0))
    assert row.device_hits == lru_hits(paths, capacity).hits


@settings(deadline=None, max_examples=200)
@given(tree_traces().map(lambda paths: paths[:9]), st.integers(1, 5))
def test_nothing_hits_more_than_the_optimum_and_something_hits_as_much(paths: list[Prompt], capacity: int) -> None:
    assert sum(optimal_hits(columns(paths), capacity)) == best_hits_naive(paths, capacity)


@pytest.mark.parametrize("writes", WRITE_POLICIES)
def test_a_host_adds_hits_and_the_optimum_bounds_them(chats: Chats, writes: str) -> None:
    device, host = chats.blocks(5), chats.blocks(30)
    alone = run_cell(chats.prompts, Cell("lru", writes, device, 0))
    both = run_cell(chats.prompts, Cell("lru", writes, device, host))
    best = run_cell(chats.prompts, Cell(OPTIMUM, writes, device, host))
    assert alone.device_hits == both.device_hits
    assert both.host_hits > 0
    assert both.device_hits <= best.device_hits
    assert both.device_hits + both.host_hits <= best.device_hits + best.host_hits <= infinite_hits(chats.requests).hits


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_what_is_simulated_adds_up(chats: Chats, eviction: str) -> None:
    simulation = Simulation(SimulatedPools(eviction, "write_back", chats.blocks(5), chats.blocks(20)), 512)
    for number, now in enumerate(chats.prompts.seconds.tolist()):
        simulation.serve(chats.prompts.keys(number), now)
        if number % 50 == 0:
            assert audit(simulation.ledger).problems == []
    assert audit(simulation.ledger).problems == []


def test_a_prompt_longer_than_the_device_is_cut_also_where_the_host_has_more_of_it() -> None:
    simulation = Simulation(SimulatedPools("lru", "write_through", 3, 9), 512)
    prompts = columns([Prompt((1, 2, 3, 4, 5)), Prompt((7, 8)), Prompt((1, 2, 3, 4, 5))])
    hits = [simulation.serve(prompts.keys(number), float(number)) for number in range(3)]
    assert [tuple(each) for each in hits] == [(0, 0, 0), (0, 0, 0), (1, 2, 0)]


def test_a_grid_has_every_combination_and_runs_what_can_differ_once(chats: Chats) -> None:
    cells = grid(["lru", OPTIMUM], WRITE_POLICIES, [chats.blocks(5)], [0, chats.blocks(20)])
    told: list[tuple[int, int]] = []
    rows = run_grid(chats.prompts, cells, 1, lambda done, runs: told.append((done, runs)))
    assert [row.cell for row in rows] == cells
    assert len(set(cells)) == 2 * 3 * 1 * 2
    assert told[-1] == (6, 6)  # two optima, LRU without a host, LRU with one by three ways to write
    assert {row.hit_ratio for row in rows if not row.cell.host_blocks and row.cell.policy == "lru"} == {
        rows[0].hit_ratio
    }


def test_several_processes_find_the_same(chats: Chats) -> None:
    cells = grid(["lru", OPTIMUM], ["write_back"], [chats.blocks(2), chats.blocks(10)], [0])
    alone, together = (run_grid(chats.prompts, cells, processes, lambda *_: None) for processes in (1, 2))
    assert [(row.cell, row.device_hits) for row in alone] == [(row.cell, row.device_hits) for row in together]


def test_a_name_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(SimulationFailed, match=r"--policies: there is no 'mru'; choose among .*lfu.*lru.*opt"):
        check_names(["lru", "mru"], ["write_back"])
    for name in ("lru+wild", "opt+truthful"):
        with pytest.raises(SimulationFailed, match="there is no"):
            check_names([name], ["write_back"])
    with pytest.raises(SimulationFailed, match=r"--write-policies: there is no 'never'; .*write_through"):
        check_names([OPTIMUM], ["never"])
    with pytest.raises(InvalidRequest):
        Simulation(SimulatedPools("mru", "write_back", 1, 0), 512)
    with pytest.raises(ValueError, match="no pools of 0"):
        Simulation(SimulatedPools("lru", "write_back", 0, 0), 512)


def test_time_does_not_go_back_and_empty_prompts_count() -> None:
    requests = [TraceRequest(0, 5000, 1, 1, (4,)), TraceRequest(1, 3000, 0, 1, ()), TraceRequest(2, 9000, 1, 1, (4,))]
    prompts = prompts_of("t", requests, 1)
    assert prompts.seconds.tolist() == [5.0, 5.0, 9.0]
    row = run_cell(prompts, Cell("lru", "write_back", 1, 0))
    assert (row.requests, row.blocks, row.device_hits) == (3, 2, 1)


def test_compute_saved_counts_attention() -> None:
    """A block behind 30,500 tokens costs twice as much as the first: half of a long prompt is less than half."""
    short = [Prompt((1, 2))] * 2
    requests = [TraceRequest(i, i * 1000, 1, 1, p.block_ids) for i, p in enumerate(short)]
    assert compute_saved(prompts_of("t", requests, 1), [0, 1]) == pytest.approx(0.25, rel=1e-3)
    assert compute_saved(prompts_of("t", requests, 30_500), [0, 1]) == pytest.approx(1.5 / (2 * 4))
    assert compute_saved(prompts_of("t", [], 1), []) == 0.0
    row = run_cell(columns(short), Cell("lru", "write_back", 2, 0))
    assert row.compute_saved == pytest.approx(0.5)


@pytest.mark.parametrize("eviction", ["lru", "hazard"])
def test_a_disk_adds_hits_and_what_is_simulated_adds_up(chats: Chats, eviction: str) -> None:
    device, host, disk = chats.blocks(2), chats.blocks(5), chats.blocks(40)
    two = run_cell(chats.prompts, Cell(eviction, "write_back", device, host))
    three = run_cell(chats.prompts, Cell(eviction, "write_back", device, host, disk))
    best = run_cell(chats.prompts, Cell(OPTIMUM, "write_back", device, host, disk))
    assert two.disk_hits == 0
    assert three.disk_hits > 0
    assert two.hit_ratio < three.hit_ratio <= best.hit_ratio
    simulation = Simulation(SimulatedPools(eviction, "write_back", device, host, disk), 512)
    for number, now in enumerate(chats.prompts.seconds.tolist()):
        simulation.serve(chats.prompts.keys(number), now)
        if number % 50 == 0:
            assert audit(simulation.ledger).problems == []


def test_after_a_restart_only_the_disk_is_left_and_it_has_what_was_used_again(chats: Chats) -> None:
    pools = SimulatedPools("lru", "write_back", chats.blocks(20), chats.blocks(20), chats.blocks(100))
    simulation = Simulation(pools, 512)
    keys = chats.prompts.keys(0)
    for _ in range(2):
        simulation.serve(keys, 0.0)
    again = simulation.restarted()
    assert again.serve(keys, 1.0) == (0, 0, len(keys) // 32)
    without = Simulation(pools._replace(disk_blocks=0), 512)
    without.serve(keys, 0.0)
    assert without.restarted().serve(keys, 1.0) == (0, 0, 0)


def test_restarts_cost_few_hits_where_a_disk_is_there(chats: Chats) -> None:
    cell = Cell("lru", "write_back", chats.blocks(2), chats.blocks(10), chats.blocks(60))
    alone = run_cell(chats.prompts, cell)
    restarted = run_cell(chats.prompts, cell._replace(restart_every=50))
    assert restarted.disk_hits >= 0.9 * alone.disk_hits
    assert restarted.hit_ratio >= 0.9 * alone.hit_ratio


def test_truthful_hints_bring_hits_and_false_ones_cost_their_own(chats: Chats) -> None:
    check_names(["lru", "lru+truthful", "hazard+lying"], ["write_back"])
    none, truthful, lying = (
        run_cell(chats.prompts, Cell(policy, "write_back", chats.blocks(5), 0)).device_hits
        for policy in ("lru", "lru+truthful", "lru+lying")
    )
    assert max(none, lying) < truthful


def test_a_hint_says_whether_a_later_prompt_goes_through_a_prompts_end() -> None:
    prompts = columns([Prompt((1, 2)), Prompt((3,)), Prompt((1, 2, 4)), Prompt(())])
    assert retentions(prompts, "truthful") == [2, 1, 1, 0]
    assert retentions(prompts, "lying") == [1, 2, 2, 0]
    assert retentions(prompts, "") == [0] * 4
