"""The copies that one place (the host, or one replica's devices) holds: a page and a state for each row and group.

All groups without a window move together, because a hit needs all of them; the first of them (``lead``) tells the
block's state here. Windowed groups come and go on their own.
"""

from __future__ import annotations

from array import array

from cachesvc.ledger.journal import NO_ROW, Cause, Journal, Kind, packed, with_cause
from cachesvc.ledger.leaves import LeafOrder
from cachesvc.ledger.pages import PagePool
from cachesvc.model.errors import IllegalMove
from cachesvc.model.histogram import AGE_SECONDS, Histogram
from cachesvc.model.layout import Layout
from cachesvc.model.words import ABSENT, DRAINING, FILLING, LEGAL_MOVES, NO_PAGE, READY, CopyState

HOST_NUMBER = 0
IS_WHOLE = int(READY)  # compared for every change: an enum takes thrice as long


class PlaceCounts:
    """What has happened on one place, in blocks, for what operators see.

    ``states``: blocks by state of their full groups. ``pinned``: blocks that pins protect, each counted once for each
    pin above which it lies. ``left``: blocks that were dropped, ``left_unused`` those of them that nobody had used
    since they came: no hit on a device, no load from the host. ``windows_left``: windowed copies dropped by themselves.
    """

    __slots__ = ("ages", "left", "left_unused", "pinned", "states", "windows_left")

    def __init__(self) -> None:
        self.states = [0] * len(CopyState)
        self.pinned = 0
        self.left = 0
        self.left_unused = 0
        self.windows_left = 0
        self.ages = Histogram(AGE_SECONDS)

    def leave(self, age_seconds: float, used: int) -> None:
        """A block is dropped ``age_seconds`` after its last access."""
        self.ages.observe(age_seconds)
        self.left += 1
        self.left_unused += not used


class Place:
    """Arrays by row. ``pins`` counts sequences whose deepest shared block here is that row.

    ``used[row]`` is 1 once the block was used since it came here: what the deepest block of a hit tells is passed to
    its parent when it goes, as its stamp is.

    ``number``: its position among ``places``, all of which it knows in order to say in ``journal`` whether a copy that
    comes is the first and one that goes is the last. ``pinned``: rows with ``pins``. ``leaves``: blocks that may go,
    and ``window_leaves[g]``: windowed copies that may go by themselves, in their order; ``BlockLedger`` puts them here.
    """

    leaves: LeafOrder
    window_leaves: dict[int, LeafOrder]

    def __init__(
        self,
        name: str,
        layout: Layout,
        pools: tuple[PagePool, ...],
        journal: Journal,
        places: list[Place],
    ) -> None:
        self.name = name
        self.number = len(places)
        self._journal = journal
        self._places = places
        self._told = _told(self.number)
        self.pools = pools
        self.full_groups = layout.full_groups
        self.window_groups = layout.window_groups
        self.lead = layout.full_groups[0]
        self.counts = PlaceCounts()
        self.pins = array("i")
        self.pinned: set[int] = set()
        self.used = bytearray()
        self.children = array("i")
        self.pages = [array("i") for _ in layout.groups]
        self.states = [bytearray() for _ in layout.groups]
        self.window_pins = {group: array("i") for group in layout.window_groups}

    def grow(self, rows: int) -> None:
        """Make room for ``rows`` rows."""
        more = rows - len(self.pins)
        if more <= 0:
            return
        zeros = bytes(4 * more)
        self.pins.frombytes(zeros)
        self.children.frombytes(zeros)
        for pages in self.pages:
            pages.frombytes(b"\xff" * (4 * more))
        self.used.extend(bytes(more))
        for states in self.states:
            states.extend(bytes(more))
        for pins in self.window_pins.values():
            pins.frombytes(zeros)

    def state(self, row: int) -> CopyState:
        """State of the block's full groups here."""
        return CopyState(self.states[self.lead][row])

    def is_present(self, row: int) -> bool:
        """True when any group of the block has a copy here, in whatever state."""
        return any(states[row] for states in self.states)

    def is_hittable(self, row: int) -> bool:
        """True when the bytes are here and whole: READY, or DRAINING (which a pin turns back)."""
        return self.states[self.lead][row] >= READY

    def is_filling(self, row: int) -> bool:
        """True while a transfer brings any group's copy of the block here."""
        return any(states[row] == FILLING for states in self.states)

    def move(self, group: int, row: int, target: CopyState, page: int = NO_PAGE, cause: Cause | None = None) -> None:
        """Move one copy along the table; the one place where copy states change. Raises IllegalMove.

        Leaving ABSENT takes ``page``; coming back to it forgets the page (which the caller frees). ``cause``: why,
        where the move does not say it.
        """
        states = self.states[group]
        source = states[row]
        move = (source, target)
        if move not in LEGAL_MOVES:
            raise IllegalMove(f"{self.name} group {group} row {row}", CopyState(source), target)
        states[row] = target
        if group == self.lead:
            self.counts.states[source] -= 1
            self.counts.states[target] += 1
        codes = self._told.get(move)
        if codes is not None:
            self._tell(codes, group, row, cause)
        if source == ABSENT:
            self.pages[group][row] = page
        elif target == ABSENT:
            self.pages[group][row] = NO_PAGE

    def _tell(self, codes: tuple[int, int], group: int, row: int, cause: Cause | None) -> None:
        """Write down that a copy came, went or failed to come."""
        code = codes[0]
        for other in self._places:
            if other is not self and other.states[group][row] >= IS_WHOLE:
                code = codes[1]
                break
        if cause is not None:
            code = with_cause(code, cause)
        self._journal.note(code | group << 9, row)

    def move_full(self, row: int, target: CopyState) -> None:
        """``move`` for all groups without a window; for moves that keep their pages."""
        for group in self.full_groups:
            self.move(group, row, target)


def _told(number: int) -> dict[tuple[int, int], tuple[int, int]]:
    """What the journal of a place is told of a move: where there is no other copy, and where there is one."""
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


__all__ = ["ABSENT", "DRAINING", "NO_ROW", "READY", "Place"]
