"""Fetches of one prompt that another node computes, which run at the same time, each behind the one before."""

from __future__ import annotations

import pytest

from cachesvc.flows import expected as flow
from cachesvc.model.words import KEY_BYTES, PageState
from tests.unit.flows.storage.following import Following
from tests.unit.rigs.storage_flows_rig import GONE, LENT


def fetched(following: Following) -> list[int]:
    """Blocks of each fetch."""
    return [len(each.keys) // KEY_BYTES for each in following.storage.fetches]


def test_what_is_lent_while_a_fetch_runs_is_fetched_beside_it() -> None:
    following = Following()
    following.look()
    for lent in (3, 2, 1, 1):
        following.promise(lent, 2)
    assert fetched(following) == [3, 2, 1]
    assert len(following.lenders.asked) == 4, "one loan ahead is enough"
    following.at.tell(range(2), LENT, fetch=1)
    following.at.tell(range(1), LENT, fetch=2)
    assert following.look() == (0, 8), "they come under what is not there yet"
    following.at.tell(range(3), LENT, fetch=0)
    assert following.look() == (6, 2)
    assert fetched(following) == [3, 2, 1, 1]
    following.at.tell(range(1), LENT)
    following.promise(1)
    following.at.tell(range(1), LENT)
    assert following.look() == (8, 0)
    assert following.rig.core.counters["expected_blocks"] == 8
    assert not following.rig.model.stored.fetches
    assert not following.rig.core.ledger.tickets.running


def test_where_many_fetches_run_each_prompt_has_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "MOST_BESIDE", 1)
    following = Following()
    following.look()
    following.promise(3, 5)
    following.promise(2, 3)
    assert fetched(following) == [3]
    following.at.tell(range(3), LENT)
    assert fetched(following) == [3, 2]


@pytest.mark.parametrize("is_last_first", [False, True])
def test_a_fetch_that_brings_less_leaves_what_was_lent_behind_it(is_last_first: bool) -> None:
    following = Following()
    following.look()
    following.promise(3, 5)
    following.promise(5)
    for fetch in (1, 0) if is_last_first else (0, 1):
        if fetch:
            following.at.tell(range(5), LENT, fetch=1)
        else:
            following.at.tell([0], LENT, fetch=0)
            following.at.tell([1, 2], GONE, fetch=0)
    assert following.lenders.asked[-1] == (7, flow.POLL_SECONDS), "it is asked for again, from the gap on"
    assert following.at.pages(PageState.IN_FLIGHT) == following.at.pages(PageState.QUARANTINED) == 0
    following.promise(7)
    following.at.tell(range(7), LENT)
    assert following.look() == (8, 0)


def test_a_fetch_that_fails_fails_those_behind_it_once() -> None:
    following = Following()
    following.look()
    for lent in (3, 2, 3):
        following.promise(lent, 3)
    following.at.tell(range(3), GONE, fetch=0)
    following.pass_time(flow.FAILED_PAUSE_SECONDS)
    assert following.look() == (0, 8), "one failure is not the end"
    assert following.at.pages(PageState.QUARANTINED) == 5, "bytes of the others may still come"
    following.at.tell(range(2), LENT, fetch=1)
    following.at.tell(range(3), LENT, fetch=2)
    assert following.at.pages(PageState.QUARANTINED) == 0
    following.promise(8)
    following.at.tell(range(8), LENT)
    assert following.look() == (8, 0)
