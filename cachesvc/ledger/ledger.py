"""Root of the daemon's state: models with their blocks and pools, leases, sequences, processes and tickets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from cachesvc.ledger.block_ledger import BlockLedger
from cachesvc.ledger.candidates import Ages
from cachesvc.ledger.change_log import Moment
from cachesvc.ledger.leases import Lease, LeaseState, Process
from cachesvc.ledger.pins import OperatorPins
from cachesvc.ledger.planner import Evictor
from cachesvc.ledger.reuse_stats import RecentRequests, Reuse
from cachesvc.ledger.storage_state import LentBlocks, Stored
from cachesvc.ledger.tickets import TicketBook
from cachesvc.ledger.tier_copies import Place
from cachesvc.model.errors import LeaseLost, LedgerBroken, NotFound, Unavailable
from cachesvc.model.layout import Layout
from cachesvc.model.numbers import BACKGROUND, Party


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
    ``unsaved``: evictions since then that saved nothing. ``gone``: why its memory does not exist any more;
    ``is_emptying`` while what was there is being forgotten. ``is_making_room``: ahead of later requests.
    """

    id: int
    devices: tuple[str, ...]
    place: Place
    device_pages: tuple[int, ...]
    failed_drains: int = 0
    unsaved: int = 0
    shadow: Shadow | None = None
    gone: str = ""
    is_emptying: bool = False
    is_making_room: bool = False


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
    nothing is served of it until it was verified. ``defects``: how often that happened. ``is_pruning``: rows that only
    had lost children are being forgotten. ``expected``: engines that have registered and not opened a lease yet, which
    they are given time for until ``expected_until``. ``display_name``: for operators, the first one that an engine
    gave. ``weights_version``: the last announcement of an operator. ``party``: the process that registered it.
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
    is_pruning: bool = False
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
