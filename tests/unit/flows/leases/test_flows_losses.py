"""A device's memory is gone: its replicas, their leases and their copies go, and nothing else does."""

from __future__ import annotations

import contextlib
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.flows.allocate import allocate
from cachesvc.flows.core import tidy
from cachesvc.flows.leases import empty_lost, lose_device
from cachesvc.flows.match import match
from cachesvc.flows.registration import PoolRequest, RegisterRequest, register
from cachesvc.ledger.ledger import LeaseState
from cachesvc.model.answers import Matched
from cachesvc.model.errors import LeaseLost, LoadFailed, NotFound, PoolExhausted
from cachesvc.model.words import WritePolicy
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, prefill, rig_of, serve, windowed
from tests.unit.rigs.peers_rig import asking, hit, shared, waits_for

WHY = "its mover has ended"


def lose(rig: Rig, device: str = "gpu-0") -> list[str]:
    """Lose a device, and do all that is left to do."""
    lost = rig.run(lose_device, device, WHY)
    tidy_all(rig)
    return lost


def tidy_all(rig: Rig) -> None:
    while rig.core.chores:
        tidy(rig.core.chores)
        rig.check()


def is_forgotten(rig: Rig, replica: int = 0) -> bool:
    """True where nothing of a lost replica is left."""
    rig.run(empty_lost)
    tidy_all(rig)
    assert [each.id for each in rig.model.lost] == [place.number - 1 for place in rig.model.blocks.index.lost]
    return all(each.id != replica for each in (*rig.model.replicas, *rig.model.lost))


def again(rig: Rig, device: str = "gpu-0", pages: int = 16) -> int:
    """Register on the device again: which replica that is."""
    on_device = PoolRequest((pages,) * len(rig.model.layout.groups))
    request = RegisterRequest("m", rig.model.layout, b"", (device,), on_device, PoolRequest())
    rig.vault.device_bytes[device] = 1 << 20
    return register(rig.core, rig.vault, request, 0.0).replica.id


def test_leases_of_the_replica_are_lost_and_say_why_and_others_go_on() -> None:
    rig, a, b = shared("abcd")
    prefill(rig, a, 2, "abcxy")
    assert lose(rig) == [a]
    with pytest.raises(LeaseLost, match=r"gpu-0 lost its memory .*mover.*register again"):
        rig.run(match, a, 3, chain("a"), 0)
    rig.run(match, b, 3, chain("a"), 0)
    assert a not in rig.core.ledger.leases, "nothing that is gone needs a quarantine"
    assert is_forgotten(rig)
    assert lose(rig) == [], "once"


def test_the_replica_is_none_that_anybody_gets_again() -> None:
    rig, _, _ = shared("abcd")
    lose(rig)
    with pytest.raises(NotFound, match="register again"):
        rig.lease("c", 0)
    assert again(rig) == 2
    assert again(rig, "gpu-1") == 1, "the other device's is as it was"
    fresh = rig.lease("c", 2)
    answer = rig.run(match, fresh, 1, chain(*"abcd"), 0)
    assert isinstance(answer, Matched)
    assert hit(answer) == (0, 0)


def test_what_the_host_has_is_a_hit_for_the_next_replica() -> None:
    rig = rig_of(one_group(), device=(16,), host=(16,), policy=WritePolicy.WRITE_THROUGH)
    a = rig.lease()
    serve(rig, a, 1, "abcd")
    rig.settle()
    serve(rig, a, 2, "abcdef")  # whose end is on the device alone
    assert len(rig.host_keys()) == 4
    lose(rig)
    assert len(rig.host_keys()) == 4
    fresh = rig.lease("b", again(rig))
    answer = rig.run(match, fresh, 1, chain(*"abcdef"), 0)
    assert isinstance(answer, Matched)
    assert hit(answer) == (0, 4)


def test_what_another_replica_has_stays_there() -> None:
    rig, _, b = shared("abcd")
    ask = asking(rig, b, 1, "abcd")
    rig.land(waits_for(ask()))
    ask()
    lose(rig)
    assert len(rig.device_keys(1)) == 4
    assert is_forgotten(rig)


def test_nothing_is_loaded_from_memory_that_is_gone() -> None:
    rig, _, b = shared("abcd", host=16)
    rig.run(lose_device, "gpu-0", WHY)  # and what was there is not dropped yet
    answer = rig.once(match, b, 1, chain(*"abcd"), 0)
    assert isinstance(answer, Matched)
    assert hit(answer) == (0, 0)
    assert not rig.mover.transfers
    tidy_all(rig)


def test_copies_that_a_transfer_holds_go_once_it_has_ended() -> None:
    rig, _, b = shared("abcd")
    ask = asking(rig, b, 1, "abcd")
    ticket = waits_for(ask())
    lose(rig)
    assert rig.device_keys(0) == set(), "no flow sees them"
    assert rig.place(0).residents == 4, "the other device reads them yet"
    assert not is_forgotten(rig)
    rig.land(ticket)
    assert is_forgotten(rig)
    assert len(rig.device_keys(1)) == 4


def test_loads_under_way_fail_and_leave_nothing() -> None:
    rig = rig_of(one_group(), device=(8,), host=(8,))
    a = rig.lease()
    serve(rig, a, 1, "abcdefgh")
    prefill(rig, a, 2, "ijklmnop")  # what was there is written back
    rig.settle()
    rig.run(match, a, 3, chain(*"abcd"), 0)
    lost = rig.core.ledger.leases[a]
    lose(rig)
    rig.settle()
    assert is_forgotten(rig)
    assert lost.state is LeaseState.QUARANTINED
    assert rig.host_keys()


def test_windows_go_too() -> None:
    rig = rig_of(windowed(), device=(16, 16), host=(0, 0), replicas=2)
    a = rig.lease()
    prefill(rig, a, 1, "abcdef")
    rig.run(allocate, a, 1, 8)
    lose(rig)
    assert is_forgotten(rig)
    assert not rig.model.blocks.index.rows


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_whenever_a_device_is_lost_the_accounting_adds_up(seed: int) -> None:
    """Requests of two replicas in any state, transfers landed or not, well or not: the audits of the rig run after each
    step, and in the end nothing is left of the lost replica."""
    rng = random.Random(seed)
    policy = rng.choice(list(WritePolicy))
    layout = rng.choice((one_group(), windowed()))
    groups = len(layout.groups)
    rig = rig_of(layout, device=(12,) * groups, host=(10,) * groups, policy=policy, replicas=2)
    leases, numbers = [rig.lease("a", 0), rig.lease("b", 1)], itertools.count(1)
    lost_at = rng.randrange(20)
    for turn in range(25):
        if turn == lost_at:
            assert rig.run(lose_device, "gpu-0", WHY) == [leases[0]]
            leases[0] = rig.lease("c", again(rig, pages=12))
        act = rng.random()
        lease = rng.choice(leases)
        if act < 0.5:
            prompt = (
                "abcdefgh"[: rng.randint(1, 8)] if rng.random() < 0.5 else rng.sample("ijklmnop", rng.randint(1, 6))
            )
            with contextlib.suppress(PoolExhausted, LoadFailed):
                (serve if rng.random() < 0.7 else prefill)(rig, lease, next(numbers), prompt)
        elif act < 0.8 and rig.mover.transfers:
            rig.land(rng.choice(list(rig.mover.transfers)), rng.choice(("", "bus")))
        elif rig.core.chores:
            tidy(rig.core.chores)
            rig.check()
    rig.settle()
    assert is_forgotten(rig)
