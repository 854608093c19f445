"""Catalogue of objects by block, in the order of their eviction: some 300 bytes of memory an object.

An object that is set aside, of a format that a newer release writes, counts and is evicted as others; no hit is
expected of it.

Eviction is leaf-first: a block never goes before its descendants, because a hit needs everything above it.

Its contents are hints. Any thread; the ledger thread's question (``expects``) takes no lock.
"""

from __future__ import annotations

import heapq
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

import numpy as np

from cachesvc.model.words import KEY_BYTES
from cachesvc.storage.seam import Chooser, Kept, ObjectName, Part, Rank, Scope, StoreStatus, Use, oldest_first

ASIDE = 1 << 48
"""Bit of the part of an object that is set aside."""
AT_ONCE = 512
"""Objects that are added while others wait: some milliseconds."""


class Entry(NamedTuple):
    """An object's bytes on disk, and its last use: ms of the folder's clock. ``parent``: key of the block above; empty
    for none; None where its header has not been read yet."""

    name: ObjectName
    size_bytes: int
    used: int
    parent: bytes | None = b""


class FoundObjects:
    """Objects that a scan has found, packed: a million of them are a hundred megabytes and not several."""

    FIELDS: Final = np.dtype([("used", "i8"), ("size", "i8"), ("scope", "u4"), ("part", "u2", 3), ("key", "V32")])

    def __init__(self) -> None:
        self._scopes: dict[Scope, int] = {}
        self._packed = [np.zeros(0, self.FIELDS)]

    def add(self, entries: Sequence[Entry]) -> None:
        packed = np.zeros(len(entries), self.FIELDS)
        for at, (name, size_bytes, used, _) in enumerate(entries):
            number = self._scopes.setdefault(name.scope, len(self._scopes))
            packed[at] = used, size_bytes, number, name.part, name.key
        self._packed.append(packed)

    def in_order(self) -> Iterator[Entry]:
        """All, the longest unused first; their parents are not known yet."""
        scopes, found = list(self._scopes), np.concatenate(self._packed)
        self._packed.clear()
        for at in np.argsort(found["used"], kind="stable"):
            used, size_bytes, number, part, key = found[at]
            name = ObjectName(scopes[number], key.tobytes(), Part(*map(int, part)))
            yield Entry(name, int(size_bytes), int(used), None)


class Catalogue:
    """``size_bytes`` of all objects. Those that are being read, or are held, are not given out for eviction, nor are
    those whose parent is unknown (``unlinked``). ``labels``: of scopes. ``clock``: ms.

    Leaves, blocks of which no descendant is on disk, are filed in a heap of rank and row for each scope and class. A
    use costs nothing there: ranks only rise, so an entry that is out of date comes up too early and is filed anew then.
    Every leaf has one valid entry: the one in ``_filed``."""

    def __init__(self, rank: Rank = oldest_first, clock: Callable[[], int] = lambda: 0) -> None:
        self.size_bytes = 0
        self._rank = rank
        self._uses_depth = rank(1, 1, 0) != rank(1, 1, 1)
        self._clock = clock
        self._objects = 0
        self._scopes: list[Scope] = []
        self._numbers: dict[Scope, int] = {}
        self._kept: dict[Scope, Kept] = {}
        self.labels: dict[Scope, str] = {}
        self._choosers: dict[int, Chooser] = {}
        self._busy: Counter[bytes] = Counter()
        self._lock = threading.Lock()
        self._tree = BlockTree()
        self._heaps: dict[tuple[int, int], list[int]] = {}
        self._filed: dict[int, int] = {}

    def __len__(self) -> int:
        return self._objects

    def __contains__(self, name: ObjectName) -> bool:
        row = self._row_of(name)
        return row != NO_ROW and self._part_of(row, name) is not None

    def is_aside(self, name: ObjectName) -> bool:
        """True for an object that is set aside."""
        row = self._row_of(name)
        return row != NO_ROW and self._tree.has(row, _packed(name.part) | ASIDE)

    def set_aside(self, name: ObjectName) -> None:
        """Expect an object no more, and go on counting it. No-op where it is not known."""
        with self._lock:
            row, part = self._row_of(name), _packed(name.part)
            if row != NO_ROW and self._tree.has(row, part):
                size_bytes = self._tree.drop(row, part)
                self._tree.put(row, part | ASIDE, size_bytes, self._tree.used[row])
                self._file(row)

    @property
    def unlinked(self) -> int:
        """Number of blocks whose headers have not been read."""
        return self._tree.unlinked

    def expects(self, scope: Scope, keys: bytes, parts: Sequence[Part]) -> int:
        """Number of leading keys of which all ``parts`` are here."""
        number = self._numbers.get(scope)
        if number is None:
            return 0
        tree, first = self._tree, number.to_bytes(4, "big")
        rows, lead, more, wanted = tree.rows, tree.parts, tree.more, [_packed(part) for part in parts]
        for at in range(0, len(keys), KEY_BYTES):
            row = rows.get(first + keys[at : at + KEY_BYTES], NO_ROW)
            if row == NO_ROW:
                return at // KEY_BYTES
            for part in wanted:
                if lead[row] != part and part not in more.get(row, ()):
                    return at // KEY_BYTES
        return len(keys) // KEY_BYTES

    def add(self, name: ObjectName, size_bytes: int, used: int, parent: bytes | None = b"") -> None:
        """Add an object, or replace what is known of it."""
        with self._lock:
            self._add(Entry(name, size_bytes, used, parent))

    def add_all(self, entries: Iterable[Entry]) -> None:
        """Objects that were found; those that are known stay as they are. Lets others in between."""
        left = iter(entries)
        while some := list(islice(left, AT_ONCE)):
            with self._lock:
                for each in some:
                    if each.name not in self:
                        self._add(each)

    def unlinked_rows(self) -> array[int]:
        """Rows of blocks whose headers have not been read, the longest unused first."""
        with self._lock:
            return self._tree.unlinked_rows()

    def unlinked_at(self, row: int) -> ObjectName | None:
        """An object of a row whose header has not been read; None where there is none any more."""
        with self._lock:
            tree = self._tree
            has_none = row >= len(tree.keys) or tree.parts[row] == NO_PART or tree.is_linked(row)
            return None if has_none else next(self._entries(row)).name

    def link(self, name: ObjectName, parent: bytes) -> int:
        """The header of an object was read. No-op where the object is gone, or its parent is known. Returns the row of
        the block above; NO_ROW where there is none."""
        with self._lock:
            row = self._row_of(name)
            if row == NO_ROW:
                return NO_ROW
            self._tree.link(row, self._numbers[name.scope], parent)
            self._file(row)
            return self._tree.parent[row]

    def demote_detached(self) -> None:
        """All that was found is linked: blocks that no hit reaches, for a block above them is missing, go first."""
        with self._lock:
            for row in self._tree.detached():
                self._tree.used[row] = 0
                self._filed.pop(row, None)
                self._file(row)

    def drop(self, name: ObjectName) -> bool:
        """An object is not there any more. False where it was not known."""
        with self._lock:
            row = self._row_of(name)
            part = None if row == NO_ROW else self._part_of(row, name)
            if part is not None:
                self._drop_part(row, part)
                self._tidy(row)
            return part is not None

    def use(self, name: ObjectName, now: int) -> int | None:
        """Note a use; returns the time of the last one, None for an unknown object."""
        with self._lock:
            row = self._row_of(name)
            if row == NO_ROW or not self._tree.has(row, _packed(name.part)):
                return None
            before = self._tree.used[row]
            self._tree.touch(row, now)
            return before

    def use_blocks(self, scope: Scope, uses: Sequence[Use], chooser: Chooser | None, now: int) -> None:
        """Note uses of blocks in memory. ``chooser``: of the scope's eviction policy, where it knows classes."""
        number = self._numbers.get(scope)
        if number is None:
            return
        with self._lock:
            if chooser is not None:
                self._choosers[number] = chooser
            for use in uses:
                row = self._tree.rows.get(key_of(number, use.key), NO_ROW)
                if row != NO_ROW:
                    self._tree.touch(row, now)
                    self._tree.queue[row] = use.queue

    def take_unsaved(self, most: int) -> list[Entry]:
        """Objects whose last use has changed since they were taken so before, of ``most`` blocks at most."""
        with self._lock:
            unsaved = self._tree.unsaved
            rows = [unsaved.pop() for _ in range(min(most, len(unsaved)))]
            return [entry for row in rows for entry in self._entries(row)]

    def hold(self, name: ObjectName) -> None:
        """Do not give an object out for eviction, known or not: it may be found meanwhile. Counted."""
        with self._lock:
            self._busy[key_of(self._number(name.scope), name.key)] += 1

    def let_go(self, name: ObjectName) -> None:
        with self._lock:
            key = key_of(self._number(name.scope), name.key)
            self._busy[key] -= 1
            if not self._busy[key]:
                del self._busy[key]
                if (row := self._tree.rows.get(key, NO_ROW)) != NO_ROW:
                    self._file(row)

    def take_oldest(self, most: int, until_bytes: int, before: int | None = None) -> list[Entry]:
        """Take out objects of leaf blocks in the order of eviction, some ``most`` of them and until ``until_bytes`` are
        left or less; and first (``before``) those not used since then, nor any below them."""
        victims: list[Entry] = []
        with self._lock:
            is_due = before is not None and not self._tree.unlinked  # else there may be younger blocks below
            expired = self._tree.unused_since(before) if is_due and before is not None else []
            while expired and len(victims) < most:
                row = expired.pop()
                if not self._is_free(row):
                    continue
                above = self._tree.parent[row]
                victims += self._take(row)
                if above != NO_ROW and self._is_free(above) and self._tree.used[above] < (before or 0):
                    expired.append(above)
            while len(victims) < most and self.size_bytes > until_bytes:
                chosen = self._next_leaf()
                if chosen is None:
                    break
                victims += self._take(chosen)
        return victims

    def entries(self) -> list[Entry]:
        with self._lock:
            found = [entry for row in self._tree.rows.values() for entry in self._entries(row)]
        return sorted(found, key=lambda entry: entry.used)

    def names(self, scope: Scope | None = None) -> list[ObjectName]:
        """Names of all objects, or of a scope's."""
        with self._lock:
            number = None if scope is None else self._numbers.get(scope, NO_ROW)
            rows = self._tree.rows.values()
            mine = [row for row in rows if number is None or self._tree.scope[row] == number]
            return [entry.name for row in mine for entry in self._entries(row)]

    def clear(self) -> None:
        with self._lock:
            self._tree = BlockTree()
            self._heaps, self._filed = {}, {}
            self.size_bytes = self._objects = 0
            for kept in self._kept.values():
                kept.objects = kept.size_bytes = 0

    def status(self, now: int) -> StoreStatus:
        with self._lock:
            out = StoreStatus(self._objects, self.size_bytes)
            for scope, kept in self._kept.items():
                span = self._tree.span(self._numbers[scope]) if kept.objects else None
                if span is not None:
                    oldest, newest = (max(0, now - used) / 1000 for used in span)
                    label = self.labels.get(scope, "")
                    out.scopes[scope] = Kept(label, kept.objects, kept.size_bytes, oldest, newest)
        return out

    # -- under the lock --------------------------------------------------------------------------------------------

    def _file(self, row: int) -> None:
        """A row may be a leaf now. No-op where it is none, or is filed under its rank or a lower one."""
        if not self._is_free(row):
            return
        entry = self._rank_of(row) << ROW_BITS | row
        if self._filed.get(row, entry + 1) > entry:
            self._filed[row] = entry
            group = self._tree.scope[row], self._tree.queue[row]
            heapq.heappush(self._heaps.setdefault(group, []), entry)

    def _next_leaf(self) -> int | None:
        """Take out the leaf that goes next; None where there is none."""
        heads: dict[int, list[tuple[int, tuple[int, int]]]] = {}
        for group in list(self._heaps):
            head = self._head(group)
            if head is None:
                del self._heaps[group]
            else:
                heads.setdefault(group[0], []).append((head, group))
        if not heads:
            return None
        scope = min(heads, key=lambda each: min(heads[each]))
        of_scope = sorted(heads[scope])
        at = 0
        if len(of_scope) > 1 and (chooser := self._choosers.get(scope)) is not None:
            now, used = self._clock(), self._tree.used
            ages = [max(0, now - used[head & ROW_MASK]) / 1000 for head, _ in of_scope]
            at = chooser.choose([queue for _, (_, queue) in of_scope], ages)
        head, group = of_scope[at]
        heapq.heappop(self._heaps[group])
        del self._filed[head & ROW_MASK]
        return head & ROW_MASK

    def _head(self, group: tuple[int, int]) -> int | None:
        """The lowest valid entry of a group, its rank up to date."""
        heap = self._heaps[group]
        while heap:
            entry = heap[0]
            row = entry & ROW_MASK
            is_valid = self._filed.get(row) == entry
            is_of_group = (self._tree.scope[row], self._tree.queue[row]) == group
            if is_valid and is_of_group and self._is_free(row) and entry == (self._rank_of(row) << ROW_BITS | row):
                return entry
            heapq.heappop(heap)
            if is_valid:
                del self._filed[row]
                self._file(row)  # under the rank and in the group that it has by now
        return None

    def _rank_of(self, row: int) -> int:
        depth = self._tree.depth(row) if self._uses_depth else 0
        return self._rank(self._tree.used[row], self._tree.uses[row], depth)

    def _is_free(self, row: int) -> bool:
        """True where a row has objects, and none below it is known; and nothing reads them or holds them."""
        tree = self._tree
        if tree.parts[row] == NO_PART or tree.children[row] or not tree.is_linked(row):
            return False
        return not self._busy or tree.keys[row] not in self._busy

    def _add(self, entry: Entry) -> None:
        name, size_bytes, used, parent = entry
        number = self._number(name.scope)
        row, part = self._tree.row(number, name.key), _packed(name.part)
        if (before := self._part_of(row, name)) is not None:
            self._drop_part(row, before)
        self._tree.put(row, part, size_bytes, used)
        if parent is not None:
            self._tree.link(row, number, parent)
        self._count(name.scope, 1, size_bytes)
        self._file(row)

    def _take(self, row: int) -> list[Entry]:
        entries = list(self._entries(row))
        for part, _ in self._tree.objects(row):
            self._drop_part(row, part)
        self._tidy(row)
        return entries

    def _drop_part(self, row: int, part: int) -> None:
        self._count(self._scopes[self._tree.scope[row]], -1, -self._tree.drop(row, part))

    def _count(self, scope: Scope, objects: int, size_bytes: int) -> None:
        kept = self._kept[scope]
        kept.objects += objects
        kept.size_bytes += size_bytes
        self._objects += objects
        self.size_bytes += size_bytes

    def _tidy(self, row: int) -> None:
        last = NO_ROW
        for last in self._tree.tidy(row):
            self._filed.pop(last, None)
        if last != NO_ROW:
            self._file(last)

    def _part_of(self, row: int, name: ObjectName) -> int | None:
        """The part of a row that an object is, set aside or not; None where it is not there."""
        part = _packed(name.part)
        return next((each for each in (part, part | ASIDE) if self._tree.has(row, each)), None)

    def _row_of(self, name: ObjectName) -> int:
        number = self._numbers.get(name.scope)
        return NO_ROW if number is None else self._tree.rows.get(key_of(number, name.key), NO_ROW)

    def _entries(self, row: int) -> Iterator[Entry]:
        tree = self._tree
        above, scope = tree.parent[row], self._scopes[tree.scope[row]]
        parent = None if not tree.is_linked(row) else b"" if above == NO_ROW else tree.key(above)
        for part, size_bytes in tree.objects(row):
            yield Entry(ObjectName(scope, tree.key(row), _unpacked(part)), size_bytes, tree.used[row], parent)

    def _number(self, scope: Scope) -> int:
        if scope not in self._numbers:
            self._kept[scope] = Kept("")
            self._scopes.append(scope)
            self._numbers[scope] = len(self._scopes) - 1
        return self._numbers[scope]


def _packed(part: Part) -> int:
    return part.group << 32 | part.rank << 16 | part.ranks


def _unpacked(part: int) -> Part:
    return Part(part >> 32 & 0xFFFF, part >> 16 & 0xFFFF, part & 0xFFFF)


# Tree of the blocks on disk, in arrays by row: their objects, parents, last uses. Not locked.
#
# A row without objects is known only as the parent of others (``NO_PART``). A use is noted at the deepest block alone;
# a parent inherits it when a block below it goes.

NO_ROW = -1
ROW_BITS = 32
ROW_MASK = (1 << ROW_BITS) - 1
SCOPE_BYTES = 4
NO_PART = (1 << 48) - 1
"""Part of a row without objects: no object has this one."""
MOST_USES = (1 << 31) - 1


class BlockTree:
    """``rows``: by scope and key (``key_of``); ``keys``: the same, by row. ``unlinked``: blocks with objects
    whose parent is not known yet.
    ``unsaved``: rows whose last use (``used``, ms) has changed since the set was emptied. ``parts``: one object of each
    row; ``more``: the others, with their bytes."""

    def __init__(self) -> None:
        self.rows: dict[bytes, int] = {}
        self.keys: list[bytes] = []
        self.scope, self.queue = array("I"), array("H")
        self.parent, self.children = array("i"), array("I")
        self.used, self.uses = array("q"), array("I")
        self.parts, self.sizes = array("q"), array("q")
        self.more: dict[int, dict[int, int]] = {}
        self.unlinked = 0
        self.unsaved: set[int] = set()
        self._is_linked = bytearray()
        self._free: list[int] = []

    def has(self, row: int, part: int) -> bool:
        """True where the row has an object of that part."""
        return self.parts[row] == part or part in self.more.get(row, ())

    def key(self, row: int) -> bytes:
        return self.keys[row][SCOPE_BYTES:]

    def is_linked(self, row: int) -> bool:
        """True where the row's parent is known, or that it has none."""
        return bool(self._is_linked[row])

    def objects(self, row: int) -> list[tuple[int, int]]:
        """Part and bytes of each object of a row."""
        if self.parts[row] == NO_PART:
            return []
        return [(self.parts[row], self.sizes[row]), *self.more.get(row, {}).items()]

    def depth(self, row: int) -> int:
        """Number of known blocks above a row."""
        depth = 0
        while (row := self.parent[row]) != NO_ROW:
            depth += 1
        return depth

    def put(self, row: int, part: int, size_bytes: int, used: int) -> None:
        """Add an object that the row does not have."""
        if self.parts[row] == NO_PART:
            self.parts[row], self.sizes[row] = part, size_bytes
            self.unlinked += not self._is_linked[row]
        else:
            self.more.setdefault(row, {})[part] = size_bytes
        self.used[row] = max(used, self.used[row])

    def drop(self, row: int, part: int) -> int:
        more = self.more.get(row, {})
        if part in more:
            size_bytes = more.pop(part)
        else:
            size_bytes, self.parts[row] = self.sizes[row], NO_PART
            if more:
                self.parts[row], self.sizes[row] = more.popitem()
            else:
                self.unlinked -= not self._is_linked[row]
        if not more:
            self.more.pop(row, None)
        return size_bytes

    def link(self, row: int, scope: int, parent: bytes) -> None:
        """The key of the block above is known; empty for none. No-op where it was."""
        if self._is_linked[row]:
            return
        self._is_linked[row] = 1
        self.unlinked -= self.parts[row] != NO_PART
        if parent and parent != self.key(row):
            above = self.row(scope, parent)
            self.parent[row] = above
            self.children[above] += 1

    def touch(self, row: int, now: int) -> None:
        self.used[row] = max(now, self.used[row])
        self.uses[row] = min(self.uses[row] + 1, MOST_USES)
        self.unsaved.add(row)

    def row(self, scope: int, key: bytes) -> int:
        """The row of a key; a new one has no object."""
        whole = key_of(scope, key)
        row = self.rows.get(whole, NO_ROW)
        if row != NO_ROW:
            return row
        if not self._free:
            self._grow()
        row = self._free.pop()
        self.keys[row], self.scope[row] = whole, scope
        self.rows[whole] = row
        return row

    def tidy(self, row: int) -> Iterator[int]:
        """Remove a row without objects and children, and those above it that are left so. Yields each; the last one
        stays, where there is any above."""
        while row != NO_ROW and self.parts[row] == NO_PART and not self.children[row]:
            above, used = self.parent[row], self.used[row]
            if above != NO_ROW:
                self.children[above] -= 1
                if used > self.used[above]:
                    self.used[above], self.queue[above] = used, self.queue[row]
                    self.unsaved.add(above)
            del self.rows[self.keys[row]]
            self.keys[row], self.parent[row] = b"", NO_ROW
            self.used[row] = self.uses[row] = self.queue[row] = self._is_linked[row] = 0
            self.unsaved.discard(row)
            self._free.append(row)
            yield row
            row = above
        if row != NO_ROW:
            yield row

    def detached(self) -> list[int]:
        """Rows with objects below a block that is known by name alone: no hit reaches them."""
        unknown, reached, cut_off = 0, 1, 2
        state = bytearray(len(self.keys))
        for tip in self.rows.values():
            path, row = [], tip
            while row != NO_ROW and state[row] == unknown:
                path.append(row)
                row = self.parent[row]
            verdict = reached if row == NO_ROW else state[row]
            for each in reversed(path):
                verdict = state[each] = cut_off if self.parts[each] == NO_PART else verdict
        return [row for row in self.rows.values() if state[row] == cut_off and self.parts[row] != NO_PART]

    def unlinked_rows(self) -> array[int]:
        """Rows with objects whose parent is not known, the longest unused first."""
        is_linked = np.frombuffer(bytes(self._is_linked), np.uint8)
        rows = np.flatnonzero((is_linked == 0) & (np.array(self.parts) != NO_PART))
        return array("q", rows[np.argsort(np.array(self.used)[rows], kind="stable")].astype(np.int64).tobytes())

    def unused_since(self, before: int) -> list[int]:
        """Rows without children that were not used since ``before``, the longest unused last."""
        used = np.array(self.used)
        rows = np.flatnonzero((used < before) & (np.array(self.children) == 0))
        found: list[int] = rows[np.argsort(-used[rows], kind="stable")].tolist()
        return found

    def span(self, scope: int) -> tuple[int, int] | None:
        """The oldest and the newest use of a scope's blocks."""
        used = np.array(self.used)[(np.array(self.scope) == scope) & (np.array(self.parts) != NO_PART)]
        return (int(used.min()), int(used.max())) if len(used) else None

    def _grow(self) -> None:
        """Room for a further row. Columns only grow: ``expects`` reads them without a lock."""
        self._free.append(len(self.keys))
        self.keys.append(b"")
        self._is_linked.append(0)
        for column in (self.scope, self.queue, self.children, self.used, self.uses, self.sizes):
            column.append(0)
        self.parent.append(NO_ROW)
        self.parts.append(NO_PART)


def key_of(scope: int, key: bytes) -> bytes:
    return scope.to_bytes(SCOPE_BYTES, "big") + key
