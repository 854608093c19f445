"""One way through the daemon: caller, admission, repeats, the call, and its answer. No gRPC anywhere."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
from kvcache.v1 import cache_pb2, lease_pb2

from cachesvc.flows.core import Limits, resolve
from cachesvc.flows.leases import process_arrived
from cachesvc.service.access.admission import CallKind, Holder
from cachesvc.service.access.auth import Caller, Scope, lease_name
from cachesvc.service.access.quota import FREE_BYTES, Quota, Quotas
from cachesvc.service.calls.dispatcher import COPIES_HELD, INTERNAL, MOST_RETRIES, CallWatch
from tests.unit.rigs.dispatch_rig import Desk, turns
from tests.unit.rigs.ledger_rig import TOKEN, chain, one_group, rig_of, serve
from tests.unit.rigs.peers_rig import shared


def allocate(lease: str, sequence: int, blocks: int, request_id: int = 0) -> cache_pb2.AllocateRequest:
    return cache_pb2.AllocateRequest(lease_id=lease, sequence_id=sequence, blocks=blocks, request_id=request_id)


def match(lease: str, sequence: int, prompt: str, request_id: int = 0) -> cache_pb2.MatchRequest:
    keys = chain(*prompt)
    return cache_pb2.MatchRequest(lease_id=lease, sequence_id=sequence, keys=keys, request_id=request_id)


def release(lease: str, sequence: int, request_id: int = 0) -> cache_pb2.ReleaseRequest:
    return cache_pb2.ReleaseRequest(lease_id=lease, sequence_id=sequence, request_id=request_id)


def beat(lease: str, pause_ms: int = 0) -> lease_pb2.KeepAliveRequest:
    return lease_pb2.KeepAliveRequest(lease_id=lease, pause_write_backs_ms=pause_ms)


async def test_what_need_not_wait_is_answered_without_a_future() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        opened = desk.ask(desk.cache.match, match(lease, 1, "ab"))
        assert isinstance(opened, cache_pb2.MatchResponse)
        assert isinstance(desk.ask(desk.cache.allocate, allocate(lease, 1, 2)), cache_pb2.AllocateResponse)
        assert desk.ask(desk.cache.release, release(lease, 1)).freed_pages == 2
        refused = desk.ask(desk.cache.release, release(lease, 1))
        assert (refused.code, "sequence 1" in refused.message) == ("NOT_FOUND", True)


# -- waiting ---------------------------------------------------------------------------------------------------


async def test_waiting_calls_of_one_engine_keep_no_other_from_an_answer() -> None:
    async with Desk(calls=2, waiting=64, waiting_each=4) as desk:
        greedy, other = desk.lease("greedy"), desk.lease("other")
        desk.fill(greedy, 1, "ab")
        ticket = desk.swap_out(greedy, 1)
        wait = cache_pb2.WaitTicketsRequest(lease_id=greedy, tickets=[ticket], wait_ms=60_000)
        waiting = [desk.ask(desk.cache.wait_tickets, wait) for _ in range(10)]
        parked = [each for each in waiting if isinstance(each, asyncio.Future)]
        assert len(parked) == 4
        assert {each.code for each in waiting if each not in parked} == {"LIMIT"}
        assert isinstance(desk.ask(desk.cache.match, match(other, 1, "cd")), cache_pb2.MatchResponse)
        assert isinstance(desk.ask(desk.cache.match, match(greedy, 2, "cd")), cache_pb2.MatchResponse)
        for lease in (greedy, other):
            assert desk.ask(desk.leases.keep_alive, beat(lease)).lease_id == lease
        look = cache_pb2.WaitTicketsRequest(lease_id=greedy, tickets=[ticket])
        assert len(desk.ask(desk.cache.wait_tickets, look).tickets) == 1, "a look waits for nothing"
        await desk.land(ticket)
        assert [(await each).tickets[0].state for each in parked] == [2] * 4
        assert desk.admission.waits.held == 0


async def test_a_call_that_waits_for_room_to_wait_is_refused_and_has_changed_nothing() -> None:
    async with Desk(waiting=1) as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        ticket = desk.swap_out(lease, 1)
        first = desk.ask(desk.cache.allocate, allocate(lease, 1, 3, request_id=1))
        assert desk.ask(desk.cache.allocate, allocate(lease, 1, 3, request_id=2)).code == "LIMIT"
        await desk.land(ticket)
        assert (await first).code == "CONFLICT"


@pytest.mark.parametrize("end", ["no room to wait", "given up", "answered"])
async def test_what_is_reserved_for_a_call_that_waits_ends_with_it(end: str) -> None:
    rig = rig_of(one_group(), device=(4,), host=(8,))
    pool = rig.place().pools[0]
    async with Desk(rig, waiting=1) as desk:
        lease = desk.lease()
        if end == "no room to wait":
            desk.admission.take(CallKind.WAITS, Holder("a process", None))
        serve(rig, lease, 1, "abc")
        desk.ask(desk.cache.match, match(lease, 2, ""))
        served = desk.ask(desk.cache.allocate, allocate(lease, 2, 3))
        [drain] = rig.mover.transfers
        if end == "no room to wait":
            assert served.code == "LIMIT"
            assert pool.reserved == 0, "kept for no call"
        else:
            assert pool.reserved == 1
        if end == "given up":
            served.cancel()  # before it has had a turn
            await turns()
            assert pool.reserved == 0
        await desk.land(drain)
        if end == "answered":
            assert isinstance(await served, cache_pb2.AllocateResponse)
        assert pool.reserved == 0


async def test_a_retry_of_a_call_under_way_waits_for_its_answer() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        ticket = desk.swap_out(lease, 1)
        request = cache_pb2.SwapRequest(
            lease_id=lease, sequence_id=1, request_id=9, direction=cache_pb2.SWAP_DIRECTION_IN
        )
        await desk.land(ticket)
        back = desk.ask(desk.cache.swap, request)
        assert desk.ask(desk.cache.swap, request) == back, "answered before"
        [load] = desk.rig.mover.transfers
        first = desk.ask(desk.cache.allocate, allocate(lease, 1, 3, request_id=10))
        again = desk.ask(desk.cache.allocate, allocate(lease, 1, 3, request_id=10))
        assert desk.ask(desk.cache.allocate, allocate(lease, 1, 4, request_id=10)).code == "INVALID"
        assert first is not again
        assert desk.admission.waits.held == 2
        await desk.land(load)
        assert isinstance(await first, cache_pb2.AllocateResponse)
        assert await first == await again
        assert len(desk.pages(lease, 1)) == 3


async def test_a_retry_is_not_refused_for_load_or_rate_because_what_it_asks_for_may_be_done() -> None:
    rig = rig_of(one_group(), device=(16,), host=(32,))
    quota = Quota(calls_per_second=4)
    async with Desk(rig, waiting=1, quotas=Quotas(rig.core, lambda _: quota)) as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        ticket = desk.swap_out(lease, 1)
        first = desk.ask(desk.cache.allocate, allocate(lease, 1, 3, request_id=10))
        again = [desk.ask(desk.cache.allocate, allocate(lease, 1, 3, request_id=10)) for _ in range(MOST_RETRIES)]
        assert all(isinstance(each, asyncio.Future) for each in (first, *again))
        one_more = desk.ask(desk.cache.allocate, allocate(lease, 1, 3, request_id=10))
        assert (one_more.code, "request 10" in one_more.message) == ("LIMIT", True), "all that, there is an end to it"
        assert desk.ask(desk.cache.match, match(lease, 2, "c")).code == "QUOTA_EXCEEDED"
        await desk.land(ticket)
        assert {(await each).code for each in (first, *again)} == {"CONFLICT"}
        assert desk.admission.waits.held == 0


async def test_a_retry_of_a_call_that_was_given_up_is_told_so_and_then_starts_anew() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        ticket = desk.swap_out(lease, 1)
        first = desk.ask(desk.cache.allocate, allocate(lease, 1, 3, request_id=10))
        again = desk.ask(desk.cache.allocate, allocate(lease, 1, 3, request_id=10))
        first.cancel()  # before it has had a turn
        assert (await again).code == "UNAVAILABLE"
        assert desk.admission.waits.held == 0
        third = desk.ask(desk.cache.allocate, allocate(lease, 1, 3, request_id=10))
        await desk.land(ticket)
        assert (await third).code == "CONFLICT"


async def test_quotas_hold_for_what_was_let_in_before_it_had_to_wait() -> None:
    rig = rig_of(one_group(), device=(16,), host=(32,))
    quota = Quota(private_pages=4)
    async with Desk(rig, quotas=Quotas(rig.core, lambda _: quota)) as desk:
        lease = desk.lease()
        for sequence in (1, 2):
            desk.fill(lease, sequence, "a", blocks=1)
        out = [desk.swap_out(lease, sequence) for sequence in (1, 2)]
        for ticket in out:
            await desk.land(ticket)
        loads = []
        for sequence in (1, 2):
            swap = cache_pb2.SwapRequest(lease_id=lease, sequence_id=sequence, direction=cache_pb2.SWAP_DIRECTION_IN)
            [ticket] = desk.ask(desk.cache.swap, swap).tickets
            loads.append(ticket.id)
        served = [desk.ask(desk.cache.allocate, allocate(lease, sequence, 3)) for sequence in (1, 2)]
        assert all(isinstance(each, asyncio.Future) for each in served), "each alone is within the quota"
        for ticket in loads:
            await desk.land(ticket)
        assert isinstance(await served[0], cache_pb2.AllocateResponse)
        assert (await served[1]).code == "QUOTA_EXCEEDED"


async def test_a_match_goes_on_without_its_peer_at_its_callers_deadline() -> None:
    rig, _, b = shared("abcd")
    rig.core.limits = Limits(peer_wait_seconds=600.0)
    async with Desk(rig) as desk:
        answer = await desk.ask(desk.cache.match, match(b, 1, "abcd"), seconds=0.0)
        assert (answer.device_blocks, answer.host_blocks) == (0, 0)
        [ticket] = rig.mover.transfers
        await desk.land(ticket)


# -- signs of life ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pause_ms", [0, 5000])
async def test_a_beat_is_a_sign_of_life_even_if_it_is_refused(pause_ms: int) -> None:
    async with Desk() as desk:
        lease = desk.lease()
        held = desk.rig.core.ledger.leases[lease]
        held.last_heard = -1000.0
        answer = desk.ask(desk.leases.keep_alive, beat(lease, pause_ms))
        assert isinstance(answer, lease_pb2.KeepAliveResponse) == (pause_ms == 0)
        assert held.last_heard > 0


async def test_a_call_that_finds_no_room_is_a_sign_of_life_and_one_of_a_stranger_is_none() -> None:
    async with Desk(calls=1) as desk:
        lease = desk.lease()
        held = desk.rig.core.ledger.leases[lease]
        desk.admission.take(CallKind.WORK, Holder("a process", None))
        held.last_heard = -1000.0
        stranger = Caller("stranger", frozenset({Scope.ENGINE}), "another tenant")
        assert desk.ask(desk.cache.release, release(lease, 2), who=stranger).code == "NOT_FOUND"
        assert held.last_heard == -1000.0
        assert desk.ask(desk.cache.match, match(lease, 2, "a")).code == "LIMIT"
        assert held.last_heard > 0
        assert desk.ask(desk.cache.release, release(lease, 7)).code == "NOT_FOUND", "it is carried out all the same"


async def test_silence_counts_only_while_the_daemon_listens() -> None:
    async with Desk() as desk:
        lease = desk.rig.core.ledger.leases[desk.lease()]
        lease.last_heard = desk.node.now() - 4000.0
        desk.node.excuse(3999.0, 1.0)
        assert desk.node.now() - lease.last_heard < 60.0, "the daemon was stopped for nearly all of it"
        desk.node.excuse(0.5, 1.0)
        desk.node.excuse(10_000.0, 1.0)
        assert lease.last_heard <= desk.node.now()


# -- defects ---------------------------------------------------------------------------------------------------


async def test_a_defect_is_internal_logged_counted_and_told_again(caplog: pytest.LogCaptureFixture) -> None:
    async with Desk() as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        desk.break_ledger(lease, 1)
        with caplog.at_level(logging.WARNING, "cachesvc"):
            broken = desk.ask(desk.cache.release, release(lease, 1, request_id=5))
        assert broken.code == INTERNAL
        said = {record.getMessage(): vars(record)["fields"] for record in caplog.records}
        assert said["call_broke"] == {"method": "CacheService/Release", "model": 1}
        assert said["model_distrusted"]["model"] == 1
        assert "LedgerBroken" in said["model_distrusted"]["reason"]
        assert desk.rig.core.counters["calls_broken"] == 1
        assert desk.ask(desk.cache.release, release(lease, 1, request_id=5)) == broken
        assert desk.ask(desk.cache.release, release(lease, 2, request_id=5)).code == "INVALID", "another request"
        assert desk.rig.core.counters["calls_broken"] == 1


async def test_a_model_that_met_a_defect_is_not_served_until_it_is_trusted_again() -> None:
    async with Desk() as desk:
        lease, neighbour = desk.lease("a"), desk.lease("b")
        desk.fill(lease, 1, "ab")
        desk.break_ledger(lease, 1)
        assert desk.ask(desk.cache.release, release(lease, 1)).code == INTERNAL
        for refused in (
            desk.ask(desk.cache.match, match(neighbour, 1, "a")),
            desk.steps(neighbour),
            desk.ask(desk.leases.open, lease_pb2.OpenRequest(model_id=1, process_token=b"process-b")),
        ):
            assert refused.code == "UNAVAILABLE"
            assert "out of service" in refused.message
        assert desk.ask(desk.leases.keep_alive, beat(lease)).lease_id == lease, "its engines keep what they hold"
        closed = desk.ask(desk.leases.close, lease_pb2.CloseRequest(lease_id=neighbour))
        assert isinstance(closed, lease_pb2.CloseResponse)
        desk.node.trust(1)
        assert isinstance(desk.ask(desk.cache.match, match(lease, 2, "a")), cache_pb2.MatchResponse)


async def test_a_landing_that_breaks_wakes_those_who_wait_and_takes_the_model_out_of_service() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        ticket = desk.swap_out(lease, 1)
        waiting = desk.ask(desk.cache.allocate, allocate(lease, 1, 3))
        desk.rig.core.ledger.tickets.running[ticket].moves[0].own[0] = 1 << 20
        await desk.land(ticket)
        assert (await waiting).code == "UNAVAILABLE"
        assert desk.rig.model.suspect


# -- the end of a daemon, and what another one left ---------------------------------------------------------------


async def test_a_daemon_that_stops_says_so_to_those_who_wait_and_those_who_come() -> None:
    async with Desk() as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        ticket = desk.swap_out(lease, 1)
        wait = cache_pb2.WaitTicketsRequest(lease_id=lease, tickets=[ticket], wait_ms=60_000)
        waiting = [desk.ask(desk.cache.wait_tickets, wait), desk.ask(desk.cache.allocate, allocate(lease, 1, 3))]
        waiting.append(desk.steps(lease, cache_pb2.StepOperation(allocate=allocate("", 1, 3))))
        await turns()
        desk.dispatcher.stop()
        tickets, single, step = [await each for each in waiting]
        assert (tickets.code, single.code) == ("UNAVAILABLE", "UNAVAILABLE")
        assert step.results[0].error.code == "UNAVAILABLE"
        assert desk.ask(desk.cache.match, match(lease, 2, "a")).code == "UNAVAILABLE"
        assert desk.ask(desk.leases.keep_alive, beat(lease)).code == "UNAVAILABLE"
        assert desk.admission.waits.held == 0


async def test_a_lease_of_an_earlier_daemon_is_told_to_be_lost() -> None:
    async with Desk() as desk:
        desk.rig.core.new_name = lambda: lease_name(desk.node.epoch)
        own, other, unknown = desk.lease(), lease_name(0xD), lease_name(0xE)
        assert len(own) <= 64
        assert own[:12] != unknown[:12], "what readers see of it tells leases apart"
        for name, code in ((other, "LEASE_LOST"), (unknown, "NOT_FOUND"), ("nonsense-1", "NOT_FOUND")):
            assert desk.ask(desk.cache.match, match(name, 1, "a")).code == code
            assert desk.ask(desk.leases.keep_alive, beat(name)).code == code
            assert desk.steps(name).code == code
        closed = desk.ask(desk.leases.close, lease_pb2.CloseRequest(lease_id=other))
        assert isinstance(closed, lease_pb2.CloseResponse), "it ended with its daemon"
        assert desk.ask(desk.leases.close, lease_pb2.CloseRequest(lease_id=unknown)).code == "NOT_FOUND"
        assert resolve(desk.rig.core.ledger, own, 0.0).lease.id == own


# -- events --------------------------------------------------------------------------------------------------


async def test_each_call_is_counted_once_by_its_outcome() -> None:
    watch = CallWatch()
    names = ("Match", "Allocate", "Release", "Step", "WaitTickets", "Swap")
    watch.know(f"CacheService/{name}" for name in names)
    async with Desk(watch=watch) as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        ticket = desk.swap_out(lease, 1)
        waiting = desk.ask(desk.cache.allocate, allocate(lease, 1, 3))
        given_up = desk.ask(desk.cache.allocate, allocate(lease, 1, 3))
        given_up.cancel()
        await desk.land(ticket)
        await waiting
        desk.ask(desk.cache.release, release(lease, 9))
        desk.steps(lease, cache_pb2.StepOperation(release=release("", 1)), cache_pb2.StepOperation())
        await turns()
    told = {(name.partition("/")[2], code): count for (name, code), count in watch.codes.items()}
    assert told == {
        ("Match", "OK"): 1,
        ("Allocate", "OK"): 1,
        ("Allocate", "CONFLICT"): 1,
        ("Allocate", "CANCELLED"): 1,
        ("Swap", "OK"): 1,
        ("Release", "NOT_FOUND"): 1,
        ("Step", "OK"): 1,
    }
    assert sum(watch.seconds["CacheService/Allocate"].counts) == 3
    assert desk.cache.operations == {("release", "OK"): 1, ("none", "INVALID"): 1}


async def test_a_model_that_the_caller_calls_by_another_namespace_is_not_found() -> None:
    """Numbers are given anew after a restart: an old registration must not open a lease on another model."""
    async with Desk() as desk:
        desk.lease("b")
        model = desk.node.core.ledger.models[1]
        tries = ((model.namespace, True), (b"", True), (bytes(32), False), (b"x", False))
        for request_id, (namespace, is_right) in enumerate(tries, 7):
            asked = lease_pb2.OpenRequest(
                model_id=1, process_token=b"process-b", namespace=namespace, request_id=request_id
            )
            answer = desk.ask(desk.leases.open, asked)
            if is_right:
                assert isinstance(answer, lease_pb2.OpenResponse)
            else:
                assert (answer.code, "register it first" in answer.message) == ("NOT_FOUND", True)


# -- memory of what waits --------------------------------------------------------------------------------------


async def test_what_waiting_calls_hold_counts_as_their_process_holds_it_until_they_end() -> None:
    rig = rig_of(one_group(), device=(16,), host=(32,))
    rig.core.limits = replace(rig.core.limits, key_bytes_per_process=64 + 7 * LONG // 2)
    async with Desk(rig) as desk:
        process_arrived(rig.core, TOKEN + b"other", 2, 1)
        greedy, other = desk.lease("greedy"), desk.lease("other")
        for lease in (greedy, other):
            desk.fill(lease, 1, "ab")
        before = dict(rig.core.ledger.key_bytes)
        tickets = [desk.swap_out(lease, 1) for lease in (greedy, other)]
        waiting = [desk.ask(desk.cache.publish, long_publish(greedy)) for _ in range(3)]
        assert all(isinstance(each, asyncio.Future) for each in waiting)
        refused = desk.ask(desk.cache.publish, long_publish(greedy))
        assert (refused.code, "calls that wait" in refused.message) == ("LIMIT", True)
        short = desk.ask(desk.cache.allocate, allocate(greedy, 1, 3))
        assert isinstance(short, asyncio.Future), "what holds next to nothing still waits"
        beside = desk.ask(desk.cache.publish, long_publish(other))
        assert isinstance(beside, asyncio.Future), "another process has its own limit"
        held = waiting.pop()
        held.cancel()
        await turns()
        again = desk.ask(desk.cache.publish, long_publish(greedy))
        assert isinstance(again, asyncio.Future), "a call that was given up holds nothing"
        for ticket in tickets:
            await desk.land(ticket)
        await asyncio.wait([*waiting, again, short, beside])
        assert rig.core.ledger.key_bytes == before


async def test_a_step_whose_operations_wait_is_charged_whole_and_refuses_them_alone() -> None:
    rig = rig_of(one_group(), device=(16,), host=(32,))
    rig.core.limits = replace(rig.core.limits, key_bytes_per_process=64 + 3 * LONG // 2)
    async with Desk(rig) as desk:
        lease = desk.lease()
        desk.fill(lease, 1, "ab")
        before = dict(rig.core.ledger.key_bytes)
        ticket = desk.swap_out(lease, 1)
        operation = cache_pb2.StepOperation(publish=long_publish(""))
        first, second = desk.steps(lease, operation), desk.steps(lease, operation)
        assert isinstance(first, asyncio.Future)
        if isinstance(second, asyncio.Future):
            await turns()
            second = second.result()
        [result] = second.results
        assert result.error.code == "LIMIT"
        await desk.land(ticket)
        await first
        assert rig.core.ledger.key_bytes == before


def long_publish(lease: str) -> cache_pb2.PublishRequest:
    return cache_pb2.PublishRequest(lease_id=lease, sequence_id=1, keys=bytes(range(128)) * 32)


LONG = COPIES_HELD * (long_publish("").ByteSize() - FREE_BYTES)
"""Bytes of memory that such a publish holds while it waits, but for its lease's name."""
