"""Answers of the flows, in the model's words; the edge turns these into messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from cachesvc.model.words import TimelineSlot


class GroupCells(NamedTuple):
    """Cells of one group's block table from position ``first_block`` on; NO_PAGE where there is none.

    ``pages`` of a table, and all that came by a message, are an ``array("i")``: no object a page.
    """

    group: int
    first_block: int
    pages: Sequence[int]
    generations: tuple[int, ...] = ()


class TicketView(NamedTuple):
    """A transfer as callers see it. ``state`` is ``running``, ``done`` or ``failed``."""

    id: int
    state: str
    reason: str
    slot: TimelineSlot | None
    direction: str
    blocks: int
    size_bytes: int


class Path(Protocol):
    """The blocks of a request that comes: all, those known, those resident; by position their keys and segments."""

    blocks: int
    known: int
    resident: int

    def key(self, position: int) -> bytes:
        """Key of a block."""

    def segment(self, position: int) -> int:
        """Segment of a resident block."""


class Reserved(Protocol):
    """Pages that are kept for a call while it waits."""

    def release(self) -> None:
        """The call has ended, whatever came of it. Once is enough; twice is fine."""

    def shorten(self, until: float) -> None:
        """End it at ``until`` at the latest."""


class Wait(NamedTuple):
    """Blocked: call again when one of these tickets has ended. Nothing was changed for the caller.

    Where it ``goes_on`` a part is done for good, and the daemon carries the call through without its caller.

    Without tickets its turn is over: call again as soon as other calls have had theirs.
    ``turns``: about how many turns a long call takes; it has done nothing yet, and begins once the long calls of its
    process before it have ended.
    ``seconds``: after this time call again all the same, because the flow can do without; None where it cannot.
    ``reserved``: what is kept for the call meanwhile; the node releases it once the call has ended.
    """

    tickets: tuple[int, ...]
    seconds: float | None = None
    reserved: Reserved | None = None
    goes_on: bool = False
    turns: int = 0


class Matched(NamedTuple):
    """Blocks in place, blocks to load, blocks that another request is computing; tables of those in place; and how many
    of those to load came from storage for this call. ``full_blocks``: the hit, had no window or state been missing.
    ``coming_blocks``: blocks behind the hit that are on their way from another node."""

    device_blocks: int
    host_blocks: int
    computing_blocks: int
    tables: tuple[GroupCells, ...]
    storage_blocks: int = 0
    full_blocks: int = 0
    coming_blocks: int = 0


LONGEST_EXPECTED_WAIT_SECONDS = 10.0
"""Longest time for which a Match waits for what it expects, seconds. It says then what is still on its way."""


class Expected(NamedTuple):
    """First ``blocks`` blocks of a request (0: all), which the daemon at ``peer`` has or will have; others behind them
    are not waited for, and come where they are lent along. ``patience``: seconds without progress after which the rest
    is not expected any more. ``is_computed``: it has computed them all. ``waits``: the call waits for them.
    ``is_over``: the request has ended, and what has not come is not fetched for it any more."""

    peer: str
    blocks: int = 0
    patience: float = 10.0
    is_computed: bool = False
    waits: bool = True
    is_over: bool = False


class Allocated(NamedTuple):
    """New table cells, the loads to follow, and how many of the new blocks are loads."""

    tables: tuple[GroupCells, ...]
    tickets: tuple[TicketView, ...]
    loading_blocks: int


class Published(NamedTuple):
    """``duplicates`` holds the sealed pages to use at ``duplicate_positions``, ``spares`` the sequence's own there.
    ``kept``: states that were named and not sealed, whose pages are the sequence's own still."""

    sealed_blocks: int
    duplicate_positions: tuple[int, ...]
    duplicates: tuple[GroupCells, ...]
    spares: tuple[GroupCells, ...]
    pending: bool
    kept: tuple[GroupCells, ...] = ()


class Swapped(NamedTuple):
    """Tickets of the transfer; after bringing a sequence back also its whole tables."""

    tickets: tuple[TicketView, ...]
    tables: tuple[GroupCells, ...]


class Recycled(NamedTuple):
    """Pages given back, and each windowed group's cursor."""

    pages: int
    cursors: tuple[int, ...]


class Prefetched(NamedTuple):
    """Blocks that will be in place once the tickets are done."""

    device_blocks: int
    tickets: tuple[TicketView, ...]


LINEAR_TOKENS = 30_500
"""Position at which computing a token again costs twice what it costs at the beginning (an 8B model with GQA)."""


class Parts(NamedTuple):
    """A request that an eviction policy follows: its number, and the segments of its blocks ``[0, shared_blocks)`` and
    of those behind them."""

    number: int
    shared: int
    own: int
    shared_blocks: int


class Ended(NamedTuple):
    """End of a request, as far as its engine reports it: tokens of output (None: unknown), and when (seconds of the
    daemon's clock; None: now)."""

    output_tokens: int | None = None
    at: float | None = None


class Worth(NamedTuple):
    """Worth of a block to a policy that learns: its class in words, its age there (seconds), and the expected hits a
    second."""

    words: str
    age: float
    density: float


MAX_OPERATIONS = 4096
"""Most operations of a Step; a daemon may be configured for fewer."""

Positions = Mapping[int, Sequence[int]]
"""New blocks that get a page, by windowed group: their positions, rising."""
NO_POSITIONS: Positions = MappingProxyType({})


class Growth(NamedTuple):
    """Entry ``n`` is sequence ``sequences[n]``, which takes the stock pages ``pages[g][starts[n]:starts[n + 1]]`` of
    each group ``g``, with their ``generations[g]``. All groups have ``starts[-1]`` pages."""

    sequences: Sequence[int]
    starts: Sequence[int]
    pages: Sequence[Sequence[int]]
    generations: Sequence[Sequence[int]]


class Publishes(NamedTuple):
    """Entry ``n`` is sequence ``sequences[n]``, which has ``first[n]`` sealed blocks and seals ``starts[n + 1] -
    starts[n]`` more. ``keys``: of all blocks in order, packed; empty: all are known from Match."""

    sequences: Sequence[int]
    first: Sequence[int]
    starts: Sequence[int]
    keys: bytes


class Releases(NamedTuple):
    """Entry ``n`` is sequence ``sequences[n]``, whose request has put out ``output_tokens[n]`` tokens (None: its engine
    does not say); no ``output_tokens`` at all: none does."""

    sequences: Sequence[int]
    output_tokens: Sequence[int | None]


def before_repeated(numbers: Sequence[int], held: Collection[int]) -> Sequence[int]:
    """The first of ``numbers``, up to one that is among ``held`` or was named before."""
    if not held and len(set(numbers)) == len(numbers):
        return numbers
    seen = set(held)
    for at, number in enumerate(numbers):
        if number in seen:
            return numbers[:at]
        seen.add(number)
    return numbers
