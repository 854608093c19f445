"""Buckets, shares of the calls in flight, and budgets, without a daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc
import pytest
from kvcache.v1 import admin_pb2

from cachesvc.model.errors import InvalidRequest, QuotaExceeded
from cachesvc.service.access.auth import EVERYONE, LOOPBACK, Caller, Scope, scopes_of, set_caller
from cachesvc.service.access.quota import NO_QUOTA, Bucket, Meter, Quota, Quotas, parse_quota
from cachesvc.service.calls import CallGate
from tests.fuzz.target import CallContext, Target, list_rpcs


def test_a_bucket_saves_up_one_second_and_no_more() -> None:
    bucket = Bucket(10)
    assert [bucket.take(1, 100.0) for _ in range(10)] == [0.0] * 10
    assert bucket.take(1, 100.0) == pytest.approx(0.1)
    assert bucket.take(1, 100.05) == pytest.approx(0.05)
    assert bucket.take(1, 100.15) == 0.0
    assert [bucket.take(1, 500.0) for _ in range(10)] == [0.0] * 10
    assert bucket.take(1, 500.0) > 0


def test_what_is_larger_than_a_bucket_goes_through_a_full_one_and_leaves_a_debt() -> None:
    bucket = Bucket(10)
    assert bucket.take(25, 100.0) == 0.0
    assert bucket.take(1, 101.0) == pytest.approx(0.6)
    assert bucket.take(1, 101.7) == 0.0


def test_a_meter_says_when_to_come_again() -> None:
    meter = Meter("a", Quota(calls_per_second=1, operations_per_second=4))
    meter.admit(1.0)
    with pytest.raises(QuotaExceeded, match=r"calls_per_second of tenant 'a': asked more often.*try again in 0\.500 s"):
        meter.admit(1.5)
    meter.admit_operations(4, 1.0)
    with pytest.raises(QuotaExceeded, match="operations_per_second") as refused:
        meter.admit_operations(4, 1.25)
    assert (refused.value.limit, refused.value.got, meter.refused) == (4, None, 2)


@pytest.mark.parametrize("table", [{"leases": -1}, {"leases": "many"}, {"leases": True}, {"unknown": 1}, 7])
def test_a_quota_that_cannot_be_is_refused(table: Any) -> None:
    with pytest.raises(InvalidRequest):
        parse_quota(table, "here")


def test_sizes_of_quotas_take_units() -> None:
    assert parse_quota({"device_bytes": "2GiB", "leases": 3}, "here") == Quota(device_bytes=2 << 30, leases=3)


async def hold(gate: CallGate, who: Caller, until: asyncio.Event) -> CallContext:
    """One call of ``who`` that lasts until the event."""
    set_caller(who)
    context: Any = CallContext()

    async def serve() -> admin_pb2.VerifyResponse:
        await until.wait()
        return admin_pb2.VerifyResponse()

    await asyncio.gather(gate.serve(context, serve), return_exceptions=True)
    assert isinstance(context, CallContext)
    return context


async def test_a_tenant_alone_leaves_room_and_two_share() -> None:
    target = Target()
    gate = CallGate(8, Quotas(target.core, lambda _: NO_QUOTA))
    a, b = (Caller(name, frozenset({Scope.ENGINE}), name) for name in "ab")
    until = asyncio.Event()
    first = [asyncio.create_task(hold(gate, a, until)) for _ in range(8)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert gate.in_flight == 6, "three quarters of 8; two were refused"
    second = [asyncio.create_task(hold(gate, b, until)) for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert gate.in_flight == 8, "the newcomer gets in"
    third = asyncio.create_task(hold(gate, a, until))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    until.set()
    codes = [(await task).code for task in (*first, *second, third)]
    assert codes.count(grpc.StatusCode.OUT_OF_RANGE) == 3
    assert [(await task).code for task in second] == [grpc.StatusCode.OK] * 2
    assert gate.in_flight == 0
    again: Callable[[], Awaitable[CallContext]] = partial(hold, gate, a, until)
    assert [(await again()).code for _ in range(9)] == [grpc.StatusCode.OK] * 9, "nothing stays counted"


async def test_a_quota_of_calls_in_flight_is_told_by_name() -> None:
    target = Target()
    gate = CallGate(8, Quotas(target.core, lambda _: Quota(calls_in_flight=1)))
    until = asyncio.Event()
    first = asyncio.create_task(hold(gate, EVERYONE, until))
    await asyncio.sleep(0)
    second = await hold(gate, EVERYONE, until)
    assert second.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "quota calls_in_flight of the shared tenant: 2 is more than the limit of 1" in second.details
    until.set()
    assert (await first).code is grpc.StatusCode.OK


def test_every_rpc_has_its_scope_and_what_no_rule_names_is_closed() -> None:
    reading = {name for name, rpc in list_rpcs().items() if LOOPBACK.may(scopes_of(rpc.path))}
    assert {"GetStatus", "ListModels", "ListBlocks", "GetTree", "Verify", "ListTenants"} <= reading
    assert not reading & {"Register", "Attach", "Open", "Match", "Step", "Drain", "Evict", "Publish"}
    engine = Caller("engine", frozenset({Scope.ENGINE}), "a")
    working = {name for name, rpc in list_rpcs().items() if engine.may(scopes_of(rpc.path))}
    assert not working & {"GetStatus", "ListLeases", "Drain", "Evict"}
    assert all(EVERYONE.may(scopes_of(rpc.path)) for rpc in list_rpcs().values())
    for closed in (
        "/kvcache.v1.NewService/Do",
        "/kvcache.v1.AdminService/Forget",
        "/grpc.channelz.v1.Channelz/GetServers",
    ):
        assert scopes_of(closed) == (Scope.ADMIN,)
    assert scopes_of("/grpc.health.v1.Health/Check") == ()


def test_a_caller_sees_its_tenant_or_all() -> None:
    assert Caller("x", frozenset({Scope.READ}), "a").sees("a")
    assert not Caller("x", frozenset({Scope.READ}), "a").sees("")
    assert Caller("x", frozenset({Scope.READ})).sees("a")
    assert Caller("x", frozenset({Scope.ADMIN}), "a").sees("b")
