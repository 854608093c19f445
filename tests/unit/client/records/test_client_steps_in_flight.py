"""Steps in flight: what is added after a step was sent belongs to a later one, and no page is granted twice."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator

import pytest
from cachesvc_client import CacheClient, DaemonFault, InvalidRequest, Lease, StockEmpty, Timeouts
from cachesvc_client.layouts.families import opaque
from cachesvc_client.records.entries import GrowEntries, Stock, UntoldGrowth
from cachesvc_client.records.sequence_record import SequenceRecord
from kvcache.v1 import cache_pb2

from cachesvc.model.answers import GroupCells, Published
from tests.unit.rigs.client_rig import FakeDaemon, cells

LAYOUT = opaque(block_bytes=64, block_tokens=4)
Result = cache_pb2.OperationResult
Step = cache_pb2.StepResponse


@pytest.fixture
def lease(daemon: FakeDaemon) -> Iterator[Lease]:
    with CacheClient(daemon.path, timeouts=Timeouts(step_s=10, close_s=0.2)) as client:
        yield client.open_lease(client.register("m", LAYOUT))


def extended(blocks: int) -> Result:
    return Result(extend=cache_pb2.ExtendResponse(blocks=blocks))


def published(blocks: int) -> Result:
    return Result(publish=cache_pb2.PublishResponse(sealed_blocks=blocks))


@pytest.mark.parametrize("has_grown", [False, True])
def test_growth_after_a_step_was_sent_is_none_of_its(daemon: FakeDaemon, lease: Lease, has_grown: bool) -> None:
    """Its answer would not fit otherwise: the client would take its pages for refused ones, and grant them again."""
    first, second = lease.match(b""), lease.match(b"")
    stream = lease.step(stock_pages=3)
    daemon.step_answers.append(Step(stock=[cells(0, [5, 6, 7])]))
    stream.submit()
    if has_grown:
        stream.grow_all([first, second])
    daemon.step_answers.append(Step(results=[extended(1), extended(1)] if has_grown else []))
    pending = stream.send()
    second.grow_from_stock()
    assert pending.results() == []
    daemon.step_answers.append(Step(results=[extended(second.blocks)]))
    stream.submit()
    (told,) = daemon.seen["Step"][-1].operations
    assert told.extend.sequence_id == second.id
    assert second.record.failure is None


def test_a_batch_is_empty_once_it_was_sent(daemon: FakeDaemon, lease: Lease) -> None:
    first, second = lease.match(b"k" * 64), lease.match(b"k" * 64)
    stream = lease.step()
    batch = stream.batch()
    batch.publish_all([first, second], [1, 9])  # the second is refused at once
    daemon.step_answers.append(Step(results=[published(1)]))
    pending = stream.send(batch)
    assert batch.publish(first, 2) == 0
    assert batch.prefetch(b"") == 1
    assert [type(each).__name__ for each in pending.results()] == ["Published", "InvalidRequest"]
    daemon.step_answers.append(
        Step(results=[published(2), Result(prefetch=cache_pb2.PrefetchResponse(device_blocks=4))])
    )
    sealed, prefetched = stream.submit(batch)
    assert isinstance(sealed, Published)
    assert (sealed.sealed_blocks, prefetched.device_blocks) == (2, 4)
    sent = [operation.publish.sequence_id for operation in daemon.seen["Step"][-1].operations]
    assert sent[0] == first.id
    daemon.step_answers.append(Step())
    assert stream.submit(batch) == []


def test_a_plural_publish_with_a_wrong_argument_leaves_each_result_its_place(daemon: FakeDaemon, lease: Lease) -> None:
    first, second, third = (lease.match(b"k" * 64) for _ in range(3))
    stream = lease.step()
    batch = stream.batch()
    with pytest.raises(InvalidRequest):
        batch.publish_all([first, second], [1, "2"])  # type: ignore[list-item]
    place = batch.publish(third, 2)
    daemon.step_answers.append(Step(results=[published(1), published(2)]))
    results = stream.submit(batch)
    assert results[place].sealed_blocks == 2
    assert (results[0].sealed_blocks, first.sealed_blocks) == (1, 1)


def test_pages_that_the_daemon_may_have_in_a_sequence_are_not_granted_again(daemon: FakeDaemon, lease: Lease) -> None:
    """An answer that makes no sense does not say whether it grew."""
    sequence, other = lease.match(b""), lease.match(b"")
    stream = lease.step(stock_pages=1)
    daemon.step_answers.append(Step(stock=[cells(0, [5])]))
    stream.submit()
    sequence.grow_from_stock()
    daemon.step_answers.append(Step(results=[published(1)]))
    stream.submit()
    with pytest.raises(DaemonFault):
        sequence.grow_from_stock()
    sequence.release()
    with pytest.raises(StockEmpty):
        other.grow_from_stock()


def test_growth_while_another_thread_ends_a_sequence_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    ending, staying, stock, growing = (
        SequenceRecord(1, LAYOUT),
        SequenceRecord(2, LAYOUT),
        Stock([2]),
        UntoldGrowth(LAYOUT),
    )
    stock.add([GroupCells(0, 0, (5, 6), (1, 1))])
    growing.grow(stock, [ending], [1])
    grows = threading.Thread(target=growing.grow, args=(stock, [staying], [1]))
    merged = GrowEntries.merged

    def merged_meanwhile(entries: GrowEntries, leaving: Collection[SequenceRecord] = ()) -> GrowEntries:
        kept = merged(entries, leaving)
        if leaving:
            grows.start()
            grows.join(0.05)
        return kept

    monkeypatch.setattr(GrowEntries, "merged", merged_meanwhile)
    growing.withdraw([ending])
    grows.join()
    assert growing.take().owners == [staying]
