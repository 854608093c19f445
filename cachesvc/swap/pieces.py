"""Cuts the planes of a step into pieces that one pitched copy can take: equal width, constant pitch on
both sides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from cachesvc.model.geometry import Geometry

KEPT_CUTS = 1 << 14
"""Steps whose pieces are remembered: some 200 a group of 64 layers, over all step sizes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """``planes`` rows of ``row_width`` bytes a block; ``device`` and ``host`` are the first row's place
    for page 0."""

    planes: int
    row_width: int
    device: int
    host: int
    device_pitch: int
    host_pitch: int
    device_stride: int
    host_stride: int

    @property
    def is_dense(self) -> bool:
        """True where a run of blocks is one stretch of bytes on both sides."""
        return self.planes == 1 and self.row_width == self.device_stride == self.host_stride


class Same:
    """A geometry by identity: hashing one by value would cost more than cutting it."""

    __slots__ = ("geometry",)

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    def __hash__(self) -> int:
        return id(self.geometry)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.geometry is other.geometry


@lru_cache(maxsize=KEPT_CUTS)
def pieces_of(
    device: Same, host: Same, layers: tuple[int, ...], max_pitch_bytes: int
) -> tuple[tuple[Piece, Piece], ...]:
    """Pieces that cover the planes of ``layers`` exactly once, each with itself at offset 0: pieces that
    differ in their place alone have that in common. Both geometries list the same planes in one order."""
    pieces: list[Piece] = []
    for piece in _stretches(device.geometry, host.geometry, layers, max_pitch_bytes):
        last = pieces[-1] if pieces else None
        grown = None if last is None else _stacked(last, piece, max_pitch_bytes)
        if grown is None:
            pieces.append(piece)
        else:
            pieces[-1] = grown
    return tuple((piece, replace(piece, device=0, host=0)) for piece in pieces)


def _stretches(device: Geometry, host: Geometry, layers: tuple[int, ...], max_width: int) -> list[Piece]:
    """One piece of one row for each plane; neighbours on both sides become one row (a block-major device
    pool)."""
    rows: list[Piece] = []
    for ours, theirs in zip(device.spans, host.spans, strict=True):
        if ours.plane.layer not in layers:
            continue
        width = ours.width
        row = Piece(1, width, ours.offset, theirs.offset, width, width, ours.page_stride, theirs.page_stride)
        last = rows[-1] if rows else None
        if last is not None and _touches(last, row, max_width):
            width = last.row_width + row.row_width
            rows[-1] = replace(last, row_width=width, device_pitch=width, host_pitch=width)
        else:
            rows.append(row)
    return rows


def _touches(last: Piece, row: Piece, max_width: int) -> bool:
    width = last.row_width + row.row_width
    return (
        last.device + last.row_width == row.device
        and last.host + last.row_width == row.host
        and (last.device_stride, last.host_stride) == (row.device_stride, row.host_stride)
        and width <= min(row.device_stride, row.host_stride, max_width)
    )


def _stacked(last: Piece, row: Piece, max_pitch_bytes: int) -> Piece | None:
    """``last`` with one more row, or None where width, stride or pitch differ or no copy can have such a
    pitch."""
    if (last.row_width, last.device_stride, last.host_stride) != (
        row.row_width,
        row.device_stride,
        row.host_stride,
    ):
        return None
    device_pitch = row.device - last.device - (last.planes - 1) * last.device_pitch
    host_pitch = row.host - last.host - (last.planes - 1) * last.host_pitch
    if last.planes > 1 and (device_pitch, host_pitch) != (last.device_pitch, last.host_pitch):
        return None
    if not all(row.row_width <= pitch <= max_pitch_bytes for pitch in (device_pitch, host_pitch)):
        return None
    return replace(last, planes=last.planes + 1, device_pitch=device_pitch, host_pitch=host_pitch)
