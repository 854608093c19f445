"""First-fit over the free bytes of the host pool's chunks. Plain and synchronous; the pool's lock guards
it."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

ALIGN_BYTES = 4096


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """Bytes of one chunk. ``was_used``: they may hold what somebody left there, and are zeroed before they
    serve."""

    chunk: int
    offset: int
    size_bytes: int
    was_used: bool

    @property
    def end(self) -> int:
        """Offset of the first byte behind."""
        return self.offset + self.size_bytes


class FreeRanges:
    """What is free, sorted; neighbours of a kind are one."""

    def __init__(self, chunks: Iterable[int]) -> None:
        """``chunks``: size in bytes of each, multiples of ``ALIGN_BYTES``."""
        self._ranges = [ByteRange(chunk, 0, size, was_used=False) for chunk, size in enumerate(chunks)]

    @property
    def free_bytes(self) -> int:
        """Free bytes in all."""
        return sum(one.size_bytes for one in self._ranges)

    def room(self, page_bytes: int) -> int:
        """Pages that fit; none crosses the border of a chunk."""
        return sum(one.size_bytes // page_bytes for one in self._ranges)

    def take(self, page_bytes: int, pages: int) -> list[tuple[int, ByteRange]] | None:
        """(pages, bytes) pieces that hold ``pages`` in all, lowest addresses first; None, changing
        nothing, if short."""
        taken: list[tuple[int, ByteRange]] = []
        kept: list[ByteRange] = []
        left = pages
        for one in self._ranges:
            fit = min(left, one.size_bytes // page_bytes)
            if not fit:
                kept.append(one)
                continue
            size = -(-fit * page_bytes // ALIGN_BYTES) * ALIGN_BYTES
            taken.append((fit, ByteRange(one.chunk, one.offset, size, one.was_used)))
            if size < one.size_bytes:
                kept.append(ByteRange(one.chunk, one.offset + size, one.size_bytes - size, one.was_used))
            left -= fit
        if left:
            return None
        self._ranges = kept
        return taken

    def give_back(self, ranges: Iterable[ByteRange]) -> None:
        """Return what ``take`` gave, with ``was_used`` as it is now."""
        for one in ranges:
            insort(self._ranges, one)
        merged: list[ByteRange] = []
        for one in self._ranges:
            last = merged[-1] if merged else None
            if last is None or last.chunk != one.chunk or last.end < one.offset or last.was_used != one.was_used:
                merged.append(one)
            else:
                merged[-1] = ByteRange(one.chunk, last.offset, last.size_bytes + one.size_bytes, one.was_used)
        self._ranges = merged
