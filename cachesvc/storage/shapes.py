"""Objects that a model's blocks become: one for each group and host rank, or one for all where pages are small."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from cachesvc.model.layout import Layout
from cachesvc.storage.seam import LAYOUT_ID_BYTES, WHOLE, Part, Scope

SMALL_PAGE_BYTES = 256 << 10
"""Below it an object of its own costs more than its bytes: a file of 256 KiB takes three times the processor time for
each byte that one of 1 MiB does (ext4, direct I/O, 2026-11)."""


class ModelFacts(Protocol):
    """Facts of a model that a tier needs."""

    @property
    def id(self) -> int:
        """Number of the model in this daemon."""

    @property
    def name(self) -> str:
        """Operators' name of the model."""

    @property
    def namespace(self) -> bytes:
        """Namespace of its keys."""

    @property
    def layout(self) -> Layout:
        """Groups and pages of the model."""


class Shape(NamedTuple):
    """An object of each block. ``pieces``: the pages in it, as (group, host rank); ``groups``: theirs."""

    part: Part
    pieces: tuple[tuple[int, int], ...]
    groups: tuple[int, ...]


class Shapes(NamedTuple):
    """A model's objects. ``full``: without which there is no block; ``windows``: of windowed groups."""

    scope: Scope
    full: tuple[Shape, ...]
    windows: tuple[Shape, ...]
    block_bytes: int

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts that a block must have."""
        return tuple(shape.part for shape in self.full)


def shapes_of(model: ModelFacts) -> Shapes:
    """Shapes of a model's objects."""
    layout = model.layout
    full, windows = _alone(layout, layout.full_groups), _alone(layout, layout.window_groups)
    if len(full) > 1 and max(map(layout.page_bytes, layout.full_groups)) < SMALL_PAGE_BYTES:
        pieces = tuple(piece for shape in full for piece in shape.pieces)
        full = (Shape(Part(WHOLE, 0, layout.ranks), pieces, layout.full_groups),)
    block_bytes = sum(layout.page_bytes(group) for shape in full for group, _ in shape.pieces)
    return Shapes(Scope(model.namespace, layout.fingerprint[:LAYOUT_ID_BYTES]), full, windows, block_bytes)


def _alone(layout: Layout, groups: tuple[int, ...]) -> tuple[Shape, ...]:
    return tuple(
        Shape(Part(group, rank, layout.host_ranks(group)), ((group, rank),), (group,))
        for group in groups
        for rank in range(layout.host_ranks(group))
    )
