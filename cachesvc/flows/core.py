"""Common state of all flows: the ledger, the rules, the limits, and the seams to movers and storage."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from cachesvc.ledger.ledger import Lease, LeaseState, Ledger, Model, Replica
from cachesvc.ledger.sequence_state import AWAY, ENDED, FAILED, LEAVING, ON_DEVICE, RETURNING
from cachesvc.ledger.sequences import OpenSequence
from cachesvc.model.answers import Wait
from cachesvc.model.errors import CacheError, Conflict, LoadFailed, NotFound
from cachesvc.model.numbers import BACKGROUND, Party, Rounds
from cachesvc.model.words import TimelineSlot, Transfer
from cachesvc.policy.eviction import Eviction, WriteRule
from cachesvc.storage.seam import Use

# Work budgets per event-loop slice, so that no caller waits for another's long flow.
#
# A call's flow that has more to do than a turn answers ``TURN`` and is run again, with a new ``Call``, once others had
# theirs. What it has done until then is a legal state of the ledger for all other calls, and its next run finds it;
# pages that it has made free are kept for it by a reservation. What no call waits for (a transfer that landed, a lease
# that is lost) goes on as a background task.

TURN = Wait(())
LAST_TURNS = Wait((), goes_on=True)
"""A part is done for good: from here on the flow waits for its turns alone, raises nothing, and ends."""
LONG_TURNS = 4
"""Turns above which a call that cannot be undone half-way lines up behind the long calls of its process."""


class Turns(NamedTuple):
    """Most work of one turn: some 0.3 ms (2026-11-22, Python 3.11 on a crowded machine).

    ``evicted``: blocks that are dropped, or begin to be written back, up to 9 us each; some hundreds where they go in
    long runs that the host has, of a layout without windows. ``landed``: blocks whose transfer has ended, 3 us each.
    ``drained``: blocks that go once they are written back, 8 us each. ``holds``: sequences and prefetches of a lost
    lease that end. ``pages``: that are taken or given back by themselves, 0.1 us each in long runs and more than 1 us
    each alone. ``sealed``: blocks that are published, 2.4 us each. ``forgotten``: keys of a model that is gone.
    ``loaded``: blocks of one load, 0.1 us each in single pages.
    """

    evicted: int = 32
    landed: int = 48
    drained: int = 12
    holds: int = 32
    pages: int = 256
    sealed: int = 64
    forgotten: int = 4096
    loaded: int = 8192


Answer = TypeVar("Answer")

NO_MODEL = 0
"""Model of a background task that frees no pages and leaves nothing half-done."""


class Chore(NamedTuple):
    """Background work of a model. ``go_on`` does a turn of it and returns whether it is over. ``gives_back``: it may
    free pages that eviction could not, so that a call that finds too few waits for it. ``party``: the process that has
    caused it, where one has."""

    model: int
    go_on: Callable[[], bool]
    gives_back: bool = True
    party: Party = BACKGROUND


def tidy(chores: Rounds[Party, Chore]) -> None:
    """Do a turn of the chore that is next; what is left of it waits again. One that raises is not gone on with."""
    chore = chores.take()
    if not chore.go_on():
        chores.add(chore.party, chore)


def tidy_all(core: Core) -> None:
    """Do all background work, where a long call is acceptable."""
    while core.chores:
        tidy(core.chores)


def next_slice(slices: Iterator[None]) -> bool:
    """Do the next slice of work that is written as a generator; True when it has ended."""
    return next(slices, slices) is slices


class Slices(Generic[Answer]):
    """Progress of a flow that may take several slices: made for the call, handed to each of its runs.

    The flow yields what it waits for (``Wait``), and gets the call anew each time.
    """

    def __init__(self) -> None:
        self._flow: Generator[Wait, Call, Answer] | None = None

    @property
    def has_begun(self) -> bool:
        return self._flow is not None

    def begin(self, flow: Generator[Wait, Call, Answer]) -> Answer | Wait:
        """Run a flow up to its first wait, or to its answer. Raises what it raises."""
        self._flow = flow
        return self._step(partial(next, flow))

    def go_on(self, call: Call) -> Answer | Wait:
        """Run the flow that has begun up to its next wait, or to its answer. Raises what it raises."""
        assert self._flow is not None
        return self._step(partial(self._flow.send, call))

    def _step(self, step: Callable[[], Wait]) -> Answer | Wait:
        try:
            return step()
        except StopIteration as ended:
            answer: Answer = ended.value
            return answer


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

    def used(self, model: Model, uses: Sequence[Use]) -> None:
        """Note uses of blocks in memory: their copies below are as recently used."""

    def fetch(self, model: Model, ticket: int, keys: bytes, pages: Sequence[Sequence[int]], parent: bytes) -> list[int]:
        """Bring blocks to host pages. ``keys``: packed, root first; ``pages[g]``: a page for each, or NO_PAGE.
        ``parent``: the key of the block above the first; empty for none. Returns of each block how many objects come.
        Each is reported once, or LATE and then None."""

    def lagged(self) -> None:
        """Note that a call has waited for the longest time in vain."""

    def room(self) -> int:
        """Bytes that may be written now."""

    def keep(self, model: Model, key: bytes, pages: Sequence[int], parent: bytes) -> int:
        """Write a block from its host pages: of each group one, or NO_PAGE. ``parent``: as of ``fetch``. Returns how
        many objects are in flight. Each is reported once, or LATE and then None."""

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
        self, model: Model, party: Party, keys: bytes, peer: str, seconds: float, on_promise: Callable[[Promise], None]
    ) -> str:
        """For ``party``, ask the node at ``peer`` to lend what it has of packed ``keys``, and to wait for the first for
        ``seconds``. ``on_promise`` is called later, from the loop; a fetch then finds what is lent.
        Returns why the node is not asked."""

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
    ``busy``: keys of those that are queued once (``later_once``). ``on_ended`` is called with tickets that end by one.
    ``on_left``: called with each lease of a process that has ended, while it holds what the process held. ``storage``:
    None where none is configured; ``on_wanted``: called when blocks of a model wait to be written to it.
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
    chores: Rounds[Party, Chore] = field(default_factory=Rounds)
    busy: set[tuple[object, ...]] = field(default_factory=set)
    on_ended: Callable[[list[int]], None] | None = None
    on_left: Callable[[Lease], None] | None = None
    storage: Storage | None = None
    lenders: Lenders | None = None
    on_wanted: Callable[[Model], None] | None = None

    def count(self, name: Count, amount: int = 1) -> None:
        """Add to a counter that operators see."""
        key = name._value_  # a plain string: look-ups of an enum's member take three times as long
        self.counters[key] = self.counters.get(key, 0) + amount

    def later(
        self, model: int, go_on: Callable[[], bool], *, gives_back: bool = True, party: Party = BACKGROUND
    ) -> None:
        """Queue background work behind that of its party, one turn in two of which is another party's."""
        self.chores.add(party, Chore(model, go_on, gives_back, party))

    def later_once(
        self, key: tuple[object, ...], model: int, go_on: Callable[[], bool], party: Party = BACKGROUND
    ) -> None:
        """Queue background work that gives no call pages, unless work of the same ``key`` is queued."""
        if key not in self.busy:
            self.busy.add(key)
            self.later(model, partial(self._once, key, go_on), gives_back=False, party=party)

    def _once(self, key: tuple[object, ...], go_on: Callable[[], bool]) -> bool:
        self.busy.discard(key)  # first: a defect in what follows ends it, and not for good
        if go_on():
            return True
        self.busy.add(key)
        return False

    def begin(self, model: int, go_on: Callable[[], bool], *, at_once: bool = True, party: Party = BACKGROUND) -> None:
        """Do a turn of it now, unless the caller has had one (not ``at_once``), and leave the rest for later."""
        if not at_once or not go_on():
            self.later(model, go_on, party=party)


class Count(StrEnum):
    """Counters of events since the daemon's start."""

    MATCH_REQUESTS = "match_requests"
    MATCH_BLOCKS = "match_blocks"
    PUBLISHED_BLOCKS = "published_blocks"
    DUPLICATE_BLOCKS = "duplicate_blocks"
    EVICTIONS = "evictions"
    HOST_EVICTIONS = "host_evictions"
    STOCK_SHORT = "stock_short"
    TICKETS_DONE = "tickets_done"
    TICKETS_FAILED = "tickets_failed"
    H2D_BYTES = "h2d_bytes"
    D2H_BYTES = "d2h_bytes"
    P2P_BYTES = "p2p_bytes"
    PEER_LOADS = "peer_loads"
    PEER_BLOCKS = "peer_blocks"
    RELAYED_BLOCKS = "relayed_blocks"
    STORAGE_FETCHES = "storage_fetches"
    STORAGE_FETCHED_BLOCKS = "storage_fetched_blocks"
    STORAGE_KEPT_BLOCKS = "storage_kept_blocks"
    STORAGE_NOT_KEPT_BLOCKS = "storage_not_kept_blocks"
    EXPECTATIONS = "expectations"
    EXPECTATIONS_REFUSED = "expectations_refused"
    EXPECTATIONS_ENDED_ARRIVED = "expectations_ended_arrived"
    EXPECTATIONS_ENDED_SILENT = "expectations_ended_silent"
    EXPECTATIONS_ENDED_ABSENT = "expectations_ended_absent"
    EXPECTATIONS_ENDED_GIVEN_UP = "expectations_ended_given_up"
    EXPECTATIONS_ENDED_UNREACHABLE = "expectations_ended_unreachable"
    EXPECTATIONS_ENDED_OTHER = "expectations_ended_other"
    EXPECTED_BLOCKS = "expected_blocks"
    LENT_BLOCKS = "lent_blocks"
    LENT_BLOCKS_BACK = "lent_blocks_back"
    PINS_ENDED_EARLY = "pins_ended_early"
    LEASES_LOST = "leases_lost"
    LEASES_ENDED_CLOSED = "leases_ended_closed"
    LEASES_ENDED_SILENT = "leases_ended_silent"
    LEASES_ENDED_PROCESS_ENDED = "leases_ended_process_ended"
    LEASES_ENDED_OTHER = "leases_ended_other"
    MODELS_DISMISSED = "models_dismissed"
    WRITE_BACK_PAUSES = "write_back_pauses"
    MODELS_DISTRUSTED = "models_distrusted"
    CALLS_BROKEN = "calls_broken"
    CHORES_REFUSED = "chores_refused"
    KEYS_MISPLACED = "keys_misplaced"
    EVENT_SUBSCRIPTIONS = "event_subscriptions"
    EVENT_SUBSCRIBERS_CUT_OFF = "event_subscribers_cut_off"


EXPECTATIONS_ENDED = {
    "arrived": Count.EXPECTATIONS_ENDED_ARRIVED,
    "silent": Count.EXPECTATIONS_ENDED_SILENT,
    "absent": Count.EXPECTATIONS_ENDED_ABSENT,
    "given_up": Count.EXPECTATIONS_ENDED_GIVEN_UP,
    "unreachable": Count.EXPECTATIONS_ENDED_UNREACHABLE,
    "restarted": Count.EXPECTATIONS_ENDED_UNREACHABLE,
}
"""Counter of each end of an expectation; others count as OTHER."""


class Call(NamedTuple):
    """Made once when a call comes, and anew for each further run of its flow: its lease may be lost by then. Flows look
    nothing up again. ``now``: seconds, monotonic."""

    lease: Lease
    model: Model
    replica: Replica
    now: float

    def known_sequence(self, sequence_id: int) -> OpenSequence:
        """A sequence of the lease, failed or not. Raises NotFound."""
        sequence = self.lease.sequences.get(sequence_id)
        if sequence is None or sequence.state is ENDED:
            raise no_sequence(sequence_id)
        return sequence

    def sequence(self, sequence_id: int) -> OpenSequence:
        """A sequence of the lease that may go on. Raises NotFound, LoadFailed."""
        sequence = self.known_sequence(sequence_id)
        if sequence.state is FAILED:
            raise refusal_of(sequence)
        return sequence


def call_of(ledger: Ledger, lease: Lease, now: float) -> Call:
    """The call of a lease. Raises LeaseLost for a lease that ended, Unavailable for a model that is out of service,
    NotFound for a replica whose memory is gone."""
    if lease.state is not LeaseState.LIVE:
        lease = ledger.lease(lease.id)
    model = ledger.models[lease.model]
    if model.suspect:
        model.require_trusted()
    for replica in model.replicas:
        if replica.id == lease.replica:
            return Call(lease, model, replica, now)
    return Call(lease, model, model.replica(lease.replica), now)


def resolve(ledger: Ledger, lease_id: str, now: float) -> Call:
    """The call of a lease by its id, which is a sign of life: for callers without a dispatcher, as simulations are.

    Raises as ``call_of``, and NotFound for a lease that never was."""
    lease = ledger.lease(lease_id)
    lease.heard(now)
    return call_of(ledger, lease, now)


def require_active(sequence: OpenSequence) -> None:
    """Raises Conflict for a sequence that is swapped out or on its way, LoadFailed for one that can only be released.
    One whose hit is being loaded passes: it may grow."""
    if sequence.state not in ON_DEVICE:
        raise refusal_of(sequence)


def no_sequence(number: int) -> NotFound:
    """Error for a sequence that the lease does not have."""
    return NotFound("sequence", number, "it was released, or never matched under this lease")


def refusal_of(sequence: OpenSequence) -> CacheError:
    """Error for what cannot be done with a sequence in its state."""
    number, state = sequence.id, sequence.state
    if state is FAILED:
        return LoadFailed(f"sequence {number}: {sequence.failed}; release it, match again and recompute")
    if state is LEAVING or state is RETURNING:
        return Conflict(f"sequence {number} is being swapped by ticket {sequence.swap_ticket}; wait for it")
    if state is AWAY:
        return Conflict(f"sequence {number} is swapped out; swap it in first")
    if state is ENDED:
        return no_sequence(number)
    return Conflict(f"sequence {number} is on the device already")
