"""A node that lends and one that borrows in one process, with real sockets and no ledger."""

from __future__ import annotations

import mmap
import socket
import threading
import time
from collections.abc import Callable, Sequence

from cachesvc.model.errors import CacheError, Unavailable
from cachesvc.model.words import KEY_BYTES
from cachesvc.peer import reading
from cachesvc.peer.borrower import PeerStorage
from cachesvc.peer.fleet import Answered, DigestNews, Done, Loan
from cachesvc.peer.lender import Lender, Lent, LentObject, LoanDesk
from cachesvc.storage.objects import ObjectStore, Verb
from cachesvc.storage.seam import CAME, ObjectName, Outcome, Part, Scope, key_at
from tests.contracts.storage_rig import PAGE_BYTES, content_of


class LendingNode:
    """Lends objects by their names, from memory of its own. ``quiet``: leases of which nothing is sent any more."""

    def __init__(self) -> None:
        self.now = 100.0
        self.quiet: list[int] = []
        self.lent: list[Lent] = []
        self.changed = threading.Condition()
        self.desk = LoanDesk(lambda: self.now)
        self.lender = Lender(self.desk, "127.0.0.1", 0)
        self.lender.start()
        self.pages: dict[ObjectName, memoryview] = {}

    def have(self, names: Sequence[ObjectName], size_bytes: int = PAGE_BYTES) -> None:
        for name in names:
            page = memoryview(mmap.mmap(-1, size_bytes))
            page[:] = content_of(name, size_bytes)
            self.pages[name] = page

    def lend(self, names: Sequence[ObjectName], seconds: float = 30.0) -> Lent:
        objects = [LentObject(name, (self.pages[name],)) if name in self.pages else None for name in names]
        self.lent.append(self.desk.lend(objects, seconds, quiet=self._note_quiet))
        return self.lent[-1]

    def close(self) -> None:
        self.lender.close()
        self.desk.end_all()

    def wait_quiet(self, lease: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: lease in self.quiet)

    def _note_quiet(self, lease: int) -> None:
        with self.changed:
            self.quiet.append(lease)
            self.changed.notify_all()


class NearControl:
    """The calls to a lending node, without a network. ``broken``: it does not answer. ``port``: of its bytes."""

    def __init__(self, node: LendingNode, name: str = "near:1") -> None:
        self.node = node
        self.address = name
        self.broken = False
        self.asked = self.probes = 0
        self.beats: list[int] = []
        self.given_back: list[int] = []
        self.loans: list[Loan] = []
        self.port = node.lender.port
        self.epoch = 7

    def borrow(self, scope: Scope, keys: bytes, parts: Sequence[Part], seconds: float) -> Loan:
        self.asked += 1
        self._require()
        names = [ObjectName(scope, key_at(keys, at), part) for at in range(len(keys) // KEY_BYTES) for part in parts]
        if names[0] not in self.node.pages:
            return Loan(epoch=self.epoch)
        lent = self.node.lend(names)
        there = tuple(each is not None for each in lent.objects)
        loan = Loan(lent.lease, self.epoch, lent.secret, "127.0.0.1", self.port, there, reading.STREAMS)
        self.loans.append(loan)
        return loan

    def borrow_later(
        self, scope: Scope, keys: bytes, parts: Sequence[Part], patience: float, seconds: float, answered: Answered
    ) -> None:
        answered(self.borrow(scope, keys, parts, seconds))

    def news_later(
        self, epoch: int, version: int, patience: float, answered: Callable[[DigestNews | CacheError], None]
    ) -> None:
        answered(Unavailable(f"{self.address}: it tells nothing"))

    def beat_later(self, loans: Sequence[Loan], seconds: float, done: Done) -> None:
        self.probes += not loans
        self._require()
        self.beats += [loan.lease for loan in loans if self.node.desk.beat(loan.lease)]
        done(None)

    def give_back_later(self, loan: Loan, seconds: float, done: Done) -> None:
        self._require()
        self.given_back.append(loan.lease)
        self.node.desk.give_back(loan.lease)
        done(None)

    def close(self) -> None:
        """Nothing is open."""

    def _require(self) -> None:
        if self.broken:
            raise Unavailable(f"{self.address}: it does not answer")


class Reader:
    """Asks a ``PeerStorage`` and waits."""

    def __init__(self, storage: PeerStorage) -> None:
        self.storage = storage

    def exists(self, names: list[ObjectName], deadline: float = 1e9) -> list[bool]:
        told: list[bool] = []
        done = threading.Event()

        def found(there: Sequence[bool] | None) -> None:
            told.extend(there or ())
            done.set()

        self.storage.exists(names, deadline, found)
        done.wait()
        return told


class Gathered:
    """Ends of the items of a call, which can be waited for."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.outcomes: dict[int, Outcome] = {}
        self.changed = threading.Condition()

    def each(self, index: int, outcome: Outcome) -> None:
        with self.changed:
            assert index not in self.outcomes, "an item ends once"
            self.outcomes[index] = outcome
            self.changed.notify_all()

    def wait(self) -> list[Outcome]:
        with self.changed:
            self.changed.wait_for(lambda: len(self.outcomes) == self.count)
            return [self.outcomes[at] for at in range(self.count)]


class Pulling:
    """A borrower with its verification. ``clock``: of the health of peers, monotonic seconds."""

    def __init__(self, *controls: NearControl, clock: Callable[[], float] = time.monotonic) -> None:
        self.peers = PeerStorage(controls, clock)
        self.store = ObjectStore(self.peers, time.monotonic)
        self.store.start()
        self.reader = Reader(self.peers)

    def get(
        self, names: Sequence[ObjectName], seconds: float = 30.0, size_bytes: int = PAGE_BYTES
    ) -> tuple[Gathered, list[memoryview]]:
        gathered = Gathered(len(names))
        pages = [memoryview(mmap.mmap(-1, size_bytes)) for _ in names]
        deadline = time.monotonic() + seconds
        self.store.prepare(Verb.GET, names, [(page,) for page in pages], deadline, gathered.each, lambda _: None)()
        return gathered, pages

    def fetch(self, names: Sequence[ObjectName], seconds: float = 30.0) -> list[Outcome]:
        """Borrow, read, and look at every byte of what came."""
        self.reader.exists(list(names))
        gathered, pages = self.get(names, seconds)
        told = gathered.wait()
        for name, page, outcome in zip(names, pages, told, strict=True):
            if outcome in CAME:
                assert page == content_of(name), "what came is right"
        return told

    def close(self) -> None:
        self.peers.close()


def greet(node: LendingNode, secret: bytes, magic: bytes = reading.MAGIC) -> socket.socket:
    stream = socket.create_connection(("127.0.0.1", node.lender.port))
    stream.sendall(reading.HELLO.pack(magic, secret) + reading.pack_numbers([0]))
    return stream


def answers(stream: socket.socket) -> bool:
    """An answer comes; False where the stream ends instead."""
    with stream:
        try:
            return len(stream.recv(reading.ANSWER.size)) > 0
        except ConnectionResetError:
            return False
