"""Blocks that another node borrows stay on the host until they are returned, and delay nothing else."""

from __future__ import annotations

import itertools
import random
from contextlib import suppress

import pytest

from cachesvc.flows import pinning
from cachesvc.flows.core import tidy
from cachesvc.flows.leases import close_lease
from cachesvc.flows.loads import end_lending, lend
from cachesvc.flows.registration import idle_models
from cachesvc.ledger.storage_state import LentBlocks
from cachesvc.model.errors import PoolExhausted
from cachesvc.model.words import KEY_BYTES, NO_PAGE, READY, Direction, Urgency, WritePolicy
from tests.long_cases import looped
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, rig_of, serve, windowed


def stored(prompt: str, *, host: int = 16, rig: Rig | None = None) -> Rig:
    """A node that has a prompt on the host and nowhere else."""
    made = rig or rig_of(one_group(), device=[16], host=[host], policy=WritePolicy.WRITE_THROUGH)
    lease = made.lease()
    serve(made, lease, 1, prompt)
    made.settle()
    close_lease(made.core, lease, quiesced=True)
    pinning.evict(made.core, 1, "device", 0)
    return made


def filling(before: str, prompt: str, *, rig: Rig | None = None) -> Rig:
    """A node that has one prompt on the host, and copies a longer one there."""
    made = rig or rig_of(one_group(), device=[16], host=[16], policy=WritePolicy.WRITE_THROUGH)
    if before:
        stored(before, rig=made)
    serve(made, made.lease(), 1, prompt)
    return made


def fail_all(rig: Rig) -> None:
    for ticket in list(rig.mover.transfers):
        rig.land(ticket, "the copy engine failed")


def borrow(rig: Rig, keys: bytes) -> LentBlocks | None:
    return rig.run(lend, rig.model, keys)


def end(rig: Rig, lent: LentBlocks) -> None:
    end_lending(rig.core, rig.model, lent)
    rig.check()


def test_what_is_on_the_host_is_lent_and_stays() -> None:
    rig = stored("abcd")
    lent = borrow(rig, chain(*"abcdef"))
    assert lent is not None
    rows = [rig.model.blocks.index.rows[chain(*"abcd")[at * KEY_BYTES :][:KEY_BYTES]] for at in range(4)]
    assert list(lent.rows) == rows
    assert list(lent.pages[0]) == [rig.host.pages[0][row] for row in rows]
    pinning.evict(rig.core, 1, "host", 0)
    assert len(rig.host_keys()) == 4, "lent blocks are not evicted"
    assert idle_models(rig.core) == [], "nor its model"
    end(rig, lent)
    assert idle_models(rig.core) == [rig.model]
    pinning.evict(rig.core, 1, "host", 0)
    assert rig.host_keys() == set()
    assert rig.core.counters["lent_blocks"] == rig.core.counters["lent_blocks_back"] == 4


def test_a_stretch_of_a_prompt_is_lent_without_what_is_before_it() -> None:
    rig = stored("abcd")
    lent = borrow(rig, chain(*"abcd")[2 * KEY_BYTES :])
    assert lent is not None
    assert len(lent.rows) == 2
    end(rig, lent)


@pytest.mark.parametrize("keys", [chain("x"), chain(*"abcd")[KEY_BYTES:] + chain("a"), chain("b") + chain(*"abcd")])
def test_what_is_not_there_or_not_chained_is_not_lent(keys: bytes) -> None:
    rig = stored("abcd")
    lent = borrow(rig, keys)
    if lent is not None:
        assert keys.startswith(chain(*"abcd")[KEY_BYTES:]), "of keys that are chained as far as they are known"
        assert len(lent.rows) == 3
        end(rig, lent)


def test_what_is_on_a_device_alone_is_saved_at_once_and_lent_meanwhile() -> None:
    rig = rig_of(one_group(), device=[16], host=[16])
    serve(rig, rig.lease(), 1, "abc")
    lent = rig.once(lend, rig.model, chain(*"abc"))
    assert isinstance(lent, LentBlocks)
    (transfer,) = rig.mover.transfers.values()
    assert (transfer.direction, transfer.urgency) == (Direction.STORE, Urgency.AWAITED)
    assert (len(lent.rows), lent.ready()) == (3, 0)
    rig.check()
    rig.settle()
    assert (lent.ready(), lent.is_cut) == (3, False)
    end(rig, lent)


def test_what_is_on_its_way_to_the_host_is_lent_and_hurries() -> None:
    rig = filling("ab", "abcd")
    lent = rig.once(lend, rig.model, chain(*"abcd"))
    assert isinstance(lent, LentBlocks)
    assert {rig.core.ledger.tickets.running[each].urgency for each in rig.mover.transfers} == {Urgency.AWAITED}
    changed: list[int] = []
    lent.on_change = lambda: changed.append(lent.ready())
    assert (len(lent.rows), lent.ready()) == (4, 2)
    rig.settle()
    assert changed == [4]
    end(rig, lent)


def test_a_copy_that_fails_cuts_the_loan_before_its_blocks() -> None:
    rig = filling("ab", "abcd")
    lent = rig.once(lend, rig.model, chain(*"abcd"))
    assert isinstance(lent, LentBlocks)
    changed: list[int] = []
    lent.on_change = lambda: changed.append(lent.ready())
    fail_all(rig)
    assert (changed[-1], lent.is_cut) == (2, True)
    pinning.evict(rig.core, 1, "host", 0)
    assert len(rig.host_keys()) == 2, "what has come stays"
    end(rig, lent)
    pinning.evict(rig.core, 1, "host", 0)
    assert rig.host_keys() == set()


def test_a_loan_that_is_over_does_not_hear_of_its_copies() -> None:
    rig = filling("", "ab")
    lent = rig.once(lend, rig.model, chain(*"ab"))
    assert isinstance(lent, LentBlocks)
    lent.on_change = lambda: pytest.fail("it is over")
    end(rig, lent)
    fail_all(rig)
    assert rig.host_keys() == set()


@pytest.mark.parametrize("fails", [False, True])
def test_windows_that_are_on_their_way_are_lent(fails: bool) -> None:
    rig = filling("", "abcd", rig=rig_of(windowed(8), device=[16, 16], host=[16, 16], policy=WritePolicy.WRITE_THROUGH))
    lent = rig.once(lend, rig.model, chain(*"abcd"))
    assert isinstance(lent, LentBlocks)
    assert [page != NO_PAGE for page in lent.pages[1]][-2:] == [True, True]
    (fail_all if fails else Rig.settle)(rig)
    assert (lent.ready(), lent.is_cut) == ((0, True) if fails else (4, False))
    end(rig, lent)


def test_windows_are_lent_where_they_are() -> None:
    rig = stored("abcd", rig=rig_of(windowed(8), device=[16, 16], host=[16, 16], policy=WritePolicy.WRITE_THROUGH))
    lent = borrow(rig, chain(*"abcd"))
    assert lent is not None
    has_window = [page != NO_PAGE for page in lent.pages[1]]
    assert has_window[-2:] == [True, True]
    before = [rig.host.pages[1][row] for row in lent.rows]
    pinning.evict(rig.core, 1, "host", 0)
    assert [rig.host.pages[1][row] for row in lent.rows] == before, "windowed copies stay too"
    end(rig, lent)
    pinning.evict(rig.core, 1, "host", 0)
    assert rig.host_keys() == set()


def test_two_borrowers_of_one_prompt() -> None:
    rig = stored("abcd")
    first, second = borrow(rig, chain(*"abcd")), borrow(rig, chain(*"ab"))
    assert first is not None
    assert second is not None
    end(rig, first)
    pinning.evict(rig.core, 1, "host", 0)
    assert len(rig.host_keys()) == 2
    end(rig, second)


class LendingWalk:
    """Prompts, loans, landings and failures in an order that a seed decides; the audit runs after each step."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        policy = self.random.choice([WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
        layout = self.random.choice([one_group(), windowed(8)])
        groups = len(layout.groups)
        replicas = self.random.choice([1, 2])
        self.rig = rig_of(layout, device=[12] * groups, host=[10] * groups, policy=policy, replicas=replicas)
        self.leases = [self.rig.lease(f"l{replica}", replica) for replica in range(replicas)]
        self.loans: list[LentBlocks] = []
        self.requests = itertools.count(1)

    def prompt(self) -> str:
        return self.random.choice(["abcdefgh", "abcxyz", "opqrst"])[: self.random.randint(1, 8)]

    def serve(self) -> None:
        with suppress(PoolExhausted):
            serve(self.rig, self.random.choice(self.leases), next(self.requests), self.prompt())

    def lend(self) -> None:
        answer = self.rig.once(lend, self.rig.model, chain(*self.prompt()))
        if isinstance(answer, LentBlocks):
            self.loans.append(answer)

    def end(self) -> None:
        if self.loans:
            end(self.rig, self.loans.pop(self.random.randrange(len(self.loans))))

    def land(self) -> None:
        if self.rig.mover.transfers:
            ticket = self.random.choice(list(self.rig.mover.transfers))
            fails = self.random.random() < 0.3
            self.rig.land(ticket, "it failed" if fails else "", may_write=fails and self.random.random() < 0.5)

    def evict(self) -> None:
        pinning.evict(self.rig.core, 1, self.random.choice(["device", "host"]), 0)
        self.rig.check()

    def tidy(self) -> None:
        if self.rig.core.chores:
            tidy(self.rig.core.chores)
            self.rig.check()

    def step(self) -> None:
        self.random.choice([self.serve, self.lend, self.lend, self.end, self.land, self.land, self.evict, self.tidy])()
        for lent in self.loans:
            assert lent.ready() <= len(lent.rows)
            states = self.rig.host.states[self.rig.host.lead]
            assert all(states[row] == READY for row in lent.rows[: lent.ready()]), "what may be sent is there"


@looped("seed", range(2), range(6))
def test_loans_hold_what_they_may_send_whatever_becomes_of_copies(seed: int) -> None:
    walk = LendingWalk(seed)
    for _ in range(80):
        walk.step()
    while walk.loans or walk.rig.mover.transfers or walk.rig.core.chores:
        for step in (walk.end, walk.land, walk.tidy):
            step()
    assert not walk.rig.model.lent
