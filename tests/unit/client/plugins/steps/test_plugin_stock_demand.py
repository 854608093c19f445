"""The size of a stock follows what an engine is about to take, and goes back once it runs nothing."""

from __future__ import annotations

from cachesvc_client.plugins.grants import StockDemand, most_in_stock


def test_the_largest_stock_is_an_iteration_and_no_more_than_a_share_of_the_pool() -> None:
    assert most_in_stock(128, 64, 10_000, 0) == 192
    assert most_in_stock(128, 64, 3200, 0) == 100
    assert most_in_stock(128, 64, 10_000, 50) == 50


def test_what_waits_and_what_runs_are_covered_before_they_are_scheduled() -> None:
    demand = StockDemand(4, 200)
    assert demand.look(running=16, waiting_blocks=100) == 116
    assert demand.due == 116
    assert demand.look(running=64, waiting_blocks=1000) == 200, "never more than the largest"


def test_a_long_prompt_s_next_chunks_are_covered_by_what_the_last_ones_took() -> None:
    demand = StockDemand(4, 200)
    demand.look(running=0, waiting_blocks=128)
    demand.take(128)
    assert demand.look(running=1, waiting_blocks=0) >= 128


def test_the_target_does_not_go_to_and_fro() -> None:
    demand = StockDemand(4, 200)
    demand.look(running=100, waiting_blocks=0)
    assert demand.look(running=99, waiting_blocks=0) == 100
    assert demand.look(running=60, waiting_blocks=0) == 60


def test_an_engine_that_runs_nothing_keeps_its_base_and_has_nothing_evicted() -> None:
    demand = StockDemand(4, 200)
    demand.look(running=16, waiting_blocks=100)
    demand.rest()
    assert (demand.target, demand.due) == (4, 0)


def test_a_block_for_each_request_that_runs_is_the_least() -> None:
    demand = StockDemand(4, 50)
    assert demand.least(0) == 0
    assert demand.least(16) == 16
    assert demand.least(64) == 50, "a stock cannot have more"
