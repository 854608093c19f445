"""Leases and models without quotas: no tenant takes all, and a late tenant gets in."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.model.numbers import Rounds, most_of


@pytest.mark.parametrize(
    ("held", "most"),
    [
        ({}, 768),
        ({"a": 700}, 768),
        ({"b": 0}, 768),
        ({"b": 100}, 512),
        ({"b": 768}, 192),
        ({"b": 768, "c": 192}, 48),
        ({"b": 300, "c": 1}, 341),
        ({"b": 1024}, 1),
    ],
)
def test_what_a_tenant_may_hold(held: dict[str, int], most: int) -> None:
    assert most_of("a", Counter(held), 1024) == most


@given(st.lists(st.sampled_from("abcdef"), max_size=400), st.integers(64, 200))
def test_some_are_left_for_the_next_one(asked: list[str], limit: int) -> None:
    """Whatever tenants ask for in whatever order: three of them cannot take all."""
    held: Counter[str] = Counter()
    for tenant in asked[:limit]:
        if held[tenant] < most_of(tenant, held, limit) and held.total() < limit:
            held[tenant] += 1
    tenants = len(+held)
    assert held.total() < limit or tenants > 3
    assert most_of("new", held, limit) >= 1


def test_each_party_has_one_item_before_any_has_two() -> None:
    rounds: Rounds[str, str] = Rounds()
    for item in ("a0", "a1", "a2", "b0", "b1", "c0"):
        rounds.add(item[0], item)
    rounds.add_first("d", "d0")
    assert (len(rounds), sorted(rounds)) == (7, ["a0", "a1", "a2", "b0", "b1", "c0", "d0"])
    assert [rounds.take() for _ in range(7)] == ["d0", "a0", "b0", "c0", "a1", "b1", "a2"]
    assert not rounds
