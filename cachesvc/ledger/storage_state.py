"""State of storage transfers in the ledger: pages of fetches, before they are blocks, and host blocks being written.

    a fetch's page     IN_FLIGHT   its bytes are on their way
                       SEALED      all of its block has verified: it is a copy like any other, and the fetch's no more
                       FREE        its block does not come
                       QUARANTINED its block does not come, but bytes may still land in it

Blocks of a fetch enter the index in order of depth, each under the one before, which is pinned until then. The places
of objects are not here: the engine knows them, as hints.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cachesvc.ledger.block_ledger import BlockLedger
from cachesvc.ledger.counted_tables import KeyQueue
from cachesvc.ledger.pins import Pin, WindowPins, held_by
from cachesvc.ledger.retention import window_positions
from cachesvc.ledger.tier_copies import NO_ROW, Place
from cachesvc.model.errors import LedgerBroken
from cachesvc.model.numbers import Party, column
from cachesvc.model.words import ABSENT, KEY_BYTES, NO_PAGE, READY, PageState

MOST_WRITTEN = 1 << 18
"""Keys that are remembered as written: some 120 bytes each. One that was forgotten is written once more."""
MOST_LANDED = 4096


def key_at(keys: bytes, position: int) -> bytes:
    return keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]


STATE_POSITIONS = 64
"""Last positions of a fetch at which a state is asked for: most have none, and storage does not say which."""


def fetched_pages(blocks: BlockLedger, first: int, count: int) -> list[int]:
    """Host pages of each group that a fetch of ``count`` blocks behind ``first`` others takes: all that a hit needs to
    end at the last of them."""
    groups = range(len(blocks.host.pools))
    full = blocks.host.full_groups
    return [count if group in full else len(_positions(blocks, group, first, first + count)) for group in groups]


def _positions(blocks: BlockLedger, group: int, first: int, last: int) -> Sequence[int]:
    """Positions of ``[first, last)`` at which a windowed group's copies are fetched, rising."""
    if group in blocks.host.state_groups:
        return range(max(first, last - STATE_POSITIONS), last)
    return [at for at in window_positions(blocks.layout, group, last) if at >= first]


class HeldPages(NamedTuple):
    """Pages of one group that no block has. For audits."""

    group: int
    state: PageState
    pages: list[int]


class Fetch:
    """Blocks on their way from storage to the host, root first. ``ticket``: of its waiters.

    ``keys``: theirs; the first comes under ``pin``'s row, whose key is ``parent``. ``out``: of each block, how many of
    its objects may still write; ``first``: its depth. ``end``: blocks from there on do not come. ``lost``: windowed
    groups that do not come with a block, as (block, group). ``lent``: blocks of which another node lent some.
    ``is_piece``: its blocks leave the host once a device has them. ``came_at``: when its last block was admitted; 0
    before one was. ``then``: called once it has ended.
    """

    def __init__(
        self,
        blocks: BlockLedger,
        ticket: int,
        first: int,
        keys: tuple[bytes, ...],
        pin: Pin,
        above: Fetch | None = None,
    ) -> None:
        """Takes pages of the host, for which there is room: ``fetched_pages``. ``above``: a fetch under way whose
        last block the first comes under, once it is there; ``pin`` holds nothing until then."""
        self.ticket = ticket
        self.first = first
        self.keys = keys
        self.parent = blocks.index.key_of(pin.row) if above is None else above.keys[-1]
        self.waits = above is not None
        self.below: list[Fetch] = []
        if above is not None:
            above.below.append(self)
        self.out = [0] * len(keys)
        self.end = len(keys)
        self.admitted = 0
        self.lent: set[int] = set()
        self.then: list[Callable[[], None]] = []
        self.is_piece = False
        self.came_at = 0.0
        self.has_begun = False
        self.is_over = False
        self._blocks = blocks
        host = blocks.host
        taken = {group: self._take(group) for group in (*host.full_groups, *host.window_groups)}
        self._pages = [taken[group] for group in range(len(host.pools))]
        self._pin = pin
        self._lost: set[tuple[int, int]] = set()

    def brings(self, keys: bytes, position: int) -> bool:
        """True where it brings the block at ``position`` of packed ``keys``, below the one that these say."""
        at = position - self.first
        if not 0 <= at < len(self.keys) or self.keys[at] != key_at(keys, position):
            return False
        above = self.keys[at - 1] if at else self.parent
        return above == (key_at(keys, position - 1) if position else b"")

    def leads_to(self, keys: bytes, position: int) -> bool:
        """True where the block at ``position`` of packed ``keys`` comes behind its last one."""
        return position == self.first + len(self.keys) and self.keys[-1] == key_at(keys, position - 1)

    @property
    def pin(self) -> Pin:
        """Pin of the block that the next one comes under."""
        return self._pin

    @property
    def is_whole(self) -> bool:
        """True where all of it has come."""
        return self.admitted == len(self.keys)

    @property
    def is_done(self) -> bool:
        """True where it holds nothing any more."""
        return self.is_over and not any(self.out)

    def _take(self, group: int) -> array[int]:
        pool, count = self._blocks.host.pools[group], len(self.keys)
        if group in self._blocks.host.full_groups:
            return pool.take(count, PageState.IN_FLIGHT)
        pages = array("i", [NO_PAGE]) * count
        last = self.first + count
        due = _positions(self._blocks, group, self.first, last)
        due = [at - self.first for at in due[max(0, len(due) - pool.unreserved) :]]
        for at, page in zip(due, pool.take(len(due), PageState.IN_FLIGHT), strict=True):
            pages[at] = page
        return pages

    def pages(self) -> list[array[int]]:
        """Current page for each key of each group, or NO_PAGE."""
        return [pages[:] for pages in self._pages]

    def held(self) -> Iterator[HeldPages]:
        state = PageState.QUARANTINED if self.is_over else PageState.IN_FLIGHT
        for group, pages in enumerate(self._pages):
            if mine := [page for page in pages if page != NO_PAGE]:
                yield HeldPages(group, state, mine)

    def cut(self, block: int) -> None:
        """The block does not come, and so none below it."""
        self.end = max(self.admitted, min(self.end, block))

    def lose(self, block: int, group: int) -> None:
        """A windowed group does not come with its block."""
        self._lost.add((block, group))

    def may_admit(self) -> bool:
        """True where the next block has come, whole, and the one above it is there."""
        return not self.waits and self.admitted < self.end and not self.out[self.admitted]

    def admit(self, stamps: Callable[[], int]) -> bool:
        """The next block is on the host from now on; False where it cannot be, and so none below it: it is known
        below another prefix, or the block above it is lost. ``stamps``: gives access numbers."""
        at, key = self.admitted, self.keys[self.admitted]
        index, above = self._blocks.index, self._pin.row
        if above != NO_ROW and self._pin.place.is_lost and not self._keep(above):
            self.cut(at)
            return False
        row = index.rows.get(key, NO_ROW)
        if row == NO_ROW:
            row = index.insert(key, above, stamps())
        elif index.parent[row] != above or self._comes_otherwise(row):
            self.cut(at)
            return False
        self._take_copies(at, row)
        self._free(at, PageState.FREE)
        self.admitted += 1
        if not self._keep(row):
            raise LedgerBroken(f"row {row} was admitted, and is nowhere whole")
        self._blocks.offer(self._blocks.host, row)
        return True

    def _comes_otherwise(self, row: int) -> bool:
        """True where a backup fills the host's copy, and no other is whole: its source has gone, and it may fail."""
        is_whole = any(place.is_hittable(row) for place in self._blocks.index.places)
        return self._blocks.host.is_filling(row) and not is_whole

    def _take_copies(self, at: int, row: int) -> None:
        """Pages become copies of the row where the host has none: of all groups without a window, or of none."""
        host = self._blocks.host
        if host.is_filling(row):
            return  # a backup is on its way to the same place
        is_new = host.states[host.lead][row] == ABSENT
        for group in range(len(host.pools)):
            page = self._pages[group][at]
            is_wanted = is_new if group in host.full_groups else host.states[group][row] == ABSENT
            if page != NO_PAGE and is_wanted and (at, group) not in self._lost:
                host.admit(group, row, page)
                self._pages[group][at] = NO_PAGE
        if is_new:
            self._blocks.come(host, row)

    def _keep(self, row: int) -> bool:
        """Have a block stay until the next one is under it, wherever it is whole; False where it is so nowhere."""
        kept = next((place for place in self._blocks.index.places if place.is_hittable(row)), None)
        if kept is None:
            return False
        before, self._pin = self._pin, Pin(self._blocks, kept, row)
        before.let_go()
        return True

    def stop(self) -> None:
        """Stop admitting: pages whose objects have come back are free, the others in quarantine. Fetches behind it may
        admit from now on, or have nothing to come under."""
        for each in self.below:
            each._begin_behind(self)  # noqa: SLF001 - one of its kind
        self.end = self.admitted
        self.is_over = True
        for at in range(self.admitted, len(self.keys)):
            self._free(at, PageState.QUARANTINED if self.out[at] else PageState.FREE)
        self._pin.let_go()

    def _begin_behind(self, above: Fetch) -> None:
        self.waits = False
        if not above.is_whole:
            self.cut(0)
        elif not self.is_over:
            self._pin = Pin(self._blocks, above.pin.place, above.pin.row)

    def came_back(self, block: int) -> None:
        """Note that one of a block's objects writes no more."""
        self.out[block] -= 1
        if self.is_over and not self.out[block]:
            self._free(block, PageState.FREE)

    def _free(self, block: int, state: PageState) -> None:
        for group, pages in enumerate(self._pages):
            page = pages[block]
            if page != NO_PAGE:
                self._blocks.host.pools[group].move(page, state)
                if state is PageState.FREE:
                    pages[block] = NO_PAGE


@dataclass(slots=True, eq=False)
class Expectation:
    """The first ``blocks`` of packed keys ``path``, which the daemon at ``peer`` computes for requests here. Blocks
    behind these are fetched where the peer lends them along. One that has ended has the key of its last block alone.

    ``ticket``: of its waiters. ``party`` on ``replica`` expects them, was last here at ``wanted_at``, and is patient
    for ``patience`` seconds after ``progress_at``. ``here``: blocks of it that this node had when it asked last, at
    ``asked_at``; None: no question is under way, and one is due at ``retry_at``. ``epoch``: of the peer's life.
    ``failures``: questions in a row that had no answer, or whose loan did not come. ``has_begun``: the peer was seen to
    compute it. ``arrived``: blocks that no call has used yet. ``fetches``: those under way, each behind the one before.
    ``lent``: blocks (first, last) that the peer lends beyond that; ``is_beginning``: a fetch of these is being begun.
    ``chain``: the hash of its keys. ``wanted_by``: open sequences whose Match said that it was on its way.
    ``end``: how it ended, empty while it has not.
    """

    path: bytes
    blocks: int
    peer: str
    patience: float
    is_computed: bool
    ticket: int
    replica: int
    party: Party
    progress_at: float
    wanted_at: float
    here: int = -1
    asked_at: float | None = None
    fetches: list[Fetch] = field(default_factory=list)
    lent: tuple[int, int] = (0, 0)
    is_beginning: bool = False
    retry_at: float = 0.0
    epoch: int = 0
    failures: int = 0
    has_begun: bool = False
    arrived: int = 0
    end: str = ""
    chain: int = 0
    wanted_by: int = 0

    def __post_init__(self) -> None:
        self.chain = self.chain or hash(self.path)

    def forget(self, end: str) -> None:
        self.end, self.path = end, key_at(self.path, self.blocks - 1)

    @property
    def fetching(self) -> int:
        """Number of leading blocks that are here or being fetched; 0 where no fetch is under way."""
        return self.fetches[-1].first + len(self.fetches[-1].keys) if self.fetches else 0

    @property
    def name(self) -> tuple[str, int, int]:
        """Name of an expectation: its peer, its length, and the hash of all its keys, keyed for this process."""
        return self.peer, self.blocks, self.chain


@dataclass(slots=True)
class Stored:
    """State of one model. ``fetching``: the fetch of a key; ``wanted``: keys to write, in their order, once the loop is
    idle; ``ready``: those that have come to the host for it, which go first; ``coming``: those to write once they come
    there. ``written``: keys that were, newest last, and when. ``used``: deepest keys of paths that were used, with how
    many hits, still to be passed down; ``reused``: keys that were used again once and are not written. ``staged``: keys
    of copies that came to the host to be written alone; ``landed``: of those that leave it once a device has them.
    ``expectations``: what other nodes compute for this one, and the last of those that have ended."""

    fetches: dict[int, Fetch] = field(default_factory=dict)
    fetching: dict[bytes, Fetch] = field(default_factory=dict)
    keeping: dict[bytes, Keep] = field(default_factory=dict)
    wanted: KeyQueue = field(default_factory=KeyQueue)
    ready: KeyQueue = field(default_factory=KeyQueue)
    written: OrderedDict[bytes, float] = field(default_factory=OrderedDict)
    coming: set[bytes] = field(default_factory=set)
    used: dict[bytes, int] = field(default_factory=dict)
    reused: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    staged: set[bytes] = field(default_factory=set)
    landed: set[bytes] = field(default_factory=set)
    expectations: OrderedDict[tuple[str, int, int], Expectation] = field(default_factory=OrderedDict)
    most_written: int = MOST_WRITTEN

    @property
    def is_idle(self) -> bool:
        """True where nothing reads or writes host pages of the model."""
        return not self.fetches and not self.keeping

    @property
    def waiting(self) -> int:
        """Number of blocks that wait to be written."""
        return len(self.wanted) + len(self.ready)

    def take_wanted(self, key: bytes) -> None:
        """Take the block whose turn has come: the oldest of those that are ready, or of the others."""
        (self.ready if key in self.ready else self.wanted).drop_first()

    def pins(self) -> Iterator[tuple[int, int | None, int]]:
        """Place, group (None: the block's own) and row of each pin that is held. For audits."""
        for fetch in self.fetches.values():
            if fetch.pin.row != NO_ROW:
                yield fetch.pin.place.number, None, fetch.pin.row
        for keep in self.keeping.values():
            yield from keep.pins()

    def wrote(self, key: bytes, seconds: float) -> None:
        """Storage has the block: it was written, or came from there."""
        self.written[key] = seconds
        self.reused.pop(key, None)
        while len(self.written) > self.most_written:
            self.written.popitem(last=False)

    def note_reuse(self, key: bytes) -> None:
        self.reused[key] = None
        while len(self.reused) > self.most_written:
            self.reused.popitem(last=False)

    def written_staged(self, key: bytes) -> None:
        """A staged copy was written, or will not be: it may leave the host. No-op for others."""
        if key in self.staged:
            self.staged.discard(key)
            self.land(key)

    def land(self, key: bytes) -> None:
        """A block's host copy may go as soon as a device has the block."""
        if len(self.landed) >= MOST_LANDED:
            self.landed.clear()  # these leave the host by its own evictions
        self.landed.add(key)

    def begin(self, fetch: Fetch) -> None:
        """Register the keys of a fetch: other calls wait for it."""
        self.fetches[fetch.ticket] = fetch
        self.fetching |= dict.fromkeys(fetch.keys, fetch)

    def end(self, fetch: Fetch) -> None:
        """End its waits; what is in quarantine stays its."""
        for key in fetch.keys:
            if self.fetching.get(key) is fetch:
                del self.fetching[key]
        if fetch.is_done:
            del self.fetches[fetch.ticket]


def filling_of(host: Place, rows: array[int]) -> npt.NDArray[np.int64]:
    """For each of some rows the ticket that brings a copy of it to the host, 0 where none does."""
    return np.frombuffer(host.filling, np.int64)[column(rows)]


class LentBlocks:
    """A run of a path that is on the host or on its way there, ``rows`` root first. ``pages[g]``: of each row its host
    page, or NO_PAGE where a window has none. ``keys``: of each row; ``parent``: of the block above the first, empty for
    none. ``tickets``: those that bring its rows; it is a ``Waiter`` of each. ``on_change``: called when more of it has
    come, or will not. Pinned by its deepest row: the host evicts leaves first."""

    def __init__(
        self, blocks: BlockLedger, rows: array[int], pages: list[array[int]], tickets: Iterable[int] = ()
    ) -> None:
        self.rows = rows
        self.pages = pages
        self.keys = [blocks.index.key_of(row) for row in rows]
        self.parent = blocks.index.key_of(blocks.index.parent[rows[0]])
        self.on_change: Callable[[], None] | None = None
        self._tickets = set(tickets)
        self._end = len(rows)
        self._is_over = False
        self._pin = Pin(blocks, blocks.host, rows[-1])
        self._host = blocks.host
        self._windows = WindowPins(blocks, blocks.host)
        for group in blocks.host.window_groups:
            held = {at: row for at, (row, page) in enumerate(zip(rows, pages[group], strict=True)) if page >= 0}
            self._windows.hold_all(group, held)

    @property
    def is_cut(self) -> bool:
        """True where a copy has failed that some of it was to come by."""
        return self._end < len(self.rows)

    def ready(self) -> int:
        """Number of its leading blocks that are on the host, whole."""
        coming = np.isin(filling_of(self._host, self.rows), list(self._tickets))
        return min(self._end, int(np.argmax(coming)) if coming.any() else len(self.rows))

    def load_ended(self, ticket: int, reason: str) -> None:
        """Handle the end of a ticket: what it failed to bring, and all below, is lent no more."""
        if self._is_over:
            return
        self._tickets.discard(ticket)
        if reason:
            self._cut(filling_of(self._host, self.rows) == ticket)
        if self.on_change is not None:
            self.on_change()

    def pins(self) -> Iterator[tuple[int, int | None, int]]:
        """Place, group (None: the block's own) and row of each pin. For audits."""
        if self._pin.row != NO_ROW:
            yield from held_by(self._pin, self._windows)

    def let_go(self) -> None:
        """Unpin them: they have no reader any more."""
        self._is_over = True
        self._windows.let_go()
        self._pin.let_go()

    def _cut(self, failed: npt.NDArray[np.bool_]) -> None:
        """Unpin the rows from the first that has ``failed`` on."""
        if not failed.any():
            return
        self._end = min(self._end, int(np.argmax(failed)))
        for group, held in self._windows.rows.items():
            self._windows.drop(group, [at for at in held if at >= self._end])
        self._pin.move(self.rows[self._end - 1] if self._end else NO_ROW)


class Keep:
    """A host block that is being written from ``pages``, of each group one or NO_PAGE: they stay its until all of its
    objects have ended. ``out``: how many have not. ``states_alone``: the rest of the block was written before."""

    def __init__(self, blocks: BlockLedger, row: int, *, states_alone: bool = False) -> None:
        host = blocks.host
        groups = host.state_groups if states_alone else range(len(host.pools))
        self.pages = tuple(
            host.pages[group][row] if group in groups and host.states[group][row] == READY else NO_PAGE
            for group in range(len(host.pools))
        )
        self.out = 0
        self.is_good = True
        self._pin = Pin(blocks, host, row)
        self._windows = WindowPins(blocks, host)
        for group in host.window_groups:
            if self.pages[group] != NO_PAGE:
                self._windows.hold(group, blocks.index.depth[row], row)

    def pins(self) -> Iterator[tuple[int, int | None, int]]:
        """Place, group (None: the block's own) and row of each pin. For audits."""
        yield from held_by(self._pin, self._windows)

    def let_go(self) -> None:
        """Unpin its pages: they have no reader any more."""
        self._windows.let_go()
        self._pin.let_go()
