"""Health of a peer, kept for what it answers and for what it sends; leases of several lives."""

from __future__ import annotations

import threading

from cachesvc.peer.fleet import ABSENT_SECONDS, Peer
from cachesvc.peer.lender import LoanDesk
from cachesvc.storage.seam import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS
from tests.contracts.storage_rig import name_of
from tests.unit.peer.peer_rig import LendingNode, NearControl

NAMES = [name_of(key) for key in "abcd"]


def test_a_peer_rests_longer_after_each_failure_and_is_well_after_one_answer(control: NearControl) -> None:
    now = [0.0]
    peer = Peer(control, lambda: now[0])
    pauses = []
    for _ in range(10):
        assert peer.did_not_answer("no answer", now[0])
        pauses.append(peer.pause_left)
        now[0] += pauses[-1]
        assert peer.is_usable
    assert pauses[0] == FIRST_PAUSE_SECONDS
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_SECONDS
    peer.answered(1)
    assert peer.did_not_answer("again", now[0])
    assert peer.pause_left == FIRST_PAUSE_SECONDS


def test_calls_that_fail_together_are_one_failure(control: NearControl) -> None:
    now = [10.0]
    peer = Peer(control, lambda: now[0])
    began = [now[0] + 0.01 * call for call in range(32)]
    now[0] += 2.0
    assert [peer.did_not_answer("it stood still", each) for each in began] == [True] + [False] * 31
    assert peer.pause_left == FIRST_PAUSE_SECONDS
    now[0] += FIRST_PAUSE_SECONDS / 2
    within = now[0]
    now[0] += FIRST_PAUSE_SECONDS
    assert not peer.did_not_answer("it began while the peer rested", within)
    assert peer.is_usable
    assert peer.did_not_answer("it began after that", now[0])
    assert peer.pause_left == 2 * FIRST_PAUSE_SECONDS
    assert peer.counts["failed"] == 34, "all of them are counted"


def test_a_call_that_began_before_the_peer_answered_again_does_not_count(control: NearControl) -> None:
    now = [0.0]
    peer = Peer(control, lambda: now[0])
    peer.did_not_answer("no answer", now[0])
    now[0] += 0.1
    began = now[0]
    now[0] += 0.1
    peer.answered(1)
    assert peer.is_up, "an answer ends the pause"
    assert not peer.did_not_answer("a late one", began)
    assert peer.is_up


def test_an_answer_does_not_end_the_pause_of_a_peer_whose_bytes_do_not_come(control: NearControl) -> None:
    now = [0.0]
    peer = Peer(control, lambda: now[0])
    for pause in (1, 2, 4):
        assert peer.did_not_send("it was too slow", now[0])
        peer.answered(1)
        assert peer.answers
        assert not peer.is_up
        assert peer.pause_left == pause * FIRST_PAUSE_SECONDS
        now[0] += peer.pause_left
        assert peer.is_up, "the next loan finds out"
    peer.sent()
    assert peer.did_not_send("again", now[0])
    assert peer.pause_left == FIRST_PAUSE_SECONDS


def test_a_peer_that_did_not_answer_is_asked_by_probes_and_by_requests_that_name_it(control: NearControl) -> None:
    now = [0.0]
    peer = Peer(control, lambda: now[0])
    assert peer.wants_probe(), "whether it answers at all"
    assert not peer.wants_probe()
    probes = 0
    for _ in range(600):
        if peer.is_usable:
            now[0] += 0.5
            peer.did_not_answer("no answer", now[0] - 0.5)
        assert not peer.is_up
        probes += peer.wants_probe()
        now[0] += 0.1
    assert 30 <= probes < 70, "they become rare, and go on"
    peer.answered()
    assert peer.is_up
    assert not peer.wants_probe()


def test_a_peer_whose_calls_fail_at_once_may_be_asked_after_its_pause(control: NearControl) -> None:
    """Its daemon starts later, and no request waits for it."""
    now = [1.0]
    peer = Peer(control, lambda: now[0])
    seen = list[bool]()
    for is_absent in (True, True, True, False, True):
        assert peer.did_not_answer("no answer", now[0], is_absent=is_absent)
        assert is_absent <= (peer.pause_left in (FIRST_PAUSE_SECONDS, 4 * FIRST_PAUSE_SECONDS))
        now[0] += LONGEST_PAUSE_SECONDS
        seen.append(peer.is_up)
    assert seen == [True, True, True, False, False], "once it was silent, a probe has to find out"


def test_another_life_of_a_peer_may_have_what_the_last_one_lacked(control: NearControl) -> None:
    now = [0.0]
    peer = Peer(control, lambda: now[0])
    peer.answered(1)
    peer.had_nothing(b"key")
    assert peer.lacks(b"key")
    peer.answered(1)
    assert peer.lacks(b"key")
    peer.answered(2)
    assert not peer.lacks(b"key")
    peer.had_nothing(b"key")
    now[0] += ABSENT_SECONDS
    assert not peer.lacks(b"key")


def test_leases_of_two_lives_never_meet() -> None:
    quiet: list[int] = []
    first, second = (LoanDesk(lambda: 0.0) for _ in range(2))
    lease = first.lend([], 30.0, quiet=quiet.append).lease
    second.lend([], 30.0, quiet=quiet.append)
    assert not second.beat(lease)
    second.give_back(lease)
    assert len(second) == 1
    assert quiet == []


def test_many_threads_lend_and_give_back(node: LendingNode) -> None:
    node.have(NAMES)
    leases: list[int] = []

    def work() -> None:
        for _ in range(50):
            lent = node.lend(NAMES)
            with node.desk.sending(lent, 0):
                node.desk.give_back(lent.lease)
            leases.append(lent.lease)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(node.quiet) == sorted(leases)
    assert len(node.desk) == 0
