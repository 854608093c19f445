"""Arrays as columns, the rows that fly, and paths that are walked by runs, each against the plain way."""

from __future__ import annotations

from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.ledger.block_index import BlockIndex, FlyingRows
from cachesvc.ledger.change_log import NO_ROW
from cachesvc.model.numbers import among, array_of, column, distinct, union_of

NUMBERS = st.lists(st.integers(0, 40), max_size=60)


def test_an_array_can_grow_once_its_column_is_gone() -> None:
    numbers = array("i", [3, 1])
    assert column(numbers).tolist() == [3, 1]
    numbers.append(2)
    assert array_of(column(numbers)[1:]) == array("i", [1, 2])
    assert column(array("i")).tolist() == []


@given(NUMBERS, NUMBERS)
def test_sets_of_numbers(one: list[int], other: list[int]) -> None:
    a, b = array("i", one), array("i", other)
    assert distinct(column(a)).tolist() == sorted(set(one))
    assert among(column(a), column(b)).tolist() == [number in other for number in one]
    parts = [array("i", sorted(set(one))), array("i", sorted(set(other)))]
    assert sorted(union_of(parts).tolist()) == sorted({*one, *other})
    assert union_of([parts[0], parts[0], array("i")]).tolist() == sorted(set(one))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=80))
def test_rows_that_fly(moves: list[tuple[bool, int]]) -> None:
    flying, told = FlyingRows(), set()
    flying.grow(64)
    for is_bulk, row in moves:
        if row in told:
            flying.remove(row)
            told.discard(row)
        elif is_bulk:
            fresh = [each for each in (row, row + 31) if each not in told]
            flying.add_all(np.array(fresh, np.int32))
            told.update(fresh)
        else:
            flying.add(row)
            told.add(row)
        assert sorted(flying) == sorted(flying.column().tolist()) == sorted(told)
        assert len(flying) == len(told)


@given(
    st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(1, 90)), min_size=1, max_size=12), st.integers(0, 1 << 30)
)
def test_a_path_is_what_its_parents_say(branches: list[tuple[int, int]], until: int) -> None:
    index, tips = BlockIndex(), [NO_ROW]
    for number, (choice, length) in enumerate(branches):
        above = tips[choice % len(tips)]
        keys = [bytes([number, at]) + bytes(29) + bytes([at]) for at in range(length)]
        [rows] = index.insert_paths([(above, keys)], 1, {})
        tips += rows
    tip = tips[-1]
    plain: list[int] = []
    row = tip
    while row != NO_ROW:
        plain.insert(0, row)
        row = index.parent[row]
    assert list(index.path(tip)) == plain
    cut = until % (len(plain) + 1)
    assert list(index.path(tip, plain[cut - 1] if cut else NO_ROW)) == plain[cut:]
    assert list(index.last_rows(tip, cut)) == plain[len(plain) - cut :]
    assert list(index.last_rows(tip, len(plain) + 5)) == plain
