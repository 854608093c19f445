"""One request of an engine: its block tables, on the device or swapped out, and its place in line for more pages.

Flows tell a sequence what happens to it and take nothing from it by hand; ``end`` gives back whatever is left.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from cachesvc.ledger.blocks import BlockLedger
from cachesvc.ledger.place import NO_ROW, Place
from cachesvc.ledger.reservations import Reservation
from cachesvc.ledger.tables import BlockTables, no_pages
from cachesvc.ledger.tickets import PageMove, Ticket
from cachesvc.model.transfer import Direction
from cachesvc.model.words import NO_PAGE, PageState


class Sequence(BlockTables):
    """While it is swapped out, ``swapped`` has the ``(group, position, host page)`` of its own pages, and
    ``host_anchor`` keeps its shared blocks. ``swap_ticket``: of a swap under way, 0 for none. ``room``: pages that are
    kept for a call that waits, once one has waited.
    """

    __slots__ = ("id", "is_open", "lease", "model", "replica", "room", "swap_ticket", "swapped", "swapped_out")

    def __init__(
        self, number: int, lease: str, model: int, replica: int, ledger: BlockLedger, place: Place, keys: bytes
    ) -> None:
        super().__init__(ledger, place, keys)
        self.id = number
        self.lease = lease
        self.model = model
        self.replica = replica
        self.room: Reservation | None = None
        self.swap_ticket = 0
        self.swapped_out = False
        self.swapped: list[tuple[int, int, int]] = []
        self.is_open = True

    def reserve(self) -> Reservation:
        """What keeps pages for its calls that wait."""
        if self.room is None:
            self.room = Reservation(self.place.reservations, self.place.pools)
        return self.room

    # -- swap --------------------------------------------------------------------------------------------------

    def own_moves(self) -> list[PageMove]:
        """What a swap out moves: own pages in the tables, and shared ones that windows still need (they come back as
        own pages). The host pages are still to be chosen."""
        moves: list[PageMove] = []
        for group, table in enumerate(self.tables):
            own, windowed = self.own[group], group in self.place.window_groups
            moves += [
                PageMove(group, position, page, NO_PAGE, is_own=page in own)
                for position, page in enumerate(table)
                if page != NO_PAGE and (page in own or windowed)
            ]
        return moves

    def leave(self, ticket: Ticket, moves: list[PageMove]) -> None:
        """Its own pages begin to leave for host pages, of which there are enough; spare ones hold nothing worth taking
        along and are free. Shared blocks are kept on both until ``swap_ended``: have them come to the host first."""
        host = self.ledger.host
        self.free_spares()
        for group, pool in enumerate(self.place.pools):
            mine = [move for move in moves if move.group == group]
            for move, page in zip(mine, host.pools[group].take(len(mine), PageState.IN_FLIGHT), strict=True):
                move.host_page = page
            pool.move_all([move.device_page for move in mine if move.is_own], PageState.IN_FLIGHT)
        self._begin_swap(ticket, moves)

    def free_spares(self) -> None:
        """Own pages beside the tables: of keys that others sealed first, and of a swap in that failed."""
        for group, pool in enumerate(self.place.pools):
            spares = self.own[group].difference(self.tables[group])
            self.own[group] -= spares
            pool.move_all(spares, PageState.FREE)

    def come_back(self, ticket: Ticket) -> None:
        """Its own pages begin to come back to device pages, of which there are enough; its shared blocks are on the
        device, or coming."""
        place, host, moves = self.place, self.ledger.host, []
        for group, pool in enumerate(place.pools):
            mine = [(position, page) for g, position, page in self.swapped if g == group]
            pages = pool.take(len(mine), PageState.IN_FLIGHT)
            host.pools[group].move_all([page for _, page in mine], PageState.IN_FLIGHT)
            for (position, host_page), page in zip(mine, pages, strict=True):
                moves.append(PageMove(group, position, page, host_page))
                self.tables[group][position] = page
            self.own[group].update(pages)
        path = self.ledger.index.path(self.host_anchor)
        for group in place.full_groups:
            pages_of = place.pages[group]
            self.tables[group][: len(path)] = array("i", [pages_of[row] for row in path])
        self._device.move(self.host_anchor)
        self._begin_swap(ticket, moves)

    def keep_on_host(self) -> None:
        """The host has its shared blocks, or they are coming there: they stay."""
        self._host.move(self.anchor)

    def _begin_swap(self, ticket: Ticket, moves: list[PageMove]) -> None:
        ticket.moves = moves
        ticket.traveller = self
        self.swap_ticket = ticket.id

    def swap_ended(self, ticket: Ticket) -> list[list[int]]:
        """A swap has ended, well or not; the sequence may have ended before it.

        Its own pages are private where it is now, and free where it is not. Only where a swap in failed do the device
        pages stay its own too, as spares: the failure has released launches that waited for it, and they write there.
        Returns, by group, the device pages of a sequence that has ended, in flight still: whoever was to write them may
        do so.
        """
        left = ticket.direction is Direction.STORE
        failed = bool(ticket.reason)
        is_out = self.is_open and left != failed
        rest: list[list[int]] = [[] for _ in self.place.pools]
        for group, pool in enumerate(self.place.pools):
            mine = [move for move in ticket.moves if move.group == group]
            on_host = PageState.PRIVATE if is_out else PageState.FREE
            self.ledger.host.pools[group].move_all([move.host_page for move in mine], on_host)
            pages = [move.device_page for move in mine if move.is_own]
            if self.is_open:
                pool.move_all(pages, PageState.FREE if is_out and left else PageState.PRIVATE)
            else:
                rest[group] = pages
        if self.is_open:
            self.swap_ticket = 0
            if is_out:
                self._is_out(ticket)
            else:
                self._is_in()
        return rest

    def _is_out(self, ticket: Ticket) -> None:
        self.swapped_out = True
        self.swapped = [(move.group, move.position, move.host_page) for move in ticket.moves]
        self.windows.leave(self.sealed, self.anchor)
        self._device.let_go()
        for group in range(len(self.tables)):
            if ticket.direction is Direction.STORE:
                self.own[group].clear()
            self.tables[group] = no_pages(self.blocks)

    def _is_in(self) -> None:
        """Back on the device, or never gone."""
        self.swapped_out = False
        self.swapped = []
        self._host.let_go()
        if self.anchor != NO_ROW:
            self.place.used[self.anchor] = 1

    # -- end ---------------------------------------------------------------------------------------------------

    def end(self, keep: Callable[[int, list[int]], None] | None = None) -> int:
        """Let go of everything; returns how many device pages came back.

        ``keep``: takes the own pages of a group that somebody may still write, instead of freeing them. Pages of a
        running swap are settled when it has ended.
        """
        self.is_open = False
        if self.room is not None:
            self.room.release()
        self._withdraw(max(self.sealed, self.hit_blocks), self.declared)
        self.let_go()
        freed = 0
        for group, own in enumerate(self.own):
            if not own:
                continue
            pool = self.place.pools[group]
            pages = [page for page in own if pool.states[page] == PageState.PRIVATE]
            if keep is None:
                pool.move_all(pages, PageState.FREE)
            else:
                keep(group, pages)
            freed += len(pages)
        if self.swapped and not self.swap_ticket:
            self._free_swapped()
        return freed

    def _free_swapped(self) -> None:
        host = self.ledger.host
        for group, pool in enumerate(host.pools):
            pool.move_all([page for g, _, page in self.swapped if g == group], PageState.FREE)
        self.swapped = []
