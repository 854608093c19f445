"""Verify: recount everything in parts, and report inconsistencies. Each page is in exactly one place, each pin has its
holder, each count is right.

Which parts there are is decided anew for every model, and a model that was evicted since is passed over.
"""

from __future__ import annotations

from typing import NamedTuple

from cachesvc.flows.context.core import Core
from cachesvc.ledger.ledger import Ledger, Model
from cachesvc.questions.audit.holds import hold_parts
from cachesvc.questions.audit.pages import page_parts
from cachesvc.questions.audit.recount import Check, block_parts
from cachesvc.questions.steps import Question, answer_at_once
from cachesvc.questions.view import View

MOST_PROBLEMS = 1024


class Verified(NamedTuple):
    """Counts of what was checked, and at most ``MOST_PROBLEMS`` problems. ``sound``: those of the ``models`` without a
    problem."""

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
        for part in parts(view.ledger_of(model), model) if view.has(model) else ():
            if not view.has(model):
                break
            problems += yield from part.look()
            checks.append(part.name)
        if view.has(model):
            places = model.blocks.index.places
            pages += sum(place.pools[groups[0]].usable for place in places for groups in place.shares)
            blocks += len(model.blocks.index)
        if len(problems) == before:
            sound.append(model.id)
    return Verified(problems[:MOST_PROBLEMS], checks, pages, blocks, [model.id for model in models], sound)


def parts(ledger: Ledger, model: Model) -> list[Check]:
    """Checks of one model. Its places must not change until all are taken."""
    return [*block_parts(model), *page_parts(ledger, model), *hold_parts(ledger, model)]


def verify_at_once(core: Core) -> list[str]:
    """Run all parts in one go and return the problems. For tests and tools that own the ledger."""
    every = [part for model in core.ledger.models.values() for part in parts(core.ledger, model)]
    return [problem for part in every for problem in answer_at_once(part.look())]
