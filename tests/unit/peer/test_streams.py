"""Streams of bytes between two nodes: which are let in, and how many bring a loan."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import pytest

from cachesvc.peer import reading
from cachesvc.peer.borrower import STREAM_BYTES
from cachesvc.peer.fleet import Loan
from cachesvc.peer.lender import MOST_STREAMS_OF_ONE, MOST_WAITING_OF_ONE
from cachesvc.storage.seam import Outcome, Part, Scope
from tests.contracts.storage_rig import name_of
from tests.unit.peer.peer_rig import LendingNode, NearControl, Pulling, answers, greet

LENT = Outcome.LENT
NAMES = [name_of(key) for key in "abcd"]


def test_a_secret_is_good_for_a_few_streams(node: LendingNode) -> None:
    node.have(NAMES)
    lent = node.lend(NAMES)
    for _ in range(reading.STREAMS):
        assert answers(greet(node, lent.secret))
    assert not answers(greet(node, lent.secret))
    assert node.lender.refused == 1


def test_who_has_no_secret_gets_nothing(node: LendingNode) -> None:
    node.have(NAMES)
    node.lend(NAMES)
    assert not answers(greet(node, bytes(reading.SECRET_BYTES)))
    assert not answers(greet(node, node.lend(NAMES).secret, b"GET / HT"))


def test_a_stream_beyond_those_of_its_address_waits_for_its_turn(node: LendingNode) -> None:
    node.have(NAMES[:1])
    hello = [
        reading.HELLO.pack(reading.MAGIC, node.lend(NAMES[:1]).secret) + reading.pack_numbers([0]) for _ in range(2)
    ]
    address = ("127.0.0.1", node.lender.port)
    streams = [socket.create_connection(address) for _ in range(MOST_STREAMS_OF_ONE)]
    late = socket.create_connection(address)
    late.sendall(hello[0])
    other = socket.create_connection(address, source_address=("127.0.0.2", 0))
    other.sendall(hello[1])
    assert answers(other), "another address has its own"
    late.setblocking(False)
    with pytest.raises(BlockingIOError):
        late.recv(1)
    late.setblocking(True)
    streams[0].close()
    assert answers(late)
    assert node.lender.refused == 0
    for stream in streams:
        stream.close()


def test_streams_that_wait_are_no_more_than_one_address_may_have(node: LendingNode) -> None:
    address = ("127.0.0.1", node.lender.port)
    streams = [socket.create_connection(address) for _ in range(MOST_STREAMS_OF_ONE + MOST_WAITING_OF_ONE)]
    with socket.create_connection(address) as refused:
        assert not refused.recv(1)
        assert node.lender.refused == 1, "it is closed at once"
    node.lender.close()
    for stream in streams:
        assert not stream.recv(1), "those that wait end with it"
        stream.close()


def test_a_borrower_whose_streams_wait_for_others_of_its_address_gets_all(
    node: LendingNode, pull: Callable[..., Pulling]
) -> None:
    """Several daemons behind one address each open as many streams as one may."""
    borrowers, gathered = [pull(NearControl(node, f"near:{at}")) for at in range(4)], []
    for at, borrower in enumerate(borrowers):
        for loan in range(3):
            names = [name_of(f"{at}-{loan}-{each}") for each in range(reading.STREAMS)]
            node.have(names, STREAM_BYTES)
            assert all(borrower.reader.exists(names))
            gathered.append(borrower.get(names, size_bytes=STREAM_BYTES)[0])
    assert {outcome for each in gathered for outcome in each.wait()} == {LENT}
    assert [borrower.peers.peers[0].counts["failed"] for borrower in borrowers] == [0] * len(borrowers)


def test_a_large_loan_is_read_by_several_streams(node: LendingNode, control: NearControl, pulling: Pulling) -> None:
    node.have(NAMES, STREAM_BYTES)
    assert all(pulling.reader.exists(NAMES))
    gathered, pages = pulling.get(NAMES, size_bytes=STREAM_BYTES)
    assert gathered.wait() == [LENT] * 4
    assert [bytes(page) for page in pages] == [bytes(node.pages[name]) for name in NAMES]
    assert len(node.lent[0].streams) == 4
    node.wait_quiet(control.loans[0].lease)
    assert control.given_back == [control.loans[0].lease], "once, by the last of them"


def test_a_stream_that_fails_leaves_what_the_others_bring(
    node: LendingNode, control: NearControl, pulling: Pulling
) -> None:
    node.have(NAMES, STREAM_BYTES)
    assert all(pulling.reader.exists(NAMES))
    with ExitStack() as taken:  # of as many places as leave them three
        for _ in range(reading.STREAMS - 3):
            taken.enter_context(greet(node, control.loans[0].secret))
        wait_for_streams(node, reading.STREAMS - 3)
        gathered, _ = pulling.get(NAMES, size_bytes=STREAM_BYTES)
        assert sorted(outcome is LENT for outcome in gathered.wait()) == [False, True, True, True]
        node.wait_quiet(control.loans[0].lease)
    assert control.given_back == [control.loans[0].lease]


def test_a_loan_that_ends_early_is_one_failure_of_its_peer(node: LendingNode, pulling: Pulling) -> None:
    """Each of its streams doubled the pause: after one loan, half a minute without a question."""
    node.have(NAMES, STREAM_BYTES)
    assert all(pulling.reader.exists(NAMES))
    node.desk.end_all()
    gathered, _ = pulling.get(NAMES, size_bytes=STREAM_BYTES)
    assert LENT not in gathered.wait()
    (peer,) = pulling.peers.peers
    assert peer.counts["failed"] == 1


def test_a_lender_of_an_older_release_is_read_by_one_stream(
    node: LendingNode, control: NearControl, pulling: Pulling
) -> None:
    node.have(NAMES, STREAM_BYTES)
    ask = control.borrow

    def older(scope: Scope, keys: bytes, parts: Sequence[Part], seconds: float) -> Loan:
        answer = ask(scope, keys, parts, seconds)
        answer.streams = 1
        return answer

    control.borrow = older  # type: ignore[method-assign]
    assert all(pulling.reader.exists(NAMES))
    gathered, _ = pulling.get(NAMES, size_bytes=STREAM_BYTES)
    assert gathered.wait() == [LENT] * 4
    assert len(node.lent[0].streams) == 1


def wait_for_streams(node: LendingNode, count: int) -> None:
    """Until the lender has taken a secret as often."""
    while len(node.lent[0].streams) < count:
        threading.Event().wait(0.001)
