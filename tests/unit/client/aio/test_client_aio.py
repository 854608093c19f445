"""The awaited client keeps the promises of the blocking one, and gives back what a cancelled call has opened."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
from cachesvc_client import (
    CacheClientError,
    Conflict,
    DaemonUnavailable,
    Retries,
    Timeouts,
    aio,
)
from cachesvc_client.aio import AsyncCacheClient, AsyncSequence
from cachesvc_client.core.errors import AlreadyClosed
from cachesvc_client.layouts.families import opaque
from kvcache.v1 import cache_pb2

from cachesvc.model.answers import Allocated
from tests.unit.rigs.client_rig import PAGES, FakeDaemon, break_way, cells, hang_until

LAYOUT = opaque(block_bytes=64, block_tokens=4)
PROMPT_S = 2.0
Step = cache_pb2.StepResponse
Result = cache_pb2.OperationResult


def client_of(daemon: FakeDaemon, *, call_s: float = 10) -> AsyncCacheClient:
    return AsyncCacheClient(
        daemon.path, timeouts=Timeouts(call_s=call_s, close_s=1), retries=Retries(attempts=3, pause_s=0.001)
    )


def hang_up_after(daemon: FakeDaemon, arrived: threading.Event) -> None:
    if arrived.wait(30):
        daemon.hang_up()


async def test_a_life_from_connect_to_close(daemon: FakeDaemon) -> None:
    async with client_of(daemon) as client:
        registration = await client.register("m", LAYOUT)
        async with client.open_lease(registration) as lease, lease.attach() as pool:
            assert pool.pages == (PAGES,)
            async with lease.match(b"k" * 64, max_blocks=1) as sequence:
                await sequence.allocate(2)
                assert [table.tolist() for table in sequence.tables] == [[0, 1]]
                assert (await sequence.publish(2)).sealed_blocks == 2
                assert lease.pools == (pool,)
                assert not sequence.lost_tokens()
            assert sequence.is_released
            assert (await lease.prefetch(b"")).device_blocks == 3
    assert [len(daemon.seen[rpc]) for rpc in ("Release", "Detach", "Close")] == [1, 1, 1]
    assert daemon.seen["Close"][0].quiesced


async def test_the_end_of_the_daemon_ends_calls_steps_and_leases(daemon: FakeDaemon) -> None:
    never = threading.Event()
    async with client_of(daemon, call_s=60) as client:
        lease = await client.open_lease(await client.register("m", LAYOUT))
        told: asyncio.Queue[CacheClientError] = asyncio.Queue()
        lease.on_lost(told.put_nowait)
        sequence = await lease.match(b"")
        arrived = threading.Event()
        daemon.faults["Allocate"].append(hang_until(never, arrived))
        daemon.faults["Step"].append(hang_until(never))
        killer = threading.Thread(target=partial(hang_up_after, daemon, arrived))
        killer.start()
        pending = await lease.step().send()
        began = time.monotonic()
        with pytest.raises(DaemonUnavailable):
            await sequence.allocate(1)
        with pytest.raises(DaemonUnavailable):
            await pending.results(30)
        assert isinstance(await asyncio.wait_for(told.get(), PROMPT_S), DaemonUnavailable)
        assert time.monotonic() - began < PROMPT_S
        never.set()
        killer.join()
        with pytest.raises(DaemonUnavailable):
            await lease.match(b"")
        assert lease.is_lost


async def test_an_attach_that_is_cancelled_leaves_nothing_mapped(daemon: FakeDaemon) -> None:
    async with client_of(daemon) as client:
        lease = await client.open_lease(await client.register("m", LAYOUT))
        daemon.may_give.clear()
        detached = threading.Event()
        daemon.faults["Detach"].append(lambda _: detached.set())
        attaching = asyncio.create_task(lease.attach())
        assert await asyncio.to_thread(daemon.is_asked.wait, PROMPT_S)
        attaching.cancel()
        asyncio.get_running_loop().call_soon(daemon.may_give.set)
        with pytest.raises(asyncio.CancelledError):
            await attaching
        assert await asyncio.to_thread(detached.wait, PROMPT_S)
        assert not lease.pools
        await lease.close()
        assert len(daemon.seen["Detach"]) == 1


async def test_a_caller_that_gives_up_is_cancelled_and_not_told_of_a_loss(daemon: FakeDaemon) -> None:
    never = threading.Event()
    daemon.faults["Prefetch"].append(hang_until(never))
    async with client_of(daemon) as client:
        lease = await client.open_lease(await client.register("m", LAYOUT))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(lease.prefetch(b""), 0.05)
        never.set()
        await lease.prefetch(b"")


async def cancel_under_way(call: Callable[[], Awaitable[object]], daemon: FakeDaemon, rpc: str) -> threading.Event:
    """Cancel a call that the daemon has and answers once the event is set."""
    arrived, may_answer = threading.Event(), threading.Event()
    daemon.faults[rpc].append(hang_until(may_answer, arrived))
    calling = asyncio.ensure_future(call())
    assert await asyncio.to_thread(arrived.wait, PROMPT_S)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    return may_answer


async def test_a_cancelled_call_ends_in_its_thread_and_the_next_one_waits_for_it(daemon: FakeDaemon) -> None:
    async with client_of(daemon) as client:
        lease = await client.open_lease(await client.register("m", LAYOUT))
        sequence = await lease.match(b"")
        may_answer = await cancel_under_way(partial(sequence.allocate, 2), daemon, "Allocate")
        publishing = asyncio.ensure_future(sequence.publish(0))
        other = await lease.match(b"")
        assert not publishing.done()
        assert sequence.blocks == 0
        may_answer.set()
        await publishing
        assert sequence.blocks == 2
        may_answer = await cancel_under_way(sequence.release, daemon, "Release")
        may_answer.set()
        with pytest.raises(AlreadyClosed):
            await sequence.release()
        await other.release()
    assert len(daemon.seen["Allocate"]) == 1
    assert [request.sequence_id for request in daemon.seen["Release"]] == [sequence.id, other.id]


async def test_a_sequence_whose_match_was_cancelled_is_released(daemon: FakeDaemon) -> None:
    async with client_of(daemon) as client:
        lease = await client.open_lease(await client.register("m", LAYOUT))
        released = threading.Event()
        may_answer = await cancel_under_way(partial(lease.match, b"k" * 32), daemon, "Match")
        daemon.faults["Release"].append(lambda _: released.set())
        assert not daemon.seen["Release"]
        may_answer.set()
        assert await asyncio.to_thread(released.wait, PROMPT_S)
        assert [each.sequence_id for each in daemon.seen["Release"]] == [daemon.seen["Match"][0].sequence_id]


async def test_a_lease_whose_opening_was_cancelled_is_closed(daemon: FakeDaemon) -> None:
    async with client_of(daemon) as client:
        registration = await client.register("m", LAYOUT)
        closed = threading.Event()
        may_answer = await cancel_under_way(partial(client.open_lease, registration), daemon, "Open")
        daemon.faults["Close"].append(lambda _: closed.set())
        may_answer.set()
        assert await asyncio.to_thread(closed.wait, PROMPT_S)


async def test_sequences_of_a_cancelled_step_are_released(daemon: FakeDaemon) -> None:
    async with client_of(daemon) as client:
        lease = await client.open_lease(await client.register("m", LAYOUT))
        async with lease.step() as stream:
            batch, released = stream.batch(), threading.Event()
            batch.match(b"k" * 32)
            daemon.step_answers.append(Step(results=[Result(match=cache_pb2.MatchResponse())]))
            may_answer = await cancel_under_way(partial(stream.submit, batch), daemon, "Step")
            daemon.faults["Release"].append(lambda _: released.set())
            may_answer.set()
            assert await asyncio.to_thread(released.wait, PROMPT_S)


async def test_calls_that_wait_do_not_keep_the_client_from_closing(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio, "MOST_THREADS", 1)
    client = await client_of(daemon).connect()
    lease = await client.open_lease(await client.register("m", LAYOUT))
    may_answer = await cancel_under_way(partial(lease.prefetch, b""), daemon, "Prefetch")
    queued = asyncio.ensure_future(lease.prefetch(b""))
    waiting = asyncio.ensure_future(client.wait_lost())
    began = time.monotonic()
    await client.close()
    assert time.monotonic() - began < PROMPT_S
    assert await waiting
    with pytest.raises(AlreadyClosed):
        await queued
    may_answer.set()


async def test_waits_for_the_end_of_the_daemon_take_no_thread(daemon: FakeDaemon) -> None:
    async with client_of(daemon) as client:
        assert not await client.wait_lost(0.01)
        waiting = [asyncio.ensure_future(client.wait_lost()) for _ in range(aio.MOST_THREADS + 1)]
        await client.register("m", LAYOUT)
        await asyncio.to_thread(daemon.close)
        assert all(await asyncio.gather(*waiting))
        assert await client.wait_lost()


async def test_a_reconnect_that_is_cancelled_can_be_made_again(daemon: FakeDaemon, tmp_path: Path) -> None:
    async with client_of(daemon) as client:
        gone = asyncio.Event()
        client.on_lost(gone.set)
        lease = await client.open_lease(await client.register("m", LAYOUT))
        await asyncio.to_thread(daemon.close)
        await asyncio.wait_for(gone.wait(), PROMPT_S)
        second = FakeDaemon(tmp_path)
        second.start()
        arrived, may_answer = threading.Event(), threading.Event()
        second.faults["Register"].append(hang_until(may_answer, arrived))
        coming_back = asyncio.ensure_future(client.reconnect())
        assert await asyncio.to_thread(arrived.wait, PROMPT_S)
        coming_back.cancel()
        with pytest.raises(asyncio.CancelledError):
            await coming_back
        may_answer.set()
        (fresh,) = await client.reconnect()
        await fresh.match(b"")
        await client.close()
        await lease.close()
        second.close()


async def test_steps_carry_growth_and_survive_a_broken_stream(daemon: FakeDaemon) -> None:
    async with client_of(daemon) as client:
        lease = await client.open_lease(await client.register("m", LAYOUT))
        sequence = await lease.match(b"")
        async with lease.step(stock_pages=1) as stream:
            with pytest.raises(Conflict, match="open step stream"):
                lease.step()
            daemon.faults["Step"].append(break_way)
            daemon.step_answers.append(Step(stock=[cells(0, [5])]))
            assert await stream.submit() == []
            sequence.grow_from_stock()
            batch = stream.batch()
            batch.match(b"k" * 32)
            batch.allocate(sequence, 3)
            daemon.step_answers.append(
                Step(
                    results=[
                        Result(extend=cache_pb2.ExtendResponse(blocks=1)),
                        Result(match=cache_pb2.MatchResponse()),
                        Result(
                            allocate=cache_pb2.AllocateResponse(tables=[cells(0, [6, 7], first_block=1)]),
                        ),
                    ],
                    stock=[cells(0, [8])],
                )
            )
            opened, granted = await stream.submit(batch)
            assert isinstance(opened, AsyncSequence)
            assert isinstance(granted, Allocated)
            assert sequence.tables[0].tolist() == [5, 6, 7]
        assert daemon.seen["Step"][0] == daemon.seen["Step"][1]
        assert [each.pages for each in daemon.seen["Recycle"][0].pages] == [cells(0, [8]).pages]
        with pytest.raises(AlreadyClosed):
            await stream.send()
