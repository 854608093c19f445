"""A model's index as columns of one moment, parents before children, or its last requests: for tools that need no
daemon.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from kvcache.v1 import inspect_pb2

from cachesvc.flows.core import Core
from cachesvc.ledger.block_index import BlockIndex
from cachesvc.ledger.change_log import HOST_NUMBER, place_name
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.reuse_stats import RecentRequest
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.errors import NotFound
from cachesvc.model.words import NO_PAGE, READY, PageState
from cachesvc.questions.view import Question, View, off_loop

KEYS_A_STEP = 8192
"""Some 0.1 ms: the keys lie anywhere."""
BYTES_A_ROW = 26
"""Bytes of a row in the columns of the index itself."""
ROWS_MORE = 4096
"""The index may grow while its keys are copied."""


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
            inspect_pb2.IndexPool(
                place=place.name,
                group=model.layout.groups[g].name,
                capacity=pool.capacity,
                free=pool.free,
                page_bytes=model.layout.page_bytes(g),
            )
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

    def rows(self, first: int, count: int) -> inspect_pb2.IndexRows:
        """Blocks ``first`` to ``first + count``, or to the end."""
        rows = self._order[first : first + count]
        pins = np.sum([column[rows] for column in self._pins], axis=0)
        copies = [
            inspect_pb2.IndexCopies(
                place=place,
                group=group,
                states=states[rows].tobytes(),
                pages=np.where(states[rows] > 0, pages[rows], NO_PAGE).tolist(),
            )
            for place, columns in enumerate(self._states)
            for group, (states, pages) in enumerate(zip(columns, self._pages[place], strict=True))
            if states[rows].any()
        ]
        keys = self._keys
        return inspect_pb2.IndexRows(
            keys=b"".join(keys[row] or b"" for row in rows.tolist()),
            parents=self._number[self._parent[rows]].tolist(),
            positions=self._depth[rows].tolist(),
            children=self._children[rows].tolist(),
            hits=self._hits[rows].tolist(),
            stamps=self._stamp[rows].tolist(),
            transfers=self._flights[rows].tolist(),
            pins=pins.tolist(),
            copies=copies,
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

    head: inspect_pb2.IndexHead
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
    head = inspect_pb2.IndexHead(
        format=1,
        taken_unix_seconds=time.time(),
        model_id=model.id,
        model=model.name,
        namespace_hex=view.namespace_of(model).hex(),
        block_tokens=layout.block_tokens,
        groups=[group.name for group in layout.groups],
        full_groups=layout.full_groups,
        places=columns.places,
        blocks=columns.blocks,
        pools=columns.pools,
    )
    return Dump(head, columns, model.recent.all())


# Copies of the index's arrays, taken in one go: one moment of the ledger, while the ledger goes on.
#
# Copying a column of a million blocks is some megabytes of memory; walking it in Python is a second. So a question
# about everything copies the columns that it needs in one go, and computes off the loop. A view of an array is never
# kept: an array that is exported cannot grow.

Ints = npt.NDArray[np.int64]
Column = npt.NDArray[np.generic]
Mask = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]


def int32s(column: array[int]) -> Int32s:
    """A copy of an array of 32-bit numbers."""
    return np.frombuffer(column, np.int32).copy() if column else np.empty(0, np.int32)


def int64s(column: array[int]) -> Ints:
    """A copy of an array of 64-bit numbers."""
    return np.frombuffer(column, np.int64).copy() if column else np.empty(0, np.int64)


def uint16s(column: array[int]) -> npt.NDArray[np.uint16]:
    """A copy of an array of 16-bit numbers."""
    return np.frombuffer(column, np.uint16).copy() if column else np.empty(0, np.uint16)


Number = TypeVar("Number", bound=np.generic)


class Arena:
    """Memory for copies that was written once: to write to fresh memory costs several times what a copy does."""

    def __init__(self, size_bytes: int) -> None:
        self._bytes = np.ones(size_bytes, np.uint8)
        self._used = 0

    def copy(self, column: array[int], kind: type[Number]) -> npt.NDArray[Number]:
        """A copy of an array of numbers, in fresh memory where the arena is full."""
        source = np.frombuffer(column, kind) if column else np.empty(0, kind)
        first = -(-self._used // source.itemsize) * source.itemsize
        end = first + source.nbytes
        if end > len(self._bytes):
            return source.copy()
        self._used = end
        out = self._bytes[first:end].view(kind)
        out[:] = source
        return out


def states(column: bytearray) -> Bytes:
    """A copy of a column of states."""
    return np.frombuffer(bytes(column), np.uint8)


def place_states(place: Place) -> list[Bytes]:
    """A copy of a place's states, one column a group."""
    return [states(column) for column in place.states]


def live_rows(rows: int, columns: list[list[Bytes]]) -> Mask:
    """Mask of the rows with a copy in any of the places whose states are given: all that the index knows."""
    live = np.zeros(rows, np.bool_)
    for place in columns:
        for column in place:
            live |= column != 0
    return live


def live_now(index: BlockIndex) -> Mask:
    return live_rows(len(index.keys), [place_states(place) for place in index.places])


class TreeShape:
    """Parents, depths and presence, of one moment; computes subtrees. Everything but the making is pure."""

    def __init__(self, index: BlockIndex) -> None:
        self.parent = int32s(index.parent)
        self.depth = int32s(index.depth)
        self.live = live_now(index)

    def descendants(self) -> Ints:
        below = np.zeros(len(self.parent), np.int64)
        rows = np.flatnonzero(self.live & (self.parent != NO_ROW))
        order = rows[np.argsort(-self.depth[rows], kind="stable")]
        levels = self.depth[order]
        edges = np.flatnonzero(np.diff(levels)) + 1
        for level in np.split(order, edges):  # the deepest first: what is below a level is known by then
            np.add.at(below, self.parent[level], below[level] + 1)
        return below

    def children_of(self) -> ChildLists:
        return ChildLists(self.parent, self.live)


class ChildLists:
    """Rows sorted by parent, so that the children of one are a slice."""

    def __init__(self, parent: Int32s, live: Mask) -> None:
        rows = np.flatnonzero(live)
        self._rows = rows[np.argsort(parent[rows], kind="stable")]
        self._parents = parent[self._rows]

    def of(self, row: int) -> Ints:
        """The children of a row; of NO_ROW: the roots."""
        first, last = np.searchsorted(self._parents, [row, row + 1])
        return self._rows[first:last]


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
