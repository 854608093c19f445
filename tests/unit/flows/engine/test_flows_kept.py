"""Blocks that a sequence needs and has on its device stay there while room is made for the rest of it."""

from __future__ import annotations

import pytest

from cachesvc.flows import pinning
from cachesvc.flows.allocate import allocate, swap_in, swap_out
from cachesvc.flows.match import match
from cachesvc.flows.recycle import recycle, release
from cachesvc.model.errors import PoolExhausted
from cachesvc.model.words import ABSENT, KEY_BYTES, NO_PAGE, READY, WritePolicy
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, prefill, rig_of, serve, windowed


def test_what_stayed_on_the_device_is_not_evicted_to_make_room_for_the_rest() -> None:
    """Block a is the oldest that could go, and the sequence that comes back has a table that begins with it."""
    rig = rig_of(one_group(), device=(5,), host=(16,), policy=WritePolicy.WRITE_THROUGH)
    a, b = rig.lease(), rig.lease("b")
    prefill(rig, a, 1, "ab")
    rig.run(allocate, a, 1, 3)
    rig.settle()
    rig.run(swap_out, a, 1)
    rig.settle()
    pinning.evict(rig.core, 1, "device", 1)
    assert rig.device_keys() == {chain("a")}
    serve(rig, b, 1, "xyz")
    rig.settle()
    assert rig.free() == [1]
    answer = rig.run(swap_in, a, 1)
    assert rig.device_keys() >= {chain("a")}, "younger blocks went instead"
    assert NO_PAGE not in answer.tables[0].pages
    row = rig.model.blocks.index.rows[chain("a")]
    assert answer.tables[0].pages[0] == rig.place().pages[0][row]
    rig.settle()
    rig.run(release, a, 1)


def test_where_only_what_stayed_could_make_room_a_swap_in_is_refused() -> None:
    rig = rig_of(one_group(), device=(4,), host=(16,), policy=WritePolicy.WRITE_THROUGH)
    a, b = rig.lease(), rig.lease("b")
    prefill(rig, a, 1, "ab")
    rig.run(allocate, a, 1, 3)
    rig.settle()
    rig.run(swap_out, a, 1)
    rig.settle()
    pinning.evict(rig.core, 1, "device", 1)
    prefill(rig, b, 1, "xy")  # stays open: a alone could go
    with pytest.raises(PoolExhausted):
        rig.run(swap_in, a, 1)
    assert chain("a") in rig.device_keys()
    rig.run(release, b, 1)
    assert NO_PAGE not in rig.run(swap_in, a, 1).tables[0].pages


def beside_a_window(held: bool) -> Rig:
    """abcd is on the host whole and on the device but for the windows of a, b and c; d's is the oldest that could go.

    With ``held`` the other prompt, xyz, is still in use, so that d's window is the only one that could.
    """
    rig = rig_of(windowed(window_tokens=8), device=(16, 4), host=(16, 16), policy=WritePolicy.WRITE_THROUGH)
    serve(rig, rig.lease("first"), 1, "abcd")
    rig.settle()
    prefill(rig, rig.lease("other"), 1, "xyz")
    rig.settle()
    windows = rig.place().states[1]
    rows = [rig.model.blocks.index.rows[chain(*"abcd"[: i + 1])[-KEY_BYTES:]] for i in range(4)]
    assert [windows[row] for row in rows] == [ABSENT, ABSENT, ABSENT, READY]
    if not held:
        lease = next(lease for lease in rig.core.ledger.leases.values() if lease.engine == "other").id
        rig.run(recycle, lease, 1, 12, ())
        rig.run(release, lease, 1)
    return rig


def test_a_window_in_place_is_not_evicted_to_make_room_for_the_rest_of_it() -> None:
    rig = beside_a_window(held=False)
    a = rig.lease()
    hit = rig.run(match, a, 1, chain(*"abcd"), 0)
    assert (hit.device_blocks, hit.host_blocks) == (2, 2)
    answer = rig.run(allocate, a, 1, 5)
    windows = answer.tables[1]
    assert [page == NO_PAGE for page in windows.pages] == [False] * 3, "c comes, d is there, and a fresh one"
    [transfer] = rig.mover.transfers.values()
    assert [(pair.group, len(pair.device_pages)) for pair in transfer.pages] == [(1, 1)], "c's window alone is copied"
    rig.settle()
    rig.run(release, a, 1)


def test_where_only_a_window_of_the_hit_could_make_room_for_the_rest_of_it_the_call_is_refused() -> None:
    rig = beside_a_window(held=True)
    a = rig.lease()
    rig.run(match, a, 1, chain(*"abcd"), 0)
    with pytest.raises(PoolExhausted):
        rig.run(allocate, a, 1, 4)
    row = rig.model.blocks.index.rows[chain(*"abcd")[-KEY_BYTES:]]
    assert rig.place().states[1][row] == READY, "nothing was evicted"
    rig.run(release, a, 1)


def test_blocks_that_came_since_match_are_not_evicted_to_make_room_for_the_rest() -> None:
    """a and b come to the device after Match for another sequence, which has gone: nothing that could go is older."""
    rig = rig_of(one_group(), device=(5,), host=(16,), policy=WritePolicy.WRITE_THROUGH)
    a, b = rig.lease(), rig.lease("b")
    serve(rig, b, 9, "abcd")
    rig.settle()
    pinning.evict(rig.core, 1, "device", 0)
    assert rig.run(match, a, 1, chain(*"abcd"), 0).host_blocks == 4
    serve(rig, b, 1, "ab")
    serve(rig, b, 2, "xyz")
    rig.settle()
    assert rig.free() == [0]
    answer = rig.run(allocate, a, 1, 4)
    assert NO_PAGE not in answer.tables[0].pages
    assert {chain("a"), chain(*"ab")[KEY_BYTES:]} <= rig.device_keys()
    [transfer] = rig.mover.transfers.values()
    assert len(transfer.pages[0].device_pages) == 2, "c and d alone are copied"
    rig.settle()
    rig.run(release, a, 1)
