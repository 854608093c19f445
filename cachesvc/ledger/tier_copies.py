"""The copies that one place (the host, or one replica's devices) holds: a page and a state for each row and group.

All groups without a window move together, because a hit needs all of them; the first of them (``lead``) tells the
block's state here. Windowed groups come and go on their own.

A copy and its page move in one call, by one table, so that neither can be forgotten:

    call      copy                  page                    when
    seal      ABSENT -> READY       PRIVATE -> SEALED       a private page was published
    fill      ABSENT -> FILLING     FREE -> IN_FLIGHT       a load or a write-back towards this copy begins
    arrive    FILLING -> READY      IN_FLIGHT -> SEALED     its bytes are here
    fail      FILLING -> ABSENT     IN_FLIGHT -> FREE       they never came
    drain     READY -> DRAINING     SEALED -> IN_FLIGHT     its bytes are being written back before it goes
    keep      DRAINING -> READY     IN_FLIGHT -> SEALED     it was needed again, or the write-back failed
    drop      READY -> ABSENT       SEALED -> FREE          evicted with nothing to save
              DRAINING -> ABSENT    IN_FLIGHT -> FREE       evicted, and saved
    lose      READY -> ABSENT       gone with its pool      the memory of the place is gone
    admit     ABSENT -> READY       IN_FLIGHT -> SEALED     its bytes came from storage, and were verified
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cachesvc.ledger.candidates import LeafOrder
from cachesvc.ledger.change_log import HOST_NUMBER, NO_ROW, Cause, Journal, Kind, packed, with_cause
from cachesvc.ledger.counted_tables import Protected, TablePieces
from cachesvc.ledger.page_pool import AT_ONCE, PagePool, PlaceCounts, Reservation
from cachesvc.ledger.shared_pool import Kin
from cachesvc.model.errors import IllegalMove
from cachesvc.model.layout import Layout
from cachesvc.model.numbers import Column, array_of, column, distinct
from cachesvc.model.words import ABSENT, DRAINING, FILLING, NO_PAGE, READY, CopyState, PageState

FREE, PRIVATE, SEALED, IN_FLIGHT, QUARANTINED = PageState
MOVES: dict[tuple[int, int], tuple[PageState, PageState]] = {
    (ABSENT, READY): (PRIVATE, SEALED),
    (ABSENT, FILLING): (FREE, IN_FLIGHT),
    (FILLING, READY): (IN_FLIGHT, SEALED),
    (FILLING, ABSENT): (IN_FLIGHT, FREE),
    (READY, DRAINING): (SEALED, IN_FLIGHT),
    (DRAINING, READY): (IN_FLIGHT, SEALED),
    (READY, ABSENT): (SEALED, FREE),
    (DRAINING, ABSENT): (IN_FLIGHT, FREE),
}
"""Each move of a copy with that of its page; there are no others."""


class Place:
    """``pools[g]``: of each group. ``shares``: the groups by pool, ``full_in`` how many of these have no window.

    ``states[g]``: the state of each row's copy in a group. ``unsealed_groups``: those whose pages stay their sequence's
    own when its blocks are sealed. ``kin``: the windowed groups whose copies a policy values.
    ``spent_by``: those without whose copy a block is of no use. None on the host: what it has comes there by parts, and
    a block whose state is on a device still, or on its way, is no worse than others.

    Arrays by row. ``pins`` counts sequences whose deepest shared block here is that row.

    ``used[row]`` is 1 once the block was used since it came here: what the deepest block of a hit tells is passed to
    its parent when it goes, as its stamp is.

    ``filling[row]`` and ``draining``: the ticket that brings a row's copies here (0: none), and the one that writes
    them back before they go; each row has one at most. ``reservations``: calls that wait for pages here.

    ``number``: 0 of the host, n + 1 of replica n; it is never used again. ``is_lost``: its memory is gone. Of ``told``,
    the places that ``journal`` knows of, it asks whether a copy that comes is the first and one that goes is the last.
    ``protected``: how many blocks are kept by ``pins``. ``leaves``: blocks that may go, and ``window_leaves[g]``:
    windowed copies that may go by themselves, in their order; ``BlockLedger`` puts them here, and ``pieces`` too: what
    is kept of block tables. ``recent_load``: pages that a load here takes, as the last ones did.
    """

    leaves: LeafOrder
    window_leaves: dict[int, LeafOrder]
    pieces: TablePieces
    protected: Protected

    def __init__(
        self,
        name: str,
        layout: Layout,
        pools: tuple[PagePool, ...],
        journal: Journal,
        number: int,
        places: list[Place],
        told: list[Place],
    ) -> None:
        self.name = name
        self.number = number
        self.is_lost = False
        self.recent_load = 0
        self._journal = journal
        self._places = places
        self._known = told
        self._told = _told(self.number)
        self.pools = pools
        self.shares = shares = layout.host_pools if number == HOST_NUMBER else layout.pools
        self.full_in = tuple(sum(layout.groups[group].is_full for group in groups) for groups in shares)
        self.has_shared_pools = len(shares) < len(pools)
        self.full_groups = layout.full_groups
        self.state_groups = layout.state_groups
        self.unsealed_groups = layout.state_groups + layout.scratch_groups
        self.states = [bytearray() for _ in layout.groups]
        self.kin: tuple[Kin, ...] = ()
        self.spent_by: tuple[Kin, ...] = ()
        self.window_groups = layout.window_groups
        self.lead = layout.full_groups[0]
        self.counts = PlaceCounts()
        self.pins = array("I")
        self.used = bytearray()
        self.children = array("I")
        self.pages = [array("i") for _ in layout.groups]
        self.window_pins = {group: array("I") for group in layout.window_groups}
        self.filling = array("q")
        self.draining: dict[int, int] = {}
        self.reservations: dict[Reservation, None] = {}

    def is_spent(self, row: int) -> bool:
        """True where a leaf goes before all others, because no prompt can go on behind it."""
        return any(self.states[kin.lead][row] == ABSENT for kin in self.spent_by)

    def share_names(self, layout: Layout) -> list[str]:
        """The name of each group's pool where it shares that with other groups, else an empty one."""
        names = [""] * len(self.pools)
        for groups in self.shares:
            name = layout.groups[groups[0]].pool
            is_split = sum(layout.groups[each[0]].pool == name for each in self.shares) > 1
            for group in groups if len(groups) > 1 else ():
                names[group] = f"{name}-replicated" if is_split and layout.groups[group].replicated else name
        return names

    def short_of(self, wanted: Sequence[int]) -> list[int]:
        """Pages that each of ``shares`` lacks for ``wanted[g]`` pages of group g; below 0 where it has more."""
        pools = self.pools
        return [sum([wanted[group] for group in groups]) - pools[groups[0]].unreserved for groups in self.shares]

    def lacks(self, wanted: Sequence[int]) -> bool:
        """True where ``wanted[g]`` pages of each group g cannot be taken now."""
        if self.has_shared_pools:
            return max(self.short_of(wanted)) > 0
        return any(count > pool.unreserved for count, pool in zip(wanted, self.pools, strict=True))

    @property
    def free_blocks(self) -> int:
        """Number of blocks of which the full groups' pages can be taken now."""
        pools = self.pools
        if self.has_shared_pools:
            pairs = zip(self.shares, self.full_in, strict=True)
            return min(pools[groups[0]].unreserved // full for groups, full in pairs if full)
        return min(pools[group].unreserved for group in self.full_groups)

    @property
    def usable_blocks(self) -> int:
        """Number of blocks of which the full groups' pages have arrived."""
        pairs = zip(self.shares, self.full_in, strict=True)
        return min(self.pools[groups[0]].usable // full for groups, full in pairs if full)

    def pages_in(self, groups: Sequence[int], rows: Sequence[int]) -> int:
        """Pages of some groups that copies of ``rows`` have here."""
        if len(rows) < AT_ONCE:
            return sum(self.states[group][row] != ABSENT for group in groups for row in rows)
        some = np.asarray(rows)
        return sum(int((np.frombuffer(self.states[group], np.uint8)[some] != ABSENT).sum()) for group in groups)

    def grow(self, rows: int) -> None:
        more = rows - len(self.pins)
        if more <= 0:
            return
        zeros = bytes(4 * more)
        self.pins.frombytes(zeros)
        self.children.frombytes(zeros)
        self.filling.frombytes(zeros + zeros)
        for pages in self.pages:
            pages.frombytes(b"\xff" * (4 * more))
        self.used.extend(bytes(more))
        for states in self.states:
            states.extend(bytes(more))
        for pins in self.window_pins.values():
            pins.frombytes(zeros)

    def state(self, row: int) -> CopyState:
        """State here of the block's full groups."""
        return CopyState(self.states[self.lead][row])

    @property
    def unprotected(self) -> int:
        """Blocks that are here, in whatever state, and that no pin protects."""
        return sum(self.counts.states[FILLING:]) - self.protected.blocks

    @property
    def residents(self) -> int:
        """Blocks that have a copy of their full groups here, in whatever state."""
        return sum(self.counts.states[FILLING:])

    def is_present(self, row: int) -> bool:
        """True when any group of the block has a copy here, in whatever state."""
        return any(states[row] for states in self.states)

    def is_hittable(self, row: int) -> bool:
        """True when the bytes are here and whole: READY, or DRAINING (which a pin turns back)."""
        return self.states[self.lead][row] >= READY

    def is_filling(self, row: int) -> bool:
        """True while a transfer brings any group's copy of the block here."""
        return any(states[row] == FILLING for states in self.states)

    def pages_of(self, group: int, rows: array[int]) -> array[int]:
        return array_of(column(self.pages[group])[column(rows)])

    def fillers(self, rows: array[int]) -> list[int]:
        """The tickets that bring copies of any of ``rows`` here, in their order."""
        filling = np.frombuffer(self.filling, np.int64)[column(rows)]
        found: list[int] = distinct(filling[filling != 0]).tolist()
        return found

    def states_of(self, group: int, rows: array[int]) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self.states[group], np.uint8)[column(rows)]

    def are_ready(self, rows: Column) -> npt.NDArray[np.bool_]:
        """Mask of the READY rows among some."""
        ready: npt.NDArray[np.bool_] = np.frombuffer(self.states[self.lead], np.uint8)[rows] == READY
        return ready

    def are_elsewhere(self, rows: Column) -> npt.NDArray[np.bool_]:
        """Mask of the rows that are READY on another place, whose memory exists."""
        found: npt.NDArray[np.bool_] = np.zeros(len(rows), np.bool_)
        for each in self._places:
            if each is not self and each.pools[each.lead].capacity:
                found |= each.are_ready(rows)
        return found

    # -- moves of a copy and its page ----------------------------------------------------------------------------

    def seal(self, group: int, row: int, page: int) -> None:
        """A private page is the copy from now on. Raises IllegalMove."""
        self._move(group, row, ABSENT, READY, page)

    def seal_new(self, group: int, rows: Sequence[int], pages: Sequence[int]) -> None:
        """``seal`` for each of ``rows``, which no place has yet; NO_PAGE for those that have none in this group. Raises
        IllegalMove before anything has moved."""
        states, held = self.states[group], self.pages[group]
        if group in self.window_pins:
            rows = [row for row, page in zip(rows, pages, strict=True) if page != NO_PAGE]
            pages = [page for page in pages if page != NO_PAGE]
        self.pools[group].shift_all(pages, PRIVATE, SEALED)
        for row, page in zip(rows, pages, strict=True):
            states[row] = READY
            held[row] = page
        self._journal.note_all(self._told[ABSENT, READY][0] | group << 9, rows)
        if group == self.lead:
            self.counts.states[ABSENT] -= len(rows)
            self.counts.states[READY] += len(rows)

    def admit(self, group: int, row: int, page: int) -> None:
        """A page in flight, whose bytes came from storage and were verified, is the copy from now on. Raises
        IllegalMove."""
        states = self.states[group]
        if states[row] != ABSENT:
            raise IllegalMove(f"{self.name} group {group} row {row}", CopyState(states[row]), CopyState(READY))
        self.pools[group].shift(page, IN_FLIGHT, SEALED)
        self.pages[group][row] = page
        states[row] = READY
        if group == self.lead:
            self.counts.states[ABSENT] -= 1
            self.counts.states[READY] += 1
        self._tell(self._told[ABSENT, READY], group, row, Cause.FETCHED)

    def come(self, rows: Sequence[int], parents: Sequence[int]) -> None:
        """``rows``, none of whose parents is a candidate, have their first copies here. ``parents``: by row."""
        used, children = self.used, self.children
        for row in rows:
            used[row] = 0
            parent = parents[row]
            if parent != NO_ROW:
                children[parent] += 1

    def fill(self, group: int, rows: array[int]) -> array[int]:
        """Copies begin to come: one page for each of ``rows``, in as few runs as can be had. There is room.

        Raises IllegalMove before anything has moved.
        """
        states, held = self.states[group], self.pages[group]
        if len(rows) < AT_ONCE or self.states_of(group, rows).any():
            for row in rows:
                if states[row] != ABSENT:
                    raise IllegalMove(
                        f"{self.name} group {group} row {row}", CopyState(states[row]), CopyState(FILLING)
                    )
        pages = self.pools[group].take(len(rows), IN_FLIGHT)
        if len(rows) < AT_ONCE:
            for row, page in zip(rows, pages, strict=True):
                states[row] = FILLING
                held[row] = page
        else:
            np.frombuffer(states, np.uint8)[column(rows)] = FILLING
            column(held)[column(rows)] = column(pages)
        if group == self.lead:
            self.counts.states[ABSENT] -= len(rows)
            self.counts.states[FILLING] += len(rows)
        return pages

    def arrive(self, group: int, row: int) -> None:
        """Note that a copy's bytes have arrived. Raises IllegalMove."""
        self._move(group, row, FILLING, READY)

    def arrive_all(self, group: int, rows: Column) -> None:
        """``arrive`` for each of ``rows``. Raises IllegalMove before anything has moved."""
        states = np.frombuffer(self.states[group], np.uint8)
        if len(wrong := rows[states[rows] != FILLING]):
            row = int(wrong[0])
            raise IllegalMove(f"{self.name} group {group} row {row}", CopyState(states[row]), CopyState(READY))
        self.pools[group].shift_all(column(self.pages[group])[rows].tolist(), IN_FLIGHT, SEALED)
        states[rows] = READY
        if group == self.lead:
            self.counts.states[FILLING] -= len(rows)
            self.counts.states[READY] += len(rows)
        among = self._are_elsewhere_too(group, rows)
        bounds = [0, *(np.flatnonzero(np.diff(among)) + 1).tolist(), len(rows)]
        for first, end in pairwise(bounds):  # in their order: a follower must see a parent before its child
            if first < end:
                code = self._told[FILLING, READY][int(among[first])]
                self._journal.note_all(code | group << 9, rows[first:end].tolist())

    def _are_elsewhere_too(self, group: int, rows: Column) -> npt.NDArray[np.bool_]:
        """Mask of the rows whose copies another place has too, of those that the journal knows of."""
        among: npt.NDArray[np.bool_] = np.zeros(len(rows), np.bool_)
        for each in self._known:
            if each is not self:
                among |= np.frombuffer(each.states[group], np.uint8)[rows] >= READY
        return among

    def fail(self, group: int, row: int, *, may_write: bool = False) -> None:
        """A copy's bytes have not come; its page is free, unless they may still. Raises IllegalMove."""
        if may_write:
            page = self.pages[group][row]
            self._move(group, row, FILLING, ABSENT, into=QUARANTINED)
            self.pools[group].stuck.append(page)
        else:
            self._move(group, row, FILLING, ABSENT)

    def drain(self, group: int, row: int) -> None:
        """A copy's bytes are being written back before it goes. Raises IllegalMove."""
        self._move(group, row, READY, DRAINING)

    def keep(self, group: int, row: int) -> None:
        """A draining copy stays after all. Raises IllegalMove."""
        self._move(group, row, DRAINING, READY)

    def drop(self, group: int, row: int, cause: Cause | None = None) -> None:
        """A whole copy goes; its page is free. ``cause``: why, where the move does not say it. Raises IllegalMove."""
        draining = self.states[group][row] == DRAINING
        self._move(group, row, DRAINING if draining else READY, ABSENT, cause=cause)

    def drop_last(self, rows: Sequence[int], cause: Cause) -> None:
        """``drop`` of all groups for each of ``rows``, whole here and nowhere else; no group has a window. Raises
        IllegalMove before anything has moved."""
        self._drop_all(rows, with_cause(self._told[READY, ABSENT][0], cause))

    def drop_backed(self, rows: Sequence[int], cause: Cause) -> None:
        """``drop_last`` for ``rows`` that are whole elsewhere too."""
        self._drop_all(rows, with_cause(self._told[READY, ABSENT][1], cause))

    def _drop_all(self, rows: Sequence[int], code: int) -> None:
        going = np.array(rows, np.int32)
        for group, pool in enumerate(self.pools):
            held = column(self.pages[group])
            pool.move_all(array_of(held[going]), FREE)
            held[going] = NO_PAGE
            np.frombuffer(self.states[group], np.uint8)[going] = ABSENT
            self._journal.note_all(code | group << 9, rows)
        self.counts.states[READY] -= len(rows)
        self.counts.states[ABSENT] += len(rows)
        self.pieces.forget_all(rows)

    def lose(self, group: int, rows: Column) -> None:
        """Whole copies of ``rows`` are gone with the memory that they lay in: their pages do not come back."""
        states = np.frombuffer(self.states[group], np.uint8)
        rows = rows[states[rows] != ABSENT]
        among = self._are_elsewhere_too(group, rows)
        for code, gone in zip(self._told[READY, ABSENT], (rows[~among], rows[among]), strict=True):
            self._journal.note_all(with_cause(code, Cause.LOST) | group << 9, gone.tolist())
        states[rows] = ABSENT
        column(self.pages[group])[rows] = NO_PAGE
        if group == self.lead:
            self.counts.states[READY] -= len(rows)
            self.counts.states[ABSENT] += len(rows)

    def _move(
        self,
        group: int,
        row: int,
        source: int,
        target: int,
        page: int = NO_PAGE,
        cause: Cause | None = None,
        into: PageState | None = None,
    ) -> None:
        states, pages = self.states[group], self.pages[group]
        if states[row] != source:
            raise IllegalMove(f"{self.name} group {group} row {row}", CopyState(states[row]), CopyState(target))
        move = (source, target)
        page_source, page_target = MOVES[move]
        if source == ABSENT:
            self.pools[group].shift(page, page_source, page_target)
            pages[row] = page
        else:
            self.pools[group].shift(pages[row], page_source, page_target if into is None else into)
            if target == ABSENT:
                pages[row] = NO_PAGE
        states[row] = target
        if group == self.lead:
            self.counts.states[source] -= 1
            self.counts.states[target] += 1
            if target == ABSENT:
                self.pieces.forget(row)
        codes = self._told.get(move)
        if codes is not None:
            self._tell(codes, group, row, cause)

    def _tell(self, codes: tuple[int, int], group: int, row: int, cause: Cause | None) -> None:
        """Write down that a copy came, went or failed to come."""
        code = codes[0]
        for other in self._known:
            if other is not self and other.states[group][row] >= READY:
                code = codes[1]
                break
        if cause is not None:
            code = with_cause(code, cause)
        self._journal.note(code | group << 9, row)


def _told(number: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Journal entries of a move on a place: where there is no other copy, and where there is one."""
    came = Cause.BACKED_UP if number == HOST_NUMBER else Cause.LOADED
    rows = (
        ((ABSENT, READY), Kind.STORED, Cause.PUBLISHED),
        ((FILLING, READY), Kind.STORED, came),
        ((READY, ABSENT), Kind.REMOVED, Cause.EVICTED),
        ((DRAINING, ABSENT), Kind.REMOVED, Cause.DRAINED),
        ((FILLING, ABSENT), Kind.COPY_FAILED, Cause.COPY_FAILED),
    )
    out: dict[tuple[int, int], tuple[int, int]] = {}
    for move, kind, cause in rows:
        among = Kind.COPY_FAILED if kind is Kind.COPY_FAILED else Kind.TIER_CHANGED
        present = kind is Kind.STORED
        first, second = (packed(each, cause, present=present, place=number) for each in (kind, among))
        out[move] = (first, second)
    return out


__all__ = ["MOVES", "NO_ROW", "Place"]
