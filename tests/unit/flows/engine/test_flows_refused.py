"""Transfers that cannot begin: flows refuse before they change anything, and no dead ticket is reported as running."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cachesvc.flows import pinning
from cachesvc.flows.allocate import allocate, swap_in, swap_out
from cachesvc.flows.core import Limits
from cachesvc.flows.loads import Sharing
from cachesvc.flows.match import match, prefetch
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import release
from cachesvc.model.answers import Matched
from cachesvc.model.errors import LimitExceeded, LoadFailed, PoolExhausted
from cachesvc.model.words import PageState, WritePolicy
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, prefill, rig_of, serve
from tests.unit.rigs.peers_rig import asking, hit, shared


def hosted(prompt: str, *, device: int = 8, policy: WritePolicy = WritePolicy.WRITE_THROUGH) -> tuple[Rig, str]:
    """A rig whose host alone has ``prompt``."""
    rig = rig_of(one_group(), device=(device,), host=(32,), policy=policy)
    a = rig.lease()
    serve(rig, a, 99, prompt)
    rig.settle()
    pinning.evict(rig.core, 1, "device", 0)
    rig.mover.all.clear()
    return rig, a


def state(rig: Rig) -> object:
    pools = [(list(pool.counts), pool.reserved) for pool in (*rig.place().pools, *rig.host.pools)]
    return pools, rig.device_keys(), rig.host_keys(), set(rig.core.ledger.tickets.running), len(rig.mover.all)


def no_slots(rig: Rig) -> None:
    rig.mover.slots = len(rig.mover.transfers)


def no_tickets(rig: Rig) -> None:
    rig.core.limits = Limits(running_tickets=len(rig.core.ledger.tickets.running))


def to_load() -> tuple[Rig, Callable[[], object]]:
    rig, a = hosted("ab")
    rig.run(match, a, 1, chain(*"abc"), 0)
    return rig, lambda: rig.once(allocate, a, 1, 3)


def to_prefetch() -> tuple[Rig, Callable[[], object]]:
    rig, a = hosted("ab")
    return rig, lambda: rig.once(prefetch, a, chain(*"ab"))


def to_go_out() -> tuple[Rig, Callable[[], object]]:
    rig = rig_of(one_group(), device=(8,), host=(8,))
    a = rig.lease()
    prefill(rig, a, 1, "ab")
    return rig, lambda: rig.once(swap_out, a, 1)


def to_come_in() -> tuple[Rig, Callable[[], object]]:
    rig, out = to_go_out()
    out()
    rig.settle()
    pinning.evict(rig.core, 1, "device", 0)
    [lease] = rig.core.ledger.leases
    return rig, lambda: rig.once(swap_in, lease, 1)


@pytest.mark.parametrize("take_away", [no_slots, no_tickets])
@pytest.mark.parametrize("made", [to_load, to_prefetch, to_go_out, to_come_in])
def test_a_flow_that_needs_a_transfer_is_refused_with_nothing_changed(
    made: Callable[[], tuple[Rig, Callable[[], object]]], take_away: Callable[[Rig], None]
) -> None:
    """Told OK, an engine waited on a ticket that ran nowhere and had no words, and took that for a bug of its own."""
    rig, call = made()
    take_away(rig)
    before = state(rig)
    for _ in range(3):
        with pytest.raises(LimitExceeded, match="transfers under way"):
            call()
        assert state(rig) == before
    rig.mover.slots, rig.core.limits = 1 << 20, Limits()
    call()
    assert len(rig.mover.transfers) == 1
    rig.settle()


def test_what_moves_nothing_needs_no_slot() -> None:
    rig, a = hosted("ab", policy=WritePolicy.WRITE_THROUGH)
    no_slots(rig)
    serve(rig, a, 1, "xyz")  # and is not backed up, since no mover can
    assert rig.mover.all == []
    rig.run(match, a, 2, chain(*"xyz"), 0)
    rig.run(allocate, a, 2, 8)
    rig.run(release, a, 2)


def test_without_a_slot_evictions_save_nothing_and_keep_nobody_up() -> None:
    rig = rig_of(one_group(), device=(4,), host=(32,))
    a = rig.lease()
    serve(rig, a, 1, "abcd")
    no_slots(rig)
    rig.run(match, a, 2, b"", 0)
    rig.run(allocate, a, 2, 3)
    assert (rig.mover.all, rig.host_keys(), len(rig.device_keys())) == ([], set(), 1)


def test_a_peer_is_done_without_where_no_transfer_can_begin() -> None:
    rig, _, b = shared("abcd")
    no_slots(rig)
    assert hit(asking(rig, b, 1, "abcd")()) == (0, 0)
    rig.mover.slots = 1 << 20
    rig, _, b = shared("abcd", host=16, near=False)
    no_tickets(rig)
    assert hit(asking(rig, b, 1, "abcd")()) == (0, 0)
    answer = rig.run(match, b, 2, chain(*"abcd"), 0, Sharing())
    assert isinstance(answer, Matched)


def refusing(rig: Rig) -> list[tuple[int, str]]:
    """Make the mover break its word from now on; the errors that callers get."""
    told: list[tuple[int, str]] = []
    rig.core.on_refused = lambda ticket, reason: told.append((ticket, reason))
    rig.mover.refusing = True
    return told


def test_a_load_that_the_mover_refuses_is_told_as_failed_at_once() -> None:
    rig, call = to_load()
    told = refusing(rig)
    answer = call()
    [ticket] = answer.tickets  # type: ignore[attr-defined]
    assert (ticket.state, ticket.reason, ticket.slot) == ("failed", "the mover refuses by order", None)
    assert told == [(ticket.id, "the mover refuses by order")]
    assert rig.core.counters["tickets_failed"] == 1
    assert rig.place().pools[0].counts[PageState.IN_FLIGHT] == 0
    [lease] = rig.core.ledger.leases
    with pytest.raises(LoadFailed, match="refuses by order"):
        rig.run(publish, lease, 1, 2, b"", 0)
    rig.run(release, lease, 1)
    assert rig.free() == [8]


def test_a_prefetch_that_the_mover_refuses_is_told_as_failed_and_holds_nothing() -> None:
    rig, call = to_prefetch()
    refusing(rig)
    answer = call()
    assert [ticket.state for ticket in answer.tickets] == ["failed"]  # type: ignore[attr-defined]
    [lease] = rig.core.ledger.leases.values()
    assert (lease.prefetches, rig.free()) == ({}, [8])


@pytest.mark.parametrize("made", [to_go_out, to_come_in])
def test_a_swap_that_the_mover_refuses_leaves_the_sequence_where_it_was(
    made: Callable[[], tuple[Rig, Callable[[], object]]],
) -> None:
    rig, call = made()
    refusing(rig)
    before = rig.free(), rig.host_keys()
    answer = call()
    assert [ticket.state for ticket in answer.tickets] == ["failed"]  # type: ignore[attr-defined]
    assert (rig.free(), rig.host_keys()) == before
    rig.mover.refusing = False
    call()
    rig.settle()


def test_a_write_back_that_the_mover_refuses_is_tried_again_and_then_done_without() -> None:
    rig = rig_of(one_group(), device=(4,), host=(32,))
    a = rig.lease()
    serve(rig, a, 1, "abcd")
    refusing(rig)
    rig.run(match, a, 2, b"", 0)
    tries = 0
    while not hasattr(rig.once(allocate, a, 2, 4), "tables"):
        tries += 1
    assert tries == 3
    assert rig.host_keys() == set()


def test_a_prompt_that_can_never_fit_is_too_large_also_behind_a_hit_of_its_own() -> None:
    """An engine that queues what is only ``full`` would never go on."""
    rig = rig_of(one_group(), device=(8,), host=(0,))
    a = rig.lease()
    serve(rig, a, 1, "abc")
    rig.run(match, a, 2, chain(*"abcdefghi"), 0)
    with pytest.raises(PoolExhausted, match="too large") as refused:
        rig.once(allocate, a, 2, 9)
    assert (refused.value.wanted, refused.value.own, refused.value.capacity) == (6, 3, 8)
    assert refused.value.can_never_fit
    assert PoolExhausted.from_message(str(refused.value), refused.value.facts()).can_never_fit
    rig.run(allocate, a, 2, 8)
    with pytest.raises(PoolExhausted, match="too large") as refused:
        rig.once(allocate, a, 2, 9)
    assert (refused.value.wanted, refused.value.own) == (1, 8)
    rig.run(match, a, 3, chain(*"xyz"), 0)
    with pytest.raises(PoolExhausted, match="full now") as refused:
        rig.once(allocate, a, 3, 3)
    assert not refused.value.can_never_fit
