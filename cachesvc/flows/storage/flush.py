"""Flush at an orderly stop: what is worth keeping and is in memory alone goes to storage, the best first."""

from __future__ import annotations

import numpy as np

from cachesvc.flows.context.core import Core
from cachesvc.flows.storage.write import begin_soon
from cachesvc.flows.transfer.pending_writes import want, was_used_again
from cachesvc.ledger.index.tier_copies import NO_ROW
from cachesvc.ledger.ledger import Model


def begin_flush(core: Core, capacity_bytes: int) -> int:
    """Want the blocks worth keeping, in the order of their worth: the number of uses, then the last one. No more than
    storage can hold (0: any). Returns how many blocks wait to be written."""
    if core.storage is None or not core.storage.keeps_used:
        return waiting(core)
    left = capacity_bytes or 1 << 62
    for model in core.ledger.models.values():
        layout = model.layout
        block_bytes = sum(layout.page_bytes(g) * layout.host_ranks(g) for g in layout.full_groups)
        for row in _best(core, model):
            before = len(model.stored.wanted)
            want(core, model, [row])
            left -= (len(model.stored.wanted) - before) * block_bytes
            if left <= 0:
                return waiting(core)
    return waiting(core)


def go_on(core: Core) -> int:
    """Time has passed: write on. What could not be saved to the host, or not be written, is tried again. Returns how
    many blocks are left."""
    for model in core.ledger.models.values():
        stored = model.stored
        if stored.coming and not (stored.waiting or stored.keeping or stored.staged):
            coming, stored.coming = stored.coming, set()
            rows = [row for key in coming if (row := model.blocks.index.rows.get(key, NO_ROW)) != NO_ROW]
            want(core, model, rows)
        if stored.waiting:
            begin_soon(core, model)
    return waiting(core)


def waiting(core: Core) -> int:
    """Number of blocks that are to be written, or are being."""
    stored = [model.stored for model in core.ledger.models.values()]
    return sum(len({*each.wanted, *each.ready, *each.keeping, *each.coming, *each.staged}) for each in stored)


def _best(core: Core, model: Model) -> list[int]:
    """Rows worth keeping, the best first."""
    assert core.storage is not None
    index = model.blocks.index
    rows = np.array(list(index.rows.values()), np.int64)
    order = np.lexsort((np.array(index.stamp)[rows], np.array(index.hits)[rows]))[::-1]
    best: list[int] = rows[order].tolist()
    return best if core.storage.keeps_all else [row for row in best if was_used_again(model, row)]
