"""Hints of engines: they move blocks within the order of their own model, and a false one costs its model alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from cachesvc.flows.allocate import allocate
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import release
from cachesvc.flows.registration import PoolRequest, RegisterRequest, register
from cachesvc.model.answers import Matched
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.words import WritePolicy
from cachesvc.policy.eviction import RequestHint, hinted, retention_of
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, rig_of

BLOCKS = 8
DEFAULT, ONCE, KEEP = RequestHint


def serve(
    rig: Rig, lease: str, number: int, names: str, hint: RequestHint = DEFAULT, *, apart: bool = False
) -> Matched:
    """A request for a prompt; ``apart``: its blocks are published one by one."""
    keys = chain(*names)
    hit = rig.run(match, lease, number, keys, 0, None, 0.0, None, hint)
    assert isinstance(hit, Matched)
    rig.run(allocate, lease, number, len(names))
    for first in range(hit.device_blocks, len(names)) if apart else ():
        rig.run(publish, lease, number, first, b"", 1)
    if not apart and hit.device_blocks < len(names):
        rig.run(publish, lease, number, hit.device_blocks, b"", len(names) - hit.device_blocks)
    rig.run(release, lease, number)
    rig.check()
    return hit


def hits(rig: Rig, lease: str, number: int, names: str) -> int:
    """Blocks of a prompt that are there, without a trace in the order."""
    hit = rig.run(match, lease, number, chain(*names), 0, None, 0.0, None, ONCE)
    rig.run(release, lease, number)
    assert isinstance(hit, Matched)
    return hit.device_blocks + hit.host_blocks


@pytest.mark.parametrize("apart", [False, True])
def test_blocks_that_will_not_return_go_before_older_ones(apart: bool) -> None:
    rig = rig_of(one_group(), device=(BLOCKS,))
    lease = rig.lease()
    serve(rig, lease, 1, "abc")
    serve(rig, lease, 2, "xyz", ONCE, apart=apart)
    serve(rig, lease, 3, "mnopq")
    assert (hits(rig, lease, 4, "abc"), hits(rig, lease, 5, "xyz")) == (3, 0), "LRU would have dropped abc"


def test_a_use_without_a_hint_makes_them_blocks_like_others() -> None:
    rig = rig_of(one_group(), device=(BLOCKS,))
    lease = rig.lease()
    serve(rig, lease, 1, "xyz", ONCE)
    serve(rig, lease, 2, "abc")
    serve(rig, lease, 3, "xyz")
    serve(rig, lease, 4, "mnopq")
    assert (hits(rig, lease, 5, "xyz"), hits(rig, lease, 6, "abc")) == (3, 0)


def test_a_request_that_will_not_return_refreshes_nothing_that_it_hits() -> None:
    rig = rig_of(one_group(), device=(BLOCKS,))
    lease = rig.lease()
    serve(rig, lease, 1, "abc")
    serve(rig, lease, 2, "xyz")
    serve(rig, lease, 3, "abc", ONCE)
    serve(rig, lease, 4, "mnopq")
    assert (hits(rig, lease, 5, "abc"), hits(rig, lease, 6, "xyz")) == (0, 3)


def test_blocks_that_are_kept_stay_for_one_more_turn_and_no_longer() -> None:
    rig = rig_of(one_group(), device=(BLOCKS,))
    lease = rig.lease()
    serve(rig, lease, 1, "abc", KEEP)
    serve(rig, lease, 2, "mnopq")
    serve(rig, lease, 3, "rs")
    assert hits(rig, lease, 4, "abc") == 3, "LRU would have dropped it for rs"
    for number in range(5, 9):
        serve(rig, lease, number, "".join(chr(number * 40 + at) for at in range(5)))
    assert hits(rig, lease, 9, "abc") < 3, "a hint that proves false ends"


def test_the_same_hint_on_all_is_none() -> None:
    left = []
    for hint in RequestHint:
        rig = rig_of(one_group(), device=(BLOCKS,))
        lease = rig.lease()
        for number, names in enumerate(("abc", "xyz", "abq", "mno"), start=1):
            serve(rig, lease, number, names, hint if hint is KEEP else DEFAULT)
        left.append([hits(rig, lease, 9 + at, names) for at, names in enumerate(("abc", "xyz", "abq", "mno"))])
    assert left[0] == left[2]


def test_blocks_that_will_not_return_are_not_copied_when_they_are_sealed() -> None:
    for hint, copies in ((ONCE, 0), (DEFAULT, 3), (KEEP, 3)):
        rig = rig_of(one_group(), device=(BLOCKS,), host=(BLOCKS,), policy=WritePolicy.WRITE_THROUGH)
        lease = rig.lease()
        serve(rig, lease, 1, "abc", hint)
        host = rig.model.blocks.host.pools[0]
        assert host.usable - host.free == copies, hint


@pytest.mark.parametrize("apart", [False, True])
def test_blocks_that_will_not_return_are_no_measure_of_how_long_blocks_stay(apart: bool) -> None:
    rig = rig_of(one_group(), device=(BLOCKS,))
    lease, counts = rig.lease(), rig.model.replicas[0].place.counts
    rig.core.ledger.mark_time(0.0)
    serve(rig, lease, 1, "abc")
    rig.core.ledger.mark_time(1e6)
    serve(rig, lease, 2, "xyz", ONCE, apart=apart)
    serve(rig, lease, 3, "mnopq")
    assert (counts.left, counts.ages.count) == (3, 0), "they would say that blocks stay for weeks"
    serve(rig, lease, 4, "rstuv")
    assert counts.left - counts.ages.count == 3, "others are counted"


def test_what_a_tenant_says_of_its_requests_changes_no_hit_of_another() -> None:
    def served(hint_of: Callable[[int], RequestHint]) -> tuple[list[int], list[int]]:
        ours = rig_of(one_group(), device=(BLOCKS,))
        request = RegisterRequest("other", one_group(), b"", ("gpu-0",), PoolRequest((BLOCKS,)), PoolRequest((0,)))
        register(ours.core, ours.vault, request, 0.0)
        theirs = replace(ours, model=ours.core.ledger.models[2])
        leases, dice = (ours.lease("a"), theirs.lease("b")), random.Random(3)
        found: tuple[list[int], list[int]] = ([], [])
        for number in range(1, 40):
            prompt = f"{dice.randrange(4)}x{dice.randrange(6)}"
            for at, (rig, lease, hint) in enumerate(zip((ours, theirs), leases, (KEEP, hint_of(number)), strict=True)):
                found[at].append(serve(rig, lease, number, prompt, hint).device_blocks)
        return found

    plain, kept = served(lambda _: DEFAULT), served(lambda _: KEEP)
    mixed = served(lambda number: ONCE if number % 2 else KEEP)
    assert plain[0] == kept[0] == mixed[0]
    assert plain[1] == kept[1] != mixed[1]


def test_a_number_that_is_no_hint_is_refused() -> None:
    assert [retention_of(number) for number in range(3)] == list(RequestHint)
    with pytest.raises(InvalidRequest, match="retention is 3; it is 0"):
        retention_of(3)
    assert [hinted(5, hint, 100) for hint in RequestHint] == [5, 0, 105]
