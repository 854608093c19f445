"""Writes to storage: what, when, and that nothing waits for them."""

from __future__ import annotations

import pytest

from cachesvc.flows.allocate import allocate, swap_out
from cachesvc.flows.match import match
from cachesvc.flows.registration import evict_model
from cachesvc.flows.storage_writes import KEPT_A_TURN, pump_all
from cachesvc.flows.stored import want
from cachesvc.model.errors import PoolExhausted
from cachesvc.model.words import ABSENT, WritePolicy
from tests.unit.rigs.ledger_rig import prefill, serve, windowed
from tests.unit.rigs.storage_flows_rig import BACK, GONE, LATE, WHOLE, StorageRig, keys_of, packed, storing

THROUGH = WritePolicy.WRITE_THROUGH


def end_all(at: StorageRig) -> None:
    for key in list(at.rig.model.stored.keeping):
        at.tell_kept(key, WHOLE)


def test_through_writes_what_came_to_the_host_root_first() -> None:
    at = storing(policy=THROUGH)
    serve(at.rig, at.lease, 1, "abcd")
    at.rig.settle()
    at.settle()
    assert keys_of(at.storage.keeps) == packed("abcd")
    end_all(at)
    assert at.rig.core.counters["storage_kept_blocks"] == 4
    serve(at.rig, at.lease, 2, "abcde")
    at.rig.settle()
    at.settle()
    assert keys_of(at.storage.keeps)[4:] == packed("abcde")[4:], "nothing is written twice"


def test_selective_writes_what_was_loaded_from_the_host_with_all_above_it() -> None:
    at = storing(policy=WritePolicy.WRITE_BACK, device=4)
    at.storage.keeps_all = False
    serve(at.rig, at.lease, 1, "abc")
    serve(at.rig, at.lease, 2, "wxyz")
    at.rig.settle()
    at.settle()
    assert at.storage.keeps == [], "used once"
    prefill(at.rig, at.lease, 3, "abc")
    at.rig.settle()
    at.settle()
    assert keys_of(at.storage.keeps) == packed("abc")


def test_ancestors_that_are_on_a_device_alone_are_backed_up_for_it() -> None:
    at = storing(policy=WritePolicy.WRITE_BACK, device=5)
    at.storage.keeps_all = False
    serve(at.rig, at.lease, 1, "ab")
    prefill(at.rig, at.lease, 2, "abcd")
    model = at.rig.model
    want(at.rig.core, model, [model.blocks.index.rows[packed("abcd")[3]]])
    at.settle()
    at.rig.settle()
    at.settle()
    assert set(keys_of(at.storage.keeps)) == set(packed("abcd"))


def test_what_does_not_come_to_the_host_is_wanted_no_more() -> None:
    at = storing(policy=WritePolicy.WRITE_BACK)
    at.storage.keeps_all = False
    serve(at.rig, at.lease, 1, "abcd")
    model = at.rig.model
    tip = model.blocks.index.rows[packed("abcd")[3]]
    want(at.rig.core, model, [tip])
    at.settle()
    [ticket] = at.rig.mover.transfers
    assert model.stored.coming == set(packed("abcd"))
    at.rig.land(ticket, "the link broke")
    assert model.stored.coming == set()
    assert at.rig.core.counters["storage_not_kept_blocks"] == 4
    at.rig.mover.refusing = True
    want(at.rig.core, model, [tip])
    at.settle()
    assert model.stored.coming == set()
    at.rig.mover.refusing = False
    at.storage.keeps_all = True
    want(at.rig.core, model, [tip])
    at.settle()
    at.rig.settle()
    at.settle()
    assert model.stored.coming == set()
    assert keys_of(at.storage.keeps) == packed("abcd"), "and may be wanted again"


def test_a_block_is_kept_while_it_is_written_and_not_longer() -> None:
    at = storing(policy=THROUGH)
    serve(at.rig, at.lease, 1, "ab")
    at.rig.settle()
    at.settle()
    plan, _ = at.rig.model.evictor.plan_host(4)
    assert plan.drops == []
    assert not at.tell_kept(packed("ab")[1], LATE), "an engine may still read it"
    plan, _ = at.rig.model.evictor.plan_host(4)
    assert plan.drops == []
    assert at.tell_kept(packed("ab")[1], BACK)
    assert at.tell_kept(packed("ab")[0], GONE)
    plan, _ = at.rig.model.evictor.plan_host(4)
    assert len(plan.drops) == 2
    assert at.rig.core.counters["storage_not_kept_blocks"] == 2


def test_while_it_is_written_its_device_copy_may_go() -> None:
    at = storing(policy=THROUGH, device=2)
    serve(at.rig, at.lease, 1, "ab")
    at.rig.settle()
    at.settle()
    serve(at.rig, at.lease, 2, "cd")
    assert len(at.rig.device_keys()) == 2
    assert set(packed("ab")) <= at.rig.host_keys()


def test_the_budget_is_held_and_what_waits_goes_on_later() -> None:
    at = storing(policy=THROUGH)
    at.storage.bytes_left = 16
    serve(at.rig, at.lease, 1, "abcd")
    at.rig.settle()
    at.settle()
    assert len(at.storage.keeps) == 2, "blocks of 8 bytes"
    end_all(at)
    assert keys_of(at.storage.keeps) == packed("abcd")


def test_what_is_evicted_before_its_turn_is_not_written() -> None:
    at = storing(policy=THROUGH)
    at.storage.bytes_left = 0
    serve(at.rig, at.lease, 1, "abcd")
    at.rig.settle()
    at.settle()
    for place in (at.rig.place(), at.rig.host):
        plan, _ = (
            at.rig.model.evictor.plan_host(16)
            if place is at.rig.host
            else at.rig.model.evictor.plan_device(place, 4, to_host=False)
        )
        at.rig.model.evictor.carry_out(plan)
    at.storage.bytes_left = 1 << 30
    pump_all(at.rig.core)
    at.settle()
    assert at.storage.keeps == []
    assert at.rig.core.counters["storage_not_kept_blocks"] == 4


def test_many_begin_a_turn_at_a_time() -> None:
    at = storing(policy=THROUGH, device=64, host=64)
    prompt = "".join(chr(65 + at) for at in range(3 * KEPT_A_TURN))
    serve(at.rig, at.lease, 1, prompt)
    at.rig.settle()
    at.settle()
    assert keys_of(at.storage.keeps) == packed(prompt)


def test_never_wants_nothing() -> None:
    at = storing(policy=THROUGH)
    at.storage.keeps_all = at.storage.keeps_used = False
    serve(at.rig, at.lease, 1, "abcd")
    at.rig.settle()
    serve(at.rig, at.lease, 2, "abcd")
    at.rig.settle()
    at.settle()
    assert not at.rig.model.stored.wanted
    assert at.storage.keeps == []


def test_windowed_copies_stay_while_they_are_written() -> None:
    at = storing(policy=THROUGH, layout=windowed(8), device=32, host=(32, 8))
    serve(at.rig, at.lease, 1, "abcd")
    at.rig.settle()
    at.settle()
    rows = [at.rig.model.blocks.index.rows[key] for key in packed("abcd")]
    before = [at.rig.host.pages[1][row] for row in rows]
    assert [request.pages[1] for request in at.storage.keeps] == before
    at.rig.run(match, at.lease, 2, b"", 0)
    at.rig.run(allocate, at.lease, 2, 8)
    with pytest.raises(PoolExhausted, match="window: wanted 8 pages, free 4, evictable 0"):
        at.rig.run(swap_out, at.lease, 2)
    assert [at.rig.host.pages[1][row] for row in rows] == before, "the storage may still read them"
    for key in packed("abcd"):
        at.tell_kept(key, WHOLE, WHOLE)
    at.rig.run(swap_out, at.lease, 2)
    at.rig.settle()
    assert [at.rig.host.states[1][row] for row in rows] == [ABSENT] * 4, "nothing holds them any more"


def test_windowed_copies_go_with_their_block() -> None:
    at = storing(policy=THROUGH, layout=windowed(8))
    serve(at.rig, at.lease, 1, "abcd")
    at.rig.settle()
    at.settle()
    assert [len([page for page in request.pages if page >= 0]) for request in at.storage.keeps] == [2, 2, 2, 2]
    for key in list(at.rig.model.stored.keeping):
        assert not at.tell_kept(key, WHOLE), "the other group is on its way"
        assert at.tell_kept(key, WHOLE)
    assert at.rig.core.counters["storage_kept_blocks"] == 4


def test_storage_is_told_of_a_model_that_is_evicted() -> None:
    at = storing()
    evict_model(at.rig.core, at.rig.vault, at.rig.model)
    assert at.storage.forgotten == [at.rig.model.id]
