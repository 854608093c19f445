"""Names of sealed pages: a later reader can tell whether they are still the same pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from cachesvc.flows.context.core import Core
from cachesvc.ledger.index.tier_copies import NO_ROW, Place
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.pages.change_log import HOST_NUMBER, place_name
from cachesvc.model.words import READY, PageState


class SealedPage(NamedTuple):
    """One block's page in one group. ``place``: the number of its place. ``generation``: of the page's grant."""

    model: int
    place: int
    group: int
    page: int
    generation: int
    key: bytes


def lately_sealed(core: Core, model_id: int, tip: int, count: int) -> list[bytes]:
    """Keys of the last ``count`` blocks down to row ``tip``, as far as they are still there."""
    model = core.ledger.models.get(model_id)
    if model is None:
        return []
    index = model.blocks.index
    out: list[bytes] = []
    row = tip
    while row != NO_ROW and len(out) < count:
        key = index.keys[row]
        if key is None:
            break
        out.append(key)
        row = index.parent[row]
    return out


def is_resident(core: Core, model_id: int, key: bytes) -> bool:
    """True for a block of which a copy is anywhere."""
    model = core.ledger.models.get(model_id)
    row = NO_ROW if model is None else model.blocks.index.rows.get(key, NO_ROW)
    return model is not None and row != NO_ROW and model.blocks.index.has_copy(row)


def pages_of(core: Core, model_id: int, key: bytes, places: Iterator[int] | None = None) -> list[SealedPage]:
    """The sealed pages of a block, in the places of some numbers or in all; none once it has gone."""
    model = core.ledger.models.get(model_id)
    row = NO_ROW if model is None else model.blocks.index.rows.get(key, NO_ROW)
    if model is None or row == NO_ROW:
        return []
    asked = None if places is None else set(places)
    return [
        SealedPage(model_id, place.number, group, page, place.pools[group].generations[page], key)
        for place in model.blocks.index.places
        if asked is None or place.number in asked
        for group, page in _ready(place, row)
    ]


def _ready(place: Place, row: int) -> Iterator[tuple[int, int]]:
    for group, states in enumerate(place.states):
        if states[row] == READY:
            yield group, place.pages[group][row]


def is_still(core: Core, sealed: SealedPage) -> bool:
    """True while the page holds that block and was never let go since: its bytes are those that were sealed."""
    model = core.ledger.models.get(sealed.model)
    if model is None:
        return False
    place = next((each for each in model.blocks.index.places if each.number == sealed.place), None)
    if place is None:
        return False
    pool = place.pools[sealed.group]
    row = model.blocks.index.rows.get(sealed.key, NO_ROW)
    return (
        row != NO_ROW
        and place.pages[sealed.group][row] == sealed.page
        and pool.generations[sealed.page] == sealed.generation
        and pool.states[sealed.page] != PageState.FREE
    )


def ranks_of(core: Core, sealed: SealedPage) -> int:
    """Number of ranks that keep bytes of their own for the page."""
    model: Model = core.ledger.models[sealed.model]
    return model.layout.host_ranks(sealed.group) if sealed.place == HOST_NUMBER else model.layout.ranks


def names_of(core: Core, sealed: SealedPage) -> tuple[str, str]:
    """Names of the page's place and group."""
    model = core.ledger.models[sealed.model]
    return place_name(sealed.place), model.layout.groups[sealed.group].name
