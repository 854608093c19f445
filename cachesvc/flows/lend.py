"""Lend: another node wants to read host blocks. What lies on a device alone is saved first, urgently.

A loan waits for no copy: blocks that are on their way to the host are lent too, and sent once they are there. So the
borrower hears of a sealed block, opens its streams and asks for it while the block is copied.
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from cachesvc.flows.core import TURN, Core, Count
from cachesvc.flows.replicas import back_up, has_backup_room
from cachesvc.flows.transfers import expedite
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.pins import Keep, kept
from cachesvc.ledger.storage_state import LentBlocks, filling_of
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.answers import Wait
from cachesvc.model.numbers import array_of, column
from cachesvc.model.words import FILLING, KEY_BYTES, NO_PAGE, READY, Urgency


def lend(core: Core, model: Model, keys: bytes) -> LentBlocks | Wait | None:
    """Keep on the host what is there, or on its way there, of packed, chained ``keys``, from the first on; None:
    nothing is. What it answers names the blocks by the index's own keys, and the block above them."""
    rows = _known(core, model, keys)
    if not _save(core, model, rows):
        return TURN
    running, host = core.ledger.tickets.running, model.blocks.host
    rows = rows[: _leading(_is_here(host, host.lead, rows))]
    tickets = host.fillers(rows)
    over = [ticket for ticket in tickets if running[ticket].is_settling and running[ticket].failing]
    if over:  # their blocks go, and what relied on them was told
        rows = rows[: _leading(~np.isin(filling_of(host, rows), over))]
        tickets = host.fillers(rows)
    if not rows:
        return None
    expedite(core, tickets)
    pages = [_pages(host, group, rows) for group in range(len(host.pools))]
    lent = LentBlocks(model.blocks, rows, pages, tickets)
    for ticket in tickets:
        running[ticket].waiters.append(lent)
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


def _save(core: Core, model: Model, rows: array[int]) -> bool:
    """Begin to copy what is on a device alone to the host, as far as there is room; False: it takes another turn."""
    host = model.blocks.host
    present = _leading(_is_here(host, host.lead, rows))
    absent = rows[present:]
    if not absent:
        return True
    with kept(model.blocks, host, Keep(rows[present - 1] if present else NO_ROW)):
        for replica in model.replicas:
            if not has_backup_room(core, model, replica, absent):
                return False
            back_up(core, model, replica, absent, Urgency.AWAITED)
    return True


def _is_here(host: Place, group: int, rows: array[int]) -> npt.NDArray[np.bool_]:
    """Mask of the rows that the host has a copy of, or gets one."""
    return np.isin(host.states_of(group, rows), (READY, FILLING))


def _leading(mask: npt.NDArray[np.bool_]) -> int:
    """Number of leading elements that are true."""
    return len(mask) if mask.all() else int(np.argmin(mask))


def _pages(host: Place, group: int, rows: array[int]) -> array[int]:
    pages = column(host.pages_of(group, rows)).copy()
    pages[~_is_here(host, group, rows)] = NO_PAGE
    return array_of(pages)
