"""Choice of the peer that is asked, and the fate of a late answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from cachesvc.model.errors import PermissionDenied
from cachesvc.peer.borrower import HeldLoans
from cachesvc.peer.fleet import Answered, Loan
from cachesvc.storage.seam import Part, Scope
from tests.contracts.storage_rig import name_of
from tests.unit.peer.peer_rig import LendingNode, NearControl, Pulling

NAMES = [name_of(key) for key in "abcd"]


class SlowControl(NearControl):
    """Answers once the test says so. ``was_asked``: set when it was."""

    def __init__(self, node: LendingNode) -> None:
        super().__init__(node, "slow:1")
        self.was_asked, self.may_answer = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def borrow_later(
        self, scope: Scope, keys: bytes, parts: Sequence[Part], patience: float, seconds: float, answered: Answered
    ) -> None:
        self.was_asked.set()

        def later() -> None:
            self.may_answer.wait()
            answered(self.borrow(scope, keys, parts, seconds))

        self._threads.append(threading.Thread(target=later))
        self._threads[-1].start()

    def answer(self) -> None:
        self.may_answer.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def nodes() -> Iterator[tuple[LendingNode, LendingNode]]:
    slow, other = LendingNode(), LendingNode()
    slow.have(NAMES)
    other.have(NAMES)
    yield slow, other
    slow.close()
    other.close()


def test_the_next_peer_is_asked_beside_a_slow_one_whose_late_loan_is_given_back(
    nodes: tuple[LendingNode, LendingNode], pull: Callable[..., Pulling]
) -> None:
    slow, fast = SlowControl(nodes[0]), NearControl(nodes[1], "fast:1")
    pulling = pull(slow, fast)
    assert pulling.reader.exists(NAMES) == [True] * 4
    assert slow.was_asked.is_set()
    slow.answer()
    pulling.peers.beat()
    assert slow.given_back == [slow.loans[0].lease]


def test_a_peer_that_is_named_and_not_permitted_is_not_asked(pulling: Pulling) -> None:
    with pytest.raises(PermissionDenied, match="peer_allow"):
        pulling.peers.expect("10.0.0.2:7100", NAMES[0].scope, NAMES[0].key, [NAMES[0].part], 1.0, lambda _: None)


def test_a_loan_of_nothing_is_given_back() -> None:
    loans = HeldLoans(lambda: 0.0)
    loan = Loan(3, 7, bytes(32), "127.0.0.1", 7101, (False, False))
    assert not loans.hold(loan, NAMES[0].scope, [NAMES[0].key], [NAMES[0].part])
    assert loans.take_unread() == [loan]
