"""Tickets whose copies never ended: they fail like others, but the pages to which bytes may still come are not
granted."""

from __future__ import annotations

import pytest

from cachesvc.flows import pinning
from cachesvc.flows.allocate import allocate, swap_in, swap_out
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import release
from cachesvc.model.answers import Wait
from cachesvc.model.errors import LoadFailed
from cachesvc.model.words import PageState, WritePolicy
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, rig_of, serve

STUCK = PageState.QUARANTINED


def hang(rig: Rig) -> None:
    """The only transfer under way does not end."""
    [ticket] = rig.mover.transfers
    rig.land(ticket, "hangs", may_write=True)
    rig.check()


def test_a_load_keeps_its_device_pages_back() -> None:
    rig = rig_of(one_group(), device=(16,), host=(32,), policy=WritePolicy.WRITE_THROUGH)
    serve(rig, rig.lease("first"), 1, "abcd")
    rig.settle()
    pinning.evict(rig.core, 1, "device", 0)
    a = rig.lease()
    rig.run(match, a, 1, chain(*"abcde"), 0)
    written = rig.run(allocate, a, 1, 5).tables[0].pages[:4]
    hang(rig)
    with pytest.raises(LoadFailed, match="hangs"):
        rig.run(publish, a, 1, 4, b"", 1)
    rig.run(release, a, 1)
    pool = rig.place().pools[0]
    assert rig.free() == [12]
    assert sorted(pool.stuck) == sorted(written)
    assert len(rig.host_keys()) == 4, "it is read there at most"
    rig.run(match, a, 2, chain(*"abcde"), 0)
    again = rig.run(allocate, a, 2, 5).tables[0].pages
    assert not set(again) & set(written)
    rig.settle()
    assert rig.run(publish, a, 2, 4, b"", 1).sealed_blocks == 5
    rig.check()


def test_a_backup_keeps_its_host_pages_back() -> None:
    rig = rig_of(one_group(), device=(16,), host=(32,), policy=WritePolicy.WRITE_THROUGH)
    serve(rig, rig.lease(), 1, "abcd")
    hang(rig)
    pool = rig.host.pools[0]
    assert (pool.counts[STUCK], pool.counts[PageState.FREE]) == (4, 28)
    assert len(rig.device_keys()) == 4
    assert not rig.host_keys()


def test_an_eviction_that_writes_back_keeps_its_host_pages_back() -> None:
    rig = rig_of(one_group(), device=(4,), host=(32,), policy=WritePolicy.WRITE_BACK)
    a = rig.lease()
    serve(rig, a, 1, "abcd")
    rig.run(match, a, 2, b"", 0)
    assert isinstance(rig.once(allocate, a, 2, 4), Wait)
    hang(rig)
    assert rig.host.pools[0].counts[STUCK] == 4
    assert len(rig.device_keys()) == 4


def private(rig: Rig) -> str:
    """A lease with a sequence of four pages of its own."""
    a = rig.lease()
    rig.run(match, a, 1, b"", 0)
    rig.run(allocate, a, 1, 4)
    return a


@pytest.mark.parametrize("is_open", [True, False])
def test_a_swap_out_keeps_its_host_pages_back(is_open: bool) -> None:
    rig = rig_of(one_group(), device=(8,), host=(8,))
    a = private(rig)
    rig.run(swap_out, a, 1)
    if not is_open:
        rig.run(release, a, 1)
    hang(rig)
    assert rig.host.pools[0].counts[STUCK] == 4
    assert rig.free() == [4 if is_open else 8]
    if is_open:
        rig.run(swap_out, a, 1)
        rig.settle()
        assert rig.host.pools[0].counts[PageState.PRIVATE] == 4
        assert rig.free() == [8]
    rig.check()


@pytest.mark.parametrize("is_open", [True, False])
def test_a_swap_in_keeps_its_device_pages_back(is_open: bool) -> None:
    rig = rig_of(one_group(), device=(8,), host=(8,))
    a = private(rig)
    rig.run(swap_out, a, 1)
    rig.settle()
    rig.run(swap_in, a, 1)
    if not is_open:
        rig.run(release, a, 1)
    hang(rig)
    pool = rig.place().pools[0]
    assert (pool.counts[STUCK], pool.counts[PageState.FREE]) == (4, 4)
    assert rig.host.pools[0].counts[PageState.PRIVATE] == (4 if is_open else 0)
    if is_open:
        rig.run(swap_in, a, 1)
        rig.settle()
        rig.run(release, a, 1)
    assert rig.free() == [4]
    rig.check()
