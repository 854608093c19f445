"""Root of the daemon's state: models with their blocks and pools, leases, sequences, processes and tickets."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from cachesvc.ledger.block_ledger import BlockLedger
from cachesvc.ledger.candidates import Ages
from cachesvc.ledger.change_log import Moment
from cachesvc.ledger.page_pool import PagePool, Reservation
from cachesvc.ledger.pins import OperatorPins
from cachesvc.ledger.planner import Evictor
from cachesvc.ledger.reuse_stats import RecentRequests, Reuse
from cachesvc.ledger.sequences import OpenSequence, Prefetch
from cachesvc.ledger.storage_state import LentBlocks, Stored
from cachesvc.ledger.tickets import TicketBook
from cachesvc.ledger.tier_copies import Place
from cachesvc.model.errors import LeaseLost, LedgerBroken, NotFound, Unavailable
from cachesvc.model.layout import Layout
from cachesvc.model.numbers import BACKGROUND, Party
from cachesvc.model.words import PageState


class Shadow(Protocol):
    """Hits of another policy. Counts of blocks: ``asked``, ``hits``, ``shadow_hits``."""

    asked: int
    hits: int
    shadow_hits: int

    def matched(self, keys: bytes, asked: int, hit: int) -> None:
        """A prompt of packed ``keys``, of whose first ``asked`` blocks ``hit`` were a hit."""


@dataclass(slots=True)
class Compared:
    asked: int = 0
    hits: int = 0
    shadow_hits: int = 0

    def add(self, shadow: Shadow) -> None:
        self.asked += shadow.asked
        self.hits += shadow.hits
        self.shadow_hits += shadow.shadow_hits


@dataclass(slots=True)
class Replica:
    """A set of devices (one for each rank) that share one page-id space for each group.

    ``shadow``: gets its hits, where policies are compared. ``failed_drains``: write-backs that failed in a row;
    ``unsaved``: evictions since then that saved nothing. ``gone``: why its memory does not exist any more.
    """

    id: int
    devices: tuple[str, ...]
    place: Place
    device_pages: tuple[int, ...]
    failed_drains: int = 0
    unsaved: int = 0
    shadow: Shadow | None = None
    gone: str = ""


class PendingReplica(NamedTuple):
    """Replica whose device pools are being made; its memory is counted."""

    devices: tuple[str, ...]
    device_pages: tuple[int, ...]


@dataclass(slots=True)
class Model:
    """A namespace: model, layout and tenant, with its blocks and ``replicas``, those whose memory exists.

    ``coming``: replicas whose memory is being made, by the numbers of their places.
    ``lost``: replicas whose memory is gone, until nothing holds or moves anything of theirs any more. ``compared``:
    what the shadows of lost ones had counted.
    ``remembered``: reuse counts of dropped blocks, newest last. ``tenant``: its owner; empty: shared by all tenants
    without a name. ``reserved_pages``: number of first pages of every device pool that the engines own. ``is_salted``:
    its namespace is a secret of the engines that know the salt. ``suspect``: what broke in the midst of a change to it;
    nothing is served of it until it was verified. ``defects``: how often that happened. ``expected``: engines that have
    registered and not opened a lease yet, which they are given time for until ``expected_until``. ``display_name``: for
    operators, the first one that an engine gave. ``weights_version``: the last announcement of an operator. ``party``:
    the process that registered it.
    """

    id: int
    name: str
    layout: Layout
    namespace: bytes
    blocks: BlockLedger
    evictor: Evictor
    host_pages: tuple[int, ...]
    tenant: str = ""
    reserved_pages: int = 0
    is_salted: bool = False
    display_name: str = ""
    weights_version: str = ""
    replicas: list[Replica] = field(default_factory=list)
    coming: dict[int, PendingReplica] = field(default_factory=dict)
    lost: list[Replica] = field(default_factory=list)
    compared: Compared = field(default_factory=Compared)
    remembered: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    hit_blocks: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0, "storage": 0})
    lost_blocks: dict[str, int] = field(default_factory=lambda: {"window": 0, "state": 0})
    reuse: Reuse = field(default_factory=Reuse)
    recent: RecentRequests = field(default_factory=RecentRequests)
    stored: Stored = field(default_factory=Stored)
    lent: list[LentBlocks] = field(default_factory=list)
    pins: OperatorPins = field(default_factory=OperatorPins)
    last_used: float = 0.0
    expected: int = 0
    expected_until: float = 0.0
    suspect: str = ""
    defects: int = 0
    party: Party = BACKGROUND

    @property
    def shown(self) -> str:
        """The name for operators: the display name, or the model's own without one."""
        return self.display_name or self.name

    @property
    def computing(self) -> dict[bytes, int]:
        """Keys that some sequence has declared to be computing, with how many do."""
        return self.blocks.computing

    def distrust(self, why: str) -> None:
        """A change broke half-way: the model is out of service. The first reason is kept."""
        self.suspect = self.suspect or why
        self.defects += 1

    def require_trusted(self) -> None:
        """Raises Unavailable for a model that is out of service."""
        if self.suspect:
            raise Unavailable(
                f"model {self.id} is out of service until it is verified: {self.suspect}; go on without the cache"
            )

    def replica(self, replica_id: int) -> Replica:
        """A replica by number, whose memory exists. Raises NotFound."""
        for replica in self.replicas:
            if replica.id == replica_id:
                return replica
        why = next((lost.gone for lost in self.lost if lost.id == replica_id), "")
        raise NotFound("replica", replica_id, f"{why or f'model {self.id} has {len(self.replicas)}'}; register again")

    def any_replica(self, replica_id: int) -> Replica:
        """A replica by number, lost or not: for what was begun when it was there. Raises LedgerBroken."""
        for replica in (*self.replicas, *self.lost):
            if replica.id == replica_id:
                return replica
        raise LedgerBroken(f"replica {replica_id} of model {self.id} was forgotten, and something of it is left")

    def lose(self, replica: Replica, why: str) -> None:
        """The memory of a replica is gone: no flow sees it from now on."""
        replica.gone = why
        self.replicas.remove(replica)
        self.lost.append(replica)
        self.blocks.lose_place(replica.place)
        if replica.shadow is not None:
            self.compared.add(replica.shadow)

    def forget(self, replica: Replica) -> None:
        """Nothing of a lost replica is left."""
        self.lost.remove(replica)
        self.blocks.index.forget_place(replica.place)


class Ledger:
    """Plain containers and look-ups; the flows decide. ``stamp()`` numbers accesses and never repeats.

    ``moment``: time of journal entries, set by the node. ``coming``: models by namespace whose first replica is being
    made; no flow serves them yet.
    """

    def __init__(self, *, keep_tickets: int = 4096, ticket_numbers: Iterator[int] | None = None) -> None:
        self.models: dict[int, Model] = {}
        self.coming: dict[bytes, Model] = {}
        self.leases: dict[str, Lease] = {}
        self.lost: OrderedDict[str, str] = OrderedDict()
        self.processes: dict[bytes, Process] = {}
        self.tickets = TicketBook(keep_tickets, ticket_numbers)
        self.key_bytes: dict[Party, int] = {}
        """Bytes of the keys that each process's open sequences were matched with."""
        self.draining = False
        self.ages = Ages()
        self.moment = Moment()
        self._stamp = 0

    def stamp(self) -> int:
        self._stamp += 1
        return self._stamp

    def stamps(self, count: int) -> int:
        """The next ``count`` access numbers: the first of them."""
        first = self._stamp + 1
        self._stamp += count
        return first

    def mark_time(self, now: float) -> None:
        """Mark the time (seconds) for the ages of accesses. The ledger decides nothing by it."""
        self.ages.mark(self._stamp, now)

    @property
    def last_stamp(self) -> int:
        return self._stamp

    def model(self, model_id: int) -> Model:
        """A model by number. Raises NotFound."""
        model = self.models.get(model_id)
        if model is None:
            raise NotFound("model", model_id, "register it first")
        return model

    def lease(self, lease_id: str) -> Lease:
        """A live lease. Raises LeaseLost for one that ended, NotFound for one that never was."""
        lease = self.leases.get(lease_id)
        if lease is None:
            why = self.lost.get(lease_id)
            if why is not None:
                raise LeaseLost(lease_id, why)
            raise NotFound("lease", lease_id, "open one first")
        if lease.state is not LeaseState.LIVE:
            raise LeaseLost(lease_id, lease.why)
        return lease

    def hear(self, lease_id: str, tenant: str, now: float) -> Lease | None:
        """A lease of the tenant, live or lost, marked as heard from at ``now``; None for one that is not known, or is
        another tenant's."""
        lease = self.leases.get(lease_id)
        if lease is None or self.models[lease.model].tenant != tenant:
            return None
        if now > lease.last_heard:
            lease.last_heard = now
        return lease

    def remember_lost(self, lease_id: str, why: str, keep: int = 4096) -> None:
        """Keep a lost lease's name so that a late caller gets its cause."""
        self.lost[lease_id] = why
        while len(self.lost) > keep:
            self.lost.popitem(last=False)


MEMBER_BITS = 40


def first_id(member: int) -> int:
    """The ids of a member's requests and sequences follow on this number: those of two never meet."""
    return member << MEMBER_BITS


def member_of(number: int) -> int:
    """Number of the member that an id belongs to."""
    return number >> MEMBER_BITS


class LeaseState(Enum):
    """A lease is live until it is closed, falls silent or loses its processes; then only its quarantine is left."""

    LIVE = "live"
    QUARANTINED = "quarantined"


class LeaseEnd(Enum):
    """Cause of a lease's end, for counting. The values are labels of a metric."""

    CLOSED = "closed"
    SILENT = "silent"
    PROCESS_ENDED = "process_ended"
    OTHER = "other"


@dataclass(slots=True)
class Lease:
    """Lease of one engine on one replica. ``processes`` are the life-socket tokens of all that may write its pages.

    ``instance``: the name by which processes of the user ``uid`` share it, empty for one process alone. ``members``:
    the processes that have opened it, numbered as they came, of which ``joined`` have; the number of a process stands
    in the ids of its requests and sequences (``first_id``). ``stocked_by``: the stock's owner.

    ``prefetches``: those that have not ended. ``stock[g]`` are granted pages that no sequence has taken yet;
    ``grown`` how many blocks its sequences have grown by that the stock has had no pages for yet, ``room`` what is
    kept for it of these. ``quarantine``: pages that wait for the
    processes; ``attached`` the ranks that each process has mapped; ``opened_by`` the opener's token and request_id;
    ``party``: whose share it counts to.
    Once it is lost: ``is_quiet`` where nothing can write its pages any more, ``is_ending`` while what it has is
    being given back. ``blocks_per_sequence``: the limit when it was opened, which it keeps: its engine has checked its
    longest request against it.
    """

    id: str
    engine: str
    model: int
    replica: int
    last_heard: float
    groups: int
    processes: set[bytes] = field(default_factory=set)
    sequences: dict[int, OpenSequence] = field(default_factory=dict)
    prefetches: dict[Prefetch, None] = field(default_factory=dict)
    grown: int = 0
    room: Reservation | None = None
    stock: list[set[int]] = field(default_factory=list)
    state: LeaseState = LeaseState.LIVE
    why: str = ""
    quarantine: list[tuple[int, int]] = field(default_factory=list)
    attached: dict[bytes, set[int]] = field(default_factory=dict)
    opened_by: tuple[bytes, int] = (b"", 0)
    party: Party = BACKGROUND
    instance: str = ""
    uid: int = 0
    members: dict[bytes, int] = field(default_factory=dict)
    joined: int = 0
    stocked_by: int = 0
    is_quiet: bool = False
    is_ending: bool = False
    blocks_per_sequence: int = 65536

    def __post_init__(self) -> None:
        if not self.stock:
            self.stock = [set() for _ in range(self.groups)]

    @property
    def is_unwritten(self) -> bool:
        """True where nothing can write its pages any more. While an instance lives, that is where no process of it has
        them mapped."""
        return self.is_quiet or (self.state is LeaseState.LIVE and not self.attached)

    def may_write(self, sequence: int) -> bool:
        """True where pages of a sequence that has ended may be written yet: the lease is lost, or whose it was has left
        an instance of which others have the pools mapped."""
        has_left = bool(self.instance) and member_of(sequence) not in self.members.values()
        return self.state is LeaseState.QUARANTINED or (has_left and bool(self.attached))

    def heard(self, now: float) -> None:
        """A sign of life. A call that waited brings the time when it began, which moves nothing back."""
        if now > self.last_heard:
            self.last_heard = now

    def grant(self, group: int, pool: PagePool, count: int) -> array[int]:
        """Take free pages into the stock. There are enough."""
        pages = pool.take(count, PageState.PRIVATE)
        self.stock[group].update(pages)
        return pages

    def give_back(self, group: int, pool: PagePool, page: int) -> None:
        self.stock[group].remove(page)
        pool.move(page, PageState.FREE)

    def set_aside(self, group: int, pool: PagePool, pages: Iterable[int]) -> None:
        """Quarantine pages of its own that a process may still write."""
        pages = list(pages)
        pool.move_all(pages, PageState.QUARANTINED)
        self.quarantine += [(group, page) for page in pages]

    def free_quarantine(self, pools: Sequence[PagePool], most: int) -> bool:
        """Free up to ``most`` quarantined pages that no process can write any more. True when none is left."""
        some = self.quarantine[-most:]
        del self.quarantine[-most:]
        for group, pool in enumerate(pools):
            pool.move_all([page for g, page in some if g == group], PageState.FREE)
        return not self.quarantine


@dataclass(slots=True)
class Process:
    """A process that holds a life connection, and the leases whose pages it may write."""

    token: bytes
    pid: int
    uid: int
    gids: frozenset[int] = frozenset()
    leases: set[str] = field(default_factory=set)

    @property
    def party(self) -> Party:
        """Party whose share it counts to: one process may have several life connections."""
        return (self.uid, self.pid) if self.pid else self.token
