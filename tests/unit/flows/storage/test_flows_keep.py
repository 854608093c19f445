"""Writes to storage: what, when, and that nothing waits for them."""

from __future__ import annotations

from string import ascii_letters

import pytest

from cachesvc.flows.allocate import allocate, swap_out
from cachesvc.flows.match import match
from cachesvc.flows.recycle import release
from cachesvc.flows.registration import evict_model
from cachesvc.flows.storage_writes import KEPT_A_TURN, STAGED_AT_ONCE, begin_flush, go_on, pump_all, waiting
from cachesvc.flows.stored import MOST_USED, forget_all, spread_all, want
from cachesvc.ledger.tier_copies import NO_ROW
from cachesvc.model.errors import PoolExhausted
from cachesvc.model.words import ABSENT, WritePolicy
from tests.unit.rigs.ledger_rig import chain, prefill, serve, windowed
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


# Uses in memory reach storage in batches; what is used again is written, and at a stop the rest, the best first.


def used(at: StorageRig, prompt: str, sequence: int) -> None:
    """A request whose blocks are all there, from its Match to its end."""
    prefill(at.rig, at.lease, sequence, prompt)
    at.rig.settle()
    at.rig.run(release, at.lease, sequence)


def pass_down(at: StorageRig) -> None:
    """The tier's next tick."""
    spread_all(at.rig.core)
    at.settle()


def write_all(at: StorageRig) -> list[bytes]:
    """Land and write until nothing is under way: what was written, in its order."""
    first = len(at.storage.keeps)
    while at.rig.mover.transfers or at.rig.model.stored.keeping:
        at.rig.settle()
        for key in list(at.rig.model.stored.keeping):
            at.tell_kept(key, WHOLE)
        at.settle()
    return keys_of(at.storage.keeps[first:])


def selective(prompt: str = "", **sizes: int) -> StorageRig:
    at = storing(prompt, **sizes)  # type: ignore[arg-type]
    at.storage.keeps_all = False
    return at


def test_a_hit_in_memory_is_a_use_of_the_deepest_block_below_in_one_batch() -> None:
    at = selective("abc")
    serve(at.rig, at.lease, 1, "abcd")
    pass_down(at)
    at.storage.uses.clear()
    for number in range(2, 9):
        used(at, "abcd", number)
    used(at, "ab", 9)
    assert at.storage.uses == [], "no call asks storage for it"
    pass_down(at)
    assert sorted(use.key for use in at.storage.uses) == sorted([packed("abc")[2], packed("ab")[1]])
    at.storage.uses.clear()
    pass_down(at)
    assert at.storage.uses == []


def test_a_path_that_has_left_memory_was_used_all_the_same() -> None:
    at = selective("ab", device=4, host=0)
    used(at, "ab", 1)
    serve(at.rig, at.lease, 2, "wxyz")
    pass_down(at)
    assert packed("ab")[1] in {use.key for use in at.storage.uses}


def test_uses_from_before_a_purge_have_nothing_written_after_it() -> None:
    at = storing()
    used(at, "abc", 1)
    forget_all(at.rig.core, at.rig.model)
    pass_down(at)
    assert write_all(at) == []
    used(at, "abc", 2)
    pass_down(at)
    assert write_all(at) == packed("abc")


def test_uses_that_wait_are_bounded() -> None:
    at = selective()
    at.rig.model.stored.used = dict.fromkeys(map(str.encode, map(str, range(MOST_USED))), 0)
    used(at, "ab", 1)
    assert len(at.rig.model.stored.used) == MOST_USED


def test_a_prompt_that_is_asked_for_three_times_is_written_and_no_other() -> None:
    at = selective()
    for number, prompt in enumerate(("abcd", "wxyz", "abcd"), start=1):
        used(at, prompt, number)
        pass_down(at)
    assert write_all(at) == [], "asked for twice: when it leaves, or at a stop"
    used(at, "abcd", 4)
    pass_down(at)
    assert write_all(at) == packed("abcd")
    assert at.rig.host_keys() == set(), "a copy that came to the host to be written is no longer there"
    used(at, "abcd", 5)
    pass_down(at)
    assert write_all(at) == [], "once is enough"


def test_turns_of_a_conversation_are_uses_of_all_that_came_before() -> None:
    at = selective(device=40)
    for number, end in enumerate((4, 8, 12), start=1):
        used(at, ascii_letters[:end], number)
        pass_down(at)
    assert write_all(at) == packed(ascii_letters[:4])


def test_all_that_was_computed_is_written_where_all_is_kept_also_without_leaving_the_device() -> None:
    at = storing(policy=WritePolicy.WRITE_BACK)
    used(at, "abcd", 1)
    pass_down(at)
    assert write_all(at) == packed("abcd")


def test_what_waits_for_the_host_holds_up_nothing_that_has_come_there() -> None:
    names = [chr(0x4E00 + at) for at in range(3 * STAGED_AT_ONCE)]
    at = storing(policy=WritePolicy.WRITE_BACK, device=400, host=400)
    for number in range(3):
        used(at, "".join(names), number + 1)
    pass_down(at)
    while at.rig.mover.transfers or at.rig.model.stored.keeping:
        assert len(at.rig.model.stored.staged) <= STAGED_AT_ONCE
        at.rig.settle()
        for key in list(at.rig.model.stored.keeping):
            at.tell_kept(key, WHOLE)
        at.settle()
    assert keys_of(at.storage.keeps) == packed("".join(names))
    assert at.rig.host_keys() == set()
    assert not at.rig.model.stored.staged
    assert not at.rig.model.stored.landed


def test_a_copy_that_could_not_be_saved_is_written_when_it_is_evicted() -> None:
    at = selective(device=4)
    for number in range(1, 4):
        used(at, "abcd", number)
    at.rig.mover.slots = 0
    pass_down(at)
    at.rig.mover.slots = 1 << 20
    assert write_all(at) == []
    serve(at.rig, at.lease, 9, "wxyz")
    at.settle()
    write_all(at)
    assert keys_of(at.storage.keeps) == packed("abcd")


def test_a_write_that_fails_leaves_nothing_staged() -> None:
    at = selective()
    for number in range(1, 4):
        used(at, "abcd", number)
    pass_down(at)
    at.rig.settle()
    at.settle()
    for key in list(at.rig.model.stored.keeping):
        at.tell_kept(key, GONE)
    assert not at.rig.model.stored.staged
    assert at.rig.host_keys() == set()


def test_of_a_path_that_is_too_long_at_once_the_beginning_is_written() -> None:
    names = "".join(chr(0x4E00 + at) for at in range(600))
    at = selective(device=700, host=700)
    used(at, names, 1)
    index = at.rig.model.blocks.index
    want(at.rig.core, at.rig.model, [index.rows[packed(names)[-1]]])
    assert list(at.rig.model.stored.wanted) == packed(names)[:256]
    want(at.rig.core, at.rig.model, [index.rows[packed(names)[-1]]])
    assert list(at.rig.model.stored.wanted) == packed(names)[:512]


def flush(at: StorageRig, capacity: int = 0) -> list[bytes]:
    begin_flush(at.rig.core, capacity)
    at.settle()
    out = write_all(at)
    while go_on(at.rig.core):
        at.settle()
        out += write_all(at)
    return out


def test_a_stop_writes_what_was_used_again_the_best_first() -> None:
    at = selective(device=40, host=8)
    for number, prompt in enumerate(("once", "abcd", "wxyz", "abcd", "wxyz", "wxyz", "wxyz"), start=1):
        used(at, prompt, number)
    at.rig.core.storage = at.storage
    assert flush(at) == [*packed("wxyz"), *packed("abcd")]
    assert waiting(at.rig.core) == 0


@pytest.mark.parametrize(("capacity", "blocks"), [(0, 8), (4 * 8, 4), (1, 1)])
def test_a_stop_writes_no_more_than_storage_can_hold(capacity: int, blocks: int) -> None:
    at = selective(device=40)
    for number, prompt in enumerate(("abcd", "wxyz", "abcd", "wxyz", "wxyz"), start=1):
        used(at, prompt, number)
    written = flush(at, capacity)
    assert written[:4] == packed("wxyz")
    assert len(written) >= blocks
    assert blocks == 8 or len(written) < 8


def test_a_stop_writes_all_where_all_is_kept_and_nothing_where_nothing_is() -> None:
    at = storing(policy=WritePolicy.WRITE_BACK)
    used(at, "abcd", 1)
    assert sorted(flush(at)) == sorted(packed("abcd"))
    at = selective()
    at.storage.keeps_used = False
    for number in range(1, 4):
        used(at, "abcd", number)
    assert flush(at) == []


def test_a_stop_tries_again_what_could_not_be_saved_to_the_host() -> None:
    at = selective()
    for number in range(1, 3):
        used(at, "abcd", number)
    at.rig.mover.slots = 0
    begin_flush(at.rig.core, 0)
    at.settle()
    at.rig.mover.slots = 1 << 20
    assert waiting(at.rig.core) == 4
    out = []
    while go_on(at.rig.core):
        at.settle()
        out += write_all(at)
    assert out == packed("abcd")


def test_without_storage_nothing_is_noted() -> None:
    at = selective()
    at.rig.core.storage = None
    used(at, "abcd", 1)
    at.rig.run(match, at.lease, 2, chain(*"abcd"), 0)
    assert at.rig.model.stored.used == {}
    assert at.rig.model.blocks.index.rows.get(packed("abcd")[3], NO_ROW) != NO_ROW
