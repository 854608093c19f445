"""What of a path is not on a replica's device: which copies must come, what room they take, and their transfer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cachesvc.flows.backup import submit
from cachesvc.flows.core import Core
from cachesvc.ledger.blocks import window_positions
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.place import Place
from cachesvc.ledger.tickets import Ticket
from cachesvc.model.transfer import Direction, PagePairs
from cachesvc.model.words import ABSENT, FILLING, NO_PAGE, PageState


@dataclass(slots=True)
class Loads:
    """A stretch of a hit that is to be on the device.

    ``rows``: its blocks; ``whole``: those that must come from elsewhere; ``windows[g]``: rows whose windowed copy must
    come, of whole blocks or alone; ``needed[g]``: position -> row of all that the window needs. ``joined``: tickets
    that bring the rest. ``blocked``: tickets to wait for first, because they fill other copies of the same blocks.
    """

    rows: list[int]
    whole: list[int]
    windows: dict[int, list[int]]
    needed: dict[int, dict[int, int]]
    joined: list[int]
    blocked: list[int]


def loads_of(core: Core, model: Model, replica: Replica, rows: list[int], base: int, hit_blocks: int) -> Loads:
    """What a hit of ``hit_blocks`` lacks of ``rows``, which are its positions from ``base`` on."""
    place = replica.place
    whole = [row for row in rows if place.state(row) == ABSENT]
    awaited = {row for row in rows if place.state(row) == FILLING}
    missing: set[int] = set()
    windows: dict[int, list[int]] = {}
    needed: dict[int, dict[int, int]] = {}
    for group in place.window_groups:
        positions = window_positions(model.layout, group, hit_blocks)
        needed[group] = {position: rows[position - base] for position in positions if position >= base}
        states = place.states[group]
        windows[group] = [row for row in needed[group].values() if states[row] == ABSENT]
        awaited.update(row for row in needed[group].values() if states[row] == FILLING)
        missing.update(row for row in windows[group] if place.is_filling(row))
    running = core.ledger.tickets.of_replica(model.id, replica.id, Direction.LOAD) if awaited or missing else []
    joined = [ticket.id for ticket in running if not awaited.isdisjoint(ticket.rows)]
    blocked = [ticket.id for ticket in running if not missing.isdisjoint(ticket.rows)]
    return Loads(rows, whole, windows, needed, joined, blocked)


@contextmanager
def kept(model: Model, replica: Replica, loads: Loads) -> Iterator[None]:
    """Keep what is on the device already while room is made for the rest."""
    blocks, place = model.blocks, replica.place
    present = [row for row in loads.rows if place.state(row) != ABSENT]
    windows = [
        (group, row)
        for group, needed in loads.needed.items()
        for row in needed.values()
        if place.states[group][row] != ABSENT
    ]
    if present:
        blocks.pin(place, present[-1])
    for group, row in windows:
        blocks.pin_window(place, group, row)
    try:
        yield
    finally:
        for group, row in windows:
            blocks.unpin_window(place, group, row)
        if present:
            blocks.unpin(place, present[-1])


def pages_wanted(model: Model, loads: Loads, fresh: int) -> list[int]:
    """Pages of each group for the loads and ``fresh`` blocks."""
    return [fresh + len(loads.windows.get(group, loads.whole)) for group in range(len(model.layout.groups))]


def fill(
    core: Core, model: Model, replica: Replica, loads: Loads, ticket: Ticket, source: Place, *, layered: bool
) -> None:
    """Take pages for what is missing and start to copy it from ``source``. There is room."""
    place = replica.place
    rows_of = [loads.windows.get(group, loads.whole) for group in range(len(model.layout.groups))]
    pages_of: list[dict[int, int]] = []
    for group, rows in enumerate(rows_of):
        pages_of.append(dict(zip(rows, place.pools[group].take(len(rows), PageState.IN_FLIGHT), strict=True)))
    moving = {row for rows in rows_of for row in rows}
    ticket.rows = [row for row in loads.rows if row in moving]
    for row in ticket.rows:
        model.blocks.start_fill(place, row, [pages.get(row, NO_PAGE) for pages in pages_of])
    pairs = tuple(
        PagePairs(group, tuple(pages_of[group][row] for row in rows), tuple(source.pages[group][row] for row in rows))
        for group, rows in enumerate(rows_of)
        if rows
    )
    submit(core, model, ticket, pairs, layered=layered)
