"""Verify: does everything add up? Each page is in exactly one place, each pin has its holder, each count is right.

Which parts there are is decided anew for every model, and a model that has gone since is passed over.
"""

from __future__ import annotations

from cachesvc.flows.core import Core
from cachesvc.ledger.ledger import Model
from cachesvc.questions.recount import Part, block_parts
from cachesvc.questions.recount_holds import hold_parts
from cachesvc.questions.recount_pages import page_parts


def parts(core: Core, model_id: int) -> list[Part]:
    """What is to be looked at of one model; empty when it has gone. Its places must not change until all are taken."""
    model = core.ledger.models.get(model_id)
    if model is None:
        return []
    return [*block_parts(model), *page_parts(core.ledger, model), *hold_parts(core.ledger, model)]


def is_known(core: Core, model_id: int) -> bool:
    """False when a model has given way since."""
    return model_id in core.ledger.models


def sizes(core: Core, model_id: int) -> tuple[int, int]:
    """Usable pages in all pools, and blocks."""
    model: Model | None = core.ledger.models.get(model_id)
    if model is None:
        return 0, 0
    return sum(pool.usable for place in model.blocks.index.places for pool in place.pools), len(model.blocks.index)


def verify_at_once(core: Core) -> list[str]:
    """All parts in one go: what is wrong. For tests and tools that own the ledger."""
    out: list[str] = []
    for part in [part for model_id in core.ledger.models for part in parts(core, model_id)]:
        if part.walk is not None:
            for problems in part.walk():
                out += problems
        elif part.capture is not None and part.recount is not None:
            out += part.recount(part.capture())
    return out
