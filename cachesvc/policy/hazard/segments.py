"""Segments: blocks that each request was the last to touch, in two parts, kept in columns by slot.

A part is the run of blocks ``[top, bottom)`` of a path that is resident. It only shrinks: from the top as later
requests take blocks over, from the bottom as they leave the cache. Its landmarks are its first and its last block; they
count until they are touched again. Slot 0 belongs to no request.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from cachesvc.model.requests import Parts
from cachesvc.policy.hazard.rates import Floats, Ints, Open

NO_SEGMENT = 0
FIRST_OPEN, LAST_OPEN, IS_RUNNING, IS_REMEMBERED, IS_SHARED = 1, 2, 4, 8, 16
LANDMARKS = FIRST_OPEN | LAST_OPEN
WEIGHTS = (0.0, 0.5, 0.5, 1.0)
"""Weights of the landmarks that are open: together a segment counts once."""
WEIGHT_COLUMN = np.array(WEIGHTS)
LEAST_SLOTS = 256
SLOTS_AT_ONCE = 16384


class Segments:
    """Columns by slot. ``arrived`` and ``ended``: of its request (seconds); ``request``: its number. ``queue``: of its
    class while it runs, and ``queue_after`` once it has ended, where it is known (0: not). ``first`` and ``last``: its
    blocks as it began, last exclusive. ``weight``: what its landmarks that were touched before its end count there."""

    def __init__(self) -> None:
        self.arrived, self.ended, self.early = array("d"), array("d"), array("f")
        self.request = array("q")
        self.queue, self.queue_after = array("H"), array("H")
        self.first, self.top, self.bottom, self.last = array("i"), array("i"), array("i"), array("i")
        self.flags = bytearray()
        self._free: list[int] = []
        self._grow()
        self._free.pop()  # slot 0
        self.request[NO_SEGMENT] = -1

    def _grow(self) -> None:
        slots = len(self.flags)
        more = max(slots, LEAST_SLOTS)
        for column in (self.arrived, self.ended, self.early, self.request, self.queue, self.queue_after):
            column.frombytes(bytes(column.itemsize * more))
        for blocks in (self.first, self.top, self.bottom, self.last):
            blocks.frombytes(bytes(blocks.itemsize * more))
        self.flags.extend(bytes(more))
        self._free.extend(range(slots + more - 1, slots - 1, -1))

    def __len__(self) -> int:
        return len(self.flags) - 1 - len(self._free)

    def begin(self, request: int, now: float, queue: int, first: int, last: int, resident: int, flags: int) -> int:
        """A part of a request that has arrived: blocks ``[first, last)`` of its path, of which ``resident`` blocks are
        there. Returns its slot."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self.arrived[slot], self.ended[slot], self.early[slot] = now, 0.0, 0.0
        self.request[slot] = request
        self.queue[slot], self.queue_after[slot] = queue, 0
        self.first[slot] = self.top[slot] = first
        self.last[slot] = last
        self.bottom[slot] = min(max(resident, first), last)
        self.flags[slot] = (LANDMARKS if last > first else 0) | IS_RUNNING | IS_REMEMBERED | flags
        return slot

    def grew(self, slot: int, first: int, bottom: int) -> None:
        """Blocks ``[first, bottom)`` of the path are new, and of that segment; younger requests have none of them."""
        self.top[slot] = min(self.top[slot], first)
        self.bottom[slot] = bottom
        if bottom > self.last[slot]:
            if self.last[slot] == self.first[slot]:
                self.flags[slot] |= LANDMARKS
            self.last[slot] = bottom

    def release(self, slot: int) -> bool:
        """Make the slot free if nothing needs it any more; True when it is."""
        if self.flags[slot] & (IS_RUNNING | IS_REMEMBERED) or self.top[slot] < self.bottom[slot] or slot == NO_SEGMENT:
            return False
        self._free.append(slot)
        return True

    def sweep(self, owners: Ints, bottom: int, taker: Parts) -> None:
        """``taker`` has taken over blocks of a path, the deepest before ``bottom``, of which ``owners`` were the
        segments, deepest first. Where that is not known yet it is not learned from, and nothing is done one by one."""
        starts = np.flatnonzero(np.diff(owners, prepend=-1))
        slots, ends = owners[starts], (bottom - starts).astype(np.int32)
        tops, flags = np.frombuffer(self.top, np.int32), np.frombuffer(self.flags, np.uint8)
        is_new = (ends > tops[slots]) & (slots != NO_SEGMENT) & (slots != taker.shared) & (slots != taker.own)
        if not is_new.any():
            return
        slots, ends = slots[is_new], ends[is_new]
        flags[slots] &= np.uint8(0xFF & ~LANDMARKS)
        tops[slots] = ends
        needed = flags[slots] & (IS_RUNNING | IS_REMEMBERED) != 0
        self._free.extend(slots[~needed & (ends >= np.frombuffer(self.bottom, np.int32)[slots])].tolist())

    def open_landmarks(self, now: float, most: int) -> Iterator[Open]:
        """Open landmarks of the remembered segments, in parts of ``most`` of them at most: in the first table by
        arrival, in the second by end."""
        for first in range(0, len(self.flags), SLOTS_AT_ONCE):
            flags = np.frombuffer(self.flags, np.uint8)[first : first + SLOTS_AT_ONCE] & LANDMARKS
            at: Ints = np.flatnonzero(flags).astype(np.int64) + first
            yield from (self._open(at[part : part + most], now) for part in range(0, max(1, len(at)), most))

    def _open(self, at: Ints, now: float) -> Open:
        weights = WEIGHT_COLUMN[np.frombuffer(self.flags, np.uint8)[at] & LANDMARKS]
        arrived, ended = np.frombuffer(self.arrived)[at], np.frombuffer(self.ended)[at]
        queue = np.frombuffer(self.queue, np.uint16)[at].astype(np.int64)
        after = np.frombuffer(self.queue_after, np.uint16)[at].astype(np.int64)
        has_ended = after > 0
        rows: Ints = np.concatenate([queue, after[has_ended]])
        ages: Floats = np.concatenate([now - arrived, now - ended[has_ended]])
        return Open(rows, ages, np.concatenate([weights, weights[has_ended]]))
