"""Other daemons as an engine of storage that is only read: what they lend comes into host pages, and is verified there.

Asking borrows: what a peer says to have stays there until it was read. This side reads by itself, so an item that has
ended is never written to again, and no item is late for longer than its deadline.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from cachesvc.memory.extents import yield_to_callers
from cachesvc.model.errors import CacheError, PermissionDenied
from cachesvc.model.numbers import BACKGROUND, Party
from cachesvc.model.words import KEY_BYTES
from cachesvc.peer.fleet import (
    Answered,
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
from cachesvc.peer.reading import STREAMS, LoanStream, Readers, ReadJob
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
    reporting, silent, others = list[tuple[int, int, Peer]](), list[Peer](), list[Peer]()
    for at, peer in enumerate(peers):
        is_known = peer.digest.is_known
        has_first = is_known and peer.digest.has(words)
        if not peer.is_up or peer.lacks(keys[0]):
            continue
        if has_first:
            reporting.append((-peer.digest.reach(keys), at, peer))
        else:
            (others if is_known else silent).append(peer)
    chosen = [peer for _, _, peer in sorted(reporting, key=lambda each: each[:2])] + silent
    return [*chosen, *others] if len(peers) <= FEW_PEERS else chosen[:MOST_ASKED]


STREAM_BYTES = 4 << 20
"""Least bytes of a stream: opening one for fewer costs more than it saves."""
UNUSED_SECONDS = 10.0
"""Time after which unread loans are given back, seconds."""


Wanted = list[tuple[int, Item]]
"""Items of one call, with their indexes, that one stream of a peer brings."""


def _by_stream(loan: Loan, items: Wanted) -> list[Wanted]:
    """Deal the items to as many streams as are worth it, in turn: what comes first is wanted first."""
    size_bytes = sum(item.payload_bytes for _, item in items)
    streams = max(1, min(loan.streams, STREAMS, len(items), size_bytes // STREAM_BYTES))
    loan.readers = loan.waiting = streams
    return [items[at::streams] for at in range(streams)]


class HeldLoans:
    """Loans that are not read yet, and those that wait for streams. Any thread. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_name: dict[ObjectName, Loan] = {}
        self._unread: list[Loan] = []
        self._read: set[Loan] = set()
        self._lock = threading.Lock()

    def find(self, name: ObjectName) -> Loan | None:
        return self._by_name.get(name)

    def hold(
        self, loan: Loan, scope: Scope, keys: Sequence[bytes], parts: Sequence[Part], *, is_expected: bool = False
    ) -> dict[ObjectName, int]:
        """Hold a loan of ``parts`` of each of ``keys``; return what it lends, with the numbers on its stream.
        One that lends none of them is given back."""
        names = (ObjectName(scope, key, part) for key in keys for part in parts)
        lent = {name: at for at, (name, is_there) in enumerate(zip(names, loan.lent, strict=False)) if is_there}
        loan.numbers, loan.since, loan.is_expected = lent, self._clock(), is_expected
        with self._lock:
            if not lent:
                self._unread.append(loan)
            before = {each for each in map(self._by_name.get, lent) if each is not None}
            self._by_name.update(dict.fromkeys(lent, loan))
            self._unread += [each for each in before if all(self._by_name.get(at) is not each for at in each.numbers)]
        return lent

    def take(self, items: Sequence[Item]) -> tuple[list[tuple[Loan, Wanted]], list[int]]:
        """Take the loans of items, which are read now, each with the items of one stream; and the indexes of those that
        nothing lends."""
        missing = dict(enumerate(items))
        shares: list[tuple[Loan, Wanted]] = []
        with self._lock:
            while (loan := self._best_for([item.name for item in missing.values()])) is not None:
                mine = [(index, item) for index, item in missing.items() if item.name in loan.numbers]
                for index, _ in mine:
                    del missing[index]
                self._drop(loan)  # a loan is read once
                self._read.add(loan)
                shares += [(loan, some) for some in _by_stream(loan, mine)]
        return shares, list(missing)

    def begun(self, loan: Loan) -> None:
        """Note that a stream of a loan begins, or never will."""
        with self._lock:
            loan.waiting -= 1

    def ended(self, loan: Loan) -> bool:
        """Note the end of a stream of a loan; True for the last one."""
        with self._lock:
            loan.readers -= 1
            if not loan.readers:
                self._read.remove(loan)
            return not loan.readers

    def drop(self, names: Sequence[ObjectName]) -> None:
        """Read no more of the loans that were asked for ahead and have some of these objects; what is left of them
        fails, and those that nothing reads are given back."""
        with self._lock:
            for loan in {*self._by_name.values(), *self._read}:
                if not loan.is_expected or loan.is_unwanted or loan.numbers.keys().isdisjoint(names):
                    continue
                loan.is_unwanted = True
                if loan not in self._read:
                    self._drop(loan)
                    self._unread.append(loan)

    def failed(self, loan: Loan) -> bool:
        """Note the failure of a stream of a loan; True for the first one: all have the same lender."""
        with self._lock:
            is_first, loan.has_failed = not loan.has_failed, True
            return is_first

    def leave_unread(self, loan: Loan) -> None:
        """Note a loan that is not read after all: the next heartbeat gives it back."""
        with self._lock:
            self._unread.append(loan)

    def take_unread(self) -> list[Loan]:
        """Loans to give back: those that nothing reads, and those that were not read in time."""
        late = self._clock() - UNUSED_SECONDS
        with self._lock:
            unread, self._unread = self._unread, []
            for loan in set(self._by_name.values()):
                if loan.since < late:
                    self._drop(loan)
                    unread.append(loan)
        return unread

    def waiting(self) -> list[Loan]:
        """Loans whose bytes are still to be asked for, the newest last: nothing but a heartbeat keeps them."""
        with self._lock:
            waiting = {*self._by_name.values(), *(loan for loan in self._read if loan.waiting)}
        return sorted(waiting, key=lambda each: each.since)

    def _drop(self, loan: Loan) -> None:
        for name in loan.numbers:
            if self._by_name.get(name) is loan:
                del self._by_name[name]

    def _best_for(self, names: Sequence[ObjectName]) -> Loan | None:
        """The loan that has most of the objects: another call may have borrowed some of them since, for itself."""
        loans = dict.fromkeys(loan for loan in map(self._by_name.get, names) if loan is not None)
        return max(loans, key=lambda loan: sum(name in loan.numbers for name in names), default=None)


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
        self._clock = clock
        self._guests = guests
        self._loans = HeldLoans(clock)
        self._news = NewsReader(lambda: self.peers, clock)
        self._own = own
        self.own_epoch = 0
        self._readers = Readers(clock)
        self._changed = threading.Condition()
        self._under_way = 0
        self._telling = threading.local()
        self._keeper = threading.Thread(target=self._keep, name="peer-beat", daemon=True)
        self._stopping = threading.Event()

    def start(self) -> None:
        """Begin. Peers that are not there are asked later."""
        self._readers.start()
        self._ask_of(self.peers)
        self._keeper.start()
        if self._names is not None:
            self._names.found = lambda named: self._ask_of((*self._listed, *named))
            self._names.start()

    def _ask_of(self, peers: Sequence[Peer]) -> None:
        """Ask these peers from now on, each address once, and this daemon itself never."""
        own, found = set(self._own()), dict[str, Peer]()
        for peer in peers:
            peer.is_self |= peer.control.address in own
            found.setdefault(peer.control.address, peer)
        self.peers = tuple(found.values())
        self.probe()
        self._news.look()

    def expects(self, scope: Scope, keys: bytes, parts: Sequence[Part]) -> int | None:
        """Return None, since peers must be asked, unless none can be, or all were a moment ago."""
        first = keys[:KEY_BYTES]
        if not first:
            return 0
        held = self._loans.find(ObjectName(scope, first, parts[0])) if parts else None
        return None if (held is not None and held.is_expected) or may_have(self.peers, first) else 0

    def exists(self, names: Sequence[ObjectName], deadline: float, found: Found) -> None:
        """Borrow them of the peer that has most of them."""
        asked = list(names)
        if (held := self._loans.find(asked[0])) is not None and held.is_expected:
            found([name in held.numbers for name in asked])
            return

        def ask() -> None:
            lent: dict[ObjectName, int] = {}
            try:
                lent = self._borrow(asked)
            finally:
                found([name in lent for name in asked])

        self._readers.add(ReadJob(None, None, ask, partial(found, [False] * len(asked)), deadline))

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

        def done(answer: Loan | CacheError) -> None:
            if isinstance(answer, Loan) and answer.lease:
                self._loans.hold(answer, scope, one_by_one, parts, is_expected=True)
            answered(answer)

        self._ask(peer, scope, keys, parts, patience, done)

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
        shares, missing = self._loans.take(items)
        for index in missing:
            each(index, Outcome.MISS)
        for loan, some in shares:
            job = ReadJob(loan.peer, loan, lambda: None, partial(self._refuse, loan, some, each), deadline)
            job.run = partial(self._read, loan, some, job, each)
            self._readers.add(job)

    def put(self, items: Sequence[Item], deadline: float, each: Each) -> None:  # noqa: ARG002 - the seam's
        """Peers keep what they compute, and nothing else."""
        for index in range(len(items)):
            each(index, Outcome.BUSY)

    def remove(self, names: Sequence[ObjectName]) -> None:
        """Note that an object of a loan that this thread reads was not what its name says: its peer is not asked for a
        while."""
        loan: Loan | None = getattr(self._telling, "loan", None)
        if loan is None or not names:
            return
        loan.peer.counts["wrong"] += 1
        if self._loans.failed(loan):
            loan.peer.did_not_send("an object was not what its name says", loan.since)
            events.warning("peer_object_wrong", peer=loan.peer.control.address)

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

    def _borrow(self, names: list[ObjectName]) -> dict[ObjectName, int]:
        """Borrow names of one scope of the first peer that lends any; return what it lends. The next peer is asked too
        where one is slow; what is lent after the first answer is given back."""
        scope = names[0].scope
        keys = list(dict.fromkeys(name.key for name in names))
        parts = list(dict.fromkeys(name.part for name in names))
        answers: deque[tuple[Peer, Loan | CacheError]] = deque()
        left, under_way, is_over = candidates(self.peers, keys), 0, False
        changed = threading.Condition()

        def answered(peer: Peer, answer: Loan | CacheError) -> None:
            with changed:
                answers.append((peer, answer))
                changed.notify()
                is_late = is_over
            if is_late:
                give_back()

        def give_back() -> None:
            with changed:
                late = list(answers)
                answers.clear()
            for _, answer in late:
                if isinstance(answer, Loan) and answer.lease:
                    self._loans.leave_unread(answer)

        try:
            while left or under_way:
                if left:
                    peer = left.pop(0)
                    under_way += 1
                    self._ask(peer, scope, b"".join(keys), parts, 0.0, partial(answered, peer))
                with changed:
                    if not changed.wait_for(lambda: answers, HEDGE_SECONDS if left else 2 * ASK_SECONDS):
                        if not left:
                            break
                        continue
                    peer, answer = answers.popleft()
                under_way -= 1
                if isinstance(answer, CacheError):
                    continue
                if answer.lease:
                    return self._loans.hold(answer, scope, keys, parts)
                peer.had_nothing(keys[0])
            return {}
        finally:
            with changed:
                is_over = True
            give_back()

    def _ask(
        self, peer: Peer, scope: Scope, keys: bytes, parts: Sequence[Part], patience: float, answered: Answered
    ) -> None:
        """Have a peer lend, and note how it answers. ``answered`` is called once, from any thread."""
        began = self._clock()

        def done(answer: Loan | CacheError) -> None:
            if isinstance(answer, CacheError):
                self._note_refusal(peer, began, answer)
            else:
                answer.peer = peer
                peer.is_self |= bool(answer.epoch) and answer.epoch == self.own_epoch
                peer.answered(answer.epoch)
            answered(answer)

        try:
            peer.control.borrow_later(scope, keys, parts, patience, patience + ASK_SECONDS, done)
        except CacheError as error:
            done(error)

    def _refuse(self, loan: Loan, items: Wanted, each: Each) -> None:
        """Refuse from any thread, without waiting for a peer: the next heartbeat gives the loan back."""
        self._loans.begun(loan)
        for index, _ in items:
            each(index, Outcome.BUSY)
        if self._loans.ended(loan):
            self._loans.leave_unread(loan)

    def _read(self, loan: Loan, items: Wanted, job: ReadJob, each: Each) -> None:
        """Read items of a loan, over one stream. Each of them ends, and is not written to any more then."""
        self._loans.begun(loan)
        left = deque((index, item, loan.numbers[item.name]) for index, item in items)

        def came(indexes: Sequence[int]) -> None:
            job.heard_at = self._clock()
            for index in indexes:
                each(index, Outcome.LENT)

        self._telling.loan = loan
        try:
            LoanStream(loan, left, job.deadline, came, lambda: not loan.is_unwanted).read()
        except OSError as error:
            if self._loans.failed(loan):
                reason = f"{loan.peer.control.address}: {str(error) or type(error).__name__}"
                if loan.peer.did_not_send(reason, loan.since):
                    events.event("peer_failed", peer=loan.peer.control.address, reason=reason)
        finally:
            self._telling.loan = None
            for index, _, _ in left:
                each(index, Outcome.FAILED)
        if self._loans.ended(loan):
            if not loan.has_failed:
                loan.peer.sent()
            self._give_back(loan)

    def _note_refusal(self, peer: Peer, began: float, error: CacheError) -> None:
        """Note that a call to a peer was refused, or had no answer."""
        if isinstance(error, PeerRefused):
            peer.answered()
            return
        if isinstance(error, HandshakeFailed) and peer.distrusts(str(error)):
            events.warning("peer_distrusted", peer=peer.control.address, reason=str(error))
        if peer.did_not_answer(str(error), began, is_absent=isinstance(error, PeerAbsent)):
            events.event("peer_failed", peer=peer.control.address, reason=str(error))

    def _give_back(self, loan: Loan) -> None:
        """Give back a loan, without waiting. Of a peer that does not answer, it lapses."""
        if loan.peer.answers:
            self._call(loan.peer, partial(loan.peer.control.give_back_later, loan, ASK_SECONDS))

    def _call(self, peer: Peer, call: Callable[[Done], None]) -> None:
        """Begin a call that nothing waits for, and note how the peer answers."""
        began = self._clock()

        def done(error: CacheError | None) -> None:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()
            if error is None:
                peer.answered()
            else:
                self._note_refusal(peer, began, error)

        with self._changed:
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
        for loan in (*self._loans.take_unread(), *self._loans.waiting()):
            self._give_back(loan)
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way, CLOSE_SECONDS)

    def beat(self) -> None:
        """Send heartbeats for loans that no stream keeps yet, and give back abandoned ones."""
        for loan in self._loans.take_unread():
            self._give_back(loan)
        wanted: dict[Peer, list[Loan]] = {}
        for loan in self._loans.waiting():
            wanted.setdefault(loan.peer, []).append(loan)
        for peer, loans in wanted.items():
            self._call(peer, partial(peer.control.beat_later, loans, ASK_SECONDS))

    def probe(self) -> None:
        """Try peers that did not answer, and new ones: no request has to find out whether they do."""
        for peer in self._all_peers():
            if peer.wants_probe():
                self._call(peer, partial(peer.control.beat_later, (), ASK_SECONDS))
