"""Common state of all flows: the ledger, the rules, the limits, and the seams to movers and memory."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from cachesvc.flows.context.counters import Count
from cachesvc.flows.context.turns import Chores, Turns
from cachesvc.ledger.leases import Lease
from cachesvc.ledger.ledger import Ledger, Model
from cachesvc.model.numbers.sharing import Party
from cachesvc.model.transfer import TimelineSlot, Transfer
from cachesvc.policy.eviction import Eviction
from cachesvc.policy.writing import WriteRule


class Mover(Protocol):
    """Moves pages; answers by ticket, later and from elsewhere, through ``transfers.land``."""

    def submit(self, transfer: Transfer) -> TimelineSlot:
        """Queue a transfer; returns where its progress can be read."""

    def free_slots(self, model_id: int, replica_id: int) -> int:
        """Number of transfers of a replica that could be submitted now. Flows ask before they change anything."""

    def expedite(self, ticket: int) -> None:
        """Make a BACKGROUND transfer awaited. No-op where it has ended."""

    def can_reach(self, model: int, source_replica: int, target_replica: int) -> bool:
        """True where transfers between the devices of two replicas need not pass through the host, on every rank."""

    def peer_rate(self, model: int, source_replica: int, target_replica: int) -> float:
        """Rate of copies between the devices of two replicas, in units of the host's to the second one; 0 where they
        pass through the host."""

    def pause_write_backs(self, devices: Sequence[str], seconds: float) -> None:
        """Start no copies of BACKGROUND stores on the devices for a while."""


class Fetched(Enum):
    """Outcome of an object of a fetch, or of a write."""

    WHOLE = "whole"  # verified; or kept
    LENT = "lent"  # verified; another node lent it, and the storage need not have it
    GONE = "gone"  # it does not come: missing, wrong, refused, failed
    MISPLACED = "misplaced"  # it does not come: it lies below another block than the one that was named
    LATE = "late"  # its wait has ended, and its memory may still be written or read
    BACK = "back"  # it was late; its memory is free


class FetchedObject(NamedTuple):
    """An object of one block: what it has of the block, by ``groups``."""

    block: int
    groups: tuple[int, ...]
    outcome: Fetched


class FetchRequest(NamedTuple):
    """Bring blocks to host pages. ``keys``: packed, root first; ``pages[g]``: a page for each, or NO_PAGE. ``parent``:
    the key of the block above the first; empty for none."""

    ticket: int
    model: Model
    keys: bytes
    pages: list[array[int]]
    parent: bytes


class KeepRequest(NamedTuple):
    """Write a block of a model from its host pages: of each group one, or NO_PAGE. ``parent``: as of a fetch."""

    model: Model
    key: bytes
    pages: tuple[int, ...]
    parent: bytes


class StoredUse(NamedTuple):
    """A use of a block in memory, for the copy below. ``queue``: its class in the eviction policy; 0: none. ``hits``:
    how many of the uses were hits."""

    key: bytes
    queue: int
    hits: int = 0


class Storage(Protocol):
    """Moves host pages to storage and back; answers later and from elsewhere, through ``fetch.fetched`` and
    ``keep.kept``. ``wait_seconds``: how long a call waits for it at most. ``keeps_all``: whatever comes to the host is
    written; ``keeps_used``: what was used again."""

    wait_seconds: float
    keeps_all: bool
    keeps_used: bool

    def expects(self, model: Model, keys: bytes) -> int | None:
        """Number of leading packed keys worth fetching; 0 while storage is not used, None where the engine must be
        asked."""

    def has(self, model: Model, key: bytes) -> bool:
        """True where it believes to have a block, as far as it knows without asking anybody."""

    def used(self, model: Model, uses: Sequence[StoredUse]) -> None:
        """Note uses of blocks in memory: their copies below are as recently used."""

    def fetch(self, request: FetchRequest) -> list[int]:
        """Begin a fetch; returns of each block how many objects come. Each is reported once, or LATE and then BACK."""

    def lagged(self) -> None:
        """Note that a call has waited for the longest time in vain."""

    def room(self) -> int:
        """Bytes that may be written now."""

    def keep(self, request: KeepRequest) -> int:
        """Begin to write; returns how many objects are in flight. Each is reported once, or LATE and then BACK."""

    def forget(self, model_id: int) -> None:
        """A model has left the ledger; nothing of it is under way."""


class Promise(NamedTuple):
    """Answer of another node that was asked for blocks. ``lent``: how many of the first it lends from now on; behind
    these, engines there are ``computing`` blocks. ``epoch``: of its life. ``problem``: why there is no answer.
    ``ask_in``: seconds after which the node is asked again; above 0 where it was not asked, or can lend nothing now.
    ``is_given_up``: nothing is lent, and the request that computed the first of them there has ended."""

    lent: int = 0
    computing: int = 0
    epoch: int = 0
    problem: str = ""
    ask_in: float = 0.0
    is_given_up: bool = False


class Lenders(Protocol):
    """Other nodes, which compute blocks for this one. Calls return at once."""

    def is_here(self, peer: str) -> bool:
        """True where the address is this node's own."""

    def ask(
        self, model: Model, party: Party, keys: bytes, peer: str, seconds: float, told: Callable[[Promise], None]
    ) -> str:
        """For ``party``, ask the node at ``peer`` to lend what it has of packed ``keys``, and to wait for the first for
        ``seconds``.
        ``told`` is called later, from the loop; a fetch then finds what is lent. Returns why that node is not asked."""

    def drop(self, model: Model, keys: Sequence[bytes]) -> None:
        """Read no more of the loans that have these blocks: what they have not brought yet does not come."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Every bound that a caller can run into. Sizes in the unit of the name.

    ``key_bytes_per_process``: of the keys that open sequences were matched with, and of the messages of calls that
    wait, of all leases that a process opened.
    ``remembered_blocks``: keys of dropped blocks, over all models, that tell a miss's cause (some 150 bytes each).
    ``recent_blocks``: blocks of the last prompts, over all models, that simulations are run on (8 bytes each; what a
    prompt costs beside them is taken off).
    ``peer_blocks_min``: what another replica must have beyond a hit before a call waits for it. ``peer_waits`` and
    ``peer_wait_seconds``: how often it does, and how long each time, for a Step does nothing else meanwhile.
    ``reservation_seconds``: how long free pages are kept at most for a call that waits for more. It is longer than
    calls wait, which end their reservations themselves. ``open_seconds``: how long a model is kept for an engine that
    has registered it and not opened a lease; 0: not at all. ``ahead_pages``: device pages that are kept free of each
    pool, as far as the host has what goes for them, and at most an ``ahead_part``-th of the pool. ``pins_per_model``:
    of operators. ``pin_share``: of each pool, what these may keep.
    """

    blocks_per_sequence: int = 65536
    sequences_per_lease: int = 4096
    key_bytes_per_process: int = 256 << 20
    prefetches_per_lease: int = 1024
    stock_pages_per_lease: int = 4096
    leases: int = 1024
    models: int = 64
    running_tickets: int = 4096
    remembered_blocks: int = 1 << 18
    recent_blocks: int = 1 << 20
    events_per_model: int = 65536
    peer_blocks_min: int = 1
    peer_waits: int = 4
    peer_wait_seconds: float = 0.5
    reservation_seconds: float = 60.0
    open_seconds: float = 0.0
    ahead_pages: int = 0
    ahead_part: int = 64
    pins_per_model: int = 64
    pin_share: float = 0.25


@dataclass
class Core:
    """Made once by the composition root; tests make their own.

    ``new_name`` gives lease ids, ``model_numbers`` those of models. ``on_refused``: called with ``(ticket, reason)`` of
    a transfer that the mover refused; it has failed by then. ``on_sealed``: called with ``(model, replica, row of the
    last, count)`` for each Publish that sealed blocks. ``chores``: background tasks, for when no call is served;
    ``on_ended`` is called with tickets that end by one. ``on_left``: called with each lease of a process that has
    ended, while it holds what the process held. ``storage``: None where none is configured; ``on_wanted``: called when
    blocks of a model wait to be written to it.
    """

    ledger: Ledger
    mover: Mover
    eviction: Eviction
    writing: WriteRule
    limits: Limits = field(default_factory=Limits)
    turns: Turns = field(default_factory=Turns)
    counters: dict[str, int] = field(default_factory=dict)
    model_numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    new_name: Callable[[], str] = field(default_factory=lambda: map(str, itertools.count(1)).__next__)
    on_refused: Callable[[int, str], None] | None = None
    on_sealed: list[Callable[[int, int, int, int], None]] = field(default_factory=list)
    chores: Chores = field(default_factory=Chores)
    on_ended: Callable[[list[int]], None] | None = None
    on_left: Callable[[Lease], None] | None = None
    storage: Storage | None = None
    lenders: Lenders | None = None
    on_wanted: Callable[[Model], None] | None = None

    def count(self, name: Count, amount: int = 1) -> None:
        """Add to a counter that operators see."""
        key = name._value_  # a plain string: look-ups of an enum's member take three times as long
        self.counters[key] = self.counters.get(key, 0) + amount
