"""A device's memory is gone: its replicas, their leases and their copies go, and nothing else does."""

from __future__ import annotations

import contextlib
import itertools
import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.flows.allocate import allocate
from cachesvc.flows.core import tidy
from cachesvc.flows.leases import empty_lost, lose_device
from cachesvc.flows.loads import lend
from cachesvc.flows.match import match
from cachesvc.flows.registration import PoolRequest, RegisterRequest, register
from cachesvc.flows.stored import want
from cachesvc.flows.transfers import carry_out
from cachesvc.ledger.change_log import Kind
from cachesvc.ledger.ledger import LeaseState
from cachesvc.ledger.storage_state import LentBlocks
from cachesvc.model.answers import Matched
from cachesvc.model.errors import LeaseLost, LedgerBroken, LoadFailed, NotFound, PoolExhausted
from cachesvc.model.words import WritePolicy
from cachesvc.questions.explanation import Feed
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, prefill, rig_of, serve, windowed
from tests.unit.rigs.peers_rig import asking, hit, shared, waits_for
from tests.unit.rigs.storage_flows_rig import WHOLE, keys_of, packed, storing, waits
from tests.unit.rigs.storage_flows_rig import hit as hit_with_storage

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


# Copies on a lost device are copied from, counted and trusted by no flow, and go in slices of bounded work.

PROMPT = "abcd"


def lose_and_return(rig: Rig, pages: int) -> str:
    """The device loses its memory, and comes back: a lease on its new replica."""
    rig.mover.detached |= {replica.id for replica in rig.model.replicas}
    rig.run(lose_device, "gpu-0", WHY)
    tidy_all(rig)
    return rig.lease("again", register_again(rig, pages))


def register_again(rig: Rig, pages: int) -> int:
    rig.vault.device_bytes["gpu-0"] = 1 << 20
    request = RegisterRequest("m", rig.model.layout, b"", ("gpu-0",), PoolRequest((pages,)), PoolRequest())
    made = register(rig.core, rig.vault, request, 0.0)
    made.replica.place.pieces.piece_blocks = 2
    return made.replica.id


def half_on_host(policy: WritePolicy = WritePolicy.WRITE_BACK, host: int = 32) -> Rig:
    """The first half of a prompt is on the device alone, and its end on the host alone."""
    rig = rig_of(one_group(), device=(6,), host=(host,), policy=policy)
    lease = rig.lease()
    serve(rig, lease, 1, PROMPT)
    serve(rig, lease, 2, "wxyz")
    rig.settle()
    assert (hit_of(rig, lease, 3)) == (2, 2)
    return rig


def hit_of(rig: Rig, lease: str, sequence: int, prompt: str = PROMPT) -> tuple[int, int]:
    answer = rig.run(match, lease, sequence, chain(*prompt), 0)
    assert isinstance(answer, Matched)
    return answer.device_blocks, answer.host_blocks


def test_what_hangs_below_lost_blocks_on_the_host_is_a_hit_once_they_are_computed_again() -> None:
    rig = half_on_host()
    lease = lose_and_return(rig, 6)
    assert rig.model.lost == []
    assert rig.model.blocks.index.lost == []
    assert hit_of(rig, lease, 1) == (0, 0)
    serve(rig, lease, 2, PROMPT[:2])
    assert hit_of(rig, lease, 3) == (2, 2)


def test_after_a_loss_last_copies_are_saved_as_ever() -> None:
    """A copy on memory that was gone counted as another whole one: the last copy was dropped unsaved."""
    rig = half_on_host()
    lease = lose_and_return(rig, 6)
    serve(rig, lease, 1, PROMPT)
    for number, prompt in enumerate(("efghij", "klmnop")):
        serve(rig, lease, 2 + number, prompt)
        rig.settle()
    assert set(packed(PROMPT)) <= rig.host_keys()


def test_after_a_loss_the_host_drops_no_only_copy_for_a_backup() -> None:
    rig = rig_of(one_group(), device=(16,), host=(4,), policy=WritePolicy.WRITE_THROUGH)
    serve(rig, rig.lease(), 1, PROMPT)
    rig.settle()
    assert len(rig.host_keys()) == 4
    rig.mover.detached.add(0)
    rig.run(lose_device, "gpu-0", WHY)  # and nothing of it is forgotten yet
    plan, met = rig.model.evictor.plan_host(1)
    assert met
    assert plan.drops == [rig.model.blocks.index.rows[packed(PROMPT)[3]]], "leaves first: none has another copy"
    carry_out(rig.core, rig.model, plan)
    tidy_all(rig)
    assert rig.host_keys() == set(packed(PROMPT)[:3])


def test_after_a_loss_what_storage_wants_is_saved_from_replicas_that_are_there() -> None:
    """One death of a mover took the model out of service: backups asked for slots of the replica that was lost."""
    at = storing(policy=WritePolicy.WRITE_BACK, device=6, host=32)
    at.storage.keeps_all = False
    rig = at.rig
    serve(rig, at.lease, 1, PROMPT)
    serve(rig, at.lease, 2, "wxyz")
    rig.settle()
    at.settle()
    lease = lose_and_return(rig, 6)
    serve(rig, lease, 1, PROMPT[:2])
    want(rig.core, rig.model, [rig.model.blocks.index.rows[packed(PROMPT)[3]]])
    at.settle()
    rig.settle()
    at.settle()
    assert set(keys_of(at.storage.keeps)) == set(packed(PROMPT))
    assert not rig.model.suspect


def test_after_a_loss_prompts_are_lent_that_were_computed_again() -> None:
    rig = half_on_host()
    lease = lose_and_return(rig, 6)
    assert rig.run(lend, rig.model, chain(*PROMPT)) is None
    serve(rig, lease, 1, PROMPT[:2])
    lent = rig.run(lend, rig.model, chain(*PROMPT))
    assert isinstance(lent, LentBlocks)
    assert len(lent.rows) == 4


def test_deaths_leave_nothing_behind() -> None:
    """Every death left a place whose columns grew on, and which each call looked at."""
    rig = rig_of(one_group(), device=(6,), host=(8,), policy=WritePolicy.WRITE_BACK)
    lease = rig.lease()
    for death in range(40):
        serve(rig, lease, 1, PROMPT)
        serve(rig, lease, 2, "wxyz")
        rig.settle()
        lease = lose_and_return(rig, 6)
        index = rig.model.blocks.index
        assert (len(index.places), len(index.told), len(index.lost), len(index.orders)) == (2, 2, 0, 2)
        assert [replica.id for replica in rig.model.replicas] == [death + 1]
        assert rig.model.lost == []
    assert len(rig.model.blocks.index.keys) < 64


def test_numbers_of_places_have_room_for_any_number_of_deaths() -> None:
    rig = rig_of(one_group(), device=(6,), host=(8,))
    rig.model.blocks.places_made = (1 << 31) + 1
    rig.run(lose_device, "gpu-0", WHY)
    replica = register_again(rig, 6)
    assert replica == 1 << 31
    serve(rig, rig.lease("again", replica), 1, "a")
    journal = rig.model.blocks.journal
    event = journal.read(journal.last, 1)[0]
    assert (event.place, event.kind, event.key) == (replica + 1, Kind.STORED, packed("a")[0])


def test_bare_rows_leave_with_the_last_block_below_them_in_slices() -> None:
    rig = half_on_host()
    lose_and_return(rig, 6)
    index = rig.model.blocks.index
    assert set(index.rows) == set(packed(PROMPT)), "the host has the end of it"
    rig.core.turns = rig.core.turns._replace(landed=1)
    plan, _ = rig.model.evictor.plan_host(32)
    carry_out(rig.core, rig.model, plan)
    left = len(index.rows)
    assert left
    while rig.core.chores:
        tidy(rig.core.chores)
        rig.check()
        assert left - len(index.rows) <= 1, "a turn forgets one"
        left = len(index.rows)
    assert left == 0


def test_followers_are_told_of_each_copy_that_is_lost_and_see_none_of_it_afterwards() -> None:
    rig = half_on_host()
    feed = Feed(rig.model, snapshot=False)
    feed.next()
    rig.run(lose_device, "gpu-0", WHY)
    tidy_all(rig)
    changes = feed.next()
    assert changes is not None
    gone = {run.keys[at : at + 32] for run in changes.runs for at in range(0, len(run.keys), 32)}
    assert {(run.reason, run.present, run.tier) for run in changes.runs} == {("lost", False, "device")}
    assert gone >= set(packed(PROMPT)[:2])
    snapshot = Feed(rig.model, snapshot=True)
    told = [snapshot.next() for _ in range(3)]
    assert all(run.tier == "host" for each in told if each is not None for run in each.runs)


def test_a_fetch_whose_parent_is_lost_ends() -> None:
    at = storing("abcdef", device=8, host=16)
    serve(at.rig, at.lease, 1, "ab")
    waits(at.ask("abcdef", 2)())
    at.rig.run(lose_device, "gpu-0", WHY)
    tidy_all(at.rig)
    assert at.rig.model.lost, "the fetch keeps the block that it was to go on below"
    at.tell([0, 1, 2, 3], WHOLE)
    assert at.rig.host_keys() == set()
    assert not at.rig.model.stored.fetches
    at.rig.run(empty_lost)
    tidy_all(at.rig)
    assert at.rig.model.lost == []
    assert not at.rig.model.blocks.index.rows


def test_a_fetch_goes_on_below_a_block_that_the_host_has_too() -> None:
    at = storing("abcdef", device=8, host=16, policy=WritePolicy.WRITE_THROUGH)
    serve(at.rig, at.lease, 1, "ab")
    at.rig.settle()
    at.settle()
    for key in list(at.rig.model.stored.keeping):
        at.tell_kept(key, WHOLE)
    waits(at.ask("abcdef", 2)())
    at.rig.run(lose_device, "gpu-0", WHY)
    tidy_all(at.rig)
    at.tell([0, 1, 2, 3], WHOLE)
    assert at.rig.host_keys() == set(packed("abcdef"))
    lease = at.rig.lease("again", register_again(at.rig, 8))
    answer = at.rig.run(partial(match), lease, 1, chain(*"abcdef"), 0)
    assert hit_with_storage(answer)[:2] == (0, 6)


def test_a_ticket_that_cannot_be_settled_ends_all_the_same() -> None:
    """Such tickets never ended: they counted against all transfers for good."""
    rig = rig_of(one_group(), device=(16,), host=(16,), policy=WritePolicy.WRITE_THROUGH)
    lease = rig.lease()
    ended: list[int] = []
    rig.core.on_ended = ended.extend
    prefill(rig, lease, 1, "ab")
    [ticket] = rig.mover.transfers
    row = rig.core.ledger.tickets.running[ticket].rows[0]
    rig.host.filling[row] = 0  # a defect: nothing knows any more that the ticket brings it
    del rig.mover.transfers[ticket]
    with pytest.raises(LedgerBroken, match=f"ticket {ticket}: .*filled on host by no ticket"):
        rig.land_unchecked(ticket)
    assert not rig.core.ledger.tickets.running
    assert ended == [ticket]
    assert "filled on host" in rig.core.ledger.tickets.get(ticket).reason
