"""Verify: everything that ``conservation.audit`` looks at, in pieces short enough that engines do not notice.

A piece copies columns of one moment and compares the copies elsewhere, or walks a few rows. Which pieces there are is
decided anew for every model, and a model that was evicted since is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from cachesvc.flows.core import Core
from cachesvc.ledger.ledger import Ledger, Model
from cachesvc.questions.recount import parts
from cachesvc.questions.recount_walks import walk_computing, walk_keys, walk_tables
from cachesvc.questions.steps import Question, answer_at_once, off_loop
from cachesvc.questions.view import View

MOST_PROBLEMS = 1024


class Piece(NamedTuple):
    """One thing to look at: ``look()`` gives what is wrong with it."""

    name: str
    look: Callable[[], Question[list[str]]]


class Verified(NamedTuple):
    """What was looked at, and at most ``MOST_PROBLEMS`` things that are wrong. ``sound``: those of the ``models`` with
    nothing wrong."""

    problems: list[str]
    checks: list[str]
    pages: int
    blocks: int
    models: list[int]
    sound: list[int]


def verify(view: View, model_id: int) -> Question[Verified]:
    """Recount one model, or (0) every one. Raises NotFound."""
    models = [view.model(model_id)] if model_id else view.models()
    problems: list[str] = []
    checks: list[str] = []
    sound: list[int] = []
    pages = blocks = 0
    for model in models:
        before = len(problems)
        for piece in pieces(view.ledger_of(model), model) if view.has(model) else ():
            if not view.has(model):
                break
            problems += yield from piece.look()
            checks.append(piece.name)
        if view.has(model):
            pages += sum(pool.usable for place in model.blocks.index.places for pool in place.pools)
            blocks += len(model.blocks.index)
        if len(problems) == before:
            sound.append(model.id)
    return Verified(problems[:MOST_PROBLEMS], checks, pages, blocks, [model.id for model in models], sound)


def pieces(ledger: Ledger, model: Model) -> list[Piece]:
    """What is to be looked at of one model."""
    where = f"model {model.id}"
    return [
        *(Piece(name, partial(_recounted, capture, recount)) for name, capture, recount in parts(ledger, model)),
        Piece(f"{where}: keys", lambda: _walked(walk_keys(model))),
        Piece(f"{where}: block tables", lambda: _walked(walk_tables(ledger, model))),
        Piece(f"{where}: keys being computed", lambda: _walked(walk_computing(ledger, model))),
    ]


def verify_at_once(core: Core) -> list[str]:
    """All pieces in one go: what is wrong. For tests and tools that own the ledger."""
    every = [piece for model in core.ledger.models.values() for piece in pieces(core.ledger, model)]
    return [problem for piece in every for problem in answer_at_once(piece.look())]


def _recounted(capture: Callable[[], Any], recount: Callable[[Any], list[str]]) -> Question[list[str]]:
    return (yield from off_loop(partial(recount, capture())))


def _walked(steps: Iterator[list[str]]) -> Question[list[str]]:
    out: list[str] = []
    for problems in steps:
        out += problems
        yield None
    return out
