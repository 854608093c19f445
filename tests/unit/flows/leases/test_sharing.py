"""Transfers under way and leases are shared out by process; what no process has asked for leaves room."""

from __future__ import annotations

import pytest

from cachesvc.flows import pinning
from cachesvc.flows.core import Limits, tidy_all
from cachesvc.flows.leases import open_lease, process_arrived, process_gone
from cachesvc.flows.match import prefetch
from cachesvc.flows.registration import PoolRequest, RegisterRequest, register
from cachesvc.ledger.ledger import Lease
from cachesvc.model.errors import LimitExceeded
from cachesvc.model.numbers import most_of, share_of
from cachesvc.model.words import WritePolicy
from tests.unit.flows.models.test_flows_models import Desk
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, rig_of, serve


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
