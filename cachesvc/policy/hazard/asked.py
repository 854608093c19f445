"""Questions of the policy to the ledger: the path of a request, and the heads of the queues."""

from __future__ import annotations

from typing import Protocol

from cachesvc.policy.hazard.rates import Floats, Ints


class Path(Protocol):
    """A request's blocks from the root on: ``known`` of them resident or remembered, ``resident`` in the cache."""

    blocks: int
    known: int
    resident: int

    def key(self, position: int) -> bytes:
        """Key of a block."""

    def segment(self, position: int) -> int:
        """Segment of a resident block."""


class Heads(Protocol):
    """The first candidate of each queue of a place: ``ranks`` (``NO_RANK``: there is none), ``since`` when its age
    counts (seconds), its ``segments``, and its position in the prompt (``depths``)."""

    ranks: Ints
    since: Floats
    segments: list[int]
    depths: Ints
