"""Peers before a store, peers that rest, and leases of several lives."""

from __future__ import annotations

import threading
import time

from cachesvc.peer.desk import LentObject, LoanDesk
from cachesvc.peer.fleet.health import ABSENT_SECONDS, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Peer
from cachesvc.peer.sources import Nowhere
from cachesvc.storage.objects import ObjectStore
from cachesvc.storage.seam import Outcome
from tests.contracts.storage_rig import PAGE_BYTES, SCOPE, content_of, name_of
from tests.sim.sim_storage import SimStorage
from tests.unit.peer.peer_rig import Gathered, LendingNode, NearControl, Pulling

OK, LENT, WRONG, BUSY = Outcome.OK, Outcome.LENT, Outcome.WRONG, Outcome.BUSY
NAMES = [name_of(key) for key in "abcd"]


def test_what_a_peer_fails_to_send_comes_from_the_store(node: LendingNode, control: NearControl) -> None:
    store = SimStorage()
    pulling = Pulling(control, store=store)
    try:
        kept = [name_of(key) for key in "cd"]
        put = Gathered(2)
        pages = [(memoryview(bytearray(content_of(name))),) for name in kept]
        pulling.store.put(kept, pages, time.monotonic() + 60, put.each, lambda _: None)
        store.crank()
        assert put.wait() == [OK, OK]
        node.have(NAMES[:3])
        assert pulling.fetch(NAMES) == [LENT] * 3 + [OK], "three of the peer's, one of the store's"
        pulling.reader.exists(NAMES)
        node.close()  # it dies with everything lent
        assert pulling.fetch(NAMES)[2:] == [OK, OK]
        assert store.objects.keys() == set(kept), "what a peer sent wrongly, or not, is not removed from the store"
    finally:
        pulling.close()


def test_a_wrong_object_of_a_peer_leaves_the_stores_alone(node: LendingNode, control: NearControl) -> None:
    store = SimStorage()
    pulling = Pulling(control, store=store)
    try:
        put = Gathered(1)
        pulling.store.put(
            NAMES[:1], [(memoryview(bytearray(content_of(NAMES[0]))),)], time.monotonic() + 60, put.each, lambda _: None
        )
        store.crank()
        node.have(NAMES[:2])
        lent = node.desk.lend([LentObject(NAMES[1], (node.pages[NAMES[1]],))], 30.0)
        answer = control.borrow(SCOPE, NAMES[0].key, [NAMES[0].part], 1.0)
        assert answer.loan is not None
        crooked = answer._replace(loan=answer.loan._replace(lease=lent.lease, secret=lent.secret, lent=(True,)))
        control.borrow = lambda *_: crooked  # type: ignore[method-assign]
        assert pulling.fetch(NAMES[:1]) == [WRONG]
        assert NAMES[0] in store.objects
        assert pulling.fetch(NAMES[:1]) == [OK], "the peer rests, and the store has it"
    finally:
        pulling.close()


def test_a_peer_rests_longer_each_time_and_is_well_after_one_answer(control: NearControl) -> None:
    now = [0.0]
    peer = Peer(control, lambda: now[0])
    pauses = []
    for _ in range(10):
        peer.failed("no answer")
        began = now[0]
        while not peer.is_usable:
            now[0] += FIRST_PAUSE_SECONDS / 2
        pauses.append(now[0] - began)
    assert pauses[0] == FIRST_PAUSE_SECONDS
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_SECONDS
    peer.worked(1)
    peer.failed("again")
    assert not peer.is_usable
    now[0] += FIRST_PAUSE_SECONDS
    assert peer.is_usable


def test_another_life_of_a_peer_may_have_what_the_last_one_lacked(control: NearControl) -> None:
    now = [0.0]
    peer = Peer(control, lambda: now[0])
    peer.worked(1)
    peer.had_nothing(b"key")
    assert peer.lacks(b"key")
    peer.worked(1)
    assert peer.lacks(b"key")
    peer.worked(2)
    assert not peer.lacks(b"key")
    peer.had_nothing(b"key")
    now[0] += ABSENT_SECONDS
    assert not peer.lacks(b"key")


def test_leases_of_two_lives_never_meet() -> None:
    quiet: list[int] = []
    first, second = (LoanDesk(lambda: 0.0, quiet.append) for _ in range(2))
    lease = first.lend([], 30.0).lease
    second.lend([], 30.0)
    assert not second.beat(lease)
    second.give_back(lease)
    assert len(second) == 1
    assert quiet == []


def test_a_canary_comes_back_where_there_is_no_store() -> None:
    nowhere = Nowhere()
    store = ObjectStore(nowhere, time.monotonic)
    store.start()
    page = (memoryview(bytearray(content_of(NAMES[0]))),)
    put, got, large = Gathered(1), Gathered(1), Gathered(1)
    store.put(NAMES[:1], [page], 1e9, put.each, lambda _: None)
    store.get(NAMES[:1], [(memoryview(bytearray(PAGE_BYTES)),)], 1e9, got.each, lambda _: None)
    store.put(NAMES[:1], [(memoryview(bytearray(1 << 20)),)], 1e9, large.each, lambda _: None)
    assert put.wait() + got.wait() + large.wait() == [OK, OK, BUSY]
    nowhere.close()


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
