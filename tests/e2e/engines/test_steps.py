"""Step: many sequences in one message, growth without a round trip, and a status for each operation."""

from __future__ import annotations

import struct

import pytest
from cachesvc_client import Conflict, NotFound, PoolExhausted, Sequence, StockEmpty
from kvcache.v1 import admin_pb2, cache_pb2

from tests.e2e.engine import WINDOWED, Engine, prompt
from tests.e2e.refusals import bare_stubs
from tests.e2e.rig import Node
from tests.step_operations import with_columns, without_columns

pytestmark = pytest.mark.usefixtures("each_way")


def test_sequences_grow_from_stock_and_publish_in_one_stream(node: Node) -> None:
    with Engine(node.socket, device_pages=64) as engine:
        prompts = [engine.keys(prompt(seed, 12)) for seed in range(3)]
        with engine.lease.step(stock_pages=6) as steps:
            batch = steps.batch()
            for keys in prompts:
                batch.match(keys)
            sequences: list[Sequence] = steps.submit(batch)
            batch = steps.batch()
            for sequence in sequences:
                batch.allocate(sequence, 2)
            granted = steps.submit(batch)
            assert [answer.loading_blocks for answer in granted] == [0, 0, 0]

            for upto in range(3, 13):
                for sequence, keys in zip(sequences, prompts, strict=True):
                    sequence.grow_from_stock()
                    engine.fill(sequence, keys, range(sequence.sealed_blocks, min(upto, sequence.blocks)))
                batch = steps.batch()
                for sequence in sequences:
                    batch.publish(sequence, upto - 1)
                assert [answer.sealed_blocks for answer in steps.submit(batch)] == [upto - 1] * 3
            pages = [page for sequence in sequences for page in sequence.tables[0].tolist()]
            assert len(set(pages)) == 36
            batch = steps.batch()
            for sequence in sequences:
                batch.release(sequence)
            assert steps.submit(batch) == [1, 1, 1]
        assert node.held() == {"private": 0, "in_flight": 0, "quarantined": 0}
        assert node.pages("sealed") == 33
        for seed in range(3):
            served = engine.serve(prompt(seed, 11))
            assert (served.device, served.bad) == (11, [])


def test_an_operation_that_fails_does_not_undo_the_others(node: Node) -> None:
    with Engine(node.socket, device_pages=8) as engine, engine.lease.step() as steps:
        first, second, third = (engine.lease.match(engine.keys(prompt(seed, 4))) for seed in range(3))
        batch = steps.batch()
        batch.allocate(first, 4)
        batch.allocate(second, 5)
        batch.allocate(third, 4)
        one, two, three = steps.submit(batch)
        assert one.loading_blocks == three.loading_blocks == 0
        assert isinstance(two, PoolExhausted)
        assert "wanted 5 pages, free 4" in str(two)
        assert (first.blocks, second.blocks, third.blocks) == (4, 0, 4)

        batch = steps.batch()
        batch.release(first)
        batch.release(third)
        batch.allocate(second, 4)
        freed, also, granted = steps.submit(batch)
        assert (freed, also, granted.loading_blocks) == (4, 4, 0)
        second.release()


def test_the_stock_is_granted_as_far_as_it_goes_and_told_when_empty(node: Node) -> None:
    with Engine(node.socket, device_pages=4) as engine:
        sequence = engine.lease.match(engine.keys(prompt(0, 6)))
        with engine.lease.step(stock_pages=16) as steps:
            with pytest.raises(StockEmpty, match="wanted 1 blocks"):
                sequence.grow_from_stock()
            steps.submit()
            assert node.pages("private") == 4
            sequence.grow_from_stock(3)
            with pytest.raises(StockEmpty):
                sequence.grow_from_stock(2)
            assert sequence.blocks == 3
            steps.submit()
        assert node.pages("private") == 3
        assert sequence.release() == 3
        assert node.pages("free", "replica 0") == 4


def test_each_answer_tells_what_is_free_and_what_eviction_can_give(node: Node) -> None:
    """Whatever a step does, and whatever anybody else has done since the last one."""
    with Engine(node.socket, layout=WINDOWED, device_pages=16) as engine, engine.lease.step([3, 2]) as steps:
        assert (steps.free_pages, steps.evictable_pages) == ((), ())
        steps.submit()
        assert (steps.free_pages, steps.evictable_pages) == ((13, 14), (0, 0))
        with Engine(node.socket, layout=WINDOWED, device_pages=16, name="other") as other:
            tokens = prompt(5, 6)
            keys = other.keys(tokens)
            assert other.serve(tokens).computed == 6
            steps.submit()
            assert (steps.free_pages, steps.evictable_pages) == ((7, 8), (6, 6))
            held = other.lease.match(keys[: 4 * 32])
            steps.submit()
            assert (steps.free_pages, steps.evictable_pages) == ((7, 8), (2, 3)), "a window of three blocks is held"
            held.release()
        sequence = engine.lease.match(engine.keys(prompt(6, 5)))
        batch = steps.batch()
        batch.allocate(sequence, 5)
        steps.submit(batch)
        assert (steps.free_pages, steps.evictable_pages) == ((2, 3), (6, 6))
        batch = steps.batch()
        batch.publish(sequence, 5)
        steps.submit(batch)
        assert (steps.free_pages, steps.evictable_pages) == ((2, 3), (6, 6)), "its own are pinned"
        with engine.lease.match(b"") as another, pytest.raises(PoolExhausted, match="free 2, evictable 6"):
            another.allocate(9)
        batch = steps.batch()
        batch.release(sequence)
        steps.submit(batch)
        assert (steps.free_pages, steps.evictable_pages) == ((2, 3), (11, 11))
        assert node.problems() == []


def test_growth_is_told_before_the_next_call_of_the_sequence(node: Node) -> None:
    with Engine(node.socket, device_pages=8) as engine, engine.lease.step(stock_pages=4) as steps:
        steps.submit()
        keys = engine.keys(prompt(1, 3))
        with engine.lease.match(keys) as sequence:
            sequence.grow_from_stock(3)
            engine.fill(sequence, keys, range(3))
            assert sequence.publish(3).sealed_blocks == 3
            assert engine.lease.match(keys, sequence_id=77).device_blocks == 3


def test_a_step_that_publishes_and_ends_what_grew_since_the_last_one_seals_it(node: Node) -> None:
    with Engine(node.socket, device_pages=64) as engine, engine.lease.step(stock_pages=4) as steps:
        steps.submit()
        keys = engine.keys(prompt(11, 3))
        sequence = engine.lease.match(keys)
        sequence.grow_from_stock(3)
        engine.fill(sequence, keys, range(3))
        batch = steps.batch()
        batch.publish(sequence, 3)
        batch.release(sequence)
        published, freed = steps.submit(batch)
        assert published.sealed_blocks == 3
        assert freed == 0
        assert engine.lease.match(keys).device_blocks == 3


def test_a_windowed_stock_grows_both_groups(node: Node) -> None:
    with Engine(node.socket, layout=WINDOWED, device_pages=16) as engine, engine.lease.step([6, 4]) as steps:
        steps.submit()
        assert node.pages("private") == 10
        keys = engine.keys(prompt(2, 5))
        with engine.lease.match(keys) as sequence:
            sequence.grow_from_stock(4)
            assert min(min(table.tolist()) for table in sequence.tables) >= 0
            with pytest.raises(StockEmpty):
                sequence.grow_from_stock()
            engine.fill(sequence, keys, range(4))
            sequence.publish(4)
        assert engine.serve(prompt(2, 5)).bad == []


def test_steps_may_be_under_way_while_others_are_built(node: Node) -> None:
    with Engine(node.socket, device_pages=64) as engine, engine.lease.step(stock_pages=8) as steps:
        sequences = [engine.lease.match(engine.keys(prompt(seed, 4))) for seed in range(4)]
        pending = []
        for sequence in sequences:
            batch = steps.batch()
            batch.allocate(sequence, 2)
            pending.append(steps.send(batch))
        with pytest.raises(Conflict, match="under way"):
            sequences[0].publish(1)
        assert [step.results()[0].loading_blocks for step in reversed(pending)] == [0] * 4
        assert [sequence.blocks for sequence in sequences] == [2] * 4
        batch = steps.batch()
        ghost = batch.release(sequences[0])
        twice = batch.release(sequences[1])
        results = steps.submit(batch)
        assert (results[ghost], results[twice]) == (2, 2)
        for sequence in sequences[2:]:
            assert sequence.release() == 2


def test_a_step_that_names_an_ended_sequence_says_so(node: Node) -> None:
    with Engine(node.socket) as engine, engine.lease.step() as steps:
        sequence = engine.lease.match(engine.keys(prompt(5, 2)))
        batch = steps.batch()
        batch.release(sequence)
        batch.allocate(sequence, 2)
        freed, refused = steps.submit(batch)
        assert freed == 0
        assert isinstance(refused, NotFound)


def test_a_step_whose_stream_breaks_is_found_again_under_its_id(node: Node) -> None:
    """Wherever the break falls: before, amid (the swaps make the step wait), or after."""
    with Engine(node.socket, device_pages=64, host_pages=256) as engine, bare_stubs(node.socket) as bare:
        lease = engine.lease.id
        for number in range(1, 9):
            operations = []
            for sequence in range(10 * number, 10 * number + 3):
                keys = engine.keys(prompt(sequence, 8))
                out = cache_pb2.SwapRequest(sequence_id=sequence, direction=cache_pb2.SWAP_DIRECTION_OUT)
                operations += [
                    cache_pb2.StepOperation(match=cache_pb2.MatchRequest(sequence_id=sequence, keys=keys)),
                    cache_pb2.StepOperation(allocate=cache_pb2.AllocateRequest(sequence_id=sequence, blocks=8)),
                    cache_pb2.StepOperation(publish=cache_pb2.PublishRequest(sequence_id=sequence, blocks=6)),
                    cache_pb2.StepOperation(swap=out),
                    cache_pb2.StepOperation(allocate=cache_pb2.AllocateRequest(sequence_id=sequence, blocks=40)),
                ]
            request = cache_pb2.StepRequest(lease_id=lease, request_id=1000 + number, operations=operations)
            broken = bare.cache.Step(iter([request]))
            bare.admin.GetStatus(admin_pb2.GetStatusRequest())
            broken.cancel()
            results = bare.step(request).results
            assert [result.WhichOneof("result") for result in results] == [
                "match", "allocate", "publish", "swap", "error",
            ] * 3  # fmt: skip
            ends = [
                cache_pb2.StepOperation(release=cache_pb2.ReleaseRequest(sequence_id=sequence))
                for sequence in range(10 * number, 10 * number + 3)
            ]
            end = bare.step(cache_pb2.StepRequest(lease_id=lease, request_id=2000 + number, operations=ends))
            assert [result.WhichOneof("result") for result in end.results] == ["release"] * 3


def test_a_step_by_columns_over_the_socket_is_what_it_is_by_operations(node: Node) -> None:
    """The same publishes, recycles and releases, by the one and by the other, of unknown prompts."""
    with Engine(node.socket, layout=WINDOWED, device_pages=64) as engine, bare_stubs(node.socket) as bare:
        answers = []
        for number, is_column in enumerate((True, False)):
            sequences = [engine.lease.match(engine.keys(prompt(10 * number + seed, 5))) for seed in range(3)]
            for sequence in sequences:
                sequence.allocate(5)
            ids = [sequence.id for sequence in sequences]
            columns = cache_pb2.StepColumns(
                publish_sequences=struct.pack("<4Q", *ids, 999),
                publish_first=struct.pack("<4I", 0, 0, 1, 0),
                publish_counts=struct.pack("<4I", 5, 4, 1, 1),
                recycle_sequences=struct.pack("<1Q", ids[0]),
                recycle_tokens=struct.pack("<1Q", 80),
                release_sequences=struct.pack("<2Q", ids[2], ids[1]),
            )
            request = cache_pb2.StepRequest(lease_id=engine.lease.id, request_id=500 + number, columns=columns)
            if is_column:
                answer = bare.step(request)
                assert bare.step(request) == answer, "a retry"
            else:
                answer = with_columns(bare.step(without_columns(request, 2)), request)
            answers.append(answer.columns)
            sequences[0].release()
        for told in answers:
            for odd in told.odd:
                odd.result.error.message = ""
        assert answers[0] == answers[1]
        assert [(odd.column, odd.index, odd.result.error.code) for odd in answers[0].odd] == [
            (cache_pb2.STEP_COLUMN_PUBLISH, 2, "CONFLICT"),
            (cache_pb2.STEP_COLUMN_PUBLISH, 3, "NOT_FOUND"),
        ]
        assert struct.unpack("<2I", answers[0].freed_pages) == (10, 2)
