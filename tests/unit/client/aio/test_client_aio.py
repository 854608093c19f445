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
    DeadlineExceeded,
    LeaseLost,
    PoolExhausted,
    Retries,
    Timeouts,
    aio,
)
from cachesvc_client.aio import AsyncCacheClient, AsyncSequence
from cachesvc_client.core.errors import BY_CODE, AlreadyClosed
from cachesvc_client.layouts.families import opaque
from kvcache.v1 import cache_pb2

from cachesvc.model.answers import Allocated
from cachesvc.model.errors import ErrorCode
from tests.unit.rigs.client_rig import PAGES, FakeDaemon, break_way, cells, hang_until, lose_answer, refuse

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


@pytest.mark.parametrize("code", list(ErrorCode))
async def test_a_refusal_keeps_its_kind(daemon: FakeDaemon, code: ErrorCode) -> None:
    async with client_of(daemon) as client:
        lease = await client.open_lease(await client.register("m", LAYOUT))
        daemon.faults["Prefetch"].append(refuse(code, "what to do"))
        with pytest.raises(BY_CODE[code], match="what to do"):
            await lease.prefetch(b"")
        assert len(daemon.seen["Prefetch"]) == 1


async def test_a_broken_way_is_tried_again_with_the_same_request(daemon: FakeDaemon) -> None:
    async with client_of(daemon) as client:
        lease = await client.open_lease(await client.register("m", LAYOUT))
        daemon.faults["Prefetch"] += [break_way, break_way]
        await lease.prefetch(b"k" * 32)
        first, *others = daemon.seen["Prefetch"]
        assert others == [first, first]


async def test_a_lost_answer_is_asked_for_again_before_the_next_call(daemon: FakeDaemon) -> None:
    async with client_of(daemon) as client:
        lease = await client.open_lease(await client.register("m", LAYOUT))
        for rpc in ("Match", "Allocate"):
            daemon.faults[rpc].append(lose_answer)
        with pytest.raises(DeadlineExceeded):
            await lease.match(b"")
        sequence = await lease.match(b"")
        with pytest.raises(DeadlineExceeded):
            await sequence.allocate(3)
        await sequence.publish(2, b"k" * 64)
        assert sequence.blocks == 3
        assert daemon.seen["Allocate"][0] == daemon.seen["Allocate"][1]
        assert [each.sequence_id for each in daemon.seen["Release"]] == [daemon.seen["Match"][0].sequence_id]


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


async def test_a_rank_is_detached_only_when_no_pool_of_it_is_held(daemon: FakeDaemon) -> None:
    async with client_of(daemon) as client:
        lease = await client.open_lease(await client.register("m", LAYOUT))
        first, second = await lease.attach(), await lease.attach()
        kept = list(second.planes.values())
        assert first.close()
        await lease.close()
        assert not daemon.seen["Detach"]
        kept.clear()
        assert second.close()


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


async def test_a_lone_call_tells_of_growth_first(daemon: FakeDaemon) -> None:
    async with client_of(daemon) as client:
        lease = await client.open_lease(await client.register("m", LAYOUT))
        sequence = await lease.match(b"")
        stream = lease.step(stock_pages=1)
        daemon.step_answers.append(Step(stock=[cells(0, [5])]))
        await stream.submit()
        sequence.grow_from_stock()
        daemon.step_answers.append(Step(results=[Result(extend=cache_pb2.ExtendResponse(blocks=1))]))
        await sequence.publish(1, b"k" * 32)
        assert len(daemon.seen["Step"]) == 2


async def test_a_refused_beat_loses_the_lease(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path, silence_limit_ms=300)
    daemon.faults["KeepAlive"].append(break_way)
    daemon.start()
    async with client_of(daemon) as client:
        lease = await client.open_lease(await client.register("m", LAYOUT))
        told: asyncio.Queue[CacheClientError] = asyncio.Queue()
        lease.on_lost(told.put_nowait)
        for _ in range(3):
            assert await asyncio.to_thread(daemon.beats.acquire, timeout=PROMPT_S)
        daemon.faults["KeepAlive"].append(refuse(ErrorCode.LEASE_LOST, "it fell silent"))
        assert isinstance(await asyncio.wait_for(told.get(), PROMPT_S), LeaseLost)
        with pytest.raises(LeaseLost, match="it fell silent"):
            await lease.match(b"")
    daemon.close()


async def test_reconnect_registers_anew_and_opens_what_was_open(daemon: FakeDaemon, tmp_path: Path) -> None:
    async with client_of(daemon) as client:
        gone = asyncio.Event()
        client.on_lost(gone.set)
        kept = await client.open_lease(await client.register("m", LAYOUT))
        assert await client.reconnect() == (kept,)
        await asyncio.to_thread(daemon.close)
        await asyncio.wait_for(gone.wait(), PROMPT_S)
        with pytest.raises(DaemonUnavailable):
            await client.reconnect()
        second = FakeDaemon(tmp_path)
        second.start()
        second.faults["Register"].append(refuse(ErrorCode.EXHAUSTED, "came back smaller"))
        with pytest.raises(PoolExhausted):
            await client.reconnect()
        (fresh,) = await client.reconnect()
        await fresh.match(b"")
        assert client.connected
        await client.close()
        with pytest.raises(AlreadyClosed):
            await client.connect()
        await asyncio.to_thread(second.close)
