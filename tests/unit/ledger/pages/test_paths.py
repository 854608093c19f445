"""Paths whose rows lie anywhere: as their parents say, and not read row by row."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from cachesvc.ledger import block_index
from cachesvc.ledger.block_index import BlockIndex
from cachesvc.ledger.change_log import NO_ROW

LONG = 65_536


class ReadRows(array):  # type: ignore[type-arg]
    """A column that counts reads of single rows."""

    reads = 0

    def __getitem__(self, row):  # type: ignore[no-untyped-def]
        self.reads += 1
        return super().__getitem__(row)


def test_a_long_path_whose_rows_lie_anywhere_is_read_in_a_few_looks() -> None:
    """Rows come back in the order of evictions; a Match of a prompt on the host read each row of its path."""
    order = np.random.default_rng(3).permutation(LONG).astype(np.int32)
    index = BlockIndex()
    index.parent, index.depth, index.head = ReadRows("i", bytes(4 * LONG)), array("I", bytes(4 * LONG)), array("I")
    np.frombuffer(index.parent, np.int32)[order] = [NO_ROW, *order[:-1]]
    np.frombuffer(index.depth, np.uint32)[order] = np.arange(LONG)
    index.head.extend([int(order[0])] * LONG)
    assert np.array_equal(index.path(int(order[-1])), order)
    assert index.parent.reads < 4 * block_index.SHORT_RUNS
    assert np.array_equal(index.last_rows(int(order[-1]), LONG - 5), order[5:])


def test_paths_through_chains_of_which_parts_were_forgotten_are_what_their_parents_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_index, "RUN_ROWS", 4)
    monkeypatch.setattr(block_index, "SHORT_RUNS", 1)
    rng, index, leaves = np.random.default_rng(4), BlockIndex(), list[int]()
    tips, serial = [NO_ROW], iter(range(1 << 30))
    for _ in range(300):
        tip = tips[rng.integers(len(tips))]
        if tip in leaves and rng.random() < 0.4:
            tips.remove(tip)
            leaves.remove(tip)
            above = index.parent[tip]
            index.remove(tip)
            if above != NO_ROW and not index.children[above]:
                leaves.append(above)
                tips.append(above)
        else:
            [rows] = index.insert_paths([(tip, [key(next(serial)) for _ in range(rng.integers(1, 9))])], 1, {})
            leaves[:] = [*(each for each in leaves if each != tip), rows[-1]]
            tips += rows[-1:] if rows[-1] not in tips else []
        for leaf in leaves[-3:]:
            plain = by_parents(index, leaf)
            assert list(index.path(leaf)) == plain
            count = int(rng.integers(len(plain) + 1))
            assert list(index.last_rows(leaf, count)) == plain[len(plain) - count :]


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def by_parents(index: BlockIndex, row: int) -> list[int]:
    rows: list[int] = []
    while row != NO_ROW:
        rows.append(row)
        row = index.parent[row]
    return rows[::-1]
