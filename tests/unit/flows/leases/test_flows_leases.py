"""Leases and the processes behind them: loss, quarantine, and pages that come back only when no process can write
them."""

from __future__ import annotations

import pytest

from cachesvc.flows import pinning
from cachesvc.flows.allocate import allocate, refill_stock, swap_out
from cachesvc.flows.core import Limits, resolve, tidy_all
from cachesvc.flows.leases import (
    MOST_MEMBERS,
    attach,
    close_lease,
    detach,
    lose_silent,
    may_map,
    open_lease,
    process_arrived,
    process_gone,
)
from cachesvc.flows.match import match, prefetch
from cachesvc.flows.publish import publish
from cachesvc.flows.registration import PoolRequest, RegisterRequest, register
from cachesvc.ledger.ledger import Lease, LeaseState, first_id
from cachesvc.model.errors import InvalidRequest, KeyReused, LeaseLost, LimitExceeded, NotFound, Unavailable
from cachesvc.model.numbers import most_of, share_of
from cachesvc.model.words import PageState, WritePolicy
from tests.unit.flows.models.test_flows_models import Desk
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, rig_of, serve

SCHEDULER, WORKER = b"scheduler", b"worker"


def engine() -> tuple[Rig, str]:
    """A lease of two processes that holds two sealed blocks, two private pages and a stock of one."""
    rig = rig_of(one_group(), device=(8,))
    for token in (SCHEDULER, WORKER):
        process_arrived(rig.core, token, 1, 1)
    lease = open_lease(rig.core, 1, 0, "engine", SCHEDULER, 5, 0.0).id
    for token in (SCHEDULER, WORKER):
        attach(rig.core, resolve(rig.core.ledger, lease, 0.0), 0, token)
    rig.run(match, lease, 1, chain(*"abcd"), 0)
    rig.run(allocate, lease, 1, 4)
    rig.run(publish, lease, 1, 0, b"", 2)
    rig.run(refill_stock, lease, (1,))
    return rig, lease


def counts(rig: Rig) -> tuple[int, int, int]:
    """Free, sealed, quarantined."""
    pool = rig.place().pools[0]
    return pool.counts[PageState.FREE], pool.counts[PageState.SEALED], pool.counts[PageState.QUARANTINED]


@pytest.mark.parametrize(
    ("end", "counted"),
    [
        ("closed", {"leases_ended_closed": 1}),
        ("silent", {"leases_ended_silent": 1, "leases_lost": 1}),
        ("process_ended", {"leases_ended_process_ended": 1, "leases_lost": 1}),
    ],
)
def test_a_lease_that_was_closed_is_not_counted_as_lost(end: str, counted: dict[str, int]) -> None:
    rig, lease = engine()
    if end == "closed":
        close_lease(rig.core, lease, quiesced=True)
    elif end == "silent":
        lose_silent(rig.core, 30.0, 31.0)
    else:
        process_gone(rig.core, SCHEDULER)
    assert {name: count for name, count in rig.core.counters.items() if name.startswith("leases_")} == counted


def test_silence_costs_the_lease_but_keeps_its_pages_away() -> None:
    rig, lease = engine()
    assert lose_silent(rig.core, 30.0, 30.0) == []
    assert lose_silent(rig.core, 30.0, 30.5) == [lease]
    rig.check()
    assert counts(rig) == (3, 2, 3)
    for flow in ((publish, lease, 1, 2, b"", 2), (allocate, lease, 1, 5), (match, lease, 2, b"", 0)):
        with pytest.raises(LeaseLost, match="silent"):
            rig.run(*flow)
    with pytest.raises(LeaseLost):
        resolve(rig.core.ledger, lease, 31.0)
    assert rig.model.computing == {}
    close_lease(rig.core, lease, quiesced=False)
    assert counts(rig) == (3, 2, 3), "not without its word that nothing writes any more"
    close_lease(rig.core, lease, quiesced=True)
    rig.check()
    assert counts(rig) == (6, 2, 0)
    close_lease(rig.core, lease, quiesced=True)
    with pytest.raises(LeaseLost):
        resolve(rig.core.ledger, lease, 32.0)


def test_quarantine_ends_with_the_last_process() -> None:
    rig, _ = engine()
    process_gone(rig.core, WORKER)
    rig.check()
    assert counts(rig) == (3, 2, 3)
    process_gone(rig.core, SCHEDULER)
    rig.check()
    assert counts(rig) == (6, 2, 0)
    assert rig.core.ledger.leases == {}


def test_quarantine_outlives_the_first_process_of_a_silent_engine() -> None:
    rig, lease = engine()
    assert lose_silent(rig.core, 30.0, 31.0) == [lease]
    process_gone(rig.core, WORKER)
    rig.check()
    assert counts(rig) == (3, 2, 3), "the scheduler's process may still write them"
    process_gone(rig.core, SCHEDULER)
    rig.check()
    assert counts(rig) == (6, 2, 0)


def test_an_engine_that_closes_its_lease_has_lost_none() -> None:
    ended = {"closed": 0, "silent": 1, "process_ended": 1}
    for cause, lost in ended.items():
        rig, lease = engine()
        if cause == "closed":
            close_lease(rig.core, lease, quiesced=True)
        elif cause == "silent":
            assert lose_silent(rig.core, 30.0, 31.0) == [lease]
            close_lease(rig.core, lease, quiesced=True)
        else:
            process_gone(rig.core, SCHEDULER)
        counters = rig.core.counters
        assert {name: counters.get(f"leases_ended_{name}", 0) for name in ended} == dict.fromkeys(ended, 0) | {cause: 1}
        assert counters.get("leases_lost", 0) == lost


def test_the_only_process_ends() -> None:
    """Found by reading: the lease was forgotten twice, and the second time raised KeyError."""
    rig = rig_of(one_group(), device=(8,))
    process_arrived(rig.core, SCHEDULER, 1, 1)
    lease = open_lease(rig.core, 1, 0, "engine", SCHEDULER, 1, 0.0).id
    rig.run(match, lease, 1, b"", 0)
    rig.run(allocate, lease, 1, 3)
    process_gone(rig.core, SCHEDULER)
    process_gone(rig.core, SCHEDULER)
    rig.check()
    assert counts(rig) == (8, 0, 0)


def test_the_last_writer_detaches_from_a_lost_lease() -> None:
    """Found by reading: with its opener gone and its worker detached, a lease stayed in quarantine for good."""
    rig, lease = engine()
    process_gone(rig.core, SCHEDULER)
    assert counts(rig) == (3, 2, 3)
    detach(rig.core, lease, 0, WORKER)
    rig.check()
    assert counts(rig) == (6, 2, 0)
    detach(rig.core, lease, 0, WORKER)


def test_who_detached_no_longer_counts() -> None:
    rig, lease = engine()
    detach(rig.core, lease, 0, WORKER)
    process_gone(rig.core, WORKER)
    resolve(rig.core.ledger, lease, 1.0)
    process_gone(rig.core, SCHEDULER)
    assert counts(rig) == (6, 2, 0)


def test_opening_again_with_the_same_key_gives_the_same_lease() -> None:
    rig, lease = engine()
    assert open_lease(rig.core, 1, 0, "engine", SCHEDULER, 5, 1.0).id == lease
    assert open_lease(rig.core, 1, 0, "engine", SCHEDULER, 6, 1.0).id != lease
    unkeyed = {open_lease(rig.core, 1, 0, "engine", SCHEDULER, 0, 1.0).id for _ in range(2)}
    assert len(unkeyed) == 2, "id 0 is never remembered"
    two = rig_of(one_group(), device=(8,), replicas=2)
    process_arrived(two.core, SCHEDULER, 1, 1)
    open_lease(two.core, 1, 0, "engine", SCHEDULER, 5, 1.0)
    with pytest.raises(KeyReused):
        open_lease(two.core, 1, 1, "engine", SCHEDULER, 5, 1.0)


def instance(
    first: bytes = SCHEDULER, *, attached: tuple[bytes, ...] = (SCHEDULER, WORKER), host: int = 0
) -> tuple[Rig, str]:
    """An engine of two processes that share it, whichever comes first; the scheduler holds what is held."""
    rig = rig_of(one_group(), device=(8,), host=(host,))
    for token in (SCHEDULER, WORKER):
        process_arrived(rig.core, token, 1, 1)
    second = WORKER if first == SCHEDULER else SCHEDULER
    lease = open_lease(rig.core, 1, 0, "engine", first, 5, 0.0, "uuid")
    assert open_lease(rig.core, 1, 0, "engine", second, 1, 0.0, "uuid") is lease
    for token in attached:
        attach(rig.core, resolve(rig.core.ledger, lease.id, 0.0), 0, token)
    member = lease.members[SCHEDULER]
    rig.run(match, lease.id, first_id(member) + 1, chain(*"abcd"), 0)
    rig.run(allocate, lease.id, first_id(member) + 1, 4)
    rig.run(publish, lease.id, first_id(member) + 1, 0, b"", 2)
    rig.run(refill_stock, lease.id, (1,), member)
    rig.check()
    return rig, lease.id


@pytest.mark.parametrize("first", [SCHEDULER, WORKER])
def test_a_lease_of_an_instance_lives_while_one_of_its_processes_does(first: bytes) -> None:
    rig, lease = instance(first)
    process_gone(rig.core, WORKER)
    rig.check()
    assert counts(rig) == (3, 2, 0), "the scheduler goes on with all that it has"
    process_gone(rig.core, SCHEDULER)
    rig.check()
    assert counts(rig) == (6, 2, 0)
    assert rig.core.ledger.leases == {}
    assert rig.core.ledger.lost == {lease: "its process ended"}


@pytest.mark.parametrize("first", [SCHEDULER, WORKER])
def test_what_a_dead_process_held_ends_and_waits_for_those_who_may_write_it(first: bytes) -> None:
    rig, lease = instance(first)
    process_gone(rig.core, SCHEDULER)
    rig.check()
    held = rig.core.ledger.leases[lease]
    assert (counts(rig), held.sequences) == ((3, 2, 3), {}), "the worker's kernels may run on"
    assert not any(rig.place().pins)
    detach(rig.core, lease, 0, WORKER)
    rig.check()
    assert counts(rig) == (6, 2, 0)
    assert resolve(rig.core.ledger, lease, 1.0).lease is held, "the worker is one of its processes still"
    process_arrived(rig.core, b"next", 1, 1)
    assert open_lease(rig.core, 1, 0, "engine", b"next", 1, 0.0, "uuid") is held
    rig.run(match, lease, first_id(held.members[b"next"]) + 1, chain(*"abcd"), 0)
    rig.check()
    process_gone(rig.core, WORKER)
    assert resolve(rig.core.ledger, lease, 1.0).lease is held


def test_an_instance_whose_processes_come_and_go_ends_before_all_pages_wait_for_one_that_stays() -> None:
    rig, lease = instance()
    process_gone(rig.core, SCHEDULER)
    held = rig.core.ledger.leases[lease]
    for number in range(2):
        assert held.state is LeaseState.LIVE
        assert counts(rig) == (3 - number, 2, 3 + number)
        token = b"next %d" % number
        process_arrived(rig.core, token, 1, 1)
        assert open_lease(rig.core, 1, 0, "engine", token, 1, 0.0, "uuid") is held
        sequence = first_id(held.members[token]) + 1
        rig.run(match, lease, sequence, chain(*"wxyz"[number]), 0)
        rig.run(allocate, lease, sequence, 1)
        process_gone(rig.core, token)
        rig.settle()
        rig.check()
    assert held.state is LeaseState.QUARANTINED
    with pytest.raises(LeaseLost, match="open it anew"):
        resolve(rig.core.ledger, lease, 1.0)
    assert counts(rig) == (1, 2, 5)
    fresh = open_lease(rig.core, 1, 0, "engine", WORKER, 2, 1.0, "uuid")
    assert fresh is not held
    close_lease(rig.core, lease, quiesced=True, token=WORKER)
    tidy_all(rig.core)
    rig.check()
    assert counts(rig) == (6, 2, 0)


def test_what_a_dead_process_held_is_free_where_no_other_has_it_mapped() -> None:
    rig, _ = instance(attached=(SCHEDULER,))
    process_gone(rig.core, SCHEDULER)
    rig.check()
    assert counts(rig) == (6, 2, 0)


@pytest.mark.parametrize("is_attached", [True, False])
def test_the_swap_of_a_dead_process_lands_where_another_may_write(is_attached: bool) -> None:
    rig, lease = instance(attached=(WORKER,) if is_attached else (), host=8)
    rig.run(swap_out, lease, 1)
    process_gone(rig.core, SCHEDULER)
    rig.check()
    assert counts(rig)[2] == (1 if is_attached else 0), "its stock"
    rig.settle()
    rig.check()
    assert counts(rig) == ((3, 2, 3) if is_attached else (6, 2, 0))
    process_gone(rig.core, WORKER)
    rig.check()
    assert counts(rig) == (6, 2, 0)


def test_processes_of_an_instance_leave_one_by_one_or_all_at_once() -> None:
    rig, lease = instance()
    close_lease(rig.core, lease, quiesced=True, token=SCHEDULER)
    rig.check()
    assert counts(rig) == (3, 2, 3), "its own pages wait for the worker"
    close_lease(rig.core, lease, quiesced=True, token=SCHEDULER)
    resolve(rig.core.ledger, lease, 1.0)
    close_lease(rig.core, lease, quiesced=False, token=WORKER)
    rig.check()
    assert counts(rig) == (3, 2, 3), "it may still write"
    with pytest.raises(LeaseLost, match="closed"):
        resolve(rig.core.ledger, lease, 1.0)
    close_lease(rig.core, lease, quiesced=True, token=WORKER)
    rig.check()
    assert counts(rig) == (6, 2, 0)
    assert rig.core.ledger.leases == {}
    rig, lease = instance()
    close_lease(rig.core, lease, quiesced=True)
    rig.check()
    assert (counts(rig), rig.core.ledger.leases) == ((6, 2, 0), {})


def test_who_left_without_being_quiet_may_still_write() -> None:
    rig, lease = instance(attached=(SCHEDULER,))
    close_lease(rig.core, lease, quiesced=False, token=SCHEDULER)
    rig.check()
    assert counts(rig) == (3, 2, 3)
    process_gone(rig.core, SCHEDULER)
    rig.check()
    assert counts(rig) == (6, 2, 0)
    resolve(rig.core.ledger, lease, 1.0)


def test_silence_of_an_instance_is_that_of_all_its_processes() -> None:
    rig, lease = instance()
    assert lose_silent(rig.core, 30.0, 31.0) == [lease]
    rig.check()
    assert counts(rig) == (3, 2, 3)
    fresh = open_lease(rig.core, 1, 0, "engine", WORKER, 2, 31.0, "uuid")
    assert fresh.id != lease
    process_gone(rig.core, SCHEDULER)
    rig.check()
    assert counts(rig) == (3, 2, 3)
    close_lease(rig.core, lease, quiesced=True, token=WORKER)
    rig.check()
    assert counts(rig) == (6, 2, 0)
    assert resolve(rig.core.ledger, fresh.id, 32.0).lease is fresh


def test_who_does_not_share_a_lease_has_one_of_its_own() -> None:
    rig, lease = instance()
    process_arrived(rig.core, b"stranger", 9, 2)
    process_arrived(rig.core, b"other", 9, 1)
    others = [
        open_lease(rig.core, 1, 0, "engine", b"stranger", 1, 0.0, "uuid"),
        open_lease(rig.core, 1, 0, "engine", b"other", 1, 0.0, "another"),
        open_lease(rig.core, 1, 0, "engine", b"other", 2, 0.0),
    ]
    assert len({lease, *(each.id for each in others)}) == 4
    assert [each.members for each in others] == [{b"stranger": 0}, {b"other": 0}, {b"other": 0}]
    held = rig.core.ledger.leases[lease]
    assert open_lease(rig.core, 1, 0, "engine", WORKER, 9, 0.0, "uuid") is held
    assert held.members == {SCHEDULER: 0, WORKER: 1}
    with pytest.raises(KeyReused):
        open_lease(rig.core, 1, 0, "engine", SCHEDULER, 5, 0.0, "another")
    with pytest.raises(InvalidRequest, match="of no process of this lease"):
        rig.run(match, lease, first_id(2) + 1, b"", 0)


def test_an_instance_has_so_many_processes_and_may_be_joined_while_the_daemon_drains() -> None:
    rig, lease = instance()
    for number in range(2, MOST_MEMBERS):
        process_arrived(rig.core, b"%d" % number, 1, 1)
        open_lease(rig.core, 1, 0, "engine", b"%d" % number, 1, 0.0, "uuid")
    process_arrived(rig.core, b"late", 1, 1)
    with pytest.raises(LimitExceeded, match="processes of a lease"):
        open_lease(rig.core, 1, 0, "engine", b"late", 1, 0.0, "uuid")
    rig.core.ledger.draining = True
    process_gone(rig.core, b"2")
    assert open_lease(rig.core, 1, 0, "engine", b"late", 1, 0.0, "uuid").id == lease, "nothing new is opened"
    rig.check()


def test_a_waiting_call_does_not_turn_the_clock_back() -> None:
    """Found by reading: a call that is run again brings the time when it began."""
    rig, lease = engine()
    resolve(rig.core.ledger, lease, 50.0)
    rig.now = 1.0
    rig.run(allocate, lease, 1, 4)
    assert lose_silent(rig.core, 30.0, 60.0) == []


def test_a_process_may_map_what_it_has_attached_and_the_words_of_that_model_there_alone() -> None:
    rig = rig_of(one_group(), device=(8,), replicas=2)
    pools = PoolRequest((8,)), PoolRequest((0,))
    register(rig.core, rig.vault, RegisterRequest("other", one_group(), b"", ("gpu-0",), *pools), 0.0)
    process_arrived(rig.core, WORKER, 1, 1)
    lease = open_lease(rig.core, 1, 0, "engine", WORKER, 5, 0.0).id
    slab, words = ("gpu-0", 1, 0, 0), ("gpu-0", 1, None, 0)
    assert not any(may_map(rig.core, WORKER, *what) for what in (slab, words)), "not attached yet"
    attach(rig.core, resolve(rig.core.ledger, lease, 0.0), 0, WORKER)
    assert all(may_map(rig.core, WORKER, *what) for what in (slab, words))
    for other in (("gpu-1", 1, 1, 0), ("gpu-1", 1, None, 0), ("gpu-0", 2, 0, 0), ("gpu-0", 2, None, 0)):
        assert not may_map(rig.core, WORKER, *other)
    assert not may_map(rig.core, SCHEDULER, *words)
    close_lease(rig.core, lease, quiesced=True)
    assert not any(may_map(rig.core, WORKER, *what) for what in (slab, words))


def test_what_cannot_be_opened_or_attached() -> None:
    rig, lease = engine()
    with pytest.raises(NotFound, match="model"):
        open_lease(rig.core, 9, 0, "engine", SCHEDULER, 7, 0.0)
    with pytest.raises(NotFound, match="replica"):
        open_lease(rig.core, 1, 9, "engine", SCHEDULER, 7, 0.0)
    with pytest.raises(NotFound, match="process"):
        open_lease(rig.core, 1, 0, "engine", b"unknown", 7, 0.0)
    for rank in (1, -1):
        with pytest.raises(InvalidRequest, match="rank"):
            attach(rig.core, resolve(rig.core.ledger, lease, 0.0), rank, SCHEDULER)
    with pytest.raises(NotFound):
        close_lease(rig.core, "never", quiesced=True)
    with pytest.raises(LimitExceeded):
        rig.run(refill_stock, lease, (1 << 20,))
    rig.core.ledger.draining = True
    with pytest.raises(Unavailable):
        open_lease(rig.core, 1, 0, "engine", SCHEDULER, 8, 0.0)
    assert open_lease(rig.core, 1, 0, "engine", SCHEDULER, 5, 0.0).id == lease, "a retry still finds its lease"


# Transfers under way and leases are shared out by process; what no process has asked for leaves room.


def token_of(pid: int) -> bytes:
    return b"process of pid %d" % pid


def lease_of(rig: Rig, pid: int, quota: int = 0) -> Lease:
    token = token_of(pid)
    if token not in rig.core.ledger.processes:
        process_arrived(rig.core, token, pid, 1000)
    return open_lease(rig.core, rig.model.id, 0, f"engine {pid}", token, 0, 0.0, quota=quota)


def on_host(blocks: int) -> Rig:
    """A rig whose host has ``blocks`` prompts of one block, and the device none."""
    rig = rig_of(one_group(), device=(blocks + 8,), host=(blocks + 8,), policy=WritePolicy.WRITE_THROUGH)
    lease = rig.lease("writer")
    for number in range(blocks):
        serve(rig, lease, number + 1, [number])
    rig.settle()
    pinning.evict(rig.core, rig.model.id, "device", 0)
    return rig


def prefetched(rig: Rig, lease: Lease, numbers: range) -> int:
    """Count prefetches of one block that begin before one is refused."""
    for begun, number in enumerate(numbers):
        try:
            rig.run(prefetch, lease.id, chain(number))
        except LimitExceeded:
            return begun
    return len(numbers)


@pytest.mark.parametrize("limit", ["transfers under way", "slots of the model"])
def test_a_process_with_many_loads_leaves_room_for_those_of_the_next(limit: str) -> None:
    rig = on_host(64)
    if limit == "transfers under way":
        rig.core.limits = Limits(running_tickets=32)
    else:
        rig.mover.slots = 32
    a, also_a = lease_of(rig, 1), lease_of(rig, 1)
    assert prefetched(rig, a, range(20)) == 20
    assert prefetched(rig, also_a, range(20, 40)) == 4, "three quarters, however many leases ask"
    assert prefetched(rig, lease_of(rig, 2), range(40, 64)) == 8
    rig.settle()
    assert prefetched(rig, lease_of(rig, 3), range(24, 40)) == 16


def test_processes_that_ask_at_once_have_equal_shares_and_backups_are_none_of_them() -> None:
    rig = on_host(64)
    rig.core.limits = Limits(running_tickets=32)
    writer = rig.lease("writer")
    for number in range(100, 104):
        serve(rig, writer, number + 1, [number])
    a, b = lease_of(rig, 1), lease_of(rig, 2)
    assert prefetched(rig, a, range(10)) == 10
    assert len(rig.core.ledger.tickets.running) == 14
    assert prefetched(rig, b, range(10, 40)) == 16
    rig.settle()
    for number in range(200, 204):
        serve(rig, writer, number + 1, [number])
    assert prefetched(rig, a, range(26, 60)) == 24


def test_backups_leave_a_quarter_of_all_transfers_to_what_processes_ask_for() -> None:
    rig = rig_of(one_group(), device=(64,), host=(64,), policy=WritePolicy.WRITE_THROUGH)
    rig.core.limits = Limits(running_tickets=16)
    lease = rig.lease("writer")
    for number in range(32):
        serve(rig, lease, number + 1, [number])
    assert len(rig.core.ledger.tickets.running) == 12


def with_leases(limit: int, *pids: int) -> Rig:
    """A rig of ``limit`` leases at a time, to which these processes are connected."""
    rig = rig_of(one_group(), device=(4,))
    rig.core.limits = Limits(leases=limit)
    for pid in pids:
        process_arrived(rig.core, token_of(pid), pid, 1000)
    return rig


def opened(rig: Rig, pid: int, quota: int = 0) -> int:
    """Count the leases that the process can open until it is refused."""
    for count in range(100):
        try:
            lease_of(rig, pid, quota)
        except LimitExceeded:
            return count
    return 100


def test_a_process_leaves_leases_to_others_that_are_connected() -> None:
    rig = with_leases(16, 1, 2)
    assert opened(rig, 1) == 12
    with pytest.raises(LimitExceeded, match="leases of this process: 13 is more than the limit of 12"):
        lease_of(rig, 1)
    process_arrived(rig.core, b"its other connection", 1, 1000)
    with pytest.raises(LimitExceeded, match="leases of this process: 13"):
        open_lease(rig.core, rig.model.id, 0, "engine 1", b"its other connection", 0, 0.0)
    assert [opened(rig, pid) for pid in (2, 3)] == [3, 1]


def test_a_process_that_is_alone_may_open_all_leases_and_the_next_still_gets_one() -> None:
    rig = with_leases(16, 1)
    assert opened(rig, 1) == 16
    with pytest.raises(LimitExceeded, match="leases: 17 is more than the limit of 16"):
        lease_of(rig, 1)
    assert [opened(rig, pid) for pid in range(2, 8)] == [1, 1, 1, 1, 0, 0], "a quarter more, one for each"


def test_a_process_whose_tenant_has_a_quota_has_no_share_beside_it() -> None:
    rig = with_leases(16, 1, 2)
    assert opened(rig, 1, quota=16) == 16
    assert opened(rig, 2) == 1


def test_a_share_is_never_nothing_and_leaves_room_for_one_that_comes_new() -> None:
    assert [share_of(8, busy) for busy in (1, 2, 3, 100)] == [6, 4, 2, 1]
    assert most_of("a", {}, 16) == 12
    assert most_of("b", {"a": 12}, 16) == 3
    assert most_of("c", {"a": 12, "b": 3}, 16) == 1


# -- models --------------------------------------------------------------------------------------------------------


def use_models(desk: Desk, pid: int, numbers: range) -> int:
    """Register models of a page, with a lease on each; count those before one is refused."""
    token = token_of(pid)
    if token not in desk.core.ledger.processes:
        process_arrived(desk.core, token, pid, 1000)
    for done, number in enumerate(numbers):
        try:
            request = RegisterRequest(
                f"model {number}",
                one_group(),
                device_pool=PoolRequest((1,)),
                party=(1000, pid),
                host_pool=PoolRequest((0,)),
            )
            made = register(desk.core, desk.vault, request, 0.0)
        except LimitExceeded:
            return done
        open_lease(desk.core, made.model.id, 0, "engine", token, 0, 0.0)
    return len(numbers)


def test_a_process_that_uses_all_models_leaves_one_to_the_next() -> None:
    """One process registered as many models as there may be, and the next engine's was refused for hours."""
    desk = Desk()
    desk.core.limits = Limits(models=8)
    assert use_models(desk, 1, range(20)) == 8, "alone it may use all"
    assert use_models(desk, 2, range(100, 120)) == 1, "its first one, beyond the limit"
    assert use_models(desk, 1, range(20, 30)) == 0
    assert use_models(desk, 3, range(200, 220)) == 1, "up to a quarter more"
    assert use_models(desk, 4, range(300, 320)) == 0


def test_processes_share_models_while_both_are_there() -> None:
    desk = Desk()
    desk.core.limits = Limits(models=8)
    process_arrived(desk.core, token_of(2), 2, 1000)
    assert use_models(desk, 1, range(20)) == 6, "three quarters: the next one gets in"
    assert use_models(desk, 2, range(100, 120)) == 1, "three quarters of what is left"
    lease_on_first(desk, 3)
    process_gone(desk.core, token_of(1))
    tidy_all(desk.core)
    assert use_models(desk, 2, range(200, 220)) >= 2, "idle models give way"


def test_a_model_that_several_processes_use_counts_to_none_of_them() -> None:
    desk = Desk()
    desk.core.limits = Limits(models=8)
    process_arrived(desk.core, token_of(2), 2, 1000)
    assert use_models(desk, 1, range(2)) == 2
    lease_on_first(desk, 2)
    assert use_models(desk, 1, range(10, 20)) == 5, "of the seven others it has three quarters"


def lease_on_first(desk: Desk, pid: int) -> None:
    token = token_of(pid)
    if token not in desk.core.ledger.processes:
        process_arrived(desk.core, token, pid, 1000)
    open_lease(desk.core, next(iter(desk.core.ledger.models)), 0, "engine", token, 0, 0.0)
