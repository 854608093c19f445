"""Lend: another node wants to read host blocks. What lies on a device alone is saved first, for a bounded while.

A borrower that follows a prefill asks again for the rest: it gets at once what is on the host, while the rest is saved.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from cachesvc.flows.context.core import Core
from cachesvc.flows.context.counters import Count
from cachesvc.flows.context.turns import TURN
from cachesvc.flows.transfer.backup import back_up, has_backup_room
from cachesvc.flows.transfer.transfers import expedite
from cachesvc.ledger.index.tier_copies import NO_ROW
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.lent import LentBlocks
from cachesvc.model.answers import Wait
from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.numbers.int32s import array_of, column
from cachesvc.model.transfer import Urgency
from cachesvc.model.words import ABSENT, NO_PAGE, READY

MOST_WAITS = 2


@dataclass(slots=True)
class Lending:
    """Progress of one call; handed to each of its runs. ``asks_again``: its caller wants what is there now,
    and asks for the rest later."""

    asks_again: bool = False
    waits: int = 0
    has_begun: bool = False


def lend(core: Core, model: Model, keys: bytes, lending: Lending) -> LentBlocks | Wait | None:
    """Keep on the host what is there of packed, chained ``keys``, from the first on; None: nothing is. What it answers
    names the blocks by the index's own keys, and the block above them."""
    rows = _known(core, model, keys)
    if not rows:
        return None
    wait = _save(core, model, rows, lending) if lending.waits < MOST_WAITS else None
    host = model.blocks.host
    lacking = np.flatnonzero(host.states_of(host.lead, rows) != READY)
    ready = rows[: int(lacking[0])] if len(lacking) else rows
    if wait is not None and not (ready and lending.asks_again):
        return wait
    rows = ready
    if not rows:
        return None
    pages = [_pages(model, group, rows) for group in range(len(host.pools))]
    lent = LentBlocks(model.blocks, rows, pages)
    model.lent.append(lent)
    core.count(Count.LENT_BLOCKS, len(rows))
    return lent


def end_lending(core: Core, model: Model, lent: LentBlocks) -> None:
    """Unpin lent blocks: no stream sends from them any more."""
    core.count(Count.LENT_BLOCKS_BACK, len(lent.rows))
    model.lent.remove(lent)
    lent.let_go()


def _known(core: Core, model: Model, keys: bytes) -> array[int]:
    """Rows of the longest run from the first key on that the index has, each below the one before."""
    index = model.blocks.index
    low, high, tip = 0, len(keys) // KEY_BYTES, NO_ROW
    while low < high:
        middle = (low + high + 1) >> 1
        row = index.rows.get(keys[(middle - 1) * KEY_BYTES : middle * KEY_BYTES], NO_ROW)
        if row == NO_ROW:
            high = middle - 1
        else:
            low, tip = middle, row
    if tip == NO_ROW or index.depth[tip] + 1 < low:
        return array("i")
    rows = index.last_rows(tip, low)
    same = index.matching(rows, keys[: low * KEY_BYTES])
    if same < low:
        core.count(Count.KEYS_MISPLACED)
    return rows[:same]


def _save(core: Core, model: Model, rows: array[int], lending: Lending) -> Wait | None:
    """Have what is on a device alone come to the host; None: there is nothing to wait for."""
    host = model.blocks.host
    filling = host.fillers(rows)
    if filling:
        return _wait(core, lending, filling)
    absent = array_of(column(rows)[host.states_of(host.lead, rows) == ABSENT])
    if not absent or lending.has_begun:
        return None
    if not has_backup_room(core, model, len(absent)):
        return TURN
    lending.has_begun = True
    for replica in model.replicas:
        ticket = back_up(core, model, replica, absent, Urgency.AWAITED)
        if ticket is not None:
            return _wait(core, lending, [ticket.id])
    return None


def _wait(core: Core, lending: Lending, tickets: list[int]) -> Wait:
    lending.waits += 1
    expedite(core, tickets)
    return Wait(tuple(tickets), core.limits.peer_wait_seconds)


def _pages(model: Model, group: int, rows: array[int]) -> array[int]:
    host = model.blocks.host
    pages = column(host.pages_of(group, rows)).copy()
    pages[host.states_of(group, rows) != READY] = NO_PAGE
    return array_of(pages)
