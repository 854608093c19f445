"""Operators' pins: a prefix stays for a time, within its share of each pool, and costs no other model anything."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from kvcache.v1 import inspect_pb2

from cachesvc.flows import pinning
from cachesvc.flows.allocate import allocate, swap_out
from cachesvc.flows.core import tidy, tidy_all
from cachesvc.flows.leases import close_lease, lose, lose_device
from cachesvc.flows.match import match, prefetch
from cachesvc.flows.pinning import MOST_SECONDS, expire_pins, pin, unpin
from cachesvc.flows.registration import idle_models
from cachesvc.model.answers import Matched
from cachesvc.model.errors import (
    Conflict,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    PoolExhausted,
    QuotaExceeded,
    Unavailable,
)
from cachesvc.model.layout import Layout
from cachesvc.model.words import KEY_BYTES, WritePolicy
from cachesvc.questions.explanation import explain
from cachesvc.questions.status import status
from cachesvc.questions.view import EVERYTHING, View, answer_at_once
from tests.unit.rigs import shared_rig
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, prefill, rig_of, serve, windowed


def last(prompt: str) -> bytes:
    """Key of a prompt's last block."""
    return chain(*prompt)[-KEY_BYTES:]


def pinned(rig: Rig, prompt: str, seconds: float = 60.0) -> list[str]:
    """Pin a prompt; the places that keep it."""
    made = pin(rig.core, rig.model, last(prompt), seconds, rig.now)
    rig.check()
    return made.places


def hit_of(rig: Rig, lease: str, sequence: int, prompt: str) -> int:
    """Blocks of a prompt that are a hit."""
    found = rig.run(match, lease, sequence, chain(*prompt), 0)
    assert isinstance(found, Matched)
    return found.device_blocks + found.host_blocks


def with_prompt(layout: Layout, pages: int, *, host: int = 0, policy: WritePolicy = WritePolicy.WRITE_BACK) -> Rig:
    """A node on which "abcd" was computed."""
    groups = len(layout.groups)
    rig = rig_of(layout, device=[pages] * groups, host=[host] * groups, policy=policy)
    serve(rig, rig.lease(), 1, "abcd")
    rig.settle()
    return rig


@pytest.mark.parametrize("layout", [one_group(), windowed(8), windowed(8, 4), windowed(8, pool="kv")])
def test_a_pinned_prefix_outlives_all_that_comes_after_it(layout: Layout) -> None:
    rig = with_prompt(layout, 48)
    lease = rig.lease("b")
    assert pinned(rig, "abcd") == ["replica 0"]
    for sequence in range(2, 30):
        serve(rig, lease, sequence, [f"{sequence} {at}" for at in range(10)])
    assert hit_of(rig, lease, 99, "abcd") == 4
    assert [expired.key for _, expired in expire_pins(rig.core, 59.9)] == []
    assert [expired.key for _, expired in expire_pins(rig.core, 60.0)] == [last("abcd")]
    close_lease(rig.core, lease, quiesced=True)
    pinning.evict(rig.core, 1, "device", 0)
    assert rig.device_keys() == set()
    rig.check()


def test_a_prefix_with_states_is_pinned_where_it_has_one() -> None:
    ends = shared_rig.begin(48)
    rig = ends.rig
    shared_rig.serve(ends, 1, "abcd", states=(1, 3))
    with pytest.raises(Conflict, match="what the next token looks back to as well"):
        pinned(rig, "abc")
    assert pinned(rig, "abcd") == ["replica 0"]
    for sequence in range(2, 30):
        shared_rig.serve(ends, sequence, f"{sequence:02}efghijk", states=(8,))
    assert shared_rig.hit(ends, 99, "abcd") == (4, 0, 4)


def test_what_lies_on_the_host_is_kept_there() -> None:
    rig = with_prompt(one_group(), 16, host=16, policy=WritePolicy.WRITE_THROUGH)
    pinning.evict(rig.core, 1, "device", 2)
    assert pinned(rig, "abcd") == ["replica 0", "host"]
    pinning.evict(rig.core, 1, "device", 0)
    pinning.evict(rig.core, 1, "host", 0)
    assert len(rig.device_keys()) == 2
    assert last("abcd") in rig.host_keys()
    assert hit_of(rig, rig.lease("b"), 2, "abcd") == 4


def test_the_same_prefix_again_sets_its_end_anew() -> None:
    rig = with_prompt(one_group(), 16)
    pinned(rig, "abcd", 10)
    rig.now = 5.0
    pinned(rig, "abcd", 20)
    assert expire_pins(rig.core, 24.9) == []
    assert len(expire_pins(rig.core, 25.0)) == 1
    rig.check()


def test_pins_that_share_blocks_pay_for_them_once_and_beyond_the_share_there_are_none() -> None:
    rig = rig_of(one_group(), device=[16])
    lease = rig.lease()
    for sequence, prompt in enumerate(("abcd", "abcde", "abcf", "xyz"), start=1):
        serve(rig, lease, sequence, prompt)
    rig.core.limits = replace(rig.core.limits, pin_share=0.4)  # 6 pages
    for prompt in ("abcd", "abcde", "abcf"):
        pinned(rig, prompt)
    with pytest.raises(QuotaExceeded, match="pinned pages on replica 0, group full") as refused:
        pinned(rig, "xyz")
    assert (refused.value.got, refused.value.limit) == (9, 6)
    assert "unpin another prefix, pin a shorter one, or raise pin_share (now 0.4 of each pool)" in str(refused.value)
    unpin(rig.model, last("abcde").hex()[:8])
    with pytest.raises(QuotaExceeded, match="8 is more"):
        pinned(rig, "xyz")
    unpin(rig.model, last("abcf").hex())
    unpin(rig.model, last("abcd").hex())
    pinned(rig, "xyz")


def test_windowed_copies_count_too() -> None:
    rig = with_prompt(windowed(8), 16)
    rig.core.limits = replace(rig.core.limits, pin_share=0.1)
    with pytest.raises(QuotaExceeded, match=r"group full.*4 is more than the limit of 1"):
        pinned(rig, "abcd")
    rig = rig_of(windowed(8), device=[64, 4])
    serve(rig, rig.lease(), 1, "abcd")
    with pytest.raises(QuotaExceeded, match=r"group window.*2 is more than the limit of 1"):
        pinned(rig, "abcd")


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, MOST_SECONDS + 1])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="a pin lasts more than 0 and at most 604800"):
        pinned(with_prompt(one_group(), 16), "abcd", seconds)


def test_what_is_not_there_whole_and_one_too_many_are_refused() -> None:
    rig = with_prompt(one_group(), 16, host=16, policy=WritePolicy.WRITE_THROUGH)
    with pytest.raises(NotFound):
        pinned(rig, "abcx")
    with pytest.raises(NotFound, match="unknown pin"):
        unpin(rig.model, last("abcd").hex())
    lost = with_prompt(windowed(8), 16)
    lost.core.limits = replace(lost.core.limits, pin_share=1.0)
    with pytest.raises(Conflict, match="no replica has the whole prefix of 1 blocks"):
        serve_beyond_window(lost)
    rig.core.limits = replace(rig.core.limits, pins_per_model=1)
    pinned(rig, "ab")
    with pytest.raises(LimitExceeded, match="pins of model 1: 2 is more than the limit of 1; unpin another one"):
        pinned(rig, "abcd")
    pinned(rig, "ab", 5)


def serve_beyond_window(rig: Rig) -> None:
    """Drop the windowed copies of a prompt's begin, then pin that."""
    blocks, place = rig.model.blocks, rig.place()
    blocks.drop_window(place, 1, blocks.index.rows[last("a")])
    pinned(rig, "a")


def test_nothing_is_pinned_of_a_model_that_is_gone_or_out_of_service() -> None:
    """An operator was answered that a prefix stays, of a model that was evicted while its key was looked for."""
    rig = with_prompt(one_group(), 16)
    rig.model.distrust("row 7 is not pinned")
    with pytest.raises(Unavailable, match="out of service"):
        pinned(rig, "abcd")
    rig.model.suspect = ""
    model = rig.core.ledger.models.pop(1)
    with pytest.raises(NotFound, match="evicted for another one"):
        pin(rig.core, model, last("abcd"), 60.0, rig.now)
    assert not model.pins.by_key


def test_a_pin_keeps_no_idle_model_from_giving_its_memory() -> None:
    rig = with_prompt(one_group(), 16)
    pinned(rig, "abcd")
    close_lease(rig.core, next(iter(rig.core.ledger.leases)), quiesced=True)
    assert idle_models(rig.core) == [rig.model]


def test_pins_end_with_the_memory_of_their_device() -> None:
    rig = with_prompt(one_group(), 16)
    pinned(rig, "abcd")
    rig.run(lose_device, "gpu-0", "its mover has ended")
    while rig.core.chores:
        tidy(rig.core.chores)
        rig.check()
    assert rig.model.pins.by_key == {}
    assert rig.core.counters["pins_ended_early"] == 1


def test_a_pin_ends_where_the_only_request_could_not_go_on_beside_it() -> None:
    rig = with_prompt(one_group(), 16)
    pinned(rig, "abcd")
    lease = next(iter(rig.core.ledger.leases))
    prefill(rig, lease, 2, "mnopq")
    rig.run(match, lease, 3, chain(*range(13)), 0)
    with pytest.raises(PoolExhausted):  # another request may end
        rig.run(allocate, lease, 3, 13)
    assert rig.model.pins.by_key
    close_lease(rig.core, lease, quiesced=True)
    lease = rig.lease("b")
    rig.run(match, lease, 1, chain(*range(17)), 0)
    with pytest.raises(PoolExhausted, match="too large"):
        rig.run(allocate, lease, 1, 17)
    assert rig.model.pins.by_key
    rig.run(allocate, lease, 1, 13)
    assert rig.model.pins.by_key == {}
    assert rig.core.counters["pins_ended_early"] == 1


def test_a_prefetch_ends_no_pin() -> None:
    rig = with_prompt(one_group(), 16, host=32, policy=WritePolicy.WRITE_THROUGH)
    lease = next(iter(rig.core.ledger.leases))
    serve(rig, lease, 2, "mnopqrstuvwxy")
    rig.settle()
    pinning.evict(rig.core, 1, "device", 0)
    rig.run(match, lease, 9, b"", 0)
    rig.run(allocate, lease, 9, 4)
    serve(rig, lease, 3, "1234")
    pinned(rig, "1234")
    with pytest.raises(PoolExhausted):
        rig.run(prefetch, lease, chain(*"mnopqrstuvwxy"))
    assert rig.model.pins.by_key


def test_a_swapped_out_request_keeps_no_pin_in_the_way_of_the_only_other() -> None:
    rig = with_prompt(one_group(), 16, host=32, policy=WritePolicy.WRITE_THROUGH)
    lease = next(iter(rig.core.ledger.leases))
    prefill(rig, lease, 2, "mn")
    rig.run(swap_out, lease, 2)
    rig.settle()
    pinned(rig, "abcd")
    rig.run(match, lease, 3, chain(*range(13)), 0)
    rig.run(allocate, lease, 3, 13)
    assert rig.model.pins.by_key == {}
    rig.check()


def test_a_pin_stays_where_its_end_would_not_help() -> None:
    """Pages in quarantine, as of an engine that was lost, keep a request from going on with and without the pin."""
    rig = with_prompt(one_group(), 16)
    other = rig.lease("other")
    rig.run(match, other, 1, b"", 0)
    rig.run(allocate, other, 1, 5)
    lose(rig.core, rig.core.ledger.leases[other], "by order")
    tidy_all(rig.core)
    pinned(rig, "abcd")
    lease = next(iter(rig.core.ledger.leases))
    rig.run(match, lease, 3, chain(*range(14)), 0)
    with pytest.raises(PoolExhausted, match="quarantined 5"):
        rig.run(allocate, lease, 3, 14)
    assert rig.model.pins.by_key


def test_status_lists_pins_and_why_names_them() -> None:
    rig = with_prompt(one_group(), 16)
    pinned(rig, "abcd")
    rig.now = 20.0
    view = View(rig.core, EVERYTHING, lambda: rig.now)
    (line,) = answer_at_once(status(view, 10.0)).pins
    assert line == inspect_pb2.PinStatus(
        model_id=1, model="m", key_hex=last("abcd").hex(), blocks=4, seconds_left=40.0, places=["replica 0"]
    )
    _, (story,) = (part.stories for part in answer_at_once(explain(view, 1, last("ab"))))
    assert f"an operator has pinned the prefix to {line.key_hex[:16]} for 40 s more" in story.verdict
