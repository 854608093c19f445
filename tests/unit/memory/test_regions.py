"""Copies by address: what lies inside of its regions, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cachesvc.memory.interface import COPY_FIELDS
from cachesvc.memory.memcpy import CopyOutOfBounds, Region, Regions
from tests.sim.stepped_memory import check_bounds

SIZES = {1: 1000, 2: 400, 4: 1000}
HUGE = (1 << 40, 1 << 62, -1)


def number(most: int) -> st.SearchStrategy[int]:
    return st.one_of(st.integers(0, most), st.integers(0, most), st.sampled_from(HUGE))


COPIES = st.lists(
    st.tuples(
        st.sampled_from((1, 1, 2, 3, 4)),
        number(900),
        st.sampled_from((1, 2, 4, 4, 9)),
        number(900),
        number(50),
        number(5),
        number(100),
        number(100),
    ),
    max_size=4,
)


@settings(deadline=None, max_examples=400)
@given(rows=COPIES)
@example(rows=[(3, 1 << 62, 9, 1 << 62, 1 << 62, 1, 0, 0)])  # the sum of both passes 64 bits
def test_copies_are_addressed_where_every_one_is_inside(rows: list[tuple[int, ...]]) -> None:
    copies = np.array(rows, np.int64).reshape(-1, len(COPY_FIELDS))
    regions = Regions({region: Region(region << 20, size) for region, size in SIZES.items()})
    try:
        check_bounds(copies, SIZES)
    except CopyOutOfBounds as outside:
        with pytest.raises(CopyOutOfBounds, match=str(outside.region_bytes)):
            regions.addressed(copies)
        return
    expected = [((src << 20) + at, (dst << 20) + to, *shape) for src, at, dst, to, *shape in rows]
    assert regions.addressed(copies).tolist() == [list(each) for each in expected]
