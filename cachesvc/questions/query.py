"""Operators' views of the index: blocks and trees.

Each question copies the columns that it needs in one go, computes off the loop which rows to show, and looks these few
up again; rows that have gone meanwhile are passed over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from cachesvc.flows.transfers import ticket_view
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.tier_copies import NO_ROW
from cachesvc.model.answers import TicketView
from cachesvc.model.errors import InvalidRequest, NotFound
from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.layout import Layout
from cachesvc.model.words import CopyState, Tier
from cachesvc.questions.dump import Ints, TreeShape, int32s, int64s, live_now
from cachesvc.questions.view import Listed, Question, View, in_steps, off_loop

BLOCKS_LISTED = 64
NODES_LISTED = 256
TREE_DEPTH = 8
MAX_LISTED = 4096
PREFIX_DIGITS_MIN = 4
ROWS_A_STEP = 4096
MOST_NAMED = 4


class CopyLine(NamedTuple):
    place: str
    group: str
    state: str
    page: int


class BlockLine(NamedTuple):
    key: bytes
    parent_key: bytes
    position: int
    children: int
    pins: int
    hits: int
    stamp: int
    copies: tuple[CopyLine, ...]


class TreeLine(NamedTuple):
    """One node of a subtree, in depth-first order; ``descendants`` counts the blocks below it."""

    key: bytes
    position: int
    depth: int
    children: int
    tiers: str
    descendants: int
    hits: int


class TreeRow(NamedTuple):
    """A node before it is looked up."""

    row: int
    depth: int
    descendants: int


def blocks(
    view: View, model_id: int, *, keys: bytes = b"", digits: Seq[str] = (), by_hits: bool = False, limit: int = 0
) -> Question[Listed[BlockLine]]:
    """Blocks of a model: those of packed ``keys`` and those whose keys begin with ``digits``; where neither is given,
    the most recently used, or ``by_hits`` the most often hit. ``limit`` 0: ``BLOCKS_LISTED``; at most ``MAX_LISTED``.

    ``model_id`` 0 names the only model there is, and nothing where there is none. Raises NotFound, InvalidRequest.
    """
    model = view.model_or_only(model_id)
    if model is None:
        return Listed([], truncated=False)
    limit = min(limit or BLOCKS_LISTED, MAX_LISTED)
    if keys or digits:
        if len(keys) % KEY_BYTES:
            raise InvalidRequest(f"keys has {len(keys)} bytes, which is not a multiple of {KEY_BYTES}")
        wanted = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        for text in digits[:MAX_LISTED]:
            key = yield from one_key(model, text)
            wanted.append(key)
        known = model.blocks.index.rows
        rows = [known[key] for key in wanted if key in known]
    else:
        rows = yield from off_loop(partial(Ranking(model, by_hits=by_hits).first, limit + 1))
    lines = yield from block_lines(model, rows[:limit])
    return Listed(lines, len(rows) > limit)


def tree(
    view: View, model_id: int, *, key: bytes = b"", digits: str = "", depth: int = 0, limit: int = 0
) -> Question[Listed[TreeLine]]:
    """The index below a block, named by its key or by how that begins, as bytes or ``digits``; or below the root.

    ``depth`` 0: ``TREE_DEPTH``. ``limit`` 0: ``NODES_LISTED``, at most ``MAX_LISTED``.

    ``model_id`` 0 names the only model there is, and nothing where there is none. Raises NotFound, InvalidRequest.
    """
    model = view.model_or_only(model_id)
    if model is None:
        return Listed([], truncated=False)
    if key or digits:
        key = yield from one_key(model, digits or key.hex())
    nodes = partial(Tree(model, key).nodes, depth or TREE_DEPTH, min(limit or NODES_LISTED, MAX_LISTED))
    rows, truncated = yield from off_loop(nodes)
    lines = yield from tree_lines(model, rows)
    return Listed(lines, truncated)


def one_key(model: Model, digits: str) -> Question[bytes]:
    """The key of the one block whose key begins with these hexadecimal digits.

    Raises InvalidRequest for what is not such text or names several blocks, NotFound.
    """
    text = digits.strip().lower()
    if len(text) < PREFIX_DIGITS_MIN or len(text) > 2 * KEY_BYTES or set(text) - set("0123456789abcdef"):
        raise InvalidRequest(
            f"{digits!r} is not {PREFIX_DIGITS_MIN} to {2 * KEY_BYTES} hexadecimal digits of a key; see ListBlocks "
            "(cachesvc blocks)"
        )
    found = yield from keys_beginning(model, text, MOST_NAMED)
    if not found and len(text) == 2 * KEY_BYTES:
        raise NotFound("block", text, "it is not resident, or belongs to another model")
    if not found:
        raise NotFound("block", text, "no resident block's key begins so; see ListBlocks (cachesvc blocks)")
    if len(found) > 1:
        named = ", ".join(key.hex()[: len(text) + 8] for key in found[:MOST_NAMED])
        raise InvalidRequest(f"{text} names several blocks ({named}, ...); give more digits")
    return found[0]


def keys_beginning(model: Model, digits: str, limit: int) -> Question[list[bytes]]:
    """Resident keys that begin with these hexadecimal digits; the search ends once it has more than ``limit``."""
    index = model.blocks.index
    start = bytes.fromhex(digits[: len(digits) // 2 * 2])
    if len(start) == KEY_BYTES:
        return [start] if start in index.rows else []
    found: list[bytes] = []
    for first in range(0, len(index.keys), ROWS_A_STEP):
        few = [key for key in index.keys[first : first + ROWS_A_STEP] if key is not None and key.startswith(start)]
        found += [key for key in few if key.hex().startswith(digits)]
        if len(found) > limit:
            break
        yield None
    return found


class Ranking:
    """Order of blocks: by last access, or by hits. ``first`` is pure."""

    def __init__(self, model: Model, *, by_hits: bool) -> None:
        index = model.blocks.index
        self._stamp, self._depth = int64s(index.stamp), int32s(index.depth)
        self._hits = int32s(index.hits) if by_hits else None
        self._live = live_now(index)

    def first(self, count: int) -> list[int]:
        rows = np.flatnonzero(self._live)
        if self._hits is not None:
            rows = rows[self._hits[rows] > 0]
        keys: Ints = self._stamp[rows] if self._hits is None else self._hits[rows].astype(np.int64)
        if len(rows) > count:
            edge = np.partition(keys, len(keys) - count)[len(keys) - count]
            keep = keys >= edge
            rows, keys = rows[keep], keys[keep]
        order = np.lexsort((-self._depth[rows], -self._stamp[rows], -keys))
        return [int(row) for row in rows[order][:count]]


def block_lines(model: Model, rows: list[int]) -> Question[list[BlockLine]]:
    """The rows that still hold a block."""
    index = model.blocks.index
    lines: list[BlockLine] = []
    for some in in_steps(rows):
        lines += [block_line(model, row) for row in some if index.keys[row] is not None and index.has_copy(row)]
        yield None
    return lines


def block_line(model: Model, row: int) -> BlockLine:
    """Line of a row that holds a block."""
    index = model.blocks.index
    copies = tuple(
        CopyLine(place.name, model.layout.groups[group].name, CopyState(states[row]).name, place.pages[group][row])
        for place in index.places
        for group, states in enumerate(place.states)
        if states[row]
    )
    parent = index.parent[row]
    return BlockLine(
        index.keys[row] or b"",
        (index.keys[parent] or b"") if parent != NO_ROW else b"",
        index.depth[row],
        index.children[row],
        sum(place.pins[row] for place in index.places),
        index.hits[row],
        index.stamp[row],
        copies,
    )


class Tree:
    """The index below one block or the root, of one moment. ``nodes`` is pure."""

    def __init__(self, model: Model, key: bytes) -> None:
        """``key``: empty for the root. Raises NotFound for a key that is not resident."""
        index = model.blocks.index
        if key and key not in index.rows:
            raise NotFound("block", key.hex(), "it is not resident, or belongs to another model")
        self._top = index.rows[key] if key else NO_ROW
        self._shape = TreeShape(index)

    def nodes(self, depth: int, limit: int) -> tuple[list[TreeRow], bool]:
        """Depth first, the biggest subtrees first; and whether something was left out."""
        below, children = self._shape.descendants(), self._shape.children_of()

        def largest_last(row: int) -> list[int]:
            rows = children.of(row)
            kept = rows[np.argsort(-below[rows], kind="stable")][: limit + 1]
            return [int(child) for child in kept[::-1]]

        out: list[TreeRow] = []
        stack = [(self._top, 0)] if self._top != NO_ROW else [(row, 0) for row in largest_last(NO_ROW)]
        truncated = False
        while stack:
            row, level = stack.pop()
            if len(out) >= limit:
                return out, True
            out.append(TreeRow(row, level, int(below[row])))
            if level + 1 < depth:
                stack.extend((child, level + 1) for child in largest_last(row))
            else:
                truncated = truncated or bool(below[row])
        return out, truncated


def tree_lines(model: Model, rows: list[TreeRow]) -> Question[list[TreeLine]]:
    """The nodes that still hold a block."""
    index = model.blocks.index
    lines: list[TreeLine] = []
    for some in in_steps(rows):
        lines += [
            TreeLine(
                key,
                index.depth[node.row],
                node.depth,
                index.children[node.row],
                _tiers(model, node.row),
                node.descendants,
                index.hits[node.row],
            )
            for node in some
            if (key := index.keys[node.row]) is not None
        ]
        yield None
    return lines


def _tiers(model: Model, row: int) -> str:
    tiers = (
        (Tier.HOST if place is model.blocks.host else Tier.DEVICE).value
        for place in reversed(model.blocks.index.places)
        if place.states[place.lead][row]
    )
    return "+".join(dict.fromkeys(tiers))


SEQUENCES_LISTED = 1024
TICKETS_LISTED = 64


class ReplicaLine(NamedTuple):
    """One replica of a model, and how many leases are on it."""

    replica: int
    devices: tuple[str, ...]
    leases: int


class ModelLine(NamedTuple):
    """One model. Pages are by group; ``device_pages``: of its first replica. ``out_of_service``: why its calls are
    refused, empty where they are served."""

    model_id: int
    model: str
    namespace: bytes
    layout: Layout
    replicas: list[ReplicaLine]
    blocks: int
    host_pages: tuple[int, ...]
    device_pages: tuple[int, ...]
    out_of_service: str
    reserved_pages: int
    display_name: str
    weights_version: str


class SequenceLine(NamedTuple):
    """One open sequence and what it holds."""

    lease_id: str
    sequence_id: int
    blocks: int
    sealed_blocks: int
    private_pages: int
    swapped_out: bool
    failed: str


def models(view: View) -> Question[list[ModelLine]]:
    leases = Counter((lease.model, lease.replica) for lease in view.leases())
    lines: list[ModelLine] = []
    for some in in_steps(list(view.models())):
        lines += [
            ModelLine(
                model.id,
                model.name,
                view.namespace_of(model),
                model.layout,
                [ReplicaLine(each.id, each.devices, leases[model.id, each.id]) for each in model.replicas],
                len(model.blocks.index),
                model.host_pages,
                next((each.device_pages for each in (*model.replicas, *model.lost)), ()),
                model.suspect,
                model.reserved_pages,
                model.display_name,
                model.weights_version,
            )
            for model in some
        ]
        yield None
    return lines


def sequences(view: View, lease_id: str = "", limit: int = 0) -> Question[Listed[SequenceLine]]:
    """Open sequences of a lease, named as the caller may see it, or (empty) of every lease.

    ``limit`` 0: ``SEQUENCES_LISTED``; at most ``MAX_LISTED``.
    """
    limit = min(limit or SEQUENCES_LISTED, MAX_LISTED)
    every = (
        (view.lease_id(lease), sequence)
        for lease in view.leases()
        if lease_id in ("", lease.id, view.lease_id(lease))
        for sequence in lease.sequences.values()
    )
    found = list(islice(every, limit + 1))
    lines: list[SequenceLine] = []
    for some in in_steps(found[:limit]):
        lines += [
            SequenceLine(
                shown_id,
                sequence.id,
                sequence.blocks,
                sequence.sealed,
                sum(len(own) for own in sequence.own),
                sequence.swapped_out,
                sequence.failed,
            )
            for shown_id, sequence in some
        ]
        yield None
    return Listed(lines, len(found) > limit)


def tickets(view: View, limit: int = 0) -> Question[list[TicketView]]:
    """Transfers: those that run, then those that ended, the newest first. ``limit`` 0: ``TICKETS_LISTED``."""
    lines: list[TicketView] = []
    for some in in_steps(list(islice(view.tickets(), min(limit or TICKETS_LISTED, MAX_LISTED)))):
        lines += map(ticket_view, some)
        yield None
    return lines
