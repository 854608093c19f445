"""Room made ahead: a few device pages are kept free, so that a short load and a request's first blocks find theirs.

As many as a load takes, by the last ones, so that a long prompt's pages are free when its load is asked for.
Only what would go next anyway goes, in its order, and only while the host has it whole: nothing is saved, nothing is
lost, and where the next one would be lost nothing goes. It costs a load for a request that returns to one of the last
blocks before eviction. It runs as a background task, a short turn at a time, and no call waits
for it.
"""

from __future__ import annotations

from functools import partial

from cachesvc.flows.context.core import Core
from cachesvc.flows.context.turns import Chore
from cachesvc.flows.transfer.apply_evictions import carry_out
from cachesvc.ledger.index.tier_copies import Place
from cachesvc.ledger.ledger import Model, Replica

FEWEST_PAGES = 8
"""Fewer are worth nothing: a small pool has none."""
SHARE_OF_TURN = 2
"""Divisor of a call's turn of evictions: this task takes a smaller part, since no call waits for it."""


LOAD_PART = 16
"""Largest part of a pool that is kept free for loads, a 16th: other requests return to what lies there."""
MEMORY = 8
"""Part by which a load's pages are remembered less with each shorter one, an 8th."""


def note_load(place: Place, pages: int) -> None:
    """A load has taken ``pages`` pages; 0: something else was allocated, so loads have become rarer."""
    left = place.recent_load - (place.recent_load // MEMORY if pages else min(1, place.recent_load))
    place.recent_load = max(pages, left)


def pages_ahead(core: Core, place: Place) -> int:
    """Pages that are kept free. None where groups have windows: their copies on the host may be fewer."""
    limits, pages = core.limits, place.pools[place.lead].capacity
    if not limits.ahead_pages or place.window_groups or pages < limits.ahead_part * FEWEST_PAGES:
        return 0
    return max(min(limits.ahead_pages, pages // limits.ahead_part), min(place.recent_load, pages // LOAD_PART))


def look_ahead(core: Core, model: Model, replica: Replica) -> None:
    """Pages were taken, or blocks can go that could not before: make room once half of it is used up."""
    wanted = pages_ahead(core, replica.place)
    if replica.is_making_room or replica.gone or not wanted or 2 * replica.place.free_blocks >= wanted:
        return
    replica.is_making_room = True
    core.chores.append(Chore(model.id, partial(_go_on, core, model, replica), gives_back=False))


def _go_on(core: Core, model: Model, replica: Replica) -> bool:
    """A turn; True when there is room enough, or the next block cannot go."""
    replica.is_making_room = False  # first: a defect in what follows ends it, and not for good
    short = pages_ahead(core, replica.place) - replica.place.free_blocks
    found = 0
    if short > 0 and not (model.suspect or replica.gone) and core.ledger.models.get(model.id) is model:
        plan = model.evictor.plan_backed(replica.place, short, max(1, core.turns.evicted // SHARE_OF_TURN))
        found = plan.found
        if found:
            carry_out(core, model, plan)
    replica.is_making_room = 0 < found < short
    return not replica.is_making_room
