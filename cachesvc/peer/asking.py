"""Choice of the peers that are asked for blocks: those that have most, the next where the one before is slow."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial

from cachesvc.model.errors import CacheError
from cachesvc.peer.fleet.control import Borrowed
from cachesvc.peer.fleet.digest import words_of
from cachesvc.peer.fleet.health import Peer
from cachesvc.peer.loans import HeldLoan, HeldLoans
from cachesvc.storage.seam import ObjectName, Part, Scope

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
