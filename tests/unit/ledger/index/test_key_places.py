"""A key's parent is part of what it names: the same key below another block is refused, in the index, in storage and
between nodes, so that what one caller names wrongly is never a hit of another one."""

from __future__ import annotations

import contextlib
import itertools
import random
from functools import partial

import pytest

from cachesvc.flows.allocate import allocate
from cachesvc.flows.loads import Sharing, lend
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish
from cachesvc.ledger.storage_state import LentBlocks
from cachesvc.model.answers import Matched
from cachesvc.model.errors import InvalidRequest, KeyMisplaced
from cachesvc.model.words import KEY_BYTES, WritePolicy
from cachesvc.storage.objects import check, require_digest, write_header
from cachesvc.storage.seam import Item, Outcome
from tests.contracts.storage_rig import name_of
from tests.long_cases import looped
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, prefill, rig_of, serve
from tests.unit.rigs.storage_flows_rig import MISPLACED, WHOLE, packed, storing, waits
from tests.unit.storage.storage_tier_rig import TierRig


def named(*keys: bytes) -> bytes:
    return b"".join(keys)


A, B, C, D = (chain(*"abcd")[at * KEY_BYTES :][:KEY_BYTES] for at in range(4))
X = chain(*"ax")[KEY_BYTES:]
Z, Y = (chain(*"zy")[at * KEY_BYTES :][:KEY_BYTES] for at in range(2))


def half_saved() -> tuple[Rig, str]:
    """The host has blocks a and b; c and d, below them, are on another replica alone. A lease on the one without."""
    rig = rig_of(one_group(), device=(16,), host=(16,), policy=WritePolicy.WRITE_THROUGH, replicas=2)
    a, b = rig.lease("a", 0), rig.lease("b", 1)
    serve(rig, a, 1, "ab")
    rig.settle()
    rig.mover.refusing = True
    serve(rig, a, 2, "abcd")
    rig.mover.refusing = False
    assert len(rig.host_keys()) == 2
    return rig, b


def found(rig: Rig, lease: str, sequence: int, keys: bytes) -> tuple[int, int]:
    answer = rig.run(match, lease, sequence, keys, 0)
    assert isinstance(answer, Matched)
    return answer.device_blocks, answer.host_blocks


def test_a_hit_ends_where_the_index_has_another_block_than_was_asked_for() -> None:
    rig, lease = half_saved()
    assert found(rig, lease, 1, named(A, X, C, D)) == (0, 1)
    assert rig.core.counters["keys_misplaced"] == 1
    assert found(rig, lease, 2, named(A, B, C, D)) == (0, 2)
    assert rig.core.counters["keys_misplaced"] == 1


def test_what_is_published_after_such_a_match_lies_below_the_block_that_was_named() -> None:
    """It lay below the block that the hit had ended in, and was a hit behind that one's bytes for those who asked for
    the named one."""
    rig, lease = half_saved()
    keys = named(A, X, C, D)
    rig.run(match, lease, 1, keys, 0)
    rig.run(allocate, lease, 1, 2)
    for ticket in list(rig.core.ledger.leases[lease].sequences[1].loads):
        rig.land(ticket)
    rig.run(publish, lease, 1, 1, X, 0)
    index = rig.model.blocks.index
    assert index.key_of(index.parent[index.rows[X]]) == A
    page = rig.core.ledger.leases[lease].sequences[1].tables[0][1]
    assert found(rig, lease, 2, named(A, X)) == (2, 0)
    assert rig.core.ledger.leases[lease].sequences[2].tables[0][1] == page
    rig.run(allocate, lease, 1, 3)
    with pytest.raises(KeyMisplaced, match="block 2: its key is not that of a block below") as refusal:
        rig.run(publish, lease, 1, 2, C, 0)
    assert refusal.value.block == 2
    assert rig.core.counters["keys_misplaced"] == 2


@pytest.mark.parametrize("asked", [(A, X, C, D), (A, B, Y, D), (Z, B, C, D)])
def test_a_node_lends_no_block_under_another_ones_name(asked: tuple[bytes, ...]) -> None:
    rig, _ = half_saved()
    rig.settle()
    same = next((at for at, (mine, theirs) in enumerate(zip((A, B, C, D), asked, strict=True)) if mine != theirs), 4)
    lent = rig.run(lend, rig.model, named(*asked, *packed("opq")))  # with which d is looked up first
    if not same:
        assert lent is None
        return
    assert isinstance(lent, LentBlocks)
    assert (lent.keys, lent.parent) == ([A, B, C, D][:same], b"")
    assert rig.core.counters["keys_misplaced"] == 1


def test_a_stretch_that_is_lent_says_what_is_above_it() -> None:
    rig, _ = half_saved()
    lent = rig.run(lend, rig.model, B)
    assert isinstance(lent, LentBlocks)
    assert (lent.keys, lent.parent) == ([B], A)


def test_a_fetch_names_the_block_that_it_goes_on_below() -> None:
    at = storing("abcd")
    serve(at.rig, at.lease, 1, "ab")
    waits(at.ask("abcd", 2)())
    assert at.storage.fetches[0].parent == B
    fresh = storing("abcd")
    waits(fresh.ask("abcd", 1)())
    assert fresh.storage.fetches[0].parent == b""


def test_a_block_that_storage_has_elsewhere_ends_the_fetch_and_is_still_believed_to_be_there() -> None:
    at = storing("abcd")
    ask = at.ask("abcd", 1)
    waits(ask())
    at.rig.model.stored.wrote(B, 0.0)
    at.tell([0], WHOLE)
    at.tell([1], MISPLACED)
    assert at.rig.host_keys() == {A}
    assert B in at.rig.model.stored.written
    assert at.rig.core.counters["keys_misplaced"] == 1


def test_a_fetch_of_the_same_key_below_another_block_is_not_joined() -> None:
    at = storing()
    at.storage.there = {A, Z, Y, *packed("zy")}
    prefill(at.rig, at.lease, 1, "a")
    prefill(at.rig, at.lease, 2, "z")
    wrong = partial(at.rig.once, partial(match, sharing=Sharing()), at.lease, 3, named(A, Y), 0)
    waits(wrong())
    waits(at.ask("zy", 4)())
    assert [request.parent for request in at.storage.fetches] == [A, Z]
    at.tell([0], MISPLACED, fetch=0)
    at.tell([0], WHOLE, fetch=1)
    index = at.rig.model.blocks.index
    assert index.key_of(index.parent[index.rows[Y]]) == Z


def test_storage_gives_an_object_to_those_alone_who_name_its_parent() -> None:
    rig = TierRig()
    rig.keep("zy")
    kept = dict(rig.engine.objects)
    rig.fetch(7, Y, [[9]], A)
    rig.settle()
    assert rig.outcomes() == [Outcome.MISPLACED]
    assert rig.engine.objects == kept, "the reader may be the one who is wrong"
    for at in range(20):
        rig.fetch(10 + at, Y, [[9]], A)
        rig.settle()
    assert rig.tier.breaker.is_closed, "and the engine has done nothing wrong"
    rig.outcomes()
    rig.fetch(8, Y, [[9]], Z)
    rig.settle()
    assert rig.outcomes() == [Outcome.OK]


def test_an_object_of_the_format_without_parents_counts_as_missing_and_goes() -> None:
    rig = TierRig()
    rig.keep("z")
    [name] = rig.engine.objects
    rig.engine.objects[name] = b"cskvobj\x01" + rig.engine.objects[name][8:]
    rig.fetch(7, Z, [[9]])
    rig.settle()
    assert rig.outcomes() == [Outcome.MISS]
    assert not rig.engine.objects
    rig.keep("z")
    rig.fetch(8, Z, [[9]])
    rig.settle()
    assert rig.outcomes() == [Outcome.OK]


@looped("flipped", range(0, 176, 7))
def test_a_header_of_which_a_bit_is_another_one_is_never_right(flipped: int) -> None:
    digest, page = require_digest(), memoryview(bytearray(b"payload."))
    item = Item(name_of("a"), memoryview(bytearray(256)), (page,), B)
    write_header(digest, item)
    assert check(digest, item, B) is Outcome.OK
    assert check(digest, item, A) is Outcome.MISPLACED
    item.head[flipped] ^= 4
    assert check(digest, item, B) is not Outcome.OK


def test_keys_that_are_not_chained_leave_what_eviction_learns_of_others_alone() -> None:
    """Blocks were counted to requests whose paths they are not on."""
    rig = rig_of(one_group(), device=(32,), host=(0,), eviction="hazard")
    lease = rig.lease()
    serve(rig, lease, 1, "abcdef")
    serve(rig, lease, 2, "zyxw")
    keys, other = packed("abcdef"), packed("zyxw")
    for number, wrong in enumerate(
        (
            [*keys[:2], *other[2:]],
            [other[0], *keys[1:]],
            [keys[0], other[3], *keys[2:]],
            [*other[:1], *keys[:4]],
            [*keys[3:], *other],
        )
    ):
        with contextlib.suppress(InvalidRequest):
            rig.run(match, lease, 10 + number, named(*wrong), 0)  # the rig's audits run after it


@looped("seed", range(12), range(60))
def test_keys_that_are_not_chained_break_no_call_whatever_replicas_have(seed: int) -> None:
    """One such Match raised in the midst of sharing, and took the model out of service for all."""
    rng = random.Random(seed)
    rig = rig_of(one_group(), device=(32,), host=(16,), policy=rng.choice(list(WritePolicy)), replicas=2)
    leases = rig.lease("a", 0), rig.lease("b", 1)
    numbers = itertools.count(1)
    for _ in range(4):
        prompt = rng.choice(("abcdef", "abcxyz", "zyxwvu"))[: rng.randint(1, 6)]
        serve(rig, rng.choice(leases), next(numbers), prompt)
        if rng.random() < 0.5:
            rig.settle()
    prompts = [packed(prompt) for prompt in ("abcdef", "abcxyz", "zyxwvu")]
    for _ in range(30):
        keys = [rng.choice(prompts)[at if rng.random() < 0.9 else rng.randrange(6)] for at in range(rng.randint(1, 6))]
        ask = partial(rig.once, partial(match, sharing=Sharing()), rng.choice(leases), next(numbers), named(*keys), 0)
        with contextlib.suppress(InvalidRequest):
            for _ in range(6):
                answer = ask()
                if isinstance(answer, Matched):
                    break
                for ticket in answer.tickets:
                    if ticket in rig.mover.transfers:
                        rig.land(ticket)
