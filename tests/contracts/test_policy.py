"""Every eviction rule, and the write rules: pure, named, and what the eviction heap relies on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.model.errors import InvalidRequest
from cachesvc.model.words import WritePolicy
from cachesvc.policy.eviction import EVICTION_POLICIES, WriteRule, eviction_policy

RANKED = [name for name, policy in EVICTION_POLICIES.items() if not policy.learns]
NUMBERS = st.integers(0, 1 << 31)


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
@given(stamp=NUMBERS, hits=NUMBERS, depth=NUMBERS, later=st.integers(1, 100), more=st.integers(0, 100))
def test_a_rank_only_rises_with_use(name: str, stamp: int, hits: int, depth: int, later: int, more: int) -> None:
    """The heap is kept lazily: an entry of a block that was used since must come up too early, never too late."""
    rule = eviction_policy(name).rank
    assert rule(stamp, hits, depth) == rule(stamp, hits, depth)
    assert rule(stamp + later, hits + more, depth) > rule(stamp, hits, depth)


def test_an_unknown_rule_is_refused_with_the_names() -> None:
    with pytest.raises(InvalidRequest, match="deepest_first, hazard, hazard_cost, lfu, lru"):
        eviction_policy("random")


def test_orders() -> None:
    blocks = {"old": (1, 9, 3), "young": (5, 1, 2), "deep": (3, 2, 9)}
    first = {name: min(blocks, key=lambda block: eviction_policy(name).rank(*blocks[block])) for name in RANKED}
    assert first == {"lru": "old", "lfu": "young", "deepest_first": "deep"}


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_each_policy_copies_at_one_moment(policy: WritePolicy) -> None:
    rule = WriteRule(policy, threshold=2)
    moments = (rule.copies_when_sealed, rule.counts_reuse, rule.copies_when_evicted)
    assert sum(moments) == 1
    assert [rule.is_due(reuses) for reuses in (0, 1, 2, 3)] == [False, False, *[rule.counts_reuse] * 2]


def test_a_threshold_below_one_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        WriteRule(WritePolicy.WRITE_THROUGH_SELECTIVE, threshold=0)
