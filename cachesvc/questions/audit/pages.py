"""The pages of one place, recounted: each is held by exactly one, and is in the state that its holder gives it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from cachesvc.ledger.index.tier_copies import Place
from cachesvc.ledger.ledger import Ledger, Model
from cachesvc.ledger.pages.shared_pool import GroupPool
from cachesvc.model.words import ABSENT, NO_PAGE, READY, PageState
from cachesvc.questions.audit.recount import MOST_TOLD, Check, captured
from cachesvc.questions.snapshot import Bytes, Int32s, int32s, place_states, states


@dataclass
class PoolColumns:
    """One pool of one moment. ``groups``: those that draw from it; ``owners``: the mark of each page's group, where
    that is more than one, with the ``own_counts`` of each. ``kept``: pages that reservations have there."""

    name: str
    groups: tuple[int, ...]
    owners: Bytes | None
    marks: list[int]
    own_counts: list[list[int]]
    pages: int
    first: int
    usable: int
    reserved: int
    kept: int
    counts: list[int]
    states: Bytes
    added: Bytes
    run_starts: Int32s
    run_counts: Int32s


@dataclass
class Held:
    """Pages that something other than a block holds, all in one state."""

    group: int
    state: PageState
    by: str
    pages: npt.NDArray[np.int64]


@dataclass
class PlacePages:
    """A place's copies and pools of one moment, and the other holders of pages there."""

    name: str
    copies: list[Bytes]
    pages: list[Int32s]
    pools: list[PoolColumns]
    held: list[Held] = field(default_factory=list)


def page_parts(ledger: Ledger, model: Model) -> list[Check]:
    """A part for each place."""
    return [
        captured(
            f"model {model.id}: pages of {place.name}", partial(capture_pages, ledger, model, place), recount_pages
        )
        for place in model.blocks.index.places
    ]


def capture_pages(ledger: Ledger, model: Model, place: Place) -> PlacePages:
    """Columns that ``recount_pages`` compares."""
    seen = PlacePages(
        place.name,
        place_states(place),
        [int32s(pages) for pages in place.pages],
        [_pool(place, groups) for groups in place.shares],
    )
    if place is model.blocks.host:
        _host_holders(ledger, model, seen)
    else:
        _device_holders(ledger, model, place.number - 1, seen)
    for group, pool in enumerate(place.pools):
        _hold(seen, group, PageState.QUARANTINED, "copies that never ended", pool.stuck)
    return seen


def _pool(place: Place, groups: tuple[int, ...]) -> PoolColumns:
    pool = place.pools[groups[0]]
    starts, counts = pool.free_runs()
    shared = [each for group in groups if isinstance(each := place.pools[group], GroupPool)]
    return PoolColumns(
        shared[0].common.name if shared else pool.name,
        groups,
        states(shared[0].owners) if shared else None,
        [each.mark for each in shared],
        [each.own_counts for each in shared],
        pool.pages,
        pool.first,
        pool.usable,
        pool.reserved,
        sum(reservation.held[group] for reservation in place.reservations for group in groups),
        list(pool.counts),
        states(pool.states),
        states(pool.added),
        np.array(starts, np.int32),
        np.array(counts, np.int32),
    )


def _hold(seen: PlacePages, group: int, state: PageState, by: str, pages: Collection[int]) -> None:
    if pages:
        seen.held.append(Held(group, state, by, np.fromiter(pages, np.int64, len(pages))))


def _host_holders(ledger: Ledger, model: Model, seen: PlacePages) -> None:
    for lease in ledger.leases.values():
        for sequence in lease.sequences.values() if lease.model == model.id else ():
            for group, (_, pages) in enumerate(() if sequence.swap_ticket else sequence.swapped):
                _hold(seen, group, PageState.PRIVATE, f"sequence {sequence.id}", pages)
    for ticket in ledger.tickets.running.values():
        for moved in ticket.moves if ticket.model == model.id else ():
            _hold(seen, moved.group, PageState.IN_FLIGHT, f"ticket {ticket.id}", moved.host_pages)
    for fetch in model.stored.fetches.values():
        for held in fetch.held():
            _hold(seen, held.group, held.state, f"fetch {fetch.ticket}", held.pages)


def _device_holders(ledger: Ledger, model: Model, replica: int, seen: PlacePages) -> None:
    flying: dict[int, set[int]] = {}
    for ticket in ledger.tickets.running.values():
        if ticket.model == model.id and ticket.replica == replica:
            for moved in ticket.moves:
                flying.setdefault(moved.group, set()).update(moved.own)
    for group, pages in flying.items():
        _hold(seen, group, PageState.IN_FLIGHT, "a swap", pages)
    for lease in ledger.leases.values():
        if lease.model != model.id or lease.replica != replica:
            continue
        for group in range(len(seen.copies)):
            lost = [page for g, page in lease.quarantine if g == group]
            _hold(seen, group, PageState.QUARANTINED, f"lease {lease.id}", lost)
            _hold(seen, group, PageState.PRIVATE, f"stock of {lease.id}", lease.stock[group])
        for sequence in lease.sequences.values():
            for group, own in enumerate(sequence.own):
                mine = own - flying[group] if group in flying else own
                _hold(seen, group, PageState.PRIVATE, f"sequence {sequence.id}", mine)


def recount_pages(seen: PlacePages) -> list[str]:
    """Inconsistencies."""
    out: list[str] = []
    for pool in seen.pools:
        for group in pool.groups:
            out += _absent(seen, group)
        out += _holders(seen, pool)
        out += _counts(pool)
        out += _runs(pool)
    return out


def _absent(seen: PlacePages, group: int) -> list[str]:
    rows = np.flatnonzero((seen.copies[group] == ABSENT) & (seen.pages[group] != NO_PAGE))
    return [f"{seen.name} row {row}: absent, yet it names a page" for row in rows[:MOST_TOLD].tolist()]


def _holders(seen: PlacePages, pool: PoolColumns) -> list[str]:
    """Compare every page with its holders, and its group with theirs."""
    pages, expected, marks = [np.empty(0, np.int64)], [np.empty(0, np.uint8)], [np.empty(0, np.uint8)]
    for number, group in enumerate(pool.groups):
        mark = pool.marks[number] if pool.marks else 1
        rows = np.flatnonzero(seen.copies[group] != ABSENT)
        settled = seen.copies[group][rows] == READY
        pages.append(seen.pages[group][rows].astype(np.int64))
        expected.append(np.where(settled, PageState.SEALED, PageState.IN_FLIGHT).astype(np.uint8))
        for held in seen.held:
            if held.group == group:
                pages.append(held.pages)
                expected.append(np.full(len(held.pages), held.state, np.uint8))
        marks.append(np.full(sum(map(len, pages)) - sum(map(len, marks)), mark, np.uint8))
    every, states_of, mark_of = np.concatenate(pages), np.concatenate(expected), np.concatenate(marks)
    inside = (every >= 0) & (every < pool.pages)
    out = [f"{pool.name}: page {page} is held, but not of this pool" for page in every[~inside][:MOST_TOLD].tolist()]
    every, states_of, mark_of = every[inside], states_of[inside], mark_of[inside]
    holders = np.bincount(every, minlength=pool.pages)
    twice = np.flatnonzero(holders > 1)[:MOST_TOLD].tolist()
    out += [f"{pool.name} page {page}: held by {_names(seen, pool, page)}" for page in twice]
    wanted, owners = np.zeros(pool.pages, np.uint8), np.zeros(pool.pages, np.uint8)
    wanted[every], owners[every] = states_of, mark_of
    wrong = np.flatnonzero(wanted != pool.states)[:MOST_TOLD].tolist()
    out += [
        f"{pool.name} page {page}: {PageState(int(pool.states[page])).name}, but held by {_names(seen, pool, page)}"
        for page in wrong
    ]
    if pool.owners is not None:
        strange = np.flatnonzero(owners != pool.owners)[:MOST_TOLD].tolist()
        out += [
            f"{pool.name} page {page}: of group mark {pool.owners[page]}, but held by {_names(seen, pool, page)}"
            for page in strange
        ]
    return out


def _names(seen: PlacePages, pool: PoolColumns, page: int) -> str:
    names: list[str] = []
    for group in pool.groups:
        rows = np.flatnonzero((seen.pages[group] == page) & (seen.copies[group] != ABSENT)).tolist()
        names += [f"row {row}" for row in rows]
        names += [held.by for held in seen.held if held.group == group and page in held.pages]
    return " and by ".join(names) or "no holder"


def _counts(pool: PoolColumns) -> list[str]:
    out: list[str] = []
    if sum(pool.counts) != pool.usable or int(pool.added.sum()) != pool.usable:
        out.append(f"{pool.name}: counts {pool.counts} do not add up to {pool.usable}")
    if pool.added[: pool.first].any():
        out.append(f"{pool.name}: pages are usable that are the engines' own")
    if pool.reserved != pool.kept or not 0 <= pool.reserved <= pool.counts[PageState.FREE]:
        out.append(f"{pool.name}: {pool.reserved} pages are counted reserved, {pool.kept} are, of the free ones")
    seen = np.bincount(pool.states, minlength=len(PageState))
    for state in PageState:
        expected = pool.counts[state] + (pool.pages - pool.usable if state is PageState.FREE else 0)
        if seen[state] != expected:
            out.append(f"{pool.name}: {seen[state]} pages are {state.name}, {expected} are counted")
    for mark, counts in zip(pool.marks, pool.own_counts, strict=True):
        mine = np.bincount(pool.states[pool.owners == mark], minlength=len(PageState))
        out += [
            f"{pool.name}: {mine[state]} pages of group mark {mark} are {state.name}, {counts[state]} are counted"
            for state in PageState
            if state is not PageState.FREE and mine[state] != counts[state]
        ]
    return out


def _runs(pool: PoolColumns) -> list[str]:
    """Free runs cover the free pages exactly once, and neighbours are joined."""
    cover = np.zeros(pool.pages + 1, np.int64)
    np.add.at(cover, pool.run_starts, 1)
    np.add.at(cover, pool.run_starts + pool.run_counts, -1)
    inside = np.cumsum(cover)[:-1]
    free = (pool.states == PageState.FREE) & (pool.added == 1)
    off = np.flatnonzero(inside != free)[:MOST_TOLD].tolist()
    out = [f"{pool.name} page {page}: free runs hold it {inside[page]} times, free is {free[page]}" for page in off]
    joined = np.intersect1d(pool.run_starts, pool.run_starts + pool.run_counts)[:MOST_TOLD].tolist()
    return out + [f"{pool.name}: the run from {page} on is not joined with its neighbour" for page in joined]
