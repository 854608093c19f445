"""Does each page have the state, and the group, of the one that holds it? A part of the tests' own audit."""

from __future__ import annotations

from collections.abc import Iterator

from cachesvc.ledger.page_pool import PagePool
from cachesvc.ledger.shared_pool import GroupPool
from cachesvc.ledger.tier_copies import Place
from cachesvc.model.words import PageState

NO_GROUP = -1
Holding = dict[tuple[int, int], tuple[PageState, str]]
"""State that a holder gives to a page, and its name, by group and page."""


def page_problems(place: Place, held: Holding) -> Iterator[str]:
    """Compare the pages of every pool of a place with their holders."""
    for groups in place.shares:
        pools = [place.pools[group] for group in groups]
        for pool in pools:
            yield from pool.problems()
        for page, state in enumerate(pools[0].states):
            mine = [(group, held[group, page]) for group in groups if (group, page) in held]
            if len(mine) > 1:
                yield f"{pools[0].name} page {page}: held by {mine}"
            group, expected = mine[0] if mine else (NO_GROUP, (PageState.FREE, "no holder"))
            if state != expected[0]:
                yield f"{pools[0].name} page {page}: {PageState(state).name}, but held by {expected[1]}"
            if len(groups) > 1 and group != _group_of(pools, groups, page):
                yield f"{pools[0].name} page {page}: not of group {group}, which holds it"


def _group_of(pools: list[PagePool], groups: tuple[int, ...], page: int) -> int:
    """The group that a shared pool says a page is of."""
    for pool, group in zip(pools, groups, strict=True):
        assert isinstance(pool, GroupPool)
        if pool.owners[page] == pool.mark:
            return group
    return NO_GROUP
