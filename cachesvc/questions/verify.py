"""Verify: everything that ``conservation.audit`` looks at, in pieces short enough that engines do not notice.

A piece copies columns of one moment and compares the copies elsewhere, or walks a few rows. Which pieces there are is
decided anew for every model, and a model that has gone since is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from cachesvc.flows.core import Core
from cachesvc.ledger.ledger import Model
from cachesvc.questions.recount import parts
from cachesvc.questions.recount_walks import walk_computing, walk_keys, walk_tables


class Piece(NamedTuple):
    """``capture`` runs in one turn and ``recount(captured)`` anywhere; or ``walk`` gives steps, each in a turn."""

    name: str
    capture: Callable[[], Any] | None
    recount: Callable[[Any], list[str]] | None
    walk: Callable[[], Iterator[list[str]]] | None


def pieces(core: Core, model_id: int) -> list[Piece]:
    """What is to be looked at of one model; empty when it has gone."""
    model = core.ledger.models.get(model_id)
    if model is None:
        return []
    where = f"model {model.id}"
    out = [Piece(name, capture, recount, None) for name, capture, recount in parts(core.ledger, model)]
    out.append(Piece(f"{where}: keys", None, None, lambda: walk_keys(model)))
    out.append(Piece(f"{where}: block tables", None, None, lambda: walk_tables(core.ledger, model)))
    out.append(Piece(f"{where}: keys being computed", None, None, lambda: walk_computing(core.ledger, model)))
    return out


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
    """All pieces in one go: what is wrong. For tests and tools that own the ledger."""
    out: list[str] = []
    for model_id in list(core.ledger.models):
        for piece in pieces(core, model_id):
            if piece.walk is not None:
                for problems in piece.walk():
                    out += problems
            elif piece.capture is not None and piece.recount is not None:
                out += piece.recount(piece.capture())
    return out
