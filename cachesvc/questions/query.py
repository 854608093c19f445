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
from kvcache.v1 import admin_pb2

from cachesvc.flows.transfers import ticket_view
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.sequences import OpenSequence
from cachesvc.ledger.tier_copies import NO_ROW
from cachesvc.model.errors import InvalidRequest, NotFound
from cachesvc.model.words import KEY_BYTES, CopyState, Tier
from cachesvc.questions.dump import Ints, TreeShape, int32s, int64s, live_now
from cachesvc.questions.view import Question, View, listed, off_loop
from cachesvc.wire.convert import layout_to_proto, ticket_to_proto

BLOCKS_LISTED = 64
NODES_LISTED = 256
TREE_DEPTH = 8
MAX_LISTED = 4096
PREFIX_DIGITS_MIN = 4
ROWS_A_STEP = 4096
MOST_NAMED = 4


class TreeRow(NamedTuple):
    """A node before it is looked up."""

    row: int
    depth: int
    descendants: int


def blocks(
    view: View, model_id: int, *, keys: bytes = b"", digits: Seq[str] = (), by_hits: bool = False, limit: int = 0
) -> Question[list[admin_pb2.ListBlocksResponse]]:
    """Blocks of a model: those of packed ``keys`` and those whose keys begin with ``digits``; where neither is given,
    the most recently used, or ``by_hits`` the most often hit. ``limit`` 0: ``BLOCKS_LISTED``; at most ``MAX_LISTED``.

    ``model_id`` 0 names the only model there is, and nothing where there is none. Raises NotFound, InvalidRequest.
    """
    model = view.model_or_only(model_id)
    if model is None:
        return [admin_pb2.ListBlocksResponse()]
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
    line = partial(block_line, model)
    truncated = len(rows) > limit
    return (yield from listed(admin_pb2.ListBlocksResponse, "blocks", rows[:limit], line, truncated=truncated))


def tree(
    view: View, model_id: int, *, key: bytes = b"", digits: str = "", depth: int = 0, limit: int = 0
) -> Question[list[admin_pb2.GetTreeResponse]]:
    """The index below a block, named by its key or by how that begins, as bytes or ``digits``; or below the root.

    ``depth`` 0: ``TREE_DEPTH``. ``limit`` 0: ``NODES_LISTED``, at most ``MAX_LISTED``.

    ``model_id`` 0 names the only model there is, and nothing where there is none. Raises NotFound, InvalidRequest.
    """
    model = view.model_or_only(model_id)
    if model is None:
        return [admin_pb2.GetTreeResponse()]
    if key or digits:
        key = yield from one_key(model, digits or key.hex())
    nodes = partial(Tree(model, key).nodes, depth or TREE_DEPTH, min(limit or NODES_LISTED, MAX_LISTED))
    rows, truncated = yield from off_loop(nodes)
    line = partial(tree_line, model)
    return (yield from listed(admin_pb2.GetTreeResponse, "nodes", rows, line, truncated=truncated))


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


def block_line(model: Model, row: int) -> admin_pb2.BlockStatus | None:
    """Line of a row; None where it holds no block any more."""
    index = model.blocks.index
    key, parent = index.keys[row], index.parent[row]
    if key is None or not index.has_copy(row):
        return None
    above = (index.keys[parent] or b"") if parent != NO_ROW else b""
    return admin_pb2.BlockStatus(
        key=key,
        key_hex=key.hex(),
        parent_key=above,
        parent_key_hex=above.hex(),
        position=index.depth[row],
        children=index.children[row],
        pins=sum(place.pins[row] for place in index.places),
        hits=index.hits[row],
        stamp=index.stamp[row],
        copies=[
            admin_pb2.BlockCopy(
                place=place.name,
                group=model.layout.groups[group].name,
                state=CopyState(states[row]).name,
                page=place.pages[group][row],
            )
            for place in index.places
            for group, states in enumerate(place.states)
            if states[row]
        ],
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


def tree_line(model: Model, node: TreeRow) -> admin_pb2.TreeNode | None:
    """Line of a node; None where it holds no block any more."""
    index = model.blocks.index
    key = index.keys[node.row]
    if key is None:
        return None
    return admin_pb2.TreeNode(
        key=key,
        key_hex=key.hex(),
        position=index.depth[node.row],
        depth=node.depth,
        children=index.children[node.row],
        tiers=_tiers(model, node.row),
        descendants=node.descendants,
        hits=index.hits[node.row],
    )


def _tiers(model: Model, row: int) -> str:
    tiers = (
        (Tier.HOST if place is model.blocks.host else Tier.DEVICE).value
        for place in reversed(model.blocks.index.places)
        if place.states[place.lead][row]
    )
    return "+".join(dict.fromkeys(tiers))


SEQUENCES_LISTED = 1024
TICKETS_LISTED = 64


def models(view: View) -> Question[list[admin_pb2.ListModelsResponse]]:
    """Every model, one a step: layouts are long."""
    leases = Counter((lease.model, lease.replica) for lease in view.leases())

    def line(model: Model) -> admin_pb2.ModelStatus:
        namespace = view.namespace_of(model)
        return admin_pb2.ModelStatus(
            model_id=model.id,
            model=model.name,
            namespace=namespace,
            namespace_hex=namespace.hex(),
            layout=layout_to_proto(model.layout),
            replicas=[
                admin_pb2.ReplicaStatus(replica=each.id, devices=each.devices, leases=leases[model.id, each.id])
                for each in model.replicas
            ],
            blocks=len(model.blocks.index),
            host_pages=model.host_pages,
            device_pages=next((each.device_pages for each in (*model.replicas, *model.lost)), ()),
            out_of_service=model.suspect,
            reserved_pages=model.reserved_pages,
            display_name=model.display_name,
            weights_version=model.weights_version,
        )

    return (yield from listed(admin_pb2.ListModelsResponse, "models", view.models(), line, step=1))


def sequences(view: View, lease_id: str = "", limit: int = 0) -> Question[list[admin_pb2.ListSequencesResponse]]:
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

    def line(shown: tuple[str, OpenSequence]) -> admin_pb2.SequenceStatus:
        lease, sequence = shown
        return admin_pb2.SequenceStatus(
            lease_id=lease,
            sequence_id=sequence.id,
            blocks=sequence.blocks,
            sealed_blocks=sequence.sealed,
            private_pages=sum(map(len, sequence.own)),
            swapped_out=sequence.swapped_out,
            failed=sequence.failed,
        )

    truncated = len(found) > limit
    return (yield from listed(admin_pb2.ListSequencesResponse, "sequences", found[:limit], line, truncated=truncated))


def tickets(view: View, limit: int = 0) -> Question[list[admin_pb2.ListTicketsResponse]]:
    """Transfers: those that run, then those that ended, the newest first. ``limit`` 0: ``TICKETS_LISTED``."""
    found = list(islice(view.tickets(), min(limit or TICKETS_LISTED, MAX_LISTED)))
    return (
        yield from listed(
            admin_pb2.ListTicketsResponse, "tickets", found, lambda ticket: ticket_to_proto(ticket_view(ticket))
        )
    )
