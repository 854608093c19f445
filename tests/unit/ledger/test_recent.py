"""The last requests of a model: what they were, and no more of them than may be kept."""

from __future__ import annotations

from cachesvc.flows.match import match
from cachesvc.flows.recycle import release
from cachesvc.ledger.reuse_stats import ID_BYTES, REQUEST_BLOCKS, RecentRequests
from cachesvc.model.answers import Ended
from cachesvc.model.words import KEY_BYTES
from tests.unit.rigs.ledger_rig import chain, one_group, rig_of, serve


def test_only_as_many_blocks_as_may_be_kept_are() -> None:
    recent = RecentRequests()
    for number in range(10):
        recent.add(float(number), chain(number, "b", "c"), 2 * (REQUEST_BLOCKS + 3) + 1)
    assert [request.seconds for request in recent.all()] == [8.0, 9.0]
    recent.add(10.0, chain(*range(9)), REQUEST_BLOCKS + 8)
    assert recent.all() == []


def test_short_prompts_are_bounded_by_what_they_cost_and_empty_ones_are_not_kept() -> None:
    recent = RecentRequests()
    for number in range(100):
        recent.add(float(number), chain(number), 8 * (REQUEST_BLOCKS + 1))
        assert recent.add(float(number), b"", 8 * (REQUEST_BLOCKS + 1)).blocks == 0
    assert [request.seconds for request in recent.all()] == [float(number) for number in range(92, 100)]


def test_a_match_is_a_request_with_the_keys_that_it_asked_for() -> None:
    rig = rig_of(one_group(), device=[4])
    lease = rig.lease()
    rig.now = 7.0
    serve(rig, lease, 1, ["a", "b"])
    rig.now = 9.0
    rig.run(match, lease, 2, chain("a", "c", "d"), 1)
    rig.run(release, lease, 2, Ended(output_tokens=40))
    first, second = rig.model.recent.all()
    assert (first.seconds, first.blocks, second.seconds, second.blocks) == (7.0, 2, 9.0, 3)
    assert (first.output_tokens, second.output_tokens) == (0, 40)
    assert first.block_ids[:ID_BYTES] == second.block_ids[:ID_BYTES] == chain("a")[:ID_BYTES]
    assert second.block_ids[ID_BYTES : 2 * ID_BYTES] == chain("a", "c")[KEY_BYTES : KEY_BYTES + ID_BYTES]


def test_a_request_came_before_it_was_asked_for_or_when_its_trace_says() -> None:
    for clock, seconds in ((None, 6.5), (77.0, 77.0)):
        rig = rig_of(one_group(), device=[4])
        rig.now = 9.0
        rig.run(match, rig.lease(), 1, chain("a"), 0, None, 2.5, clock)
        assert [request.seconds for request in rig.model.recent.all()] == [seconds]
