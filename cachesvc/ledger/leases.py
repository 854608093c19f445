"""Leases, the processes behind them, and the pages that outlive a lost lease in quarantine."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from cachesvc.ledger.page_pool import PagePool, Reservation
from cachesvc.ledger.sequences import OpenSequence, Prefetch
from cachesvc.model.numbers import BACKGROUND, Party
from cachesvc.model.words import PageState

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
    kept for it of these, ``is_replacing`` while more is evicted in turns. ``quarantine``: pages that wait for the
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
    is_replacing: bool = False
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
