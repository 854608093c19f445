"""The pages of one request, from its match to the last of them that the engine frees.

The engine computes the last token of every request, for its logits, and writes that token's KV. Where a hit has all of
a request, the last block would be written, and it is sealed. So such a request has a ``tail``: a page of its own, which
its table names in that place. A worker copies the sealed page there before the step that computes the token:

    the daemon's table   | sealed | sealed | sealed |   ...     the hit; nothing publishes the tail
    the kernels' table   | sealed | sealed |  tail  |   ...

The tail's page is that of a sequence beside the request's, without keys, and goes back with it.
A prompt that ends within a block may be a hit too (``Tail``). Then the sequence beside the request's has
the sealed page, and the copy goes into the request's own one, which it fills and publishes like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from cachesvc.model.answers import TicketView
from cachesvc.model.layout import Layout
from cachesvc.model.words import NO_PAGE
from cachesvc_client import Expected, Retention
from cachesvc_client import Sequence as DaemonSequence
from cachesvc_client.layouts.families import Parts
from cachesvc_client.records.sequence_record import Pages

MATCH_HOLDS_S = 0.05
"""A request that waits for room is matched again after so long: others may have computed more of it by then."""

COMING_HOLDS_S = 0.005
"""A request whose blocks another node computes is matched again after so long, with others in one message. Half of it
is what a request waits on average when all is here: the bytes of a prompt of 1,500 tokens take some 30 ms."""


LONE = Parts((0,))
"""The leading group of a layout that has no other."""


class PageCopy(NamedTuple):
    """A page to copy before a step computes: ``source`` is sealed, ``target`` is its request's own."""

    source: int
    target: int


@dataclass(slots=True, eq=False)
class RequestPages:
    """``sequence``: None where there was no daemon to match it: all pages are private then.

    ``pages``: the request's table in the leading group ``lead``, which only grows; ``lead_parts``: its groups in the
    layout; ``others``: tables of other groups. A page keeps its place when another engine was faster to publish its
    block, because kernels have the table. ``hit_blocks`` blocks were found in place, ``host_blocks`` behind these have
    to be loaded. The engine has taken the first ``taken`` pages; of all groups' it has not freed ``held``. ``wanted``:
    up to where blocks are computed and to be sealed; it has said of the first ``full_blocks`` that they are full, or
    will be once what is scheduled is computed. ``first_blocks``: as many as the engine takes first, if it has room.
    ``is_whole_load``: the engine has the hit in place as a part of what is loaded. ``is_shortened``: the last block of
    its hit was left out already. ``is_loading``: its loads were handed to workers. ``is_foreign``: it is not shared,
    for something in it may be other than its keys say; ``awaits_others``: not yet, for others load a part of it.
    ``is_matching``: its match has no answer yet; ``is_forgotten``: and the request ended meanwhile. ``was_refused``:
    the pool had no pages for it. ``is_admitted``: the engine takes its pages once others of its pass have theirs.
    ``wish``: that it was matched by, in the iteration ``step``; None: by none. ``waits_for``: another request, which
    computes what it begins with, up to block ``waits_upto`` (``Prefills``). ``tail``: of a whole hit, the sequence
    beside it; ``copy``: the page that is copied for it, until a step has it."""

    request_id: str
    begun_s: float
    sequence: DaemonSequence | None = None
    lead: int = 0
    lead_parts: Parts = LONE
    others: list[GroupTable] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    hit_blocks: int = 0
    host_blocks: int = 0
    taken: int = 0
    held: int = 0
    wanted: int = 0
    full_blocks: int = 0
    output_tokens: int = 0
    first_blocks: int = 0
    is_shortened: bool = False
    is_whole_load: bool = False
    is_loading: bool = False
    is_foreign: bool = False
    awaits_others: bool = False
    is_matching: bool = False
    is_forgotten: bool = False
    was_refused: bool = False
    is_admitted: bool = False
    wish: Wish | None = None
    waits_for: RequestPages | None = None
    waits_upto: int = 0
    step: int = 0
    tail: RequestPages | None = None
    copy: PageCopy | None = None

    @property
    def salt(self) -> bytes:
        return b"" if self.wish is None else self.wish.salt

    @property
    def is_coming(self) -> bool:
        """True while blocks behind its hit are on their way from another node, or may be: it is matched again before it
        runs, and nothing waits for the answer."""
        if self.sequence is None:
            return self.is_matching and self.wish is not None and self.wish.expected is not None
        return self.is_ahead and self.sequence.coming_blocks > 0

    @property
    def is_put_off(self) -> bool:
        """True of a request that waits for another node or request, and is matched again before it runs."""
        return self.waits_for is not None or self.is_coming

    def is_recent(self, now_s: float) -> bool:
        """True while a request that waits need not be matched again."""
        return now_s - self.begun_s < (COMING_HOLDS_S if self.is_coming else MATCH_HOLDS_S)

    @classmethod
    def begin(
        cls,
        groups: EngineGroups,
        request_id: str,
        begun_s: float,
        *,
        first_blocks: int = 0,
        is_matching: bool = False,
        wish: Wish | None = None,
        step: int = 0,
    ) -> RequestPages:
        return cls(
            request_id,
            begun_s,
            lead=groups.lead,
            lead_parts=groups.lead_parts,
            others=groups.other_tables(),
            first_blocks=first_blocks,
            is_matching=is_matching,
            wish=wish,
            step=step,
        )

    @property
    def rows(self) -> int:
        return len(self.pages) // self.lead_parts.count

    @property
    def taken_blocks(self) -> int:
        """Number of blocks all of whose pages in the leading group the engine has taken."""
        return self.taken // self.lead_parts.count

    @property
    def shown_blocks(self) -> int:
        """Number of blocks in place that the engine only reads: of a whole hit all but the last one."""
        return self.hit_blocks - (self.tail is not None and not self.host_blocks)

    @property
    def hit_pages(self) -> int:
        """Number of pages of these in the leading group."""
        return self.shown_blocks * self.lead_parts.count

    @property
    def lost_blocks(self) -> int:
        """Number of blocks by which a missing window or state has made the hit shorter."""
        return 0 if self.sequence is None else max(0, self.sequence.full_blocks - self.loaded_blocks)

    @property
    def is_ahead(self) -> bool:
        """True while the engine has taken nothing of it, and may be without it."""
        return not (self.held or self.taken or self.is_admitted)

    @property
    def is_shared(self) -> bool:
        """True where others may get what it computes."""
        return self.sequence is not None and not (self.is_foreign or self.awaits_others)

    @property
    def wants_pages(self) -> bool:
        """True while it was matched, waits, and was given no pages yet."""
        if not self.is_ahead or not self.is_usable or self.sequence is None or self.is_put_off:
            return False
        if any(each.is_state for each in self.others):
            return False  # how long its first chunk is, the engine knows alone
        return self.rows <= self.hit_blocks < self.first_blocks and not self.is_growing

    @property
    def wants_match(self) -> bool:
        """True while it waits with nothing but the answer to its match."""
        if self.has_lent_tail:
            has_pages = self.rows > self.shown_blocks
        else:
            has_pages = self.rows > self.hit_blocks or (self.tail is not None and bool(self.tail.pages))
        return not (self.is_matching or self.is_growing or has_pages)

    @property
    def is_growing(self) -> bool:
        """True while it was asked for pages, and there is no answer."""
        if self.tail is not None and self.tail.is_growing:
            return True
        return self.sequence is not None and self.sequence.record.allocations > 0

    @property
    def is_usable(self) -> bool:
        """True while the daemon has the sequence and can load its blocks."""
        if self.sequence is None or not (self.tail is None or self.tail.is_usable):
            return False
        return self.sequence.record.failure is None and not self.sequence.record.has_failed_load

    def table_of(self, group: int) -> GroupTable:
        """The table of another group than the leading one."""
        return self.others[group - (group > self.lead)]

    def answers(self, wish: Wish) -> bool:
        """True where it waits with a match that is no more than ``wish`` may have."""
        is_like = self.salt == wish.salt and self.loaded_blocks <= wish.most_blocks
        return not self.held and self.is_usable and is_like

    def match(self, sequence: DaemonSequence) -> None:
        """Begin with a hit, behind which a lent ``tail`` is one block more."""
        self.sequence = sequence
        self.hit_blocks, self.host_blocks = sequence.device_blocks, sequence.host_blocks
        if self.tail is not None:
            is_in_place = not (self.host_blocks or self.tail.host_blocks)
            self.hit_blocks += is_in_place
            self.host_blocks += not is_in_place
        self.take_cells()

    def set_apart(self, beside: RequestPages) -> bool:
        """Leave the match, which may have a tail, to ``beside``: the request is matched again, up to the tail. False
        where the hit does not reach it."""
        is_whole = self.wish is not None and self.loaded_blocks == self.wish.whole_blocks
        assert self.sequence is not None
        beside.match(self.sequence)
        self.tail = beside if is_whole else None
        self.sequence, self.pages, self.is_matching = None, [], True
        self.hit_blocks = self.host_blocks = 0
        return is_whole

    def take_tail(self, tail: RequestPages) -> bool:
        """Have ``tail`` for the last block; False where the hit does not reach it."""
        is_whole = self.wish is not None and self.loaded_blocks == self.wish.whole_blocks
        self.tail = tail if is_whole else None
        return is_whole

    @property
    def is_without_tail(self) -> bool:
        """True of a whole hit whose last block finds no page of its own: a shorter hit needs none."""
        is_whole = self.wish is not None and 0 < self.wish.whole_blocks == self.loaded_blocks
        return is_whole and (self.tail is None or (self.lacks_tail and self.was_refused))

    @property
    def has_lent_tail(self) -> bool:
        """True where the sequence beside its own has the sealed page, and the request's own one gets the copy."""
        return self.tail is not None and self.tail.loaded_blocks > 0

    @property
    def tickets(self) -> tuple[TicketView, ...]:
        assert self.sequence is not None
        beside = self.tail.sequence if self.tail is not None and self.has_lent_tail else None
        return self.sequence.tickets + (() if beside is None else beside.tickets)

    def follow(self) -> None:
        """The engine knows no leading group: count as taken there what it has taken in all others."""
        self.taken = min(each.taken // each.parts.count for each in self.others)

    def has_any(self, pages: set[int]) -> bool:
        """True where one of these pages is in a table."""
        return any(not pages.isdisjoint(table) for table in (self.pages, *(each.pages for each in self.others)))

    @property
    def pools(self) -> range:
        """Pools that its groups draw pages from."""
        return range(1 + max((each.pool for each in self.others), default=0))

    def spare_pages(self, pool: int = 0) -> int:
        """Number of pages that the engine has not taken, of all groups of a pool."""
        return (0 if pool else len(self.pages) - self.taken) + sum(each.spare for each in self._others_of(pool))

    @property
    def loaded_blocks(self) -> int:
        """Number of leading blocks of its hit."""
        return self.hit_blocks + self.host_blocks

    @property
    def outside_blocks(self) -> int:
        """Number of blocks that the connector offers the engine as a load, or as a copy."""
        return self.loaded_blocks if self.is_whole_load else max(self.host_blocks, self.tail is not None)

    def outside_tokens(self, block_tokens: int) -> int:
        """Number of tokens of these that the engine does not compute: the last one of a request is computed always."""
        return self.outside_blocks * block_tokens - self._computed_tokens

    def blocks_of(self, tokens: int, block_tokens: int) -> int:
        """Number of blocks of the hit that the engine takes with ``tokens`` tokens."""
        is_whole = self.tail is not None and tokens == self.loaded_blocks * block_tokens - self._computed_tokens
        return self.loaded_blocks if is_whole else tokens // block_tokens

    @property
    def _computed_tokens(self) -> int:
        """Number of slots of a whole hit that are no part of it: the last token's, and those behind it."""
        return 0 if self.tail is None or self.wish is None else 1 + self.wish.free_tokens

    def offer(self, local_tokens: int, block_tokens: int) -> int:
        """Number of tokens to load behind those that were found in place; 0 where the engine leaves out a part of them.

        It finds none where a window or state at the end of them is elsewhere, and needs none there: what is loaded
        begins with the first block then, and the daemon has its first pages in place already."""
        self.is_whole_load = not local_tokens and min(self.hit_blocks, self.host_blocks) > 0
        is_whole = self.is_whole_load or local_tokens == self.shown_blocks * block_tokens
        return self.outside_tokens(block_tokens) if is_whole else 0

    @property
    def lacks_tail(self) -> bool:
        """True where the sequence beside its own has no page for the last block yet."""
        return self.tail is not None and self.tail.rows < max(1, self.tail.loaded_blocks)

    def has_pages(self, blocks: int, states: Positions) -> bool:
        """True where the engine can take ``blocks`` blocks, and ``states``."""
        return self.rows >= blocks and not (self.lacks_tail or (self.others and any(self._lacking(states).values())))

    def growth(self, blocks: int, states: Positions) -> Growth:
        """Length and new cells with which the table has these. Pages come with new blocks alone, so a state in a hole
        of the table makes it longer."""
        first = max(self.rows, self.loaded_blocks)
        if not self.others:
            return Growth(max(blocks, first))
        lacking = self._lacking(states)
        ends = [max(first + len(holes), holes[-1] + 1) for holes in lacking.values() if holes]
        end = max(blocks, first, *ends)
        positions = {}
        for group, holes in lacking.items():
            new = [position for position in holes if position >= first]
            others = (position for position in range(first, end) if position not in new)
            positions[group] = sorted(new + [next(others) for _ in range(len(holes) - len(new))])
        return Growth(end, positions)

    def missing_pages(self, growth: Growth, pool: int = 0) -> int:
        """Number of pages of a pool that it takes to grow so far."""
        rows = max(0, growth.blocks - self.rows) + self.lacks_tail
        if not self.others:
            return rows * self.lead_parts.count
        states = (len(growth.positions.get(each.state_group, ())) for each in self._others_of(pool) if each.is_state)
        return rows * self.row_pages(pool) + sum(states)

    def _lacking(self, states: Positions) -> dict[int, list[int]]:
        loaded = self.loaded_blocks
        tables = [each for each in self.others if each.is_state]
        return {each.state_group: each.lacking(states.get(each.state_group, ()), loaded) for each in tables}

    def row_pages(self, pool: int = 0) -> int:
        """Number of pages of a pool that a further block takes, without states."""
        others = sum(each.parts.count for each in self._others_of(pool) if not each.is_state)
        return (0 if pool else self.lead_parts.count) + others

    def _others_of(self, pool: int) -> Iterable[GroupTable]:
        return (each for each in self.others if each.pool == pool)

    def take_cells(self) -> None:
        assert self.sequence is not None
        if self.tail is not None and self.lacks_tail:
            self.tail.take_cells()
        if self.sequence.blocks * self.lead_parts.count <= len(self.pages):
            return
        tables = self.sequence.tables
        self.pages += self.lead_parts.pages(tables, len(self.pages))
        for each in self.others:
            each.read(tables, self.loaded_blocks)

    def take_hits(self) -> int:
        """The engine uses all of the hit that is in place. Return its pages in the leading group."""
        assert self.taken == 0
        self.full_blocks = self.shown_blocks
        self.taken = self.hit_pages
        self.held += self.hit_pages
        return self.hit_pages

    def take(self, pages: int) -> list[int]:
        """The next pages, which were reserved. Never a page of the hit, which others read, but as one that is loaded:
        the engine writes into none of these."""
        assert self.taken >= self.hit_pages or self.is_whole_load
        assert self.taken + pages <= len(self.pages)
        first = self.taken
        self.taken += pages
        self.held += pages
        if self.tail is not None and first < self.loaded_blocks <= self.taken:
            last, mine = self.loaded_blocks - 1, self.tail.pages[-1]
            if self.has_lent_tail:
                self.copy = PageCopy(mine, self.pages[last])
            else:
                self.copy, self.pages[last] = PageCopy(self.pages[last], mine), mine
        return self.pages[first : self.taken]

    def take_states(self, blocks: int) -> dict[int, dict[int, int]]:
        """States at the end of computed blocks, which are to be sealed, by group and position."""
        return {each.state_group: ready for each in self.others if each.states and (ready := each.take_states(blocks))}

    def take_replaced(self, dead: Mapping[int, int]) -> list[tuple[int, int]]:
        """Take pages ``(group, page)`` of ``dead`` cells for which another engine's were sealed."""
        assert self.sequence is not None
        tables = self.sequence.tables
        return [replaced for each in self.others for replaced in each.take_replaced(tables, dead)]

    def private_pages(self, pool: int = 0) -> list[int]:
        """Take the pages of a pool that only this request ever wrote, and that were neither published nor given
        back."""
        tables = ((each.pages, max(self.first_private_of(each), each.told)) for each in self._others_of(pool))
        rest = [page for pages, at in tables for page in pages[at:] if page != NO_PAGE]
        rest += [page for each in self._others_of(pool) for page in each.take_dropped()]
        if pool:
            return rest
        rest += [] if self.tail is None or self.has_lent_tail else self.tail.pages
        return self.pages[self.first_private * self.lead_parts.count :] + rest

    def first_private_of(self, table: GroupTable) -> int:
        """The first cell of another group that is in no block that is others' too."""
        return self.first_private * table.parts.count

    @property
    def first_private(self) -> int:
        """Number of leading blocks that are others' too, or were to be."""
        return max(self.wanted, self.shared_blocks)

    @property
    def shared_blocks(self) -> int:
        """Number of leading blocks whose pages this request only reads."""
        return self.loaded_blocks - self.has_lent_tail


class Tail(NamedTuple):
    """Last block of a prompt, of ``tokens`` tokens, which are fewer than a block's. It is sealed under ``key``, and the
    full block under another one."""

    key: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class Wish:
    """Match of a request: at most ``most_blocks`` blocks of ``hashes``. ``first_blocks``: as many as are taken first,
    hits included. ``salt``: what the hashes are mixed with (``Adapters.salt``). ``expected``: what another node
    computes of it. ``retention``: the client's hint on its blocks. ``whole_blocks``: length of a request of which a hit
    may have all; 0: the last block is computed anyway. ``tail``: the last of these blocks, where it is not full; it has
    room for ``free_tokens`` tokens more. ``seals_tail``: the request ends with it, and seals it. ``follows_layers``:
    each layer of the engine waits for its part of a load. ``takes_all``: no hit exceeds ``first_blocks``, and the
    engine takes all of them at once. A request that is alone is then matched and given its pages in one message.
    ``shortens``: the match that found more; None: this is the first one."""

    hashes: Sequence[bytes]
    most_blocks: int
    first_blocks: int
    salt: bytes = b""
    expected: Expected | None = None
    retention: Retention = Retention.DEFAULT
    whole_blocks: int = 0
    tail: Tail | None = None
    free_tokens: int = 0
    seals_tail: bool = False
    follows_layers: bool = False
    takes_all: bool = False
    shortens: Wish | None = None

    @property
    def whole(self) -> Wish:
        """The match for as much as the request may have."""
        return self if self.shortens is None else self.shortens

    @property
    def may_be_whole(self) -> bool:
        """True where the hit may be all of the request."""
        return 0 < self.whole_blocks == self.most_blocks

    @property
    def goes_on(self) -> bool:
        """True where the hit may have the tail, and the request fills that block: its full block has another key."""
        return self.may_be_whole and self.tail is not None and not self.seals_tail

    @property
    def matched_hashes(self) -> Sequence[bytes]:
        """Hashes of the blocks that it is matched for."""
        if not self.most_blocks:
            return ()
        if self.tail is None or not self.may_be_whole:
            return self.hashes
        return [*self.hashes[: self.whole_blocks - 1], self.tail.key]


# Tables of a request's groups beside the leading one: pages by position, with holes.
#
# The leading group keeps whole sequences, and its table is as long as the request (``RequestPages``). The others have
# cells at the same positions: all of them (whole sequences too), those from a window's beginning on, or one at the end
# of each scheduled chunk (states). The engine takes a cell once, in order, and frees the first ones again; what lies
# below the first cell that it may still read goes back to the daemon.
#
# The daemon's blocks have the tokens in which each group has whole blocks. A group with smaller ones has several cells
# for each, which are groups of their own there (``Parts``).

Positions = Mapping[int, Sequence[int]]
"""By state group, where the engine takes a page next."""

NO_POSITIONS: Positions = MappingProxyType({})

AllParts = tuple[Parts, ...]
"""Groups of a layout that each of an engine's is."""


class Growth(NamedTuple):
    """Length of a request's tables, and by state group the new blocks that get a page."""

    blocks: int
    positions: Mapping[int, list[int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class EngineGroups:
    """An engine's groups in a layout: ``parts`` of each, those of ``states``, and the leading one, ``lead``. ``pools``:
    a group of the layout for each pool that they draw pages from, the leading group's first; ``pool_of``: the number of
    each one's there. ``has_markers``: the engine keeps no whole sequence, so markers lead, which it does not know."""

    parts: AllParts
    states: frozenset[int]
    lead: int
    pools: tuple[int, ...]
    pool_of: tuple[int, ...]
    has_markers: bool = False

    @property
    def main_pool(self) -> int:
        """The pool in which the engine counts what it holds."""
        return int(self.has_markers)

    @property
    def lead_parts(self) -> Parts:
        return self.parts[self.lead]

    @property
    def row_pages(self) -> int:
        """Number of pages that a further block takes, without states."""
        return sum(each.count for group, each in enumerate(self.parts) if group not in self.states)

    def state_of(self, group: int) -> int:
        """The layout's group of states that one of the engine's is."""
        return self.parts[group].groups[0]

    def other_tables(self) -> list[GroupTable]:
        """Empty tables of the groups beside the leading one."""
        return [
            GroupTable(each, group in self.states, pool=self.pool_of[group])
            for group, each in enumerate(self.parts)
            if group != self.lead
        ]


def engine_groups(layout: Layout, parts: AllParts = ()) -> EngineGroups:
    """Return an engine's groups. Without ``parts`` each of the layout's is one. A layout's markers come last."""
    mine = parts or tuple(Parts((group,)) for group in range(len(layout.own_groups)))
    if layout.marker is not None:
        mine = (*mine, Parts((layout.marker,)))
    first = [layout.groups[each.groups[0]] for each in mine]
    states = frozenset(group for group, each in enumerate(first) if each.is_state)
    lead = next(group for group, each in enumerate(first) if each.is_full)
    leads = [layout.pool_leads[each.groups[0]] for each in mine]
    pools = tuple(dict.fromkeys([leads[lead], *leads]))
    return EngineGroups(mine, states, lead, pools, tuple(map(pools.index, leads)), layout.marker is not None)


@dataclass(slots=True, eq=False)
class GroupTable:
    """``parts``: its groups in the layout; ``pool``: the number of theirs (``EngineGroups``). ``pages``: by position,
    NO_PAGE in a hole. The engine has taken cells up to ``taken``, has not freed ``held`` of them, and needs none below
    ``first``, which was noted up to ``told`` and reported up to ``given_back``. Of a state group: ``unused``: positions
    whose own pages the engine has not taken; ``states``: pages that it has taken, by position, until they are sealed,
    freed or not. ``dropped``: pages of states that it took for drafts, and that are to go back by themselves."""

    parts: Parts
    is_state: bool
    pages: list[int] = field(default_factory=list)
    taken: int = 0
    held: int = 0
    first: int = 0
    told: int = 0
    given_back: int = 0
    unused: list[int] = field(default_factory=list)
    states: dict[int, int] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    pool: int = 0

    @property
    def state_group(self) -> int:
        return self.parts.groups[0]

    @property
    def spare(self) -> int:
        """Number of pages that the engine has not taken."""
        rest = self.pages[self.taken :]
        return len(rest) - rest.count(NO_PAGE)

    def page_at(self, position: int) -> int:
        """The page at a position; NO_PAGE where there is none."""
        return self.pages[position] if position < len(self.pages) else NO_PAGE

    def lacking(self, positions: Iterable[int], loaded_blocks: int) -> list[int]:
        """Those of the ``positions`` of states that have no page. A page of a later position will do: states are sealed
        where they are computed. Those of ``loaded_blocks`` blocks come with a load."""
        unused, found = list(self.unused), []
        for position in positions:
            if position < loaded_blocks:
                continue
            later = next((each for each in unused if each >= position), None)
            if later is None:
                found.append(position)
            else:
                unused.remove(later)
        return found

    def read(self, tables: Sequence[Pages], loaded_blocks: int) -> None:
        """Add the cells behind the last one, from the tables of all of the layout's groups. Others stay: kernels have
        the table."""
        first = len(self.pages)
        self.pages += self.parts.pages(tables, first)
        self._note_unused(first, loaded_blocks)

    def add(self, pages: Iterable[int]) -> None:
        first = len(self.pages)
        self.pages += pages
        self._note_unused(first, first)

    def _note_unused(self, first: int, loaded_blocks: int) -> None:
        if self.is_state:
            new = range(max(first, loaded_blocks), len(self.pages))
            self.unused += [position for position in new if self.pages[position] != NO_PAGE]

    def hold(self, position: int, cells: int) -> None:
        """The engine uses cells from ``position`` on."""
        if not self.held:
            self.first = position
        self.held += cells
        self.taken = max(self.taken, position + cells)

    def take(self, first: int, cells: int) -> list[int]:
        """The pages of new cells, which were reserved."""
        if self.is_state:
            for position in range(first, first + cells):
                self._move_here(position)
        pages = self.pages[first : first + cells]
        assert len(pages) == cells
        assert NO_PAGE not in pages
        self.hold(first, cells)
        return pages

    def _move_here(self, position: int) -> None:
        """Use an own page of this or a later position, unless one was loaded here."""
        later = next((each for each in self.unused if each >= position), None)
        if later is None or (later > position and self.page_at(position) != NO_PAGE):
            return
        self.unused.remove(later)
        page, self.pages[later] = self.pages[later], NO_PAGE
        self.pages[position] = self.states[position] = page

    def free(self, position: int) -> None:
        """The engine has freed a cell, and needs none before it. A state there may be sealed all the same: an engine
        frees what it needs no more while the output of the step that wrote it is on its way."""
        self.held -= 1
        self.first = max(self.first, position + 1)

    def drop_spare(self, position: int) -> int:
        """The engine has freed a cell that it took for drafts, and needs those before it. Return its page."""
        self.held -= 1
        page, self.pages[position] = self.states.pop(position), NO_PAGE
        return page

    def take_dropped(self) -> list[int]:
        """Take the pages that are to go back by themselves."""
        dropped, self.dropped = self.dropped, []
        return dropped

    @property
    def unread(self) -> int:
        """Number of leading cells that the engine has freed and whose states are sealed: no step needs them."""
        return min((self.first, *self.states))

    def take_states(self, blocks: int) -> dict[int, int]:
        """States below ``blocks``, which are computed: they are to be sealed."""
        ready = {position: page for position, page in self.states.items() if position < blocks}
        for position in ready:
            del self.states[position]
        return ready

    def take_replaced(self, tables: Sequence[Pages], dead: Mapping[int, int]) -> list[tuple[int, int]]:
        """Pages ``(group, page)`` of cells that are dead and for which another engine's were sealed: the kernels had
        this request's own until now. A state's page stays where it was granted, and goes with that cell, but for those
        that were dropped."""
        if self.dropped:
            return [(self.state_group, page) for page in self.take_dropped()]
        first, end = self.given_back, min(self.parts.dead_pages(dead), len(self.pages))
        if self.is_state or end <= first:
            return []
        self.given_back = end
        cells = self.parts.pages(tables, first, end)
        mine = zip(self.parts.groups_at(first), self.pages[first:end], cells, strict=False)
        return [(group, page) for group, page, cell in mine if NO_PAGE != page != cell]

    def drop_pages(self, first: int, end: int) -> list[int]:
        """Take the pages of cells out of the table."""
        end = min(end, len(self.pages))
        dropped = [page for page in self.pages[first:end] if page != NO_PAGE]
        self.pages[first:end] = [NO_PAGE] * max(0, end - first)
        return dropped
