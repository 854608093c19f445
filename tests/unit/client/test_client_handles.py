"""Sequences and keys in a client, beside what the daemon answers."""

from __future__ import annotations

import linecache
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from cachesvc_client import (
    BlockHasher,
    CacheClient,
    Expected,
    InvalidRequest,
    Lease,
    LimitExceeded,
    Timeouts,
)
from cachesvc_client.layouts.families import opaque
from cachesvc_client.records.sequence_record import SequenceRecord
from cachesvc_client.records.steps import StepBatch, StepBook

from cachesvc.model.answers import LONGEST_EXPECTED_WAIT_SECONDS
from cachesvc.model.errors import ErrorCode
from tests.unit.rigs.client_rig import FakeDaemon, hang_until, refuse

LAYOUT = opaque(block_bytes=64, block_tokens=4)


@pytest.fixture
def lease(daemon: FakeDaemon) -> Iterator[Lease]:
    with CacheClient(daemon.path, timeouts=Timeouts(connect_s=60, call_s=60)) as client:
        yield client.open_lease(client.register("m", LAYOUT))


def test_a_sequence_id_of_the_callers_own_must_be_positive_and_is_not_given_out_again(lease: Lease) -> None:
    with pytest.raises(InvalidRequest, match="positive"):
        lease.match(b"", sequence_id=0)
    kept = [lease.match(b"", sequence_id=2), lease.match(b""), lease.match(b"")]
    assert [sequence.id for sequence in kept] == [2, 1, 3]
    for sequence in kept:
        sequence.release()


def test_growing_without_a_stock_is_an_error_of_the_caller(lease: Lease) -> None:
    with lease.match(b"") as sequence, pytest.raises(InvalidRequest, match=r"lease\.step"):
        sequence.grow_from_stock()


def test_the_librarys_own_hasher_is_taken_as_it_is(daemon: FakeDaemon, lease: Lease) -> None:
    hasher = BlockHasher(lease.registration.namespace, 4)
    hasher.extend(range(12))
    with lease.match(hasher.keys) as sequence:
        sequence.allocate(3)
        hasher.extend(range(12))
        sequence.publish(3, hasher.keys)
    lease.prefetch(memoryview(hasher.keys))
    assert daemon.seen["Match"][0].keys == bytes(hasher.keys[:96])
    assert daemon.seen["Prefetch"][0].keys == bytes(hasher.keys)


def test_a_sequence_that_is_dropped_unreleased_is_warned_of_and_left_as_it_is(daemon: FakeDaemon, lease: Lease) -> None:
    with pytest.warns(ResourceWarning, match="sequence 1 of lease lease-1 was dropped without release"):
        lease.match(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sequence = lease.match(b"")
        sequence.release()
        del sequence
        with lease.match(b""):
            pass
        again = lease.match(b"")
        daemon.faults["Release"].append(refuse(ErrorCode.LIMIT))
        with pytest.raises(LimitExceeded):
            again.release()
        del again  # the next match releases it
        kept = lease.match(b"")
        lease.close()
        del kept
    assert [request.sequence_id for request in daemon.seen["Release"]] == [2, 3, 4, 4], "nothing is cleaned up by it"


def test_ends_are_told_though_the_daemon_has_no_room_for_the_call_now(daemon: FakeDaemon, lease: Lease) -> None:
    """An unreported end would keep its pages until the process ends."""
    pool = lease.attach()
    for rpc, end in (("Detach", pool.close), ("Close", lease.close)):
        daemon.faults[rpc] += [refuse(ErrorCode.QUOTA_EXCEEDED), refuse(ErrorCode.LIMIT)]
        end()
        assert len(daemon.seen[rpc]) == 3


def test_a_rank_is_detached_only_when_no_pool_of_it_is_held(daemon: FakeDaemon, lease: Lease) -> None:
    first, second = lease.attach(), lease.attach()
    kept = list(second.planes.values())
    assert first.close()
    lease.close()
    assert not daemon.seen["Detach"]
    kept.clear()
    assert second.close()


def waits_for_an_answer(thread: int) -> bool:
    """True while a thread is within a call of gRPC's that only waits."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001
    if frame is None or frame.f_lineno is None:  # no number: between two lines
        return False
    return "next_event" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)


def test_a_call_that_is_interrupted_is_asked_for_again_before_the_next(daemon: FakeDaemon, lease: Lease) -> None:
    """Control-C leaves the client as a lost answer does: the call may have been carried out."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("only the main thread can be interrupted")
    arrived, may_answer = threading.Event(), threading.Event()
    daemon.faults["Allocate"].append(hang_until(may_answer, arrived))

    main, interrupted = threading.get_ident(), threading.Event()

    def interrupt() -> None:
        """An interrupt comes where gRPC holds no lock, which would stay held; and again where one was lost in a
        callback."""
        arrived.wait(60)
        while not interrupted.is_set():
            if waits_for_an_answer(main):
                os.kill(os.getpid(), signal.SIGINT)
                interrupted.wait(2)

    interrupter = threading.Thread(target=interrupt)
    with lease.match(b"") as sequence:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts behind & ignores it
        interrupter.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                sequence.allocate(2)
        finally:
            interrupted.set()
            interrupter.join()
            signal.signal(signal.SIGINT, before)
            may_answer.set()
        sequence.publish(0)
        assert sequence.blocks == 2
        first, again = daemon.seen["Allocate"]
        assert first == again


def test_the_wait_for_another_node_is_added_to_the_limit_of_its_call(daemon: FakeDaemon, lease: Lease) -> None:
    """A peer that computes for longer than ``call_s`` made an engine's request fail."""
    left: list[float] = []
    for expected in (None, Expected("10.0.0.1:7100", waits=False), Expected("10.0.0.1:7100", patience=600.0)):
        daemon.faults["Match"].append(lambda context: left.append(context.time_remaining()))
        with lease.match(b"", expected=expected):
            """It is released."""
    assert max(left[:2]) < 60 + LONGEST_EXPECTED_WAIT_SECONDS / 2 < left[2]


class Kept(NamedTuple):
    """Handle of a sequence."""

    record: SequenceRecord


def test_a_step_waits_as_long_as_the_matches_in_it_and_before_it(lease: Lease) -> None:
    book = StepBook(lease.record)  # what a stream makes of it
    batches = [StepBatch(lease.record, Kept) for _ in range(3)]
    batches[0].match(b"", expected=Expected("10.0.0.1:7100"))
    batches[1].match(b"", expected=Expected("10.0.0.1:7100", waits=False))
    batches[2].match(b"", expected=Expected("10.0.0.1:7100"))
    steps = [book.enter(batch) for batch in batches]
    assert [book.waits_until(step) / LONGEST_EXPECTED_WAIT_SECONDS for step in steps] == [1, 1, 2]
