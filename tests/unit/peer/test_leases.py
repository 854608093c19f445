"""Leases of loans: renewed while their bytes are on their way, however long that takes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from cachesvc.peer import reading
from cachesvc.peer.borrower import STREAM_BYTES
from cachesvc.peer.lender import LentObject
from cachesvc.peer.reading import PART, SHARED
from cachesvc.storage.seam import ObjectName, Outcome
from tests.contracts.storage_rig import name_of
from tests.unit.peer.peer_rig import LendingNode, NearControl, Pulling, answers, greet

FAR = 1e9
"""A deadline that does not come, monotonic seconds."""


def test_a_transfer_lasts_longer_than_its_lease(node: LendingNode) -> None:
    """No heartbeat comes while it is read: what its borrower takes renews the lease."""
    names = [name_of(str(at)) for at in range(64)]
    node.have(names, 1 << 20)
    lent = node.lend(names)
    with greet(node, lent.secret) as stream:
        stream.sendall(reading.pack_numbers(range(1, 64)))
        for _ in range(4):
            node.now += 20
            while lent.until < node.now + 30:
                assert stream.recv(1 << 16)
            node.desk.expire()
        assert node.desk.beat(lent.lease)


def test_a_large_object_renews_its_lease_while_a_slow_borrower_takes_it() -> None:
    content, got = bytes(8 << 20), bytearray()
    ours, theirs = socket.socketpair()

    def taken() -> None:
        got.extend(theirs.recv(1 << 20))

    with ours, theirs:
        reading.send_pieces(ours, [content], 0.04, taken)
        while len(got) < len(content):
            taken()
        assert got == content
        with pytest.raises(TimeoutError, match="the peer takes nothing more"):
            reading.send_pieces(ours, [content], 0.04)


def test_loans_that_wait_for_a_stream_are_kept_by_heartbeats(
    node: LendingNode, control: NearControl, pull: Callable[..., Pulling]
) -> None:
    pulling = pull(control, clock=lambda: 0.0)
    loans = [
        [name_of(f"{loan}-{at}") for at in range(reading.STREAMS)]
        for loan in range((PART + SHARED) // reading.STREAMS + 1)
    ]
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        control.port = silent.getsockname()[1]
        for names in loans:
            node.have(names)
            assert all(pulling.reader.exists(names))
        gathered = [pulling.get(names, size_bytes=STREAM_BYTES)[0] for names in loans]
        for _ in range(PART + SHARED):  # all streams that there can be, which bring nothing
            stack.enter_context(silent.accept()[0])
        control.beats.clear()
        pulling.peers.beat()
        assert set(control.beats) == {control.loans[-1].lease}
    assert Outcome.LENT not in {outcome for each in gathered for outcome in each.wait()}
    control.beats.clear()
    pulling.peers.beat()
    assert not control.beats


def test_an_object_is_sent_once_its_bytes_are_there(node: LendingNode) -> None:
    names = [name_of("a"), name_of("b")]
    node.have(names)
    late = bytes(node.pages[names[1]])
    node.pages[names[1]][:] = bytes(len(late))
    objects = [LentObject(name, (node.pages[name],)) for name in names]
    lent = node.desk.lend(objects, 30.0, ready=1)
    with greet(node, lent.secret) as stream:
        stream.sendall(reading.pack_numbers([1]))
        size_bytes = reading.ANSWER.size + reading.HEADER_BYTES + len(late)
        assert reading.receive(stream, size_bytes, FAR).endswith(node.pages[names[0]])
        node.pages[names[1]][:] = late
        node.desk.fill(lent.lease, 2)
        assert reading.receive(stream, size_bytes, FAR).endswith(late)


def test_a_loan_whose_bytes_do_not_come_ends_its_streams(node: LendingNode) -> None:
    node.have([name_of("a")])
    lent = node.lend([name_of("a")])
    lent.ready = 0
    stream = greet(node, lent.secret)
    node.desk.give_back(lent.lease)
    assert not answers(stream)
    node.wait_quiet(lent.lease)


def expected(pulling: Pulling, control: NearControl, names: list[ObjectName]) -> None:
    """Have the peer lend these, as a hand-over does."""
    keys = b"".join(name.key for name in names)
    pulling.peers.expect(control.address, names[0].scope, keys, [names[0].part], 0.0, lambda _: None)


def test_a_loan_that_is_unwanted_is_read_no_further_and_given_back(
    node: LendingNode, control: NearControl, pulling: Pulling
) -> None:
    names = [name_of(str(at)) for at in range(64)]
    node.have(names)
    expected(pulling, control, names)
    [lent] = node.lent
    lent.ready = 2
    gathered, _ = pulling.get(names)
    with gathered.changed:
        gathered.changed.wait_for(lambda: gathered.outcomes)
    pulling.peers.drop([names[5]])
    node.desk.fill(lent.lease, len(names))
    outcomes = gathered.wait()
    came = outcomes.count(Outcome.LENT)
    assert came < len(names) // 2, "what was under way, and no more"
    assert outcomes == [Outcome.LENT] * came + [Outcome.FAILED] * (len(names) - came)
    node.wait_quiet(lent.lease)
    assert control.given_back == [lent.lease]
    assert pulling.peers.peers[0].is_up, "that is no failure of the peer"


def test_a_loan_that_is_unwanted_before_it_is_read_is_given_back(
    node: LendingNode, control: NearControl, pulling: Pulling
) -> None:
    names = [name_of(str(at)) for at in range(3)]
    others = [name_of(f"other-{at}") for at in range(3)]
    node.have([*names, *others])
    for some in (names, others):
        expected(pulling, control, some)
    pulling.peers.drop(names[:1])
    pulling.peers.beat()
    assert control.given_back == [node.lent[0].lease]
    assert pulling.get(names)[0].wait() == [Outcome.MISS] * len(names)
    assert pulling.get(others)[0].wait() == [Outcome.LENT] * len(others)
