"""Other daemons as an engine of storage that is only read: what they lend comes into host pages, and is verified there.

Asking borrows: what a peer says to have stays there until it was read. This side reads by itself, so an item that has
ended is never written to again, and no item is late for longer than its deadline.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

from cachesvc.memory.extents import yield_to_callers
from cachesvc.model.errors import CacheError, PermissionDenied
from cachesvc.model.numbers import BACKGROUND, Party
from cachesvc.model.words import KEY_BYTES
from cachesvc.peer.fleet import (
    Answered,
    Borrowed,
    Done,
    Guests,
    HandshakeFailed,
    Loan,
    NewsReader,
    Peer,
    PeerAbsent,
    PeerControl,
    PeerNames,
    PeerPaused,
    PeerRefused,
    words_of,
)
from cachesvc.peer.lender import HeldLoan, HeldLoans, Wanted
from cachesvc.peer.reading import LoanStream, Readers, ReadJob
from cachesvc.storage.seam import (
    Caps,
    Check,
    Each,
    Found,
    Item,
    ObjectName,
    Outcome,
    Part,
    Scope,
    StorageBackend,
    key_at,
)
from cachesvc.telemetry import events

MOST_ASKED = 2
"""Peers that one call asks at most."""
FEW_PEERS = 2
"""So few peers are asked whatever their digests say: what was sealed a moment ago is in none."""
HEDGE_SECONDS = 0.1
"""Time after which the next peer is asked too, seconds."""
ASK_SECONDS = 0.5
"""Time limit of an answer without bytes, seconds."""


def may_have(peers: Sequence[Peer], key: bytes) -> bool:
    """True where one of the peers may be asked for a block."""
    words = words_of(key)
    are_few, size, at, bit = len(peers) <= FEW_PEERS, 0, 0, 0
    for peer in peers:
        bits = peer.digest.bits
        if bits and not are_few:
            if len(bits) != size:  # few sizes differ
                size = len(bits)
                number = words[0] & (8 * size - 1)
                at, bit = number >> 3, 1 << (number & 7)
            if not bits[at] & bit or not peer.digest.has(words):  # most end here, without a call: every Match comes by
                continue
        if peer.is_up and not peer.lacks(key):
            return True
    return False


def candidates(peers: Sequence[Peer], keys: Sequence[bytes]) -> list[Peer]:
    """Peers to ask for the first of some chained keys, those that have most of them first. One that did not answer last
    is none of them: probes find out when it is back, and no request waits for it."""
    words = words_of(keys[0])
    told, untold, others = list[tuple[int, int, Peer]](), list[Peer](), list[Peer]()
    for at, peer in enumerate(peers):
        is_known = peer.digest.is_known
        has_first = is_known and peer.digest.has(words)
        if not peer.is_up or peer.lacks(keys[0]):
            continue
        if has_first:
            told.append((-peer.digest.reach(keys), at, peer))
        else:
            (others if is_known else untold).append(peer)
    chosen = [peer for _, _, peer in sorted(told, key=lambda each: each[:2])] + untold
    return [*chosen, *others] if len(peers) <= FEW_PEERS else chosen[:MOST_ASKED]


class BorrowQuestion:
    """One question for ``parts`` of chained ``keys``. ``note``: gets each answer, and when it was asked for, from any
    thread."""

    def __init__(
        self,
        loans: HeldLoans,
        note: Callable[[Peer, float, Borrowed | CacheError], None],
        scope: Scope,
        keys: Sequence[bytes],
        parts: Sequence[Part],
    ) -> None:
        self._loans = loans
        self._note = note
        self._scope = scope
        self._keys = keys
        self._parts = parts
        self._answers: queue.SimpleQueue[tuple[Peer, Borrowed | CacheError]] = queue.SimpleQueue()
        self._is_over = False
        self._lock = threading.Lock()

    def ask(self, peers: Sequence[Peer]) -> dict[ObjectName, int]:
        """Hold what the first peer lends that has any; return it."""
        left, under_way = list(peers), 0
        try:
            while left or under_way:
                if left:
                    self._send(left.pop(0))
                    under_way += 1
                try:
                    peer, answer = self._answers.get(timeout=HEDGE_SECONDS if left else 2 * ASK_SECONDS)
                except queue.Empty:
                    if not left:
                        break
                    continue
                under_way -= 1
                if isinstance(answer, CacheError):
                    continue
                if answer.loan is not None:
                    return self._loans.hold(peer, answer.loan, self._scope, self._keys, self._parts)
                peer.had_nothing(self._keys[0])
            return {}
        finally:
            self._end()

    def _send(self, peer: Peer) -> None:
        told = partial(self._told, peer, self._loans.now())
        try:
            peer.control.borrow_later(self._scope, b"".join(self._keys), self._parts, 0.0, ASK_SECONDS, told)
        except CacheError as error:
            told(error)

    def _told(self, peer: Peer, began: float, answer: Borrowed | CacheError) -> None:
        self._note(peer, began, answer)
        with self._lock:
            if not self._is_over:
                self._answers.put((peer, answer))
                return
        self._give_back(peer, answer)

    def _end(self) -> None:
        """End the question: later loans are given back."""
        with self._lock:
            self._is_over = True
        while not self._answers.empty():
            self._give_back(*self._answers.get())

    def _give_back(self, peer: Peer, answer: Borrowed | CacheError) -> None:
        if not isinstance(answer, CacheError) and answer.loan is not None:
            self._loans.leave_unread(HeldLoan(peer, answer.loan, {}, 0.0))


BEAT_SECONDS = 5.0
LOOK_SECONDS = 1.0
"""Interval at which peers that tell nothing are asked for their digests, seconds."""
PROBE_SECONDS = 0.25
"""Interval at which peers that do not answer may be probed, seconds."""
CLOSE_SECONDS = 1.0
ATTENTION_SECONDS = 60.0
"""Time without an answer after which a peer of the operator's list needs attention, seconds."""


class PeerStorage(StorageBackend):
    """The engine over ``controls``, each of another daemon, the nearest first. ``guests``: peers that requests name.
    ``names``: which stand for further peers. ``own``: addresses of this daemon, which does not ask itself.
    ``clock``: monotonic seconds. ``own_epoch``: of this daemon's life; 0 until it is known."""

    kind = "peers"

    def __init__(
        self,
        controls: Sequence[PeerControl],
        clock: Callable[[], float] = time.monotonic,
        guests: Guests | None = None,
        names: PeerNames | None = None,
        own: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self.caps = Caps(is_shared=True, survives="daemon", evicts_itself=True, keeps_health=True)
        self.peers: Sequence[Peer] = [Peer(control, clock) for control in controls]
        self._listed = tuple(self.peers)
        self._names = names
        self.counts: Counter[str] = Counter()
        self.read_bytes = 0
        self._clock = clock
        self._guests = guests
        self._loans = HeldLoans(clock)
        self._news = NewsReader(lambda: self.peers, clock)
        self._own = own
        self.own_epoch = 0
        self._readers = Readers(clock)
        self._counting = threading.Lock()
        self._ended = threading.Condition()
        self._under_way = 0
        self._telling = threading.local()
        self._keeper = threading.Thread(target=self._keep, name="peer-beat", daemon=True)
        self._stopping = threading.Event()

    def start(self) -> None:
        """Begin. Peers that are not there are asked later."""
        self._readers.start()
        self._leave_out_self()
        self.probe()
        self._keeper.start()
        if self._names is not None:
            self._names.told = self._found
            self._names.start()
        self._news.look()

    def _found(self, named: Sequence[Peer]) -> None:
        """Ask these peers too, instead of those that names stood for before."""
        listed = {peer.control.address for peer in self._listed}
        self.peers = (*self._listed, *(peer for peer in named if peer.control.address not in listed))
        self._leave_out_self()
        self.probe()
        self._news.look()

    def _leave_out_self(self) -> None:
        own = set(self._own())
        for peer in self.peers:
            peer.is_self |= peer.control.address in own

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

        self._readers.add(ReadJob(None, None, ask, partial(found, nothing), deadline))

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
        then. A peer that failed a moment ago is not asked: PeerPaused. Raises PermissionDenied, InvalidRequest."""
        peer = self._peer_at(address, party)
        if left := peer.pause_left:
            paused = PeerPaused(f"{address}: {peer.reason}")
            paused.seconds = left
            answered(paused)
            return

        one_by_one = [key_at(keys, at) for at in range(len(keys) // KEY_BYTES)]

        began = self._clock()

        def done(answer: Borrowed | CacheError) -> None:
            self._note_answer(peer, began, answer)
            if not isinstance(answer, CacheError) and answer.loan is not None:
                self._loans.hold(peer, answer.loan, scope, one_by_one, parts, is_expected=True)
            answered(answer)

        try:
            peer.control.borrow_later(scope, keys, parts, patience, patience + ASK_SECONDS, done)
        except CacheError as error:
            done(error)

    def drop(self, names: Sequence[ObjectName]) -> None:
        """Read no more of the loans that were asked for ahead and have these objects; what is left of them fails."""
        self._loans.drop(names)

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
            job = ReadJob(one.held.peer, one.held, lambda: None, partial(self._refuse, one, each), deadline)
            job.run = partial(self._read, one, job, each)
            self._readers.add(job)

    def put(self, items: Sequence[Item], deadline: float, each: Each) -> None:  # noqa: ARG002 - the seam's
        """Peers keep what they compute, and nothing else."""
        for index in range(len(items)):
            each(index, Outcome.BUSY)

    def remove(self, names: Sequence[ObjectName]) -> None:
        """Note that an object of a loan that this thread reads was not what its name says: its peer is not asked for a
        while."""
        held: HeldLoan | None = getattr(self._telling, "held", None)
        if held is None or not names:
            return
        peer = held.peer
        peer.counts["wrong"] += 1
        if self._loans.failed(held):
            peer.did_not_send("an object was not what its name says", held.since)
            events.warning("peer_object_wrong", peer=peer.control.address)

    def doubt(self, names: Sequence[ObjectName], check: Check) -> None:  # noqa: ARG002 - the seam's
        """Note it as ``remove`` does: a peer's object is its own."""
        self.remove(names)

    def attention(self) -> list[str]:
        """Sentences about peers that cannot be asked until an operator does something."""
        late = self._clock() - ATTENTION_SECONDS
        down = [peer for peer in self.peers if peer.down_since is not None and peer.down_since <= late]
        silent = [each for each in down if not each.distrust]
        full = [peer.control.address for peer in self.peers if peer.digest.is_saturated]
        return [
            *(
                f"{len(silent)} of {len(self.peers)} peers have not answered for {ATTENTION_SECONDS:.0f} s or longer, "
                f"and nothing is borrowed of these; see that their daemons run, or take them off peers. The first: "
                f"{each.reason}"
                for each in silent[:1]
            ),
            *(
                f"the digests of {len(full)} of {len(self.peers)} peers say that these have every block, so they are "
                f"asked last; see that their daemons are of this release. The first: {each}"
                for each in full[:1]
            ),
            *(
                f"nothing is borrowed of the node {each.distrust}; see that peer_tls_certificate, peer_tls_key and "
                "peer_tls_ca of both nodes are current, and that each node trusts who signed the other's"
                for each in self._all_peers()
                if each.distrust
            ),
        ]

    def holds(self, name: ObjectName) -> bool:
        return self._loans.find(name) is not None

    def close(self) -> None:
        """Give back what is borrowed, as far as peers answer in time. Idempotent."""
        until = time.monotonic() + CLOSE_SECONDS
        self._stopping.set()
        self._news.close()
        if self._names is not None:
            self._names.close()
        self._readers.close(until)
        if self._keeper.is_alive():
            self._keeper.join(max(0.0, until - time.monotonic()))
        for peer in self._all_peers():
            peer.control.close()

    def _all_peers(self) -> list[Peer]:
        return [*self.peers, *(self._guests.all() if self._guests is not None else ())]

    # -- on threads ----------------------------------------------------------------------------------------------

    def _borrow(self, names: list[ObjectName]) -> list[bool]:
        """Borrow names of one scope; return the leading ones that a peer lends from now on."""
        scope = names[0].scope
        keys = list(dict.fromkeys(name.key for name in names))
        parts = list(dict.fromkeys(name.part for name in names))
        chosen = candidates(self.peers, keys)
        lent = BorrowQuestion(self._loans, self._note_answer, scope, keys, parts).ask(chosen)
        return [name in lent for name in names]

    def _note_answer(self, peer: Peer, began: float, answer: Borrowed | CacheError) -> None:
        if isinstance(answer, CacheError):
            self._note_refusal(peer, began, answer)
            return
        peer.is_self |= bool(answer.epoch) and answer.epoch == self.own_epoch
        peer.answered(answer.epoch)
        peer.counts["lent"] += answer.loan is not None

    def _refuse(self, wanted: Wanted, each: Each) -> None:
        """Refuse from any thread, without waiting for a peer: the next heartbeat gives the loan back."""
        self._loans.begun(wanted.held)
        for index, _ in wanted.items:
            each(index, Outcome.BUSY)
        if self._loans.ended(wanted.held):
            self._loans.leave_unread(wanted.held)

    def _read(self, wanted: Wanted, job: ReadJob, each: Each) -> None:
        """Read items of a loan, over one stream. Each of them ends, and is not written to any more then."""
        held = wanted.held
        self._loans.begun(held)
        left = deque((index, item, held.numbers[item.name]) for index, item in wanted.items)

        def came(indexes: Sequence[int], size_bytes: int) -> None:
            job.heard_at = self._clock()
            with self._counting:
                self.counts["read"] += len(indexes)
                self.read_bytes += size_bytes
            for index in indexes:
                each(index, Outcome.LENT)

        self._telling.held = held
        try:
            LoanStream(held.loan, left, job.deadline, came, lambda: not held.is_unwanted).read()
        except OSError as error:
            if self._loans.failed(held):
                reason = f"{held.peer.control.address}: {str(error) or type(error).__name__}"
                self._note_failure(held.peer, reason, held.peer.did_not_send(reason, held.since))
        finally:
            self._telling.held = None
            for index, _, _ in left:
                each(index, Outcome.FAILED)
        if self._loans.ended(held):
            if not held.has_failed:
                held.peer.sent()
            self._give_back(held)

    def _note_refusal(self, peer: Peer, began: float, error: CacheError) -> None:
        """Note that a call to a peer was refused, or had no answer."""
        if isinstance(error, PeerRefused):
            peer.counts["refused"] += 1
            peer.answered()
            return
        if isinstance(error, HandshakeFailed) and peer.distrusts(str(error)):
            events.warning("peer_distrusted", peer=peer.control.address, reason=str(error))
        self._note_failure(
            peer, str(error), peer.did_not_answer(str(error), began, is_absent=isinstance(error, PeerAbsent))
        )

    def _note_failure(self, peer: Peer, reason: str, counts: bool) -> None:
        if counts:
            events.event("peer_failed", peer=peer.control.address, reason=reason)

    def _give_back(self, held: HeldLoan, seconds: float = ASK_SECONDS) -> None:
        """Give back a loan, without waiting. Of a peer that does not answer, it lapses."""
        if held.peer.answers:
            self._call(held.peer, partial(held.peer.control.give_back_later, held.loan, seconds))

    def _call(self, peer: Peer, call: Callable[[Done], None]) -> None:
        """Begin a call that nothing waits for, and note how the peer answers."""
        began = self._clock()

        def done(error: CacheError | None) -> None:
            with self._ended:
                self._under_way -= 1
                self._ended.notify_all()
            if error is None:
                peer.answered()
            else:
                self._note_refusal(peer, began, error)

        with self._ended:
            self._under_way += 1
        try:
            call(done)
        except CacheError as error:
            done(error)

    # -- beats -----------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Root of the thread that says that what is borrowed is still wanted. It waits for no peer."""
        yield_to_callers()
        look_at = self._clock() + LOOK_SECONDS
        beat_at = self._clock() + BEAT_SECONDS
        while not self._stopping.wait(PROBE_SECONDS):
            try:
                self.probe()
                if self._clock() >= look_at:
                    look_at = self._clock() + LOOK_SECONDS
                    self._news.look()
                if self._clock() >= beat_at:
                    beat_at = self._clock() + BEAT_SECONDS
                    self.beat()
            except Exception:  # noqa: BLE001 - the root of a thread: the next beat may be better
                events.failure("peer_beat_broke")
        for held in (*self._loans.take_unread(), *self._loans.waiting()):
            self._give_back(held)
        with self._ended:
            self._ended.wait_for(lambda: not self._under_way, CLOSE_SECONDS)

    def beat(self) -> None:
        """Send heartbeats for loans that no stream keeps yet, and give back abandoned ones."""
        for held in self._loans.take_unread():
            self._give_back(held)
        wanted: dict[int, tuple[Peer, list[Loan]]] = {}
        for held in sorted(self._loans.waiting(), key=lambda each: each.since):
            wanted.setdefault(id(held.peer), (held.peer, []))[1].append(held.loan)
        for peer, loans in wanted.values():
            self._call(peer, partial(peer.control.beat_later, loans, ASK_SECONDS))

    def probe(self) -> None:
        """Try peers that did not answer, and new ones: no request has to find out whether they do."""
        for peer in self._all_peers():
            if peer.wants_probe():
                self._call(peer, partial(peer.control.beat_later, (), ASK_SECONDS))
