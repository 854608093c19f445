"""Questions of the flows to other nodes, for blocks that these compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from cachesvc.flows.context.core import Promise
from cachesvc.ledger.ledger import Model
from cachesvc.model.errors import CacheError
from cachesvc.model.numbers.sharing import Party
from cachesvc.peer.borrower import PeerStorage
from cachesvc.peer.fleet.control import Borrowed, PeerPaused, PeerRefused
from cachesvc.service.loop.node import Node
from cachesvc.storage.seam import ObjectName
from cachesvc.storage.shapes import shapes_of
from cachesvc.telemetry import events

FULL_PAUSE_SECONDS = 0.1
"""Pause before a peer is asked again that has lent as much as it may, seconds."""
WARN_SECONDS = 10.0
"""Between two warnings that a peer is not asked: requests may name any number of them."""


class PeerLenders:
    """Lenders seam of the flows. ``own``: addresses at which this node lends."""

    def __init__(self, node: Node, peers: PeerStorage, own: Callable[[], tuple[str, ...]]) -> None:
        self._node = node
        self._peers = peers
        self._own = own
        self._warn_at = 0.0
        node.core.lenders = self

    def is_here(self, peer: str) -> bool:
        """See ``flows.core.Lenders``."""
        return peer in self._own()

    def ask(
        self, model: Model, party: Party, keys: bytes, peer: str, seconds: float, told: Callable[[Promise], None]
    ) -> str:
        """See ``flows.core.Lenders``."""
        shapes = shapes_of(model)
        parts = [shape.part for shape in (*shapes.full, *shapes.windows)]

        def answered(answer: Borrowed | CacheError) -> None:
            promise = _promise(answer, len(parts), len(shapes.full))
            self._node.soon(partial(self._node.run_news, model.id, partial(told, promise)))

        try:
            self._peers.expect(peer, shapes.scope, keys, parts, seconds, answered, party)
        except CacheError as error:
            if self._node.now() >= self._warn_at:
                self._warn_at = self._node.now() + WARN_SECONDS
                events.warning("peer_not_asked", peer=peer, reason=str(error))
            return str(error)
        return ""

    def drop(self, model: Model, keys: Sequence[bytes]) -> None:
        """See ``flows.core.Lenders``."""
        shapes = shapes_of(model)
        self._peers.drop([ObjectName(shapes.scope, key, shapes.full[0].part) for key in keys])


def _promise(answer: Borrowed | CacheError, parts: int, full: int) -> Promise:
    if isinstance(answer, PeerPaused):
        return Promise(problem=str(answer), ask_in=answer.seconds)
    if isinstance(answer, PeerRefused) and answer.is_full:
        return Promise(problem=str(answer), ask_in=FULL_PAUSE_SECONDS)
    if isinstance(answer, CacheError):
        return Promise(problem=str(answer))
    there = () if answer.loan is None else answer.loan.lent
    lent = 0
    while (lent + 1) * parts <= len(there) and all(there[lent * parts : lent * parts + full]):
        lent += 1
    return Promise(lent, answer.computing, answer.epoch, is_given_up=answer.is_given_up)
