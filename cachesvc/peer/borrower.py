"""Other daemons as an engine of storage that is only read: what they lend comes into host pages, and is verified there.

Asking borrows: what a peer says to have stays there until it was read. This side reads by itself, so an item that has
ended is never written to again, and no item is late for longer than its deadline.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cachesvc.memory.mapped import yield_to_callers
from cachesvc.model.errors import CacheError, PermissionDenied, Unavailable
from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.numbers.sharing import BACKGROUND, Party
from cachesvc.peer.asking import ASK_SECONDS, BorrowQuestion, candidates, may_have
from cachesvc.peer.fleet.control import Answered, Borrowed, HandshakeFailed, PeerControl
from cachesvc.peer.fleet.guests import Guests
from cachesvc.peer.fleet.health import Peer
from cachesvc.peer.fleet.names import PeerNames
from cachesvc.peer.fleet.news import NewsReader
from cachesvc.peer.loans import HeldLoan, HeldLoans, Wanted
from cachesvc.peer.reading import LoanStream
from cachesvc.peer.wire import STREAMS
from cachesvc.storage.seam import (
    Caps,
    Each,
    Found,
    Item,
    ObjectName,
    Outcome,
    Part,
    Scope,
    Step,
    StoreStatus,
    key_at,
    no_step,
)
from cachesvc.telemetry import events

THREADS = 3 * STREAMS
"""Three large loans are read at once."""
MOST_WAITING = 1024
BEAT_SECONDS = 5.0
LOOK_SECONDS = 1.0
"""Interval at which peers that tell nothing are asked for their digests, seconds."""
CLOSE_SECONDS = 1.0


@dataclass(slots=True)
class BorrowJob:
    """``run`` answers, or ``refuse`` where it is not begun by ``deadline``."""

    run: Callable[[], None]
    refuse: Callable[[], None]
    deadline: float


class PeerStorage:
    """The engine over ``controls``, each of another daemon, the nearest first. ``guests``: peers that requests name.
    ``names``: which stand for further peers. ``clock``: monotonic seconds."""

    kind = "peers"

    def __init__(
        self,
        controls: Sequence[PeerControl],
        clock: Callable[[], float] = time.monotonic,
        guests: Guests | None = None,
        names: PeerNames | None = None,
    ) -> None:
        self.caps = Caps(is_shared=True, survives="daemon", evicts_itself=True)
        self.peers: Sequence[Peer] = [Peer(control, clock) for control in controls]
        self._listed = tuple(self.peers)
        self._names = names
        self.counts: Counter[str] = Counter()
        self.read_bytes = 0
        self._clock = clock
        self._guests = guests
        self._loans = HeldLoans(clock)
        self._news = NewsReader(lambda: self.peers, clock)
        self._jobs: deque[BorrowJob] = deque()
        self._changed = threading.Condition()
        self._is_open = False
        self._telling = threading.local()
        self._threads = [
            threading.Thread(target=self._work, name=f"peer-read-{n}", daemon=True) for n in range(THREADS)
        ]
        self._keeper = threading.Thread(target=self._keep, name="peer-beat", daemon=True)
        self._stopping = threading.Event()

    def start(self) -> None:
        """Begin. Peers that are not there are asked later."""
        self._is_open = True
        for thread in self._threads:
            thread.start()
        self._keeper.start()
        if self._names is not None:
            self._names.told = self._found
            self._names.start()
        self._news.look()

    def _found(self, named: Sequence[Peer]) -> None:
        """Ask these peers too, instead of those that names stood for before."""
        listed = {peer.control.address for peer in self._listed}
        self.peers = (*self._listed, *(peer for peer in named if peer.control.address not in listed))
        self._news.look()

    def register(self, chunk: memoryview) -> None:
        """No-op: any memory will do."""

    def describe(self, scope: Scope, label: str) -> None:
        """No-op: peers know their models by themselves."""

    def expects(self, scope: Scope, keys: bytes, parts: Sequence[Part]) -> int | None:
        """Return None, since peers must be asked, unless none can be, or all were a moment ago."""
        first = keys[:KEY_BYTES]
        held = self._loans.find(ObjectName(scope, first, parts[0])) if first and parts else None
        if held is not None and held.is_expected:
            return None
        return None if first and may_have(self.peers, first) else 0

    def exists(self, names: Sequence[ObjectName], deadline: float, found: Found) -> None:
        """Borrow them of the peer that has most of them."""
        asked = list(names)
        nothing = [False] * len(asked)
        if (held := self._loans.find(asked[0])) is not None and held.is_expected:
            found([name in held.numbers for name in asked])
            return

        def ask() -> None:
            there = nothing
            try:
                there = self._borrow(asked)
            finally:
                found(there)

        self._add(BorrowJob(ask, partial(found, nothing), deadline))

    def expect(
        self,
        address: str,
        scope: Scope,
        keys: bytes,
        parts: Sequence[Part],
        patience: float,
        answered: Answered,
        party: Party = BACKGROUND,
    ) -> None:
        """For ``party``, have the peer at ``address`` lend what it has of packed ``keys``, and wait there for the first
        of them for ``patience`` seconds. ``answered`` is called once, from any thread; what is lent can be read by
        then. Raises PermissionDenied, InvalidRequest."""
        peer = self._peer_at(address, party)
        if not peer.is_usable:
            answered(Unavailable(f"{address}: {peer.reason}"))
            return

        one_by_one = [key_at(keys, at) for at in range(len(keys) // KEY_BYTES)]

        def done(answer: Borrowed | CacheError) -> None:
            self._note_answer(peer, answer)
            if not isinstance(answer, CacheError) and answer.loan is not None:
                self._loans.hold(peer, answer.loan, scope, one_by_one, parts, is_expected=True)
            answered(answer)

        try:
            peer.control.borrow_later(scope, keys, parts, patience, patience + ASK_SECONDS, done)
        except CacheError as error:
            done(error)

    def _peer_at(self, address: str, party: Party) -> Peer:
        """The peer of an address, configured or a guest. Raises PermissionDenied, InvalidRequest."""
        known = next((peer for peer in self.peers if peer.control.address == address), None)
        if known is not None:
            return known
        if self._guests is None:
            raise PermissionDenied(f"{address} is none of this node's peers, and no peer_allow permits others")
        return self._guests.peer_at(address, party)

    def get(self, items: Sequence[Item], deadline: float, each: Each) -> None:
        """Read borrowed objects. All others are a MISS."""
        wanted, missing = self._loans.take(items)
        for index in missing:
            each(index, Outcome.MISS)
        for one in wanted:
            self._add(BorrowJob(partial(self._read, one, deadline, each), partial(self._refuse, one, each), deadline))

    def put(self, items: Sequence[Item], deadline: float, each: Each) -> None:  # noqa: ARG002 - the seam's
        """Peers keep what they compute, and nothing else."""
        for index in range(len(items)):
            each(index, Outcome.BUSY)

    @property
    def is_telling(self) -> bool:
        """True on a thread that is just telling that an object came from a peer."""
        return getattr(self._telling, "peer", None) is not None

    def remove(self, names: Sequence[ObjectName]) -> None:
        """Note that an object from a peer was not what its name says: that peer is not asked for a while."""
        peer: Peer | None = getattr(self._telling, "peer", None)
        if peer is not None and names:
            peer.counts["wrong"] += 1
            peer.failed("an object was not what its name says")
            events.warning("peer_object_wrong", peer=peer.control.address)

    def purge(self, scope: Scope | None, step: Step = no_step) -> int:  # noqa: ARG002 - the seam's
        """Purge nothing: peers own their objects."""
        return 0

    def status(self) -> StoreStatus:
        """Report an empty store."""
        return StoreStatus()

    def attention(self) -> list[str]:
        """Sentences about peers that cannot be asked until an operator does something."""
        return [
            f"nothing is borrowed of the node {each.distrust}; see that peer_tls_certificate, peer_tls_key and "
            "peer_tls_ca of both nodes are current, and that each node trusts who signed the other's"
            for each in self._all_peers()
            if each.distrust
        ]

    def holds(self, name: ObjectName) -> bool:
        """True for borrowed objects."""
        return self._loans.find(name) is not None

    def close(self) -> None:
        """Give back what is borrowed, as far as peers answer in time. Idempotent."""
        with self._changed:
            self._is_open = False
            jobs, self._jobs = self._jobs, deque()
            self._changed.notify_all()
        for job in jobs:
            job.refuse()
        self._stopping.set()
        self._news.close()
        if self._names is not None:
            self._names.close()
        until = time.monotonic() + CLOSE_SECONDS
        for thread in (*self._threads, self._keeper):
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))
        for peer in self._all_peers():
            peer.control.close()

    def _all_peers(self) -> list[Peer]:
        return [*self.peers, *(self._guests.all() if self._guests is not None else ())]

    # -- on threads ----------------------------------------------------------------------------------------------

    def _add(self, job: BorrowJob) -> None:
        with self._changed:
            is_taken = self._is_open and len(self._jobs) < MOST_WAITING
            if is_taken:
                self._jobs.append(job)
                self._changed.notify()
        if not is_taken:
            job.refuse()

    def _work(self) -> None:
        """Root of a thread."""
        yield_to_callers()
        while True:
            with self._changed:
                while not self._jobs and self._is_open:
                    self._changed.wait()
                if not self._is_open:
                    return
                job = self._jobs.popleft()
            try:
                if job.deadline <= self._clock():
                    job.refuse()
                else:
                    job.run()
            except Exception:  # noqa: BLE001 - the root of a thread: the next job is another's
                events.failure("peer_job_broke")

    def _borrow(self, names: list[ObjectName]) -> list[bool]:
        """Borrow names of one scope; return the leading ones that a peer lends from now on."""
        scope = names[0].scope
        keys = list(dict.fromkeys(name.key for name in names))
        parts = list(dict.fromkeys(name.part for name in names))
        chosen = candidates(self.peers, keys)
        lent = BorrowQuestion(self._loans, self._note_answer, scope, keys, parts).ask(chosen)
        return [name in lent for name in names]

    def _note_answer(self, peer: Peer, answer: Borrowed | CacheError) -> None:
        if isinstance(answer, CacheError):
            self._note_refusal(peer, answer)
            return
        peer.worked(answer.epoch)
        peer.counts["lent"] += answer.loan is not None

    def _refuse(self, wanted: Wanted, each: Each) -> None:
        """Refuse from any thread, without waiting for a peer: the next heartbeat gives the loan back."""
        self._loans.begun(wanted.held)
        for index, _ in wanted.items:
            each(index, Outcome.BUSY)
        if self._loans.ended(wanted.held):
            self._loans.leave_unread(wanted.held)

    def _read(self, wanted: Wanted, deadline: float, each: Each) -> None:
        """Read items of a loan, over one stream. Each of them ends, and is not written to any more then."""
        held = wanted.held
        self._loans.begun(held)
        left = deque((index, item, held.numbers[item.name]) for index, item in wanted.items)

        def came(indexes: Sequence[int], size_bytes: int) -> None:
            with self._changed:
                self.counts["read"] += len(indexes)
                self.read_bytes += size_bytes
            for index in indexes:
                each(index, Outcome.OK)

        self._telling.peer = held.peer
        try:
            LoanStream(held.loan, left, deadline, came).read()
        except OSError as error:
            if self._loans.failed(held):
                self._note_failure(held.peer, str(error) or type(error).__name__)
        finally:
            self._telling.peer = None
            for index, _, _ in left:
                each(index, Outcome.FAILED)
        if self._loans.ended(held):
            self._give_back(held)

    def _note_refusal(self, peer: Peer, error: CacheError) -> None:
        """A call to a peer failed."""
        if isinstance(error, HandshakeFailed) and peer.distrusts(str(error)):
            events.warning("peer_distrusted", peer=peer.control.address, reason=str(error))
        self._note_failure(peer, str(error))

    def _note_failure(self, peer: Peer, reason: str) -> None:
        peer.failed(reason)
        events.event("peer_failed", peer=peer.control.address, reason=reason)

    def _give_back(self, held: HeldLoan, seconds: float = ASK_SECONDS) -> None:
        try:
            held.peer.control.give_back(held.loan.lease, seconds)
        except CacheError as error:  # it lapses
            self._note_refusal(held.peer, error)

    # -- beats -----------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Root of the thread that says that what is borrowed is still wanted."""
        yield_to_callers()
        beat_at = self._clock() + BEAT_SECONDS
        while not self._stopping.wait(LOOK_SECONDS):
            try:
                self._news.look()
                if self._clock() >= beat_at:
                    beat_at = self._clock() + BEAT_SECONDS
                    self.beat()
            except Exception:  # noqa: BLE001 - the root of a thread: the next beat may be better
                events.failure("peer_beat_broke")
        until = time.monotonic() + CLOSE_SECONDS
        for held in (*self._loans.take_unread(), *self._loans.waiting()):
            left = until - time.monotonic()
            if left > 0 and held.peer.is_usable:  # else it lapses
                self._give_back(held, min(ASK_SECONDS, left))

    def beat(self) -> None:
        """Send heartbeats for loans that no stream keeps yet, and give back abandoned ones."""
        for held in self._loans.take_unread():
            self._give_back(held)
        wanted: dict[int, tuple[Peer, list[int]]] = {}
        for held in self._loans.waiting():
            wanted.setdefault(id(held.peer), (held.peer, []))[1].append(held.loan.lease)
        for peer, leases in wanted.values():
            try:
                peer.control.beat(leases, ASK_SECONDS)
            except CacheError as error:
                self._note_refusal(peer, error)
