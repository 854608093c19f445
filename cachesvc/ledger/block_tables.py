"""Block tables of one request: which page holds which block in each group, and which of them are the request's own."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from cachesvc.ledger.holds import Hold
from cachesvc.ledger.index.block_ledger import BlockLedger, Hit, hit_window_blocks, window_positions
from cachesvc.ledger.index.requests import Request
from cachesvc.ledger.index.tier_copies import NO_ROW, Place
from cachesvc.ledger.index.windows import Prefix
from cachesvc.ledger.tickets import Ticket
from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.words import ABSENT, NO_PAGE, READY, PageState


class Sealed(NamedTuple):
    """Result of sealing: ``rows`` sealed now, ``doubles`` positions that another sequence had sealed first,
    and ``spares``, the sequence's own (group, page) there."""

    rows: list[int]
    doubles: list[int]
    spares: list[tuple[int, int]]


class Fresh(NamedTuple):
    """``blocks`` new blocks of a sequence, from position ``first`` on. ``positions[g]``: those that get a page in a
    windowed group where not all do, rising."""

    first: int
    blocks: int
    positions: Mapping[int, Sequence[int]]

    def counts(self, groups: int) -> list[int]:
        """Pages of each group."""
        counts = [self.blocks] * groups
        for group, positions in self.positions.items():
            counts[group] = len(positions)
        return counts


def no_pages(blocks: int) -> array[int]:
    """A table of ``blocks`` cells without pages."""
    return array("i", (NO_PAGE,)) * blocks


class BlockTables(Hold):
    """``tables[g][i]`` is a page or NO_PAGE, int32. ``own[g]``: pages that this request alone may write, in its tables
    or spare (another sequence sealed their key first). ``cursors[g]``: first position behind the sinks that a windowed
    group still holds. ``declared``: the keys of positions from ``max(sealed, hit_blocks)`` up to here count as being
    computed by this request. ``request``: its handle in an eviction policy that follows requests.
    ``retention``: its engine's hint.
    """

    __slots__ = ("cursors", "declared", "keys", "own", "request", "retention", "tables")

    def __init__(self, ledger: BlockLedger, place: Place, keys: bytes) -> None:
        super().__init__(ledger, place)
        groups = len(place.pools)
        self.keys: bytes | bytearray = keys
        self.tables = [array("i") for _ in range(groups)]
        self.own: list[set[int]] = [set() for _ in range(groups)]
        self.cursors: dict[int, int] = {}
        self.declared = 0
        self.request: Request | None = None
        self.retention = 0

    @property
    def blocks(self) -> int:
        """Length of the block tables."""
        return len(self.tables[0])

    def key(self, position: int) -> bytes:
        """Key of one block, as far as the keys are known."""
        return bytes(self.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES])

    @property
    def known_keys(self) -> int:
        """Number of blocks with known keys."""
        return len(self.keys) // KEY_BYTES

    def own_pages(self) -> list[tuple[int, int]]:
        """``(group, page)`` of everything that this sequence alone may write."""
        return [(group, page) for group, pages in enumerate(self.own) for page in sorted(pages)]

    def owns(self, first: int, last: int) -> bool:
        """True where this sequence alone may write all pages of positions ``[first, last)``; windowed groups may have
        none there."""
        if len(self.own) == 1 and last - first == 1:  # by far the most: a loop costs more than the look
            return self.tables[0][first] in self.own[0]
        for table, own in zip(self.tables, self.own, strict=True):
            if not own.issuperset(table[first:last]):
                return bool(self.place.window_groups) and self._owns_or_lacks(first, last)
        return True

    def _owns_or_lacks(self, first: int, last: int) -> bool:
        for group, (table, own) in enumerate(zip(self.tables, self.own, strict=True)):
            for page in table[first:last]:
                if page not in own and (page != NO_PAGE or group in self.place.full_groups):
                    return False
        return True

    def follow(self, request: Request) -> None:
        """Let an eviction policy follow it from now on."""
        self.request = request

    # -- growing -----------------------------------------------------------------------------------------------

    def hold(self, hit: Hit, stamp: int) -> None:
        """See ``Hold``; what is in place is in the tables from now on."""
        super().hold(hit, stamp)
        place, layout = self.place, self.ledger.layout
        for group in place.window_groups:
            first = hit.blocks - hit_window_blocks(layout, group)
            self.cursors[group] = max(layout.sink_blocks(group), first)
        if not hit.device_blocks:
            return
        tables = place.pieces.tables(hit.device_row, hit.device_blocks)
        for group, table in zip(place.full_groups, tables, strict=True):
            self.tables[group] = table
        if place.window_groups:
            self._put_windows(hit)

    def _put_windows(self, hit: Hit) -> None:
        """Put into the tables, and keep, what windowed groups have in place for a hit."""
        place, layout = self.place, self.ledger.layout
        prefix = Prefix(self.ledger.index, self.keys, hit.device_row)
        for group in place.window_groups:
            positions = [each for each in window_positions(layout, group, hit.blocks) if each < hit.device_blocks]
            rows = dict(zip(positions, prefix.rows_at(positions), strict=True))
            pages, table = place.pages[group], no_pages(hit.device_blocks)
            for position, row in rows.items():
                table[position] = pages[row]
            self.tables[group] = table
            self.hold_windows(group, rows, hit.row)

    def rely_on(self, rows: array[int], needed: Mapping[int, Mapping[int, int]], tickets: Sequence[Ticket]) -> None:
        """See ``Hold``; the rest of the hit is in the tables from now on."""
        for group, table in enumerate(self.tables):
            if group in needed:
                base, pages = len(table), self.place.pages[group]
                part = no_pages(len(rows))
                for position, row in needed[group].items():
                    part[position - base] = pages[row]
                table.extend(part)
            else:
                table.extend(self.place.pages_of(group, rows))
        super().rely_on(rows, needed, tickets)

    def grow(self, pages_of: Sequence[array[int]], fresh: Fresh) -> None:
        """Own pages go to the end of the tables: the request computes these blocks."""
        first = fresh.first
        for group, (table, pages) in enumerate(zip(self.tables, pages_of, strict=True)):
            positions = fresh.positions.get(group)
            if positions is None:
                table.extend(pages)
                continue
            table.extend(no_pages(fresh.blocks))
            for position, page in zip(positions, pages, strict=True):
                table[position] = page
            assert first + fresh.blocks == len(table)
        self.declare(self.blocks)

    def declare(self, last: int, most: int | None = None) -> bool:
        """The request computes, or is about to, all blocks from its hit on up to ``last``, as far as their keys are
        known; up to ``most`` more of them (None: all) are declared now. True when all are."""
        keys, at = self.keys, self.declared
        if last * KEY_BYTES > len(keys):
            last = len(keys) // KEY_BYTES
        if at < self.sealed or at < self.hit_blocks:
            at = max(self.sealed, self.hit_blocks)
        until = last if most is None or last - at <= most else at + most
        if at < until:
            computing = self.ledger.computing
            self.declared = until
            while at < until:
                key = bytes(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES])
                computing[key] = computing.get(key, 0) + 1
                at += 1
        return until >= last

    def withdraw_beyond(self, last: int, most: int) -> bool:
        """The request does not compute blocks from ``last`` on, though it has declared them; up to ``most`` of them are
        withdrawn now. True when all are."""
        last = max(last, self.sealed, self.hit_blocks)
        until = max(last, self.declared - most)
        if self.declared > until:
            self._withdraw(until, self.declared)
            self.declared = until
        return until <= last

    def _withdraw(self, first: int, last: int) -> None:
        """The request no longer computes blocks ``[first, last)``, as far as it had declared them."""
        computing = self.ledger.computing
        for key in map(self.key, range(first, min(last, self.declared))):
            if left := computing.pop(key) - 1:
                computing[key] = left

    # -- sealing -----------------------------------------------------------------------------------------------

    def seal(self, keys: bytes, rows: Sequence[int], stamp: Callable[[], int], reuses: Mapping[bytes, int]) -> Sealed:
        """Publish the next computed blocks; ``rows`` are those of their packed ``keys``, NO_ROW for a key that is new.

        None of them is being filled here. ``stamp()`` gives access numbers, ``reuses`` the remembered reuse counts by
        key. Its end moves to the last of them, and the windows keep what they still need. Where there are more
        keys than rows, the rest is known from now on.
        """
        place, index = self.place, self.ledger.index
        first = self.sealed
        self._know(first, keys)
        out = Sealed([], [], [])
        states = place.states[place.lead]
        tip, path = self._device.row, []
        for position, known in enumerate(rows, start=first):
            row = known
            if row != NO_ROW and states[row] >= READY:
                out.doubles.append(position)
                self._take_sealed(position, row, out.spares)
            else:
                if row == NO_ROW:
                    at = (position - first) * KEY_BYTES
                    key = keys[at : at + KEY_BYTES]
                    row = index.insert(key, tip, stamp(), reuses.get(key, 0))
                self._seal_own(position, row)
                out.rows.append(row)
            path.append(row)
            tip = row
        if path:
            self.sealed += len(path)
            self._device.move(tip)
            if self.request is not None:
                self.request.sealed(first, path)
            index.touch(tip, stamp())
            if place.window_groups:
                self._hold_windows(first, path)
            self._withdraw(first, self.sealed)
        return out

    def sealed_new(self, keys: Sequence[bytes], path: Sequence[int]) -> None:
        """Note that its next blocks were sealed in the rows ``path``, under ``keys`` that were new; move its pin to the
        last one."""
        first = self.sealed
        last = self.sealed = first + len(path)
        if self.declared > first:
            computing = self.ledger.computing
            for key in keys if self.declared >= last else keys[: self.declared - first]:
                if left := computing.pop(key) - 1:
                    computing[key] = left
        if last * KEY_BYTES > len(self.keys):
            self._know(first, b"".join(keys))
            self.declared = last  # that is none of them, and growing need not look
        self._device.row = path[-1]
        if self.request is not None:
            self.request.sealed(first, path)
        if self.place.window_groups:
            self._hold_windows(first, path)

    def _know(self, first: int, keys: bytes) -> None:
        """The packed keys of the blocks from ``first`` on; those of Match are copied when others come to them."""
        if isinstance(self.keys, bytes):
            self.keys = bytearray(self.keys)
        self.keys[first * KEY_BYTES : first * KEY_BYTES + len(keys)] = keys

    def _seal_own(self, position: int, row: int) -> None:
        pages = [table[position] for table in self.tables]
        for group in self.place.unsealed_groups:
            pages[group] = NO_PAGE
        self.ledger.seal(self.place, row, pages)
        for own, page in zip(self.own, pages, strict=True):
            if page != NO_PAGE:
                own.remove(page)

    def _take_sealed(self, position: int, row: int, spares: list[tuple[int, int]]) -> None:
        """Put the sealed pages into the tables; the request's own become spares.

        A windowed group may have dropped its sealed page: then the request's own page is sealed in its place.
        """
        place = self.place
        for group, table in enumerate(self.tables):
            own = table[position]
            if own == NO_PAGE or group in place.unsealed_groups:
                continue
            if place.states[group][row] == ABSENT:
                self.ledger.seal_alone(place, group, row, own)
                self.own[group].remove(own)
            elif place.states[group][row] >= READY:
                spares.append((group, own))
                table[position] = place.pages[group][row]

    def _hold_windows(self, first: int, path: Sequence[int]) -> None:
        for group in self.place.window_groups:
            table, pages = self.tables[group], self.place.pages[group]
            for position, row in enumerate(path, start=first):
                if table[position] != NO_PAGE and pages[row] == table[position]:
                    self.windows.hold(group, position, row)

    def seal_state(self, group: int, position: int, page: int) -> int:
        """Publish one of its own pages as the state at the end of a sealed block. Returns the row, or NO_ROW where
        there is a state already, or one is on its way."""
        place, table = self.place, self.tables[group]
        row = Prefix(self.ledger.index, self.keys, self.anchor).row(position)
        if place.states[group][row] != ABSENT:
            return NO_ROW
        self.ledger.seal_alone(place, group, row, page)
        self.own[group].remove(page)
        if page in table:
            table[table.index(page)] = NO_PAGE
        if position >= self.cursors[group]:
            table[position] = page
            self.windows.hold(group, position, row)
        else:
            place.window_leaves[group].update(row)
        return row

    # -- giving back -------------------------------------------------------------------------------------------

    def give_back(self, group: int, page: int) -> None:
        """Free one of its own pages that is in no table."""
        self.own[group].remove(page)
        self.place.pools[group].move(page, PageState.FREE)

    def recycle(self, group: int, dead: int) -> int:
        """Give back what a windowed group has below position ``dead``, but for its sinks; returns own pages freed."""
        table, own = self.tables[group], self.own[group]
        freed: list[int] = []
        shared: list[int] = []
        for position in range(self.cursors[group], dead):
            page = table[position]
            if page == NO_PAGE:
                continue
            table[position] = NO_PAGE
            if page in own:
                own.remove(page)
                freed.append(page)
            else:
                shared.append(position)
        if shared:
            self.windows.drop(group, shared)
        self.place.pools[group].move_all(freed, PageState.FREE)
        self.cursors[group] = max(self.cursors[group], dead)
        return len(freed)
