"""One request of an engine: its block tables, on the device or swapped out, and its place in line for more pages.

Flows tell a sequence what happens to it and take nothing from it by hand; ``end`` gives back whatever is left.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from cachesvc.ledger.block_tables import BlockTables, no_pages
from cachesvc.ledger.index.block_ledger import BlockLedger
from cachesvc.ledger.index.tier_copies import NO_ROW, Place
from cachesvc.ledger.pages.reservations import Reservation
from cachesvc.ledger.recent_requests import RecentRequest
from cachesvc.ledger.sequence_state import ACTIVE, AWAY, ENDED, LEAVING, RETURNING, SequenceState, move
from cachesvc.ledger.storage_state import Expectation
from cachesvc.ledger.tickets import MovedPages, Ticket
from cachesvc.model.numbers.int32s import array_of, column
from cachesvc.model.numbers.sharing import Party, count_held
from cachesvc.model.requests import Ended
from cachesvc.model.transfer import Direction
from cachesvc.model.words import NO_PAGE, READY, PageState

Keep = Callable[[int, "array[int]"], None]
"""Takes pages of a group that a process may still write."""


WINDOW_COST = 8
"""Cost of a released windowed copy in pages: it is a candidate from then on."""


class SwappedPages(NamedTuple):
    """Own pages of a group that are on the host: their positions in its table, and the host pages."""

    positions: array[int]
    host_pages: array[int]


class OpenSequence(BlockTables):
    """While it is AWAY or RETURNING, ``swapped`` has its own pages by group, and ``host_anchor`` keeps its shared
    blocks. ``swap_ticket``: of a swap under way, 0 for none. ``room``: pages that are kept for a call that waits, once
    one has waited. ``recent``: its request among the model's last ones. ``parts``: loads that a call which
    waits has begun, and the blocks of each.
    """

    __slots__ = (
        *("freed", "id", "lease", "model", "recent", "replica"),
        *("charged", "expectation", "parts", "room", "swap_ticket", "swapped"),
    )

    def __init__(
        self, number: int, lease: str, model: int, replica: int, ledger: BlockLedger, place: Place, keys: bytes
    ) -> None:
        super().__init__(ledger, place, keys)
        self.id = number
        self.lease = lease
        self.model = model
        self.replica = replica
        self.recent: RecentRequest | None = None
        self.room: Reservation | None = None
        self.swap_ticket = 0
        self.parts: dict[int, int] = {}
        self.swapped: list[SwappedPages] = []
        self.freed = 0
        self.charged: tuple[dict[Party, int], Party, int] | None = None
        self.expectation: Expectation | None = None

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
        """True until it begins to end."""
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
    def awaited(self) -> Seq[int]:
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

    def missing(self, fresh: Seq[int]) -> list[int]:
        """Pages of each group that ``fresh[g]`` are more than those taken ahead."""
        ahead = self.pages_ahead
        return [max(0, count - had) for count, had in zip(fresh, ahead, strict=True)] if ahead else list(fresh)

    def prepare(self, blocks: int, fresh: Seq[int], most: int) -> bool:
        """Take ``fresh[g]`` pages, and declare keys, of blocks with which it will have ``blocks``: some of them now,
        where they are more than ``most``. What a larger call before that was given up has left goes. True when
        ``fresh_pages`` is due. There are as many pages."""
        is_declared = self.withdraw_beyond(blocks, most) and self.declare(blocks, most)
        if max(fresh) <= most and not self.pages_ahead:
            return is_declared
        return self.reserve().take_ahead(fresh, most) and is_declared

    def fresh_pages(self, counts: Seq[int]) -> list[array[int]]:
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
