"""Steps: every operation gets its own result, growth needs no round trip, and a broken stream loses nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from cachesvc_client import (
    AlreadyClosed,
    CacheClient,
    Conflict,
    DaemonFault,
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidRequest,
    Lease,
    LeaseLost,
    LimitExceeded,
    LoadFailed,
    NotOwned,
    NotSupported,
    PoolExhausted,
    QuotaExceeded,
    Retries,
    Sequence,
    StockEmpty,
    Timeouts,
)
from cachesvc_client.layouts.families import opaque
from cachesvc_client.records.steps import MOST_ENDED, STEPS_UNDER_WAY
from kvcache.v1 import cache_pb2

from cachesvc.model.answers import Allocated, Published
from cachesvc.model.errors import ErrorCode
from cachesvc.wire.convert import pack_numbers
from tests.unit.rigs.client_rig import FakeDaemon, break_way, cells, hang_until

LAYOUT = opaque(block_bytes=64, block_tokens=4)
Result = cache_pb2.OperationResult
Step = cache_pb2.StepResponse


@pytest.fixture
def lease(daemon: FakeDaemon) -> Iterator[Lease]:
    timeouts = Timeouts(step_s=10, close_s=0.2)
    with CacheClient(daemon.path, timeouts=timeouts, retries=Retries(attempts=3, pause_s=0.001)) as client:
        yield client.open_lease(client.register("m", LAYOUT))


def refusal(code: ErrorCode) -> Result:
    return Result(error=cache_pb2.OperationError(code=code.value, message="what to do"))


def allocated(blocks: range) -> Result:
    return Result(allocate=cache_pb2.AllocateResponse(tables=[cells(0, blocks, first_block=blocks[0])]))


def test_a_daemon_that_takes_no_columns_is_refused_before_a_step(daemon: FakeDaemon) -> None:
    daemon.knows_columns = False
    with CacheClient(daemon.path) as client:
        lease = client.open_lease(client.register("m", LAYOUT))
        with pytest.raises(NotSupported, match=r"upgrade it to release 0\.2"):
            lease.step()


def test_counts_of_pages_are_those_of_the_last_answer(daemon: FakeDaemon, lease: Lease) -> None:
    stream = lease.step()
    daemon.step_answers.append(Step(free_pages=pack_numbers([3]), evictable_pages=pack_numbers([70_000])))
    daemon.step_answers.append(Step())  # of a daemon that tells none
    for _ in range(2):
        stream.submit()
        assert (stream.free_pages, stream.evictable_pages) == ((3,), (70_000,))


def test_results_stand_in_the_order_of_the_batch_each_with_its_own_outcome(daemon: FakeDaemon, lease: Lease) -> None:
    sequence = lease.match(b"")
    stream = lease.step()
    batch = stream.batch()
    places = [
        batch.allocate(sequence, 3),
        batch.publish(sequence, 2, b"k" * 64),
        batch.match(b"k" * 32),
        batch.prefetch(b""),
    ]
    daemon.step_answers.append(
        Step(
            results=[
                allocated(range(3)),
                refusal(ErrorCode.NOT_OWNED),
                Result(match=cache_pb2.MatchResponse(device_blocks=1, tables=[cells(0, [9])])),
                Result(prefetch=cache_pb2.PrefetchResponse(device_blocks=4)),
            ]
        )
    )
    results = stream.submit(batch)
    assert places == [0, 1, 2, 3]
    assert isinstance(results[0], Allocated)
    assert isinstance(results[1], NotOwned)
    assert isinstance(results[2], Sequence)
    assert results[2].tables[0].tolist() == [9]
    assert results[3].device_blocks == 4
    assert sequence.blocks == 3
    assert sequence.record.asked_blocks == 0


def test_a_batch_that_is_dropped_unsent_leaves_the_next_publish_as_it_was(daemon: FakeDaemon, lease: Lease) -> None:
    sequence, keys = lease.match(b""), b"k" * 32 * 4
    stream = lease.step()
    dropped = stream.batch()
    dropped.publish(sequence, 2, keys)
    dropped.publish(sequence, 3, keys)
    dropped.allocate(sequence, 3)
    dropped.publish(sequence, 4, keys)
    assert sequence.record.asked_blocks == 0
    batch = stream.batch()
    batch.publish(sequence, 1, keys)
    batch.publish(sequence, 4, keys)
    assert list(batch.publishes.firsts) == [0, 1]
    assert list(batch.publishes.uptos) == [1, 4]
    daemon.step_answers.append(Step())
    with pytest.raises(DaemonFault, match="answers for 2 entries"):
        stream.submit(batch)


def test_growth_rides_ahead_of_the_next_step_and_the_stock_is_filled_by_its_answer(
    daemon: FakeDaemon, lease: Lease
) -> None:
    sequence = lease.match(b"")
    stream = lease.step(stock_pages=2)
    daemon.step_answers.append(Step(stock=[cells(0, [5, 6], generation=4)]))
    stream.submit()
    sequence.grow_from_stock(2)
    assert sequence.tables[0].tolist() == [5, 6]
    with pytest.raises(StockEmpty):
        sequence.grow_from_stock()
    batch = stream.batch()
    batch.publish(sequence, 1, b"k" * 32)
    published = Result(publish=cache_pb2.PublishResponse(sealed_blocks=1))
    daemon.step_answers.append(
        Step(results=[Result(extend=cache_pb2.ExtendResponse(blocks=2)), published], stock=[cells(0, [7])])
    )
    (result,) = stream.submit(batch)
    assert isinstance(result, Published)
    sent = daemon.seen["Step"][-1]
    assert [operation.WhichOneof("operation") for operation in sent.operations] == ["extend", "publish"]
    assert sent.operations[0].extend.pages == [cells(0, [5, 6], generation=4)]
    assert list(sent.stock_pages) == [2]
    sequence.grow_from_stock()
    assert sequence.tables[0].tolist() == [5, 6, 7]


def test_a_lone_call_for_a_sequence_that_grew_tells_the_daemon_first(daemon: FakeDaemon, lease: Lease) -> None:
    sequence = lease.match(b"")
    stream = lease.step(stock_pages=1)
    daemon.step_answers.append(Step(stock=[cells(0, [5])]))
    stream.submit()
    sequence.grow_from_stock()
    daemon.step_answers.append(Step(results=[Result(extend=cache_pb2.ExtendResponse(blocks=1))]))
    sequence.publish(1, b"k" * 32)
    assert [len(request.operations) for request in daemon.seen["Step"]] == [0, 1]
    assert len(daemon.seen["Publish"]) == 1


def test_a_release_gives_growth_that_nobody_was_told_of_back_to_the_stock(daemon: FakeDaemon, lease: Lease) -> None:
    stream = lease.step(stock_pages=1)
    daemon.step_answers.append(Step(stock=[cells(0, [5])]))
    stream.submit()
    with lease.match(b"") as sequence:
        sequence.grow_from_stock()
    other = lease.match(b"")
    other.grow_from_stock()
    assert other.tables[0].tolist() == [5]
    assert len(daemon.seen["Step"]) == 1


def test_one_bad_sequence_of_a_plural_publish_keeps_no_other_from_it(daemon: FakeDaemon, lease: Lease) -> None:
    sequences = [lease.match(b"k" * 96) for _ in range(4)]
    stream = lease.step()
    sequences[1].record.failure = LoadFailed("the load broke")
    batch = stream.batch()
    places = batch.publish_all(sequences, [1, 1, 4, 2])  # of the third Match was told 3 keys
    published = [Result(publish=cache_pb2.PublishResponse(sealed_blocks=blocks)) for blocks in (1, 2)]
    daemon.step_answers.append(Step(results=published))
    results = stream.submit(batch)
    assert list(places) == [0, 1, 2, 3]
    assert [type(each) for each in results] == [Published, LoadFailed, InvalidRequest, Published]
    assert [each.sealed_blocks for each in results if isinstance(each, Published)] == [1, 2]
    assert [each.record.asked_blocks for each in sequences] == [1, 0, 0, 2]
    with pytest.raises(InvalidRequest, match="3 sequences need"):
        stream.batch().publish_all(sequences[:3], [1, 2])


def test_publishes_with_keys_and_without_travel_in_one_step(daemon: FakeDaemon, lease: Lease) -> None:
    """The column has the keys of all its entries or of none: the others are operations, and hold up none behind."""
    known, first, unknown, last = lease.match(b"k" * 64), lease.match(b"k" * 64), lease.match(b""), lease.match(b"")
    stream = lease.step()
    batch = stream.batch()
    batch.publish_all([unknown, known, last, first], 2, [b"u" * 64, b"", b"l" * 64, b""])
    sealed = Result(publish=cache_pb2.PublishResponse(sealed_blocks=2))
    daemon.step_answers.append(Step(results=[sealed, sealed, sealed, refusal(ErrorCode.NOT_OWNED)]))
    results = stream.submit(batch)
    sent = [operation.publish for operation in daemon.seen["Step"][-1].operations]
    assert [each.sequence_id for each in sent] == [unknown.id, last.id, known.id, first.id]
    assert [each.keys for each in sent] == [b"u" * 64, b"l" * 64, b"", b""]
    assert [type(each) for each in results] == [Published, Published, Published, NotOwned]


def test_sequences_grow_in_one_call_and_the_next_step_tells(daemon: FakeDaemon, lease: Lease) -> None:
    sequences = [lease.match(b"") for _ in range(3)]
    stream = lease.step(stock_pages=6)
    daemon.step_answers.append(Step(stock=[cells(0, range(5, 11))]))
    stream.submit()
    sequences[2].record.failure = LoadFailed("the load broke")
    with pytest.raises(LoadFailed) as refused:
        stream.grow_all(sequences)
    assert refused.value.sequence_id == sequences[2].id
    stream.grow_all(sequences[:2])
    stream.grow_all(sequences[:2], [1, 2])
    assert [each.tables[0].tolist() for each in sequences[:2]] == [[5, 7], [6, 8, 9]]
    daemon.step_answers.append(Step(results=[Result(extend=cache_pb2.ExtendResponse(blocks=n)) for n in (2, 3)]))
    pending = stream.send()
    with pytest.raises(Conflict, match="under way in a step"):
        sequences[0].publish(1, b"k" * 32)
    assert pending.results() == []
    told = [operation.extend for operation in daemon.seen["Step"][-1].operations]
    assert [(each.sequence_id, each.pages[0].pages) for each in told] == [
        (sequences[0].id, cells(0, [5, 7]).pages),
        (sequences[1].id, cells(0, [6, 8, 9]).pages),
    ]


def test_growth_of_a_refused_step_goes_with_the_next(daemon: FakeDaemon, lease: Lease) -> None:
    sequence = lease.match(b"")
    stream = lease.step(stock_pages=2)
    daemon.step_answers += [
        Step(stock=[cells(0, [5, 6])]),
        Step(error=cache_pb2.OperationError(code=ErrorCode.LIMIT.value, message="no")),
        Step(results=[Result(extend=cache_pb2.ExtendResponse(blocks=2))]),
    ]
    stream.submit()
    sequence.grow_from_stock()
    with pytest.raises(LimitExceeded):
        stream.submit()
    sequence.grow_from_stock()
    stream.submit()
    (told,) = daemon.seen["Step"][-1].operations
    assert told.extend.pages == [cells(0, [5, 6])]
    sequence.release()


def test_steps_may_run_ahead_and_collecting_a_later_one_takes_in_those_before(daemon: FakeDaemon, lease: Lease) -> None:
    sequence = lease.match(b"")
    stream = lease.step()
    pending = []
    for blocks in (range(2), range(2, 3)):
        batch = stream.batch()
        batch.allocate(sequence, blocks[-1] + 1)
        daemon.step_answers.append(Step(results=[allocated(blocks)]))
        pending.append(stream.send(batch))
    with pytest.raises(Conflict, match="under way in a step"):
        sequence.allocate(4)
    pending[1].results()
    assert sequence.tables[0].tolist() == [0, 1, 2]
    assert isinstance(pending[0].results()[0], Allocated)
    sequence.release()


def test_too_many_steps_without_an_answer_are_refused(daemon: FakeDaemon, lease: Lease) -> None:
    answered = threading.Event()
    daemon.faults["Step"].append(hang_until(answered))
    daemon.step_answers += [Step() for _ in range(STEPS_UNDER_WAY)]
    stream = lease.step()
    pending = [stream.send() for _ in range(STEPS_UNDER_WAY)]
    with pytest.raises(LimitExceeded, match="under way"):
        stream.send()
    answered.set()
    assert [step.results() for step in pending] == [[]] * STEPS_UNDER_WAY


def test_a_late_step_can_be_asked_for_again(daemon: FakeDaemon, lease: Lease) -> None:
    answered = threading.Event()
    daemon.faults["Step"].append(hang_until(answered))
    daemon.step_answers.append(Step())
    pending = lease.step().send()
    with pytest.raises(DeadlineExceeded, match="ask again"):
        pending.results(timeout_s=0.01)
    answered.set()
    assert pending.results() == []


def test_a_broken_stream_is_opened_again_and_sends_the_same_steps(daemon: FakeDaemon, lease: Lease) -> None:
    sequence = lease.match(b"")
    stream = lease.step()
    daemon.faults["Step"].append(break_way)
    daemon.step_answers.append(Step(results=[allocated(range(2))]))
    batch = stream.batch()
    batch.allocate(sequence, 2)
    stream.submit(batch)
    first, again = daemon.seen["Step"]
    assert first == again
    assert sequence.blocks == 2


def test_a_stream_that_stays_broken_fails_every_step_and_the_next_one_may_work(
    daemon: FakeDaemon, lease: Lease
) -> None:
    stream = lease.step()
    daemon.faults["Step"] += [break_way] * 3
    with pytest.raises(DaemonUnavailable):
        stream.submit()
    daemon.step_answers.append(Step())
    assert stream.submit() == []


def test_a_refused_step_fails_as_a_whole_and_a_lost_lease_is_noticed(daemon: FakeDaemon, lease: Lease) -> None:
    sequence = lease.match(b"")
    stream = lease.step()
    for code, kind in ((ErrorCode.LIMIT, LimitExceeded), (ErrorCode.LEASE_LOST, LeaseLost)):
        batch = stream.batch()
        batch.allocate(sequence, 2)
        error = cache_pb2.OperationError(code=code.value, message="no")
        daemon.step_answers.append(Step(error=error))
        with pytest.raises(kind):
            stream.submit(batch)
    assert lease.is_lost
    with pytest.raises(LeaseLost):
        stream.submit()


def test_releases_that_were_refused_go_with_the_next_steps(daemon: FakeDaemon, lease: Lease) -> None:
    """With the whole step, as an entry of a column and as an operation; and by itself."""
    first, second = lease.match(b""), lease.match(b"")
    stream = lease.step()
    batch = stream.batch()
    batch.release(first)
    batch.allocate(second, 1)
    batch.release(second)
    daemon.step_answers += [
        Step(error=cache_pb2.OperationError(code=ErrorCode.QUOTA_EXCEEDED.value, message="no")),
        Step(results=[refusal(ErrorCode.LIMIT), Result(release=cache_pb2.ReleaseResponse())]),
        Step(results=[Result(release=cache_pb2.ReleaseResponse())]),
        Step(),
    ]
    with pytest.raises(QuotaExceeded):
        stream.submit(batch)
    released = []
    for _ in range(3):
        stream.submit()
        released.append([each.release.sequence_id for each in daemon.seen["Step"][-1].operations])
    assert released == [[first.id, second.id], [first.id], []]
    assert first.is_released
    assert second.is_released


def test_releases_of_many_refused_steps_do_not_make_one_too_large(daemon: FakeDaemon, lease: Lease) -> None:
    sequences = [lease.match(b"") for _ in range(MOST_ENDED + 1)]
    stream = lease.step()
    batch = stream.batch()
    for each in sequences:
        batch.release(each)
    daemon.step_answers.append(Step(error=cache_pb2.OperationError(code=ErrorCode.LIMIT.value, message="no")))
    with pytest.raises(LimitExceeded):
        stream.submit(batch)
    released = Result(release=cache_pb2.ReleaseResponse())
    daemon.step_answers += [Step(results=[released] * MOST_ENDED), Step(results=[released])]
    for _ in range(2):
        stream.submit()
    assert all(each.is_released for each in sequences)


def test_an_answer_of_the_wrong_kind_is_the_daemons_fault(daemon: FakeDaemon, lease: Lease) -> None:
    sequence = lease.match(b"")
    stream = lease.step()
    batch = stream.batch()
    batch.allocate(sequence, 2)
    daemon.step_answers.append(Step(results=[Result(release=cache_pb2.ReleaseResponse())]))
    (result,) = stream.submit(batch)
    assert isinstance(result, DaemonFault)
    daemon.step_answers.append(Step(results=[Result()]))
    with pytest.raises(DaemonFault, match="1 results for 0 operations"):
        stream.submit()


def test_a_refused_operation_leaves_its_sequence_usable(daemon: FakeDaemon, lease: Lease) -> None:
    sequence = lease.match(b"")
    stream = lease.step()
    batch = stream.batch()
    batch.allocate(sequence, 2)
    daemon.step_answers.append(Step(results=[refusal(ErrorCode.EXHAUSTED)]))
    (result,) = stream.submit(batch)
    assert isinstance(result, PoolExhausted)
    sequence.allocate(1)
    assert sequence.blocks == 1


def test_closing_the_stream_gives_the_stock_back_and_a_lease_has_one_stream(daemon: FakeDaemon, lease: Lease) -> None:
    stream = lease.step(stock_pages=[1])
    with pytest.raises(Conflict, match="open step stream"):
        lease.step()
    daemon.step_answers.append(Step(stock=[cells(0, [5])]))
    stream.send()
    stream.close()
    stream.close()
    (given,) = daemon.seen["Recycle"]
    assert [(each.group, each.pages) for each in given.pages] == [(0, cells(0, [5]).pages)]
    with pytest.raises(AlreadyClosed):
        stream.send()
    lease.step().close()


def test_a_step_ends_with_the_daemon(daemon: FakeDaemon, lease: Lease) -> None:
    never = threading.Event()
    daemon.faults["Step"].append(hang_until(never))
    pending = lease.step().send()
    daemon.hang_up()
    with pytest.raises(DaemonUnavailable):
        pending.results()
    never.set()
