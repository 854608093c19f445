"""The stock gives pages of every group or none, oldest first, and loses nothing."""

from __future__ import annotations

import pytest
from cachesvc_client.core.errors import InvalidRequest, PoolExhausted, StockEmpty
from cachesvc_client.layouts.families import gqa_windowed
from cachesvc_client.records.entries import Stock, stock_targets

from cachesvc.model.answers import GroupCells

BOTH = gqa_windowed(window_layers=[False, True], kv_heads=1, head_dim=4, block_tokens=4, window_tokens=9)
ALONE = gqa_windowed(window_layers=[True, True], kv_heads=1, head_dim=4, block_tokens=4, window_tokens=9)


def filled() -> Stock:
    stock = Stock([4, 2])
    stock.add([GroupCells(0, 0, (10, 11, 12), (1, 1, 2)), GroupCells(1, 0, (5,), (3,))])
    return stock


def test_a_block_takes_one_page_of_each_group_with_its_generation() -> None:
    stock = filled()
    assert stock.take(1, 7) == (GroupCells(0, 7, (10,), (1,)), GroupCells(1, 7, (5,), (3,)))
    assert stock.pages == (2, 0)


def test_where_one_group_is_short_nothing_is_taken_and_the_error_has_the_numbers() -> None:
    stock = filled()
    with pytest.raises(StockEmpty, match=r"wanted 2 blocks.*\[3, 1\].*\[4, 2\]") as caught:
        stock.take(2, 0)
    assert isinstance(caught.value, PoolExhausted)
    assert stock.pages == (3, 1)


def test_what_comes_back_is_taken_again_and_draining_leaves_nothing() -> None:
    stock = filled()
    stock.add(stock.take(1, 3))
    assert stock.pages == (3, 1)
    assert stock.drain() == (GroupCells(0, 0, (11, 12, 10), (1, 2, 1)), GroupCells(1, 0, (5,), (3,)))
    assert stock.pages == (0, 0)
    assert stock.blocks == 0
    assert stock.drain() == ()


def test_a_lower_target_leaves_a_surplus_that_goes_back() -> None:
    stock = filled()
    assert not stock.has_surplus
    stock.aim([1, 2])
    assert (stock.has_surplus, stock.is_full) == (True, False)
    assert stock.take_surplus() == (GroupCells(0, 0, (11, 12), (1, 2)),)
    assert (stock.pages, stock.has_surplus) == ((1, 1), False)
    with pytest.raises(InvalidRequest, match="2 groups"):
        stock.aim([1])


def test_targets_are_one_for_all_groups_or_one_for_each() -> None:
    assert stock_targets(3, BOTH) == [3, 3]
    assert stock_targets([1, 2], BOTH) == [1, 2]
    for given in (3, [3], [3, 3]):
        assert stock_targets(given, ALONE) == [3, 3], "the markers may be left out"
    with pytest.raises(InvalidRequest, match="each of 2 groups"):
        stock_targets([1], BOTH)
    with pytest.raises(InvalidRequest, match="negative"):
        Stock([-1])
    with pytest.raises(InvalidRequest, match="at least 1"):
        filled().take(0, 0)
