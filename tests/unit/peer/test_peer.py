"""Host pages from another node: right or not at all, for as long as a lease lasts, whichever node dies in the
middle."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Callable

import pytest

from cachesvc.peer import reading
from cachesvc.peer.borrower import UNUSED_SECONDS, PeerStorage
from cachesvc.peer.fleet import Done, Loan
from cachesvc.peer.lender import LentObject
from cachesvc.storage.seam import Outcome, Part
from tests.contracts.storage_rig import PAGE_BYTES, SCOPE, name_of
from tests.unit.peer.peer_rig import LendingNode, NearControl, Pulling, Reader, answers, greet

LENT, MISS, WRONG, BUSY, FAILED = Outcome.LENT, Outcome.MISS, Outcome.WRONG, Outcome.BUSY, Outcome.FAILED
NAMES = [name_of(key) for key in "abcd"]


def test_what_is_lent_comes_and_is_given_back(node: LendingNode, control: NearControl, pulling: Pulling) -> None:
    node.have(NAMES)
    assert pulling.fetch(NAMES) == [LENT] * 4
    node.wait_quiet(control.loans[0].lease)
    assert control.given_back == [control.loans[0].lease]
    assert node.lender.sent_bytes == 4 * PAGE_BYTES


def test_what_it_has_of_a_prefix_comes(node: LendingNode, pulling: Pulling) -> None:
    node.have(NAMES[:2])
    assert pulling.reader.exists(NAMES) == [True, True, False, False]
    gathered, _ = pulling.get(NAMES)
    assert gathered.wait() == [LENT, LENT, MISS, MISS]


def test_parts_of_a_block_are_told_apart(node: LendingNode, pulling: Pulling) -> None:
    ranks = [name_of(key, Part(0, rank, 2)) for key in "ab" for rank in range(2)]
    node.have(ranks)
    assert pulling.fetch(ranks) == [LENT] * 4


def test_an_answer_that_cannot_be_read_is_none(control: NearControl, pulling: Pulling) -> None:
    control.borrow = lambda *_: "no loan"  # type: ignore[method-assign, assignment]
    assert pulling.reader.exists(NAMES) == [False] * 4, "the caller gets an answer all the same"


def test_without_descriptors_it_waits_for_some(node: LendingNode) -> None:
    node.have(NAMES[:1])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    stream = socket.socket()
    resource.setrlimit(resource.RLIMIT_NOFILE, (stream.fileno() + 1, before[1]))
    try:
        spare: list[socket.socket] = []
        with contextlib.suppress(OSError):
            while True:
                spare.append(socket.socket())
        stream.connect(("127.0.0.1", node.lender.port))
        acceptor = next(each for each in threading.enumerate() if each.name == "peer-accept")
        clock = time.pthread_getcpuclockid(acceptor.ident or 0)
        began, busy = time.monotonic(), time.clock_gettime(clock)
        while time.monotonic() < began + 0.3:
            threading.Event().wait(0.05)
        assert time.clock_gettime(clock) - busy < 0.05, "it does not spin"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for each in spare:
            each.close()
    stream.sendall(reading.HELLO.pack(reading.MAGIC, node.lend(NAMES[:1]).secret) + reading.pack_numbers([0]))
    assert answers(stream)


def test_the_end_waits_for_no_peer_longer_than_for_one(node: LendingNode, control: NearControl) -> None:
    """The thread of heartbeats gives back loans that were never read, and not the closing thread."""
    node.have(NAMES)
    told: list[str] = []
    pulling = Pulling(control)
    give_back = control.give_back_later

    def tell(loan: Loan, seconds: float, done: Done) -> None:
        told.append(threading.current_thread().name)
        give_back(loan, seconds, done)

    control.give_back_later = tell  # type: ignore[method-assign]
    pulling.reader.exists(NAMES)
    gathered, _ = pulling.get(NAMES, seconds=-1.0)
    assert gathered.wait() == [BUSY] * 4, "their time has passed"
    pulling.close()
    assert told == ["peer-beat"]
    node.wait_quiet(control.loans[0].lease)


@pytest.mark.parametrize("number", [3, 99])
def test_a_stream_ends_that_asks_for_what_was_not_lent(node: LendingNode, number: int) -> None:
    node.have(NAMES[:1])
    lent = node.lend(NAMES)
    with socket.create_connection(("127.0.0.1", node.lender.port)) as stream:
        stream.sendall(reading.HELLO.pack(reading.MAGIC, lent.secret) + reading.pack_numbers([number]))
        with pytest.raises(reading.StreamEnded):
            reading.receive(stream, 1, time.monotonic() + 60)


def test_a_page_that_changed_is_wrong_and_its_peer_rests(
    node: LendingNode, control: NearControl, pulling: Pulling
) -> None:
    """A lender that sends another block's bytes under a header of its own making cannot be told; one whose header
    names another block can."""
    node.have(NAMES)
    node.pages[NAMES[0]], node.pages[NAMES[1]] = node.pages[NAMES[1]], node.pages[NAMES[0]]
    lent = node.desk.lend([LentObject(NAMES[1], (node.pages[NAMES[0]],))], 30.0)
    crooked = control.borrow(SCOPE, NAMES[0].key, [NAMES[0].part], 1.0)
    crooked.lease, crooked.secret, crooked.lent = lent.lease, lent.secret, (True,)
    control.borrow = lambda *_: crooked  # type: ignore[method-assign]
    assert pulling.fetch(NAMES[:1]) == [WRONG]
    assert pulling.peers.peers[0].counts["wrong"] == 1
    assert not pulling.peers.peers[0].is_usable


def test_a_peer_that_does_not_answer_rests_for_a_while(control: NearControl, pulling: Pulling) -> None:
    control.broken = True
    assert pulling.reader.exists(NAMES) == [False] * 4
    assert pulling.peers.expects(SCOPE, NAMES[0].key, [Part(0, 0, 1)]) == 0, "no peer can be asked"
    assert pulling.reader.exists(NAMES) == [False] * 4
    assert control.asked == 1


def test_what_nobody_has_is_not_asked_for_at_once_again(control: NearControl, pulling: Pulling) -> None:
    assert pulling.reader.exists(NAMES) == [False] * 4
    assert pulling.peers.expects(SCOPE, NAMES[0].key, [Part(0, 0, 1)]) == 0
    assert pulling.peers.expects(SCOPE, NAMES[1].key, [Part(0, 0, 1)]) is None
    assert control.asked == 1


def test_the_next_peer_is_asked(node: LendingNode, control: NearControl, pull: Callable[..., Pulling]) -> None:
    with contextlib.closing(LendingNode()) as other:
        pulling = pull(control, NearControl(other, "near:2"))
        other.have(NAMES)
        assert pulling.fetch(NAMES) == [LENT] * 4
        control.broken = True
        more = [name_of(key) for key in "xyz"]
        other.have(more)
        assert pulling.fetch(more) == [LENT] * 3
        assert node.lender.sent_bytes == 0


def test_a_lease_without_beats_is_over_and_its_stream_is_cut(node: LendingNode) -> None:
    node.have(NAMES)
    lent = node.lend(NAMES, seconds=30.0)
    with greet(node, lent.secret) as stream:
        assert len(stream.recv(1, socket.MSG_PEEK)) == 1
        node.now += 29
        assert node.desk.beat(lent.lease)
        node.now += 29
        node.desk.expire()
        assert node.quiet == []
        node.now += 2
        node.desk.expire()
        node.wait_quiet(lent.lease)
        while stream.recv(1 << 16):
            """Until it ends."""
    assert not node.desk.beat(lent.lease)
    assert len(node.desk) == 0


def test_pages_stay_until_nobody_sends_from_them(node: LendingNode) -> None:
    """However long a lease has been over."""
    node.have(NAMES)
    lent = node.lend(NAMES)
    with node.desk.sending(lent, 0) as may_send:
        assert may_send
        node.desk.give_back(lent.lease)
        assert node.quiet == []
        with node.desk.sending(lent, 0) as more:
            assert not more
    assert node.quiet == [lent.lease]
    node.desk.give_back(lent.lease)
    assert node.quiet == [lent.lease], "it is reported once"


def test_a_lender_that_dies_in_the_middle_fails_what_is_left(
    node: LendingNode, control: NearControl, pulling: Pulling
) -> None:
    """Half of an object is none."""
    node.have(NAMES)
    with socket.create_server(("127.0.0.1", 0)) as fake:
        control.port = fake.getsockname()[1]
        pulling.reader.exists(NAMES)
        gathered, _ = pulling.get(NAMES)
        stream, _ = fake.accept()
        with stream:
            stream.recv(1 << 16)
            stream.sendall(reading.ANSWER.pack(0, reading.OK, PAGE_BYTES) + bytes(200))
        assert set(gathered.wait()) <= {FAILED, MISS}
        assert pulling.peers.peers[0].counts["failed"] == 1


def test_a_lender_that_hangs_is_given_up_by_the_deadline_and_writes_nothing_later(
    node: LendingNode, control: NearControl, pulling: Pulling
) -> None:
    node.have(NAMES)
    with socket.create_server(("127.0.0.1", 0)) as fake:
        control.port = fake.getsockname()[1]
        pulling.reader.exists(NAMES)
        gathered, pages = pulling.get(NAMES, seconds=0.3)
        stream, _ = fake.accept()
        with stream:
            assert set(gathered.wait()) <= {FAILED, MISS}
            for page in pages:
                page[:] = b"#" * PAGE_BYTES
            late = reading.ANSWER.pack(0, reading.OK, PAGE_BYTES) + bytes(128 + PAGE_BYTES)
            for _ in range(4):
                try:
                    stream.sendall(late)
                except OSError:
                    break
        assert all(page == b"#" * PAGE_BYTES for page in pages), "no late byte has landed"


def test_a_lender_that_says_something_else_is_not_believed(
    node: LendingNode, control: NearControl, pull: Callable[..., Pulling]
) -> None:
    node.have(NAMES)
    for said in (
        reading.ANSWER.pack(3, reading.OK, PAGE_BYTES),
        reading.ANSWER.pack(0, reading.OK, 1 << 40),
        b"HTTP/1.1 200 OK\r\n",
    ):
        with socket.create_server(("127.0.0.1", 0)) as fake:
            control.port = fake.getsockname()[1]
            pulling = pull(control)
            pulling.reader.exists(NAMES)
            gathered, _ = pulling.get(NAMES)
            stream, _ = fake.accept()
            with stream:
                stream.recv(1 << 16)
                stream.sendall(said)
                assert set(gathered.wait()) <= {FAILED, MISS}


def test_a_borrower_that_takes_nothing_is_cut_off_with_its_lease(node: LendingNode) -> None:
    """The sender stands in the middle of an object: the end of the lease ends it, and then the pages are free."""
    node.have(NAMES[:1], 64 << 20)
    lent = node.lend(NAMES[:1])
    with greet(node, lent.secret) as stream:
        stream.recv(1)
        node.now += 31
        node.desk.expire()
        node.wait_quiet(lent.lease)


def test_beats_keep_what_is_borrowed_and_nobody_keeps_it_for_nothing(node: LendingNode) -> None:
    node.have(NAMES)
    control, now = NearControl(node), [100.0]
    peers = PeerStorage([control], lambda: now[0])
    peers.start()
    Reader(peers).exists(NAMES)
    lease = control.loans[0].lease
    peers.beat()
    assert control.beats == [lease]
    now[0] += UNUSED_SECONDS + 1
    peers.beat()
    assert control.given_back == [lease]
    assert node.quiet == [lease]
    peers.beat()
    assert (control.beats, control.given_back) == ([lease], [lease]), "it is neither renewed nor given back again"
    peers.close()


def test_what_is_borrowed_is_given_back_at_the_end(node: LendingNode, control: NearControl, pulling: Pulling) -> None:
    node.have(NAMES)
    pulling.reader.exists(NAMES)
    pulling.close()
    assert control.given_back == [control.loans[0].lease]
    gathered, _ = pulling.get(NAMES)
    assert set(gathered.wait()) <= {MISS, BUSY}


def test_two_calls_that_borrow_the_same_block_each_read_what_they_borrowed(node: LendingNode, pulling: Pulling) -> None:
    node.have(NAMES)
    first, second = NAMES[:2], NAMES[1:3]
    assert all(pulling.reader.exists(first))
    assert all(pulling.reader.exists(second))
    for names in (first, second):
        gathered, _ = pulling.get(names)
        assert gathered.wait() == [LENT] * 2
