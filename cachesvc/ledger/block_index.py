"""The radix index of one model: a row for each block that has a copy anywhere, in arrays instead of objects.

Keys are chained, so a row's key stands for its whole prefix and rows form a forest under the namespace. Rows are
numbers that are used again; a million blocks cost no object that the garbage collector would have to walk.

What eviction ranks are made of changes here alone, so here the candidates are kept in their order.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cachesvc.ledger.candidates import LeafOrder
from cachesvc.ledger.counted_tables import PartedDict
from cachesvc.ledger.page_pool import AT_ONCE
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.answers import Parts
from cachesvc.model.errors import LedgerBroken
from cachesvc.model.numbers import Column, array_of, column
from cachesvc.model.words import KEY_BYTES


class FlyingRows:
    """``_at[row]``: where in ``_rows`` it is, while it is there."""

    __slots__ = ("_at", "_rows")

    def __init__(self) -> None:
        self._rows = array("i")
        self._at = array("i")

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def grow(self, more: int) -> None:
        self._at.frombytes(bytes(4 * more))

    def column(self) -> Column:
        return column(self._rows)

    def add(self, row: int) -> None:
        """Add a row that is not there."""
        self._at[row] = len(self._rows)
        self._rows.append(row)

    def add_all(self, rows: Column) -> None:
        """Add distinct rows, none of which is there."""
        first = len(self._rows)
        self._rows.frombytes(rows.tobytes())
        column(self._at)[rows] = np.arange(first, len(self._rows), dtype=np.int32)

    def remove(self, row: int) -> None:
        self.remove_all((row,))

    def remove_all(self, rows: Iterable[int]) -> None:
        """Remove distinct rows, all of which are there."""
        kept, places = self._rows, self._at
        for row in rows:
            last = kept.pop()
            if last != row:
                at = places[row]
                kept[at] = last
                places[last] = at


Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
FEW_ROWS, RUN_ROWS = 32, 2048
"""Number of a path's rows that are read one by one, and number read at a time after those, while they lie in a row."""
SHORT_RUNS, ROWS_LOOKED_AT = 32, 256
"""Ranges after which a long path counts as scattered, and rows of the index to look at for each row of a path."""


HITS_MAX = (1 << 31) - 1
ROWS_A_TURN = 512
"""Rows that are taken over in a turn, 0.1 to 0.2 ms."""
LEAST_ROWS, MOST_ROWS = 16, 1024
"""Rows that are added at a time."""


class Taking(NamedTuple):
    """A request takes over the blocks from the row ``tip`` up: its segments are ``parts``. ``told`` gets, for each
    turn, their former segments, deepest first, and the number of blocks down to the deepest."""

    told: Callable[[Parts, Ints, int], None]
    tip: int
    parts: Parts


class BlockIndex:
    """Keys to rows, the tree, and the per-place copies. ``places[0]`` is the host; replicas follow, as long as their
    memory exists. ``lost``: places whose memory is gone, until they are empty (``LostCopies``); ``losses``: how many
    there ever were. ``told``: all of these, as the journal knows them.

    ``stamp``: a row's last access. ``reached``: that of the deepest block whose window or sinks it was part of.
    ``segments``: of which segment of a request it is, where the eviction policy follows requests (``candidates.py``).
    ``head``: the tree is cut into chains, each from its head down: a row goes on with its parent's chain if no other
    child does so already (``continued``), and begins one of its own otherwise. So a few chains and depths give a row's
    ancestors. ``taking``: of the request that came last, what is not in its segments yet. ``flying``: rows with
    ``flights``. ``orders``: of all candidates for eviction, on all places. ``bare``: 1 for rows that had lost their
    last copy when others hung below them; ``childless``: those whose last child has left since.
    """

    def __init__(self) -> None:
        self.rows: PartedDict[int] = PartedDict()
        self.keys: list[bytes | None] = []
        self.parent = array("i")
        self.depth = array("I")
        self.head = array("I")
        self.continued = bytearray()
        self.children = array("I")
        self.stamp = array("Q")
        self.reached = array("Q")
        self.hits = array("I")
        self.reuses = array("H")
        self.flights = array("H")
        self.segments = array("i")
        self.flying = FlyingRows()
        self.places: list[Place] = []
        self.lost: list[Place] = []
        self.told: list[Place] = []
        self.losses = 0
        self.bare = bytearray()
        self.childless: list[int] = []
        self.orders: list[LeafOrder] = []
        self._spare_rows: list[int] = []
        self.follows_requests = False
        self.taking: Taking | None = None

    def __len__(self) -> int:
        return len(self.keys) - len(self._spare_rows)

    def is_above(self, above: int, row: int) -> bool:
        """True where ``above`` is ``row`` or an ancestor of it; looks at each chain between them, not at each row."""
        depth = self.depth[above]
        while self.head[row] != self.head[above]:
            row = self.parent[self.head[row]]
            if row == NO_ROW or self.depth[row] < depth:
                return False
        return self.depth[row] >= depth

    def path(self, row: int, until: int = NO_ROW) -> array[int]:
        """Rows from just below ``until``, an ancestor of ``row``, down to it, root first."""
        if row == NO_ROW:
            return array("i")
        return self.last_rows(row, self.depth[row] - (self.depth[until] if until != NO_ROW else -1))

    def last_rows(self, row: int, count: int) -> array[int]:
        """The last ``count`` rows (fewer where the root is nearer) of the path down to ``row``, root first."""
        left, runs = max(count, 0), 0
        parts: list[Column] = [np.empty(0, np.int32)]
        while left and row != NO_ROW:
            part = None
            if runs == SHORT_RUNS:  # few of them: one look at all rows costs less than as many again
                part, runs = self._part_of_chain(row, left), 0
            if part is None:
                part, runs = np.arange(max(self._run_start(row), row + 1 - left), row + 1, dtype=np.int32), runs + 1
            parts.append(part)
            left -= len(part)
            row = self.parent[part[0]]
        parts.reverse()
        return array_of(np.concatenate(parts))

    def rows_above(self, tip: int, most: int) -> tuple[Ints, int]:
        """Up to ``most`` rows from ``tip`` up, and the one above them. Rows that came together mostly lie in a row:
        where some do, many are looked at in one go."""
        parent, row = self.parent, tip
        rows: list[int] = []
        while row != NO_ROW and len(rows) < most:
            straight = row - FEW_ROWS
            for _ in range(min(FEW_ROWS, most - len(rows))):
                rows.append(row)
                row = parent[row]
                if row == NO_ROW:
                    break
            left = min(RUN_ROWS, most - len(rows))
            if row == straight and row > 0 and left:
                low = max(row - left + 1, 0)
                above = np.frombuffer(parent, np.int32, row - low + 1, 4 * low)
                ends = np.flatnonzero(above != np.arange(low - 1, row, dtype=np.int32))
                first = low + int(ends[-1]) if len(ends) else low
                rows.extend(range(row, first - 1, -1))
                row = parent[first]
        return np.array(rows, np.int64), row

    def _run_start(self, row: int) -> int:
        """The first row of a range that ends with ``row``, in which every row is the parent of the next: rows that came
        together mostly are."""
        parent, first, few = self.parent, row, max(row - FEW_ROWS, 0)
        while first > few and parent[first] == first - 1:
            first -= 1
        if not first or first != few:
            return first
        low = max(first - RUN_ROWS, 0)
        above = np.frombuffer(parent, np.int32, first - low + 1, 4 * low)
        ends = np.flatnonzero(above != np.arange(low - 1, first, dtype=np.int32))
        return low + int(ends[-1]) if len(ends) else low

    def _part_of_chain(self, row: int, most: int) -> Column | None:
        """Up to ``most`` rows of one chain, down to ``row``, by a look at every row's chain; None where the chain has
        too few for that. It takes the same time wherever the rows lie."""
        head, depth = self.head[row], self.depth[row]
        count = min(most, depth - self.depth[head] + 1)
        if count < max(RUN_ROWS, len(self.head) // ROWS_LOOKED_AT):
            return None
        found = np.flatnonzero(np.frombuffer(self.head, np.uint32) == head)
        above, depths = column(self.parent)[found], column(self.depth)[found]
        is_live = (above != NO_ROW) | (found == head)  # rows that are not in use have a chain and no parent
        wanted = is_live & (depths > depth - count) & (depths <= depth)
        out = np.empty(count, np.int32)
        out[depths[wanted] - (depth - count + 1)] = found[wanted]
        return out

    @property
    def spare_rows(self) -> list[int]:
        """Rows that no block has, in no order. Not to be written."""
        return self._spare_rows

    def add_place(self, place: Place, orders: Iterable[LeafOrder]) -> None:
        """Add a place (host or replica) with the ``orders`` of its candidates."""
        place.grow(len(self.keys))
        for order in orders:
            order.grow(len(self.keys))
            self.orders.append(order)
        self.places.append(place)
        self.told.append(place)

    def lose_place(self, place: Place) -> None:
        """The memory of a place is gone: nothing that looks at ``places`` or ``orders`` sees it any more."""
        mine = (place.leaves, *place.window_leaves.values())
        self.places.remove(place)
        self.orders[:] = [order for order in self.orders if all(order is not each for each in mine)]
        self.lost.append(place)
        self.losses += 1

    def forget_place(self, place: Place) -> None:
        self.lost.remove(place)
        self.told.remove(place)

    def insert(self, key: bytes, parent: int, stamp: int, reuses: int = 0) -> int:
        """A new row under ``parent`` (NO_ROW: the root) with no copy yet; the caller gives it one at once."""
        reused = {key: reuses} if reuses else {}
        [[row]] = self.insert_paths([(parent, (key,))], stamp, reused)
        self.stamp[row] = stamp
        self.hits[row] = 0
        return row

    def insert_paths(
        self, paths: Iterable[tuple[int, Sequence[bytes]]], stamp: int, reuses: Mapping[bytes, int]
    ) -> list[list[int]]:
        """``insert`` for each key of some paths, each from a row (NO_ROW: the root) down, whose last is then accessed,
        as by ``touch``. ``stamp``: the first of as many access numbers as there are keys and paths. ``reuses``: of
        those keys that have any."""
        parts, keys_of, parent, depth, head = self.rows.parts, self.keys, self.parent, self.depth, self.head
        children, continued, stamps, counts = self.children, self.continued, self.stamp, self.reuses
        hits, spare = self.hits, self._spare_rows
        out: list[list[int]] = []
        for tip, keys in paths:
            path: list[int] = []
            row = tip
            for key in keys:
                above = row
                if not spare:
                    self._grow()
                row = spare.pop()
                keys_of[row] = key
                parent[row] = above
                stamps[row] = stamp
                stamp += 1
                if reuses:
                    counts[row] = reuses.get(key, 0)
                if above == NO_ROW:
                    depth[row] = 0
                    head[row] = row
                else:
                    depth[row] = depth[above] + 1
                    children[above] += 1
                    head[row] = row if continued[above] else head[above]
                    continued[above] = 1
                parts[key[-1]][key] = row
                path.append(row)
            stamps[row] = stamp  # no order has filed it yet
            stamp += 1
            hits[row] += 1
            out.append(path)
        return out

    def take_rows(self, count: int) -> list[int]:
        """Rows for ``count`` blocks, all of whose columns are to be written at once."""
        spare = self._spare_rows
        while len(spare) < count:
            self._grow()
        rows = spare[: -count - 1 : -1]
        del spare[-count:]
        return rows

    def _grow(self) -> None:
        """Room for more rows, many at once: columns that grow row by row cost more than what is written to them."""
        first = len(self.keys)
        more = min(max(first, LEAST_ROWS), MOST_ROWS)
        self.keys.extend([None] * more)
        self.parent.extend(array("i", (NO_ROW,)) * more)
        for each in (self.depth, self.head, self.children, self.stamp, self.reached, self.hits):
            each.frombytes(bytes(each.itemsize * more))
        if self.follows_requests:
            self.segments.frombytes(bytes(4 * more))
        for short in (self.reuses, self.flights):
            short.frombytes(bytes(short.itemsize * more))
        self.continued.extend(bytes(more))
        self.bare.extend(bytes(more))
        self.flying.grow(more)
        for place in self.told:
            place.grow(first + more)
        for order in self.orders:
            order.grow(first + more)
        self._spare_rows.extend(range(first + more - 1, first - 1, -1))  # the lowest is used first

    def remove(self, row: int) -> None:
        """Forget a row that has no copy, no child, no pin and no flight left. Raises LedgerBroken for others."""
        self.remove_run((row,))

    def remove_run(self, run: Sequence[int]) -> None:
        """``remove`` for each of ``run``, a leaf first and then always the parent, of which it was the only child."""
        parts, keys, parent, head = self.rows.parts, self.keys, self.parent, self.head
        children, continued, flights, bare = self.children, self.continued, self.flights, self.bare
        above = NO_ROW
        for row in run:
            key, above = keys[row], parent[row]
            if key is None or children[row] or flights[row]:
                raise LedgerBroken(f"row {row} is to go: {children[row]} children, {flights[row]} flights")
            del parts[key[-1]][key]
            keys[row] = None
            if above != NO_ROW:
                children[above] -= 1
                if head[row] != row:
                    continued[above] = 0
            parent[row] = NO_ROW
            self.reached[row] = 0
            self.hits[row] = 0
            if self.reuses[row]:
                self.reuses[row] = 0
            if bare[row]:
                bare[row] = 0
        if above != NO_ROW and bare[above] and not children[above]:
            self.childless.append(above)
        self._spare_rows.extend(run)

    def forget_keys(self, most: int) -> bool:
        """Forget some ``most`` keys of an index that is no longer used; True when none is left. A million at once,
        which is what its own end would do, take 100 ms."""
        for at, part in enumerate(self.rows.parts):
            if most > 0 and part:
                most -= len(part)
                self.rows.parts[at] = {}
        if most > 0:
            del self.keys[-most:]
        return not self.keys

    def touch(self, row: int, stamp: int) -> None:
        """Stamp an access, unless a hint has given the row a later one. Only the deepest block of an access is stamped;
        a parent inherits when a child goes."""
        moved = [order for order in self.orders if order.remove(row)]
        if stamp > self.stamp[row]:
            self.stamp[row] = stamp
        if self.hits[row] < HITS_MAX:
            self.hits[row] += 1
        for order in moved:
            order.update(row)

    def restamp(self, path: Sequence[int], stamp: Callable[[int], int]) -> None:
        """Give rows that no order has filed yet the access numbers that ``stamp`` makes of theirs."""
        for row in path:
            self.stamp[row] = stamp(self.stamp[row])

    def inherit(self, row: int, stamp: int) -> None:
        """A child of ``row`` that was last used at ``stamp`` goes from a place: leaf-first order stays the order of
        last access."""
        if stamp > self.stamp[row]:
            moved = [order for order in self.orders if order.remove(row)]
            self.stamp[row] = stamp
            for order in moved:
                order.update(row)

    def inherit_all(self, run: Sequence[int]) -> None:
        """``inherit`` for each of ``run`` but the first, of the one before it, whose parent it is."""
        rows, stamps = np.array(run, np.int32), np.frombuffer(self.stamp, np.uint64)
        after = np.maximum.accumulate(stamps[rows])
        raised = rows[after > stamps[rows]]
        moved = [(order, raised[np.frombuffer(order.filed, np.bool_)[raised]].tolist()) for order in self.orders]
        for order, filed in moved:
            order.remove_all(filed)
        stamps[rows] = after
        for order, filed in moved:
            order.add_all(filed)

    def follow_requests(self, made: Callable[[Place], LeafOrder]) -> None:
        """The policy follows requests from now on: rows have segments, and ``made`` gives each place's candidates."""
        self.follows_requests = True
        self.segments.frombytes(bytes(4 * (len(self.keys) - len(self.segments))))
        for place in self.places:
            before = place.leaves
            place.leaves = made(place)
            self.orders[self.orders.index(before)] = place.leaves

    def take_over(self) -> bool:
        """Go on with ``taking``, by ``ROWS_A_TURN`` rows; True when it is over. Candidates among them wait anew."""
        taking, segments = self.taking, self.segments
        if taking is None:
            return True
        told, tip, parts = taking
        rows, above = self.rows_above(tip, ROWS_A_TURN)
        bottom = self.depth[tip] + 1
        moved: list[tuple[LeafOrder, int]] = []
        for place in self.places:
            order = place.leaves
            if len(order):
                filed = rows[np.frombuffer(order.filed, np.uint8)[rows] != 0].tolist()
                moved += [(order, row) for row in filed]
                order.remove_all(filed)
        of_rows = np.frombuffer(segments, np.int32)
        told(parts, of_rows[rows].astype(np.int64), bottom)
        own = max(0, bottom - parts.shared_blocks)
        of_rows[rows[:own]] = parts.own
        of_rows[rows[own:]] = parts.shared
        for order, row in moved:
            order.update(row)
        self.taking = None if above == NO_ROW else Taking(told, above, parts)
        return above == NO_ROW

    def by_segment(self, rows: Sequence[int]) -> list[tuple[int, int, int]]:
        """The segments that ``rows`` belong to one after another, each with where in ``rows`` it begins and ends."""
        if len(rows) == 1:
            return [(self.segments[rows[0]], 0, 1)]
        mine = [self.segments[row] for row in rows]
        starts = [at for at, segment in enumerate(mine) if not at or segment != mine[at - 1]]
        return [(mine[first], first, end) for first, end in pairwise([*starts, len(rows)])]

    def belong_to(self, segment: int, rows: Sequence[int]) -> None:
        for row in rows:
            self.segments[row] = segment

    def reach(self, rows: Iterable[int], stamp: int) -> None:
        """A hit whose deepest block was last used at ``stamp`` looks back to the windowed copies of ``rows``,
        which are distinct."""
        reached = self.reached
        later = [row for row in rows if stamp > reached[row]]
        moved: list[tuple[LeafOrder, list[int]]] = []
        for place in self.places:
            for order in place.window_leaves.values():
                filed = order.filed
                if candidates := [row for row in later if filed[row]]:
                    order.remove_all(candidates)
                    moved.append((order, candidates))
        for row in later:
            reached[row] = stamp
        for order, candidates in moved:
            order.add_all(candidates)

    def begin_flight(self, row: int) -> None:
        """A transfer reads or writes copies of the row: no place may drop the block."""
        self.flights[row] += 1
        if self.flights[row] == 1:
            self.flying.add(row)
            for place in self.places:
                place.leaves.remove(row)

    def begin_flights(self, rows: array[int]) -> None:
        """``begin_flight`` for each of the distinct ``rows``."""
        if len(rows) < AT_ONCE:
            for row in rows:
                self.begin_flight(row)
            return
        moving, flights = column(rows), np.frombuffer(self.flights, np.uint16)
        fresh = moving[flights[moving] == 0]
        flights[moving] += np.uint16(1)
        self.flying.add_all(fresh)
        for place in self.places:
            place.leaves.remove_all(fresh[np.frombuffer(place.leaves.filed, np.bool_)[fresh]].tolist())

    def end_flight(self, row: int) -> None:
        """The transfer is over; the row may be a candidate again. Raises LedgerBroken where none was running."""
        if not self.flights[row]:
            raise LedgerBroken(f"row {row} is in no flight")
        self.flights[row] -= 1
        if not self.flights[row]:
            self.flying.remove(row)
            for place in self.places:
                place.leaves.update(row)

    def end_flights(self, rows: array[int]) -> None:
        """``end_flight`` for each of the distinct ``rows``. Raises LedgerBroken before anything has changed."""
        ending, flights = column(rows), np.frombuffer(self.flights, np.uint16)
        if not flights[ending].all():
            raise LedgerBroken(f"row {rows[int(np.argmin(flights[ending]))]} is in no flight")
        flights[ending] -= np.uint16(1)
        over = ending[flights[ending] == 0]
        self.flying.remove_all(over.tolist())
        for place in self.places:  # what has a pin or a child there is no candidate: of a path, all but its end
            kept = np.frombuffer(place.pins, np.uint32)[over] | np.frombuffer(place.children, np.uint32)[over]
            place.leaves.add_all(over[kept == 0].tolist())

    def matching(self, rows: Sequence[int], keys: bytes) -> int:
        """Number of leading ``rows`` that have the packed ``keys`` one after another."""
        mine = [self.keys[row] or b"" for row in rows]
        if b"".join(mine) == keys:
            return len(rows)
        differ = (at for at, key in enumerate(mine) if keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] != key)
        return next(differ, len(rows))

    def key_of(self, row: int) -> bytes:
        """A row's key; empty for NO_ROW, the root."""
        return b"" if row == NO_ROW else self.keys[row] or b""

    def has_copy(self, row: int) -> bool:
        """True while any place holds a copy in any state but ABSENT."""
        return any(place.is_present(row) for place in self.places)

    def is_on_lost(self, row: int) -> bool:
        """True while a place whose memory is gone has the row still."""
        return any(place.is_present(row) for place in self.lost)
