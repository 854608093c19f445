"""Journal of the copies of one model's blocks: a ring of the last changes, in order, numbered from 1 on.

It serves two readers without knowing them: subscribers follow it with a cursor of their own, and operators ask for the
history of a key. Nothing is allocated for a change but what the ring keeps; a reader cannot hold up the writer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from cachesvc.model.errors import EventsForgotten

NO_ROW = -1
HOST_NUMBER = 0
KEEP_EVENTS = 65_536
STORAGE = (1 << 40) - 1
"""Number of storage in place of a place's, which is never used again. Its changes are hints, as all that is known of
storage."""


def place_name(number: int) -> str:
    if number == STORAGE:
        return "storage"
    return "host" if number == HOST_NUMBER else f"replica {number - 1}"


class Cause(IntEnum):
    """Cause of a copy's coming or going."""

    PUBLISHED = 0
    LOADED = 1
    BACKED_UP = 2
    COPY_FAILED = 3
    EVICTED = 4
    DRAINED = 5
    WINDOW_EVICTED = 6
    OPERATOR = 7
    FETCHED = 8
    LOST = 9
    STORED = 10
    UNSTORED = 11


class Kind(IntEnum):
    """Meaning of a change for the block in its group, on the whole node. Values of the API."""

    STORED = 1
    REMOVED = 2
    TIER_CHANGED = 3
    COPY_FAILED = 4


class Event(NamedTuple):
    """One change. ``place``: 0 is the host, n the replica n - 1, or STORAGE. ``parent``: empty for the root, and where
    it went. ``row``: NO_ROW where the block need not be in the index."""

    number: int
    seconds: float
    kind: Kind
    cause: Cause
    present: bool
    group: int
    place: int
    row: int
    key: bytes
    parent: bytes


class Moment:
    """Time at which flows run, set by the node. Seconds of a monotonic clock."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0


PRESENT = 8


def packed(kind: Kind, cause: Cause, *, present: bool, group: int = 0, place: int = 0) -> int:
    """Entry of a journal for a change beside its block, in one number."""
    return kind | present << 3 | cause << 4 | group << 9 | place << 17


def with_cause(code: int, cause: Cause) -> int:
    """Copy of a change with another cause."""
    return code & ~(31 << 4) | cause << 4


class Dropped(NamedTuple):
    """A block that has left the index: for remembered counts and for events. ``tier``: where its last copy was."""

    key: bytes
    reuses: int
    tier: str


class Journal:
    """The last ``keep`` changes. ``keys`` and ``parents`` are the index's own, by row."""

    def __init__(self, keys: list[bytes | None], parents: array[int], moment: Moment, keep: int = KEEP_EVENTS) -> None:
        self.last = 0
        self.keep = keep
        self._index_keys = keys
        self._index_parents = parents
        self._moment = moment
        self._keys: list[bytes] = []
        self._parents: list[bytes] = []
        self._rows = array("i")
        self._codes = array("Q")
        self._seconds = array("d")

    @property
    def first(self) -> int:
        """Number of the oldest change that is still known; one more than ``last`` while there is none."""
        return self.last - len(self._keys) + 1

    @property
    def now(self) -> float:
        return self._moment.seconds

    def note(self, code: int, row: int) -> None:
        """Write a change down, as ``packed``. Its block is still in the index."""
        index_keys = self._index_keys
        key = index_keys[row]
        assert key is not None, f"row {row} has left the index"
        parent = b""
        if code & PRESENT:
            above = self._index_parents[row]
            if above >= 0:
                parent = index_keys[above] or b""
        self._write(code, row, key, parent)

    def note_gone(self, code: int, key: bytes) -> None:
        """Write down a change of a block that need not be in the index."""
        self._write(code, NO_ROW, key, b"")

    def _write(self, code: int, row: int, key: bytes, parent: bytes) -> None:
        at = self.last
        self.last = at + 1
        if at < self.keep:
            self._keys.append(key)
            self._parents.append(parent)
            self._rows.append(row)
            self._codes.append(code)
            self._seconds.append(self._moment.seconds)
            return
        at %= self.keep
        self._keys[at] = key
        self._parents[at] = parent
        self._rows[at] = row
        self._codes[at] = code
        self._seconds[at] = self._moment.seconds

    def note_all(self, code: int, rows: Sequence[int]) -> None:
        index_keys, above, count = self._index_keys, self._index_parents, len(rows)
        keys = [index_keys[row] or b"" for row in rows]
        parents = [b""] * count
        if code & PRESENT:
            parents = [(index_keys[row] or b"") if row >= 0 else b"" for row in [above[row] for row in rows]]
        done = 0
        while done < count:  # up to where the ring is whole, or begins anew
            at = self.last % self.keep
            some = slice(done, min(count, done + self.keep - at))
            length = some.stop - done
            where = slice(at, at + length) if self.last >= self.keep else slice(at, at)
            self._keys[where], self._parents[where] = keys[some], parents[some]
            self._rows[where] = array("i", rows[some])
            self._codes[where] = array("Q", (code,)) * length
            self._seconds[where] = array("d", (self._moment.seconds,)) * length
            self.last += length
            done = some.stop

    def read(self, number: int, limit: int) -> list[Event]:
        """Up to ``limit`` changes from ``number`` on. Raises EventsForgotten."""
        if number < self.first:
            raise EventsForgotten(number, self.first)
        return [self._event(each) for each in range(number, min(self.last + 1, number + limit))]

    def seconds_of(self, number: int) -> float:
        """Time of a change that is still known, seconds."""
        return self._seconds[(number - 1) % self.keep]

    def about(self, prefix: bytes, numbers: range) -> Iterator[Event]:
        """Changes of the keys that begin with ``prefix``, of those ``numbers`` that are still known, in their order."""
        keys, keep, first, last = self._keys, self.keep, self.first, self.last
        for number in numbers:
            if first <= number <= last and keys[(number - 1) % keep].startswith(prefix):
                yield self._event(number)

    def _event(self, number: int) -> Event:
        at = (number - 1) % self.keep
        code = self._codes[at]
        return Event(
            number,
            self._seconds[at],
            Kind(code & 7),
            Cause(code >> 4 & 31),
            bool(code & 8),
            code >> 9 & 255,
            code >> 17,
            self._rows[at],
            self._keys[at],
            self._parents[at],
        )
