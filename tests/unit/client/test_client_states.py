"""Results of each call of a sequence, its lease and its step stream in each state, in every order, from every thread:
one table. A state that says no is never forgotten by the handle that reported it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from cachesvc_client import (
    CacheClient,
    CacheClientError,
    Conflict,
    DaemonUnavailable,
    LeaseLost,
    LoadFailed,
    Retries,
    Timeouts,
)
from cachesvc_client.core.errors import AlreadyClosed
from cachesvc_client.layouts.families import opaque
from kvcache.v1 import common_pb2

from cachesvc.model.errors import ErrorCode
from tests.unit.rigs.client_rig import FakeDaemon, refuse

LAYOUT = opaque(block_bytes=64, block_tokens=4)
LOADED = common_pb2.Ticket(id=1, state=common_pb2.TICKET_STATE_DONE, direction="load", blocks=2)
FAILED = common_pb2.Ticket(id=1, state=common_pb2.TICKET_STATE_FAILED, reason="broken wire", direction="load", blocks=2)
Kind = type[CacheClientError]


class Handles(NamedTuple):
    """Handles of an engine, of either client. ``stream``: its step stream, to which nothing was sent."""

    daemon: FakeDaemon
    client: Any
    lease: Any
    sequence: Any
    stream: Any


Call = Callable[[Handles], Any]


SEQUENCE_CALLS: dict[str, Call] = {
    "wait_loaded": lambda h: h.sequence.wait_loaded(5),
    "wait_swapped": lambda h: h.sequence.wait_swapped(5),
    "allocate": lambda h: h.sequence.allocate(3),
    "publish": lambda h: h.sequence.publish(2),
    "recycle": lambda h: h.sequence.recycle(0),
    "swap_in": lambda h: h.sequence.swap_in(),
    "swap_out": lambda h: h.sequence.swap_out(),
    "grow_from_stock": lambda h: h.sequence.grow_from_stock(),
    "grow_all": lambda h: h.stream.grow_all([h.sequence]),
}
BATCH_CALLS: dict[str, Call] = {
    "batch.allocate": lambda h: h.stream.batch().allocate(h.sequence, 3),
    "batch.publish": lambda h: h.stream.batch().publish(h.sequence, 2),
    "batch.recycle": lambda h: h.stream.batch().recycle(h.sequence, 0),
    "batch.swap_out": lambda h: h.stream.batch().swap_out(h.sequence),
    "batch.swap_in": lambda h: h.stream.batch().swap_in(h.sequence),
}
LEASE_CALLS: dict[str, Call] = {
    "match": lambda h: h.lease.match(b""),
    "prefetch": lambda h: h.lease.prefetch(b""),
    "pause_write_backs": lambda h: h.lease.pause_write_backs(0.1),
    "wait_tickets": lambda h: h.lease.wait_tickets([1], 5),
    "attach": lambda h: h.lease.attach(),
    "send": lambda h: h.stream.send(),
    "submit": lambda h: h.stream.submit(),
}


def fail_load(handles: Handles) -> None:
    """The load fails, and the engine has waited for it."""
    handles.daemon.ended = [FAILED]
    with pytest.raises(LoadFailed):
        handles.sequence.wait_loaded(5)


def refuse_for_failed_load(handles: Handles) -> None:
    """The load fails, and the daemon says so in the answer to another call."""
    handles.daemon.faults["Publish"].append(refuse(ErrorCode.LOAD_FAILED, "broken wire"))
    handles.daemon.ended = [FAILED]
    with pytest.raises(LoadFailed):
        handles.sequence.publish(1)


def load_and_lose(handles: Handles) -> None:
    """The load came, and then the lease was lost."""
    handles.sequence.wait_loaded(5)
    handles.lease.record.lose(LeaseLost.from_message("it fell silent"))


def lose(handles: Handles) -> None:
    """The lease is lost while the load runs."""
    handles.lease.record.lose(LeaseLost.from_message("it fell silent"))


def close(handles: Handles) -> None:
    """The load came, and then the lease was closed."""
    handles.sequence.wait_loaded(5)
    handles.lease.close()


def release(handles: Handles) -> None:
    """The load came, and then the sequence was released."""
    handles.sequence.wait_loaded(5)
    handles.sequence.release()


def release_later(handles: Handles) -> None:
    """The sequence was released while a launch uses it."""
    handles.lease.launch()
    assert handles.sequence.release() == 0


def end_daemon(handles: Handles) -> None:
    """The load came, and then the daemon went away: what notices it first is any call at all."""
    handles.sequence.wait_loaded(5)
    handles.daemon.hang_up()
    lost = handles.client.wait_lost(30)
    assert lost


EVERYTHING = {**SEQUENCE_CALLS, **BATCH_CALLS, **LEASE_CALLS}
OF_SEQUENCE = {**SEQUENCE_CALLS, **BATCH_CALLS}
OVER = {name: call for name, call in EVERYTHING.items() if not name.startswith("batch.")}
"""Calls that say so once the lease is over: a batch says it when it is sent."""
TABLE: list[tuple[Callable[[Handles], Any], dict[str, Call], tuple[Kind, ...]]] = [
    (fail_load, OF_SEQUENCE, (LoadFailed,)),
    (refuse_for_failed_load, OF_SEQUENCE, (LoadFailed,)),
    (release, OF_SEQUENCE, (AlreadyClosed,)),
    (release_later, OF_SEQUENCE, (AlreadyClosed,)),
    (lose, OVER, (LeaseLost,)),
    (load_and_lose, OVER, (LeaseLost,)),
    (close, OVER, (AlreadyClosed,)),
    (end_daemon, OVER, (DaemonUnavailable,)),
]


@contextmanager
def held(daemon: FakeDaemon) -> Iterator[Handles]:
    """An engine with a sequence of two blocks, whose load has a ticket that the daemon answers as done."""
    daemon.loads, daemon.ended = [LOADED], [LOADED]
    client = CacheClient(
        daemon.path, timeouts=Timeouts(call_s=30, close_s=5), retries=Retries(attempts=1, pause_s=0.001)
    )
    with client:
        lease = client.open_lease(client.register("m", LAYOUT))
        sequence = lease.match(b"k" * 64)
        sequence.allocate(2)
        daemon.loads = []
        yield Handles(daemon, client, lease, sequence, lease.step(stock_pages=4))


@pytest.mark.parametrize(("reach", "calls", "kinds"), TABLE, ids=lambda each: getattr(each, "__name__", ""))
def test_every_call_says_what_the_state_says_in_every_order(
    daemon: FakeDaemon, reach: Any, calls: dict[str, Call], kinds: tuple[Kind, ...]
) -> None:
    with held(daemon) as handles:
        reach(handles)
        for first, second in itertools.product(calls, repeat=2):
            for name in (first, second):
                with pytest.raises(kinds) as said:
                    calls[name](handles)
                assert said.type in kinds, f"{name} after {first}"


def test_what_came_stays_loaded_and_is_asked_for_once(daemon: FakeDaemon) -> None:
    with held(daemon) as handles:
        for _ in range(3):
            handles.sequence.wait_loaded(5)
            handles.sequence.wait_swapped(5)
        assert len(daemon.seen["WaitTickets"]) == 1
        assert handles.sequence.release() == 2


def test_a_swap_that_failed_says_so_until_the_next_one(daemon: FakeDaemon) -> None:
    with held(daemon) as handles:
        sequence = handles.sequence
        sequence.swap_out()
        with pytest.raises(Conflict, match="swapped out"):
            sequence.wait_loaded(5)
        with pytest.raises(Conflict, match="swapped out"):
            _ = sequence.tables
        daemon.loads, daemon.ended = [LOADED], [FAILED]
        sequence.swap_in()
        for wait in (sequence.wait_loaded, sequence.wait_swapped) * 2:
            with pytest.raises(LoadFailed, match="swap it again"):
                wait(5)
        daemon.ended = [LOADED]
        sequence.swap_in()
        for wait in (sequence.wait_loaded, sequence.wait_swapped) * 2:
            wait(5)


def test_of_many_threads_that_wait_for_a_failed_load_none_is_answered_as_loaded(daemon: FakeDaemon) -> None:
    waits = 8
    daemon.loads, daemon.ended = [LOADED], [FAILED]
    with CacheClient(daemon.path) as client, ThreadPoolExecutor(waits) as pool:
        lease = client.open_lease(client.register("m", LAYOUT))
        for _ in range(5):
            with lease.match(b"k" * 64) as sequence:
                sequence.allocate(2)
                said = [each.exception(60) for each in [pool.submit(sequence.wait_loaded, 30) for _ in range(waits)]]
                assert [type(error) for error in said] == [LoadFailed] * waits
