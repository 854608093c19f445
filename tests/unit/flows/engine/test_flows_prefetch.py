"""A prefetch is no sequence: it has a record of its own, which holds the prefix until its loads have ended."""

from __future__ import annotations

import pytest

from cachesvc.flows import pinning
from cachesvc.flows.core import Limits
from cachesvc.flows.leases import close_lease
from cachesvc.flows.match import match, prefetch
from cachesvc.model.errors import LimitExceeded
from cachesvc.model.words import WritePolicy
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, rig_of, serve


def hosted(*prompts: str) -> tuple[Rig, str]:
    """A rig whose host alone has the prompts."""
    rig = rig_of(one_group(), device=(16,), host=(32,), policy=WritePolicy.WRITE_THROUGH)
    a = rig.lease()
    for prompt in prompts:
        serve(rig, a, 1, prompt)
    rig.settle()
    pinning.evict(rig.core, 1, "device", 0)
    return rig, a


def test_it_takes_no_sequence_of_the_lease_and_holds_its_prefix_while_it_loads() -> None:
    rig, a = hosted("abcd")
    rig.core.limits = Limits(sequences_per_lease=1)
    rig.run(match, a, 1, b"", 0)
    answer = rig.run(prefetch, a, chain(*"abcd"))
    assert [ticket.blocks for ticket in answer.tickets] == [4]
    lease = rig.core.ledger.leases[a]
    assert (list(lease.sequences), len(lease.prefetches)) == ([1], 1)
    assert rig.host.counts.pinned == 4
    rig.settle()
    assert lease.prefetches == {}
    assert (rig.host.counts.pinned, rig.place().counts.pinned, len(rig.device_keys())) == (0, 0, 4)
    place = rig.place()
    assert not any(place.used[row] for row in rig.model.blocks.index.rows.values()), "no request has used it yet"


@pytest.mark.parametrize("error", ["", "broken"])
@pytest.mark.parametrize("lose", [False, True])
def test_however_its_load_ends_it_holds_nothing_afterwards(error: str, lose: bool) -> None:
    rig, a = hosted("abcd")
    [ticket] = rig.run(prefetch, a, chain(*"abcd")).tickets
    if lose:
        close_lease(rig.core, a, quiesced=False)
        rig.check()
        assert (rig.host.counts.pinned, rig.place().counts.pinned) == (0, 0)
    rig.land(ticket.id, error)
    assert len(rig.device_keys()) == (0 if error else 4)
    assert (rig.host.counts.pinned, rig.place().counts.pinned) == (0, 0)
    assert all(lease.prefetches == {} for lease in rig.core.ledger.leases.values())


def test_what_is_in_place_or_nowhere_is_answered_at_once() -> None:
    rig, a = hosted("ab")
    rig.run(prefetch, a, chain(*"ab"))
    rig.settle()
    for prompt, blocks in (("ab", 2), ("xy", 0)):
        answer = rig.run(prefetch, a, chain(*prompt))
        assert (answer.device_blocks, answer.tickets) == (blocks, ())
    assert rig.core.ledger.leases[a].prefetches == {}


def test_a_lease_has_so_many_prefetches_under_way_and_no_more() -> None:
    rig, a = hosted("ab", "cd", "ef")
    rig.core.limits = Limits(prefetches_per_lease=2)
    for prompt in ("ab", "cd"):
        rig.run(prefetch, a, chain(*prompt))
    before = rig.free(), len(rig.mover.all)
    with pytest.raises(LimitExceeded, match="prefetches of this lease under way: 3"):
        rig.run(prefetch, a, chain(*"ef"))
    assert (rig.free(), len(rig.mover.all)) == before
    rig.settle()
    assert rig.run(prefetch, a, chain(*"ef")).device_blocks == 2
    rig.settle()
