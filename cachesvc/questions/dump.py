"""A model's index as columns of one moment, parents before children, or its last requests: for tools that need no
daemon."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from cachesvc.ledger.index.tier_copies import NO_ROW
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.recent_requests import RecentRequest
from cachesvc.model.errors import NotFound
from cachesvc.model.words import NO_PAGE
from cachesvc.questions.snapshot import Arena, live_rows, place_states
from cachesvc.questions.steps import Question, off_loop
from cachesvc.questions.view import View

KEYS_A_STEP = 8192
"""Some 0.1 ms: the keys lie anywhere."""
BYTES_A_ROW = 26
"""Bytes of a row in the columns of the index itself."""
ROWS_MORE = 4096
"""The index may grow while its keys are copied."""


class PoolRoom(NamedTuple):
    """Size of one pool."""

    place: str
    group: str
    capacity: int
    free: int
    page_bytes: int


class CopyColumn(NamedTuple):
    """Copies in one group and place."""

    place: int
    group: int
    states: bytes
    pages: list[int]


class Rows(NamedTuple):
    """Consecutive blocks of a dump."""

    keys: bytes
    parents: list[int]
    positions: list[int]
    children: list[int]
    hits: list[int]
    stamps: list[int]
    transfers: list[int]
    pins: list[int]
    copies: list[CopyColumn]


class Columns:
    """Copied in one go when made, into ``arena``, but for ``keys``. ``put_in_order`` and ``rows`` no longer need the
    ledger.

    ``keys``: copied before, when the last access was number ``latest``. A row that has another key since was accessed
    since.
    """

    def __init__(self, model: Model, keys: list[bytes | None], latest: int, arena: Arena) -> None:
        index = model.blocks.index
        self.places = [place.name for place in index.places]
        self.pools = [
            PoolRoom(place.name, model.layout.groups[g].name, pool.capacity, pool.free, model.layout.page_bytes(g))
            for place in index.places
            for g, pool in enumerate(place.pools)
        ]
        self.blocks = len(index)
        self._keys = keys
        int32s = partial(arena.copy, kind=np.int32)
        self._parent, self._depth, self._children = int32s(index.parent), int32s(index.depth), int32s(index.children)
        self._hits, self._stamp = int32s(index.hits), arena.copy(index.stamp, np.int64)
        self._flights = arena.copy(index.flights, np.uint16)
        for row in np.flatnonzero(self._stamp > latest).tolist():
            keys[row] = index.keys[row]
        self._pins = [int32s(place.pins) for place in index.places]
        self._states = [place_states(place) for place in index.places]
        self._pages = [[int32s(pages) for pages in place.pages] for place in index.places]
        self._order = np.empty(0, np.int64)
        self._number = np.empty(0, np.int64)

    def put_in_order(self) -> None:
        """Number the blocks by depth, so that a reader knows a parent before its children."""
        live = np.flatnonzero(live_rows(len(self._keys), self._states))
        self._order = live[np.argsort(self._depth[live], kind="stable")]
        self.blocks = len(self._order)
        self._number = np.full(len(self._keys) + 1, NO_ROW, np.int64)  # the last one: that of NO_ROW
        self._number[self._order] = np.arange(self.blocks)

    def forget(self) -> Question[None]:
        """Let go of the keys, some at a time: all at once hold the loop for as long as to copy them."""
        while self._keys:
            del self._keys[-KEYS_A_STEP:]
            yield None

    def rows(self, first: int, count: int) -> Rows:
        """Blocks ``first`` to ``first + count``, or to the end."""
        rows = self._order[first : first + count]
        pins = np.sum([column[rows] for column in self._pins], axis=0)
        copies = [
            CopyColumn(place, group, states[rows].tobytes(), np.where(states[rows] > 0, pages[rows], NO_PAGE).tolist())
            for place, columns in enumerate(self._states)
            for group, (states, pages) in enumerate(zip(columns, self._pages[place], strict=True))
            if states[rows].any()
        ]
        keys = self._keys
        return Rows(
            b"".join(keys[row] or b"" for row in rows.tolist()),
            self._number[self._parent[rows]].tolist(),
            self._depth[rows].tolist(),
            self._children[rows].tolist(),
            self._hits[rows].tolist(),
            self._stamp[rows].tolist(),
            self._flights[rows].tolist(),
            pins.tolist(),
            copies,
        )


def columns_of(view: View, model: Model) -> Question[Columns]:
    """The columns of a model's index. Raises NotFound for one that goes meanwhile."""
    index = model.blocks.index
    places = [4 * (1 + len(place.pages)) for place in index.places]
    arena = yield from off_loop(partial(Arena, (len(index.keys) + ROWS_MORE) * (BYTES_A_ROW + sum(places))))
    view.model(model.id)
    latest = int(np.frombuffer(index.stamp, np.uint64).max(initial=0))
    keys: list[bytes | None] = []
    while len(keys) < len(index.keys):
        keys += index.keys[len(keys) : len(keys) + KEYS_A_STEP]
        yield None
        view.model(model.id)
    return Columns(model, keys, latest, arena)


class Dump(NamedTuple):
    """A model's index, to be read by ``columns.rows``, what its columns mean, and the model's last requests."""

    model: int
    model_name: str
    namespace: bytes
    block_tokens: int
    groups: list[str]
    full_groups: tuple[int, ...]
    columns: Columns
    requests: list[RecentRequest]


def dump(view: View, model_id: int) -> Question[Dump]:
    """The index of a model, or (0) of the only one. Raises NotFound, InvalidRequest."""
    model = view.model_or_only(model_id)
    if model is None:
        raise NotFound("model", model_id, "there is none to dump yet")
    columns = yield from columns_of(view, model)
    yield from off_loop(columns.put_in_order)
    layout = model.layout
    return Dump(
        model.id,
        model.name,
        view.namespace_of(model),
        layout.block_tokens,
        [group.name for group in layout.groups],
        tuple(layout.full_groups),
        columns,
        model.recent.all(),
    )
