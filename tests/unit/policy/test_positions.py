"""Positions: what they learn of where requests continue, and what copies there are worth."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cachesvc.policy.hazard_rates import BINS, FIRST_FIT
from cachesvc.policy.positions import REMEMBERED, PositionKind, Positions, branch_worth, copy_worth, fallback

DEPTH = 30


def learned(positions: Positions, now: float) -> None:
    """Count requests until a lesson is due, and learn it."""
    while (lesson := positions.lesson()) is None:
        positions.request(now)
    while not lesson():
        """A step at a time."""


def density(positions: Positions, row: int, age: float) -> float:
    return positions.density(positions.classes[row], age)


def filled(rows: int) -> Positions:
    positions = Positions()
    positions.grow(rows)
    for row in range(rows):
        positions.opened(row, DEPTH, 0.0)
    return positions


def test_a_position_begins_in_a_middle_and_tells_what_has_happened_there() -> None:
    positions = filled(5)
    assert [positions.kind(row) for row in range(5)] == [PositionKind.MIDDLE] * 5
    positions.ended(0, DEPTH, 1.0)
    positions.continued(1, DEPTH, 1.0, goes_on=True)
    positions.continued(2, DEPTH, 1.0, goes_on=False)
    assert [positions.kind(row) for row in range(3)] == [PositionKind.END, PositionKind.BRANCH, PositionKind.MIDDLE]
    positions.continued(0, DEPTH, 2.0, goes_on=True)
    assert positions.kind(0) is PositionKind.PASSED
    positions.ended(0, DEPTH, 3.0)
    assert positions.kind(0) is PositionKind.END
    positions.left(4, b"key", 3.0)
    assert positions.kind(4) is None


def test_ends_where_requests_continue_are_worth_more_than_middles_where_none_does() -> None:
    positions = filled(200)
    for row in range(100):
        positions.ended(row, DEPTH, 0.0)
    for row in range(50):
        positions.continued(row, DEPTH, 20.0, goes_on=True)
    learned(positions, 40.0)
    end, middle = density(positions, 60, 10.0), density(positions, 150, 10.0)
    assert end > 100 * middle > 0
    assert density(positions, 60, 10.0) == positions.end_density(DEPTH, 10.0)


def test_an_age_that_no_position_has_reached_is_worth_ever_less() -> None:
    """Worth of unknown ages would else keep all middles: none of them has been seen to be useless there."""
    positions = filled(100)
    positions.ended(0, DEPTH, 0.0)
    positions.continued(0, DEPTH, 5.0, goes_on=True)
    learned(positions, 10.0)
    row = positions.rates.density[positions.classes[50]]
    assert (row[12 : BINS - 1] > row[13:]).all()


def test_nothing_is_worth_anything_before_the_first_lesson() -> None:
    positions = filled(1)
    assert density(positions, 0, 1.0) == 0.0
    assert positions.lesson() is None
    for _ in range(FIRST_FIT):
        positions.request(1.0)
    assert positions.lesson() is not None
    assert positions.lesson() is None, "one at a time"


def test_a_request_that_comes_too_late_is_learned_from_once() -> None:
    positions = filled(3)
    positions.ended(0, DEPTH, 0.0)
    positions.left(0, b"end", 10.0)
    positions.left(1, b"middle", 10.0)
    assert not positions.missed(b"middle", 20.0), "middles are not remembered"
    assert positions.missed(b"end", 20.0)
    assert not positions.missed(b"end", 20.0)


def test_positions_that_left_are_forgotten_when_there_are_too_many() -> None:
    positions = filled(1)
    for number in range(REMEMBERED + 1):
        positions.opened(0, DEPTH, 0.0)
        positions.ended(0, DEPTH, 0.0)
        positions.left(0, b"%d" % number, 1.0)
    assert not positions.missed(b"0", 2.0)
    assert positions.missed(b"1", 2.0)


@pytest.mark.parametrize("age", [0.0, 0.2, 3.0, 100.0, 1e6])
def test_parts_of_ages_cover_them(age: float) -> None:
    positions = filled(1)
    parts = list(positions.densities(positions.classes[0], age / 2, age))
    assert parts[0][0] <= age / 2
    assert parts[-1][1] > age
    assert all(before[1] == after[0] for before, after in pairwise(parts))


def test_worth_is_blocks_saved_a_second_for_each_block_of_memory() -> None:
    assert copy_worth(0.5, 12, 3.0) == 2.0
    assert branch_worth([(0.5, 12), (0.1, 6)], 3.3) == pytest.approx(2.0)
    assert fallback(100, 100, 3.0, 10_000) == pytest.approx(1 / 3)
