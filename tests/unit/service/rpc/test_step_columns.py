"""Columns of a Step: the order of their entries, what they are refused for, and what waits, by daemon and client."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest
from kvcache.v1 import cache_pb2, common_pb2

from cachesvc.model.layout import Layout
from cachesvc.policy.hazard import History
from cachesvc.service.access.quota import Quota, Quotas
from cachesvc.service.calls.dispatcher import INTERNAL
from cachesvc.service.rpc.steps import TURN_BLOCKS
from cachesvc.wire.columns import NOT_TOLD, ODD
from tests.unit.rigs.dispatch_rig import Desk, kinds, match, release, step, swap_in, turns
from tests.unit.rigs.ledger_rig import chain, one_group, rig_of, windowed
from tests.work import counted

GROW, PUBLISH, RECYCLE, RELEASE = 1, 2, 3, 4
MOST_TO_GROW, MOST_TO_PUBLISH = 160, 960
"""Instructions for each sequence: a block from the stock, and two blocks with unpublished keys."""


def longs(*numbers: int) -> bytes:
    return array("Q", numbers).tobytes()


def ints(*numbers: int) -> bytes:
    return array("I", numbers).tobytes()


def told(raw: bytes) -> list[int]:
    return list(array("I", raw))


def odd(answer: cache_pb2.StepResponse) -> list[tuple[int, int, str]]:
    """Column, entry, and the name of the answer or the code of the refusal."""
    return [
        (each.column, each.index, each.result.error.code or str(each.result.WhichOneof("result")))
        for each in answer.columns.odd
    ]


def granted(desk: Desk, lease: str, count: int) -> list[common_pb2.GroupPages]:
    groups = len(desk.rig.model.layout.groups)
    return list(desk.steps(lease, stock_pages=[count] * groups).stock)


def publish(prompts: dict[int, str], first: int = 0, **fields: Any) -> cache_pb2.StepColumns:
    """Each sequence publishes the rest of its prompt from block ``first`` on."""
    return cache_pb2.StepColumns(
        publish_sequences=longs(*prompts),
        publish_first=ints(*[first] * len(prompts)),
        publish_counts=ints(*(len(prompt) - first for prompt in prompts.values())),
        publish_keys=b"".join(chain(*prompt)[32 * first :] for prompt in prompts.values()),
        **fields,
    )


async def test_columns_are_applied_in_their_order_before_the_operations() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        desk.fill(lease, 2, "cd")
        columns = publish({1: "ab", 2: "cd"}, grow_sequences=longs(2, 1), grow=granted(desk, lease, 2))
        columns.recycle_sequences, columns.recycle_tokens = longs(1), longs(8)
        columns.release_sequences = longs(1)
        answer = desk.steps(lease, match(1, "ab"), columns=columns)
        assert (told(answer.columns.grown_blocks), told(answer.columns.sealed_blocks)) == ([3, 3], [2, 2])
        assert (told(answer.columns.recycled_pages), told(answer.columns.freed_pages)) == ([0], [1])
        assert odd(answer) == []
        assert answer.results[0].match.device_blocks == 2, "published and released before"
        assert desk.cache.operations == {
            ("extend", "OK"): 2,
            ("publish", "OK"): 2,
            ("recycle", "OK"): 1,
            ("release", "OK"): 1,
            ("match", "OK"): 1,
        }


async def test_what_each_sequence_adds_to_a_step_is_bounded() -> None:
    """In instructions of the interpreter: a step of many sequences costs what its loops cost for each."""
    grown: list[int] = []
    both: list[int] = []
    for count in (8, 8, 24):  # what is looked up once for all is of the first
        async with Desk(rig_of(one_group(), device=(128,), host=(0,))) as desk:
            lease = desk.lease()
            prompts = {number: f"{chr(0x100 + number)}b" for number in range(1, count + 1)}
            for number, prompt in prompts.items():
                desk.fill(lease, number, prompt)
            for columns, found in ((cache_pb2.StepColumns(), grown), (publish(prompts), both)):
                columns.grow_sequences = longs(*prompts)
                columns.grow.extend(granted(desk, lease, count))
                with counted() as work:
                    answer = desk.steps(lease, columns=columns)
                found.append(work.steps)
                assert odd(answer) == []
    assert grown[2] - grown[1] <= 16 * MOST_TO_GROW
    assert both[2] - both[1] <= 16 * (MOST_TO_GROW + MOST_TO_PUBLISH)


@pytest.mark.parametrize(
    ("sequences", "counts", "lengths"),
    [((1, 2, 1), (), [3, 3, 4]), ((1, 2, 1), (1, 1, 2), [3, 3, 5]), ((1, 2), (0, 2), [2, 4])],
)
async def test_a_sequence_may_grow_twice_in_a_step_or_by_nothing(
    sequences: tuple[int, ...], counts: tuple[int, ...], lengths: list[int]
) -> None:
    """Growth that no step has told of yet comes before that of this one."""
    async with Desk() as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        desk.fill(lease, 2, "cd")
        grow = granted(desk, lease, sum(counts) or len(sequences))
        columns = cache_pb2.StepColumns(grow_sequences=longs(*sequences), grow_counts=ints(*counts), grow=grow)
        answer = desk.steps(lease, columns=columns)
        assert (told(answer.columns.grown_blocks), odd(answer)) == (lengths, [])
        held = desk.rig.core.ledger.leases[lease].sequences
        assert {number: each.blocks for number, each in held.items()} == dict(zip(sequences, lengths, strict=True))
        desk.rig.check()


async def test_what_is_more_than_a_number_is_odd_and_the_others_are_not() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        for sequence, prompt in enumerate(("ab", "ab", "cd", "ef"), start=1):
            desk.fill(lease, sequence, prompt)
        columns = publish({1: "ab", 2: "ab", 3: "cd", 9: "xy", 4: "ef"}, release_sequences=longs(8, 4))
        answer = desk.steps(lease, columns=columns)
        assert told(answer.columns.sealed_blocks) == [2, ODD, 2, ODD, 2]
        assert odd(answer) == [(PUBLISH, 1, "publish"), (PUBLISH, 3, "NOT_FOUND"), (RELEASE, 0, "NOT_FOUND")]
        assert answer.columns.odd[0].result.publish.duplicate_positions == ints(0, 1)
        assert told(answer.columns.freed_pages) == [ODD, 0]


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"grow_sequences": b"1234567"}, "grow_sequences has 7 bytes"),
        ({"grow_sequences": longs(1)}, "grow needs the pages of each of 1 groups"),
        ({"grow_sequences": longs(1), "grow": [common_pb2.GroupPages()]}, "pages of group 0 has 0 entries; 1 are"),
        ({"grow_sequences": longs(1), "grow_counts": ints(1, 1)}, "grow_counts has 2 entries; 1 are needed"),
        ({"grow": [common_pb2.GroupPages(group=1)]}, "grow needs the pages of each of 1 groups"),
        (
            {"grow_sequences": longs(1), "grow": [common_pb2.GroupPages(pages=b"1234", generations=b"12345")]},
            "generations of group 0 has 5 bytes",
        ),
        ({"publish_sequences": longs(1)}, "publish_first has 0 entries; 1 are needed"),
        ({"publish_first": ints(0)}, "publish_first has 1 entries; 0 are needed"),
        (
            {"publish_sequences": longs(1), "publish_first": ints(0), "publish_counts": b"1"},
            "publish_counts has 1 bytes",
        ),
        (
            {"publish_sequences": longs(1), "publish_first": ints(0), "publish_keys": b"k" * 33},
            "publish_keys has 33 bytes for 1 blocks",
        ),
        ({"recycle_sequences": longs(1)}, "recycle_tokens has 0 entries; 1 are needed"),
        ({"release_sequences": longs(1)[:4]}, "release_sequences has 4 bytes"),
    ],
)
async def test_ragged_columns_refuse_the_step_before_anything_is_done(fields: dict[str, Any], what: str) -> None:
    async with Desk() as desk:
        lease = desk.lease()
        columns = publish({1: "ab"}) if "publish" not in str(fields) else cache_pb2.StepColumns()
        columns.MergeFrom(cache_pb2.StepColumns(**fields))
        answer = desk.steps(lease, match(1, "ab"), columns=columns)
        assert (answer.code, what in answer.message) == ("INVALID", True), answer
        assert not desk.rig.core.ledger.leases[lease].sequences


async def test_entries_count_as_operations_of_the_step() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        desk.cache.operations_per_step = 2
        columns = cache_pb2.StepColumns(release_sequences=longs(1, 2))
        assert odd(desk.steps(lease, columns=columns)) == [(RELEASE, 0, "NOT_FOUND"), (RELEASE, 1, "NOT_FOUND")]
        assert desk.steps(lease, match(1, "a"), columns=columns).code == "LIMIT"


async def test_a_retry_by_columns_is_carried_out_once() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        request = step(lease, 1, columns=publish({1: "ab"}, release_sequences=longs(1)))
        answer = desk.ask(desk.cache.step, request)
        assert odd(answer) == []
        assert desk.ask(desk.cache.step, request) == answer
        assert desk.rig.core.counters["published_blocks"] == 2
        request.columns.release_sequences = longs(2)
        assert "was used before" in desk.ask(desk.cache.step, request).message


async def test_an_entry_that_waits_holds_up_its_own_sequence_alone() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        desk.fill(lease, 2, "cd")
        ticket = desk.swap_out(lease, 1)
        columns = publish({1: "ab", 2: "cd"}, release_sequences=longs(1, 2))
        served = desk.steps(lease, match(2, "cd"), swap_in(1), columns=columns)
        assert isinstance(served, asyncio.Future)
        await turns()
        assert sorted(desk.rig.core.ledger.leases[lease].sequences) == [1, 2], "2 was released, and is matched again"
        await desk.land(ticket)
        answer = await served
        assert told(answer.columns.sealed_blocks) == [ODD, 2]
        assert odd(answer) == [(PUBLISH, 0, "CONFLICT")], "it is swapped out by then"
        assert told(answer.columns.freed_pages) == [0, 0]
        assert kinds(answer) == ["match", "NOT_FOUND"], "its release came before"


async def test_an_entry_that_may_not_wait_is_refused() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        ticket = desk.swap_out(lease, 1)
        answer = desk.steps(lease, columns=publish({1: "ab"}), no_wait=True)
        assert odd(answer) == [(PUBLISH, 0, "DEADLINE")]
        await desk.land(ticket)


async def test_growth_that_is_refused_takes_nothing_and_those_behind_it_go_on() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        desk.fill(lease, 2, "cd")
        cells = granted(desk, lease, 3)
        pages = list(array("i", cells[0].pages))
        cells[0].pages = array("i", [pages[0], pages[0], pages[1], pages[2]]).tobytes()
        cells[0].generations = cells[0].generations[:4] + cells[0].generations
        columns = cache_pb2.StepColumns(grow_sequences=longs(1, 2, 7, 2), grow=cells)
        answer = desk.steps(lease, columns=columns)
        assert told(answer.columns.grown_blocks) == [3, ODD, ODD, 3]
        assert odd(answer) == [(GROW, 1, "NOT_OWNED"), (GROW, 2, "NOT_FOUND")]
        assert desk.rig.core.ledger.leases[lease].stock == [{pages[1]}]
        desk.rig.check()


async def test_many_blocks_give_others_a_turn() -> None:
    async with Desk(rig_of(windowed(), device=(600, 600))) as desk:
        lease = desk.lease()
        blocks = TURN_BLOCKS + 1
        for sequence in (1, 2):
            desk.fill(lease, sequence, "x" * blocks, blocks=TURN_BLOCKS)
            desk.ask(
                desk.cache.allocate, cache_pb2.AllocateRequest(lease_id=lease, sequence_id=sequence, blocks=blocks)
            )
        columns = cache_pb2.StepColumns(
            publish_sequences=longs(1, 2), publish_first=ints(0, 0), publish_counts=ints(blocks, blocks)
        )
        served = desk.steps(lease, columns=columns)
        assert isinstance(served, asyncio.Future), "a prompt each turn"
        answer = await served
        assert told(answer.columns.sealed_blocks) == [blocks, ODD]
        assert odd(answer) == [(PUBLISH, 1, "publish")]
        desk.rig.check()


async def test_what_an_iteration_has_for_32_sequences_is_one_turn() -> None:
    async with Desk(rig_of(windowed(), device=(200, 200))) as desk:
        lease = desk.lease()
        prompts = {sequence: chr(64 + sequence) for sequence in range(1, 33)}
        for sequence, prompt in prompts.items():
            desk.fill(lease, sequence, prompt)
        columns = publish(prompts, grow_sequences=longs(*prompts), grow=granted(desk, lease, 32))
        columns.recycle_sequences, columns.recycle_tokens = longs(*prompts), longs(*[4] * 32)
        columns.release_sequences = longs(1)
        assert odd(desk.steps(lease, match(99, "z"), columns=columns)) == []


async def test_a_defect_of_an_entry_ends_its_step() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        desk.fill(lease, 2, "cd")
        desk.break_ledger(lease, 1)
        columns = cache_pb2.StepColumns(release_sequences=longs(1, 2))
        answer = desk.steps(lease, release(2), columns=columns)
        assert odd(answer) == [(RELEASE, 0, INTERNAL), (RELEASE, 1, "UNAVAILABLE")]
        assert kinds(answer) == ["UNAVAILABLE"]
        assert told(answer.columns.freed_pages) == [ODD, ODD]
        assert sorted(desk.rig.core.ledger.leases[lease].sequences) == [1, 2]
        assert desk.rig.core.ledger.models[1].suspect


@pytest.mark.parametrize("in_column", [True, False])
async def test_a_defect_of_a_steps_own_flows_takes_the_model_out_of_service(in_column: bool) -> None:
    async with Desk() as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        pages = granted(desk, lease, 1) if in_column else []
        desk.rig.core.ledger.leases[lease].stock.clear()
        columns = cache_pb2.StepColumns(grow_sequences=longs(1), grow=pages) if in_column else None
        answer = desk.steps(lease, columns=columns, stock_pages=() if in_column else (2,))
        assert odd(answer) == ([(GROW, 0, INTERNAL)] if in_column else [])
        assert not answer.stock
        assert desk.rig.core.ledger.models[1].suspect.startswith("IndexError" if in_column else "ValueError")
        assert desk.rig.core.counters["calls_broken"] == 1
        assert desk.steps(lease).code == "UNAVAILABLE"


async def test_entries_are_metered_as_operations() -> None:
    rig = rig_of(windowed(), device=(8, 8))
    quota = Quota(operations_per_second=4)
    async with Desk(rig, quotas=Quotas(rig.core, lambda _: quota)) as desk:
        lease = desk.lease()
        columns = cache_pb2.StepColumns(release_sequences=longs(1, 2, 3))
        assert len(odd(desk.steps(lease, columns=columns))) == 3
        refused = desk.steps(lease, columns=columns)
        assert (refused.code, "operations_per_second" in refused.message) == ("QUOTA_EXCEEDED", True), refused


async def test_releases_say_what_requests_put_out() -> None:
    async with Desk(rig_of(one_group(), device=(16,), eviction="hazard")) as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        desk.fill(lease, 2, "cd")
        columns = publish({1: "ab", 2: "cd"}, release_sequences=longs(1, 2))
        columns.release_output_tokens = ints(300, NOT_TOLD)
        assert told(desk.steps(lease, columns=columns).columns.freed_pages) == [0, 0]
        history = desk.rig.model.blocks.chooser
        assert isinstance(history, History)
        ended = [bool(history.segments.queue_after[parts.own]) for parts in history.remembered]
        assert ended == [True, False], "what is not told stays in the class that Match showed"
        columns = cache_pb2.StepColumns(release_sequences=longs(1), release_output_tokens=ints(1, 2))
        assert "release_output_tokens" in str(desk.steps(lease, columns=columns))


@pytest.mark.parametrize("layout", [one_group(), windowed()], ids=["one group", "windowed"])
@pytest.mark.parametrize("known", [True, False])
async def test_blocks_of_one_each_are_sealed_as_those_that_are_counted(layout: Layout, known: bool) -> None:
    """Without counts all entries are looked at and written at once, with counts each by itself."""
    seen = []
    for counts in (b"", ints(1, 1, 1)):
        groups = len(layout.groups)
        async with Desk(rig_of(layout, device=(32,) * groups, host=(32,) * groups)) as desk:
            lease = desk.lease()
            desk.fill(lease, 9, "ab")
            desk.steps(lease, columns=publish({9: "ab"}))
            prompts = {1: "abcde", 2: "abfgh", 3: "xyzuv"}
            for number, prompt in prompts.items():
                desk.fill(lease, number, prompt if known else prompt[:2], blocks=5)
            sequences = desk.rig.core.ledger.leases[lease].sequences
            told_by_turn = []
            for _ in range(3):
                first = [sequences[number].sealed for number in prompts]
                keys = [
                    chain(*prompt)[32 * at : 32 * at + 32] for prompt, at in zip(prompts.values(), first, strict=True)
                ]
                columns = cache_pb2.StepColumns(
                    publish_sequences=longs(*prompts),
                    publish_first=ints(*first),
                    publish_counts=counts,
                    publish_keys=b"" if known else b"".join(keys),
                )
                answer = desk.steps(lease, columns=columns)
                told_by_turn.append((told(answer.columns.sealed_blocks), odd(answer)))
                desk.rig.check()
            index, place = desk.rig.model.blocks.index, desk.rig.place()
            blocks = {
                key: (index.depth[row], index.children[row], index.hits[row], index.stamp[row], place.pins[row])
                for key, row in index.rows.items()
            }
            assert place.counts.pinned > 0
            seen.append((told_by_turn, blocks, place.counts.pinned, place.protected.blocks, place.counts.states))
    assert seen[0] == seen[1]
    assert seen[0][0] == [([3, 3, 1], []), ([4, 4, 2], []), ([5, 5, 3], [])]


async def test_of_two_that_seal_one_new_key_in_a_step_the_second_is_a_duplicate() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "a")
        desk.fill(lease, 2, "a")
        columns = publish({1: "a", 2: "a"})
        columns.publish_counts = b""
        answer = desk.steps(lease, columns=columns)
        assert (told(answer.columns.sealed_blocks), odd(answer)) == ([1, ODD], [(PUBLISH, 1, "publish")])
        desk.rig.check()
