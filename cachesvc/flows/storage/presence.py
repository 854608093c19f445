"""Storage presence hints, published to event subscribers. Never counted as hits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice

from cachesvc.flows.context.core import Core
from cachesvc.flows.context.turns import begin
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.pages.change_log import STORAGE, Cause, Kind, packed

FORGOTTEN_A_TURN = 256
"""Blocks, some 2 us each."""


def note_stored(model: Model, key: bytes) -> None:
    """A block of the index was written to storage, or came from there."""
    is_new, journal = key not in model.stored.written, model.blocks.journal
    model.stored.wrote(key, journal.now)
    if is_new:
        row = model.blocks.index.rows[key]
        for group in model.layout.full_groups:
            journal.note(packed(Kind.TIER_CHANGED, Cause.STORED, present=True, group=group, place=STORAGE), row)


def note_unstored(model: Model, key: bytes) -> None:
    """Withdraw a hint, and publish that. An unknown key changes nothing."""
    if model.stored.written.pop(key, None) is None:
        return
    for group in model.layout.full_groups:
        code = packed(Kind.TIER_CHANGED, Cause.UNSTORED, present=False, group=group, place=STORAGE)
        model.blocks.journal.note_gone(code, key)


def forget(core: Core, model_id: int, keys: Iterable[bytes]) -> None:
    """Storage has let go of blocks; they may be written again. What takes more than a turn goes on as a chore."""
    model = core.ledger.models.get(model_id)
    if model is not None:
        begin(core.chores, model_id, partial(_forget_some, model, iter(list(keys))))


def forget_all(core: Core, model: Model) -> None:
    """Storage has let go of all that it had of a model, as ``forget``. What is written meanwhile may be forgotten too,
    and is written once more."""
    begin(core.chores, model.id, partial(_forget_some, model, _oldest(model.stored.written)))


def _oldest(written: OrderedDict[bytes, float]) -> Iterator[bytes]:
    """Yield the oldest key, as often as there are keys now; the caller removes each before it asks for the next."""
    for _ in range(len(written)):
        if not written:
            return
        yield next(iter(written))


def _forget_some(model: Model, keys: Iterator[bytes]) -> bool:
    """A turn of it; True when none is left."""
    count = 0
    for key in islice(keys, FORGOTTEN_A_TURN):
        note_unstored(model, key)
        count += 1
    return count < FORGOTTEN_A_TURN
