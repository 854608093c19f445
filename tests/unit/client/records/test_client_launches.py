"""Launches under way hold back what they may use, call by call; nothing is forgotten and nothing sent twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cachesvc_client import (
    AlreadyClosed,
    CacheClient,
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    Lease,
    LeaseLost,
    LimitExceeded,
    NotOwned,
    QuotaExceeded,
    Retries,
    Timeouts,
)
from cachesvc_client.layouts.families import gqa_windowed, opaque
from cachesvc_client.records.sequence_record import GiveBacks, Launches, SequenceRecord
from cachesvc_client.records.steps import STEPS_UNDER_WAY
from kvcache.v1 import cache_pb2

from cachesvc.model.errors import ErrorCode
from cachesvc.wire.convert import pack_numbers, unpack_pages
from tests.unit.rigs.client_rig import FakeDaemon, cells, lose_answer, refuse

LAYOUT = opaque(block_bytes=64, block_tokens=4)
WINDOWED = gqa_windowed(window_layers=[False, True], kv_heads=1, head_dim=4, block_tokens=4, window_tokens=9)
KEYS = bytes(range(32)) * 8
Result = cache_pb2.OperationResult
Step = cache_pb2.StepResponse


@pytest.fixture
def lease(daemon: FakeDaemon) -> Iterator[Lease]:
    timeouts = Timeouts(call_s=10, step_s=10, close_s=1)
    with CacheClient(daemon.path, timeouts=timeouts, retries=Retries(attempts=1, pause_s=0.001)) as client:
        yield client.open_lease(client.register("m", LAYOUT))


def released(daemon: FakeDaemon) -> list[int]:
    return [request.sequence_id for request in daemon.seen["Release"]]


def in_step(daemon: FakeDaemon, step: int) -> list[str | None]:
    return [operation.WhichOneof("operation") for operation in daemon.seen["Step"][step].operations]


def test_launches_are_numbered_and_end_in_order() -> None:
    launches = Launches()
    assert not launches.are_under_way
    assert [launches.begin() for _ in range(3)] == [1, 2, 3]
    launches.complete(2)
    launches.complete(1)
    assert (launches.completed, launches.are_under_way) == (2, True)
    assert [launches.pending(launch) for launch in (None, 0, 2, 3)] == [3, 0, 0, 3]
    for never in (4, -1):
        with pytest.raises(InvalidRequest, match=f"launch {never} never was; the newest is 3"):
            launches.complete(never)
    launches.complete(3)
    assert not launches.are_under_way


def test_each_page_waits_for_the_launches_before_it_left_the_tables() -> None:
    launches = Launches()
    mine = GiveBacks(launches)
    mine.add_spares([(0, 7)])
    launches.begin()
    mine.add_spares([(0, 8)])
    launches.begin()
    mine.add_spares([(1, 9)])
    assert mine.take_due().pages == [(0, 7)]
    launches.complete(1)
    assert mine.take_due().pages == [(0, 8)]
    assert mine.take_due().pages == []
    launches.complete(2)
    due = mine.take_due()
    assert due.pages == [(1, 9)]
    launches.begin()
    mine.put_back(due.pages)
    assert mine.take_due().pages == [(1, 9)]


def test_windows_move_as_far_as_launches_have_ended() -> None:
    mine = SequenceRecord(1, WINDOWED, Launches())
    mine.open(KEYS, 0).apply(cache_pb2.MatchResponse())
    tables = [cells(0, range(8)), cells(1, range(8))]
    mine.allocate(8).apply(cache_pb2.AllocateResponse(tables=tables))
    assert mine.recycle(8).request.computed_tokens == 8
    first, second = mine.launches.begin(), mine.launches.begin()
    assert mine.recycle(16).request.computed_tokens == 0
    assert mine.recycle(12, first).request.computed_tokens == 0
    mine.launches.complete(first)
    assert mine.recycle(20).request.computed_tokens == 12
    assert mine.recycle(20, first).request.computed_tokens == 20
    mine.launches.complete(second)
    assert mine.recycle(0).request.computed_tokens == 20
    assert mine.recycle(0).request.computed_tokens == 0
    with pytest.raises(InvalidRequest, match="launch 9 never was"):
        mine.recycle(24, 9)


def test_spares_of_a_publish_stay_until_the_launch_has_ended_and_a_swap_says_so() -> None:
    mine = SequenceRecord(1, LAYOUT, Launches())
    mine.open(KEYS, 0).apply(cache_pb2.MatchResponse())
    mine.allocate(3).apply(cache_pb2.AllocateResponse(tables=[cells(0, range(3))]))
    launch = mine.launches.begin()
    answer = cache_pb2.PublishResponse(
        sealed_blocks=1, duplicate_positions=pack_numbers([0]), duplicates=[cells(0, [50])], spares=[cells(0, [0])]
    )
    mine.publish(1, b"").apply(answer)
    assert mine.tables[0].pages.tolist() == [50, 1, 2]
    assert not mine.recycle(0).request.pages
    with pytest.raises(Conflict, match="launch 1 may still write sequence 1, and 0 is the last"):
        mine.swap_out()
    mine.launches.complete(launch)
    refused = mine.recycle(0)
    assert [unpack_pages(each.pages).tolist() for each in refused.request.pages] == [[0]]
    refused.end_with(NotOwned("no"))
    mine.swap_out(launch).apply(cache_pb2.SwapResponse())
    mine.swap_in().apply(cache_pb2.SwapResponse(tables=[cells(0, range(3))]))
    assert not mine.recycle(0).request.pages


def test_a_release_goes_when_its_launch_has_ended_once(daemon: FakeDaemon, lease: Lease) -> None:
    first, second = lease.match(b""), lease.match(b"")
    one, two = lease.launch(), lease.launch()
    assert first.release(launch=one) == 0
    with second:
        pass
    for use in (first.release, lambda: first.allocate(1), lambda: first.publish(0)):
        with pytest.raises(AlreadyClosed):
            use()
    assert released(daemon) == []
    lease.completed(one)
    assert released(daemon) == [first.id]
    lease.completed(two)
    lease.completed(two)
    assert released(daemon) == [first.id, second.id]
    with pytest.raises(AlreadyClosed):
        first.release()
    assert lease.match(b"").release() == 2


def test_a_held_release_whose_answer_is_lost_is_asked_again_before_the_next_match(
    daemon: FakeDaemon, lease: Lease
) -> None:
    other, sequence = lease.match(b""), lease.match(b"")
    launch = lease.launch()
    other.release()
    sequence.release()
    daemon.faults["Release"].append(lose_answer)
    with pytest.raises(DeadlineExceeded):
        lease.completed(launch)
    lease.match(b"")
    assert released(daemon) == [sequence.id, sequence.id, other.id]
    assert len({request.request_id for request in daemon.seen["Release"]}) == 2


def test_a_release_waits_for_its_launch_though_a_call_before_it_had_no_answer(daemon: FakeDaemon, lease: Lease) -> None:
    """Neither the release nor the next match may give pages away that a launch still writes."""
    sequence = lease.match(KEYS)
    sequence.allocate(2)
    launch = lease.launch()
    daemon.faults["Publish"].append(lose_answer)
    with pytest.raises(DeadlineExceeded):
        sequence.publish(1)
    daemon.faults["Publish"].append(lose_answer)
    assert sequence.release() == 0
    lease.match(b"")
    assert released(daemon) == []
    with pytest.raises(DeadlineExceeded):
        lease.completed(launch)
    assert released(daemon) == []
    lease.match(b"")
    assert released(daemon) == [sequence.id]
    assert len({request.request_id for request in daemon.seen["Publish"]}) == 1
    assert len(daemon.seen["Publish"]) == 3


def test_a_release_that_met_the_end_of_its_launch_half_way_goes_with_the_next_match(
    daemon: FakeDaemon, lease: Lease
) -> None:
    sequence = lease.match(b"")
    launch = lease.launch()
    assert sequence.record.end_later(None)
    lease.completed(launch)  # another thread, in between
    lease.record.hold(sequence.record)
    lease.match(b"")
    assert released(daemon) == [sequence.id]


def test_steps_that_nobody_collects_never_block_those_that_somebody_does(daemon: FakeDaemon, lease: Lease) -> None:
    with lease.step() as steps:
        one = Result(release=cache_pb2.ReleaseResponse(freed_pages=1))
        daemon.step_answers.extend(Step(results=[one]) for _ in range(STEPS_UNDER_WAY))
        daemon.step_answers.append(Step(results=[one] * 3))
        sequences = [lease.match(b"") for _ in range(STEPS_UNDER_WAY + 3)]
        for sequence in sequences:
            launch = lease.launch()
            sequence.release()
            lease.completed(launch)
        assert steps.submit() == []
        assert len(in_step(daemon, STEPS_UNDER_WAY)) == 3
        assert all(sequence.record.freed_pages == 1 for sequence in sequences)


def test_a_release_that_was_refused_for_now_is_tried_again(daemon: FakeDaemon, lease: Lease) -> None:
    first, second = lease.match(b""), lease.match(b"")
    daemon.faults["Release"].extend([refuse(ErrorCode.LIMIT), refuse(ErrorCode.QUOTA_EXCEEDED)])
    with pytest.raises(LimitExceeded):
        first.release()
    with pytest.raises(QuotaExceeded), second:
        pass
    assert not first.is_released
    assert first.release() == 2
    lease.match(b"")
    assert released(daemon) == [first.id, second.id, first.id, second.id]
    assert second.is_released


def test_what_a_refused_step_would_have_told_is_told_by_the_next(daemon: FakeDaemon, lease: Lease) -> None:
    """Growth and held releases travel unasked, so no caller would send them again."""
    sequence, ending = lease.match(b""), lease.match(b"")
    with lease.step(stock_pages=1) as steps:
        daemon.step_answers.append(Step(stock=[cells(0, [5])]))
        steps.submit()
        launch = lease.launch()
        ending.release()
        sequence.grow_from_stock()
        refusal = cache_pb2.OperationError(code=ErrorCode.QUOTA_EXCEEDED.value, message="too many operations a second")
        daemon.step_answers.extend([Step(error=refusal), Step(error=refusal)])
        lease.completed(launch)
        with pytest.raises(QuotaExceeded):
            steps.submit()
        results = [Result(extend=cache_pb2.ExtendResponse(blocks=1)), Result(release=cache_pb2.ReleaseResponse())]
        daemon.step_answers.append(Step(results=results))
        steps.submit()
        assert in_step(daemon, 3) == ["extend", "release"]
        assert sequence.tables[0].tolist() == [5]
        assert sequence.allocate(2).loading_blocks == 0
        assert ending.is_released


def test_the_loss_of_the_lease_takes_held_releases_along(daemon: FakeDaemon, lease: Lease) -> None:
    sequences = [lease.match(b"") for _ in range(2)]
    launch = lease.launch()
    for sequence in sequences:
        sequence.release()
    daemon.faults["Release"].append(refuse(ErrorCode.LEASE_LOST))
    lease.completed(launch)
    assert lease.is_lost
    with pytest.raises(LeaseLost):
        lease.match(b"")


def test_in_steps_a_release_waits_for_its_launch_and_travels_unasked(daemon: FakeDaemon, lease: Lease) -> None:
    first, second = lease.match(b""), lease.match(b"")
    with lease.step() as steps:
        launch = lease.launch()
        batch = steps.batch()
        places = [batch.release(first), batch.allocate(second, 1)]
        allocated = Result(allocate=cache_pb2.AllocateResponse(tables=[cells(0, [3])]))
        daemon.step_answers.append(Step(results=[allocated]))
        results = steps.submit(batch)
        assert (places, results[0]) == ([0, 1], 0)
        assert second.tables[0].tolist() == [3]
        assert in_step(daemon, 0) == ["allocate"]
        with pytest.raises(AlreadyClosed):
            batch.release(first)
        daemon.step_answers.append(Step(results=[Result(release=cache_pb2.ReleaseResponse(freed_pages=4))]))
        lease.completed(launch)
        daemon.step_answers.append(Step())
        assert steps.submit() == []
        assert [in_step(daemon, step) for step in (1, 2)] == [["release"], []]
        assert first.is_released
    assert released(daemon) == []


def test_a_release_in_a_batch_never_overtakes_what_stands_before_it(daemon: FakeDaemon, lease: Lease) -> None:
    """The launch ends between the building of a batch and its sending: the release goes a step later."""
    sequence = lease.match(b"")
    sequence.allocate(1)
    with lease.step() as steps:
        launch = lease.launch()
        batch = steps.batch()
        batch.publish(sequence, 1, b"k" * 32)
        batch.release(sequence)
        lease.completed(launch)
        daemon.step_answers.append(Step(results=[Result(publish=cache_pb2.PublishResponse(sealed_blocks=1))]))
        published, freed = steps.submit(batch)
        assert (published.sealed_blocks, freed) == (1, 0)
        daemon.step_answers.append(Step(results=[Result(release=cache_pb2.ReleaseResponse(freed_pages=1))]))
        steps.submit()
        assert [in_step(daemon, step) for step in (0, 1)] == [["publish"], ["release"]]


def test_where_too_many_steps_are_under_way_the_release_waits_for_the_next(daemon: FakeDaemon, lease: Lease) -> None:
    sequence = lease.match(b"")
    with lease.step() as steps:
        launch = lease.launch()
        sequence.release()
        daemon.step_answers.extend(Step() for _ in range(STEPS_UNDER_WAY))
        pending = [steps.send() for _ in range(STEPS_UNDER_WAY)]
        lease.completed(launch)
        assert pending[-1].results() == []
        daemon.step_answers.append(Step(results=[Result(release=cache_pb2.ReleaseResponse(freed_pages=1))]))
        steps.submit()
        assert in_step(daemon, STEPS_UNDER_WAY) == ["release"]


def test_growth_is_told_before_a_stream_closes_for_its_stock_goes_with_it(daemon: FakeDaemon, lease: Lease) -> None:
    sequence = lease.match(b"")
    steps = lease.step(stock_pages=2)
    daemon.step_answers.append(Step(stock=[cells(0, [5, 6])]))
    steps.submit()
    sequence.grow_from_stock()
    daemon.step_answers.append(Step(results=[Result(extend=cache_pb2.ExtendResponse(blocks=1))]))
    steps.close()
    assert in_step(daemon, 1) == ["extend"]
    assert [unpack_pages(each.pages).tolist() for each in daemon.seen["Recycle"][0].pages] == [[6]]


def test_a_lease_that_closes_with_launches_under_way_is_not_quiesced_unless_told(
    daemon: FakeDaemon, tmp_path: Path
) -> None:
    for told, seen in ((None, False), (True, True), (False, False)):
        with CacheClient(daemon.path) as client:
            lease = client.open_lease(client.register("m", LAYOUT))
            lease.launch()
            lease.close(quiesced=told)
        assert daemon.seen["Close"][-1].quiesced is seen
    with CacheClient(daemon.path) as client:
        lease = client.open_lease(client.register("m", LAYOUT))
        lease.completed(lease.launch())
    assert daemon.seen["Close"][-1].quiesced
