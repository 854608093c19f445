"""Blocks on their way from a tier or to it, and the news of their objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.words import NO_PAGE
from cachesvc.storage.seam import Outcome, key_at
from cachesvc.storage.shapes import Shape, Shapes


class News(NamedTuple):
    """News of an object: of a fetch (``ticket``), or of a block that was written (``key``)."""

    model: int
    ticket: int
    key: bytes
    block: int
    groups: tuple[int, ...]
    outcome: Outcome | None  # None: it was LATE, and is back
    shape: Shape | None = None


class Coming(NamedTuple):
    """Blocks of a fetch: ``pages[g]`` has a host page for each of packed ``keys``, or NO_PAGE. ``parent``: the key of
    the block above the first; empty for none. ``some``: objects that are asked for, by block; None: all."""

    model: int
    shapes: Shapes
    ticket: int
    keys: bytes
    pages: Sequence[Sequence[int]]
    parent: bytes
    some: Sequence[tuple[int, Shape]] | None = None

    def parent_of(self, block: int) -> bytes:
        """The key of the block above one of them."""
        return key_at(self.keys, block - 1) if block else self.parent

    def wanted(self) -> list[tuple[int, Shape]]:
        """Objects of the fetch, by block."""
        if self.some is not None:
            return list(self.some)
        return [
            (block, shape)
            for block in range(len(self.keys) // KEY_BYTES)
            for shape in (*self.shapes.full, *self.shapes.windows)
            if all(self.pages[group][block] != NO_PAGE for group in shape.groups)
        ]

    def news(self) -> list[News]:
        """News of each, without an outcome."""
        wanted = self.wanted()
        return [News(self.model, self.ticket, b"", block, shape.groups, None, shape) for block, shape in wanted]


Tell = Callable[[int, int, bytes, list[News]], None]
"""``(model, ticket, key, news)``: of one fetch or one written block. On the ledger thread."""


TellGone = Callable[[int, list[bytes]], None]
"""``(model, keys)``: of blocks that the engine has let go of. On the ledger thread."""
