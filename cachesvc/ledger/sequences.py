"""One request of an engine: its block tables, on the device or swapped out, and its place in line for more pages.

Flows tell a sequence what happens to it and take nothing from it by hand; ``end`` gives back whatever is left.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cachesvc.ledger.block_ledger import BlockLedger, Hit
from cachesvc.ledger.page_pool import Reservation
from cachesvc.ledger.pins import Pin, WindowPins
from cachesvc.ledger.retention import Prefix, Request, hit_window_blocks, window_positions
from cachesvc.ledger.reuse_stats import RecentRequest
from cachesvc.ledger.sequence_state import ACTIVE, AWAY, ENDED, FAILED, LEAVING, LOADING, RETURNING, SequenceState, move
from cachesvc.ledger.storage_state import Expectation
from cachesvc.ledger.tickets import MovedPages, Ticket
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.answers import Ended
from cachesvc.model.numbers import Party, array_of, column, count_held
from cachesvc.model.words import ABSENT, KEY_BYTES, NO_PAGE, READY, Direction, PageState

# A prefix that is kept resident: pinned in place, tracked while it is loaded to the device, released once.
#
# A hold owns two pins and its window pins. ``[0, sealed)`` are shared blocks down to ``anchor``, which is pinned on the
# device; ``[sealed, hit_blocks)`` are being loaded, or are to be, down to ``host_anchor``, which is pinned on the host
# until they have come. Where either end is NO_ROW nothing is pinned there.
#
# Of a hit that is to be loaded in part, the last window may lie partly on the host, and partly on the device behind
# what is in place. Until its loads begin, these copies are pinned by themselves, wherever they are.


class Hold:
    """``loads``: tickets that it relies on. ``failed``: why it cannot go on, once one of them has failed. ``state``: of
    a sequence; a prefetch uses those of its loads alone."""

    __slots__ = (
        "_device",
        "_host",
        "_until_loaded",
        "failed",
        "hit_blocks",
        "ledger",
        "loads",
        "place",
        "sealed",
        "state",
        "windows",
    )

    is_use = True
    """True where holding blocks counts as a use of them."""

    def __init__(self, ledger: BlockLedger, place: Place) -> None:
        self.ledger = ledger
        self.place = place
        self._device = Pin(ledger, place)
        self._host = Pin(ledger, ledger.host)
        self.windows = WindowPins(ledger, place)
        self._until_loaded: tuple[Pin | WindowPins, ...] = ()
        self.sealed = 0
        self.hit_blocks = 0
        self.loads: list[int] = []
        self.failed = ""
        self.state = ACTIVE

    @property
    def anchor(self) -> int:
        """The deepest row that it keeps on the device."""
        return self._device.row

    @property
    def host_anchor(self) -> int:
        """The deepest row that it keeps on the host."""
        return self._host.row

    @property
    def window_rows(self) -> Mapping[int, Mapping[int, int]]:
        """Windowed group -> position -> row of the copies that it keeps."""
        return self.windows.rows

    def pins(self) -> Iterator[tuple[int, int | None, int]]:
        """Number of the place, windowed group (None: a whole block) and row of each pin that it owns. For audits."""
        for pin in (self._device, self._host, self.windows, *self._until_loaded):
            if isinstance(pin, WindowPins):
                for group, held in pin.rows.items():
                    yield from ((pin.place.number, group, row) for row in held.values())
            elif pin.row != NO_ROW:
                yield pin.place.number, None, pin.row

    def hold(self, hit: Hit, stamp: int) -> None:
        """Stamp and pin a hit's deepest blocks: one on the device, one on the host if that is deeper."""
        self.sealed = hit.device_blocks
        self.hit_blocks = hit.blocks
        if hit.device_row != NO_ROW:
            self._device.move(hit.device_row)
            self.place.used[hit.device_row] |= self.is_use
            self.ledger.index.touch(hit.device_row, stamp)
        if hit.blocks > hit.device_blocks:
            self._host.move(hit.row)
            self.ledger.index.touch(hit.row, stamp)
            if self.place.window_groups:
                self._hold_windows_to_load(hit)

    def _hold_windows_to_load(self, hit: Hit) -> None:
        """Keep the windowed copies behind what is in place where they are: on the device, or on the host."""
        ledger, place, host = self.ledger, self.place, self.ledger.host
        path = ledger.index.path(hit.row, hit.device_row)
        here, there = WindowPins(ledger, place), WindowPins(ledger, host)
        deepest = -1
        for group in place.window_groups:
            for position in window_positions(ledger.layout, group, hit.blocks):
                at = position - hit.device_blocks
                if at < 0:
                    continue
                if place.states[group][path[at]] == READY:
                    here.hold(group, position, path[at])
                    deepest = max(deepest, at)
                elif host.states[group][path[at]] == READY:
                    there.hold(group, position, path[at])
        self._until_loaded = (Pin(ledger, place, path[deepest] if deepest >= 0 else NO_ROW), here, there)

    def hold_windows(self, group: int, rows: Mapping[int, int], tip: int) -> None:
        """Keep the windowed copies of ``rows``, by position, that a hit down to ``tip`` looks back to."""
        self.windows.hold_all(group, rows)  # first: what is held is in no order that its use would change
        self.ledger.use_windows(rows.values(), tip)

    def rest(self) -> array[int]:
        """Rows of the hit that it does not hold on the device yet, root first."""
        if self.loads or self.host_anchor == NO_ROW:
            return array("i")
        return self.ledger.index.path(self.host_anchor, self.anchor)

    def rely_on(self, rows: array[int], needed: Mapping[int, Mapping[int, int]], tickets: Sequence[Ticket]) -> None:
        """The rest of the hit, ``rows``, is on the device or comes there with ``tickets``.

        ``needed[g]``: position -> row of the windowed copies among them that the hit needs. What is there already is
        held from now on: nothing in flight may be all that keeps it.
        """
        present = np.flatnonzero(self.place.states_of(self.place.lead, rows) >= READY)
        if len(present):
            self._device.move(rows[present[-1]])
            self.sealed += len(present)
        for group, positions in needed.items():
            self.hold_windows(group, positions, self.host_anchor)
        self._let_go_until_loaded()
        for ticket in tickets:
            ticket.waiters.append(self)
            self.loads.append(ticket.id)
        if tickets:
            self.state = move(self.state, LOADING)
        if rows and not tickets:
            self._settle()

    def _let_go_until_loaded(self) -> None:
        for pin in self._until_loaded:
            pin.let_go()
        self._until_loaded = ()

    def load_ended(self, ticket: int, reason: str) -> None:
        """A load has ended, for ``reason`` if it failed. After the last one all is held on the device, or it failed."""
        if ticket not in self.loads:
            return  # it has let go
        self.loads.remove(ticket)
        if reason and not self.failed:
            self.failed = f"load {ticket} failed: {reason}"
            self._reach(FAILED)
            self.windows.leave(self.anchor)  # what they held may be gone; it can only be released now
        if self.failed:
            return
        if not self.loads:
            self._reach(ACTIVE)
            self._settle()
        elif self.place.is_hittable(self.host_anchor):  # only windows further up still come: they keep nothing below
            self._device.move(self.host_anchor)
            self.sealed = self.hit_blocks

    def _reach(self, state: SequenceState) -> None:
        """Move on when its loads have ended, unless it has begun to end before them."""
        if self.state is not ENDED:
            self.state = move(self.state, state)

    def _settle(self) -> None:
        """Hold the hit on the device, where all of it is now, and nothing on the host."""
        tip = self.host_anchor
        self._device.move(tip)
        self.place.used[tip] |= self.is_use
        self._host.let_go()
        self.sealed = self.hit_blocks

    def let_go(self) -> None:
        """Hold nothing any more. What it relied on goes on without it. Twice is fine."""
        if self._until_loaded:
            self._let_go_until_loaded()
        if self.windows.rows:
            self.windows.leave(self.anchor)
        self._device.move(NO_ROW)
        self._host.move(NO_ROW)
        self.loads.clear()


class Prefetch(Hold):
    """A prefix in flight to the device that no sequence uses yet: it is held until its loads have ended.

    ``siblings``: the prefetches of its lease that have not ended; this one is there until it has.
    """

    __slots__ = ("siblings",)

    is_use = False

    def __init__(self, ledger: BlockLedger, place: Place, siblings: dict[Prefetch, None]) -> None:
        super().__init__(ledger, place)
        self.siblings = siblings
        siblings[self] = None

    def load_ended(self, ticket: int, reason: str) -> None:
        """See ``Hold``; with its last load it ends."""
        super().load_ended(ticket, reason)
        if not self.loads:
            self.let_go()

    def let_go(self) -> None:
        super().let_go()
        self.siblings.pop(self, None)


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
        counts = [self.blocks] * groups
        for group, positions in self.positions.items():
            counts[group] = len(positions)
        return counts


def no_pages(blocks: int) -> array[int]:
    """A table of ``blocks`` cells without pages."""
    return array("i", (NO_PAGE,)) * blocks


Keep = Callable[[int, "array[int]"], None]
"""Takes pages of a group that a process may still write."""


WINDOW_COST = 8
"""Cost of a released windowed copy in pages: it is a candidate from then on."""


class SwappedPages(NamedTuple):
    """Own pages of a group that are on the host: their positions in its table, and the host pages."""

    positions: array[int]
    host_pages: array[int]


class OpenSequence(Hold):
    """``tables[g][i]`` is a page or NO_PAGE, int32. ``own[g]``: pages that this request alone may write, in its tables
    or spare (another sequence sealed their key first). ``cursors[g]``: first position behind the sinks that a windowed
    group still holds. ``declared``: the keys of positions from ``max(sealed, hit_blocks)`` up to here count as being
    computed by this request. ``request``: its handle in an eviction policy that follows requests.
    ``retention``: its engine's hint.

    While it is AWAY or RETURNING, ``swapped`` has its own pages by group, and ``host_anchor`` keeps its shared
    blocks. ``swap_ticket``: of a swap under way, 0 for none. ``room``: pages that are kept for a call that waits, once
    one has waited. ``recent``: its request among the model's last ones. ``parts``: loads that a call which
    waits has begun, and the blocks of each.
    """

    __slots__ = (
        *("cursors", "declared", "keys", "own", "request", "retention", "tables"),
        *("freed", "id", "lease", "model", "recent", "replica"),
        *("charged", "expectation", "parts", "room", "swap_ticket", "swapped"),
    )

    def __init__(
        self, number: int, lease: str, model: int, replica: int, ledger: BlockLedger, place: Place, keys: bytes
    ) -> None:
        super().__init__(ledger, place)
        groups = len(place.pools)
        self.id = number
        self.lease = lease
        self.model = model
        self.replica = replica
        self.keys: bytes | bytearray = keys
        self.tables = [array("i") for _ in range(groups)]
        self.own: list[set[int]] = [set() for _ in range(groups)]
        self.cursors: dict[int, int] = {}
        self.declared = 0
        self.request: Request | None = None
        self.retention = 0
        self.recent: RecentRequest | None = None
        self.room: Reservation | None = None
        self.swap_ticket = 0
        self.parts: dict[int, int] = {}
        self.swapped: list[SwappedPages] = []
        self.freed = 0
        self.charged: tuple[dict[Party, int], Party, int] | None = None
        self.expectation: Expectation | None = None

    @property
    def blocks(self) -> int:
        return len(self.tables[0])

    def key(self, position: int) -> bytes:
        """Key of one block, as far as the keys are known."""
        return bytes(self.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES])

    @property
    def known_keys(self) -> int:
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

    def wait_for(self, expectation: Expectation) -> None:
        """Note that what another node computes is wanted while the sequence is open."""
        self.expectation = expectation
        expectation.wanted_by += 1

    def charge(self, held: dict[Party, int], party: Party) -> None:
        """The bytes of keys that it was matched with count as held by ``party`` until it ends."""
        if size_bytes := len(self.keys):
            self.charged = held, party, size_bytes
            count_held(held, party, size_bytes)

    def follow_hint(self, retention: int) -> None:
        """Set its engine's hint on what it uses and computes, a value of the policy's ``RequestHint``."""
        self.retention = retention

    def remember(self, recent: RecentRequest) -> None:
        """Set the request ``recent``, which gets the end of this sequence."""
        self.recent = recent

    def tell_end(self, ended: Ended) -> None:
        """Report the engine's facts on its end, which is near."""
        if self.request is not None:
            self.request.ended = ended
        if self.recent is not None and ended.output_tokens is not None:
            self.recent.output_tokens = ended.output_tokens

    @property
    def is_open(self) -> bool:
        return self.state is not ENDED

    @property
    def swapped_out(self) -> bool:
        """True while the host alone has it whole."""
        return self.state is AWAY or self.state is RETURNING

    @property
    def is_on_device(self) -> bool:
        """True while it keeps pages of its device, its own or shared ones."""
        return self.anchor != NO_ROW or any(self.own)

    @property
    def awaited(self) -> Sequence[int]:
        """Tickets that must end before its blocks can be published."""
        return (self.swap_ticket,) if self.swap_ticket else self.loads

    def reserve(self) -> Reservation:
        """Reservation of pages for its waiting calls."""
        if self.room is None:
            self.room = Reservation(self.place.reservations, self.place.pools, self.own)
        return self.room

    def device_pages(self, groups: Iterable[int]) -> int:
        """Number of pages of ``groups`` that it has on its device, those of its hit that are no part of a table yet
        included, but for windows."""
        rest = self.rest()
        found = 0
        for group in groups:
            found += int((column(self.tables[group]) != NO_PAGE).sum())
            if rest and group in self.place.full_groups:
                found += int((self.place.states_of(group, rest) == READY).sum())
        return found

    @property
    def pages_ahead(self) -> list[int]:
        """Pages of each group that were taken for a call that is growing it; none: of no group."""
        ahead = [] if self.room is None else list(map(len, self.room.ahead))
        return ahead if any(ahead) else []

    def missing(self, fresh: Sequence[int]) -> list[int]:
        """Pages of each group that ``fresh[g]`` are more than those taken ahead."""
        ahead = self.pages_ahead
        return [max(0, count - had) for count, had in zip(fresh, ahead, strict=True)] if ahead else list(fresh)

    def prepare(self, blocks: int, fresh: Sequence[int], most: int) -> bool:
        """Take ``fresh[g]`` pages, and declare keys, of blocks with which it will have ``blocks``: some of them now,
        where they are more than ``most``. What a larger call before that was given up has left goes. True when
        ``fresh_pages`` is due. There are as many pages."""
        is_declared = self.withdraw_beyond(blocks, most) and self.declare(blocks, most)
        if max(fresh) <= most and not self.pages_ahead:
            return is_declared
        return self.reserve().take_ahead(fresh, most) and is_declared

    def fresh_pages(self, counts: Sequence[int]) -> list[array[int]]:
        """``counts[g]`` pages of each group, its own from now on: those first that were taken ahead."""
        ahead = [array("i") for _ in self.tables] if self.room is None else self.room.hand_over(counts)
        for pages, own, pool, count in zip(ahead, self.own, self.place.pools, counts, strict=True):
            rest = pool.take(count - len(pages), PageState.PRIVATE)
            own.update(rest)
            pages.extend(rest)
        return ahead

    @property
    def swapped_pages(self) -> int:
        """Number of its own pages that are on the host."""
        return sum(len(pages.host_pages) for pages in self.swapped)

    # -- swap --------------------------------------------------------------------------------------------------

    def moving(self) -> list[int]:
        """Number of pages of each group that ``own_moves`` would move."""
        counts = []
        for group, (table, pool) in enumerate(zip(self.tables, self.place.pools, strict=True)):
            pages = column(table)
            is_moving = pool.are_private(pages) if group in self.place.full_groups else pages != NO_PAGE
            counts.append(int(np.count_nonzero(is_moving)))
        return counts

    def own_moves(self) -> list[MovedPages]:
        """Pages that a swap out moves: own pages in the tables, and shared ones that windows still need (they come back
        as own pages). The host pages are still to be chosen."""
        moves: list[MovedPages] = []
        for group, table in enumerate(self.tables):
            pages = column(table)
            positions = np.flatnonzero(pages != NO_PAGE)
            is_own = self.place.pools[group].are_private(pages[positions])
            if group in self.place.full_groups:
                positions, is_own = positions[is_own], is_own[is_own]
            moving = pages[positions]
            moves.append(MovedPages(group, array_of(positions), array_of(moving), array("i"), array_of(moving[is_own])))
        return moves

    def leave(self, ticket: Ticket, moves: list[MovedPages]) -> None:
        """Begin to move its own pages to host pages, of which there are enough; spare ones hold nothing of use and are
        freed. Shared blocks are kept on both until ``swap_ended``: have them come to the host first."""
        host = self.ledger.host
        self.free_spares()
        for moved in moves:
            moved.host_pages = host.pools[moved.group].take(len(moved.positions), PageState.IN_FLIGHT)
            self.place.pools[moved.group].move_all(moved.own, PageState.IN_FLIGHT)
        self._begin_swap(ticket, moves, LEAVING)

    def free_spares(self) -> None:
        """Own pages beside the tables: of keys that others sealed first, of a swap in that failed, of a call that was
        given up."""
        if self.room is not None:
            self.room.hand_over(list(map(len, self.room.ahead)))
        for group, pool in enumerate(self.place.pools):
            own = self.own[group]
            if len(own) > np.count_nonzero(pool.are_private(column(self.tables[group]))):
                spares = own.difference(self.tables[group])
                own -= spares
                pool.move_all(spares, PageState.FREE)

    def come_back(self, ticket: Ticket) -> None:
        """Begin to move its own pages back to device pages, of which there are enough; its shared blocks are on the
        device, or coming."""
        place, host = self.place, self.ledger.host
        moves: list[MovedPages] = []
        for group, pool in enumerate(place.pools):
            positions, host_pages = self.swapped[group]
            pages = pool.take(len(positions), PageState.IN_FLIGHT)
            host.pools[group].move_all(host_pages, PageState.IN_FLIGHT)
            column(self.tables[group])[column(positions)] = column(pages)
            self.own[group].update(pages)
            moves.append(MovedPages(group, positions, pages, host_pages, pages))
        path = self.ledger.index.path(self.host_anchor)
        for group in place.full_groups:
            self.tables[group][: len(path)] = place.pages_of(group, path)
        self._device.move(self.host_anchor)
        self._begin_swap(ticket, moves, RETURNING)

    def keep_on_host(self) -> None:
        """The host has its shared blocks, or they are coming there: they stay."""
        self._host.move(self.anchor)

    def _begin_swap(self, ticket: Ticket, moves: list[MovedPages], state: SequenceState) -> None:
        self.state = move(self.state, state)
        ticket.moves = moves
        ticket.traveller = self
        self.swap_ticket = ticket.id

    def swap_ended(self, ticket: Ticket) -> list[array[int]]:
        """End a swap, successful or not; the sequence may have ended before it.

        Its own pages are private where it is now, and free where it is not. Only where a swap in failed do the device
        pages stay its own too, as spares: the failure has released launches that waited for it, and they write there.
        Pages to which copies may still come stay in quarantine, without an owner. Returns, by group, the device pages
        of a sequence that has ended, in flight still: their writers may go on.
        """
        # Where the sequence is now follows from direction and outcome. The side that it left is free at once, but for
        # two cases: bytes may still be copied there (``may_write``), or the sequence ended meanwhile and its engine's
        # kernels may still write the device pages, which its lease then decides.
        left = ticket.direction is Direction.STORE
        failed = bool(ticket.failing)
        is_out = self.is_open and left != failed
        rest = [array("i") for _ in self.place.pools]
        self.swap_ticket = 0
        for moved in ticket.moves:
            group, pool = moved.group, self.place.pools[moved.group]
            host = self.ledger.host.pools[group]
            if ticket.may_write and left:
                host.keep_back(moved.host_pages)
            else:
                host.move_all(moved.host_pages, PageState.PRIVATE if is_out else PageState.FREE)
            if ticket.may_write and not left:
                pool.keep_back(moved.own)
                self.own[group].difference_update(moved.own)
            elif self.is_open:
                pool.move_all(moved.own, PageState.FREE if is_out and left else PageState.PRIVATE)
            else:
                rest[group] = moved.own
                self.own[group].difference_update(moved.own)
        if not self.is_open:
            self.swapped = []
            self._host.let_go()  # what failed to come is not there to be kept, though it is ending still
            if failed and not left:
                self._device.let_go()
        elif is_out:
            self._is_out(ticket)
        else:
            self._is_in()
        return rest

    def _is_out(self, ticket: Ticket) -> None:
        self.state = move(self.state, AWAY)
        self.swapped = [SwappedPages(moved.positions, moved.host_pages) for moved in ticket.moves]
        self.windows.leave(self.anchor)
        self._device.let_go()
        for group in range(len(self.tables)):
            if ticket.direction is Direction.STORE:
                self.own[group].clear()
            self.tables[group] = no_pages(self.blocks)

    def _is_in(self) -> None:
        """Note that the sequence is on the device: it came back, or never went."""
        self.state = move(self.state, ACTIVE)
        self.swapped = []
        self._host.let_go()
        if self.anchor != NO_ROW:
            self.place.used[self.anchor] = 1

    # -- end ---------------------------------------------------------------------------------------------------

    def end(self, keep: Keep | None = None) -> int:
        """Let go of everything; returns how many device pages came back. See ``end_part``."""
        while not self.end_part(1 << 30, keep):
            pass
        return self.freed

    def end_part(self, most: int, keep: Keep | None = None) -> bool:
        """Let go of ``most`` of its pages and keys of each kind; True when it has nothing any more. ``freed``: device
        pages that have come back by then. Nothing else is done with a sequence that has begun to end.

        ``keep``: takes the own pages of a group that a process may still write, instead of freeing them. Pages of a
        running swap are settled when it has ended.
        """
        if self.is_open:
            if self.request is not None and not self.ledger.index.take_over():
                return False  # what it takes over is pinned until then
            self.state = move(self.state, ENDED)
            if self.charged is not None:
                held, party, size_bytes = self.charged
                count_held(held, party, -size_bytes)
            if self.expectation is not None:
                self.expectation.wanted_by -= 1
            self.windows.look_back(self.anchor)
            if self.room is not None:
                self.room.release()
            if self.request is not None:
                last = self.key(self.sealed - 1) if self.sealed else b""
                self.request.end(self.sealed, last, self.ledger.clock.seconds)
            if self.hit_blocks < self.declared and self.sealed < self.known_keys:
                self.ledger.give_up(self.key(max(self.sealed, self.hit_blocks)))
        first = max(self.sealed, self.hit_blocks)
        if self.declared > first:
            self._withdraw(max(first, self.declared - most), self.declared)
            self.declared = max(first, self.declared - most)
            if self.declared > first:
                return False
        if not self.windows.let_go_of(max(1, most // WINDOW_COST)):
            return False
        self.let_go()
        each = max(1, most // len(self.own))
        left = [self._end_own(group, each, keep) for group in range(len(self.own))]
        if any(left):
            return False
        return bool(self.swap_ticket) or self._end_swapped(most)

    def _end_own(self, group: int, most: int, keep: Keep | None) -> bool:
        """Let go of some of its own pages of a group; True when more are left."""
        own, pool = self.own[group], self.place.pools[group]
        if not own:
            return False
        some = array("i", [own.pop() for _ in range(min(most, len(own)))])
        if self.swap_ticket:
            some = array_of(column(some)[pool.are_private(column(some))])
        if keep is None:
            pool.move_all(some, PageState.FREE)
        else:
            keep(group, some)
        self.freed += len(some)
        return bool(own)

    def _end_swapped(self, most: int) -> bool:
        """Free some of its host pages; True when none is left."""
        for (_, host_pages), pool in zip(self.swapped, self.ledger.host.pools, strict=False):
            some = host_pages[-most:]
            del host_pages[-most:]
            pool.move_all(some, PageState.FREE)
            most -= len(some)
            if not most:
                break
        return not self.swapped_pages
