"""The blocks of one model: match, pin, seal, fill, drain and drop, on top of the index and its places.

Invariants, held between any two calls (``conservation.py`` checks them):
what a replica has on its device is prefix-closed; so is the union of all places; nothing pinned, in flight, or with a
child on the same place leaves that place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from cachesvc.ledger.ages import Ages
from cachesvc.ledger.index import BlockIndex
from cachesvc.ledger.journal import KEEP_EVENTS, Cause, Journal, Moment
from cachesvc.ledger.leaves import Rank, RankNow
from cachesvc.ledger.pages import PagePool
from cachesvc.ledger.place import NO_ROW, Place
from cachesvc.model.errors import LedgerBroken
from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.layout import Layout
from cachesvc.model.words import ABSENT, FILLING, NO_PAGE, READY, CopyState, PageState, Tier

HOST_PLACE = 0
RankRule = Callable[[int, int, int], Rank]
"""``(stamp, hits, depth) -> rank``: the eviction policy; the lowest rank goes first."""


class Hit(NamedTuple):
    """Longest prefix found: ``device_blocks`` in place, ``blocks`` in all; rows are NO_ROW where the count is 0."""

    device_blocks: int
    device_row: int
    blocks: int
    row: int


class Dropped(NamedTuple):
    """A block that has left the index: for remembered counts and for events. ``tier``: where its last copy was."""

    key: bytes
    reuses: int
    tier: str


class BlockLedger:
    """One model's index and places. ``places[0]`` is the host; ``add_replica`` adds a device place."""

    def __init__(
        self,
        layout: Layout,
        host_pools: tuple[PagePool, ...],
        rank: RankRule,
        ages: Ages | None = None,
        moment: Moment | None = None,
        keep_events: int = KEEP_EVENTS,
    ) -> None:
        self.layout = layout
        self.ages = ages or Ages()
        self.index = BlockIndex()
        self.journal = Journal(self.index.keys, self.index.parent, moment or Moment(), keep_events)
        self.rank = rank
        self.dropped: list[Dropped] = []
        self.evicted_blocks = 0
        self.host = Place("host", layout, host_pools, self.journal, self.index.places)
        self.index.add_place(self.host)

    def add_replica(self, name: str, pools: tuple[PagePool, ...]) -> Place:
        """A further device place with one pool for each group."""
        place = Place(name, self.layout, pools, self.journal, self.index.places)
        self.index.add_place(place)
        return place

    # -- match -------------------------------------------------------------------------------------------------

    def find(self, keys: bytes, place: Place, limit: int = 0) -> Hit:
        """Longest hit of packed ``keys`` for ``place``, by bisection; at most ``limit`` blocks unless 0."""
        total = len(keys) // KEY_BYTES
        if limit:
            total = min(total, limit)
        device_blocks, device_row = self._bisect(keys, 0, total, NO_ROW, place)
        blocks, row = self._bisect(keys, device_blocks, total, device_row, None)
        if blocks > device_blocks:
            blocks, row = self._host_reach(device_blocks, device_row, row)
        if place.window_groups:
            return self._with_windows(Hit(device_blocks, device_row, blocks, row), place)
        return Hit(device_blocks, device_row, blocks, row)

    def find_in_place(self, keys: bytes, place: Place) -> tuple[int, int]:
        """Longest prefix of packed ``keys`` that ``place`` holds by itself, windows too: its blocks, its last row."""
        blocks, row = self._bisect(keys, 0, len(keys) // KEY_BYTES, NO_ROW, place)
        if place.window_groups:
            path = self.index.path(row)
            blocks = self._covered(path, len(path), len(path), place)
            row = path[blocks - 1] if blocks else NO_ROW
        return blocks, row

    def _bisect(self, keys: bytes, low: int, high: int, low_row: int, place: Place | None) -> tuple[int, int]:
        get = self.index.rows.get
        states = place.states[place.lead] if place is not None else None
        while low < high:
            middle = (low + high + 1) >> 1
            row = get(keys[(middle - 1) * KEY_BYTES : middle * KEY_BYTES], NO_ROW)
            if row >= 0 and (states is None or states[row] >= READY):
                low, low_row = middle, row
            else:
                high = middle - 1
        return low, low_row

    def _host_reach(self, device_blocks: int, device_row: int, row: int) -> tuple[int, int]:
        """Cut a union hit back to what this replica can really load: a block may lie on another replica alone."""
        reach, reach_row = device_blocks, device_row
        for step, candidate in enumerate(self.index.path(row, device_row), start=1):
            if self.host.state(candidate) != READY:
                break
            reach, reach_row = device_blocks + step, candidate
        return reach, reach_row

    def _with_windows(self, hit: Hit, place: Place) -> Hit:
        """Shorten a hit until every windowed group has the blocks that cover its window and its sinks.

        Windowed copies come from the device, or from the host where all blocks from there on can be loaded: those
        blocks then count as to be loaded, though only the windowed copies of some of them may have to be.
        """
        path = self.index.path(hit.row)
        loadable = len(path)
        while loadable and self.host.state(path[loadable - 1]) == READY:
            loadable -= 1
        blocks = self._covered(path, loadable, hit.device_blocks, place)
        device = min(blocks, hit.device_blocks)
        for group in place.window_groups:
            states = place.states[group]
            needed = window_positions(self.layout, group, blocks)
            device = min([device, *(position for position in needed if states[path[position]] != READY)])
        row = path[blocks - 1] if blocks else NO_ROW
        return Hit(device, path[device - 1] if device else NO_ROW, blocks, row)

    def _covered(self, path: list[int], loadable: int, device_blocks: int, place: Place) -> int:
        """Longest n <= len(path) such that each windowed group holds what a sequence of n blocks needs."""
        needs = [(group, hit_window_blocks(self.layout, group)) for group in place.window_groups]
        runs = dict.fromkeys(place.window_groups, 0)
        sinks_whole = dict.fromkeys(place.window_groups, True)
        best = 0
        for position, row in enumerate(path):
            whole = True
            for group, window in needs:
                there = position < device_blocks and place.states[group][row] == READY
                there = there or (position >= loadable and self.host.states[group][row] == READY)
                runs[group] = runs[group] + 1 if there else 0
                if position < self.layout.sink_blocks(group) and not there:
                    sinks_whole[group] = False
                whole = whole and sinks_whole[group] and runs[group] >= min(position + 1, window)
            if whole:
                best = position + 1
        return best

    # -- pins --------------------------------------------------------------------------------------------------

    def pin(self, place: Place, row: int) -> None:
        """Protect ``row`` and, because of the closure, all its ancestors on ``place``."""
        place.pins[row] += 1
        place.counts.pinned += self.index.depth[row] + 1

    def unpin(self, place: Place, row: int) -> None:
        """Take one pin back. Raises LedgerBroken where there is none."""
        if place.pins[row] <= 0:
            raise LedgerBroken(f"row {row} is not pinned on {place.name}")
        place.pins[row] -= 1
        place.counts.pinned -= self.index.depth[row] + 1
        self.offer(place, row)

    def pin_window(self, place: Place, group: int, row: int) -> None:
        """Keep one windowed copy; its block is protected by a pin of its own."""
        place.window_pins[group][row] += 1

    def use_window(self, row: int, tip: int) -> None:
        """A hit of everything down to ``tip`` looks back to the windowed copies of ``row``."""
        self.index.reached[row] = max(self.index.reached[row], self.index.stamp[tip])

    def unpin_window(self, place: Place, group: int, row: int) -> None:
        """Take one window pin back. Raises LedgerBroken where there is none."""
        pins = place.window_pins[group]
        if pins[row] <= 0:
            raise LedgerBroken(f"row {row} has no window pin in group {group} of {place.name}")
        pins[row] -= 1
        self._offer_window(place, group, row)

    def is_evictable(self, place: Place, row: int) -> bool:
        """True for a leaf of ``place`` that nobody uses and nothing moves."""
        return (
            place.states[place.lead][row] == READY
            and place.pins[row] == 0
            and place.children[row] == 0
            and self.index.flights[row] == 0
        )

    def rank_of(self, row: int) -> Rank:
        """The row's rank under the eviction policy."""
        index = self.index
        return self.rank(index.stamp[row], index.hits[row], index.depth[row])

    def rank_now(self, place: Place) -> RankNow:
        """Ranks of the rows that may leave ``place`` now."""
        return lambda row: self.rank_of(row) if self.is_evictable(place, row) else None

    def window_rank_now(self, place: Place, group: int) -> RankNow:
        """Ranks of the windowed copies that may go by themselves.

        First those that no hit has looked back to and no sequence has ended on, then by when that was; of equal rank
        oldest first and a prompt's front before its end, but its sinks last: without them no window is worth anything.
        """
        index, states, pins = self.index, place.states[group], place.window_pins[group]
        sinks = self.layout.sink_blocks(group)

        def rank(row: int) -> Rank | None:
            idle = states[row] == READY and pins[row] == 0 and index.flights[row] == 0
            depth = index.depth[row]
            return (index.reached[row], depth < sinks, index.stamp[row], depth) if idle else None

        return rank

    def offer(self, place: Place, row: int) -> None:
        """Make a row a candidate for eviction if it is one now, and its windowed copies too."""
        if self.is_evictable(place, row):
            place.leaves.push(self.rank_of(row), row, self.rank_now(place))
        for group in place.window_groups:
            self._offer_window(place, group, row)

    def _offer_window(self, place: Place, group: int, row: int) -> None:
        if place is self.host:
            return  # the host's windowed copies go with their blocks
        rank_now = self.window_rank_now(place, group)
        rank = rank_now(row)
        if rank is not None:
            place.window_leaves[group].push(rank, row, rank_now)

    # -- copies ------------------------------------------------------------------------------------------------

    def add_copy(self, place: Place, row: int, pages: Iterable[int], state: CopyState) -> None:
        """Give ``row`` a copy on ``place``; ``pages[g]`` is NO_PAGE for groups that have none."""
        for group, page in enumerate(pages):
            if page != NO_PAGE:
                place.move(group, row, state, page)
        place.used[row] = 0
        parent = self.index.parent[row]
        if parent != NO_ROW:
            place.children[parent] += 1

    def drop_copy(self, place: Place, row: int, cause: Cause | None = None) -> None:
        """Take a row's copies on ``place`` away and free their pages; forget the row when it was the last place.

        The parent inherits the stamp, so that leaf-first order stays the order of last access.
        """
        place.counts.leave(self.ages.age(self.index.stamp[row]), place.used[row])
        for group in range(len(place.pools)):
            if place.states[group][row] != ABSENT:
                page = place.pages[group][row]
                place.move(group, row, ABSENT, cause=cause)
                place.pools[group].move(page, PageState.FREE)
        self._after_leaving(place, row)

    def drop_window(self, place: Place, group: int, row: int) -> None:
        """Take one windowed copy away by itself and free its page."""
        page = place.pages[group][row]
        place.move(group, row, ABSENT, cause=Cause.WINDOW_EVICTED)
        place.pools[group].move(page, PageState.FREE)
        place.counts.windows_left += 1

    def _after_leaving(self, place: Place, row: int) -> None:
        index = self.index
        parent = index.parent[row]
        if parent != NO_ROW:
            place.children[parent] -= 1
            index.stamp[parent] = max(index.stamp[parent], index.stamp[row])
            if place is not self.host:  # a hit used all blocks above it, but loads bring each block by itself
                place.used[parent] |= place.used[row]
        if not index.has_copy(row):
            key = index.keys[row]
            assert key is not None
            self.dropped.append(
                Dropped(key, index.reuses[row], (Tier.HOST if place is self.host else Tier.DEVICE).value)
            )
            index.remove(row)
        if parent != NO_ROW:
            for each in index.places:
                self.offer(each, parent)

    def begin_flight(self, row: int) -> None:
        """A transfer reads or writes this row's copies."""
        self.index.flights[row] += 1

    def end_flight(self, row: int) -> None:
        """The transfer is over; the row may be a candidate again."""
        self.index.flights[row] -= 1
        for place in self.index.places:
            self.offer(place, row)

    def start_fill(self, place: Place, row: int, pages: Iterable[int]) -> None:
        """A transfer towards ``place`` begins: the copies are FILLING and the row is in flight.

        Where the block is there already, ``pages`` holds only windowed copies that are not.
        """
        if place.states[place.lead][row] == ABSENT:
            self.add_copy(place, row, pages, FILLING)
        else:
            for group, page in enumerate(pages):
                if page != NO_PAGE:
                    place.move(group, row, FILLING, page)
        self.begin_flight(row)

    def finish_fill(self, place: Place, row: int, *, arrived: bool) -> None:
        """The transfer has ended: FILLING copies become READY and their pages sealed, or go with their pages freed.

        One transfer at a time fills copies of a row on one place.
        """
        for group, states in enumerate(place.states):
            if states[row] != FILLING:
                continue
            page = place.pages[group][row]
            place.move(group, row, READY if arrived else ABSENT)
            place.pools[group].move(page, PageState.SEALED if arrived else PageState.FREE)
        self.index.flights[row] -= 1
        if place.states[place.lead][row] == ABSENT:
            self._after_leaving(place, row)
        if self.index.keys[row] is not None:
            for each in self.index.places:
                self.offer(each, row)


def hit_window_blocks(layout: Layout, group: int) -> int:
    """Blocks before a hit's end that a windowed group must have: enough to compute the hit's last token again."""
    window = layout.groups[group].window_tokens
    assert window is not None, f"group {group} has no window"
    return -(-window // layout.block_tokens)


def window_positions(layout: Layout, group: int, blocks: int) -> list[int]:
    """Positions of a table of ``blocks`` cells that a windowed group needs: the sinks and the last window."""
    sinks = min(layout.sink_blocks(group), blocks)
    first = max(sinks, blocks - hit_window_blocks(layout, group))
    return [*range(sinks), *range(first, blocks)]
