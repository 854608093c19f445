"""Numbers that callers of several tenants get: each once, and in no order that counts what was given out between."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest

from cachesvc.service.access.auth import MODEL_BITS, TICKET_BITS, unordered_numbers

FEW = 2000


@pytest.mark.parametrize("bits", [MODEL_BITS, TICKET_BITS])
def test_numbers_come_once_each_and_do_not_tell_how_many_came_between(bits: int) -> None:
    drawn = list(islice(unordered_numbers(bits), FEW))
    assert len(set(drawn)) == FEW
    assert 0 < min(drawn) < max(drawn) < 1 << bits
    rising = sum(one < other for one, other in pairwise(drawn))
    assert FEW // 3 < rising < FEW * 2 // 3, "as often up as down"
    assert drawn[:8] != list(islice(unordered_numbers(bits), 8)), "each daemon has its own order"


def test_all_numbers_of_few_bits_are_given_out() -> None:
    assert sorted(islice(unordered_numbers(8), 255)) == list(range(1, 256))
